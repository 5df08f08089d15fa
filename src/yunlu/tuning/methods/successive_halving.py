"""Milestones at which trials are compared, and promotion from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from yunlu.tuning.methods.trial_table import TrialTable

    Indices = NDArray[np.intp]
    Mask = NDArray[np.bool_]


def find_milestones(rungs: int, first: float, growth: float) -> list[int]:
    """Rungs at which trials are compared, growing geometrically."""
    milestones = [max(round(first * rungs), 1)]
    while milestones[-1] < rungs:
        milestones.append(min(max(milestones[-1] + 1, round(milestones[-1] * growth)), rungs))
    return milestones


def next_milestone(milestones: list[int], rung: int) -> int:
    """The first one after a rung."""
    return next(milestone for milestone in milestones if milestone > rung)


def rank(table: TrialTable, rows: Indices, milestones: list[int]) -> tuple[Indices, Indices]:
    """Number of better trials at the last milestone that each has passed, and of how many."""
    at = np.searchsorted(milestones, table.rungs[rows], side="right") - 1
    columns = table.ladder[:, np.maximum(at, 0)]
    own = columns[rows, np.arange(len(rows))]
    earlier = np.arange(len(columns))[:, None] < rows[None, :]
    better = (columns < own) | ((columns == own) & earlier)
    passed = at >= 0
    return better.sum(axis=0) * passed, np.isfinite(columns).sum(axis=0) * passed


def may_promote(table: TrialTable, rows: Indices, milestones: list[int], halving: float) -> Mask:
    """Whether each is among the trials of its milestone that may continue to the next."""
    better, of = rank(table, rows, milestones)
    known = np.array(milestones, dtype=np.float64)
    at = np.clip(np.searchsorted(milestones, table.rungs[rows], side="right") - 1, 0, None)
    longer = known[np.minimum(at + 1, len(known) - 1)] / known[at]
    return better < np.maximum(of * longer ** -np.log2(halving), 1.0)
