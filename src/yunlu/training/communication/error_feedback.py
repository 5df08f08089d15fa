"""Error feedback: the compression error of a message is added to the next (Seide et al. 2014; Stich et al. 2018).

An all-reduce has errors in two places: on each worker, for the whole tensor, and on
the owner of each part. Both are amounts that the sum still lacks, so any worker may add them to
what it sends: when the owners change, an owner's residual becomes part of its residual as a
worker. Nothing is lost and nothing has to be sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WORKER, _OWNER, _PART = "worker/", "owner/", "place/"


@dataclass(slots=True)
class ErrorFeedback:
    """Residuals by name."""

    residuals: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _previous: dict[str, Tensor | None] = field(
        default_factory=dict[str, "Tensor | None"], init=False
    )
    """Residuals replaced in this step."""
    _spare: dict[str, Tensor] = field(default_factory=dict[str, Tensor], init=False)
    _norms: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]], init=False
    )

    def add_to(self, name: str, values: Tensor) -> float:
        """Add the residual to the values to send; returns the norm of both together.

        If that is not finite, all values become NaN, so that no codec hides it.
        """
        previous = self.residuals.get(name)
        if previous is not None and len(previous) == len(values):
            values.add_(previous)
        norm = float(torch.linalg.vector_norm(values))
        if not math.isfinite(norm):
            values.fill_(torch.nan)
        return norm

    def buffer(self, name: str, length: int) -> Tensor:
        """Buffer for the next residual."""
        if name in self._previous:
            self.commit()  # a new step has begun
        spare = self._spare.pop(name, None)
        return torch.empty(length) if spare is None or len(spare) != length else spare

    def store_residual(self, name: str, residual: Tensor) -> None:
        """Store the residual of a message, which must be finite."""
        self._previous[name] = self.residuals.get(name)
        self.residuals[name] = residual

    def drop(self, name: str) -> None:
        """The message was exact: clear the residual."""
        if name in self._previous:
            self.commit()
        if name in self.residuals:
            self._previous[name] = self.residuals.pop(name)

    def record_norms(self, name: str, *, given: float, residual: float) -> None:
        """Record norms for ``error``."""
        self._norms[name] = given, residual

    def commit(self) -> None:
        """The step was applied."""
        self._spare |= {
            name: residuals for name, residuals in self._previous.items() if residuals is not None
        }
        self._previous.clear()

    def revert(self) -> None:
        """The step was discarded: return to the residuals before it."""
        for name, residuals in self._previous.items():
            if name in self.residuals:
                self._spare[name] = self.residuals.pop(name)
            if residuals is not None:
                self.residuals[name] = residuals
        self._previous.clear()

    def error(self) -> float | None:
        """Norm of the residuals of the last messages, relative to the messages."""
        given = math.fsum(given**2 for given, _ in self._norms.values())
        residual = math.fsum(residual**2 for _, residual in self._norms.values())
        return (residual / given) ** 0.5 if given else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPart:
    """The part of a tensor that an owner's residual covers."""

    size: int
    rank: int
    start: int
    length: int
    """Of the whole tensor."""
    rounds: int
    """All-reduces so far."""

    @property
    def key_fields(self) -> tuple[int, int, int, int]:
        """Fields that must match for the residual to be reused."""
        return self.size, self.rank, self.start, self.length


def clip_worker_gradient(values: Tensor, clip_norm: float | None, workers: int) -> None:
    """Clip one worker's gradient before it is compressed (Lin et al. 2018).

    Clipping the sum would be too late: most of an outlier would stay in the residual and enter
    one step after the other. Independent shares of ``workers`` workers within the limit sum up
    to the norm allowed for all; shares within it are unchanged.
    """
    if clip_norm is None:
        return
    limit = clip_norm / workers**0.5
    norm = float(torch.linalg.vector_norm(values))
    if math.isfinite(norm) and norm > limit:
        values.mul_(limit / norm)


def pack_state(
    worker: ErrorFeedback, owner: ErrorFeedback, parts: Mapping[str, OwnerPart]
) -> dict[str, Tensor]:
    """All residuals by name, copied for a checkpoint."""
    state = {_WORKER + name: residuals.clone() for name, residuals in worker.residuals.items()}
    state |= {_OWNER + name: residuals.clone() for name, residuals in owner.residuals.items()}
    for name, part in parts.items():
        numbers = (part.size, part.rank, part.start, part.length, part.rounds)
        state[_PART + name] = torch.tensor(numbers)
    return state


def unpack_state(
    state: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, OwnerPart]]:
    """Residuals of worker and owner, and owner parts, by name; copied."""
    worker, owner, parts = (
        {
            name.removeprefix(prefix): residuals.clone()
            for name, residuals in state.items()
            if name.startswith(prefix)
        }
        for prefix in (_WORKER, _OWNER, _PART)
    )
    return worker, owner, {name: _read_part(residuals) for name, residuals in parts.items()}


def fold_owner_residuals(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold owners' residuals into those they have as workers."""
    worker, owner, parts = unpack_state(state)
    for name, residuals in owner.items():
        part = parts[name]
        total = worker.setdefault(name, torch.zeros(part.length))
        total[part.start : part.start + len(residuals)].add_(residuals)
    folded = {name: residuals for name, residuals in state.items() if not name.startswith(_OWNER)}
    return folded | {_WORKER + name: residuals for name, residuals in worker.items()}


def redistribute_residuals(
    states: Sequence[Mapping[str, Tensor]], size: int
) -> list[dict[str, Tensor]]:
    """Redistribute the residuals of some workers to another number of workers.

    The total stays the same: residuals without a successor are added to another worker's. State that is
    equal on all workers is copied to each.
    """
    folded = [fold_owner_residuals(state) for state in states]
    common = {
        name: residuals for name, residuals in folded[0].items() if not name.startswith(_WORKER)
    }
    shared: list[dict[str, Tensor]] = [dict(common) for _ in range(size)]
    for number, state in enumerate(folded):
        target = shared[number % size]
        for name, residuals in state.items():
            if name.startswith(_WORKER):
                target[name] = target[name] + residuals if name in target else residuals.clone()
    return shared


def _read_part(residuals: Tensor) -> OwnerPart:
    size, rank, start, length, rounds = residuals.tolist()
    return OwnerPart(size=size, rank=rank, start=start, length=length, rounds=rounds)
