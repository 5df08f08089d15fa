"""Runs of trials: created from scratch or another trial's checkpoint, given verdicts, cleaned up.

Shared training prefix of two jobs: steps that one need not repeat. Pure.
Two jobs that differ only in fields that act late (length, decay of the learning rate) make the same
steps as long as their learning rates agree: with ``wsd`` that is most of the run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu.core.limits import decode_json
from yunlu.core.settings import read_settings
from yunlu.planning.large_batch import rate, scale_rate, warmup_steps_for
from yunlu.planning.planner import count_steps
from yunlu.runs.events import AttemptStarted, Evaluated, StateChanged, WorkerGroupFormed
from yunlu.runs.fold import RunView, apply
from yunlu.runs.home import find_runs, is_run_id, open_if_run
from yunlu.runs.run_store import Area, Document, read_job, read_plan, require_local, write_plan
from yunlu.runs.states import RunState
from yunlu.spec.train import ScheduleSpec, TrainSpec
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.planning.plan import Plan
    from yunlu.runs.events import ErrorRaised, Event
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.tuning.facts import TrialFacts
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_dir import StudyRequest
    from yunlu.tuning.study_runner.slots import Slots
    from yunlu.tuning.values import Dimension, Params, StartTrial

_LATE = ("train.schedule", "train.epochs", "train.steps")
"""Fields (and all below them) that do not affect the first steps; the warm-up does."""
_MOST_COMPARED = 20_000
"""Most steps that are compared; of longer runs, evenly spaced ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLength:
    """Length of a training and of its warm-up."""

    steps: int
    warmup_steps: int


def can_share_prefix(dimensions: Sequence[Dimension]) -> bool:
    """Whether trials of this space can share a prefix: some field acts late, the others can agree."""
    late = [dimension for dimension in dimensions if _is_late(dimension.name)]
    others = [dimension for dimension in dimensions if not _is_late(dimension.name)]
    return bool(late) and all(_may_agree(dimension) for dimension in others)


def shared_rung(one: Job, other: Job, events: TrialEvents) -> int:
    """Last rung of the run of ``one`` from whose checkpoint ``other`` can continue; 0: none."""
    every = events.plan.evaluate_every if events.plan else 0
    if events.plan is None or not every or not events.train_samples:
        return 0
    steps = shared_steps(one, other, samples=events.train_samples, plan=events.plan)
    rungs = [
        rung
        for rung, result in events.evaluated.items()
        # An evaluation at the end of the run need not exist in the other job.
        if result.step <= steps and result.step % every == 0 and result.step in events.checkpoints
    ]
    return max(rungs, default=0)


