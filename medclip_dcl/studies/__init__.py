"""Grids of trainings, and tests of models on sets: a command each, ``study`` and ``benchmark``."""
