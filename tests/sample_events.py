"""Complete events from the few fields that a test is about."""

from __future__ import annotations

from typing import Any, TypeVar

from yunlu.planning.plan import Plan
from yunlu.runs.events import (
    AttemptStarted,
    BatchChanged,
    CheckpointSaved,
    DataOpened,
    EnvironmentRecorded,
    ErrorRaised,
    Evaluated,
    MemoryExhausted,
    ModelBuilt,
    PlanMade,
    RunEvent,
    StepSkipped,
    TraceWritten,
    WorkerGroupFormed,
    WorkerLost,
)

EventT = TypeVar("EventT", bound=RunEvent)

_FIELDS: dict[type[RunEvent], dict[str, Any]] = {
    AttemptStarted: {"number": 1, "pid": 4242, "process_started_at": 1.0, "began_at": 1.0},
    EnvironmentRecorded: {
        "yunlu": "0",
        "python": "3.12.0",
        "platform": "Linux",
        "hostname": "host",
        "cores": 2,
        "memory_bytes": 1 << 33,
        "devices": (),
        "packages": {},
    },
    DataOpened: {"fingerprint": "f", "source": "synthetic:x", "train": 0},
    ModelBuilt: {"name": "mlp", "parameters": 10, "trainable": 10},
    Evaluated: {"split": "validation", "step": 1, "loss": 0.0, "metrics": {}, "seconds": 0.0},
    CheckpointSaved: {"step": 1, "path": "checkpoints/x", "bytes": 1, "seconds": 0.0},
    ErrorRaised: {"code": "training", "message": "it failed"},
    StepSkipped: {"step": 1, "reason": "spike", "loss": 1.0, "norm": 1.0},
    MemoryExhausted: {"step": 1, "micro_batch": 1, "message": ""},
    TraceWritten: {"first_step": 1, "steps": 1, "wall_s": 1.0, "phases": (), "table": ()},
    WorkerGroupFormed: {
        "generation": 1,
        "layout": "dp1",
        "reason": "",
        "from_step": 0,
        "ranks": (),
    },
    WorkerLost: {"cause": "killed", "worker": "0"},
    BatchChanged: {"step": 1, "batch": 1, "steps": 1},
}


def sample(kind: type[EventT], *, at: float | None = None, **fields: Any) -> EventT:
    """An event of a kind; a rank that names only its host gets a number."""
    when = {} if at is None else {"at": at}
    if kind is PlanMade:
        return kind(plan=sample_plan(**fields), **when)
    if "ranks" in fields:
        fields["ranks"] = [
            {"rank": rank, "worker": str(rank), "host": "host"} | dict(given)
            for rank, given in enumerate(fields["ranks"])
        ]
    return kind(**(_FIELDS.get(kind, {}) | fields), **when)


def sample_plan(**fields: Any) -> Plan:
    """A plan; all that is not given is small."""
    return Plan.model_validate(
        {
            "device": "cpu",
            "precision": "fp32",
            "batch": 8,
            "micro_batch": 8,
            "accumulation": 1,
            "steps": 10,
            "steps_per_epoch": 10,
            "warmup_steps": 0,
            "lr": 0.001,
            "weight_decay": 0.0,
            "evaluate_every": 0,
            "checkpoint_every": 10,
            "best_metric": "loss",
            "stopping_metric": "loss",
            "compile": "none",
            "workers": 0,
            "threads": 1,
            "choices": (),
            "prediction": {
                "memory_bytes": 1e9,
                "step_s": 0.01,
                "samples_per_s": 100.0,
                "total_s": 10.0,
                "dollars": None,
            },
        }
        | fields
    )
