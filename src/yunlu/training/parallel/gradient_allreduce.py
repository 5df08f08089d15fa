"""Gradients of replicas added up while the backward pass still runs (Li et al. 2020, section 3.2).

torch's DistributedDataParallel wraps a module, averages, and ends with its process group. This works on
a list of weights, whatever module they belong to and however they are split, adds, and is made anew in
milliseconds when the group is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from yunlu.training.communication.buckets import split_buckets, starts_of
from yunlu.training.gradient_noise import choose_positions
from yunlu.training.parallel.tensor_slices import is_distributed, local_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from yunlu.training.communication.allreducer import AllReducer, PendingAllReduce


@dataclass(slots=True, eq=False)
class _Slot:
    """The place of one weight's gradient in a bucket."""

    weight: nn.Parameter
    start: int
    view: Tensor = field(init=False)
    grad: Tensor = field(init=False)
    """What the weight gets as its gradient: the view, or the split tensor around it."""
    is_seen: bool = False
    is_used: bool = False


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that travel together."""

    flat: Tensor
    slots: list[_Slot]
    gaps: list[Tensor]
    """What no gradient fills."""
    missing: int = 0
    pending: PendingAllReduce | None = None
    positions: Tensor | None = None
    """Those of ``flat`` that are looked at."""
    factors: Tensor | None = None
    """What a square at each of them counts."""


class GradientAllReduce:
    """Adds up the gradients of some weights over a group.

    In each step: ``arm()`` before the last backward pass, ``finish()`` after it. Backward passes before
    ``arm()`` only accumulate. In between, a bucket is sent as soon as its gradients are there, always in
    the same order. Every member calls ``finish()``, even after no backward pass. Between steps gradients are
    set to none, and nothing else has to happen. After an error in between, ``close()`` and make another.

    A gradient is autograd's own tensor until then, as without replicas. It is copied into its bucket once
    and freed; from there on the weight's gradient is a view of the bucket, until it is set to none.

    Args:
        weights: In the order in which the model uses them, the same on every member.
        summation: How to add, and over whom.
        bucket_bytes: Gradients sent at a time; larger ones go alone.
        holders: By a weight's ``id``, how many members of other groups hold the same part of it.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        allreducer: AllReducer,
        *,
        bucket_bytes: int = 25 << 20,
        holders: Mapping[int, int] | None = None,
    ) -> None:
        self._allreducer = allreducer
        self._holders = holders or {}
        self._buckets, self._flags = _make_buckets(weights, bucket_bytes)
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        if not allreducer.is_exact:
            self._flags = torch.zeros(len(self._slots))  # to be counted, not estimated
        self._next = 0
        self._begun_at: float | None = None
        self.exchange_s = 0.0
        """From the first gradients sent to the last that came, in the last step."""
        self._is_armed = False
        self.is_watched = False
        """Whether to look at the gradients of the step to come: see ``squares``."""
        self._ours: list[Tensor] = []
        self._summed: list[Tensor] = []
        self._hooks = [
            slot.weight.register_post_accumulate_grad_hook(partial(self._note, bucket, slot))
            for bucket in self._buckets
            for slot in bucket.slots
        ]

    def arm(self) -> None:
        """Send each gradient as soon as the backward pass that follows, the step's last, has it."""
        for slot in self._slots:
            slot.is_seen = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
        self._ours, self._summed = [], []
        self._is_armed = True

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the sum over all members in each weight's gradient; none where nobody had one."""
        self._is_armed = False
        while self._next < len(self._buckets):
            self._start_next()
        counted = None
        if not self._allreducer.is_exact:
            counted = self._allreducer.begin(self._flags, key=-1)
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.pending = None
        if counted is not None:
            counted.wait()
        self._next = 0
        if self._begun_at is not None:
            self.exchange_s = perf_counter() - self._begun_at
        self._begun_at = None
        if self.is_watched:
            self._summed = [self._square(bucket) for bucket in self._buckets]
        if all(slot.is_used for slot in self._slots):
            return
        for slot, users in zip(self._slots, self._flags.tolist(), strict=True):
            if not users:
                slot.weight.grad = None

    @property
    def is_exact(self) -> bool:
        """Whether sums are what they say."""
        return self._allreducer.is_exact

    def squares(self) -> tuple[Tensor, Tensor]:
        """The squares of our gradient and of the sum, by some of their numbers; zeros if not watched."""
        nothing = torch.zeros((), dtype=torch.float64, device=self._flags.device)
        return sum(self._ours, nothing), sum(self._summed, nothing)

    def close(self) -> None:
        """Let go of the weights; gradients that they have become their own. Also after an error."""
        for hook in self._hooks:
            hook.remove()
        for slot in self._slots:
            if slot.weight.grad is slot.grad:
                slot.weight.grad = slot.grad.clone()
        self._hooks.clear()
        self._slots.clear()
        self._buckets.clear()

    def _note(self, bucket: _Bucket, slot: _Slot, _weight: Tensor) -> None:
        if not self._is_armed:
            return
        if slot.is_seen:
            raise RuntimeError(
                "a gradient changed after arm(), which comes before the last backward"
            )
        slot.is_seen = True
        _take(slot)  # at once, while it is in the cache
        bucket.missing -= 1
        if bucket.missing == 0:
            # In one order for all members, whichever of their gradients came first.
            while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
                self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._begun_at is None:
            self._begun_at = perf_counter()
        if not self._is_armed:
            for slot in bucket.slots:
                _take(slot)
        if not self._allreducer.is_exact:
            # Sums that are estimates leave something there too, which would come back in the next.
            for gap in bucket.gaps:
                gap.zero_()
        if self._next == len(self._buckets):
            self._set_flags()
        if self.is_watched:
            self._ours.append(self._square(bucket))
        bucket.pending = self._allreducer.begin(bucket.flat, key=self._next - 1)

    @torch.no_grad()
    def _square(self, bucket: _Bucket) -> Tensor:
        if bucket.positions is None or bucket.factors is None:
            total = sum(slot.view.numel() for slot in self._slots)
            bucket.positions, bucket.factors = _choose_positions(bucket, total, self._holders)
        return bucket.flat.take(bucket.positions).double().square().dot(bucket.factors)

    def _set_flags(self) -> None:
        used = [slot.is_used for slot in self._slots]
        if all(used):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(used, dtype=self._flags.dtype))


