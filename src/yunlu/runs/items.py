"""Names of what a run holds: documents, logs, artifacts, claims."""

from __future__ import annotations

from enum import StrEnum


class Document(StrEnum):
    """Values that are replaced whole. The comment names the writer, then the readers.

    The list holds the names that Yunlu itself uses; a tracker may keep a document of its own.
    """

    JOB = "job.json"  # run creation; everybody
    JOB_SOURCE = "job.source"  # run creation, as the user wrote it; people
    SUBMITTED_PLAN = (
        "submitted_plan.json"  # run creation, before anything ran; the worker, which refines it
    )
    PLAN = "plan.json"  # the worker that plans, or the study that copies a run; workers, report
    WORKER = "worker.json"  # whoever starts the worker or supervisor; lifecycle, executors
    WORKER_GROUP = "worker_group.json"  # the supervisor (holds a token: private); nodes, executors
    LAUNCH = "launch.json"  # rank 0 of torchrun, srun, mpirun; the next start of the same launch
    LEASES = "leases.json"  # the executor; its lease programs, lifecycle, scheduler
    QUEUE_ENTRY = "queue.json"  # submit, priority, pause; the scheduler
    ALLOCATION = "allocation.json"  # the scheduler; the scheduler after a restart
    TARGET_BATCH = "target_batch"  # whoever wants another batch; the worker, between steps
    TARGET_WORKERS = "target_workers"  # resize; the supervisor of asynchronous workers
    TRIAL = "trial.json"  # the study; the worker, report
    TRIAL_CONTROL = "trial_control.json"  # the study: rung limit, hold, prune; the worker
    REPORT = "report.json"  # the report; people, programs
    REPORT_PAGE = "report.html"  # the report; people


class Log(StrEnum):
    """Append-only logs of JSON records. The comment names the writer, then the readers."""

    EVENTS = "events.jsonl"  # worker, lifecycle; everybody: the truth about the run
    METRICS = "metrics.jsonl"  # the worker, a record per step; ``read_metrics`` adds those in ``Area.METRICS``
    LEDGER = (
        "ledger.jsonl"  # the worker, a digest of the samples per step; checks that none is lost
    )
    RANK_METRICS = "rank_metrics.jsonl"  # the supervisor; report
    LEASE_EVENTS = "lease_events.jsonl"  # executor and lease programs; scheduler


class Area(StrEnum):
    """Artifacts: directories whose files libraries write by themselves."""

    METRICS = "metrics"  # older records of the metrics, sealed (``runs.metric_log``)
    CHECKPOINTS = "checkpoints"
    MODEL = "model"
    TENSORBOARD = "tensorboard"
    SERVERS = "servers"  # shards of the parameter servers of asynchronous workers
    TRACES = "traces"
    TRACKERS = "trackers"  # files of trackers that write to a directory
    LOGS = "logs"  # text output of single workers


class Claim(StrEnum):
    """Rights that one process at a time holds; a process that dies loses them."""

    WORKER = "worker.lock"
    """To train or supervise the run: held as long as the process lives."""
    LAUNCH = "launch.lock"
    """To start, stop or reap the worker."""
    LEASES = "leases.lock"
    """To change the record of the leases."""
    METRICS = "metrics.lock"
    """To append to the metrics, or to replace their tail: held for a moment."""


WORKER_LOG = "worker.log"
"""Text output of the worker or supervisor."""
