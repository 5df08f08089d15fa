"""The report of a run: everything its files tell, as one value, and as a page for people.

Built by reading alone, so a running, failed, lost or never-started run has a report too.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import ValidationError

from yunlu.core.units import show_bytes
from yunlu.jobs.communication import read_communication
from yunlu.jobs.comparisons import compare
from yunlu.jobs.worker_groups import first_failure, name_worker, read_worker_groups, read_fault, read_samples
from yunlu.jobs.curves import smooth, thin
from yunlu.jobs.health import (
    find,
    padding_shares,
    read_incidents,
    read_padding,
    read_trace,
    true_tokens,
)
from yunlu.jobs.run_log import (
    number,
    numbers,
    part_totals,
    parts_over_time,
    points,
    rates,
    read_run_log,
    samples_of_steps,
)
from yunlu.jobs.report_model import (
    Curve,
    DataLineage,
    ExportedModel,
    Failure,
    Report,
    RunEnvironment,
    SavedCheckpoint,
    TimeSplit,
)
from yunlu.jobs.scores import confusion_of, detailed, example_of, quote, read_evaluations
from yunlu.planning.plan import Plan
from yunlu.runs.documents import read_raw_job
from yunlu.runs.run_dir import EventKind
from yunlu.runs.states import RunState, replay_move
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.core.value import Value
    from yunlu.jobs.curves import Point
    from yunlu.jobs.run_log import RunLog
    from yunlu.jobs.report_model import EvaluationRow
    from yunlu.runs.run_store import RunStore

V = TypeVar("V", bound="Value")

_SECRET = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)


def build_report(run: RunStore) -> Report:
    """Read a run's files into one value, whatever state it is in."""
    recorded = read_run_log(run)
    job = _read_job(run)
    state, reason = _state(recorded)
    plan = _parse(Plan, recorded.last(EventKind.PLAN))
    metric, evaluations = read_evaluations(recorded, asked=plan.best_metric if plan else "auto")
    shown = detailed(recorded, evaluations)
    model = recorded.last(EventKind.MODEL) or {}
    newest = recorded.records[-1] if recorded.records else {}
    incidents, padding = read_incidents(recorded), read_padding(recorded.records)
    worker_group = read_worker_groups(recorded, read_samples(run))
    return Report(
        run_id=run.id,
        path=run.address,
        name=job.get("name") or run.id,
        task=job.get("task"),
        model=model.get("name") or _model_name(job),
        parameters=model.get("parameters"),
        trainable=model.get("trainable"),
        state=state,
        reason=reason,
        created_at=recorded.events[0].at if recorded.events else None,
        finished_at=_finished_at(recorded, state),
        attempts=len(recorded.lives),
        resumed_from=tuple(life.resumed_from for life in recorded.lives[1:]),
        step=int(newest.get("step", 0)),
        epoch=newest.get("epoch"),
        job=job,
        job_yaml=_job_yaml(job),
        plan=plan,
        comparisons=compare(recorded, plan, complete=state is RunState.FINISHED),
        headline=quote(metric, evaluations),
        curves=_curves(recorded, evaluations),
        time=_time_split(recorded),
        findings=find(
            recorded, plan=plan, incidents=incidents, padding=padding, worker_group=worker_group
        ),
        incidents=incidents,
        padding=padding,
        trace=read_trace(recorded),
        worker_group=worker_group,
        communication=read_communication(recorded),
        evaluations=evaluations,
        confusion=confusion_of(shown),
        examples=tuple(example_of(each) for each in shown.get("examples") or ()),
        checkpoints=_checkpoints(recorded, run),
        warnings=tuple(str(each.get("message", "")) for each in recorded.all(EventKind.WARNING)),
        failure=_failure(recorded) if state is RunState.FAILED else None,
        environment=_environment(recorded.last(EventKind.ENVIRONMENT)),
        lineage=_lineage(recorded.last(EventKind.DATA)),
        exported=_exported(recorded.last(EventKind.EXPORT)),
    )


def _state(recorded: RunLog) -> tuple[RunState, str | None]:
    state, reason = RunState.PENDING, None
    for each in recorded.all(EventKind.STATE):
        if each.get("state") not in set(RunState):
            continue
        told = RunState(each["state"])
        if replay_move(state, told) is told:
            state, reason = told, each.get("reason")
    return state, reason


def _read_job(run: RunStore) -> dict[str, Any]:
    try:
        return _without_secrets(read_raw_job(run) or {})
    except OSError:
        return {}


def _without_secrets(value: Any, *, inside_options: bool = False) -> Any:
    """Reports are shown around: storage options and URLs lose whatever opens a door."""
    if isinstance(value, dict):
        return {
            key: "***"
            if inside_options and _SECRET.search(str(key)) and each is not None
            else _without_secrets(each, inside_options=inside_options or key == "options")
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(each, inside_options=inside_options) for each in value]
    if isinstance(value, str):
        return re.sub(r"(://[^/@\s:]*):[^/@\s]+@", r"\1:***@", value)
    return value


def _job_yaml(job: dict[str, Any]) -> str:
    if not job:
        return ""
    parsed = _parse(Job, job)
    # A job of another version is shown as it is.
    shown = parsed.model_dump(mode="json", exclude_defaults=True) if parsed else job
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def _model_name(job: dict[str, Any]) -> str | None:
    model = job.get("model")
    return model.get("name") if isinstance(model, dict) else model


def _parse(kind: type[V], data: dict[str, Any] | None) -> V | None:
    """The value, or None where it is missing or of another version."""
    try:
        return kind.model_validate(data) if data is not None else None
    except ValidationError:
        return None


