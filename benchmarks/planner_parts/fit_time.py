"""Fits the constants of the step-time model: robust, with a prior on every constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.planner_parts.fit_correction import learn
from yunlu.planning.predict.constants import NAMES, PRIORS, STACKS, Constants, from_logs
from yunlu.planning.predict.intervals import Correction, correct
from yunlu.planning.predict.step_time import step_time

if TYPE_CHECKING:
    from benchmarks.planner_parts.evidence import Evidence
    from yunlu.planning.predict.query_batch import QueryBatch

NOISE = {"nanotron_playbook": 0.15}
"""Spread of a source's log errors that no model would explain; 0.05 elsewhere."""
USUAL_NOISE = 0.05
OWN_NOISE = 0.02
"""The same where stacks depart: within a stack, rows far off are sick runs, and are heard less."""
SHARED_VOICE = {
    "*": 40.0,
    "nanotron_playbook": 10.0,
    "vtrain_single": 20.0,
    "vtrain_multi": 20.0,
    "megatron_bridge": 20.0,
    "nemo": 20.0,
}
"""As how many rows a source counts at most where the shared constants are sought."""
OWN_VOICE = {"*": 400.0, "vtrain_single": 60.0}
"""The same where stacks depart from them."""
MOST_ROWS = 400

_SHARED = len(NAMES)
_SPREADS = np.array([PRIORS[name].spread for name in NAMES])
_STACK_SPREADS = np.array([PRIORS[name].stack_spread for name in NAMES])
_START = np.log([PRIORS[name].value for name in NAMES])
_STEP = 1e-4


@dataclass(frozen=True)
class Fit:
    """Logs of the shared constants, and by how much each stack departs."""

    shared: np.ndarray
    departures: np.ndarray
    """``[stack, constant]``"""

    @property
    def constants(self) -> Constants:
        """For ``step_time``."""
        return from_logs(self.shared + self.departures)


def fit(evidence: Evidence, rows: np.ndarray, *, rounds: int = 30) -> Fit:
    """Constants from the chosen rows alone.

    First the shared ones, every source with a like voice; then how stacks depart, by all their rows.
    """
    chosen = _thin(evidence, np.flatnonzero(rows))
    start = Fit(_START.copy(), np.zeros((len(STACKS), _SHARED)))
    alike = _Problem(evidence, chosen, SHARED_VOICE, move_shared=True)
    common = alike.solve(alike.solve(start, rounds, gentle=True), rounds)
    alone = _Problem(evidence, chosen, OWN_VOICE, move_shared=False, anchor=common.shared)
    return alone.solve(common, rounds)


