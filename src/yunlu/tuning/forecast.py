"""Forecast of a study before it starts: how far its trials train, time, cost, number of trials."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil, exp, log, prod, sqrt
from typing import TYPE_CHECKING, Literal

from yunlu.core.errors import YunluError
from yunlu.core.settings import read_settings
from yunlu.core.units import estimate_dollars, estimate_time, show_duration
from yunlu.core.value import Value
from yunlu.executors.worker_process import count_gpus
from yunlu.planning.plan import Interval
from yunlu.spec.fields import read_span_s
from yunlu.tuning.methods.samplers import list_settings
from yunlu.tuning.rungs import find_size, plan_alone
from yunlu.tuning.space import list_values, make_dimensions
from yunlu.tuning.study_runner.device_shares import USUAL_POWER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.spec.search import SearchSpec
    from yunlu.tuning.study_dir import StudyRequest

    _Cost = Callable[[int], float]

EXAMPLE_TRIALS = 50
"""Assumed where the study has no limit."""
_Z_80 = 1.2816
"""Of a normal distribution, 80 % lies within so many deviations."""
_START_S = 6.0
_PLAN_SPREAD = 0.15
"""Standard deviation of the log time of a plan measured on this machine."""
_SAME_WORK = (
    "train.optimizer", "train.schedule", "train.clip", "train.l1", "train.l2",
    "train.label_smoothing", "train.seed", "model.args.dropout",
)  # fmt: skip
"""Fields with almost no effect on the step time."""
_VARIED = 0.4
"""Deviation of the logarithm of a trial's time where the search varies the model or the batch."""
_MOST_TRIALS = 1_000_000

Bound = Literal["trials", "budget", "deadline", "space", "population", "nothing"]


class TrialTime(Value):
    """Time of a full training on one of the study's devices."""

    seconds: Interval
    start_s: float = _START_S
    """Part of it before the first step."""
    source: str
    """Source of the figure."""


class StudyForecast(Value):
    """Forecast of a study."""

    trials: Interval
    seconds: Interval | None
    """Wall time; None where the time of a training is unknown."""
    dollars: Interval | None
    """None where no price is known."""
    device_s: Interval | None
    """Seconds of all devices together."""
    trial_s: Interval | None
    """A full training on one device."""
    share: float
    """Mean share of a full training per trial."""
    devices: int
    parallel: int
    bound: Bound
    """What ends the study."""
    notes: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """For people."""
        about = [_show_count(self.trials, "trials")]
        if self.seconds is not None:
            about.append(_show_estimate(estimate_time(*self.seconds.edges)))
        if self.dollars is not None:
            about.append(_show_estimate(estimate_dollars(*self.dollars.edges)))
        return (f"expected: {'; '.join(about)}", *self.notes)


