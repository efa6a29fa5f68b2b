"""The classifier's network: an image encoder and a linear layer in one nn.Module that describes and rebuilds itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.files import digest
from medclip_dcl.common.weight_files import CLASSIFIER
from medclip_dcl.metrics.linear_probe import standardisation
from medclip_dcl.networks.described import Encoded, ImageInput, ImageNetwork, ImageScale
from medclip_dcl.networks.image_encoder import RegionEncoder


class FindingNetwork(ImageNetwork):
    """A classifier: a logit for each finding, linear in the image's features.

    These are their mean over the regions, or their global vector.

    The features are those before the projection into the common space, on which linear probes of contrastive models do
    better (Chen et al., SimCLR, ICML 2020, section 4.2), shifted and scaled by `feature_mean` and `feature_std`, which
    `standardise` sets. The linear layer starts at 0.

    Args:
        image_encoder: images to regions; its projection is kept, but not used.
        findings: names, one logit each; the other arguments are those of `ImageTextNetwork`.
        blank: what a finding without a label counts as in the evaluation of the training, see FindingClassification.
    """

    kind = CLASSIFIER

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(
        self,
        image_encoder: RegionEncoder,
        findings: Sequence[str],
        image_size: int = 512,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        geometry: str = "stretch",
        prepared_size: int | None = None,
        crop_size: int | None = None,
        blank: str = "ignore",
    ) -> None:
        super().__init__(image_encoder, image_size, mean, std, geometry, prepared_size, crop_size)
        if not findings or len(set(findings)) < len(findings):
            raise UserError(
                f"model.findings: expected distinct names, found {findings}; null takes CheX5's five"
            )
        self.findings, self.blank = tuple(findings), blank
        self.head = nn.Linear(image_encoder.feature_dim, len(self.findings))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("feature_mean", torch.zeros(image_encoder.feature_dim))
        self.register_buffer("feature_std", torch.ones(image_encoder.feature_dim))

    def encode(self, images: ImageInput, image_scale: ImageScale = None) -> Encoded:
        """Features of the encoder before its projection, from grey levels or images in [0, 1]."""
        shown = self.normalised(images, image_scale)
        if self.image_encoder.has_global_vector:
            return Encoded(*self.image_encoder.features_and_global(shown))
        return Encoded(self.image_encoder.features(shown))

    def features(self, images: ImageInput, image_scale: ImageScale = None) -> Float[Tensor, "image channel"]:
        """Mean over the regions of the encoder's features, or their global vector."""
        return self.image_vectors(self.encode(images, image_scale))

    def classify(self, features: Float[Tensor, "image channel"]) -> Float[Tensor, "image finding"]:
        return self.head((features - self.feature_mean) / self.feature_std)

    def forward(self, images: ImageInput, image_scale: ImageScale = None) -> Float[Tensor, "image finding"]:
        """Logits of every finding; above 0 if the finding is more likely than not."""
        return self.classify(self.features(images, image_scale))

    def settings_fingerprint(self) -> dict[str, str]:
        return super().settings_fingerprint() | {"findings": digest(json.dumps(self.findings).encode())}

    @property
    def is_standardised(self) -> bool:
        return bool(self.feature_mean.any()) or not bool((self.feature_std == 1).all())

    def standardise(self, features: Float[Tensor, "image channel"]) -> None:
        """Normalise each channel of these features to mean 0 and deviation 1, see `linear_probe.standardisation`."""
        mean, deviation = standardisation(features)
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(deviation)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "findings": list(self.findings), "blank": self.blank}
