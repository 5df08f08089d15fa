"""Step time by component, for many queries at once. Pure.

The formulas and where they come from: docs/planner-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.collectives import sent_share
from yunlu.planning.predict.constants import Constants, shipped_constants
from yunlu.planning.predict.local import StepTime, compose_step
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE

if TYPE_CHECKING:
    from yunlu.planning.predict.query_batch import Column, QueryBatch


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of devices: number of members, latency and bandwidth."""

    members: Column
    bytes_per_s: Column
    latency_s: Column

    def gather_s(self, message_bytes: Column) -> Column:
        """All-gather or reduce-scatter of a message of this total size; 0 for one member."""
        share = sent_share("all-gather", self.members)
        return share * (message_bytes / self.bytes_per_s) + self.latency_s

    def reduce_s(self, message_bytes: Column) -> Column:
        """All-reduce."""
        share = sent_share("all-reduce", self.members)
        return share * (message_bytes / self.bytes_per_s) + self.latency_s


def make_ring(
    points: QueryBatch, members: Column, inside: Column, constants: dict[str, Any]
) -> Ring:
    """A ring of ``members``, of which ``inside`` are in the same node."""
    link = points.link_bytes_per_s * constants["link_share"]
    network = points.network_bytes_per_s * constants["network_share"]
    crosses = members > inside
    # Rings with some members in each node share its NICs with other rings.
    crowded = (inside > 1.0) & (inside < points.node_devices)
    cards = np.where(crowded, inside / constants["crowding"], inside)
    bandwidth = np.where(crosses, np.minimum(link, network * cards), link)
    # NCCL's latency on A100s of one node: 45, 53 and 77 us among 2, 4 and 8 (vTrain's tables).
    hops = np.where(members > 1.0, 1.0 + np.log2(members), 0.0)
    latency = hops * np.where(crosses, constants["network_latency_s"], constants["link_latency_s"])
    return Ring(members, bandwidth, latency)


_CHUNK = 8192
"""Points per chunk, so that temporaries stay in the cache."""

_REFERENCE_PEAK, _USUAL_SHARE = 312e12, 0.869
"""16-bit peak of the A100, the reference of the constants, and its usual share."""
_TF32 = float(PRECISIONS.index("tf32"))
_FP8, _FP4 = float(PRECISIONS.index("fp8")), float(PRECISIONS.index("fp4"))
_SELECTIVE, _FULL = float(RECOMPUTE.index("selective")), float(RECOMPUTE.index("full"))


def step_time(points: QueryBatch, constants: Constants | None = None) -> StepTime:
    """Step time of each point; with the shipped constants unless others are given."""
    constants = shipped_constants() if constants is None else constants
    count = len(points)
    if count <= _CHUNK:
        return _step_time(points, constants)
    parts = [
        _step_time(points.take(slice(start, start + _CHUNK)), constants)  # pyright: ignore[reportArgumentType]
        for start in range(0, count, _CHUNK)
    ]
    return StepTime(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(StepTime)
        }
    )


def _step_time(points: QueryBatch, constants: Constants) -> StepTime:
    c = constants.columns(points.stack)
    micros = points.micros
    tokens = points.tokens / points.cp
    own_s, launch_s, head_s = _compute(points, c, tokens)
    layer_s = _no_less_than(own_s, launch_s)
    # Kernel launches overlap with messages.
    block_s = _no_less_than(own_s + _tensor(points, c, tokens), launch_s)
    block_s = block_s + _context(points, c, tokens)
    if np.any(points.experts > 1.0):
        block_s = block_s + _exchange(points, c, tokens)
    depth = points.layers / points.pp

    # The slowest stage determines the pace (unequal stages, see the docs).
    chunks = points.pp * points.virtual
    deepest = np.ceil(points.layers / chunks) * points.virtual
    even_s = depth * block_s + head_s / points.pp
    uneven_s = np.maximum(deepest * block_s, depth * block_s + head_s)
    pace_s = even_s + c["imbalance"] * (uneven_s - even_s)
    pipe_s = _pipe(points, c, tokens)
    waiting = c["bubble"] * (points.pp - 1.0) / points.virtual
    busy_s = micros * even_s
    gather_s, reduce_s = _data(points, c, micros)
    # Messages overlap with compute, never fully: T = (Tc^3 + Tm^3)^(1/3).
    data_s = (
        np.maximum(np.cbrt(busy_s * busy_s * busy_s + gather_s * gather_s * gather_s) - busy_s, 0.0)
        + reduce_s
    )
    late = c["straggling"] * np.log2(np.maximum(points.devices / points.node_devices, 1.0))
    return compose_step(
        micros=micros,
        own_s=depth * layer_s + head_s / points.pp,
        stage_s=even_s,
        slowest_s=pace_s,
        pipe_s=pipe_s,
        waiting=waiting,
        data_s=data_s,
        optimizer_s=_optimizer(points, c),
        input_s=np.zeros(len(points)),
        other_s=c["step_s"] + micros * c["micro_s"] + late * busy_s,
    )


