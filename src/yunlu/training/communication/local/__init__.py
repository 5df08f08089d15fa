"""Methods in which each worker updates its own weights, and the workers meet rarely."""

from yunlu.training.communication.local.averaging import WeightAveraging
from yunlu.training.communication.local.rules import METHODS, LocalRules

__all__ = ["METHODS", "Averaging", "LocalRules"]
