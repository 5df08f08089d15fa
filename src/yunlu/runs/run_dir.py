"""The directory of one run: where each file lies, and the log of events that is its truth.

The worker appends events; everybody else reads them. States, the index and the report are derived.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from yunlu.core.value import Value


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
