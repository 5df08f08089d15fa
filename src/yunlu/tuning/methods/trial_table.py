"""The trials of a study as arrays: best value of each curve, time per rung, encoded setting.

Everything follows from the snapshot; what is cached between two calls only saves time.
"""

from __future__ import annotations

from bisect import bisect_right
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from yunlu.tuning.encoding import Encoder
    from yunlu.tuning.values import Trial

    Array = NDArray[np.float64]
    Indices = NDArray[np.intp]

_WORST = 1e300
_TIMED = 300
_RIDGE = 0.02


class TrialTable:
    """The trials of a study, one row each, in the order of the snapshot; see ``update``."""

    def __init__(self, encoder: Encoder, *, seed: int) -> None:
        """Settings are encoded by ``encoder``."""
        self._encoder, self._seed = encoder, seed
        self._forget([])

    def _forget(self, milestones: list[int]) -> None:
        self._known: list[Trial] = []
        self._milestones = milestones
        self._courses: list[tuple[list[int], list[float]]] = []
        columns = len(self._encoder.owners)
        self._numbers: dict[str, NDArray[Any]] = {
            "rungs": np.zeros(0, dtype=np.intp),
            "untils": np.zeros(0, dtype=np.intp),
            "lots": np.zeros(0, dtype=np.float64),
            "bests": np.zeros(0),
            "paces": np.zeros(0),
            "running": np.zeros(0, dtype=bool),
            "held": np.zeros(0, dtype=bool),
            "failed": np.zeros(0, dtype=bool),
            "features": np.zeros((0, columns)),
            "units": np.zeros((0, len(self._encoder.dimensions))),
            "ladder": np.zeros((0, len(milestones))),
        }

    def update(self, trials: Sequence[Trial], milestones: list[int]) -> TrialTable:
        """Apply new trials and evaluations."""
        if len(trials) < len(self._known) or milestones != self._milestones:
            self._forget(milestones)
        for row, known in enumerate(self._known):
            trial = trials[row]
            if trial is known:
                continue
            if not _continues(known, trial):  # of another study
                self._place(row, [trial])
            self._note(row, trial)
        if len(trials) > len(self._known):
            self._append(trials[len(self._known) :])
        return self

    @property
    def count(self) -> int:
        """Trials."""
        return len(self._known)

    @property
    def points(self) -> int:
        """Evaluations of all."""
        return int(self.rungs.sum())

    @property
    def rungs(self) -> Indices:
        """The last that each reached."""
        return self._numbers["rungs"][: self.count]

    @property
    def untils(self) -> Indices:
        """How far each may run."""
        return self._numbers["untils"][: self.count]

    @property
    def lots(self) -> Array:
        """A fixed random number in [0, 1) for each."""
        return self._numbers["lots"][: self.count]

    @property
    def bests(self) -> Array:
        """The best value of each; infinite before the first."""
        return self._numbers["bests"][: self.count]

    @property
    def rung_times(self) -> Array:
        """Seconds per rung; NaN before the first."""
        return self._numbers["paces"][: self.count]

    @property
    def running(self) -> NDArray[np.bool_]:
        """Which hold a slot."""
        return self._numbers["running"][: self.count]

    @property
    def held(self) -> NDArray[np.bool_]:
        """Which can continue."""
        return self._numbers["held"][: self.count]

    @property
    def failed(self) -> NDArray[np.bool_]:
        """Which failed without a value."""
        return self._numbers["failed"][: self.count]

    @property
    def features(self) -> Array:
        """Of the settings."""
        return self._numbers["features"][: self.count]

    @property
    def units(self) -> Array:
        """Of the settings."""
        return self._numbers["units"][: self.count]

    @property
    def ladder(self) -> Array:
        """The best value of each at every milestone; infinite where it has not come so far."""
        return self._numbers["ladder"][: self.count]

    def number(self, row: int) -> int:
        """Of the trial in a row."""
        return self._known[row].number

    def newest(self, row: int) -> float:
        """The newest value of a trial."""
        return self._known[row].points[-1].value

    def row(self, number: int) -> int:
        """Of a trial."""
        if number < self.count and self._known[number].number == number:
            return number
        return next(row for row, trial in enumerate(self._known) if trial.number == number)

    def best_at(self, row: int, rung: int) -> tuple[int, float]:
        """The last evaluation not after a rung (else the first), and the best value until then."""
        rungs, bests = self._courses[row]
        at = max(bisect_right(rungs, rung) - 1, 0)
        return rungs[at], bests[at]

    def _append(self, trials: Sequence[Trial]) -> None:
        first, count = len(self._known), len(self._known) + len(trials)
        if count > len(self._numbers["rungs"]):
            for name, array in self._numbers.items():
                larger = np.zeros((2 * count, *array.shape[1:]), dtype=array.dtype)
                larger[:first] = array[:first]
                self._numbers[name] = larger
        self._known.extend(trials)
        self._courses.extend(([], []) for _ in trials)
        self._place(first, trials)
        for row, trial in enumerate(trials, first):
            self._note(row, trial)

    def _place(self, first: int, trials: Sequence[Trial]) -> None:
        """Fill columns that do not change while a trial runs."""
        rows = slice(first, first + len(trials))
        units = self._encoder.locate([trial.params for trial in trials])
        self._numbers["units"][rows] = units
        self._numbers["features"][rows] = self._encoder.featurize(units)
        self._numbers["ladder"][rows] = inf
        self._numbers["lots"][rows] = [_mix(t.number, self._seed) / 2.0**64 for t in trials]
        self._courses[rows] = [([], []) for _ in trials]

    def _note(self, row: int, trial: Trial) -> None:
        rungs, bests = self._courses[row]
        best = bests[-1] if bests else inf
        for point in trial.points[len(rungs) :]:
            if point.value < best and isfinite(point.value):
                best = point.value
            rungs.append(point.rung)
            bests.append(best)
            at = bisect_right(self._milestones, point.rung)
            if at and self._milestones[at - 1] == point.rung:
                self._numbers["ladder"][row, at - 1] = best if best < inf else _WORST
        numbers = self._numbers
        numbers["rungs"][row] = trial.rung
        numbers["untils"][row] = trial.until
        numbers["bests"][row] = best
        numbers["paces"][row] = trial.points[-1].seconds / trial.rung if trial.points else nan
        numbers["running"][row] = trial.state is TrialState.RUNNING
        numbers["held"][row] = trial.state is TrialState.HELD
        numbers["failed"][row] = trial.state is TrialState.FAILED and not trial.points
        self._known[row] = trial


