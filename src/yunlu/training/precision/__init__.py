"""Mixed precision with FP32 master weights: autocast, loss scaling, adaptive precision."""

from yunlu.training.precision.adaptive import PrecisionChange
from yunlu.training.precision.autocast import Precision, check_precision

__all__ = ["Precision", "PrecisionChange", "check_precision"]