def _no_less_than(busy_s: Column, launch_s: Column) -> Column:
    """Time of a block, at least that of launching its operators."""
    return np.sqrt(np.sqrt((busy_s * busy_s) ** 2 + (launch_s * launch_s) ** 2))


def _compute(
    points: QueryBatch, c: dict[str, Any], tokens: Column
) -> tuple[Column, Column, Column]:
    """Seconds of one block, of launching it, and of the head: both passes of one micro-batch."""
    p = points
    layers = np.maximum(p.layers, 1.0)
    width = np.maximum(p.hidden, 1.0)
    trained = p.trainable > 0.5 * p.parameters
    passes = np.where(trained, 3.0, 2.0)  # A frozen matrix needs no gradient of its own.
    visible = np.where(p.causal > 0, 0.5, 1.0) * p.seq
    head = 2.0 * passes * width * p.vocab
    block = p.flops_per_token / layers
    # Less than the whole sequence with windowed attention.
    beyond = np.maximum(block - 2.0 * passes * p.active_parameters / layers, 0.0)
    attention = np.minimum(12.0 * p.heads * p.head_dim * visible, beyond)
    matrices = np.maximum(block - attention - head / layers, 0.0)

    # Only products with weights gain from lower precision; attention stays at 16 bits.
    fp8, fp4 = p.precision == _FP8, p.precision == _FP4
    gain = np.where(fp8, c["fp8_share"], np.where(fp4, c["fp4_share"], 1.0))
    peak16 = p.peak_flops / np.where(fp8, 2.0, np.where(fp4, 4.0, 1.0))
    scale = peak16 / _REFERENCE_PEAK
    steep = np.log(scale)
    slow = 1.0 / c["unmeasured_share"]
    if p.reachable is not None:
        # A measured share, relative to the usual one, scales the device's speed.
        slow = np.where(p.reachable > 0, _USUAL_SHARE / p.reachable, slow)
    local = width / p.tp
    speed = p.peak_flops * gain * c["gemm_share"] / slow
    loss = (
        1.0
        + c["gemm_tokens"] / tokens
        + c["gemm_width"] / local
        + c["gemm_tiles"] * scale / (tokens * local)
    )
    share = tokens / p.tp
    gemm_s = matrices * share * loss / speed
    routed = p.experts > 1.0
    if np.any(routed):
        # Products of experts are many and small, and all wait for the most loaded one.
        of_experts = 2.0 * passes * (2.0 + p.gated) * width * p.ffn
        of_experts = np.where(routed, np.minimum(of_experts / np.maximum(matrices, 1.0), 1.0), 0.0)
        gemm_s = gemm_s * (1.0 + of_experts * (1.0 / c["expert_share"] - 1.0))
    late = np.exp(steep * c["attention_power"] * c["tuned_power"])
    kernel = c["attention_share"] * c["first_flash"]
    attention_s = attention * share * late / (peak16 * kernel)
    score_s = c["score_passes"] * 2.0 * p.heads * p.seq * share / p.memory_bytes_per_s
    cut = np.where(
        p.sequence > 0,
        (c["plain_bytes"] + c["cut_bytes"]) / p.tp,
        c["plain_bytes"] + c["cut_bytes"] / p.tp,
    )
    wide = 1.0 + p.ffn / (4.0 * width)
    # Activations of four bytes where products are not in 16 bits or fewer.
    size = np.where(p.precision <= _TF32, 2.0, 1.0) * c["eager_bytes"]
    norms = c["written_norms"] / np.where(p.sequence > 0, p.tp, 1.0)
    plain_s = tokens * width * (cut * wide * size + norms) / p.memory_bytes_per_s
    again = np.where(p.recompute == _FULL, 1.0 / passes, 0.0)
    some = np.where(p.recompute == _SELECTIVE, 1.0 / passes, 0.0)
    products = c["selective_products"]
    inner = again + np.where(products > 0, 0.0, some)
    busy_s = (
        gemm_s * (1.0 + again + products * some)
        + plain_s * (1.0 + again + np.where(products > 0, some, 0.0))
        + (attention_s + score_s) * (1.0 + inner)
    )
    launch_s = c["launch_s"] * (1.0 + again) * np.where(routed, c["expert_launches"], 1.0)
    logits = share * p.vocab
    # The head stays at 16 bits too.
    plain_speed = peak16 * c["gemm_share"] / slow
    head_s = logits * (
        2.0 * passes * width * (1.0 + c["gemm_tokens"] / tokens) / plain_speed
        + c["logit_bytes"] / p.memory_bytes_per_s
    )
    return busy_s, launch_s, head_s


