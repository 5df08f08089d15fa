"""Server rules for a job, and the jobs that asynchronous training cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from yunlu.core.errors import JobError
from yunlu.runs.run_store import Document
from yunlu.training.communication.servers.rules import ServerRules

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.communication import CodecName
    from yunlu.spec.job import Job

_SILENCE_S = 120.0
_SILENT_STEPS = 30
"""Step times that a worker may be silent before its ticket is handed out again."""


def check_job(job: Job, *, workers: int) -> None:
    """Reject options that servers do not support, before anything is loaded."""
    train, layout, spec = job.train, job.layout, job.communication
    unsupported = {
        "train.ema": train.ema is not None,
        "train.gradient_release": train.gradient_release,
        "train.adapt_batch": train.adapt_batch is not None,
        "train.schedule: plateau": train.schedule.name == "plateau",
        "train.quantize: int8": train.quantize == "int8",
        "train.precision: fp8": train.precision == "fp8",
        f"train.optimizer: {train.optimizer.name}": train.optimizer.traits.needs_whole_weights,
        "train.optimizer.state: 8bit": train.optimizer.state == "8bit",
        "train.profile": train.profile,
        "layout.zero1": layout.zero1,
    } | {f"layout.{axis}: {size}": size > 1 for axis, size in layout.sizes.items() if axis != "dp"}
    for key, is_requested in unsupported.items():
        if is_requested:
            raise JobError(
                f"{key} cannot be used with communication: asynchronous.",
                hint="Remove it, or choose another method, such as communication: local.",
            )
    if spec.backups >= workers:
        raise JobError(
            f"communication.backups: of {workers} workers, {spec.backups} backups leave none.",
            hint=f"take at most {workers - 1}, or more devices",
        )


def find_async_obstacle(run: RunStore, job: Job, *, workers: int) -> str:
    """Why a run cannot switch to asynchronous workers; empty if it can."""
    if run.has(Document.TRIAL):
        return "it is a trial, and its study could not stop it"
    try:
        check_job(job, workers=workers)
    except JobError as error:
        return error.message.removesuffix(".")
    return ""


def check_plan(plan: Plan) -> None:
    """Reject a layout in which a worker does not hold the complete model."""
    if plan.layout.dp != plan.layout.world:
        raise JobError(
            f"communication: asynchronous needs replicas; the layout is {plan.layout}.",
            hint=f"set layout to dp{plan.devices}, or communication to auto",
        )


def build_server_rules(job: Job, plan: Plan, *, first_step: int) -> ServerRules:
    """How the servers of a run hold, hand out and update weights."""
    spec = job.communication
    # Codecs of others are refused with the job: servers know only these.
    codec = "none" if spec.codec == "auto" else cast("CodecName", spec.codec)
    return ServerRules(
        steps=plan.steps,
        first_step=first_step,
        # On one machine a second server would only take CPU time from a worker.
        shards=1 if spec.servers == "auto" else spec.servers,
        mode=spec.consistency,
        staleness=spec.staleness,
        correction=spec.correction,
        shares=plan.layout.world,
        backups=spec.backups,
        codec=codec,
        # Weights have no error feedback: what a lossy codec drops is not sent later.
        pull_codec=codec if codec in {"none", "bf16"} else "fp16",
        codec_share=spec.keep,
        optimizer=job.train.optimizer,
        weight_decay=plan.weight_decay,
        l2=job.train.l2,
        silence_s=max(_SILENCE_S, _SILENT_STEPS * plan.prediction.step_s),
    )
