"""Weights at the servers: as one flat tensor, a server's part of it, and how gradients update it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yunlu.training.communication.codecs.codec import make_codec
from yunlu.training.communication.servers.rules import TicketSet
from yunlu.training.optim.build import build_optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from yunlu.training.communication.servers.messages import Outcome, Push
    from yunlu.training.communication.servers.rules import ServerRules, Ticket


class FlatWeights:
    """Copies weights and gradients to and from one flat tensor, in the order of the servers."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        matrices = [weight for weight in weights if weight.ndim >= 2]
        self.weights = [*matrices, *(weight for weight in weights if weight.ndim < 2)]
        self.length = sum(weight.numel() for weight in self.weights)
        self.decayed = sum(weight.numel() for weight in matrices)

    @torch.no_grad()
    def read(self) -> Tensor:
        """The weights."""
        flat = torch.empty(self.length)
        for weight, part in zip(self.weights, self._parts(flat), strict=True):
            part.copy_(weight.reshape(-1))
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Set the weights."""
        for weight, part in zip(self.weights, self._parts(flat), strict=True):
            weight.copy_(part.view(weight.shape))

    def read_gradients(self) -> Tensor:
        """Gradients; zeros for weights without one."""
        flat = torch.empty(self.length)
        for weight, part in zip(self.weights, self._parts(flat), strict=True):
            if weight.grad is None:
                part.zero_()
            else:
                part.copy_(weight.grad.reshape(-1))
        return flat

    def _parts(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split([weight.numel() for weight in self.weights])


_TYPES = {str(kind): kind for kind in (torch.float32, torch.int64)}


class RefusedPushError(Exception):
    """A gradient that must not be applied."""


class HeldWeights:
    """A range of the flat weights, with its optimizer state.

    Args:
        rules: Rules of the servers.
        flat: The weights, updated in place.
        decayed: Number of leading weights that decay; vectors, which are last, do not.
    """

    def __init__(self, rules: ServerRules, flat: Tensor, decayed: int) -> None:
        self.rules, self.flat, self.decayed = rules, flat, decayed
        self.version = 0
        """Updates applied."""
        self._seen = TicketSet(rules.first_step * rules.shares)
        self._shares: dict[int, tuple[Push, Tensor | None]] = {}
        """BSP: gradients received for the current step."""
        self._codec = make_codec(rules.codec, share=rules.codec_share)
        # The optimizer's builder decides by shape which weights decay.
        parts = [flat[:decayed].view(1, -1), flat[decayed:]]
        self._weights = [nn.Parameter(part) for part in parts if part.numel()]
        self._optimizer: Any = None
        if self._weights:
            self._optimizer = build_optimizer(
                self._weights, rules.optimizer, lr=0.0, weight_decay=rules.weight_decay, l2=rules.l2
            )

    @property
    def is_between_steps(self) -> bool:
        """Whether every received gradient is applied."""
        return not self._shares

    @property
    def body_bytes(self) -> int:
        """Size of an encoded gradient."""
        return self._codec.size_bytes(len(self.flat))

    def check_ticket(self, ticket: Ticket) -> Outcome:
        """Whether a gradient of this ticket would count."""
        if not ticket.exists(self.rules):
            raise RefusedPushError(f"unknown ticket {tuple(ticket)}")
        if ticket.number(self.rules) in self._seen:
            return "duplicate"
        if self.rules.mode == "bsp" and ticket.step != self.rules.first_step + self.version:
            raise RefusedPushError(f"step {ticket.step} has not begun")
        return "taken"

    def unpack(self, push: Push, body: Buffer) -> Tensor | None:
        """Decode a gradient, in place if possible; None if the ticket ends without one."""
        data = torch.frombuffer(body, dtype=torch.uint8) if memoryview(body).nbytes else _EMPTY
        if not push.items:
            return None
        if len(data) != self.body_bytes:
            raise RefusedPushError(
                f"received a gradient of {len(data)} bytes, expected {self.body_bytes}"
            )
        if self.rules.codec == "none":
            gradient = data.view(torch.float32)
        else:
            gradient = torch.empty(len(self.flat))
            self._codec.decode(data, gradient)
        if not is_finite(gradient):
            raise RefusedPushError("the gradient is not finite")
        return gradient

    def compensate(self, gradient: Tensor, before: Tensor) -> None:
        """Delay compensation from the weights ``before`` to the current ones (Zheng et al. 2017)."""
        moved = self.flat - before
        gradient.addcmul_(gradient.square(), moved, value=self.rules.delay_strength)

    def apply(self, push: Push, gradient: Tensor | None) -> None:
        """Apply a gradient; deterministic, since a restored server repeats it."""
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
        for number in range(first, first + self.rules.shares):  # including backups
            self._seen.add(number)

    def state(self) -> tuple[dict[str, Any], list[Tensor]]:
        """State as JSON and tensors; only between steps."""
        assert self.is_between_steps
        optimizer_state = self._optimizer.state_dict()["state"] if self._optimizer else {}
        entries: list[list[Any]] = []
        tensors = [self.flat]
        for number, values in optimizer_state.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    entries.append([number, name, str(value.dtype), list(value.shape)])
                    tensors.append(value)
        description = {
            "version": self.version,
            "seen": self._seen.pack(),
            "decayed": self.decayed,
            "optimizer": entries,
        }
        return description, [tensor.detach().contiguous() for tensor in tensors]

    def restore(self, state: dict[str, Any], body: memoryview) -> None:
        """Restore a ``state``; the weights were read before."""
        self.version, self._seen = state["version"], TicketSet.unpack(state["seen"])
        offset = self.flat.nbytes
        optimizer_state: dict[int, dict[str, Tensor]] = {}
        for number, name, kind, shape in state["optimizer"]:
            count = math.prod(shape)
            value = torch.frombuffer(body, dtype=_TYPES[kind], count=count, offset=offset)
            optimizer_state.setdefault(number, {})[name] = value.view(shape).clone()
            offset += value.nbytes
        if optimizer_state:
            whole = self._optimizer.state_dict()
            self._optimizer.load_state_dict({**whole, "state": optimizer_state})

    def _end_step(self) -> None:
        """Update by the mean over all items, summed in the order of shares, not of arrival."""
        shares = [self._shares[share] for share in sorted(self._shares)]
        gradients = [(push, gradient) for push, gradient in shares if gradient is not None]
        if not gradients:
            return
        first, mean = gradients[0]
        if len(gradients) > 1:
            total = sum(push.items for push, _ in gradients)
            mean = torch.zeros_like(self.flat)
            for push, gradient in gradients:
                mean.add_(gradient, alpha=push.items / total)
        self._update(mean, first.lr, 0)

    def _update(self, gradient: Tensor, lr: float, staleness: int) -> None:
        if self._optimizer is None:
            return
        if self.rules.correction == "rate":
            lr /= 1 + max(staleness, 0)
        offset = 0
        for weight in self._weights:
            weight.grad = gradient[offset : offset + weight.numel()].view(weight.shape)
            offset += weight.numel()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite; a finite sum proves it in one pass."""
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


_EMPTY = torch.empty(0, dtype=torch.uint8)
