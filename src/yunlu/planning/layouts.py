"""Layout choice: validate a requested layout, choose one, re-plan it when devices change.

Pure: the same facts give the same layout on every worker and in every life of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pydantic import Field

from yunlu.core.errors import JobError, ModelError, YunluError
from yunlu.core.units import show_bytes
from yunlu.core.value import Value
from yunlu.spec.job import SPLITTING, LayoutSpec, read_axes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from yunlu.spec.job import Job

AXES = ("pp", "dp", "fsdp", "tp")
"""From the outermost to the innermost: ``tp`` communicates the most, so its ranks are adjacent."""

Schedule = Literal["gpipe", "1f1b", "interleaved"]


class RankCoordinates(NamedTuple):
    """Coordinates of a rank on each axis."""

    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    tp: int = 0


class Layout(Value):
    """Size of each parallel axis; one worker for every combination."""

    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas, each with its own samples of a step."""
    fsdp: int = Field(default=1, ge=1)
    """Ways in which weights, gradients and optimiser state are sharded, each with its own samples."""
    tp: int = Field(default=1, ge=1)
    """Ways in which each weight matrix is split."""
    pp: int = Field(default=1, ge=1)
    """Pipeline stages, each with some of the layers."""
    sequence: bool = False
    """Sequence parallelism between the split matrices (with ``tp``)."""
    vocabulary: bool = False
    """The loss is computed on the split vocabulary (with ``tp``)."""
    zero1: bool = False
    """Optimiser state is sharded over replicas (with ``dp``)."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule (with ``pp``)."""
    stages_per_rank: int = Field(default=1, ge=1)
    """More than one only where the schedule is interleaved."""

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def replicas(self) -> int:
        """Ways in which the samples of a step are split."""
        return self.dp * self.fsdp

    @property
    def is_single(self) -> bool:
        """Whether there is one worker."""
        return self.world == 1

    @property
    def is_replicated(self) -> bool:
        """Whether each worker holds the whole model."""
        return self.world == self.dp

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.stages_per_rank

    def place_of(self, rank: int) -> RankCoordinates:
        """Coordinates of a rank."""
        rest, tp = divmod(rank, self.tp)
        rest, fsdp = divmod(rest, self.fsdp)
        pp, dp = divmod(rest, self.dp)
        return RankCoordinates(pp=pp, dp=dp, fsdp=fsdp, tp=tp)

    def replica_of(self, rank: int) -> int:
        """Replica index of a rank: its share of a step's samples."""
        coordinates = self.place_of(rank)
        return coordinates.dp * self.fsdp + coordinates.fsdp

    def __str__(self) -> str:
        """Such as ``dp2 x tp2``; ``single`` for one worker."""
        sizes = {axis: self.size_of(axis) for axis in ("dp", "fsdp", "tp", "pp")}
        axes = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        return " x ".join(axes) or "single"

    def size_of(self, axis: str) -> int:
        """Size of an axis."""
        sizes = {"pp": self.pp, "dp": self.dp, "fsdp": self.fsdp, "tp": self.tp}
        return sizes[axis]


def parse_layout(text: str) -> Layout | None:
    """Parse ``dp2 x tp2``, ``fsdp4``, ``single``; None where it is not a layout."""
    sizes = read_axes(text)
    return None if sizes is None or "cp" in sizes else Layout.model_validate(sizes)


_BYTES = 4
"""Weights and gradients are FP32, in any compute precision."""
# A transformer block keeps 34 bytes for each number of its output in 16 bits, that is 17 tensors of
# that size, of which tensor parallel alone leaves 5 whole (Korthikanti et al. 2022, equations 1, 2).
_KEPT_PER_BLOCK = 17
_KEPT_WHOLE_UNDER_TP = 5

_RANKS_COMPARED = 64
"""Ranks compared: the first ranks show how the state moves."""
NOT_EXAMINED = (
    "the run was planned for one worker, and whether its model can be split so was not examined "
    "(start a new run with --devices N, which examines it)"
)

