"""All-reduce of gradients overlapped with the backward pass (Li et al. 2020, section 3.2).

torch's DistributedDataParallel wraps a module, averages, and is bound to its process group. This works
on a list of weights of any modules, sharded or not, sums, and is rebuilt in milliseconds for a new group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from yunlu.training.communication.allreducer import split_buckets, starts_of
from yunlu.training.device import CPU, elapsed_s, is_accelerator, record_event, sum_type
from yunlu.training.gradient_noise import choose_positions
from yunlu.training.single_worker import SingleModel
from yunlu.training.tensor_slices import is_distributed, local_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from yunlu.training.communication.allreducer import AllReducer, PendingAllReduce
    from yunlu.training.single_worker import Backward, ForwardContext, LossOf
    from yunlu.training.tasks.task import Batch


@dataclass(slots=True, eq=False)
class _Slot:
    """Position of one weight's gradient in a bucket."""

    weight: nn.Parameter
    start: int
    view: Tensor = field(init=False)
    grad: Tensor = field(init=False)
    """The weight's gradient: the view, or the distributed tensor around it."""
    is_seen: bool = False
    is_used: bool = False


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that are reduced together."""

    flat: Tensor
    slots: list[_Slot]
    gaps: list[Tensor]
    """Padding between gradients."""
    missing: int = 0
    pending: PendingAllReduce | None = None
    positions: Tensor | None = None
    """Sampled positions of ``flat``."""
    factors: Tensor | None = None
    """Weight of the square at each of them."""


class ExchangeClock:
    """Seconds from the first send of a step to the last receive.

    On an accelerator the host waits for neither: two events of the device tell it, and not before the
    next step, when it has reached them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on_device = is_accelerator(device)
        self._begun: float | torch.Event | None = None
        self._events: tuple[torch.Event, torch.Event] | None = None
        self.seconds = 0.0
        """Of the last step; on an accelerator of the one before it."""

    def begin(self) -> None:
        """A bucket is sent: the first one counts."""
        if self._begun is None:
            self._begun = self._now()

    def end(self) -> None:
        """All are received."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        end = self._now()
        if isinstance(begun, torch.Event):
            assert isinstance(end, torch.Event)
            if self._events is not None:
                self.seconds = elapsed_s(*self._events)
            self._events = begun, end
        else:
            assert isinstance(end, float)
            self.seconds = end - begun

    def _now(self) -> float | torch.Event:
        return record_event(self._device, is_timed=True) if self._is_on_device else perf_counter()


class GradientAllReduce:
    """Sums the gradients of some weights over a group.

    In each step: ``arm()`` before the last backward pass, ``finish()`` after it. Backward passes before
    ``arm()`` only accumulate. In between, a bucket is sent as soon as its gradients are complete, always in
    the same order. Every worker calls ``finish()``, even without a backward pass. Between steps gradients
    are set to None. After an error, ``close()`` it and make a new one.

    Until then a gradient is autograd's own tensor. It is copied into its bucket once and freed; from there
    on the weight's gradient is a view of the bucket, until it is set to None.

    Args:
        weights: In the order of use by the model, the same on every worker.
        summation: How to add, and over whom.
        bucket_bytes: Bytes reduced at a time; larger gradients have a bucket of their own.
        holders: Number of workers of other groups with the same shard, by the weight's ``id``.
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
            self._flags = torch.zeros(len(self._slots))  # counts must be exact
        self._next = 0
        self._clock = ExchangeClock(self._buckets[0].flat.device if self._buckets else CPU)
        self._is_armed = False
        self.is_watched = False
        """Whether to measure the gradients of the next step: see ``squares``."""
        self._local_squares: list[Tensor] = []
        self._sum_squares: list[Tensor] = []
        self._hooks = [
            slot.weight.register_post_accumulate_grad_hook(
                partial(self._gradient_ready, bucket, slot)
            )
            for bucket in self._buckets
            for slot in bucket.slots
        ]

    def arm(self) -> None:
        """Start sending gradients as soon as they are complete; before the step's last backward pass."""
        for slot in self._slots:
            slot.is_seen = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
        self._local_squares, self._sum_squares = [], []
        self._is_armed = True

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the sum over the group in each weight's gradient; None if no worker had one."""
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
        self._clock.end()
        if self.is_watched:
            self._sum_squares = [self._square(bucket) for bucket in self._buckets]
        if all(slot.is_used for slot in self._slots):
            return
        for slot, users in zip(self._slots, self._flags.tolist(), strict=True):
            if not users:
                slot.weight.grad = None

    @property
    def exchange_s(self) -> float:
        """Seconds from the first send to the last receive: see ``ExchangeClock``."""
        return self._clock.seconds

    @property
    def is_exact(self) -> bool:
        """Whether sums are exact."""
        return self._allreducer.is_exact

    def squares(self) -> tuple[Tensor, Tensor]:
        """Sampled squares of the local gradient and of the sum; zeros if not watched."""
        device = self._buckets[0].flat.device
        nothing = torch.zeros((), dtype=sum_type(device), device=device)
        return sum(self._local_squares, nothing), sum(self._sum_squares, nothing)

    def close(self) -> None:
        """Remove the hooks; gradients become independent of the buckets. Also after an error."""
        for hook in self._hooks:
            hook.remove()
        for slot in self._slots:
            if slot.weight.grad is slot.grad:
                slot.weight.grad = slot.grad.clone()
        self._hooks.clear()
        self._slots.clear()
        self._buckets.clear()

    def _gradient_ready(self, bucket: _Bucket, slot: _Slot, _weight: Tensor) -> None:
        if not self._is_armed:
            return
        if slot.is_seen:
            raise RuntimeError(
                "a gradient changed after arm(), which comes before the last backward"
            )
        slot.is_seen = True
        _copy_to_bucket(slot)  # immediately, while it is in the cache
        bucket.missing -= 1
        if bucket.missing == 0:
            # In the same order on all workers, whichever gradients are ready first.
            while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
                self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._clock.begin()
        if not self._is_armed:
            for slot in bucket.slots:
                _copy_to_bucket(slot)
        if not self._allreducer.is_exact:
            # Inexact sums leave residues there, which would enter the next sum.
            for gap in bucket.gaps:
                gap.zero_()
        if self._next == len(self._buckets):
            self._set_flags()
        if self.is_watched:
            self._local_squares.append(self._square(bucket))
        bucket.pending = self._allreducer.begin(bucket.flat, key=self._next - 1)

    @torch.no_grad()
    def _square(self, bucket: _Bucket) -> Tensor:
        if bucket.positions is None or bucket.factors is None:
            total = sum(slot.view.numel() for slot in self._slots)
            bucket.positions, bucket.factors = _choose_positions(bucket, total, self._holders)
        sampled = bucket.flat.take(bucket.positions).to(bucket.factors.dtype)
        return sampled.square().dot(bucket.factors)

    def _set_flags(self) -> None:
        used = [slot.is_used for slot in self._slots]
        if all(used):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(used, dtype=self._flags.dtype))