def shared_steps(one: Job, other: Job, *, samples: int, plan: Plan) -> int:
    """Number of first steps that two jobs share; ``plan`` belongs to the first."""
    if _early(one) != _early(other):
        return 0
    batch = plan.batch
    lengths = [find_length(job, samples=samples, batch=batch) for job in (one, other)]
    least = min(length.steps for length in lengths)
    specs = one.train.schedule, other.train.schedule
    if "plateau" in {spec.name for spec in specs} and specs[0] != specs[1]:
        return 0
    stride = -(-least // _MOST_COMPARED)
    slots = range(0, least, stride)

    def is_alike(step: int) -> bool:
        first, second = (
            rate(spec, step, steps=length.steps, warmup_steps=length.warmup_steps)
            for spec, length in zip(specs, lengths, strict=True)
        )
        return first == second

    alike = [*takewhile(is_alike, slots)]
    if len(alike) == len(slots):
        return least
    return alike[-1] + 1 if alike else 0


def find_length(job: Job, *, samples: int, batch: int) -> TrainingLength:
    """Steps and warm-up steps of a job."""
    steps = count_steps(job, samples=samples, batch=batch)
    warmup, optimizer = job.train.schedule.warmup, job.train.optimizer
    if warmup == "auto":
        result, _ = warmup_steps_for(
            steps=steps,
            steps_per_epoch=-(-samples // batch),
            batch=batch,
            base_batch=optimizer.base_batch,
            rule=optimizer.scaling,
        )
    else:
        result = min(steps, round(warmup * steps) if warmup < 1 else round(warmup))
    return TrainingLength(steps=steps, warmup_steps=result)


def _is_late(name: str) -> bool:
    return name != "train.schedule.warmup" and any(
        name == field or name.startswith(f"{field}.") for field in _LATE
    )


def _may_agree(dimension: Dimension) -> bool:
    return bool(dimension.choices) or dimension.is_int or dimension.step is not None


def _early(job: Job) -> Job:
    """The job without fields that act late or do not affect training."""
    empty = TrainSpec()
    train = job.train.model_copy(
        update={
            "schedule": ScheduleSpec(),
            "epochs": None,
            "steps": None,
            "checkpoint": empty.checkpoint,
            "trial_share": empty.trial_share,
        }
    )
    plain: dict[str, Any] = {"name": None, "trackers": [], "train": train, "search": None}
    if job.train.grow_batch is not None or job.train.adapt_batch is not None:
        plain["name"] = job.name or "its batch changes during training"
    return job.model_copy(update=plain)


_REPLAN_FIELDS = (
    "batch",
    "micro_batch",
    "padding",
    "precision",
    "compile",
    "recompute",
    "memory_gb",
)
"""Fields of ``train`` whose change requires a new plan."""


def clone(parent: RunStore, child: RunStore, rung: int) -> bool:
    """Copy the checkpoint of a rung into a run that was not started yet.

    False where the checkpoint is gone; the run then starts from scratch.
    """
    events = read_trial_events(parent)
    step = events.step_of(rung)
    where = events.checkpoints.get(-1 if step is None else step, "")
    source = Path(parent.location(where))
    if not where or "://" in where or not source.is_dir():
        return False
    if not _link_tree(source, require_local(child).directory(Area.CHECKPOINTS) / source.name):
        return False
    plan = _adapt_plan(parent, child, events)
    if plan is not None:
        write_plan(child, plan)
    return True


def _link_tree(source: Path, target: Path) -> bool:
    """Hard links to the same files; the parent may delete its checkpoints meanwhile."""
    aside = target.with_name(f".part-{target.name}-clone")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(source, aside, copy_function=_link_or_copy)
    except (OSError, shutil.Error):
        shutil.rmtree(aside, ignore_errors=True)
        return False
    if target.exists():  # made by a runner that was killed just then
        shutil.rmtree(aside)
    else:
        aside.rename(target)
    return True


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _adapt_plan(parent: RunStore, child: RunStore, events: TrialEvents) -> Plan | None:
    """The parent's plan adapted to the child's job; None where the worker should plan anew.

    Measurements are kept: the child then computes each step exactly as the parent would.
    """
    plan = read_plan(parent)
    if plan is None:
        return None
    before, after = (read_job(run) for run in (parent, child))
    old, new = before.train, after.train
    is_other = any(getattr(old, name) != getattr(new, name) for name in _REPLAN_FIELDS)
    if is_other or before.model != after.model or before.data != after.data:
        return None
    length = find_length(after, samples=events.train_samples, batch=plan.batch)
    updates: dict[str, float] = {
        "steps": length.steps,
        "warmup_steps": length.warmup_steps,
        "epochs": length.steps / plan.steps_per_epoch,
    }
    is_same_length = (old.epochs, old.steps) == (new.epochs, new.steps)
    if is_same_length:
        updates["epochs"] = plan.epochs
    rules, others = old.optimizer, new.optimizer
    if rules != others:
        if "auto" in {others.lr, others.weight_decay} - {rules.lr, rules.weight_decay}:
            return None
        if others.lr != "auto":
            updates["lr"] = scale_rate(
                others.lr, batch=plan.batch, base_batch=others.base_batch, rule=others.scaling
            )
        if others.weight_decay != "auto":
            updates["weight_decay"] = others.weight_decay
    fields = {"steps": "steps", "warm-up": "warmup_steps", "learning rate": "lr"}
    choices = tuple(
        choice.model_copy(update={"value": f"{updates[fields[choice.name]]:g}"})
        if fields.get(choice.name) in updates
        else choice
        for choice in plan.choices
    )
    return plan.model_copy(update=updates | {"choices": choices})


_SUFFIX = re.compile(r"-[0-9a-f]{6}")


def trial_name(study: str, number: int) -> str:
    """Name of a trial's run."""
    return f"{study}-{number:03d}"


def make_job(request: StudyRequest, number: int, params: Params, *, keep: int = 1) -> Job:
    """The job of a trial: the study's, with the trial's setting applied.

    ``keep`` is how many of its newest checkpoints stay: trials are many, and disks are not.
    """
    from yunlu.tuning.space import apply_params  # noqa: PLC0415 - the space is read late

    assert request.job is not None
    job = apply_params(request.job, params)
    checkpoint = job.train.checkpoint.model_copy(update={"keep_last": keep})
    metric = request.metrics[0]
    if checkpoint.metric == "auto" and metric not in {"cost", "seconds"}:
        # The best by the study's objective is exported; an unknown metric is refused.
        checkpoint = checkpoint.model_copy(update={"metric": metric})
    train = job.train.model_copy(update={"checkpoint": checkpoint})
    return job.model_copy(update={"train": train, "name": trial_name(request.name, number)})


def make_run(
    request: StudyRequest,
    number: int,
    params: Params,
    job: Job,
    slots: Slots,
    *,
    saves_checkpoints: bool,
    is_copy: bool = False,
) -> RunStore:
    """The run of a trial, not yet started; reused if an earlier runner was killed just after creating it."""
    run = _find_orphan(job) or slots.submit(job)
    control = {
        "study": request.name,
        "study_id": request.id,
        "number": number,
        "params": params,
        "rungs": request.rungs,
        "saves": saves_checkpoints,
        "is_copy": is_copy,
    }
    run.write(Document.TRIAL, json.dumps(control))
    return run


def find_run(run_id: str) -> RunStore | None:
    """Directory of a trial's run; None if it was deleted."""
    return open_if_run(read_settings().home / run_id) if is_run_id(run_id) else None


def write_verdict(run: RunStore, verdict: dict[str, Any]) -> None:
    """Write the worker's instruction: ``until``, a rung; ``hold`` or ``prune``, a reason; empty: to the end."""
    run.write(Document.TRIAL_CONTROL, json.dumps(verdict))


def read_verdict(run: RunStore) -> dict[str, Any]:
    """The last instruction to the worker."""
    content = run.read(Document.TRIAL_CONTROL)
    return {} if content is None else decode_json(content)


def drop_checkpoints(run: RunStore) -> None:
    """Delete the checkpoints of a run that will not continue."""
    run.remove(Area.CHECKPOINTS)


def _find_orphan(job: Job) -> RunStore | None:
    """A run that was submitted for this job and never started."""
    home, name = read_settings().home, str(job.name)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    for run in sorted(find_runs(home), key=lambda run: run.id):
        if not _SUFFIX.fullmatch(run.id.removeprefix(slug)) or not run.has(Document.JOB):
            continue
        same = read_job(run) == job
        if same and not any(isinstance(event, AttemptStarted) for event, _ in run.read_events()):
            return run
    return None


_ALL = 10_000
"""Checkpoints to keep: more than a trial has rungs."""


class TrialStarter:
    """Creates each trial's run once."""

    def __init__(self, records: Records, slots: Slots) -> None:
        self._records, self._slots = records, slots
        job = records.request.job
        is_population = job is not None and job.search is not None and job.search.stop.name == "pbt"
        self._shares = can_share_prefix(records.request.dimensions) and not is_population
        self.saves_checkpoints = self._shares or is_population
        """Whether trials save at each evaluation, for others to start from."""

    def record_duplicate(self, move: StartTrial) -> bool:
        """Record a trial whose setting was tried before, with that result; false where it is new."""
        if move.copy_from is not None:
            return False
        original = next(
            (fact for fact in self._records.facts() if _is_duplicate(fact, move.params)), None
        )
        if original is None:
            return False
        state = original.state if original.state.is_over else TrialState.PRUNED
        points = [*zip(original.points, original.times, strict=True)]
        number = self._records.begin(
            move.params, until=move.until, points=points, copied_from=(original.number, 0)
        )
        self._records.end(number, state, reason=f"the same setting as trial {original.number}")
        return True

    def begin(self, move: StartTrial) -> int:
        """Record a new trial and return its number."""
        if move.copy_from is not None:
            return self._records.begin(move.params, until=move.until, copied_from=move.copy_from)
        source, rung = self._find_prefix(move.params)
        if source is None:
            return self._records.begin(move.params, until=move.until)
        points = [*zip(source.points, source.times, strict=True)][:rung]
        return self._records.begin(
            move.params,
            until=max(move.until, rung),
            points=points,
            copied_from=(source.number, rung),
        )

    def make_run(self, number: int) -> RunStore:
        """The run of a recorded trial; created once, even across kills of the runner."""
        request, trial = self._records.request, self._records.trial(number)
        # Other trials may start from any of its rungs; a population only from the newest.
        keep = _ALL if self._shares else 3 if self.saves_checkpoints else 1
        job = make_job(request, number, trial.params, keep=keep)
        is_copy = trial.copied_from is not None
        run = make_run(
            request,
            number,
            trial.params,
            job,
            self._slots,
            saves_checkpoints=self.saves_checkpoints,
            is_copy=is_copy,
        )
        if trial.copied_from is not None:
            source, rung = trial.copied_from
            parent = find_run(self._records.facts()[source].run or "")
            if parent is None or not clone(parent, run, rung):
                run.warn(
                    f"The checkpoint of trial {source} at rung {rung} is gone: started from scratch."
                )
        self._records.change_trial(number, run=run.id)
        return run

    def _find_prefix(self, params: Params) -> tuple[TrialFacts | None, int]:
        """The trial with the longest shared prefix, and its last shared rung."""
        best: tuple[TrialFacts | None, int] = (None, 0)
        if not self._shares:
            return best
        request = self._records.request
        job = make_job(request, 0, params)
        for facts in self._records.facts():
            run = find_run(facts.run) if facts.run else None
            if run is None or len(facts.points) <= best[1]:
                continue
            rung = shared_rung(
                make_job(request, 0, dict(facts.params)), job, read_trial_events(run)
            )
            if best[1] < rung <= len(facts.points):
                best = (facts, rung)
        return best


def _is_duplicate(facts: TrialFacts, params: Params) -> bool:
    is_own = facts.trial.copied_from is None or any(point.rung == 1 for point in facts.points)
    return facts.state is not TrialState.FAILED and is_own and dict(facts.params) == params


@dataclass(frozen=True, slots=True)
class RungScore:
    """One evaluation on the validation data."""

    rung: int
    step: int
    metrics: dict[str, float]
    at: float
    device_seconds: float
    """Used by the run until then, over all its attempts."""


@dataclass(slots=True, kw_only=True)
class TrialEvents:
    """A run as of the events read so far."""

    devices: int = 1
    """Held, or about to be assigned."""
    offset: int = 0
    view: RunView = field(default_factory=RunView)
    """The general fold of the events."""
    reason: str = ""
    """Why it is stopping or has stopped."""
    evaluated: dict[int, RungScore] = field(default_factory=dict[int, RungScore])
    """By rung; an evaluation repeated after a crash has the same value."""
    _spent_s: float = 0.0
    _since: float | None = None

    @property
    def state(self) -> RunState:
        """Of the run."""
        return self.view.state

    @property
    def error(self) -> ErrorRaised | None:
        """Of its newest attempt."""
        return self.view.error

    @property
    def plan(self) -> Plan | None:
        """None before it is made."""
        return self.view.plan

    @property
    def train_samples(self) -> int:
        """0 before the data is loaded."""
        return self.view.data.train if self.view.data else 0

    @property
    def parameters(self) -> int:
        """0 before the model is built."""
        return self.view.model.parameters if self.view.model else 0

    @property
    def checkpoints(self) -> dict[int, str]:
        """By step, where each was written: a path inside the run's directory, or a URL."""
        return {checkpoint.step: checkpoint.path for checkpoint in self.view.checkpoints}

    @property
    def rungs(self) -> int:
        """Evaluations of the whole training; 0 where there are none, or before the plan."""
        if self.plan is None or not self.plan.evaluate_every:
            return 0
        return ceil(self.plan.steps / self.plan.evaluate_every - 1e-9)

    def device_seconds(self, now: float) -> float:
        """Device-seconds used until now."""
        running_s = 0.0 if self._since is None else max(now - self._since, 0.0)
        return self._spent_s + running_s * self.devices

    def step_of(self, rung: int) -> int | None:
        """Step of a rung's evaluation."""
        result = self.evaluated.get(rung)
        return None if result is None else result.step

    def apply_event(self, event: Event) -> RungScore | None:
        """Apply one event; return the validation score it carries, if any."""
        self.view = apply(self.view, event)
        match event:
            case StateChanged():
                self._move(event)
            case AttemptStarted():
                self._since = min(event.began_at, event.at)
                self.devices = event.devices or 1  # a worker alone does not say how many
            case WorkerGroupFormed():
                self.resize(max(len(event.ranks), 1), event.at)
            case Evaluated() if event.rung is not None:
                score = RungScore(
                    rung=event.rung,
                    step=event.step,
                    metrics={"loss": event.loss, **event.metrics},
                    at=event.at,
                    device_seconds=self.device_seconds(event.at),
                )
                self.evaluated[score.rung] = score
                return score
            case _:
                pass
        return None

    def resize(self, devices: int, at: float) -> None:
        """Account for a new number of devices."""
        if self._since is not None:
            self._spent_s += max(at - self._since, 0.0) * self.devices
            self._since = at
        self.devices = devices

    def _move(self, event: StateChanged) -> None:
        if self.state is RunState.PENDING:  # another attempt
            self.reason = ""
        self.reason = event.reason or self.reason
        if self._since is None and self.state is RunState.STOPPED:
            self.reason = "it had just been started"  # and wrote no reason itself
        if not self.state.is_active and self._since is not None:
            # A lost worker cost nothing between its last sign of life and its discovery.
            seen_at = min(event.seen_at or event.at, event.at)
            self.resize(self.devices, max(seen_at, self._since))
            self._since = None


def read_trial_events(run: RunStore) -> TrialEvents:
    """Fold all events of a run."""
    events = TrialEvents(devices=1)
    for event, offset in run.read_events():
        events.apply_event(event)
        events.offset = offset
    return events


def has_finished(run: RunStore) -> bool:
    """Whether a run was trained to its end: somebody may have resumed a held trial by hand."""
    return read_trial_events(run).state is RunState.FINISHED
