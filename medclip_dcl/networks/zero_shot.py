"""Zero-shot score of findings by positive and negative prompts (SSD, section 3.2)."""

from __future__ import annotations

from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from medclip_dcl.common.errors import check_choice
from medclip_dcl.common.findings import CHEX5, Ensemble, PromptSource, ensemble_used, read_prompts
from medclip_dcl.networks.described import Encoded
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import mean_directions


class ZeroShot:
    """Prompts of findings, and the scores of images by them.

    Args:
        prompts: finding -> (negative, positive), see `findings.read_prompts`; None for CheX5's.
        ensemble: of several prompts a side: "scores", the mean of their scores; "embeddings", the score of the mean of
            their normalised embeddings, as in CLIP (choice, not from the paper).
        owner: names the arguments in an error.
    """

    def __init__(
        self, prompts: PromptSource | None = None, ensemble: Ensemble = "scores", owner: str = "prompts"
    ) -> None:
        self.prompts = read_prompts(CHEX5 if prompts is None else prompts, owner)
        check_choice(f"{owner}.ensemble", ensemble, get_args(Ensemble))
        self.ensemble = ensemble
        sides = [(side, finding, pair[side]) for side in (0, 1) for finding, pair in self.prompts.items()]
        self._sizes = [len(texts) for *_, texts in sides]
        self.wordings = [(side, finding, text) for side, finding, texts in sides for text in texts]
        """Side (0, the negative one, or 1), finding and text of each of `texts`."""
        self.texts = [text for *_, text in self.wordings]
        """Negative prompts of all findings, then positive ones."""
        self.owners = [f"a prompt of {finding}" for _, finding, _ in self.wordings]
        """Name of each text in an error."""

    def identity(self) -> dict[str, Any]:
        """Prompts and ensemble in plain values (JSON); the ensemble is None where each side is one prompt."""
        return {
            "prompts": {finding: [list(texts) for texts in pair] for finding, pair in self.prompts.items()},
            "ensemble": ensemble_used(self.prompts, self.ensemble),
        }

    def scores(
        self, network: ImageTextNetwork, encoded: Encoded, prompts: Float[Tensor, "prompt dim"]
    ) -> Float[Tensor, "image 2 finding"]:
        """Scores in [-1, 1] of images with each finding's negative and positive side, on the CPU.

        `prompts` are the sentence embeddings of `texts`.
        """
        if self.ensemble == "embeddings":
            by_side = network.scores(encoded, mean_directions(prompts, self._sizes))
        else:
            by_prompt = network.scores(encoded, prompts).split(self._sizes)
            by_side = torch.stack([part.mean(dim=0) for part in by_prompt])
        return by_side.T.unflatten(1, (2, -1))

    def differences(
        self, network: ImageTextNetwork, encoded: Encoded, prompts: Float[Tensor, "prompt dim"]
    ) -> Float[Tensor, "image finding"]:
        """Zero-shot scores, positive minus negative; times `network.scale` they are logits."""
        negative, positive = self.scores(network, encoded, prompts).unbind(dim=1)
        return positive - negative
