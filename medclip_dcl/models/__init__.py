"""LightningModules: thin, around the networks and the objectives."""

from medclip_dcl.models.image_only import ImageOnlyModel

__all__ = ["ImageOnlyModel"]
