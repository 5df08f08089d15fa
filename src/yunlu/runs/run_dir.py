"""The directory of one run: where each file lies, and the log of events that is its truth.

The worker appends events; everybody else reads them. States, the index and the report are derived.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import Field

from yunlu.core.files import append_lines, read_lines
from yunlu.core.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class EventKind(StrEnum):
    """What can happen in a run. The comment names the keys of ``Event.data``."""

    STATE = "state"  # state (a RunState value), reason?, resumed_from_step?
    LIFE = "life"  # number (1 = first start), pid, process_started_at, began_at
    ENVIRONMENT = "environment"  # python, platform, packages, git_commit?, devices, argv
    DATA = "data"  # fingerprint, source, train, validation, test (sample counts), about
    MODEL = "model"  # name, parameters, trainable
    PLAN = "plan"  # the Plan as JSON
    EVALUATION = "evaluation"  # split, step, loss, metrics, confusion?, examples?, seconds, rung? (of the validation data: which one)
    CHECKPOINT = "checkpoint"  # step, path, bytes, seconds, stalled_s, metrics
    WARNING = "warning"  # message
    ERROR = "error"  # code, message, hint?, traceback?
    EXPORT = "export"  # path, files
    MEASURED = "measured"  # what the Prediction foretold, as it was: see planning.plan.Measured
    SKIP = "skip"  # step, reason ("not finite" | "spike" | "overflow"), loss, norm: update left out
    ROLLBACK = "rollback"  # step, to_step, skipping (the bad steps left out from now on)
    PRECISION = "precision"  # step, module, to ("low" | "full"), reason, low_share (of parameters)
    OUT_OF_MEMORY = "out_of_memory"  # step, micro_batch (the new one), message
    TRACE = "trace"  # path?, first_step, steps, wall_s, phases (name, total_s, share), table
    CREW = "crew"  # generation, layout (text), reason, from_step, redone_steps, ranks (rank, member, host, pid, place), lost_s?
    FAULT = "fault"  # what ("killed"|"hung"|"cut off"|"left"|"failed"), member, rank, host, pid, step, detail?
    STRAGGLER = "straggler"  # rank, member, host, ratio (its step time over the median), step
    COMMUNICATION = "communication"  # step, chosen (text), setting, guarantee, reason, predicted, candidates, refused, links
    BATCH = "batch"  # step (from which on, from 1), batch, rate (factor on the learning rate), gain, noise_scale, steps (of the whole run now)
    PROGRESS = "progress"  # phase (e.g. "loading data"), shown while nothing else moves


WORKERS = "workers"
"""In the servers' directory: how many workers there are to be, where that was changed."""


class Event(Value):
    """One thing that happened, at one instant."""

    kind: EventKind
    at: float
    """Seconds since the epoch."""
    data: dict[str, Any] = Field(default_factory=dict)


class RunDir:
    """Paths inside a run's directory, and its two append-only logs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_quiet = False
        """Set in a worker that another one speaks for."""
        self.job = path / "job.json"
        self.job_source = path / "job.source"
        self.plan = path / "plan.json"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.batch = path / "batch"
        self.trial = path / "trial.json"
        self.verdict = path / "verdict.json"
        self.crew = path / "crew.json"
        self.crew_metrics = path / "crew.jsonl"
        self.servers = path / "servers"
        self.logs = path / "logs"
        self.log = path / "worker.log"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.tensorboard = path / "tensorboard"
        self.report_json = path / "report.json"
        self.report_html = path / "report.html"

    @property
    def id(self) -> str:
        """The run's name in the store is the name of its directory."""
        return self.path.name

    def emit(self, kind: EventKind, **data: Any) -> Event:
        """Append one event and return it."""
        event = Event(kind=kind, at=time.time(), data=data)
        if self.is_quiet:
            return event
        append_lines(self.events, [event.model_dump(mode="json")])
        return event

    def warn(self, message: str) -> None:
        """Tell the user something that does not end the run."""
        self.emit(EventKind.WARNING, message=message)

    def read_events(self, *, offset: int = 0) -> Iterator[tuple[Event, int]]:
        """Events from a byte offset on, each with the offset after it."""
        for record, after in read_lines(self.events, offset=offset):
            yield Event.model_validate(record), after

    def read_metrics(self, *, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
        """Metric records from a byte offset on; see ``MetricRecord`` for the keys."""
        yield from read_lines(self.metrics, offset=offset)


METRIC_KEYS = {
    "step": "global step, counted from 1",
    "epoch": "epochs completed, as a fraction",
    "loss": "mean loss of the step over its true count",
    "lr": "learning rate used",
    "grad_norm": "norm of the gradient before clipping",
    "samples": "samples consumed so far",
    "items": "loss items (samples or tokens) of this step",
    "at": "seconds since the epoch",
    "life": "the life that did the step: number of its LIFE event",
    "data_s": "waiting for data",
    "compute_s": "forward, backward, optimiser",
    "communication_s": "waiting for other workers",
    "evaluate_s": "evaluating after the step",
    "checkpoint_s": "stalled by a checkpoint",
    "memory_bytes": "most resident memory of the worker, or allocated on its device, so far",
    "tokens": "tokens computed, padding included; where samples have lengths",
    "padding": "of these, padding; where samples have lengths",
    "noise_scale": "batch at which noise and signal of the gradient are equal; where measured",
    "noise_sqr": "square of the gradient without its noise, averaged over measurements",
    "noise_var": "variance of one sample's gradient, averaged over measurements",
    "noise_parts": "gradients of a step that were compared; 1: two steps in a row, which is biased",
    "loss_scale": "factor on the loss; under fp16",
    "low_share": "share of parameters in low precision; where it may change",
    "exchange_s": "adding up gradients, hidden or not; where workers do",
    "sent_bytes": "sent to other workers by the one that writes; where that is counted",
    "compression_error": "share that compression left out; where there is any",
    "staleness": "updates that the step's gradients did not know of, in the mean; of asynchronous workers",
    "generation": "the crew that did the step: number of its CREW event; where there is a crew",
}
"""One record of ``metrics.jsonl`` per step. After a resume a step may stand twice: the later wins."""
