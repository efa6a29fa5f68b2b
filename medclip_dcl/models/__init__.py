"""LightningModules: thin, around the network, the objectives and the scoring."""
