"""Report builder: the report of a run from its events and metrics.

Built by reading alone, so a running, failed, lost or never-started run has a report too.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from yunlu.core.secrets import mask, mask_value
from yunlu.core.units import show_bytes, show_count, show_duration
from yunlu.jobs.communication import read_communication
from yunlu.jobs.curve_buckets import thin
from yunlu.jobs.logged_steps import part_totals, read_run_log
from yunlu.jobs.report_model import (
    ClassScore,
    Comparison,
    ConfusionMatrix,
    Curve,
    DataLineage,
    EvaluationRow,
    Failure,
    Finding,
    Headline,
    PaddingCost,
    Report,
    RunEnvironment,
    SavedCheckpoint,
    TimeSplit,
)
from yunlu.jobs.step_summary import summarise_steps
from yunlu.jobs.worker_groups import first_failure, name_worker, read_samples, read_worker_groups
from yunlu.runs.events import MemoryExhausted, PrecisionChanged, RolledBack, StepSkipped
from yunlu.runs.run_store import read_raw_job
from yunlu.runs.states import RunState
from yunlu.spec.job import Job
from yunlu.spec.search import lower_is_better

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.core.value import Value
    from yunlu.hardware.fleet import Device
    from yunlu.jobs.curve_buckets import Point
    from yunlu.jobs.logged_steps import RunLog
    from yunlu.jobs.report_model import WorkerGroupHistory
    from yunlu.jobs.step_summary import StepSummary
    from yunlu.planning.plan import Plan
    from yunlu.runs.events import DataOpened, EnvironmentRecorded, Evaluated
    from yunlu.runs.fold import Incident, RunView
    from yunlu.runs.run_store import RunStore

_TOTALS = ("total_s", "dollars")
_QUANTITIES = ("memory_bytes", "step_s", "samples_per_s", *_TOTALS)


def compare(
    log: RunLog, summary: StepSummary, plan: Plan | None, *, complete: bool
) -> tuple[Comparison, ...]:
    """Every quantity of a prediction, where known."""
    predicted = plan.prediction.model_dump() if plan else {}
    estimate = plan.estimate.model_dump() if plan and plan.estimate else {}
    intervals = estimate.get("intervals", {})
    measured = _measured(log, summary, predicted)
    estimate = {
        # Without an interval the total has a part that was not predicted: start-up.
        quantity: value
        for quantity, value in estimate.items()
        if quantity not in _TOTALS or quantity in intervals
    }
    rows: list[Comparison] = []
    for quantity in _QUANTITIES:
        expected, seen = predicted.get(quantity), measured.get(quantity)
        so_far, interval = quantity in _TOTALS and not complete, intervals.get(quantity)
        ratio = seen / expected if expected and seen is not None and not so_far else None
        inside = None
        if interval is not None and seen is not None and not so_far:
            inside = interval[0] <= seen <= interval[1]
        rows.append(
            Comparison(
                quantity=quantity,
                estimated=estimate.get(quantity),
                interval=interval,
                predicted=expected,
                measured=seen,
                ratio=ratio,
                inside=inside,
                so_far=so_far,
            )
        )
    return tuple(rows)


def _measured(
    log: RunLog, summary: StepSummary, predicted: dict[str, Any]
) -> dict[str, float | None]:
    """Measured by the worker; before it reports, computed from its records."""
    if log.view.measured is not None:
        return log.view.measured.model_dump()
    # As in the worker: a step consists of data wait and compute; a stall is not part of it.
    samples, busy_s = summary.samples, summary.busy_s
    total_s = log.wall_s or None
    price, planned_s = predicted.get("dollars"), predicted.get("total_s")
    return {
        "memory_bytes": summary.memory_bytes,
        "step_s": summary.step_s,
        "samples_per_s": samples / busy_s if busy_s and samples else None,
        "total_s": total_s,
        "dollars": price * total_s / planned_s if price and planned_s and total_s else None,
    }


def read_evaluations(log: RunLog, *, wanted: str) -> tuple[str, tuple[EvaluationRow, ...]]:
    """The headline metric and all evaluations: validation by step, the test split last.

    The metric is the one ``wanted`` for, else the one that the task names first.
    """
    result = _by_split_and_step(log)
    order = sorted(result, key=lambda key: (key[0] == "test", key[0] != "validation", key[1]))
    rows = [_row(result[key]) for key in order]
    names = [name for row in rows for name in row.metrics]
    metric = wanted if wanted in {*names, "loss"} else next(iter(names), "loss")
    best = _best([row for row in rows if row.split == "validation"], metric)
    return metric, tuple(row.model_copy(update={"best": row is best}) for row in rows)


def quote(metric: str, rows: Sequence[EvaluationRow]) -> Headline | None:
    """The metric on the test split, else the best on the validation split."""
    tested = [row for row in rows if row.split == "test"]
    quoted = tested or [row for row in rows if row.best] or list(rows)
    if not quoted:
        return None
    row = quoted[-1]
    return Headline(metric=metric, value=_score(row, metric), split=row.split, step=row.step)


def detailed(log: RunLog, rows: Sequence[EvaluationRow]) -> Evaluated | None:
    """The evaluation to show in detail: of the test split, else the best, else the last."""
    scored = _by_split_and_step(log)
    for row in sorted(
        rows, key=lambda row: (row.split == "test", row.best, row.step), reverse=True
    ):
        evaluation = scored[row.split, row.step]
        if evaluation.confusion or evaluation.examples:
            return evaluation
    return None


def confusion_of(evaluation: Evaluated | None) -> ConfusionMatrix | None:
    """The confusion matrix with precision, recall and F1 of each label."""
    confusion = evaluation.confusion if evaluation else None
    if evaluation is None or confusion is None or not confusion.labels:
        return None
    counts = confusion.counts
    columns = [sum(column) for column in zip(*counts, strict=True)]
    return ConfusionMatrix(
        split=evaluation.split,
        step=evaluation.step,
        labels=confusion.labels,
        counts=counts,
        classes=tuple(
            _class_score(label, counts[i][i], taken=columns[i], support=sum(counts[i]))
            for i, label in enumerate(confusion.labels)
        ),
    )


def _by_split_and_step(log: RunLog) -> dict[tuple[str, int], Evaluated]:
    return {(event.split, event.step): event for event in log.view.evaluations}


def _row(evaluation: Evaluated) -> EvaluationRow:
    return EvaluationRow(
        split=evaluation.split,
        step=evaluation.step,
        loss=evaluation.loss,
        metrics=evaluation.metrics,
        seconds=evaluation.seconds,
        best=False,
    )


def _best(rows: Sequence[EvaluationRow], metric: str) -> EvaluationRow | None:
    ranked = [row for row in rows if math.isfinite(_score(row, metric))]
    sign = 1 if lower_is_better(metric) else -1
    # As the worker ranks checkpoints: ties go to the lower loss, then to the earlier step.
    return min(
        ranked, key=lambda row: (sign * _score(row, metric), row.loss, row.step), default=None
    )


def _score(row: EvaluationRow, metric: str) -> float:
    value = row.metrics.get(metric, row.loss if metric == "loss" else None)
    return math.nan if value is None else value


def _class_score(label: str, right: int, *, taken: int, support: int) -> ClassScore:
    return ClassScore(
        label=label,
        precision=right / taken if taken else None,
        recall=right / support if support else None,
        f1=2 * right / (taken + support) if taken + support else None,
        support=support,
    )


_MUCH_PADDING = 0.2
_MUCH_WAITING = 0.4
_LITTLE_EFFECTIVE = 0.95
_FAR = 2.0
"""A batch this many times above or below the noise scale is reported."""


def _padding_cost(summary: StepSummary) -> PaddingCost | None:
    """Tokens and padding of the whole run, where samples have lengths."""
    if not summary.tokens:
        return None
    return PaddingCost(tokens=summary.tokens, padding=summary.padding)


def find_issues(
    summary: StepSummary,
    *,
    plan: Plan | None,
    incidents: Sequence[Incident],
    padding: PaddingCost | None,
    worker_group: WorkerGroupHistory | None = None,
) -> tuple[Finding, ...]:
    """Issues, the most serious first."""
    result = [
        *_worker_group_issues(worker_group),
        *_about_memory(incidents),
        *_about_rollbacks(incidents),
        *_about_skips(incidents),
        *_about_precision(incidents),
        *_about_noise(summary),
        *_about_padding(padding, plan),
    ]
    return tuple(Finding(key=key, fields=fields) for key, fields in result)


_Said = tuple[str, dict[str, str]]


def _worker_group_issues(worker_group: WorkerGroupHistory | None) -> Iterator[_Said]:
    if worker_group is None:
        return
    if (
        worker_group.effective is not None
        and worker_group.effective < _LITTLE_EFFECTIVE
        and len(worker_group.changes) > 1
    ):
        before, worst = max(pairwise(worker_group.changes), key=lambda pair: pair[1].lost_s or 0.0)
        yield (
            "effective",
            {
                "share": f"{worker_group.effective * 100:.1f} %",
                "lost": show_duration(worker_group.lost_s),
                "step": f"{worst.from_step:,}",
                "move": f"{before.layout} → {worst.layout}",
                "most": show_duration(worst.lost_s or 0.0),
            },
        )
    if worker_group.redone_steps:
        yield "redone", {"count": f"{worker_group.redone_steps:,}"}
    if worker_group.stragglers:
        worst = max(worker_group.stragglers, key=lambda item: item.ratio)
        yield (
            "straggler",
            {
                "worker": worst.worker,
                "rank": "–" if worst.rank is None else str(worst.rank),
                "host": worst.host or "–",
                "ratio": f"{worst.ratio:.1f}",
                "step": "–" if worst.step is None else f"{worst.step:,}",
            },
        )
    if (
        worker_group.communication_share is not None
        and worker_group.communication_share > _MUCH_WAITING
    ):
        yield "communication", {"share": f"{worker_group.communication_share * 100:.0f} %"}


def _about_memory(incidents: Sequence[Incident]) -> Iterator[_Said]:
    exhausted = [event for event in incidents if isinstance(event, MemoryExhausted)]
    if exhausted:
        last = exhausted[-1]
        yield (
            "out_of_memory",
            {
                "count": str(len(exhausted)),
                "step": f"{last.step:,}",
                "micro_batch": str(last.micro_batch),
            },
        )


def _about_rollbacks(incidents: Sequence[Incident]) -> Iterator[_Said]:
    rollbacks = [event for event in incidents if isinstance(event, RolledBack)]
    if rollbacks:
        moves = [f"{event.step:,} → {event.to_step:,}" for event in rollbacks[:5]]
        more = ", …" if len(rollbacks) > len(moves) else ""
        yield "rollback", {"count": str(len(rollbacks)), "moves": ", ".join(moves) + more}


def _about_skips(incidents: Sequence[Incident]) -> Iterator[_Said]:
    skipped = [event for event in incidents if isinstance(event, StepSkipped)]
    why = Counter[str](event.reason for event in skipped)
    # A loss scale that is too large is normal while the right one is searched: reported apart.
    overflows = why.pop("overflow", 0)
    if why:
        first = next(event for event in skipped if event.reason != "overflow")
        fields = {"count": why.total(), "not_finite": why["not finite"], "spikes": why["spike"]}
        yield (
            "skip",
            {key: str(count) for key, count in fields.items()} | {"step": f"{first.step:,}"},
        )
    if overflows:
        yield "overflow", {"count": str(overflows)}


def _about_precision(incidents: Sequence[Incident]) -> Iterator[_Said]:
    moves = [event for event in incidents if isinstance(event, PrecisionChanged)]
    if not moves:
        return
    newest = {event.module: event.to for event in moves}
    fields = {"full": str(sum(to == "full" for to in newest.values())), "moves": str(len(moves))}
    yield "precision", fields | {"share": f"{moves[-1].low_share * 100:.0f} %"}


def _about_noise(summary: StepSummary) -> Iterator[_Said]:
    """McCandlish et al. (2018), section 2.2: B samples teach 1 / (1 + scale / B) of the most."""
    late, sizes = summary.late_noise.tolist(), summary.late_batches.tolist()
    if not late or not sizes:
        return
    scale, batch = median(late), median(sizes)
    index = "below" if batch * _FAR < scale else "above" if batch > scale * _FAR else "near"
    yield f"noise_{index}", {"batch": show_count(round(batch)), "scale": show_count(round(scale))}


def _about_padding(padding: PaddingCost | None, plan: Plan | None) -> Iterator[_Said]:
    if padding is not None and padding.share > _MUCH_PADDING and plan and plan.padding == "pad":
        yield "padding", {"share": f"{padding.share * 100:.0f} %"}


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
    summary = summarise_steps(log.batches())
    newest, incidents, padding = summary.newest, view.incidents, _padding_cost(summary)
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
        comparisons=compare(log, summary, plan, complete=state is RunState.FINISHED),
        headline=quote(metric, evaluations),
        curves=_curves(summary, evaluations),
        time=_time_split(log, summary),
        findings=find_issues(
            summary, plan=plan, incidents=incidents, padding=padding, worker_group=worker_group
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


def _curves(summary: StepSummary, rows: Sequence[EvaluationRow]) -> tuple[Curve, ...]:
    validation = [row for row in rows if row.split == "validation"]
    metrics = dict.fromkeys(name for row in validation for name in row.metrics)
    drawn: dict[str, Sequence[Point]] = {
        **_drawn(summary, "loss", key="train_loss"),
        "validation_loss": thin(
            [(row.step, row.loss) for row in validation if row.loss is not None]
        ),
        **{
            f"validation/{name}": thin(
                [(row.step, row.metrics[name]) for row in validation if name in row.metrics]
            )
            for name in metrics
        },
        **_drawn(summary, "lr", is_smoothed=False),
        **_drawn(summary, "grad_norm"),
        **_drawn(summary, "samples_per_s"),
        **_drawn(summary, "items_per_s"),
        **_drawn(summary, "tokens_per_s"),
        **_drawn(summary, "padding_share"),
        **_drawn(summary, "memory_bytes", is_smoothed=False),
        **_drawn(summary, "noise_scale"),
        **_drawn(summary, "batch", is_smoothed=False),
        **_drawn(summary, "low_share", is_smoothed=False),
        **_drawn(summary, "loss_scale", is_smoothed=False),
        **_drawn(summary, "exchange_s"),
        **_drawn(summary, "sent_bytes"),
        **_drawn(summary, "compression_error"),
    }
    return tuple(
        Curve(
            key=key,
            steps=tuple(step for step, _ in points),
            values=tuple(value for _, value in points),
        )
        for key, points in drawn.items()
        if points
    )


def _drawn(
    summary: StepSummary, name: str, *, key: str | None = None, is_smoothed: bool = True
) -> dict[str, Sequence[Point]]:
    """The curve, and a smoothed one where there is something to smooth."""
    curve = summary.curves.get(name)
    if curve is None:
        return {}
    key = key or name
    smoothed = thin(curve.smoothed()) if is_smoothed and curve.count >= 20 else []
    return {key: curve.points(), f"{key}_smoothed": smoothed}


def _time_split(log: RunLog, summary: StepSummary) -> TimeSplit | None:
    if not summary.steps:
        return None
    steps, shares = summary.shares
    return TimeSplit(
        totals=part_totals(log, summary.seconds),
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
