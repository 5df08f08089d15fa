"""Local-update methods: workers step on their own, and average weights now and then."""

from yunlu.training.communication.local.averaging import WeightAveraging
from yunlu.training.communication.local.rules import METHODS, LocalRules

__all__ = ["METHODS", "LocalRules", "WeightAveraging"]
