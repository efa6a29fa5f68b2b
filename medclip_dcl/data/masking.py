"""Masks tokens of sentences for masked language modelling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from medclip_dcl.networks.masked_language import IGNORED

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Their ids are 0, 1, 2, 3, 4, as in CXR-BERT."""

# Of the chosen tokens 80% become [MASK], 10% another token, 10% stay (Devlin et al., NAACL 2019).
_TO_MASK, _TO_RANDOM = 0.8, 0.1


class Masking:
    """Chooses tokens to predict and masks them (Devlin et al., NAACL 2019, section 3.1 and appendix A.1).

    Of a sentence's tokens, special ones excluded, the share `probability` is chosen (at least one); of these 80%
    become the mask token, 10% a random token that is not a special one, 10% stay as they are.

    Args:
        vocabulary: token -> id.
        probability: share of tokens to predict.
        special: special tokens.
        mask_token: one of them.
        around: number of special tokens before and after a sentence.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        probability: float,
        special: Sequence[str] = SPECIAL_TOKENS,
        mask_token: str = SPECIAL_TOKENS[-1],
        around: tuple[int, int] = (1, 1),
    ) -> None:
        others = {vocabulary[piece] for piece in special if piece in vocabulary}
        self.ordinary = np.array([number for number in sorted(vocabulary.values()) if number not in others])
        self.probability, self.mask_id, self.around = probability, vocabulary[mask_token], around

    def __call__(
        self, tokens: Int[np.ndarray, " token"], generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " token"], Int[np.ndarray, " token"]]:
        """Masked copy and labels (-100 where nothing is to be predicted) of a sentence with its special tokens."""
        length = len(tokens) - sum(self.around)
        count = min(length, max(1, round(self.probability * length)))
        chosen = self.around[0] + generator.permutation(length)[:count]
        fate = generator.random(count)
        random_pieces = self.ordinary[generator.integers(len(self.ordinary), size=count)]
        replaced = np.where(fate < _TO_MASK + _TO_RANDOM, random_pieces, tokens[chosen])
        masked, labels = tokens.copy(), np.full_like(tokens, IGNORED)
        masked[chosen] = np.where(fate < _TO_MASK, self.mask_id, replaced)
        labels[chosen] = tokens[chosen]
        return masked, labels
