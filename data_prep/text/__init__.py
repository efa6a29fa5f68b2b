"""Report text: sections, sentences and their boundaries."""
