"""Run folders, checkpoints, and callbacks of training."""
