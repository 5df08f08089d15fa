"""Measured speeds of trials, input of the device allocation."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from yunlu.scheduler.run_progress import RunProgress
from yunlu.tuning.study_runner.device_shares import MANY, DeviceClaim, fit_power
from yunlu.tuning.study_runner.slots import restarts_on_resize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.runs.run_store import RunStore
    from yunlu.tuning.values import Trial

_RUNG_S = 60.0
"""Assumed on one device, before any trial has made a step."""
_RESIZE_S = 2.0
_START_S = 5.0
_SAVE_S = 1.0
_KEPT = 64
"""Runs whose speeds are remembered."""
_SETTLED_S = 1.0
"""Delay of a step below which it counts as normal."""


class TrialSpeeds:
    """Speeds of the running and the most recent trials of a study."""

    def __init__(self, *, rungs: int) -> None:
        self._rungs = rungs
        self._progress: dict[int, RunProgress] = {}
        self.power = fit_power(())
        """Speed on k devices is k to this power; fitted to trials observed at two sizes."""
        self.resize_s = _RESIZE_S
        """Pause of a trial when it is resized."""
        self.start_s = _START_S
        """From a start to the first step."""
        self._usual_rung_s = _RUNG_S

    def observe(self, runs: Iterable[tuple[int, RunStore]]) -> None:
        """Read new metrics of the runs of these trials, by number."""
        has_moved = False
        for number, run in runs:
            progress = self._progress.pop(number, None) or RunProgress(run)
            self._progress[number] = progress  # the newest last
            has_moved |= progress.take()
        for number in [*self._progress][:-_KEPT]:
            del self._progress[number]
        if has_moved:
            self._sum_up()

    def _sum_up(self) -> None:
        runs_progress = self._progress.values()
        pairs: list[tuple[int, float, int, float]] = []
        for progress in runs_progress:
            seen = _steps_s(progress)
            pairs += [(*few, *many) for few, many in pairwise(seen)]
        self.power = fit_power(pairs)
        resizes_s = [span_s for progress in runs_progress for span_s in progress.resizes_s]
        starts_s = [
            progress.startup_s for progress in runs_progress if progress.startup_s is not None
        ]
        rungs_s = [s for item in self._progress if (s := self._own_rung_s(item)) is not None]
        self.resize_s = median(resizes_s) if resizes_s else _RESIZE_S
        self.start_s = median(starts_s) if starts_s else _START_S
        self._usual_rung_s = median(rungs_s) if rungs_s else _RUNG_S

    def rung_s(self, number: int) -> float:
        """Seconds of one device from one rung of a trial to the next."""
        own_s = self._own_rung_s(number)
        return self._usual_rung_s if own_s is None else own_s

    def claim(
        self,
        trial: Trial,
        *,
        held: int,
        promise: float = 0.5,
        least: int = 1,
        most: int = MANY,
        is_pinned: bool = False,
    ) -> DeviceClaim:
        """Device claim of a trial, by its own speed, else by that of the others."""
        rung_s, reached = self.rung_s(trial.number), float(trial.rung)
        progress = self._progress.get(trial.number)
        if progress is not None and progress.steps:
            reached = max(reached, progress.step / progress.steps * self._rungs)
        work_s = max(0.0, trial.until - reached) * rung_s
        if held and progress is not None:
            work_s = max(work_s, self._late_s(progress, held))
        return DeviceClaim(
            number=trial.number,
            work_s=work_s,
            held=held,
            beyond_s=promise * max(0, self._rungs - trial.until) * rung_s,
            promise=promise,
            least=least,
            most=most,
            power=self.power,
            resize_s=self._change_s(progress),
            start_s=self.start_s,
            is_pinned=is_pinned,
        )

    def _own_rung_s(self, number: int) -> float | None:
        progress = self._progress.get(number)
        if progress is None or not progress.steps:
            return None
        singles_s = [pace_s * devices**self.power for devices, pace_s in _steps_s(progress)]
        return median(singles_s) * progress.steps / self._rungs if singles_s else None

    def _change_s(self, progress: RunProgress | None) -> float:
        """Cost of a resize: a pause, or a restart."""
        if progress is None or not restarts_on_resize(progress.run):
            return self.resize_s
        return self.start_s + _SAVE_S

    def _late_s(self, progress: RunProgress, held: int) -> float:
        """Estimated delay of a stalled trial: as long again as it has stalled."""
        pace_s = progress.pace_s(held) or progress.usual_step_s
        idle_s = time.monotonic() - progress.moved_at - pace_s
        return idle_s * held**self.power if idle_s > _SETTLED_S else 0.0


def _steps_s(progress: RunProgress) -> list[tuple[int, float]]:
    """Median step time for each number of devices observed."""
    return [
        (item.devices, pace_s)
        for item in progress.seen("")
        if (pace_s := progress.pace_s(item.devices)) is not None
    ]
