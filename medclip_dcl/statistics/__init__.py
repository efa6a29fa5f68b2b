"""Bootstrap draws of patients, and comparisons of runs, trainings and groups."""