class _Problem:
    """Least squares over log errors and departures from priors, by damped Gauss-Newton."""

    def __init__(self, evidence, chosen, voice, *, move_shared, anchor=None) -> None:
        self.points: QueryBatch = evidence.points.take(chosen)
        measured = evidence.measured[chosen] / evidence.cores[chosen]
        work = self.points.batch * self.points.seq / self.points.devices
        self.target = np.log(work / measured)
        self.stack = self.points.stack.astype(int)
        source = evidence.source[chosen]
        self.weight = np.empty(len(chosen))
        for name in set(source):
            mine = source == name
            noise = NOISE.get(name, USUAL_NOISE if move_shared else OWN_NOISE)
            self.weight[mine] = min(1.0, np.sqrt(voice.get(name, voice["*"]) / mine.sum())) / noise
        self.present = sorted(set(self.stack))
        self.free = [k for k in range(_SHARED) if _STACK_SPREADS[k] > 0]
        self.move_shared = move_shared
        self.anchor = _START if anchor is None else anchor
        self.gentle = False

    def solve(self, start: Fit, rounds: int, *, gentle: bool = False) -> Fit:
        self.gentle = gentle
        shared, departures = start.shared.copy(), start.departures.copy()
        damping, cost, parts = 1e-3, np.inf, None
        for _ in range(rounds):
            if parts is None:
                residual = self._residual(shared, departures)
                cost = self._cost(residual, shared, departures)
                parts = self._normal(residual, shared, departures)
            matrix, gradient = parts
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -gradient)
            new_shared, new_departures = self._move(shared, departures, step)
            trial = self._cost(
                self._residual(new_shared, new_departures), new_shared, new_departures
            )
            if trial < cost:
                done = cost - trial < 3e-5 * cost
                shared, departures, parts = new_shared, new_departures, None
                damping = max(damping / 5, 1e-7)
                if done:
                    break
            else:
                damping *= 6
                if damping > 1e4:
                    break
        return Fit(shared, departures)

    def _residual(self, shared: np.ndarray, departures: np.ndarray) -> np.ndarray:
        constants = from_logs(shared + departures)
        with np.errstate(all="ignore"):
            total = step_time(self.points, constants).total_s
        return np.log(total) - self.target

    def _cost(self, residual: np.ndarray, shared: np.ndarray, departures: np.ndarray) -> float:
        z = residual * self.weight
        bent = 2 * (np.sqrt(1 + z**2) - 1) if self.gentle else 4 * np.log1p(z**2 / 4)
        prior = ((shared - self.anchor) / _SPREADS) ** 2
        apart = (departures[:, self.free] / _STACK_SPREADS[self.free]) ** 2
        return float(np.sum(bent) + prior.sum() + apart.sum())

    def _normal(self, residual, shared, departures):
        """The Gauss-Newton matrix and gradient; far rows weigh less (soft-L1, then Cauchy)."""
        slopes = np.empty((len(residual), _SHARED))
        for k in range(_SHARED):
            moved = shared.copy()
            moved[k] += _STEP
            slopes[:, k] = (self._residual(moved, departures) - residual) / _STEP
        z = residual * self.weight
        bent = np.sqrt(1 + z**2) if self.gentle else 1 + z**2 / 4
        weight = self.weight**2 / bent
        size = _SHARED + len(self.present) * len(self.free)
        matrix, gradient = np.zeros((size, size)), np.zeros(size)
        for place, stack in enumerate(self.present):
            mine = self.stack == stack
            own = slopes[mine]
            gram = own.T @ (own * weight[mine][:, None])
            pull = own.T @ (weight[mine] * residual[mine])
            block = slice(_SHARED + place * len(self.free), _SHARED + (place + 1) * len(self.free))
            if self.move_shared:
                matrix[:_SHARED, :_SHARED] += gram
                gradient[:_SHARED] += pull
                matrix[:_SHARED, block] = gram[:, self.free]
                matrix[block, :_SHARED] = gram[self.free]
            matrix[block, block] = gram[np.ix_(self.free, self.free)]
            gradient[block] = pull[self.free]
            spread = _STACK_SPREADS[self.free]
            matrix[block, block] += np.diag(1 / spread**2)
            gradient[block] += departures[stack, self.free] / spread**2
        matrix[:_SHARED, :_SHARED] += np.diag(1 / _SPREADS**2)
        if self.move_shared:
            gradient[:_SHARED] += (shared - self.anchor) / _SPREADS**2
        return matrix, gradient

    def _move(self, shared, departures, step):
        shared, departures = shared + np.clip(step[:_SHARED], -1, 1), departures.copy()
        for place, stack in enumerate(self.present):
            block = slice(_SHARED + place * len(self.free), _SHARED + (place + 1) * len(self.free))
            departures[stack, self.free] += np.clip(step[block], -1, 1)
        return shared, departures


def _thin(evidence: Evidence, chosen: np.ndarray) -> np.ndarray:
    """At most ``MOST_ROWS`` of each source, evenly taken: more would not be heard anyway."""
    kept = []
    for name in dict.fromkeys(evidence.source[chosen]):
        own = chosen[evidence.source[chosen] == name]
        kept.append(own[np.linspace(0, len(own) - 1, min(len(own), MOST_ROWS)).astype(int)])
    return np.concatenate(kept)


@dataclass(frozen=True)
class TimeModel:
    """Everything that predicts throughput."""

    fit: Fit
    correction: Correction


def fit_model(evidence: Evidence, rows: np.ndarray, asked: np.ndarray | None = None) -> TimeModel:
    """Constants, and trees for what they leave, from the chosen rows alone.

    Trees only for the stacks of the rows ``asked`` about: those of others would not be used.
    """
    fitted = fit(evidence, rows)
    heard = rows
    if asked is not None:
        heard = rows & np.isin(evidence.points.stack, evidence.points.stack[asked])
    return TimeModel(fitted, learn(evidence, heard, fitted.constants))


def predict_throughput(evidence: Evidence, model: TimeModel, rows: np.ndarray) -> np.ndarray:
    """Tokens per second and device of the rows' own devices."""
    chosen = np.flatnonzero(rows)
    points = evidence.points.take(chosen)
    with np.errstate(all="ignore"):
        time = step_time(points, model.fit.constants)
    total = time.total_s * correct(points, time, model.correction)
    return points.batch * points.seq / (total * points.devices) * evidence.cores[chosen]
