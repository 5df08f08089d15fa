"""Read-only view of a study, for everything that is printed, drawn or reported."""

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
    """Read a study from its directory; ``last`` is the newest."""
    from yunlu.tuning.records import open_study  # noqa: PLC0415 (imports Optuna: slow)

    return open_study(name).view()
