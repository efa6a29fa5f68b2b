"""Shared by the commands that run a language model over every sentence of a set."""
