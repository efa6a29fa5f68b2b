"""Readers of public sets with labels and without reports, for ``medclip-dcl prepare public``."""