def _copy_to_bucket(slot: _Slot) -> None:
    """Move a weight's gradient into its bucket; zeros if it has none."""
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
    """The buckets in sending order, and flags in the last one for weights with a gradient."""
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
            slot.view, slot.grad = _views(slot.weight, flat, slot.start)
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
    """Sampled positions, and the number of elements that each stands for."""
    device = bucket.flat.device
    generator = torch.Generator().manual_seed(total)
    positions: list[Tensor] = []
    factors: list[Tensor] = []
    for slot in bucket.slots:
        size = slot.view.numel()
        chosen = choose_positions(size, total, generator)
        positions.append(slot.start + chosen)
        factor = size / max(len(chosen), 1) / holders.get(id(slot.weight), 1)
        factors.append(torch.full((len(chosen),), factor, dtype=sum_type(device)))
    return torch.cat(positions).to(device), torch.cat(factors).to(device)


def _views(weight: nn.Parameter, flat: Tensor, start: int) -> tuple[Tensor, Tensor]:
    local = _local(weight)
    reach = sum(
        (size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)
    )
    if local.numel() and reach + 1 == local.numel():
        # Same strides as the weight: fused optimisers traverse both in memory order.
        view = flat.as_strided(local.shape, local.stride(), start)
    else:
        view = flat[start : start + local.numel()].view(local.shape)
    if not is_distributed(weight):
        return view, view
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - see is_distributed

    distributed = DTensor.from_local(
        view,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return view, distributed


def _local(weight: Tensor) -> Tensor:
    return local_of(weight).detach()


def _local_share(share: Tensor, weight: Tensor) -> Tensor:
    if not is_distributed(share):
        return share
    assert is_distributed(weight)
    if share.placements != weight.placements:
        # Autograd may leave a pending sum over the tensor-parallel workers.
        share = share.redistribute(placements=weight.placements)
    return share.to_local()


class SiteReplicas(SingleModel):
    """A full model per worker; gradients are summed over the workers of a site."""

    def __init__(self, model: nn.Module, allreducer: AllReducer, *, bucket_bytes: int) -> None:
        super().__init__(model)
        self._allreduce = GradientAllReduce(self.weights, allreducer, bucket_bytes=bucket_bytes)

    def accumulate(
        self,
        micros: Sequence[Batch],
        loss_of: LossOf,
        backward: Backward,
        *,
        forward: ForwardContext,
    ) -> Tensor:
        """Forward and backward; the reduction overlaps the last backward pass."""
        *before, last = micros
        total = None
        if before:
            total = super().accumulate(before, loss_of, backward, forward=forward)
        self._allreduce.arm()
        loss = super().accumulate([last], loss_of, backward, forward=forward)
        return loss if total is None else total + loss

    def finish(self) -> None:
        """Wait for the gradient reduction over the site."""
        self._allreduce.finish()
        self.exchange_s = self._allreduce.exchange_s

    def close(self) -> None:
        """Remove the hooks from the weights."""
        self._allreduce.close()