def _inside(points: QueryBatch, closer: Column, members: Column) -> Column:
    """Members of a group within one node, when ``closer`` neighbours of each come first."""
    return np.clip(np.floor(points.node_devices / closer), 1.0, members)


def _tensor(points: QueryBatch, c: dict[str, Any], tokens: Column) -> Column:
    """Tensor-parallel communication of one block."""
    one = np.ones(len(points))
    ring = make_ring(points, points.tp, _inside(points, one, points.tp), c)
    times = np.where(points.recompute == _FULL, 6.0, 4.0)
    wide_s = np.where(points.tp > points.node_devices, c["wide_tensor_s"], 0.0)
    exposed_s = c["tensor_exposed"] * ring.reduce_s(2.0 * tokens * points.hidden)
    return times * (exposed_s + wide_s)


def _context(points: QueryBatch, c: dict[str, Any], tokens: Column) -> Column:
    """Context-parallel communication of one block: keys and values around the ring."""
    ring = make_ring(points, points.cp, _inside(points, points.tp, points.cp), c)
    around = 4.0 * tokens * points.cp * points.kv_heads * points.head_dim / points.tp
    return 3.0 * c["context_exposed"] * ring.gather_s(around)


def _exchange(points: QueryBatch, c: dict[str, Any], tokens: Column) -> Column:
    """All-to-all communication of one block with experts, forward and backward.

    Four all-to-alls; what a device keeps to itself is only copied (Lepikhin et al. 2020).
    """
    p = points
    routed = np.where(p.experts > 1.0, 2.0 * tokens * p.hidden * p.active_experts / p.tp, 0.0)
    inside = _inside(p, p.tp, p.ep)
    near_s = (inside - 1.0) / p.ep * routed / (p.link_bytes_per_s * c["link_share"])
    far_s = (p.ep - inside) / p.ep * routed / (p.network_bytes_per_s * c["network_share"])
    copied_s = c["route_passes"] * routed / p.memory_bytes_per_s
    return 4.0 * c["exchange_exposed"] * np.maximum(near_s, far_s) + copied_s


def _pipe(points: QueryBatch, c: dict[str, Any], tokens: Column) -> Column:
    """Pipeline communication of one micro-batch with the neighbouring stages."""
    near = points.devices / points.pp < points.node_devices
    speed = np.where(
        near,
        points.link_bytes_per_s * c["link_share"],
        points.network_bytes_per_s * c["network_share"],
    )
    latency = np.where(near, c["link_latency_s"], c["network_latency_s"])
    # Each of the tp neighbours sends its part and gathers the rest (Narayanan et al. 2021, 4.1).
    message = 2.0 * tokens * points.hidden / points.tp
    once = c["pipe_exposed"] * 4.0 * points.virtual * (latency + message / speed)
    return np.where(points.pp > 1, once, 0.0)


def _data(points: QueryBatch, c: dict[str, Any], micros: Column) -> tuple[Column, Column]:
    """Gathering of sharded weights, and exposed gradient reduction."""
    p = points
    trained = np.minimum(p.trainable, p.parameters)
    whole = p.parameters / (p.tp * p.pp)
    owned = trained / (p.tp * p.pp)
    closer = p.tp * p.cp
    shards = make_ring(p, p.fsdp, _inside(p, closer, p.fsdp), c)
    sharded = p.zero >= 3
    item = 2.0 * shards.gather_s(2.0 * whole) + shards.gather_s(2.0 * owned)
    gather_s = np.where(sharded, c["sharded_volume"] * micros * item, 0.0)
    members = np.where(sharded, p.dp, p.replicas) * p.cp
    copies = make_ring(p, members, _inside(p, np.where(sharded, closer * p.fsdp, p.tp), members), c)
    message = 2.0 * owned / np.where(sharded, p.fsdp, 1.0)
    # Some stacks reduce gradients of every micro-batch between nodes under a pipeline.
    stalls = (p.zero == 0) & (p.pp > 1) & (members * p.tp > p.node_devices) & (members > 1)
    stall_s = np.where(stalls, c["stall_s"] * (micros - 1.0), 0.0)
    return gather_s, c["data_exposed"] * c["unhidden"] * copies.reduce_s(message) + stall_s


def _optimizer(points: QueryBatch, c: dict[str, Any]) -> Column:
    """Seconds of the update: memory traffic of weights, gradients and moments."""
    p = points
    shards = np.where(p.zero >= 3, p.fsdp, np.where(p.zero > 0, p.replicas, 1.0))
    owned = p.trainable / (p.tp * p.pp * shards)
    return c["optimizer_bytes"] * owned / p.memory_bytes_per_s
