"""How fast the trials of a study are, read from their runs: what the sharing of devices is told."""

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
"""Of one device, before any trial of the study has made a step."""
_RESIZE_S = 2.0
_START_S = 5.0
_SAVE_S = 1.0
_KEPT = 64
"""Courses that the study goes by."""
_SETTLED_S = 1.0
"""A step that is late by less says nothing."""


class TrialSpeeds:
    """The courses of the trials of one study: those that run, and the last that did."""

    def __init__(self, *, rungs: int) -> None:
        self._rungs = rungs
        self._courses: dict[int, RunProgress] = {}
        self.power = fit_power(())
        """Speed on k devices is k to this power, as far as trials were seen at two sizes."""
        self.resize_s = _RESIZE_S
        """How long a trial stands still when it is resized."""
        self.start_s = _START_S
        """From a start to the first step."""
        self._usual_rung_s = _RUNG_S

    def observe(self, runs: Iterable[tuple[int, RunStore]]) -> None:
        """Read what the runs of these trials, by number, have written since the last time."""
        has_moved = False
        for number, run in runs:
            course = self._courses.pop(number, None) or RunProgress(run)
            self._courses[number] = course  # the newest last
            has_moved |= course.take()
        for number in [*self._courses][:-_KEPT]:
            del self._courses[number]
        if has_moved:
            self._sum_up()

    def _sum_up(self) -> None:
        courses = self._courses.values()
        pairs: list[tuple[int, float, int, float]] = []
        for course in courses:
            seen = _steps_s(course)
            pairs += [(*few, *many) for few, many in pairwise(seen)]
        self.power = fit_power(pairs)
        resizes_s = [span_s for course in courses for span_s in course.resizes_s]
        starts_s = [course.startup_s for course in courses if course.startup_s is not None]
        rungs_s = [s for each in self._courses if (s := self._own_rung_s(each)) is not None]
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
        """What a trial wants, by its own speed, else by that of the others."""
        rung_s, reached = self.rung_s(trial.number), float(trial.rung)
        course = self._courses.get(trial.number)
        if course is not None and course.steps:
            reached = max(reached, course.step / course.steps * self._rungs)
        work_s = max(0.0, trial.until - reached) * rung_s
        if held and course is not None:
            work_s = max(work_s, self._late_s(course, held))
        return DeviceClaim(
            number=trial.number,
            work_s=work_s,
            held=held,
            beyond_s=promise * max(0, self._rungs - trial.until) * rung_s,
            promise=promise,
            least=least,
            most=most,
            power=self.power,
            resize_s=self._change_s(course),
            start_s=self.start_s,
            is_pinned=is_pinned,
        )

    def _own_rung_s(self, number: int) -> float | None:
        course = self._courses.get(number)
        if course is None or not course.steps:
            return None
        singles_s = [pace_s * devices**self.power for devices, pace_s in _steps_s(course)]
        return median(singles_s) * course.steps / self._rungs if singles_s else None

    def _change_s(self, course: RunProgress | None) -> float:
        """What other devices cost it: a pause, or another start."""
        if course is None or not restarts_on_resize(course.run):
            return self.resize_s
        return self.start_s + _SAVE_S

    def _late_s(self, course: RunProgress, held: int) -> float:
        """One that ought to have moved and has not will need as long again, for all we know."""
        pace_s = course.pace_s(held) or course.usual_step_s
        idle_s = time.monotonic() - course.moved_at - pace_s
        return idle_s * held**self.power if idle_s > _SETTLED_S else 0.0


def _steps_s(course: RunProgress) -> list[tuple[int, float]]:
    """Devices and a usual step on them, for each number that it was seen with."""
    return [
        (each.devices, pace_s)
        for each in course.seen("")
        if (pace_s := course.pace_s(each.devices)) is not None
    ]
