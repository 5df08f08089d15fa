"""Report builder: the report of a run from its events and metrics.

Built by reading alone, so a running, failed, lost or never-started run has a report too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from yunlu.core.secrets import mask, mask_value
from yunlu.core.units import show_bytes
from yunlu.jobs.communication import read_communication
from yunlu.jobs.comparisons import compare
from yunlu.jobs.curves import smooth, thin
from yunlu.jobs.health import (
    find_issues,
    padding_shares,
    read_padding,
    true_tokens,
)
from yunlu.jobs.report_model import (
    Curve,
    DataLineage,
    Failure,
    Report,
    RunEnvironment,
    SavedCheckpoint,
    TimeSplit,
)
from yunlu.jobs.run_log import (
    part_totals,
    parts_over_time,
    points,
    rates,
    read_run_log,
    samples_of_steps,
)
from yunlu.jobs.scores import confusion_of, detailed, quote, read_evaluations
from yunlu.jobs.worker_groups import first_failure, name_worker, read_samples, read_worker_groups
from yunlu.runs.documents import read_raw_job
from yunlu.runs.states import RunState
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.core.value import Value
    from yunlu.hardware.machine import Device
    from yunlu.jobs.curves import Point
    from yunlu.jobs.report_model import EvaluationRow
    from yunlu.jobs.run_log import RunLog
    from yunlu.runs.events import DataOpened, EnvironmentRecorded
    from yunlu.runs.fold import RunView
    from yunlu.runs.run_store import RunStore

V = TypeVar("V", bound="Value")


def build_report(run: RunStore) -> Report:
    """Read a run's files into one value, whatever state it is in; secrets in them are masked."""
    # Events are masked as they are written, but a report is sent around, and its run may be foreign.
    return cast("Report", _mask_texts(_read_report(run)))


def _read_report(run: RunStore) -> Report:
    log = read_run_log(run)
    job, view = _read_job(run), log.view
    state, plan, model = view.state, view.plan, view.model
    metric, evaluations = read_evaluations(log, wanted=plan.best_metric if plan else "auto")
    shown = detailed(log, evaluations)
    newest = log.records[-1] if log.records else {}
    incidents, padding = view.incidents, read_padding(log.records)
    worker_group = read_worker_groups(log, read_samples(run))
    return Report(
        run_id=run.id,
        path=run.address,
        name=job.get("name") or run.id,
        task=job.get("task"),
        model=model.name if model else _model_name(job),
        parameters=model.parameters if model else None,
        trainable=model.trainable if model else None,
        state=state,
        reason=view.reason,
        created_at=view.status.created_at if view.events else None,
        finished_at=_finished_at(log),
        attempts=len(log.attempts),
        resumed_from=tuple(attempt.resumed_from for attempt in log.attempts[1:]),
        step=int(newest.get("step", 0)),
        epoch=newest.get("epoch"),
        job=job,
        job_yaml=_job_yaml(job),
        plan=plan,
        comparisons=compare(log, plan, complete=state is RunState.FINISHED),
        headline=quote(metric, evaluations),
        curves=_curves(log, evaluations),
        time=_time_split(log),
        findings=find_issues(
            log, plan=plan, incidents=incidents, padding=padding, worker_group=worker_group
        ),
        incidents=incidents,
        padding=padding,
        trace=view.trace,
        worker_group=worker_group,
        communication=read_communication(log),
        evaluations=evaluations,
        confusion=confusion_of(shown),
        examples=shown.examples if shown else (),
        checkpoints=_checkpoints(view, run),
        warnings=tuple(warning.message for warning in view.warnings),
        failure=_failure(view) if state is RunState.FAILED else None,
        environment=_environment(view.environment),
        lineage=_lineage(view.data),
        exported=view.export,
    )


def _read_job(run: RunStore) -> dict[str, Any]:
    try:
        return mask_value(read_raw_job(run) or {})
    except OSError:
        return {}