Axis = Literal["dp", "fsdp", "tp", "pp"]


class SplitConstraints(Value):
    """Properties of a model that a layout depends on."""

    parameters: int
    trainable: int
    state_bytes: float
    """Optimiser state."""
    activation_bytes_per_sample: float
    boundary_bytes_per_sample: float = 0.0
    """Activations between two blocks; estimated where 0."""
    layers: int = 1
    """Blocks in a row that a pipeline may divide."""
    tensor_ways: tuple[int, ...] = (1,)
    """Sizes of ``tp`` that divide the heads and widths of every block."""
    why_not: dict[Axis, str] = Field(default_factory=dict)
    """Axes that this model cannot be split over, each with the reason."""
    why_not_zero1: str = ""
    """Why replicas cannot shard the optimiser state; empty where they can."""
    trained_tensors: int = 0
    """Number of trained tensors; 0 where unknown."""
    on_cpu: bool = False
    """Workers compute in the memory where they keep replicas of each other's state."""

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return float(_BYTES * self.parameters)

    @property
    def gradient_bytes(self) -> float:
        """All gradients."""
        return float(_BYTES * self.trainable)

    @property
    def whole_bytes(self) -> float:
        """Weights, gradients and optimiser state on one device, with the activations of one sample."""
        fixed = self.weight_bytes + self.gradient_bytes + self.state_bytes
        return fixed + self.activation_bytes_per_sample

    @property
    def boundary_bytes(self) -> float:
        """Activations between two blocks, for one sample."""
        retained = self.activation_bytes_per_sample / (_KEPT_PER_BLOCK * self.layers)
        return self.boundary_bytes_per_sample or retained

    def why_not_share(self, layout: Layout) -> str:
        """Why the replicas of a layout cannot shard the optimiser state; empty if they can."""
        owners = layout.dp * layout.pp
        if not self.why_not_zero1 and 0 < self.trained_tensors < owners:
            return f"{self.trained_tensors} trained tensors are too few for {owners} owners"
        return self.why_not_zero1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """Share of one worker in a step: samples, in so many micro-batches."""

    micro_batch: int
    micros: int

    @property
    def samples(self) -> int:
        """As many as it computes, at most."""
        return self.micro_batch * self.micros


def worker_share(layout: Layout, *, batch: int, micro_batch: int) -> WorkerShare:
    """Share of the replica with the most samples; all run as many micro-batches."""
    samples = math.ceil(batch / layout.replicas)
    micro = min(micro_batch, samples)
    return WorkerShare(micro_batch=micro, micros=math.ceil(samples / micro))


def state_bytes_of(layout: Layout, facts: SplitConstraints) -> float:
    """Weights and optimiser state that one worker keeps between two steps."""
    cut = layout.tp * layout.pp * layout.fsdp
    sharers = layout.dp if layout.zero1 else 1
    return facts.weight_bytes / cut + facts.state_bytes / (cut * sharers)


def copies_bytes(layout: Layout, facts: SplitConstraints) -> float:
    """Replicas on the host of a worker's own state and its neighbour's: the newest and the previous one.

    They are kept where no other replica holds the same part.
    """
    is_kept = not layout.is_single and (layout.dp == 1 or layout.zero1)
    return 4 * state_bytes_of(layout, facts) if is_kept else 0.0


def worker_bytes(layout: Layout, facts: SplitConstraints, share: WorkerShare) -> float:
    """Weights, gradients, optimiser state and activations of one worker, and replicas if on a CPU."""
    return sum(held_parts(layout, facts, share).values())


