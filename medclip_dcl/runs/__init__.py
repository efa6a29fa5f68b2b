"""The run folder: its rules, checkpoint files, loggers, and the reading of saved results."""
