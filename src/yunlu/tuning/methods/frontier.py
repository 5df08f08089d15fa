"""The default method: a slot goes where its next seconds are expected to improve the study most.

A Gaussian process (``surrogate``) predicts the end of every curve, of started trials and of new
settings. The one with the largest expected improvement per time continues; where little can be
predicted, milestones safeguard this: only the better part of the trials at a milestone may continue, as in successive halving (Li et al., "A system for massively
parallel hyperparameter tuning", 2020), and a third of what begins is drawn at random (Falkner,
Klein and Hutter, "BOHB", 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from yunlu.tuning.encoding import Encoder
from yunlu.tuning.methods.stopping import (
    find_milestones,
    may_promote,
    next_milestone,
    rank,
)
from yunlu.tuning.methods.surrogate import (
    KernelParams,
    PastTrials,
    Posterior,
    add_failures,
    fit_kernel,
    make_query,
    make_scale,
    observe,
)
from yunlu.tuning.methods.trial_table import RungTimeModel, TrialTable
from yunlu.tuning.values import Continue, EndStudy, Judgement, StartTrial, Verdict, WaitForResults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from yunlu.tuning.values import Action, Dimension, Params, StudySnapshot, Trial

    Array = NDArray[np.float64]
    Indices = NDArray[np.intp]
    Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierParams:
    """Hyperparameters, tuned on TaskSet's curves only."""

    opening: int = 3
    """Trials for each dimension before the model is asked."""
    first: float = 0.06
    """Of a whole training: how far a new trial runs before it is compared."""
    growth: float = 1.4
    """From one milestone to the next."""
    halving: float = 3.0
    """One in so many may train twice as long."""
    haste: float = 0.25
    """How much a short way to the end counts: the power of its length; 1 is per second."""
    chance: float = 0.33
    """Of what begins: how much is drawn at random."""
    belief: float = 10.0
    """Weight of the user's priors, in trials (Hvarfner et al., "piBO", 2022)."""
    modelled: int = 100
    """Trials that the model learns from: half of them the best, half drawn by lot."""
    studied: int = 36
    """Trials from which it learns what is typical."""
    candidates: int = 96
    """New settings to consider, everywhere and around the best."""


_FAR_ALONG = 8
"""Trials, of those that came farthest, that always tell what is typical."""
_SHORT = 4
"""Held trials considered from each milestone."""
_ENOUGH = 8
"""Trials to compare with before one is pruned."""
_HOPELESS = 4.0
"""Deviations from ever being the best."""


