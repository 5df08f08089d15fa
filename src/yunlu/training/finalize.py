"""End of a run: score the best weights, export them, record the measurements."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

from yunlu.planning.plan import Measurement
from yunlu.runs.events import (
    AttemptStarted,
    ModelExported,
    PredictionMeasured,
    ProgressReported,
)
from yunlu.runs.run_store import Area
from yunlu.training.export import ModelLineage, export

if TYPE_CHECKING:
    from torch import nn

    from yunlu.hardware.fleet import Machine
    from yunlu.runs.run_store import RunStore
    from yunlu.training.callbacks import TrainingCallbacks
    from yunlu.training.engine import Engine


def finalize(
    directory: RunStore,
    engine: Engine,
    callbacks: TrainingCallbacks,
    environment: dict[str, Any],
    machine: Machine,
    *,
    template: nn.Module | None = None,
) -> dict[str, Any]:
    """Restore the best weights, score them on the test split, export them; all workers call this.

    ``template``: the full model without weights, where each worker holds a part of it.
    """
    step, scores = callbacks.take_best()
    if engine.splits.test is not None:
        directory.emit(ProgressReported(phase="scoring the test data"))
        scores["test"] = callbacks.score("test", step=step).metrics
    directory.emit(ProgressReported(phase="exporting the model"))
    model = _assemble_model(engine, template)
    if model is None:
        return {}
    lineage = ModelLineage(splits=engine.splits, environment=environment, step=step, scores=scores)
    names = export(directory, engine.job, engine.task, model, lineage)
    directory.emit(ModelExported(path=Area.MODEL.value, files=tuple(names), from_step=step))
    measured = measure_run(directory, samples=callbacks.samples_done, machine=machine)
    directory.emit(PredictionMeasured(measured=measured))
    return {
        f"{split}/{name}": value
        for split, metrics in scores.items()
        for name, value in metrics.items()
    }


def _assemble_model(engine: Engine, template: nn.Module | None) -> nn.Module | None:
    """The full model on the leader; None on other workers."""
    if not engine.wrapped.is_partitioned:
        return engine.best_view if engine.world.is_leader else None
    from yunlu.training.parallel.gather import gather_model  # noqa: PLC0415 - only with several workers

    assert template is not None
    return gather_model(engine, template)


def measure_run(directory: RunStore, *, samples: int, machine: Machine) -> Measurement:
    """Memory, step time, throughput, total time and cost of a run that is about to finish."""
    # A step that a later attempt repeated is logged twice; the later record wins. Two numbers of each
    # step, not its record: millions of records would not fit into memory beside the model.
    spans_s, memory_bytes = dict[int, float](), 0
    for record, _ in directory.read_metrics():
        spans_s[record["step"]] = record["data_s"] + record["compute_s"]
        memory_bytes = max(memory_bytes, record.get("memory_bytes", 0))
    spans = list(spans_s.values())
    total_s = _active_seconds(directory)
    price = machine.dollars_per_hour
    return Measurement(
        memory_bytes=memory_bytes,
        step_s=median(spans) if spans else 0.0,
        samples_per_s=samples / sum(spans) if spans else 0.0,
        total_s=total_s,
        dollars=None if price is None else price * total_s / 3600,
    )


def _active_seconds(directory: RunStore) -> float:
    total_s, began_at, seen_at = 0.0, None, 0.0
    for event, _ in directory.read_events():
        if isinstance(event, AttemptStarted):
            total_s += seen_at - began_at if began_at is not None else 0.0
            began_at = event.began_at
        seen_at = event.at
    return total_s + (time.time() - began_at if began_at is not None else 0.0)
