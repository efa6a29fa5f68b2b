"""LightningDataModules and transforms."""
