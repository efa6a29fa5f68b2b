"""Readers of public sets with labels and without reports, for ``python -m data_prep.public``."""
