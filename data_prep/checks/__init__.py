"""Checks of a prepared set; each returns its problems: the defect, its number of cases, and the first of them."""
