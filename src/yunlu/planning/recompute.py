"""Activation recomputation: the least that fits in memory."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

RecomputeMode: TypeAlias = Literal["none", "selective", "full"]

EXTRA_TIME: Mapping[RecomputeMode, float] = MappingProxyType(
    {"none": 0.0, "selective": 0.23, "full": 0.35}
)
"""Time that each mode adds to a pass, as a share of it: a small transformer on a CPU."""


def plan_recompute(
    kept_bytes: Mapping[RecomputeMode, float],
    room_bytes: float,
    *,
    extra_time: Mapping[RecomputeMode, float] = EXTRA_TIME,
) -> tuple[RecomputeMode, float]:
    """The mode and the share of the blocks with which activations fit at the least cost of time.

    Where nothing fits, the thriftiest there is: a smaller micro-batch must do the rest.

    Args:
        kept_bytes: What a pass holds with each mode applied to all blocks; ``none`` is always there.
        room_bytes: What it may hold.
        extra_time: What each mode adds to a pass, applied to all blocks.
    """
    everything = kept_bytes["none"]
    if everything <= room_bytes:
        return "none", 0.0
    # What is saved grows with each block; the memory to compute one block again is in the figure
    # for all of them, so a part of them never takes more than this line says.
    shares: dict[RecomputeMode, float] = {
        mode: (everything - room_bytes) / (everything - retained)
        for mode, retained in kept_bytes.items()
        if retained <= room_bytes
    }
    if shares:
        mode = min(shares, key=lambda mode: shares[mode] * extra_time[mode])
        return mode, shares[mode]
    thriftiest = min(kept_bytes, key=lambda mode: kept_bytes[mode])
    return thriftiest, 0.0 if thriftiest == "none" else 1.0