def held_parts(layout: Layout, facts: SplitConstraints, share: WorkerShare) -> dict[str, float]:
    """The same by component."""
    cut = layout.tp * layout.pp
    ways, sharers = cut * layout.fsdp, layout.dp if layout.zero1 else 1
    buffers = 0.0
    if layout.fsdp > 1:
        # The current block and the next one are gathered; so are the gradients of the current one, which
        # are copied to be reduced.
        buffers = 4 * facts.weight_bytes / (cut * max(facts.layers // layout.pp, 1))
    if facts.on_cpu:
        buffers += copies_bytes(layout, facts)
    # Replicas exchange gradients in buckets, beside those of earlier micro-batches.
    gradients = 2 if layout.dp > 1 and layout.fsdp == 1 and share.micros > 1 else 1
    return {
        "weights": facts.weight_bytes / ways,
        "optimizer": facts.state_bytes / (ways * sharers),
        "gradients": gradients * facts.gradient_bytes / ways,
        "buffers": buffers,
        "activations": _activation_bytes(layout, facts, share),
    }


def peak_parts(
    layout: Layout,
    facts: SplitConstraints,
    share: WorkerShare,
    *,
    process_bytes: float,
    averages: bool = False,
    releases_gradients: bool = False,
    passes_bytes: float | None = None,
) -> dict[str, float]:
    """Peak memory of one worker by component: the one composition for one worker and for several.

    Args:
        layout: The layout.
        facts: Sizes of the model.
        share: Samples of a pass.
        process_bytes: Memory of the process besides all that.
        averages: Whether an average of the weights is kept.
        releases_gradients: Whether a gradient is freed as soon as it is applied.
        passes_bytes: Measured peak of the process over some passes, without an optimiser.
    """
    parts = held_parts(layout, facts, share)
    if facts.on_cpu:
        # While a checkpoint is written, a copy of each replica's part is alive on the host.
        parts["buffers"] += (parts["weights"] + parts["optimizer"]) / layout.dp
    parts["buffers"] += facts.weight_bytes if averages else 0.0
    gradients = parts["gradients"]
    if releases_gradients:
        parts["gradients"] = 0.0
    if passes_bytes is None:
        return {**parts, "framework": process_bytes}
    # Gradients were allocated while it was measured, whether they are kept or released.
    rest = parts["optimizer"] + parts["buffers"] + parts["gradients"] - gradients
    return {"passes": passes_bytes, "optimizer and buffers": max(rest, 0.0)}


def _activation_bytes(layout: Layout, facts: SplitConstraints, share: WorkerShare) -> float:
    whole = 0.0 if layout.sequence else _KEPT_WHOLE_UNDER_TP / _KEPT_PER_BLOCK
    retained = whole + (1 - whole) / layout.tp
    # GPipe keeps every micro-batch until the backward pass; 1F1B as many as there are later stages.
    waiting = share.micros if layout.schedule == "gpipe" else min(layout.stages, share.micros)
    in_flight = waiting if layout.pp > 1 else 1
    return share.micro_batch * facts.activation_bytes_per_sample * retained * in_flight / layout.pp


def moved_share(old: Layout, new: Layout) -> float:
    """Share of the model's state that workers must fetch, when each keeps what it needs of its own.

    The state is a unit cube cut by ``pp``, ``fsdp`` and ``tp``; worker n of the old is n of the new.
    """
    ranks = min(new.world, _RANKS_COMPARED)
    return sum(_missing(old, new, rank) for rank in range(ranks)) * new.world / ranks


def _missing(old: Layout, new: Layout, rank: int) -> float:
    whole = 1.0 / (new.pp * new.fsdp * new.tp)
    if rank >= old.world:
        return whole
    before, after = old.place_of(rank), new.place_of(rank)
    retained = 1.0
    for axis in ("pp", "fsdp", "tp"):
        old_size, new_size = old.size_of(axis), new.size_of(axis)
        old_at, new_at = getattr(before, axis), getattr(after, axis)
        low = max(old_at / old_size, new_at / new_size)
        high = min((old_at + 1) / old_size, (new_at + 1) / new_size)
        retained *= max(high - low, 0.0)
    return whole - retained


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
