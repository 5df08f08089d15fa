"""The race between trials: at which rungs they are compared, and who may go on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from yunlu.tuning.methods.trial_table import TrialTable

    Indices = NDArray[np.intp]
    Mask = NDArray[np.bool_]


def find_milestones(rungs: int, first: float, growth: float) -> list[int]:
    """The rungs at which trials are compared: the longer one has run, the farther apart."""
    milestones = [max(round(first * rungs), 1)]
    while milestones[-1] < rungs:
        milestones.append(min(max(milestones[-1] + 1, round(milestones[-1] * growth)), rungs))
    return milestones


def next_milestone(milestones: list[int], rung: int) -> int:
    """The first one after a rung."""
    return next(milestone for milestone in milestones if milestone > rung)


def rank(table: TrialTable, rows: Indices, milestones: list[int]) -> tuple[Indices, Indices]:
    """How many were better at the last station that each has passed, and of how many."""
    at = np.searchsorted(milestones, table.rungs[rows], side="right") - 1
    columns = table.ladder[:, np.maximum(at, 0)]
    own = columns[rows, np.arange(len(rows))]
    earlier = np.arange(len(columns))[:, None] < rows[None, :]
    better = (columns < own) | ((columns == own) & earlier)
    passed = at >= 0
    return better.sum(axis=0) * passed, np.isfinite(columns).sum(axis=0) * passed


def may_promote(table: TrialTable, rows: Indices, milestones: list[int], halving: float) -> Mask:
    """Whether each is among those of its station that may go on to the next."""
    better, of = rank(table, rows, milestones)
    known = np.array(milestones, dtype=np.float64)
    at = np.clip(np.searchsorted(milestones, table.rungs[rows], side="right") - 1, 0, None)
    longer = known[np.minimum(at + 1, len(known) - 1)] / known[at]
    return better < np.maximum(of * longer ** -np.log2(halving), 1.0)
