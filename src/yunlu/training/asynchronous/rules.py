"""What servers are asked to do for a job, and which jobs they cannot serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.runs.run_store import Document
from yunlu.training.communication.servers.rules import ServerRules

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

_SILENCE_S = 120.0
_SILENT_STEPS = 30
"""So many times what a step takes may a worker be silent before its ticket is handed out again."""


def refuse_job(job: Job, *, workers: int) -> None:
    """Refuse what servers cannot do, before anything is loaded."""
    train, layout, spec = job.train, job.layout, job.communication
    without = {
        "train.ema": train.ema is not None,
        "train.gradient_release": train.gradient_release,
        "train.adapt_batch": train.adapt_batch is not None,
        "train.schedule: plateau": train.schedule.name == "plateau",
        "train.quantize: int8": train.quantize == "int8",
        "train.precision: fp8": train.precision == "fp8",
        f"train.optimizer: {train.optimizer.name}": train.optimizer.name in {"lamb", "lars"},
        "train.optimizer.state: 8bit": train.optimizer.state == "8bit",
        "train.profile": train.profile,
        "layout.zero1": layout.zero1,
    } | {f"layout.{axis}: {size}": size > 1 for axis, size in layout.sizes.items() if axis != "dp"}
    for key, is_asked in without.items():
        if is_asked:
            raise JobError(
                f"{key} cannot be used with communication: asynchronous.",
                hint="remove it, or take another method, such as communication: local",
            )
    if spec.backups >= workers:
        raise JobError(
            f"communication.backups: of {workers} workers, {spec.backups} backups leave none.",
            hint=f"take at most {workers - 1}, or more devices",
        )


def find_async_obstacle(run: RunStore, job: Job, *, workers: int) -> str:
    """Why a run whose crew may choose cannot go on with asynchronous workers; empty where it can."""
    if run.has(Document.TRIAL):
        return "it is a trial, and its study could not stop it"
    try:
        refuse_job(job, workers=workers)
    except JobError as error:
        return error.message.removesuffix(".")
    return ""


def refuse_plan(plan: Plan) -> None:
    """Refuse a layout in which workers do not hold the whole model each."""
    if plan.layout.dp != plan.layout.world:
        raise JobError(
            f"communication: asynchronous needs replicas; the layout is {plan.layout}.",
            hint=f"set layout to dp{plan.devices}, or communication to auto",
        )


def make_rules(job: Job, plan: Plan, *, first_step: int) -> ServerRules:
    """How the servers of a run hold, hand out and change weights."""
    spec = job.communication
    codec = "none" if spec.codec == "auto" else spec.codec
    return ServerRules(
        steps=plan.steps,
        first_step=first_step,
        # On one machine a second server would only take the processor from a worker.
        shards=1 if spec.servers == "auto" else spec.servers,
        mode=spec.consistency,
        staleness=spec.staleness,
        correction=spec.correction,
        shares=plan.layout.world,
        backups=spec.backups,
        codec=codec,
        # Weights are no gradients: what is left out of them is not made up for by the next ones.
        pull_codec=codec if codec in {"none", "bf16"} else "fp16",
        codec_share=spec.keep,
        optimizer=job.train.optimizer,
        weight_decay=plan.weight_decay,
        l2=job.train.l2,
        silence_s=max(_SILENCE_S, _SILENT_STEPS * plan.prediction.step_s),
    )
