"""From a release or a folder of images to the tables and images of a prepared set."""
