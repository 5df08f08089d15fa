"""What measuring before the first step may take, and what it found, for an attempt that is stopped meanwhile."""

from __future__ import annotations

import json
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import xxhash

from yunlu.core.files import make_directory, write_atomically
from yunlu.core.limits import decode_json
from yunlu.core.settings import read_settings
from yunlu.planning.plan import MeasuringTime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAST_S = 2.0
"""What timing the job itself may always take: of a run of seconds, a share would time nothing."""


SPEEDS_S = 1.0
"""What timing the matrix products of each precision takes."""


class MeasuringBudget:
    """The share of the run that the job allows; how long the run is, its first pass tells.

    What does not fit in is left out, and estimated by the caller. Nothing is begun after the end; what runs
    then comes to the end of its pass.
    """

    def __init__(self, share: float, *, clock: Callable[[], float] = perf_counter) -> None:
        self.share, self._clock = share, clock
        self._began_at = clock()
        self._run_s = 0.0
        self._left_out: dict[str, None] = {}

    def predict_run(self, run_s: float) -> None:
        """Set how long the steps of the run take, as far as is known by now."""
        self._run_s = run_s

    @property
    def limit_s(self) -> float:
        """Seconds for everything."""
        return max(LEAST_S, self.share * self._run_s)

    @property
    def spent_s(self) -> float:
        """Seconds since measuring began."""
        return self._clock() - self._began_at

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.limit_s - self.spent_s

    def allows(self, needed_s: float, what: str) -> bool:
        """Whether a measurement fits in; else it is noted as left out."""
        if self.spent_s + needed_s <= self.limit_s:
            return True
        self.leave_out(what)
        return False

    def leave_out(self, *names: str) -> None:
        """Note what was not measured."""
        self._left_out |= dict.fromkeys(names)

    def summary(self) -> MeasuringTime:
        """How long it took, and what was left out."""
        return MeasuringTime(
            took_s=self.spent_s,
            limit_s=self.limit_s,
            share=self.share,
            left_out=tuple(self._left_out),
        )


class MeasuredFigures:
    """Figures of a job on this machine, on disk until it has its plan: a stopped attempt loses none."""

    def __init__(self, *key: Any) -> None:
        """``key``: what the figures depend on; without one, they are kept in this process only."""
        text = json.dumps(key, sort_keys=True, default=str).encode()
        name = f"{xxhash.xxh3_64_hexdigest(text)}.json"
        self._path = read_settings().cache / "measuring" / name if key else None
        self._figures: dict[str, list[float]] = {}
        if self._path is None:
            return
        with suppress(OSError, ValueError, AttributeError):  # never stopped, or damaged
            self._figures = {
                str(name): [float(figure) for figure in figures]
                for name, figures in decode_json(self._path.read_bytes()).items()
            }

    def find(self, name: str) -> list[float] | None:
        """What was measured under this name."""
        return self._figures.get(name)

    def keep(self, name: str, *figures: float) -> Sequence[float]:
        """Keep what was measured."""
        self._figures[name] = list(figures)
        if self._path is not None:
            with suppress(OSError):  # without a cache a stopped attempt measures again
                make_directory(self._path.parent)
                write_atomically(self._path, json.dumps(self._figures))
        return figures

    def forget(self) -> None:
        """Delete them: the plan holds what they led to."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
