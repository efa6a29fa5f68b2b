"""The image-text network: encoders, similarity and tokenizer in one nn.Module that describes and rebuilds itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from medclip_dcl.common.errors import UserError
from medclip_dcl.common.weight_files import IMAGE_TEXT
from medclip_dcl.networks.bert_folder import model_fingerprint
from medclip_dcl.networks.described import Encoded, ImageInput, ImageNetwork, ImageScale
from medclip_dcl.networks.image_encoder import Features, RegionEncoder, Regions
from medclip_dcl.networks.similarity import Logits, LSENonLocal, Sentences, Similarity
from medclip_dcl.networks.text_encoder import SentenceEncoder
from medclip_dcl.networks.transformer import Lengths, Tokens

_ELEMENTS_PER_CHUNK = 2**24
"""Region-sentence cosines computed at a time; bounds the memory whatever the number of sentences."""


class ImageTextNetwork(ImageNetwork):
    """Image regions and sentences in one space, and the logits of their pairs: an image-text model.

    Args:
        image_encoder: images to a map of region embeddings.
        text_encoder: sentences to embeddings of the same size.
        similarity: logits from regions and sentences; default LSE+NL.
        image_size: side of the network's input for a whole image in evaluation, in pixels.
        mean: per channel, subtracted from images in [0, 1]; None for the image encoder's.
        std: per channel; divides what remains.
        geometry: how images were fitted to a square in training, see `medclip_dcl.pictures.geometry`.
        prepared_size: to which they were fitted before they were scaled to `image_size`; None for the same.
        crop_size: side of the random crops in training, in pixels; None if unknown.
        label_head: findings of a linear layer on the images' vectors, see `set_label_head`; None for no such layer.

    Raises:
        UserError: encoders (or the similarity) of different embedding sizes; an unknown geometry; a similarity that
            does not use the global vector of the image encoder.
    """

    kind = IMAGE_TEXT
    parts = {**ImageNetwork.parts, "text_encoder": SentenceEncoder, "similarity": Similarity}

    def __init__(
        self,
        image_encoder: RegionEncoder,
        text_encoder: SentenceEncoder,
        similarity: Similarity | None = None,
        image_size: int = 512,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        geometry: str = "stretch",
        prepared_size: int | None = None,
        crop_size: int | None = None,
        label_head: Sequence[str] | None = None,
    ) -> None:
        super().__init__(image_encoder, image_size, mean, std, geometry, prepared_size, crop_size)
        self.text_encoder = text_encoder
        self.similarity = LSENonLocal(dim=image_encoder.dim) if similarity is None else similarity
        sizes = {"image_encoder": image_encoder.dim, "text_encoder": text_encoder.dim}
        sizes["similarity"] = getattr(self.similarity, "dim", image_encoder.dim)
        if len(set(sizes.values())) > 1:
            raise UserError(f"dim: expected equal embedding sizes, found {sizes}")
        if image_encoder.has_global_vector and not self.similarity.uses_global_vector:
            raise UserError(
                f"image_encoder.global_vector: {type(self.similarity).__name__} compares regions alone; set it to "
                "false, or similarity to medclip_dcl.networks.GlobalCosine"
            )
        self.label_findings: tuple[str, ...] = ()
        self.label_head: nn.Linear | None = None
        self.set_label_head(label_head)

    @property
    def stride(self) -> int:
        return self.image_encoder.stride

    def set_label_head(self, findings: Sequence[str] | None) -> None:
        """Set the linear layer with a logit for each finding, which starts at 0 unless it is there; None for none."""
        if (findings := tuple(findings or ())) != self.label_findings:
            self.label_findings = findings
            head = nn.Linear(self.image_encoder.dim, len(findings)).to(self.mean) if findings else None
            for parameter in () if head is None else head.parameters():
                nn.init.zeros_(parameter)
            self.label_head = head

    def label_logits(self, encoded: Encoded) -> Float[Tensor, "image finding"]:
        """Logits of the label head's findings, linear in `image_vectors`."""
        assert self.label_head is not None, "set_label_head"
        return self.label_head(self.image_vectors(encoded))

    def encoders_fingerprint(self) -> dict[str, str]:
        """Identity of what each encoder computes before its projection: its weights and settings."""
        image, text = self.image_encoder, self.text_encoder
        of_images = {**image.trunk_settings(), **self._normalisation()}
        return {
            "image_encoder": model_fingerprint(image.trunk, of_images),
            "text_encoder": model_fingerprint(text.transformer, text.transformer_settings()),
        }

    def image_features(self, images: ImageInput, image_scale: ImageScale = None) -> Features:
        """Input of `project`, from grey levels or images in [0, 1].

        Where the image encoder has a global vector, a further last row of regions repeats it.
        """
        if not self.image_encoder.has_global_vector:
            return self.image_encoder.features(self.normalised(images, image_scale))
        shown = self.normalised(images, image_scale)
        features, vector = self.image_encoder.features_and_global(shown)
        row = vector[:, :, None, None].expand(-1, -1, 1, features.shape[3])
        return torch.cat([features, row], dim=2)

    def project(self, features: Features) -> Encoded:
        """Images in the common space from `image_features`."""
        found = self.image_encoder.project(features)
        if not self.image_encoder.has_global_vector:
            return Encoded(found)
        return Encoded(found[:, :, :-1], found[:, :, -1, 0])

    def encode(self, images: ImageInput, image_scale: ImageScale = None) -> Encoded:
        """Images in the common space, from grey levels or images in [0, 1]."""
        if not self.image_encoder.has_global_vector:
            return Encoded(self.feature_map(images, image_scale))
        return self.project(self.image_features(images, image_scale))

    @property
    def scale(self) -> float:
        """gamma^2."""
        return self.similarity.gamma2.item()

    def logits(self, encoded: Encoded, sentences: Sentences) -> Logits:
        """Logits of all pairs of encoded images and sentences."""
        vector = () if encoded.global_vector is None else (encoded.global_vector,)
        return self.similarity(self.regions(encoded.feature_map), sentences, *vector)

    def scores(self, encoded: Encoded, sentences: Sentences) -> Logits:
        """Scores in [-1, 1] of all pairs, on the CPU: the logits divided by gamma^2, some sentences at a time."""
        count, _, *grid = encoded.feature_map.shape
        rows = max(1, _ELEMENTS_PER_CHUNK // max(1, count * math.prod(grid)))
        parts = [self.logits(encoded, part) for part in sentences.split(rows)]
        return (torch.cat(parts) / self.similarity.gamma2).float().cpu()

    def feature_map(self, images: ImageInput, image_scale: ImageScale = None) -> Regions:
        """Projected regions in their places, from grey levels or images in [0, 1]. Not normalised to length 1."""
        return self.image_encoder(self.normalised(images, image_scale))

    def regions(self, feature_map: Regions) -> Float[Tensor, "image region dim"]:
        """The regions of a feature map, row by row."""
        return feature_map.flatten(2).transpose(1, 2)

    def encode_sentences(self, tokens: Tokens, lengths: Lengths) -> Sentences:
        """Sentence embeddings; not normalised to length 1."""
        return self.text_encoder(tokens, lengths)

    def forward(
        self, images: ImageInput, tokens: Tokens, lengths: Lengths, image_scale: ImageScale = None
    ) -> Logits:
        """Logits of every sentence with every image."""
        return self.logits(self.encode(images, image_scale), self.encode_sentences(tokens, lengths))

    def tokenize(self, texts: Sequence[str]) -> tuple[Tokens, Lengths]:
        """Padded token ids and the number of tokens in each sentence, on the CPU."""
        return pad_tokens(self.text_encoder.tokenize(texts))

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str], batch_size: int = 256) -> Sentences:
        """Sentence embeddings of texts, without gradient, in batches; not normalised to length 1."""
        if not texts:
            return self.mean.new_zeros((0, self.text_encoder.dim))
        ids = self.text_encoder.tokenize(texts)
        # By length: little is padded.
        order = torch.tensor([len(row) for row in ids]).argsort(stable=True)
        parts = []
        for places in order.split(batch_size):
            tokens, lengths = pad_tokens([ids[place] for place in places.tolist()])
            parts.append(self.encode_sentences(tokens.to(self.mean.device), lengths.to(self.mean.device)))
        return torch.cat(parts)[order.argsort().to(self.mean.device)]

    def config(self) -> dict[str, Any]:
        return {**super().config(), "label_head": list(self.label_findings) or None}


def pad_tokens(ids: Sequence[Sequence[int]]) -> tuple[Tokens, Lengths]:
    """Token ids of sentences as one zero-padded tensor, and their lengths."""
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    tokens = torch.zeros((len(ids), max((len(row) for row in ids), default=0)), dtype=torch.int64)
    for row, values in enumerate(ids):
        tokens[row, : len(values)] = torch.tensor(values)
    return tokens, lengths
