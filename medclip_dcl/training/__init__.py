"""What watches over training: averaged weights, throughput, the stop at numbers that are not finite, loggers."""

from medclip_dcl.training.averaging import AveragedWeights
from medclip_dcl.training.finite import FiniteCheck, NonFiniteError
from medclip_dcl.training.last_epoch import LastEpoch
from medclip_dcl.training.order import in_order
from medclip_dcl.training.throughput import Throughput

__all__ = ["AveragedWeights", "FiniteCheck", "LastEpoch", "NonFiniteError", "Throughput", "in_order"]