def _finished_at(recorded: RunLog, state: RunState) -> float | None:
    if state.is_active or not recorded.events:
        return None
    return recorded.lives[-1].ended_at if recorded.lives else recorded.events[-1].at


def _curves(recorded: RunLog, rows: Sequence[EvaluationRow]) -> tuple[Curve, ...]:
    records = recorded.records
    samples = samples_of_steps(records)
    items = dict(points(records, "items"))
    tokens = true_tokens(records)
    # An estimate can miss its mark so far that it is not a size at all.
    noise = [(step, size) for step, size in points(records, "noise_scale") if 0 < size < math.inf]
    validation = [row for row in rows if row.split == "validation"]
    metrics = dict.fromkeys(name for row in validation for name in row.metrics)
    drawn: dict[str, Sequence[Point]] = {
        **_with_smoothed("train_loss", points(records, "loss")),
        "validation_loss": [(row.step, row.loss) for row in validation if row.loss is not None],
        **{
            f"validation/{name}": [
                (row.step, row.metrics[name]) for row in validation if name in row.metrics
            ]
            for name in metrics
        },
        "lr": points(records, "lr"),
        **_with_smoothed("grad_norm", points(records, "grad_norm")),
        **_with_smoothed("samples_per_s", rates(records, samples)),
        # Where each sample is one item, or an item a token, the curve would only repeat another.
        **_with_smoothed(
            "items_per_s", rates(records, items) if items != samples and not tokens else []
        ),
        **_with_smoothed("tokens_per_s", rates(records, tokens)),
        **_with_smoothed("padding_share", padding_shares(records)),
        "memory_bytes": points(records, "memory_bytes"),
        **_with_smoothed("noise_scale", noise),
        "batch": _batch_sizes(samples) if noise else [],
        "low_share": points(records, "low_share"),
        "loss_scale": points(records, "loss_scale"),
        **_with_smoothed("exchange_s", points(records, "exchange_s")),
        **_with_smoothed("sent_bytes", points(records, "sent_bytes")),
        **_with_smoothed("compression_error", points(records, "compression_error")),
    }
    return tuple(_curve(key, curve) for key, curve in drawn.items() if curve)


def _batch_sizes(samples: dict[int, float]) -> list[Point]:
    """The batch over the steps; the short one that ends an epoch is no change of it."""
    sizes = list(samples.items())
    return [
        (step, max(size, *(near for _, near in sizes[max(0, i - 1) : i + 2])))
        for i, (step, size) in enumerate(sizes)
    ]


def _with_smoothed(key: str, curve: Sequence[Point]) -> dict[str, Sequence[Point]]:
    """The curve as it was, and a quieter one for the eye; smoothed before thinning, so true."""
    return {key: curve, f"{key}_smoothed": smooth(curve) if len(curve) >= 20 else []}


def _curve(key: str, curve: Sequence[Point]) -> Curve:
    kept = thin(curve)
    return Curve(
        key=key, steps=tuple(step for step, _ in kept), values=tuple(value for _, value in kept)
    )


def _time_split(recorded: RunLog) -> TimeSplit | None:
    if not recorded.records:
        return None
    steps, shares = parts_over_time(recorded)
    return TimeSplit(
        totals=part_totals(recorded),
        steps=tuple(steps),
        shares={part: tuple(values) for part, values in shares.items()},
    )


def _checkpoints(recorded: RunLog, run: RunStore) -> tuple[SavedCheckpoint, ...]:
    latest = {int(each.get("step", 0)): each for each in recorded.by_step(EventKind.CHECKPOINT)}
    return tuple(
        SavedCheckpoint(
            step=step,
            path=str(each.get("path", "")),
            bytes=number(each.get("bytes")),
            seconds=number(each.get("seconds")),
            stalled_s=number(each.get("stalled_s")),
            metrics=numbers(each.get("metrics")),
            kept=bool(each.get("path")) and run.has(str(each["path"])),
        )
        for step, each in sorted(latest.items())
    )


def _failure(recorded: RunLog) -> Failure | None:
    error = recorded.last(EventKind.ERROR)
    if error is None:
        return None
    first = read_fault(error) if "member" in error else first_failure(recorded.events)
    return Failure(
        code=str(error.get("code", "")),
        message=str(error.get("message", "")),
        hint=error.get("hint"),
        traceback=error.get("traceback") or (first.detail if first else None),
        worker=name_worker(first) if first else None,
    )


def _environment(data: dict[str, Any] | None) -> RunEnvironment | None:
    if data is None:
        return None
    return RunEnvironment(
        yunlu=data.get("yunlu"),
        python=data.get("python"),
        platform=data.get("platform"),
        git_commit=data.get("git_commit"),
        git_dirty=data.get("git_dirty"),
        packages={str(k): str(v) for k, v in (data.get("packages") or {}).items()},
        devices=tuple(_device(each) for each in data.get("devices") or ()),
    )


def _device(data: Any) -> str:
    if not isinstance(data, dict):
        return str(data)
    memory = number(data.get("memory_bytes"))
    size = f", {show_bytes(memory)}" if memory else ""
    return f"{data.get('name') or data.get('kind')} ({data.get('kind')}{size})"


def _lineage(data: dict[str, Any] | None) -> DataLineage | None:
    if data is None:
        return None
    return DataLineage(
        fingerprint=data.get("fingerprint"),
        source=data.get("source"),
        counts={
            split: int(count)
            for split in ("train", "validation", "test")
            if (count := number(data.get(split))) is not None
        },
        about=_without_secrets(data.get("about") or {}),
    )


def _exported(data: dict[str, Any] | None) -> ExportedModel | None:
    if data is None:
        return None
    return ExportedModel(
        path=str(data.get("path", "")),
        files=tuple(str(file) for file in data.get("files") or ()),
        from_step=data.get("from_step"),
    )
