"""End of a run: score the best weights, export them, record the measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.runs.events import ModelExported, PredictionMeasured, ProgressReported
from yunlu.runs.run_store import Area
from yunlu.training.export import ModelLineage, export
from yunlu.training.run_measurement import measure_run

if TYPE_CHECKING:
    from torch import nn

    from yunlu.hardware.machine import Machine
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