class Frontier:
    """Bayesian search over settings and rungs at once, for one objective."""

    def __init__(
        self,
        dimensions: Sequence[Dimension],
        *,
        seed: int,
        allowed: Callable[[Params], bool] | None = None,
        past: Sequence[Trial] = (),
        knobs: FrontierParams | None = None,
    ) -> None:
        """Search these dimensions; ``past``: trials of earlier studies, the same field names."""
        self.encoder = Encoder(dimensions)
        self.seed = seed
        self.knobs = knobs or FrontierParams()
        self.past = PastTrials(past, self.encoder, seed=seed)
        self._allowed = allowed
        self._table = TrialTable(self.encoder, seed=seed)
        self._openings: list[Params] = []
        # What was worked out last, by what it was worked out from: saves time, decides nothing.
        self._fitted: tuple[object, KernelParams] | None = None
        self._decided: tuple[object, _Decision] | None = None

    def choose(self, snapshot: StudySnapshot) -> Action:
        """Next action for a free slot."""
        return self._decide(snapshot, None).move

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """Verdict on a trial after its newest evaluation."""
        milestones = self._find_milestones(snapshot)
        table = self._table.update(snapshot.trials, milestones)
        row = table.row(number)
        rung, until = int(table.rungs[row]), int(table.untils[row])
        if not np.isfinite(table.newest(row)):
            return Judgement(Verdict.PRUNE, reason="its value is not a number")
        if rung < until or rung >= snapshot.rungs:
            return Judgement(Verdict.GO_ON, until=until)
        return self._judge_by_rank(row, snapshot, table, milestones) or self._judge_by_model(
            number, snapshot
        )

    def _judge_by_rank(
        self, row: int, snapshot: StudySnapshot, table: TrialTable, milestones: list[int]
    ) -> Judgement | None:
        """The verdict where it is clear without the model."""
        rows, rung = np.array([row]), int(table.rungs[row])
        better, of = (int(item[0]) for item in rank(table, rows, milestones))
        reason = f"{better} of {of} were better at rung {rung}"
        if of >= _ENOUGH and better >= 0.75 * of:
            return Judgement(Verdict.PRUNE, reason=reason)
        if self._is_leading(table, row, snapshot):
            return Judgement(
                Verdict.GO_ON, until=next_milestone(milestones, rung), reason="the best so far"
            )
        if not may_promote(table, rows, milestones, self.knobs.halving)[0]:
            return Judgement(Verdict.HOLD, reason=reason)
        return None

    def _judge_by_model(self, number: int, snapshot: StudySnapshot) -> Judgement:
        decision = self._decide(snapshot, number)
        if isinstance(decision.move, Continue) and decision.move.number == number:
            return Judgement(Verdict.GO_ON, until=decision.move.until)
        if decision.is_hopeless:
            return Judgement(Verdict.PRUNE, reason="not expected to become the best any more")
        return Judgement(Verdict.HOLD, reason="other trials are expected to gain more")

    def _is_leading(self, table: TrialTable, row: int, snapshot: StudySnapshot) -> bool:
        """Whether it has just become better than all others, and has time to continue."""
        best, before = float(table.bests[row]), table.best_at(row, int(table.rungs[row]) - 1)
        has_time = snapshot.seconds_left is None or snapshot.seconds_left > table.rung_times[row]
        return bool(best <= table.bests.min() and best < before[1] and has_time)

    def _find_milestones(self, snapshot: StudySnapshot) -> list[int]:
        return find_milestones(snapshot.rungs, self.knobs.first, self.knobs.growth)

    def _decide(self, snapshot: StudySnapshot, judged: int | None) -> _Decision:
        milestones = self._find_milestones(snapshot)
        table = self._table.update(snapshot.trials, milestones)
        may_begin = snapshot.trials_left is None or snapshot.trials_left > 0
        if may_begin and table.count < self._count_openings(snapshot):
            return _Decision(self._open(table.count, milestones[0]))
        search = _FrontierStep(self, table, snapshot, milestones=milestones, judged=judged)
        key = (search.key, may_begin)
        if self._decided is None or self._decided[0] != key:
            self._decided = (key, search.decide(may_begin=may_begin))
        return self._decided[1]

    def _count_openings(self, snapshot: StudySnapshot) -> int:
        usual = min(self.knobs.opening * len(self.encoder.dimensions), 32)
        if snapshot.trials_left is not None:
            usual = min(usual, (len(snapshot.trials) + snapshot.trials_left) // 3)
        return max(usual, snapshot.workers)

    def _open(self, number: int, until: int) -> Action:
        """The first trials: the best of earlier studies, then settings spread evenly."""
        if number >= len(self._openings):
            wanted = number + 32
            spread = self.encoder.sobol_units(2 * wanted, self.seed)
            spread[1::2] = self.encoder.apply_prior(spread[1::2])
            evenly = [self.encoder.to_params(row) for row in spread]
            result = [item for item in [*self.past.best, *evenly] if self.allows(item)]
            self._openings = result[:wanted]
        if number < len(self._openings):
            return StartTrial(self._openings[number], until)
        params = self.draw(np.random.default_rng([self.seed, number]))
        return StartTrial(params, until) if params else EndStudy(_NOTHING_ALLOWED)

    def allows(self, params: Params) -> bool:
        """Whether the user's constraints hold."""
        return self._allowed is None or self._allowed(params)

    def draw(self, rng: np.random.Generator) -> Params | None:
        """A setting at random that is allowed; None where hardly any is."""
        for _ in range(8):
            units = rng.random((32, len(self.encoder.dimensions)))
            units[1::2] = self.encoder.apply_prior(units[1::2])
            for row in units:
                params = self.encoder.to_params(row)
                if self.allows(params):
                    return params
        return None

    def learn(self, table: TrialTable) -> KernelParams:
        """What is typical of these curves, from a few that change seldom: fitting takes long."""
        rows = np.flatnonzero(np.isfinite(table.bests))
        early = rows[rows < _round_down(table.count)]
        rows = early if len(early) else rows
        floors = 2 ** np.floor(np.log2(table.rungs[rows])).astype(np.intp)
        far = np.lexsort((table.lots[rows], -floors))[:_FAR_ALONG]
        drawn = np.argsort(table.lots[rows])[: self.knobs.studied]
        chosen = np.unique(np.concatenate([far, drawn]))
        rows, floors = rows[chosen], floors[chosen]
        key = (rows.tobytes(), floors.tobytes())
        if self._fitted is None or self._fitted[0] != key:
            pairs = zip(rows.tolist(), floors.tolist(), strict=True)
            values = np.array([table.best_at(row, floor)[1] for row, floor in pairs])
            seen, _ = observe(table, rows, floors, make_scale(values))
            self._fitted = (key, fit_kernel(seen, self.encoder.owners))
        return self._fitted[1]


_NOTHING_LEFT = "nothing more can be tried in what is left"
_ALL_MADE = "all trials were made, and none is worth more"
_NOTHING_ALLOWED = "no setting was found that the constraints allow"


@dataclass(frozen=True, slots=True)
class _Decision:
    move: Action
    is_hopeless: bool = False
    """Of the trial that is judged."""


class _FrontierStep:
    """One decision in the making."""

    def __init__(
        self,
        method: Frontier,
        table: TrialTable,
        snapshot: StudySnapshot,
        *,
        milestones: list[int],
        judged: int | None,
    ) -> None:
        self._method, self._table, self._milestones = method, table, milestones
        self._encoder, self._knobs = method.encoder, method.knobs
        self._running, self._held = table.running.copy(), table.held.copy()
        self._own = -1 if judged is None else table.row(judged)
        if judged is not None:
            self._running[self._own], self._held[self._own] = False, True
        self._rungs = snapshot.rungs
        self._left_s = np.inf if snapshot.seconds_left is None else snapshot.seconds_left
        self._rng = np.random.default_rng([method.seed, table.count, table.points])

    @property
    def key(self) -> object:
        """Equal where the decision is."""
        table = self._table
        arrays = (table.rungs, table.untils, table.bests, self._running, self._held)
        return (*(array.tobytes() for array in arrays), self._left_s, self._rungs)

    def decide(self, *, may_begin: bool) -> _Decision:
        if not np.isfinite(self._table.bests).any():
            return _Decision(self._explore(may_begin=may_begin))
        self._model()
        row, gain, hope = self._find_held()
        fresh = self._find_fresh() if may_begin else None
        move: Action
        if fresh is not None and fresh[1] > gain:
            move = StartTrial(fresh[0], self._milestones[0])
        elif row >= 0:
            until = next_milestone(self._milestones, int(self._table.rungs[row]))
            move = Continue(self._table.number(row), until)
        elif self._running.any():
            move = WaitForResults()
        else:
            move = EndStudy(_NOTHING_LEFT if may_begin else _ALL_MADE)
        return _Decision(move, is_hopeless=hope < -_HOPELESS)

    def _explore(self, *, may_begin: bool) -> Action:
        """Before any value was told there is nothing to learn from."""
        params = self._method.draw(self._rng) if may_begin else None
        if params:
            return StartTrial(params, self._milestones[0])
        if self._running.any():
            return WaitForResults()
        return EndStudy(_NOTHING_ALLOWED if may_begin else "no trial reported a value")

    def _model(self) -> None:
        table = self._table
        rows = self._pick()
        seen, scale = observe(table, rows, table.rungs[rows], make_scale(table.bests))
        self._best = float(scale.rate(table.bests.min(keepdims=True))[0])
        seen = add_failures(table, seen, self._rungs)
        seen = self._method.past.join(seen, scale, self._rungs)
        self._posterior = Posterior(seen, self._method.learn(table))
        busy = np.flatnonzero(self._running)
        if len(busy):
            times = np.log(np.maximum(table.untils[busy], 1.0))
            self._posterior.add_pending(make_query(table.features[busy], times, busy))

    def _pick(self) -> Indices:
        """The trials that the model learns from."""
        table, limit = self._table, self._knobs.modelled
        rows = np.flatnonzero(table.rungs > 0)
        if len(rows) <= limit:
            return rows
        order = rows[np.argsort(table.bests[rows], kind="stable")]
        rest = order[limit // 2 :]
        drawn = rest[np.argsort(table.lots[rest])[: limit - limit // 2]]
        return np.concatenate([order[: limit // 2], drawn])

    def _find_held(self) -> tuple[int, float, float]:
        """The held trial to continue (else -1), its gain, and the upper bound of the judged one."""
        table = self._table
        can = self._held & (table.rungs > 0) & (table.rungs < self._rungs)
        rows = self._shorten(np.flatnonzero(can))
        if not len(rows):
            return -1, 0.0, 0.0
        start, pace_s = (
            table.rungs[rows].astype(np.float64),
            np.maximum(table.rung_times[rows], 1e-12),
        )
        end = np.minimum(self._rungs, start + np.floor(self._left_s / pace_s + 1e-9))
        rises = may_promote(table, rows, self._milestones, self._knobs.halving) & (end > start)
        end = np.maximum(end, start + 1)
        mean, deviation = self._posterior.predict(
            make_query(table.features[rows], np.log(end), rows)
        )
        gains = np.where(rises, self._gain(mean, deviation, end - start, pace_s), 0.0)
        hopes = ((self._best - mean) / deviation)[rows == self._own]
        at = int(np.argmax(gains))
        hope = float(hopes[0]) if len(hopes) else 0.0
        return (int(rows[at]), float(gains[at]), hope) if rises[at] else (-1, 0.0, hope)

    def _shorten(self, rows: Indices) -> Indices:
        """Consider only the best of each milestone."""
        if len(rows) <= 4 * _SHORT:
            return rows
        levels = np.searchsorted(self._milestones, self._table.rungs[rows])
        order = rows[np.lexsort((self._table.bests[rows], levels))]
        levels = np.sort(levels)
        index = np.arange(len(rows)) - np.searchsorted(levels, levels)
        return np.unique(order[(index < _SHORT) | (order == self._own)])

    def _find_fresh(self) -> tuple[Params, float] | None:
        """A setting to begin, and its gain."""
        table, rng, n = self._table, self._rng, self._knobs.candidates
        self._rung_times = RungTimeModel(table)
        units = rng.random((n, len(self._encoder.dimensions)))
        units[1::2] = self._encoder.apply_prior(units[1::2])
        top = np.argsort(table.bests, kind="stable")[:8]
        near = self._vary(table.units[rng.choice(top, size=n)], 0.15)
        units = np.concatenate([units, near])
        gains = self._predict(units)
        if rng.random() < self._knobs.chance:
            params = self._method.draw(rng)
            return (params, float(gains.max())) if params and gains.max() > 0 else None
        order = np.argsort(-gains, kind="stable")[:6]
        more = self._vary(np.repeat(units[order], 8, axis=0), 0.06)
        units = np.concatenate([more, units])
        gains = np.concatenate([self._predict(more), gains])
        for at in np.argsort(-gains, kind="stable"):
            params = self._encoder.to_params(units[at])
            if gains[at] > 0 and self._method.allows(params):
                return params, float(gains[at])
        return None

    def _predict(self, units: Array) -> Array:
        """What new settings are expected to gain."""
        features = self._encoder.featurize(units)
        pace_s = self._rung_times.predict(features)
        end = np.minimum(self._rungs, np.floor(self._left_s / pace_s + 1e-9))
        ends = np.maximum(end, 1)
        strangers = np.full(len(units), -1, dtype=np.intp)
        mean, deviation = self._posterior.predict(make_query(features, np.log(ends), strangers))
        gains = np.where(end >= 1, self._gain(mean, deviation, ends, pace_s), 0.0)
        belief = self._encoder.prior_score(units)
        return gains * np.exp((belief - belief.max()) * self._knobs.belief / self._table.count)

    def _gain(self, mean: Array, deviation: Array, rungs: Array, pace_s: Array) -> Array:
        """Expected improvement for the time it takes."""
        far = (self._best - mean) / deviation
        bell = np.exp(-0.5 * far * far) / np.sqrt(2.0 * np.pi)
        improvement = np.maximum(deviation * (bell + far * ndtr(far)), 1e-300)
        return improvement / pace_s / rungs**self._knobs.haste

    def _vary(self, units: Array, by: float) -> Array:
        """Settings near others: half of their dimensions moved, choices drawn anew."""
        rng, shape = self._rng, units.shape
        moved = np.abs(units + rng.normal(size=shape) * by)
        moved = np.where(moved > 1.0, 2.0 - moved, moved)
        moved = np.where(self._encoder.is_nominal, rng.random(shape), moved)
        is_moved = rng.random(shape) < max(0.5, 1.0 / shape[1])
        return np.clip(np.where(is_moved, moved, units), 0.0, 1.0)


def _round_down(count: int) -> int:
    """To a number that changes seldom."""
    rounded = 8
    while rounded * 1.15 <= count:
        rounded = int(rounded * 1.15) + 1
    return rounded