def _take(slot: _Slot) -> None:
    """Move a weight's gradient into its bucket: zeros where it has none."""
    share = slot.weight.grad
    slot.is_used = share is not None
    if share is None:
        slot.view.zero_()
    elif share is not slot.grad:
        slot.view.copy_(_local_share(share, slot.weight))
    slot.weight.grad = slot.grad


def _make_buckets(
    weights: Sequence[nn.Parameter], bucket_bytes: int
) -> tuple[list[_Bucket], Tensor]:
    """The buckets in the order of sending, and room in the last one to tell who got a gradient."""
    groups = split_buckets(weights, bucket_bytes, local=_local)
    buckets: list[_Bucket] = []
    flags = torch.zeros(0)
    for number, group in enumerate(groups):
        starts, end = starts_of(group, local=_local)
        slots = [_Slot(weight, start) for weight, start in zip(group, starts, strict=True)]
        extra = len(weights) if number == len(groups) - 1 else 0
        first = _local(group[0])
        flat = torch.zeros(end + extra, dtype=first.dtype, device=first.device)
        for slot in slots:
            slot.view, slot.grad = _place(slot.weight, flat, slot.start)
        if extra:
            flags = flat[end:]
        ends = [*starts[1:], len(flat)]
        gaps = [
            flat[slot.start + slot.view.numel() : end]
            for slot, end in zip(slots, ends, strict=True)
        ]
        buckets.append(_Bucket(flat, slots, [gap for gap in gaps if len(gap)]))
    return buckets, flags


def _choose_positions(
    bucket: _Bucket, total: int, holders: Mapping[int, int]
) -> tuple[Tensor, Tensor]:
    """Where to look, and what each number there stands for: the others like it."""
    generator = torch.Generator().manual_seed(total)
    positions: list[Tensor] = []
    factors: list[Tensor] = []
    for slot in bucket.slots:
        size = slot.view.numel()
        chosen = choose_positions(size, total, generator)
        positions.append(slot.start + chosen)
        each = size / max(len(chosen), 1) / holders.get(id(slot.weight), 1)
        factors.append(torch.full((len(chosen),), each, dtype=torch.float64))
    device = bucket.flat.device
    return torch.cat(positions).to(device), torch.cat(factors).to(device)


def _place(weight: nn.Parameter, flat: Tensor, start: int) -> tuple[Tensor, Tensor]:
    local = _local(weight)
    reach = sum(
        (size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)
    )
    if local.numel() and reach + 1 == local.numel():
        # Laid out as the weight: fused optimisers walk through both in the order of memory.
        view = flat.as_strided(local.shape, local.stride(), start)
    else:
        view = flat[start : start + local.numel()].view(local.shape)
    if not is_distributed(weight):
        return view, view
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - see is_spread

    whole = DTensor.from_local(
        view,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return view, whole


def _local(weight: Tensor) -> Tensor:
    return local_of(weight).detach()


def _local_share(share: Tensor, weight: Tensor) -> Tensor:
    if not is_distributed(share):
        return share
    assert is_distributed(weight)
    if share.placements != weight.placements:
        # Autograd may leave a sum over the tensor-parallel workers still to do.
        share = share.redistribute(placements=weight.placements)
    return share.to_local()
