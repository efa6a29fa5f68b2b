"""Masks tokens of sentences for masked language modelling."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int

from medclip_dcl.networks.masked_language import IGNORED

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Their ids are 0, 1, 2, 3, 4, as in CXR-BERT."""

# Of the chosen tokens 80% become [MASK], 10% another token, 10% stay (Devlin et al., NAACL 2019).
_TO_MASK, _TO_RANDOM = 0.8, 0.1


class Masking:
    """Chooses tokens to predict and masks them (Devlin et al., NAACL 2019, section 3.1 and appendix A.1).

    Of a sentence's tokens, [CLS] and [SEP] excluded, the share `probability` is chosen (at least one); of these 80%
    become [MASK], 10% a random token that is not a special one, 10% stay as they are.
    """

    def __init__(self, vocabulary: Mapping[str, int], probability: float) -> None:
        special = {vocabulary[piece] for piece in SPECIAL_TOKENS if piece in vocabulary}
        ordinary = [number for number in sorted(vocabulary.values()) if number not in special]
        self.probability, self.mask_id, self.ordinary = probability, vocabulary["[MASK]"], np.array(ordinary)

    def __call__(
        self, tokens: Int[np.ndarray, " token"], generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " token"], Int[np.ndarray, " token"]]:
        """Masked copy and labels (-100 where nothing is to be predicted) of a sentence with [CLS] and [SEP]."""
        count = min(len(tokens) - 2, max(1, round(self.probability * (len(tokens) - 2))))
        chosen = 1 + generator.permutation(len(tokens) - 2)[:count]
        fate = generator.random(count)
        random_pieces = self.ordinary[generator.integers(len(self.ordinary), size=count)]
        replaced = np.where(fate < _TO_MASK + _TO_RANDOM, random_pieces, tokens[chosen])
        masked, labels = tokens.copy(), np.full_like(tokens, IGNORED)
        masked[chosen] = np.where(fate < _TO_MASK, self.mask_id, replaced)
        labels[chosen] = tokens[chosen]
        return masked, labels
