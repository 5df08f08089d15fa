"""Ways in which workers agree on their weights, each as an object that the loop calls.

A method is named ``NAME``, ``NAME:option=value,...`` or ``package.module:FACTORY?option=value,...``:
anything that takes a ``Seat`` and gives a ``Method`` can be measured without being listed here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from benchmarks.comm_parts.workload import Workload

_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Seat:
    """What a method is made from: one worker's place among the others."""

    rank: int
    size: int
    store: Any
    """torch's, where all meet; its default group, on gloo, is there too."""
    address: str
    """At which the others reach this worker."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    workload: Workload
    steps: int
    """How many there will be."""
    options: dict[str, str] = field(default_factory=dict[str, str])


class Method:
    """Does nothing: workers that never talk. Others override what they need."""

    is_replicated = True
    """Whether all workers have the same weights, to the bit, after every step."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    @property
    def module(self) -> nn.Module:
        """What the forward pass goes through."""
        return self.seat.model

    def before_backward(self, model: nn.Module) -> None:
        """The backward pass comes next."""

    def after_backward(self, model: nn.Module) -> None:
        """Leave in the gradients what the optimiser is to use: of synchronous ones, the mean."""

    def update(self, model: nn.Module) -> None:
        """Change the weights by the gradients."""
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.seat.workload.clip)
        self.seat.optimizer.step()

    def after_update(self, model: nn.Module) -> None:
        """The step is done; whatever is to happen to the weights, happens here."""

    def weights(self, model: nn.Module) -> Iterable[Tensor]:
        """What is evaluated, after the mean over all workers; not counted in time."""
        return model.parameters()

    def sent_bytes(self) -> int | None:
        """By its own count; none where it has none."""
        return None

    def close(self) -> None:
        """End its threads and connections."""


class Alone(Method):
    """Workers that never talk."""

    is_replicated = False


class DenseDDP(Method):
    """torch's DistributedDataParallel on gloo, as it comes."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._module = DistributedDataParallel(seat.model, gradient_as_bucket_view=True)

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""
        return self._module


class HookedDDP(DenseDDP):
    """DDP with one of torch's own communication hooks: ``hook=fp16`` or ``hook=powersgd,rank=4``."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415
            default_hooks,
            powerSGD_hook,
        )

        if seat.options.get("hook", "fp16") == "fp16":
            self._module.register_comm_hook(None, default_hooks.fp16_compress_hook)
            return
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=int(seat.options.get("rank", "4")),
            start_powerSGD_iter=int(seat.options.get("start", "10")),
        )
        self._module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> object:
        """Afterwards the tensor holds the sum."""
        ...


class Summed(Method):
    """Gradients in buckets, each summed as soon as the backward pass has made it.

    Args:
        seat: Ours.
        begin: Starts a sum over all workers, in place, of a flat tensor with a number of its own.
        sent_bytes: Tells what was sent so far.
        close: Ends whatever ``begin`` uses.
    """

    def __init__(
        self,
        seat: Seat,
        begin: Callable[[Tensor, int], Pending],
        *,
        sent_bytes: Callable[[], int] | None = None,
        close: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(seat)
        self._begin, self._count, self._end = begin, sent_bytes, close
        self._buckets = [
            _Bucket(group, torch.zeros(sum(weight.numel() for weight in group)), len(group))
            for group in split_weights(seat)
        ]
        self._under_way: list[tuple[_Bucket, Pending]] = []
        self._hooks = [
            weight.register_post_accumulate_grad_hook(partial(self._note, bucket))
            for bucket in self._buckets
            for weight in bucket.weights
        ]

    def after_backward(self, model: nn.Module) -> None:  # noqa: ARG002 (the loop's word)
        """Wait for the sums, and take the means."""
        for bucket, pending in self._under_way:
            pending.wait()
            bucket.flat.div_(self.seat.size)
            bucket.give()
        self._under_way.clear()

    def sent_bytes(self) -> int | None:
        """By its own count."""
        return None if self._count is None else self._count()

    def close(self) -> None:
        """Let go of the weights."""
        for hook in self._hooks:
            hook.remove()
        if self._end is not None:
            self._end()

    @torch.no_grad()
    def _note(self, bucket: _Bucket, _weight: Tensor) -> None:
        bucket.missing -= 1
        # In one order for all workers.
        while len(self._under_way) < len(self._buckets):
            first = self._buckets[len(self._under_way)]
            if first.missing:
                return
            first.take()
            self._under_way.append((first, self._begin(first.flat, len(self._under_way))))


@dataclass(slots=True)
class _Bucket:
    weights: list[nn.Parameter]
    flat: Tensor
    missing: int

    def take(self) -> None:
        grads = [weight.grad for weight in self.weights if weight.grad is not None]
        torch.cat([grad.flatten() for grad in grads], out=self.flat)
        self.missing = len(self.weights)

    def give(self) -> None:
        end = 0
        for weight in self.weights:
            weight.grad = self.flat[end : end + weight.numel()].view_as(weight)
            end += weight.numel()


def split_weights(seat: Seat) -> list[list[nn.Parameter]]:
    """Weights whose gradients travel together, as they come: the option ``bucket_bytes`` limits them."""
    limit = int(seat.options.get("bucket_bytes", _BUCKET_BYTES))
    groups: list[list[nn.Parameter]] = [[]]
    size = 0
    for weight in reversed(list(seat.model.parameters())):  # the last ones' gradients come first
        if groups[-1] and size + weight.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(weight)
        size += weight.nbytes
    return groups


def make_gloo(seat: Seat) -> Method:
    """The all-reduce of gloo, without DDP."""

    def begin(flat: Tensor, _key: int) -> Pending:
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        return work

    return Summed(seat, begin)


def _make_own(seat: Seat, kind: str, name: str) -> Method:
    from benchmarks.comm_parts import own_methods  # noqa: PLC0415 (only where it is asked for)

    return getattr(own_methods, kind)(seat, name)


_OWN = {
    "make_sum": ("ring", "tree", "double-tree", "doubling", "direct", "server", "hierarchical"),
    "Compressed": ("fp16", "bf16", "int8", "int4", "onebit", "topk", "randomk", "powersgd"),
    "Local": ("local", "post-local", "diloco"),
}
METHODS: dict[str, Callable[[Seat], Method]] = {
    "ddp": DenseDDP,
    "ddp-hook": HookedDDP,
    "alone": Alone,
    "gloo": make_gloo,
    **{
        name: partial(_make_own, kind=kind, name=name)
        for kind, names in _OWN.items()
        for name in names
    },
}


def make_method(words: str, **seat: Any) -> Method:
    """By its name, or by where its factory lies; see above."""
    if "." in words.partition(":")[0]:
        place, _, said = words.partition("?")
        module, _, attribute = place.partition(":")
        factory: Callable[[Seat], Method] = getattr(import_module(module), attribute)
    else:
        name, _, said = words.partition(":")
        if name not in METHODS:
            raise ValueError(f"no method {name!r}: there are {', '.join(METHODS)}")
        factory = METHODS[name]
    options = dict(pair.split("=", 1) for pair in said.split(",") if pair)
    return factory(Seat(**seat, options=options))
