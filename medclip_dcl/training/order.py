"""The order of callbacks."""

from __future__ import annotations

from collections.abc import Iterable

from pytorch_lightning import Callback
from pytorch_lightning.callbacks import Checkpoint, EMAWeightAveraging, WeightAveraging

from medclip_dcl.errors import UserError
from medclip_dcl.training.last_epoch import LastEpoch
from medclip_dcl.training.throughput import Arrival, Throughput


def in_order(callbacks: Iterable[Callback]) -> list[Callback]:
    """Sort callbacks where the order matters; otherwise as given.

    - `Arrival` first and `Throughput` last: the time of other callbacks is not waiting for a batch.
    - Averaged weights after all evaluations, so that these have summarised before the weights are swapped back.
    - Then checkpoints, then `LastEpoch` (after a Timer).

    Raises:
        UserError: Lightning's EMAWeightAveraging, which spoils integer buffers; or several averages.
    """
    listed = list(callbacks)
    averages = [one for one in listed if isinstance(one, WeightAveraging)]
    if any(isinstance(one, EMAWeightAveraging) for one in averages):
        raise UserError(
            "trainer.callbacks: Lightning's EMAWeightAveraging also averages integer buffers, which moves the "
            "positions of a BERT; remove it and set ema_decay instead"
        )
    if len(averages) > 1:
        names = ", ".join(type(one).__name__ for one in averages)
        raise UserError(
            f"one average of the weights at most: found {names}; set ema_decay: null, or remove one"
        )
    return sorted(listed, key=_place)


def _place(callback: Callback) -> int:
    if isinstance(callback, Arrival):
        return -1
    kinds = (WeightAveraging, Checkpoint, LastEpoch, Throughput)
    return next((1 + place for place, kind in enumerate(kinds) if isinstance(callback, kind)), 0)
