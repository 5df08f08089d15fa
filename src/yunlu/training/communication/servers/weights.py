"""The part of the weights that one server holds, and what gradients do to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yunlu.training.communication.codecs.registry import make_codec
from yunlu.training.communication.servers.rules import TicketSet
from yunlu.training.optim.build import build_optimizer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from yunlu.training.communication.servers.messages import Outcome, Push
    from yunlu.training.communication.servers.rules import ServerRules, Ticket

_TYPES = {str(kind): kind for kind in (torch.float32, torch.int64)}


class RefusedPushError(Exception):
    """A gradient that must not change the weights."""


class HeldWeights:
    """A run of the flat weights, with what the optimiser remembers of it.

    Args:
        rules: See there.
        flat: The weights, changed in place.
        decayed: How many of the first ones decay: vectors, which lie last, do not.
    """

    def __init__(self, rules: ServerRules, flat: Tensor, decayed: int) -> None:
        self.rules, self.flat, self.decayed = rules, flat, decayed
        self.version = 0
        """Updates made."""
        self._seen = TicketSet(rules.first_step * rules.shares)
        self._shares: dict[int, tuple[Push, Tensor | None]] = {}
        """BSP: what has come of the step under way."""
        self._codec = make_codec(rules.codec, share=rules.codec_share)
        # The optimiser's builder tells what decays by its shape.
        parts = [flat[:decayed].view(1, -1), flat[decayed:]]
        self._weights = [nn.Parameter(part) for part in parts if part.numel()]
        self._optimizer: Any = None
        if self._weights:
            self._optimizer = build_optimizer(
                self._weights, rules.optimizer, lr=0.0, weight_decay=rules.weight_decay, l2=rules.l2
            )

    @property
    def is_between_steps(self) -> bool:
        """Whether every gradient that came is in the weights."""
        return not self._shares

    @property
    def body_bytes(self) -> int:
        """The longest gradient, packed."""
        return self._codec.size_bytes(len(self.flat))

    def judge(self, ticket: Ticket) -> Outcome:
        """Whether a gradient of this ticket would count."""
        if not ticket.exists(self.rules):
            raise RefusedPushError(f"there is no ticket {tuple(ticket)}")
        if ticket.number(self.rules) in self._seen:
            return "duplicate"
        if self.rules.mode == "bsp" and ticket.step != self.rules.first_step + self.version:
            raise RefusedPushError(f"step {ticket.step} has not begun")
        return "taken"

    def unpack(self, push: Push, body: Buffer) -> Tensor | None:
        """A gradient as it came, perhaps where it came; none where the ticket is over without one."""
        data = torch.frombuffer(body, dtype=torch.uint8) if memoryview(body).nbytes else _EMPTY
        if not push.items:
            return None
        if len(data) != self.body_bytes:
            raise RefusedPushError(f"a gradient of {len(data)} bytes came, not {self.body_bytes}")
        if self.rules.codec == "none":
            gradient = data.view(torch.float32)
        else:
            gradient = torch.empty(len(self.flat))
            self._codec.decode(data, gradient)
        if not is_finite(gradient):
            raise RefusedPushError("the gradient is not finite")
        return gradient

    def compensate(self, gradient: Tensor, before: Tensor) -> None:
        """Carry a gradient over from the weights before to those now (Zheng et al. 2017)."""
        moved = self.flat - before
        gradient.addcmul_(gradient.square(), moved, value=self.rules.delay_strength)

    def take(self, push: Push, gradient: Tensor | None) -> None:
        """Make the update; deterministic, since a restored server makes it again."""
        self._seen.add(push.ticket.number(self.rules))
        if self.rules.mode != "bsp":
            if gradient is not None:
                self._update(gradient, push.lr / self.rules.shares, self.version - push.version)
                self.version += 1
            return
        self._shares[push.ticket.share] = (push, gradient)
        if len(self._shares) < self.rules.needed:
            return
        self._end_step()
        self._shares.clear()
        self.version += 1
        first = push.ticket.step * self.rules.shares
        for number in range(first, first + self.rules.shares):  # those that need not come, too
            self._seen.add(number)

    def state(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Everything, as JSON and tensors; only between steps."""
        assert self.is_between_steps
        kept = self._optimizer.state_dict()["state"] if self._optimizer else {}
        entries: list[list[Any]] = []
        tensors = [self.flat]
        for number, values in kept.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    entries.append([number, name, str(value.dtype), list(value.shape)])
                    tensors.append(value)
        told = {
            "version": self.version,
            "seen": self._seen.pack(),
            "decayed": self.decayed,
            "optimizer": entries,
        }
        return told, [tensor.detach().contiguous() for tensor in tensors]

    def restore(self, state: dict[str, Any], body: memoryview) -> None:
        """Go on from what ``state`` gave; the weights were read before."""
        self.version, self._seen = state["version"], TicketSet.unpack(state["seen"])
        place = self.flat.nbytes
        kept: dict[int, dict[str, Tensor]] = {}
        for number, name, kind, shape in state["optimizer"]:
            count = math.prod(shape)
            value = torch.frombuffer(body, dtype=_TYPES[kind], count=count, offset=place)
            kept.setdefault(number, {})[name] = value.view(shape).clone()
            place += value.nbytes
        if kept:
            whole = self._optimizer.state_dict()
            self._optimizer.load_state_dict({**whole, "state": kept})

    def _end_step(self) -> None:
        """Update by the mean over all items; added up in the order of shares, not of their coming."""
        came = [self._shares[share] for share in sorted(self._shares)]
        counted = [(push, gradient) for push, gradient in came if gradient is not None]
        if not counted:
            return
        first, mean = counted[0]
        if len(counted) > 1:
            total = sum(push.items for push, _ in counted)
            mean = torch.zeros_like(self.flat)
            for push, gradient in counted:
                mean.add_(gradient, alpha=push.items / total)
        self._update(mean, first.lr, 0)

    def _update(self, gradient: Tensor, lr: float, staleness: int) -> None:
        if self._optimizer is None:
            return
        if self.rules.correction == "rate":
            lr /= 1 + max(staleness, 0)
        place = 0
        for weight in self._weights:
            weight.grad = gradient[place : place + weight.numel()].view(weight.shape)
            place += weight.numel()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()


def is_finite(values: Tensor) -> bool:
    """Whether all are; a sum that is finite is proof enough, and reads them once."""
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


_EMPTY = torch.empty(0, dtype=torch.uint8)
