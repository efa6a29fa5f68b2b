"""Reports and comparisons of tested runs, made from run folders alone."""