def _mask_texts(value: Any) -> Any:
    """The value with its texts masked; itself where there is nothing to mask."""
    masked = value
    if isinstance(value, str):
        masked = mask(value)
    elif isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        items = {name: _mask_texts(item) for name, item in fields.items()}
        changed = {name: item for name, item in items.items() if item is not fields[name]}
        masked = value.model_copy(update=changed) if changed else value
    elif isinstance(value, dict):
        masked = {key: _mask_texts(item) for key, item in cast("dict[Any, Any]", value).items()}
    elif isinstance(value, (list, tuple)):
        items = [_mask_texts(item) for item in cast("list[Any]", value)]
        masked = items if isinstance(value, list) else tuple(items)
    return value if masked == value else masked


def _job_yaml(job: dict[str, Any]) -> str:
    if not job:
        return ""
    parsed = _parse(Job, job)
    # A job of another version is shown as stored.
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


def _finished_at(log: RunLog) -> float | None:
    if log.view.state.is_active or not log.view.events:
        return None
    return log.attempts[-1].ended_at if log.attempts else log.view.status.updated_at


def _curves(log: RunLog, rows: Sequence[EvaluationRow]) -> tuple[Curve, ...]:
    records = log.records
    samples = samples_of_steps(records)
    items = dict(points(records, "items"))
    tokens = true_tokens(records)
    # An estimate can be so far off that it is not a size.
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
        # Where each sample is one item, or an item a token, the curve would repeat another.
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
    """The batch over the steps; the short last batch of an epoch is not a change."""
    sizes = list(samples.items())
    return [
        (step, max(size, *(near for _, near in sizes[max(0, i - 1) : i + 2])))
        for i, (step, size) in enumerate(sizes)
    ]


def _with_smoothed(key: str, curve: Sequence[Point]) -> dict[str, Sequence[Point]]:
    """The curve and a smoothed one; smoothed before thinning, so that it is exact."""
    return {key: curve, f"{key}_smoothed": smooth(curve) if len(curve) >= 20 else []}


def _curve(key: str, curve: Sequence[Point]) -> Curve:
    retained = thin(curve)
    return Curve(
        key=key,
        steps=tuple(step for step, _ in retained),
        values=tuple(value for _, value in retained),
    )


def _time_split(log: RunLog) -> TimeSplit | None:
    if not log.records:
        return None
    steps, shares = parts_over_time(log)
    return TimeSplit(
        totals=part_totals(log),
        steps=tuple(steps),
        shares={part: tuple(values) for part, values in shares.items()},
    )


def _checkpoints(view: RunView, run: RunStore) -> tuple[SavedCheckpoint, ...]:
    latest = {checkpoint.step: checkpoint for checkpoint in view.checkpoints}
    return tuple(
        SavedCheckpoint(
            step=step,
            path=checkpoint.path,
            bytes=checkpoint.bytes,
            seconds=checkpoint.seconds,
            stalled_s=checkpoint.stalled_s,
            metrics=checkpoint.metrics,
            is_kept=bool(checkpoint.path) and run.has(checkpoint.path),
        )
        for step, checkpoint in sorted(latest.items())
    )


def _failure(view: RunView) -> Failure | None:
    if not view.errors:
        return None
    error = view.errors[-1]
    first = None if error.worker is not None else first_failure(view)
    failed = first or (error if error.worker is not None else None)
    return Failure(
        code=error.code,
        message=error.message,
        hint=error.hint,
        traceback=error.traceback or (first.detail if first else None),
        worker=name_worker(failed) if failed else None,
    )


def _environment(event: EnvironmentRecorded | None) -> RunEnvironment | None:
    if event is None:
        return None
    return RunEnvironment(
        yunlu=event.yunlu,
        python=event.python,
        platform=event.platform,
        git_commit=event.git_commit,
        git_dirty=event.git_dirty,
        packages=event.packages,
        devices=tuple(_device(device) for device in event.devices),
    )


def _device(device: Device) -> str:
    size = f", {show_bytes(device.memory_bytes)}" if device.memory_bytes else ""
    return f"{device.name or device.kind} ({device.kind}{size})"


def _lineage(data: DataOpened | None) -> DataLineage | None:
    if data is None:
        return None
    return DataLineage(
        fingerprint=data.fingerprint,
        source=data.source,
        counts={"train": data.train, "validation": data.validation, "test": data.test},
        about=mask_value(data.about),
    )
