"""Split constraints of a model, and the memory of each split. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from yunlu.core.value import Value

if TYPE_CHECKING:
    from yunlu.planning.layout import Layout

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
    if layout.fsdp > 1:  # the current block and the next one are gathered
        buffers = 2 * facts.weight_bytes / (cut * max(facts.layers // layout.pp, 1))
    if facts.on_cpu:
        buffers += copies_bytes(layout, facts)
    return {
        "weights": facts.weight_bytes / ways,
        "optimizer": facts.state_bytes / (ways * sharers),
        "gradients": facts.gradient_bytes / ways,
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
    # While a checkpoint is written, a copy of each replica's part is alive.
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
