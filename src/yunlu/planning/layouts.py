"""Layout choice: validate a requested layout, choose one, re-plan it when devices change.

Pure: the same facts give the same layout on every worker and in every life of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from yunlu.core.errors import JobError, ModelError, YunluError
from yunlu.core.units import show_bytes
from yunlu.planning.conflicts import find_conflicts, refuse_conflicts, restrict
from yunlu.planning.layout import Layout
from yunlu.planning.split_constraints import (
    NOT_EXAMINED,
    SplitConstraints,
    WorkerShare,
    moved_share,
    worker_bytes,
)
from yunlu.spec.layout import SPLITTING, LayoutSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from yunlu.spec.job import Job

__all__ = [
    "SplitConstraints",
    "check_layout",
    "choose_layout",
    "count_devices",
    "layout_from",
    "refuse_conflicts",
    "replan",
    "replan_with_reason",
    "restrict",
]

_SMALLEST = WorkerShare(micro_batch=1, micros=1)
_AUTO_LAYOUT = LayoutSpec()

_Key: TypeAlias = "Callable[[Layout], tuple[float, ...]]"

_DEEDS = {
    "fsdp": "weights, gradients and optimiser state are sharded",
    "tp": "each matrix is cut",
    "pp": "the layers stand in a row",
    "dp": "each device holds all of the model and takes its own samples",
}
_COPIES = "copies of it take their own samples"


def count_devices(job: Job, *, gpus: int) -> int:
    """Number of workers of a job on a machine with so many GPUs."""
    if job.devices != "auto":
        return job.devices
    given = job.layout.said_workers
    is_bound_to_one = any("dp" in clash.axes for clash in find_conflicts(job))
    if job.layout.is_whole or given > gpus or is_bound_to_one:
        return given
    return max(gpus // given * given, 1)


def layout_from(wanted: LayoutSpec, sizes: Mapping[str, int]) -> Layout:
    """The layout of these sizes, with the requested options that apply to it."""
    dp, fsdp, tp, pp = (sizes.get(axis, 1) for axis in SPLITTING)
    stages = wanted.stages_per_rank
    if stages == "auto":
        stages = 2 if wanted.schedule == "interleaved" else 1
    schedule = wanted.schedule
    if schedule == "auto":
        schedule = "interleaved" if stages > 1 else "1f1b"
    return Layout(
        dp=dp,
        fsdp=fsdp,
        tp=tp,
        pp=pp,
        sequence=wanted.sequence and tp > 1,
        vocabulary=wanted.vocabulary and tp > 1,
        zero1=wanted.zero1 and dp > 1 and fsdp == 1,
        schedule=schedule if pp > 1 else "1f1b",
        stages_per_rank=stages if pp > 1 else 1,
    )


def check_layout(layout: Layout, facts: SplitConstraints, *, devices: int, batch: int) -> None:
    """Raise, with the reason, where the model, the batch or the devices do not allow the layout."""
    if layout.world > devices:
        raise JobError(
            f"The layout {layout} needs {layout.world} devices, and there are {devices}.",
            hint=f"say devices: {layout.world}, or leave layout: auto",
        )
    refused = _refusal(layout, facts, batch)
    if refused is not None:
        raise refused


def choose_layout(
    devices: int,
    facts: SplitConstraints,
    *,
    batch: int,
    room_bytes: float,
    wanted: LayoutSpec = _AUTO_LAYOUT,
    nodes: int = 1,
) -> tuple[Layout, str]:
    """The layout for so many devices, and why; a requested layout stays as it is.

    Replicas while the model fits one device; then sharding, within each node and replicated over
    the nodes where that is enough; then cut matrices, within a node; a pipeline last.

    Args:
        devices: Over all nodes.
        facts: What the model allows (see ``restrict`` for what the job does).
        batch: Samples of a step; there are never more replicas.
        room_bytes: Memory of one device that weights, gradients, state and activations may take.
        wanted: Layout keys of the job.
        nodes: Machines that the devices are spread over, evenly.
    """
    if wanted.is_whole:
        layout = layout_from(wanted, wanted.sizes)
        if layout.world < devices:
            raise JobError(
                f"The layout {layout} is for {layout.world} devices, not {devices}.",
                hint="leave out one axis, and it will be chosen",
            )
        check_layout(layout, facts, devices=devices, batch=batch)
        return layout, "as asked" + _doubt(layout, facts, room_bytes)

    def key(layout: Layout) -> tuple[float, ...]:
        return _plainness(layout, nodes=nodes)

    result, refused = _search(devices, facts, wanted, batch=batch, room_bytes=room_bytes, key=key,
                             pins=wanted.sizes)  # fmt: skip
    reason = _reason(result, facts, batch=batch, devices=devices, room_bytes=room_bytes)
    reason += _lost_zero1(result, facts, wanted)
    return result, _with_idle(reason, result, devices, refused)


def replan(
    layout: Layout,
    devices: int,
    facts: SplitConstraints,
    *,
    batch: int,
    room_bytes: float,
    pinned: LayoutSpec = _AUTO_LAYOUT,
    nodes: int = 1,
) -> Layout:
    """The layout for another number of devices, as similar to this one as possible."""
    result, _ = replan_with_reason(
        layout, devices, facts, batch=batch, room_bytes=room_bytes, pinned=pinned, nodes=nodes
    )
    return result


def replan_with_reason(
    layout: Layout,
    devices: int,
    facts: SplitConstraints,
    *,
    batch: int,
    room_bytes: float,
    pinned: LayoutSpec = _AUTO_LAYOUT,
    nodes: int = 1,
) -> tuple[Layout, str]:
    """As ``replan``, with the reason.

    ``pinned`` is what the user asked for. It comes back as soon as the number of devices allows it;
    until then as many of its axes as possible stay.
    """
    wanted = layout_from(pinned, pinned.sizes)
    if pinned.is_whole and wanted.world == devices and _refusal(wanted, facts, batch) is None:
        reason = "as asked" + _doubt(wanted, facts, room_bytes)
        return wanted, "as before" if wanted == layout else reason
    if layout.world == devices and not _violated(layout, pinned):
        return layout, "as before"

    def key(new: Layout) -> tuple[float, ...]:
        changes = (_violated(new, pinned), _changes(layout, new), new.pp, new.tp)
        return (*changes, moved_share(layout, new), *_plainness(new, nodes=nodes))

    options = _options_of(layout) if pinned == _AUTO_LAYOUT else pinned
    result, refused = _search(
        devices, facts, options, batch=batch, room_bytes=room_bytes, key=key, pins={}
    )
    if not _changes(layout, result):
        reason = f"{layout} becomes {result}: split as before, over other devices"
        reason += _doubt(result, facts, room_bytes)
    else:
        why = _reason(result, facts, batch=batch, devices=devices, room_bytes=room_bytes)
        reason = f"{layout} becomes {result} on {_devices(result.world)}: {why}"
    reason += _lost_zero1(result, facts, options)
    return result, _with_idle(reason, result, devices, refused)


def _refusal(layout: Layout, facts: SplitConstraints, batch: int) -> YunluError | None:
    """Why the layout is impossible; empty if it is possible."""
    for axis in SPLITTING:
        if layout.size_of(axis) > 1 and axis in facts.why_not:
            why, hint = (
                facts.why_not[axis],
                f"leave {axis} out of the layout, or leave layout: auto",
            )
            if why == NOT_EXAMINED:
                hint = f"start a new run with --devices {layout.world}, or {hint}"
            return ModelError(f"The layout {layout} cannot be: no {axis} here, {why}.", hint=hint)
    if layout.replicas > batch:
        return JobError(
            f"The layout {layout} shares {batch} samples a step among {layout.replicas} replicas.",
            hint=f"raise train.batch to {layout.replicas} or more, or take fewer replicas",
        )
    if layout.tp > 1 and layout.tp not in facts.tensor_ways:
        ways = [str(size) for size in sorted(facts.tensor_ways) if size > 1]
        return ModelError(
            f"The model's matrices cannot be cut {layout.tp} ways (layout {layout}).",
            hint=f"tp may be {' or '.join(ways)}" if ways else "use dp, fsdp or pp",
        )
    if layout.stages > facts.layers:
        return ModelError(
            f"The layout {layout} has {layout.stages} stages; the model can be parted into "
            f"{facts.layers} at most.",
            hint=f"pp x stages_per_rank may be {facts.layers} at most",
        )
    unshared = facts.why_not_share(layout) if layout.zero1 else ""
    if unshared:
        return ModelError(
            f"The layout {layout} cannot have zero1: {unshared}.", hint="remove zero1"
        )
    return _option_refusal(layout)


def _option_refusal(layout: Layout) -> YunluError | None:
    """Options whose axis has size 1."""
    has_stages = layout.stages_per_rank > 1
    wrong = {
        "sequence needs tp": layout.sequence and layout.tp == 1,
        "vocabulary needs tp": layout.vocabulary and layout.tp == 1,
        "zero1 needs dp": layout.zero1 and layout.dp == 1,
        "zero1 does not go with fsdp": layout.zero1 and layout.fsdp > 1,
        "schedule needs pp": layout.schedule != "1f1b" and layout.pp == 1,
        "stages_per_rank needs pp": has_stages and layout.pp == 1,
        "interleaved needs stages_per_rank of 2 or more, and nothing else does": (
            (layout.schedule == "interleaved") != has_stages
        ),
    }
    result = next((text for text, is_wrong in wrong.items() if is_wrong), None)
    return None if result is None else JobError(f"The layout {layout} cannot be: {result}.")


def _search(
    devices: int,
    facts: SplitConstraints,
    options: LayoutSpec,
    *,
    batch: int,
    room_bytes: float,
    key: _Key,
    pins: Mapping[str, int],
) -> tuple[Layout, YunluError | None]:
    """The best layout of the most devices that can be used, and why not all can."""
    refused: YunluError | None = None
    tight: Layout | None = None
    for count in range(devices, 0, -1):
        matches: list[Layout] = []
        for sizes in _splits(count):
            if any(sizes[axis] != size for axis, size in pins.items()):
                continue
            layout = _allowed(layout_from(options, sizes), facts)
            why = _refusal(layout, facts, batch)
            refused = refused or why
            if why is None:
                matches.append(layout)
        fitting = [item for item in matches if fits(item, facts, room_bytes)]
        if fitting:
            return min(fitting, key=key), refused
        if matches and tight is None:
            tight = min(matches, key=lambda item: worker_bytes(item, facts, _SMALLEST))
    if tight is None:
        raise refused or JobError(
            f"{_devices(devices)} cannot be split as asked.", hint="leave layout: auto"
        )
    return tight, refused


def fits(layout: Layout, facts: SplitConstraints, room_bytes: float) -> bool:
    """Whether one worker's part, with one sample at a time, fits its device."""
    return worker_bytes(layout, facts, _SMALLEST) <= room_bytes


