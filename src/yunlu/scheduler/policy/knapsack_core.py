"""Exact solution of the core of a knapsack: dynamic programming over free devices of each group.

Few options survive the bound of the dual, and most jobs keep what the prices gave them. What
remains is decided over a grid of devices used of each kind: all of them where the pool is small,
else a window around the choice found so far (the balanced programming of Pisinger, "Budgeting with
bounded multiple-choice constraints", 1999).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_MOST_CELLS = 20_000
_MOST_WORK = 4_000_000
"""Limits on the cells of the grid, and on cells times options; a larger grid is narrowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChoices:
    """Jobs that are still undecided, each with the options left to it (a row per option)."""

    jobs: Ints
    """Whose option a row is; ascending."""
    worth: Floats
    load: Ints
    """Devices of each group it takes, rows x groups."""
    room: Ints
    """Devices of each group that these jobs can have."""
    reference: Ints
    """The row of each job in the best choice so far, which fits the room."""


def solve_core(rest: OpenChoices) -> Ints:
    """The row of each job in the best choice that fits the grid; at least as good as so far."""
    reach = _reach(rest)
    starts = np.flatnonzero(np.diff(rest.jobs, prepend=-1))
    ends = np.append(starts[1:], len(rest.jobs))
    base = rest.load[rest.reference]
    is_whole = reach >= rest.room
    # Counted from nothing where the whole room is in the grid, else from the reference.
    origin = np.where(is_whole, 0, base)
    ceiling = np.where(is_whole, rest.room, reach)
    floor = np.where(is_whole, 0, -reach)
    table = np.full(tuple(ceiling - floor + 1), -np.inf)
    table[tuple(-floor)] = 0.0
    picked: list[NDArray[np.int16]] = []
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        table, rows = _add_job(table, rest.worth[start:end], rest.load[start:end] - origin[at])
        picked.append(rows)
    spare = np.where(is_whole, rest.room, rest.room - base.sum(axis=0))
    allowed = tuple(slice(0, int(last) + 1) for last in np.minimum(spare, ceiling) - floor)
    inside = table[allowed]
    cell = np.array(np.unravel_index(int(inside.argmax()), inside.shape))
    rows = np.empty(len(starts), dtype=np.int64)
    for at in range(len(starts) - 1, -1, -1):
        rows[at] = starts[at] + int(picked[at][tuple(cell)])
        cell = cell - (rest.load[rows[at]] - origin[at])
    return rows


def _reach(rest: OpenChoices) -> Ints:
    """How far from the reference, or from nothing, the grid goes in each group."""
    reach = rest.room.copy()
    most = min(_MOST_CELLS, _MOST_WORK // max(len(rest.jobs), 1))
    while np.prod(np.where(reach >= rest.room, rest.room + 1, 2 * reach + 1)) > most:
        widest = int(np.argmax(np.where(reach >= rest.room, rest.room, 2 * reach)))
        reach[widest] = min(int(reach[widest] * 3 // 4), rest.room[widest] // 2)
    return reach


def _add_job(table: Floats, worth: Floats, shifts: Ints) -> tuple[Floats, NDArray[np.int16]]:
    """The grid after one more job, and which of its options leads to each cell."""
    after = np.full(table.shape, -np.inf)
    rows = np.zeros(table.shape, dtype=np.int16)
    for option, (value, shift) in enumerate(zip(worth, shifts, strict=True)):
        if (np.abs(shift) >= table.shape).any():
            continue
        came = tuple(
            slice(max(-s, 0), n - max(s, 0)) for s, n in zip(shift, table.shape, strict=True)
        )
        goes = tuple(
            slice(max(s, 0), n - max(-s, 0)) for s, n in zip(shift, table.shape, strict=True)
        )
        candidate = table[came] + value
        better = candidate > after[goes]
        after[goes] = np.where(better, candidate, after[goes])
        rows[goes] = np.where(better, option, rows[goes])
    return after, rows
