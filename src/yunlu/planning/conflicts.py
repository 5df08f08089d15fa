"""Conflicts between a job and parallel training: settings that some axes do not support. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from yunlu.core.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.planning.layout import Layout
    from yunlu.planning.split_constraints import Axis, SplitConstraints
    from yunlu.spec.job import Job

_ALL: tuple[Axis, ...] = ("dp", "fsdp", "tp", "pp")
_CUT: tuple[Axis, ...] = ("fsdp", "tp", "pp")


class Conflict(NamedTuple):
    """A job key, the axes it excludes, and why."""

    key: str
    axes: tuple[Axis, ...]
    why: str
    zero1: bool = False
    """Whether it excludes sharding of the optimiser state over replicas (ZeRO-1)."""


def refuse_conflicts(job: Job, layout: Layout) -> None:
    """Raise where the layout does not support a setting of the job."""
    for clash in find_conflicts(job):
        used = [axis for axis in clash.axes if layout.size_of(axis) > 1]
        if used:
            raise JobError(
                f"{clash.key} does not go with the layout {layout}: {clash.why}.",
                hint=f"remove {clash.key}, or {_other_layout(clash)}",
            )
        if clash.zero1 and layout.zero1:
            raise JobError(
                f"{clash.key} does not go with the layout {layout} and zero1: {clash.why}.",
                hint=f"remove {clash.key}, or zero1",
            )


def restrict(facts: SplitConstraints, job: Job) -> SplitConstraints:
    """The constraints without the axes that the job excludes."""
    why_not, why_not_zero1 = dict(facts.why_not), facts.why_not_zero1
    for clash in find_conflicts(job):
        for axis in clash.axes:
            why_not.setdefault(axis, f"{clash.key}: {clash.why}")
        if clash.zero1:
            why_not_zero1 = why_not_zero1 or f"{clash.key}: {clash.why}"
    return facts.model_copy(update={"why_not": why_not, "why_not_zero1": why_not_zero1})


def find_conflicts(job: Job) -> Iterator[Conflict]:
    """All conflicts between the job and parallel axes."""
    yield from _clashes_with_any(job)
    train, optimizer = job.train, job.train.optimizer
    if optimizer.traits.needs_whole_weights:
        why = f"{optimizer.name} needs each weight whole, and the weights are cut"
        yield Conflict("train.optimizer.name", ("fsdp", "tp"), why)
    if optimizer.state == "8bit":
        why = "its blocks of 256 numbers would be cut"
        yield Conflict("train.optimizer.state: 8bit", ("fsdp", "tp"), why)
    if train.ema is not None:
        yield Conflict("train.ema", _CUT, "the average is kept of whole weights only")
    if job.model.adapter is not None:
        why = "the layers that carry an adapter cannot be cut or parted yet"
        yield Conflict("model.adapter", ("tp", "pp"), why)
    if train.precision == "fp16":
        why = "the loss scale is not yet agreed between workers that hold parts of the weights"
        yield Conflict("train.precision: fp16", _CUT, why)
        why = "each replica would unscale and check only the gradients of the weights it updates"
        yield Conflict("train.precision: fp16", (), why, zero1=True)


def _clashes_with_any(job: Job) -> Iterator[Conflict]:
    train = job.train
    if train.gradient_release:
        why = "gradients are summed over the workers before a weight may move"
        yield Conflict("train.gradient_release", _ALL, why)
    if train.compile is True or train.compile == "xla":
        yield Conflict("train.compile", _ALL, "compiled models run on one worker so far")
    if train.quantize == "int8":
        yield Conflict("train.quantize: int8", _ALL, "it runs on one worker so far")
    if train.precision == "fp8":
        yield Conflict("train.precision: fp8", _ALL, "it runs on one worker so far")
    if train.adapt_precision is True:
        why = "workers would have to agree on each module's precision"
        yield Conflict("train.adapt_precision", _ALL, why)
    if train.profile:
        yield Conflict("train.profile", _ALL, "a trace is made of one worker")


def _other_layout(clash: Conflict) -> str:
    allowed = [axis for axis in _ALL if axis not in clash.axes]
    return f"split over {' and '.join(allowed)} only" if allowed else "train on one device"