def _allowed(layout: Layout, facts: SplitConstraints) -> Layout:
    """The layout without options that the model does not support: interleaving, ZeRO-1."""
    if layout.zero1 and facts.why_not_share(layout):
        layout = layout.model_copy(update={"zero1": False})
    if layout.pp <= facts.layers < layout.stages:
        return layout.model_copy(update={"stages_per_rank": 1, "schedule": "1f1b"})
    return layout


def _splits(count: int) -> Iterator[dict[str, int]]:
    """Every factoring of a number into four axes."""
    for pp in _divisors(count):
        for tp in _divisors(count // pp):
            for fsdp in _divisors(count // (pp * tp)):
                yield {"dp": count // (pp * tp * fsdp), "fsdp": fsdp, "tp": tp, "pp": pp}


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _plainness(layout: Layout, *, nodes: int) -> tuple[float, ...]:
    """Preference: less pipeline, then less tensor parallelism, then less sharding."""
    per_node = layout.world // nodes if layout.world % nodes == 0 else layout.world
    is_torn = per_node % layout.tp != 0  # tp communicates too much for a network
    is_sharded = layout.fsdp > 1
    is_across = layout.fsdp != max(per_node // layout.tp, 1)
    return (layout.pp, is_torn, layout.tp, is_sharded, is_sharded and is_across, -layout.fsdp)


def _changes(old: Layout, new: Layout) -> int:
    """How much the split of the model changes: joining a matrix counts less than splitting it anew."""
    count = 0
    for axis in ("tp", "pp"):
        if new.size_of(axis) != old.size_of(axis):
            count += 1 if new.size_of(axis) == 1 else 2
    # Shards with replicas stay where possible: a replica covers for a loss.
    is_recut = old.dp > 1 and old.fsdp > 1 and new.fsdp != old.fsdp
    return count + ((new.fsdp > 1) != (old.fsdp > 1)) + is_recut


def _violated(layout: Layout, pinned: LayoutSpec) -> int:
    """Number of requested axes with another size."""
    return sum(layout.size_of(axis) != size for axis, size in pinned.sizes.items())


def _options_of(layout: Layout) -> LayoutSpec:
    return LayoutSpec.model_construct(
        sequence=layout.sequence,
        vocabulary=layout.vocabulary,
        zero1=layout.zero1,
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
    )


def _reason(
    layout: Layout, facts: SplitConstraints, *, batch: int, devices: int, room_bytes: float
) -> str:
    if layout.is_single:
        return "one worker holds the whole model" + _doubt(layout, facts, room_bytes)
    need, room = show_bytes(facts.whole_bytes), show_bytes(room_bytes)
    if layout.world == layout.dp:
        return f"{need} of {room} a device: {_DEEDS['dp']}" + _doubt(layout, facts, room_bytes)
    deeds = [_DEEDS[axis] for axis in ("fsdp", "tp", "pp") if layout.size_of(axis) > 1]
    deeds += [_COPIES] if layout.dp > 1 else []
    cause = "as asked"
    if facts.whole_bytes > room_bytes:
        cause = f"{need} do not fit the {room} of one device"
    elif batch < devices:
        cause = f"{batch} samples a step are too few for {devices} replicas"
    return f"{cause}: {', '.join(deeds)}" + _doubt(layout, facts, room_bytes)


def _doubt(layout: Layout, facts: SplitConstraints, room_bytes: float) -> str:
    if fits(layout, facts, room_bytes):
        return ""
    needed = show_bytes(worker_bytes(layout, facts, _SMALLEST))
    return f"; may not fit, a worker takes about {needed} of {show_bytes(room_bytes)}"


def _lost_zero1(layout: Layout, facts: SplitConstraints, options: LayoutSpec) -> str:
    is_lost = options.zero1 and not layout.zero1 and layout.dp > 1 and layout.fsdp == 1
    return f"; without zero1, {facts.why_not_share(layout)}" if is_lost else ""


def _with_idle(reason: str, layout: Layout, devices: int, refused: YunluError | None) -> str:
    if layout.world == devices:
        return reason
    why = f" ({refused.message})" if refused is not None else ""
    return f"{layout.world} of {devices} devices can be used{why}; {reason}"


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"