def _continues(before: Trial, after: Trial) -> bool:
    """Whether it is the same trial, later."""
    points = len(before.points)
    return (
        before.number == after.number
        and before.params == after.params
        and len(after.points) >= points
        and (not points or after.points[points - 1] == before.points[-1])
    )


def _mix(number: int, seed: int) -> int:
    """A number that looks like chance but is always the same for a trial (splitmix64)."""
    mixed = ((number + 1) * 0x9E3779B97F4A7C15 + seed) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


class RungTimeModel:
    """Predicts the time per rung from the setting: a ridge regression of logarithms."""

    def __init__(self, table: TrialTable) -> None:
        """Fit to trials that have run."""
        timed = np.flatnonzero(table.rung_times > 0)[-_TIMED:]
        columns = table.features.shape[1]
        self._mean, self._centre = 0.0, np.zeros(columns)
        self._slopes = np.zeros(columns)
        if len(timed):
            rows, logs = table.features[timed], np.log(table.rung_times[timed])
            self._mean, self._centre = float(logs.mean()), rows.mean(axis=0)
            rows = rows - self._centre
            square = rows.T @ rows + _RIDGE * np.eye(columns)
            self._slopes = np.linalg.solve(square, rows.T @ (logs - self._mean))

    def predict(self, features: Array) -> Array:
        """Seconds for a rung, for each row."""
        return np.exp(self._mean + (features - self._centre) @ self._slopes)
