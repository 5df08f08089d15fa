"""Remaining work of a job that does not declare it.

Predicted from the work of earlier jobs: of the same program (where that may be used), else of all
jobs. For a new program the estimate is the Gittins index (Aalto, Ayesta and Righter,
Queueing Systems 63, 2009): the best ratio of time spent to chance of an end, given how much the
job has had already. A job of an age where many others ended is treated as nearly done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_REMEMBERED = 256
_IMAGINED = np.geomspace(60.0, 600_000.0, 13)
"""Prior before any job has ended: log-uniform work."""
_OVERTIME = 0.05
"""Remaining work of a job that is longer than any before it, as a share of what is done."""
_CONFIDENT = 24
"""Number of ended jobs that outweigh the prior."""


@dataclass(slots=True)
class WorkHistory:
    """Work of ended jobs: device-seconds at their smallest size, and useful samples by program."""

    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    samples: dict[str, deque[float]] = field(default_factory=dict[str, "deque[float]"])

    def record(self, program: str, samples: float, took_s: float) -> None:
        """A job has left the pool."""
        if took_s > 0:
            self.took_s.append(took_s)
        if program and samples > 0:
            self.samples.setdefault(program, deque(maxlen=_REMEMBERED)).append(samples)

    def predict_samples_left(self, program: str, done: float) -> float | None:
        """Useful samples left according to earlier jobs of the program; None if it is new."""
        known = self.samples.get(program)
        if not known:
            return None
        longer = [took - done for took in known if took > done]
        return float(np.mean(longer)) if longer else _OVERTIME * done

    def predict_left_s(self, attained_s: Floats) -> Floats:
        """Device-seconds left according to all ended jobs, given what each has had."""
        weight = np.full(len(self.took_s), 1.0)
        imagined = max(_CONFIDENT - len(self.took_s), 1) / _CONFIDENT
        took = np.concatenate([_IMAGINED, np.array(self.took_s)])
        weight = np.concatenate([np.full(len(_IMAGINED), imagined), weight])
        order = np.argsort(took, kind="stable")
        return _gittins(took[order], weight[order], attained_s)


def _gittins(took: Floats, weight: Floats, attained: Floats) -> Floats:
    """Least expected time per probability of completion, over all horizons."""
    rest = took[None, :] - attained[:, None]
    mass = np.where(rest > 0, weight[None, :], 0.0)
    spent = np.cumsum(mass * np.maximum(rest, 0.0), axis=1)
    ended = np.cumsum(mass, axis=1)
    beyond = ended[:, -1:] - ended
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (spent + beyond * np.maximum(rest, 0.0)) / ended
    ratio = np.where(ended > 0, ratio, np.inf).min(axis=1)
    # Older than any job before it: as much again as it has had.
    return np.where(np.isfinite(ratio), ratio, np.maximum(attained, 60.0))
