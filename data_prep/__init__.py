"""Commands that prepare data, score sentences and encode sets; `data_prep.options` declares them."""
