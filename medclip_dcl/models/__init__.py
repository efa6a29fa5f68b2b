"""LightningModules: thin, around the network, the objectives and the scoring."""

from medclip_dcl.models.image_only import ImageOnlyModel

__all__ = ["ImageOnlyModel"]