def predict_search(
    job: Job,
    search: SearchSpec,
    *,
    rungs: int,
    devices: int,
    parallel: int | None = None,
    trial: TrialTime | None = None,
    dollars_per_hour: float | None = None,
    elastic: bool = True,
) -> StudyForecast:
    """Forecast of a study of this job, with 10 to 90 % intervals.

    Args:
        job: Job of the trials.
        search: Space, method and limits.
        rungs: Evaluations of a whole training.
        devices: That its trials share.
        parallel: Trials at once; default: as many as fit on the devices.
        trial: Time of a training; default: from the machine profile and earlier runs.
        dollars_per_hour: Of all devices; default: from the settings.
        elastic: Whether freed devices go to the remaining trials.
    """
    trial = trial or find_trial_time(job, devices=devices)
    price = dollars_per_hour if dollars_per_hour is not None else read_settings().dollars_per_hour
    least, is_fixed = find_size(job)
    most = max(devices // least, 1)
    forecaster = _Forecaster(
        search=search, rungs=rungs, devices=devices, least=least, trial=trial, price=price,
        slots=min(parallel or most, most), elastic=elastic and not is_fixed,
    )  # fmt: skip
    return forecaster.compute()


def predict_study(request: StudyRequest, *, devices: int) -> StudyForecast:
    """Forecast of a requested study; a worker measures what is unknown."""
    job = request.job
    assert job is not None
    assert job.search is not None
    return predict_search(
        job,
        _with_limits(job.search, request),
        rungs=max(request.rungs, 1),
        devices=devices,
        parallel=request.parallel,
        trial=find_trial_time(job, devices=devices) or _measure(job, request.plan, devices=devices),
    )


def find_trial_time(job: Job, *, devices: int) -> TrialTime | None:
    """A full training on one device of this machine, from its profile and earlier runs of the same work."""
    from yunlu.jobs.calibration import this_machine  # noqa: PLC0415 (slow to import)
    from yunlu.jobs.submitted_plan import plan_here  # noqa: PLC0415 (as above)

    if this_machine() is None:
        return None  # never probed: the first trials will show
    plan = plan_here(job.model_copy(update={"devices": 1}), measure=True)
    if plan is None:
        return None  # nothing is known about the model
    start_s = plan.prediction.total_parts.get("start_up", _START_S)
    # Without GPUs, a device is a share of the processor, which was predicted as a whole; but a start-up is
    # the work of one core.
    slower = 1 if count_gpus() else devices
    whole = plan.total_s
    seconds = max(whole.value - start_s, 0.0) * slower + start_s
    return TrialTime(
        seconds=whole.times(seconds / whole.value),
        start_s=start_s,
        source="this machine's probe and earlier runs",
    )


def _measure(job: Job, plan: Plan | None, *, devices: int) -> TrialTime | None:
    try:
        return trial_time_of(plan or plan_alone(job), devices=devices)
    except YunluError:
        return None  # the job alone is invalid; settings of it may be valid


def _with_limits(search: SearchSpec, request: StudyRequest) -> SearchSpec:
    """Limits may have been changed since the search was written."""
    limit_s = request.deadline_s
    deadline = None if limit_s is None else f"{limit_s:.3f}s"
    return search.model_copy(
        update={"trials": request.trials, "budget": request.dollars, "deadline": deadline}
    )


def trial_time_of(plan: Plan, *, devices: int) -> TrialTime:
    """The same from a plan of the job, measured on one device with the machine to itself."""
    prediction = plan.prediction
    slower = 1.0
    if plan.device == "cpu":  # a device is then a share of the processor
        slower = max(1.0, plan.threads * devices / len(os.sched_getaffinity(0)))
    start_s = prediction.total_s - prediction.step_s * plan.steps
    return TrialTime(
        seconds=_spread(prediction.total_s * slower, _PLAN_SPREAD),
        start_s=max(0.0, min(start_s, prediction.total_s / 2)) * slower,
        source="a plan that was measured",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecaster:
    """State of one forecast."""

    search: SearchSpec
    rungs: int
    devices: int
    least: int
    """Devices of a trial; with an elastic one, before it grows."""
    slots: int
    trial: TrialTime | None
    price: float | None
    elastic: bool

    def compute(self) -> StudyForecast:
        trials, bound = self._count_trials()
        count = max(1, round(trials.value))
        counts = self._expect(count)
        trial = self.trial
        seconds = device_s = dollars = None
        if trial is not None:
            spread = self._spread_of(counts)
            value = self._makespan_s(count)
            seconds = _spread(value, spread)
            device_s = _spread(self._device_s(count), spread)
            if bound == "deadline":
                limit = self._deadline_s()
                assert limit is not None
                seconds = Interval(value=min(value, limit), low=min(seconds.low, limit), high=limit)
        if self.price is not None and device_s is not None:
            dollars = device_s.times(self.price / 3600 / self.devices)
            if bound == "budget" and self.search.budget is not None:
                high = self.search.budget
                dollars = Interval(
                    value=min(dollars.value, high), low=min(dollars.low, high), high=high
                )
        return StudyForecast(
            trials=trials,
            seconds=seconds,
            dollars=dollars,
            device_s=device_s,
            trial_s=None if trial is None else trial.seconds,
            share=counts.rungs / (count * self.rungs),
            devices=self.devices,
            parallel=self.slots,
            bound=bound,
            notes=self._notes(counts, count, bound),
        )

    def _count_trials(self) -> tuple[Interval, Bound]:
        """Number of trials, and the tightest limit."""
        matches: list[tuple[Interval, Bound]] = []
        if self.search.trials is not None:
            matches.append((_exact(self.search.trials), "trials"))
        if (settings := count_space(self.search)) is not None:
            matches.append((_exact(settings), "space"))
        if (population := count_population(self.search, self.rungs)) is not None:
            matches.append((_exact(population), "population"))
        if self.trial is not None:
            limit_s = self._deadline_s()
            if limit_s is not None:
                matches.append((self._buy(limit_s, self._makespan_s), "deadline"))
            if self.search.budget is not None and self.price:
                limit_s = self.search.budget / self.price * 3600 * self.devices
                matches.append((self._buy(limit_s, self._device_s), "budget"))
        if not matches:
            return _exact(EXAMPLE_TRIALS), "nothing"
        return min(matches, key=lambda item: item[0].value)

    def _buy(self, limit_s: float, cost_s: _Cost) -> Interval:
        """Trials for this budget, at the expected cost and at its quantiles."""
        likely = _most(limit_s, cost_s)
        factor = exp(_Z_80 * self._spread_of(self._expect(max(1, likely))))
        low, high = _most(limit_s / factor, cost_s), _most(limit_s * factor, cost_s)
        return Interval(value=float(likely), low=float(low), high=float(high))

    def _expect(self, trials: int) -> StageCounts:
        return expect_stages(self.search, trials=trials, rungs=self.rungs)

    def _rung_s(self) -> float:
        """Time per rung on the fewest devices of a trial."""
        assert self.trial is not None
        alone_s = max(self.trial.seconds.value - self.trial.start_s, 0.0) / self.rungs
        return alone_s / self.least**USUAL_POWER

    def _makespan_s(self, trials: int) -> float:
        assert self.trial is not None
        return makespan_s(
            self._expect(trials),
            rung_s=self._rung_s(),
            devices=max(self.devices // self.least, 1),
            parallel=self.slots,
            start_s=self.trial.start_s,
            elastic=self.elastic,
        )

    def _device_s(self, trials: int) -> float:
        assert self.trial is not None
        counts = self._expect(trials)
        starts = sum(stage.trials for stage in counts.stages)
        return (counts.rungs * self._rung_s() + starts * self.trial.start_s) * self.least

    def _spread_of(self, counts: StageCounts) -> float:
        """Standard deviation of the log of the study's total."""
        assert self.trial is not None
        own = log(self.trial.seconds.high / max(self.trial.seconds.low, 1e-9)) / (2 * _Z_80)
        trials = max(stage.trials for stage in counts.stages)
        # Trials differ; the mean of many averages that out, not fully: the search concentrates
        # on good ones.
        varied = _VARIED * (0.5 + 0.5 / sqrt(trials)) if self._varies_work() else 0.0
        return sqrt(own**2 + counts.spread**2 + varied**2)

    def _varies_work(self) -> bool:
        return any(not field.startswith(_SAME_WORK) for field in self.search.space)

    def _deadline_s(self) -> float | None:
        return None if self.search.deadline is None else read_span_s(self.search.deadline)

    def _notes(self, counts: StageCounts, trials: int, bound: Bound) -> tuple[str, ...]:
        notes: list[str] = []
        if self.trial is None:
            notes.append("how long a training takes is not known yet: the first trials will tell")
        else:
            whole_s = show_duration(self.trial.seconds.value)
            notes.append(f"a whole training takes {whole_s} on one device ({self.trial.source})")
        share = counts.rungs / (trials * self.rungs)
        if share < 1:
            notes.append(
                f"a trial trains {share:.0%} of that in the mean ({find_stop(self.search)})"
            )
        if self._varies_work():
            notes.append("the search varies what a step costs: trials will differ in length")
        if bound == "space":
            notes.append(f"the space has {trials} setting{'s' * (trials != 1)}, each is tried once")
        if bound == "nothing":
            notes.append(f"the study has no limit: forecast for {trials} trials")
        if self.search.budget is not None and not self.price:
            notes.append("no price is known: the budget does not bound it (YUNLU_DOLLARS_PER_HOUR)")
        return tuple(notes)


def _most(limit_s: float, cost_s: _Cost) -> int:
    """Most trials within the cost; 0 if one is too expensive."""
    if cost_s(1) > limit_s:
        return 0
    low, high = 1, 2
    while high < _MOST_TRIALS and cost_s(high) <= limit_s:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost_s(middle) <= limit_s else (low, middle)
    return low


def _exact(count: int) -> Interval:
    return Interval(value=float(count), low=float(count), high=float(count))


def _spread(value: float, deviation: float) -> Interval:
    factor = exp(_Z_80 * deviation)
    return Interval(value=value, low=value / factor, high=value * factor)


def _show(interval: Interval, show: Callable[[float], str]) -> str:
    if interval.low == interval.high:
        return show(interval.value)
    return f"{show(interval.value)} ({show(interval.low)} to {show(interval.high)})"


def _show_estimate(texts: tuple[str, str]) -> str:
    value, between = texts
    return f"{value} ({between})" if between else value


def _show_count(interval: Interval, unit: str) -> str:
    return f"{_show(interval, _plain)} {unit}"


def _plain(value: float) -> str:
    return f"{value:.0f}"


_MEDIAN = (0.5, 0.35)
"""Share of a whole training that a trial takes, and the deviation of its logarithm: stopping what is
below the median halved the work of Golovin et al. (Vizier, KDD 2017)."""
_PATIENCE = (0.7, 0.3)
_FRONTIER = ((1.0, 0.1), (0.6, 0.25))
"""Shares of the trials, and of a whole training that they take in one go: as on recorded curves, where a
trial took 0.2 to 0.37 of one in all, and six in ten went on once they were held."""
_FRONTIER_SPREAD = 0.4
_HALVING = 0.2
"""Standard deviation of the log where the method fixes the counts: promotions vary in time."""

_FEW = 20_000
"""Number of settings that can be enumerated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """So many trials train so many rungs further."""

    trials: int
    rungs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """Rungs that a study of so many trials trains."""

    stages: tuple[Stage, ...]
    spread: float
    """Standard deviation of the log of all rungs together."""
    waits: bool
    """Whether a stage begins only when the one before is over."""

    @property
    def rungs(self) -> float:
        """Of all trials together."""
        return sum(stage.trials * stage.rungs for stage in self.stages)


def expect_stages(search: SearchSpec, *, trials: int, rungs: int) -> StageCounts:
    """Expected stages of a study under its method."""
    stop = find_stop(search)
    if stop in {"asha", "hyperband"}:
        eta, first = search.stop.eta, min(search.stop.first, rungs)
        brackets = [(trials, first)]
        if stop == "hyperband":
            brackets = _split(trials, first, rungs, eta)
        stages = [s for count, begin in brackets for s in _halve(count, begin, rungs, eta)]
        return StageCounts(stages=tuple(stages), spread=_HALVING, waits=False)
    if stop == "pbt":
        return StageCounts(
            stages=_train_together(search, trials, rungs), spread=_HALVING, waits=True
        )
    if stop == "frontier":
        return StageCounts(stages=_explore(trials, rungs), spread=_FRONTIER_SPREAD, waits=False)
    share, spread = {"median": _MEDIAN, "patience": _PATIENCE}.get(stop, (1.0, 0.0))
    stage = Stage(trials=trials, rungs=max(1.0, share * rungs))
    return StageCounts(stages=(stage,), spread=spread, waits=False)


def find_stop(search: SearchSpec) -> str:
    """Early-stopping rule, with ``auto`` resolved."""
    name = search.stop.name
    if name != "auto":
        return name
    if len(search.aims) > 1:
        return "none"
    if search.method in {"auto", "frontier"}:
        return "frontier"
    return "asha" if search.method in {"random", "sobol", "tpe"} else "none"


def count_population(search: SearchSpec, rungs: int) -> int | None:
    """Size of a population and the copies at its comparisons; None where there is none."""
    stop = search.stop
    if stop.name != "pbt":
        return None
    copies = max(int(stop.share * stop.population), 1)
    return stop.population + copies * ((rungs - 1) // stop.every)


def _train_together(search: SearchSpec, trials: int, rungs: int) -> tuple[Stage, ...]:
    """The same number of trials at every comparison: a copy replaces another."""
    members, every = min(trials, search.stop.population), search.stop.every
    return tuple(
        Stage(trials=members, rungs=float(min(every, rungs - before)))
        for before in range(0, rungs, every)
    )


def count_space(search: SearchSpec) -> int | None:
    """Most settings of a space; None for a continuous field."""
    points = {name: item.count for name, item in search.space.items() if item.count}
    points = points if search.method == "grid" else {}
    dimensions = make_dimensions(search)
    counts = [
        len(list_values(dimension, points=points.get(dimension.name))) for dimension in dimensions
    ]
    whole = prod(counts)
    if 0 < whole <= _FEW and any(dimension.when for dimension in dimensions):
        return sum(1 for _ in list_settings(dimensions, points))
    return whole or None


def makespan_s(
    counts: StageCounts,
    *,
    rung_s: float,
    devices: int,
    parallel: int,
    start_s: float = 0.0,
    power: float = USUAL_POWER,
    elastic: bool = True,
) -> float:
    """Time from the first trial's start to the last one's end.

    Args:
        counts: What is trained.
        rung_s: From one rung to the next, on one device.
        devices: How many there are.
        parallel: How many trials may train at once.
        start_s: Start-up time of a trial, new or continued.
        power: Speed on k devices is k to this power.
        elastic: Whether devices that nobody needs go to the trials that are left.
    """
    slots = max(1, min(parallel, devices))
    speed = (max(1, devices // slots)) ** power if elastic else 1.0
    if counts.waits or elastic:
        return sum(
            _stage_s(
                stage,
                stage.rungs * rung_s,
                devices if elastic else 0,
                slots=slots,
                start_s=start_s,
                power=power,
            )
            for stage in counts.stages
        )
    starts = sum(stage.trials for stage in counts.stages)
    work_s = counts.rungs * rung_s / speed + starts * start_s
    longest_s = _longest(counts.stages) * rung_s / speed + start_s
    # Between what no schedule can beat and what no list schedule exceeds (Graham 1969).
    best_s = max(work_s / slots, longest_s)
    worst_s = (work_s + (slots - 1) * longest_s) / slots
    return (best_s + worst_s) / 2


def _stage_s(
    stage: Stage, one_s: float, devices: int, *, slots: int, start_s: float, power: float
) -> float:
    """All of its trials, of ``one_s`` on one device each; ``devices`` is 0 where sizes do not change."""
    if not devices:
        return ceil(stage.trials / slots) * (one_s + start_s)
    full, rest = divmod(stage.trials, slots)
    spans_s = full * (one_s / max(1, devices // slots) ** power + start_s)
    if rest:
        spans_s += one_s / (devices / rest) ** power + start_s
    return spans_s


def _explore(trials: int, rungs: int) -> tuple[Stage, ...]:
    stages, left = list[Stage](), float(rungs)
    for part, share in _FRONTIER:
        far = min(max(1.0, rungs * share), left)
        if far > 0:
            stages.append(Stage(trials=max(1, round(trials * part)), rungs=far))
        left -= far
    return tuple(stages)


def _halve(trials: int, first: int, rungs: int, eta: int) -> list[Stage]:
    stages: list[Stage] = []
    reached, until, left = 0, first, trials
    while left and reached < rungs:
        until = min(until, rungs)
        stages.append(Stage(trials=left, rungs=until - reached))
        reached, until, left = until, until * eta, left // eta
    return stages


def _split(trials: int, first: int, rungs: int, eta: int) -> list[tuple[int, int]]:
    """Hyperband's brackets: how many of the trials each has, and how far they first train."""
    starts = [first]
    while starts[-1] * eta <= rungs:
        starts.append(starts[-1] * eta)
    most = len(starts) - 1
    weights = [eta ** (most - s) / (most - s + 1) for s in range(len(starts))]
    whole = sum(weights)
    counts = [max(1, round(trials * weight / whole)) for weight in weights]
    return [(count, start) for count, start in zip(counts, starts, strict=True) if count]


def _longest(stages: Sequence[Stage]) -> float:
    """Rungs of the trial that trains longest."""
    runs, longest = 0.0, 0.0
    before = 0
    for stage in stages:
        runs = runs + stage.rungs if stage.trials <= before else stage.rungs
        before = stage.trials
        longest = max(longest, runs)
    return longest
