"""A study as others see it: all that is printed, drawn or reported of one comes from here."""

from __future__ import annotations

from yunlu.tuning.facts import (
    Direction,
    StudyState,
    StudyView,
    TrialFacts,
    best_point,
    find_best,
    find_front,
)

__all__ = [
    "Direction",
    "StudyState",
    "StudyView",
    "TrialFacts",
    "best_point",
    "find_best",
    "find_front",
    "read_view",
]


def read_view(name: str) -> StudyView:
    """A study as it stands now, read from its directory; ``last`` is the newest."""
    from yunlu.tuning.records import open_study  # noqa: PLC0415 (imports Optuna: slow)

    return open_study(name).view()
