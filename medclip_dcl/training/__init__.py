"""Callbacks of training: checkpoints, averages, records, what is watched."""
