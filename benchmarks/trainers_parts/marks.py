"""Marks: what the clock, the processor and the memory say each time the model is called.

The same code runs inside the model's forward pass for every contender, so nothing of a contender is
touched to measure it, and the measuring costs all of them the same (about two microseconds).
"""

from __future__ import annotations

import json
import resource
import sys
from bisect import bisect_left
from time import process_time, time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# Linux counts the high-water mark in KiB, macOS in bytes.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_LOGGING_S = 0.002

Row = tuple[float, float, int]
"""Processor seconds of the whole process, instant, largest memory so far."""


class Marks:
    """One row per forward pass in training mode."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.losses: list[Any] = []
        """Loss tensors and what to divide them by, where the loss is seen at all."""

    def add(self) -> None:
        """Note the processor time of the whole process, the instant, and the memory so far."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.rows.append((process_time(), time(), peak))

    def see(self, loss: Any, count: int = 1) -> None:
        """Keep a loss as the tensor it is: reading it would make the loop wait."""
        self.losses.append((loss.detach(), count))

    def save(self, path: Path) -> None:
        """Write everything, with the high-water mark as it is now."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        losses = [float(loss) / count for loss, count in self.losses]
        rows = [(cpu_s, at, kept * _RSS_UNIT) for cpu_s, at, kept in self.rows]
        found = {"rows": rows, "losses": losses, "peak_bytes": peak * _RSS_UNIT}
        path.write_text(json.dumps(found))


def step_starts(rows: list[Row], steps: int, begins: list[float] | None = None) -> list[int]:
    """The index of the first forward pass of each step.

    ``begins`` holds an instant before each step, for a contender that may call the model several
    times a step, or before the first one; without it every call is a step.
    """
    if begins is None:
        if len(rows) != steps:
            raise ValueError(f"{len(rows)} forward passes were seen in {steps} steps")
        return list(range(steps))
    if len(begins) != steps:
        raise ValueError(f"{len(begins)} steps were logged of {steps}")
    instants = [at for _, at, _ in rows]
    starts = [bisect_left(instants, begin) for begin in begins]
    if len(set(starts)) != steps or starts[-1] == len(rows):
        raise ValueError("a step without a forward pass")
    return starts


def begins_of(history: list[dict[str, Any]]) -> list[float]:
    """An instant before each step, from a log that says when steps ended."""
    first = history[0]
    # The log is written a moment after the step; the pass before the first step is farther away.
    before = first["at"] - first["data_s"] - first["compute_s"] - _LOGGING_S
    return [before, *(record["at"] for record in history[:-1])]
