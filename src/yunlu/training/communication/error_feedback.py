"""Error feedback: what a message left out goes with the next one (Seide et al. 2014; Stich et al. 2018).

A sum over workers has what it left out in two places: with each worker, for all of the tensor, and with
the owner of each part of it. Either is an amount that the sum still lacks, so anybody may add it to
what he sends: when other workers own other parts, what an owner has becomes part of what he has as a
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

_WORKER, _OWNER, _PLACE = "worker/", "owner/", "place/"


@dataclass(slots=True)
class ErrorFeedback:
    """What was left out so far, by name."""

    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _before: dict[str, Tensor | None] = field(
        default_factory=dict[str, "Tensor | None"], init=False
    )
    """What the messages of this step replaced."""
    _spare: dict[str, Tensor] = field(default_factory=dict[str, Tensor], init=False)
    _sizes: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]], init=False
    )

    def add_to(self, name: str, values: Tensor) -> float:
        """Add what was left out last time to what is to be sent; the norm of both together.

        Where that is not finite, all of it becomes NaN: no codec can then overlook it.
        """
        before = self.kept.get(name)
        if before is not None and len(before) == len(values):
            values.add_(before)
        norm = float(torch.linalg.vector_norm(values))
        if not math.isfinite(norm):
            values.fill_(torch.nan)
        return norm

    def room(self, name: str, length: int) -> Tensor:
        """Where to put what a message left out."""
        if name in self._before:
            self.commit()  # it is the next step's
        spare = self._spare.pop(name, None)
        return torch.empty(length) if spare is None or len(spare) != length else spare

    def keep(self, name: str, left: Tensor) -> None:
        """Remember what was left out, in the tensor given; only of a message that was finite."""
        self._before[name] = self.kept.get(name)
        self.kept[name] = left

    def drop(self, name: str) -> None:
        """Nothing was left out: all that was kept has arrived."""
        if name in self._before:
            self.commit()
        if name in self.kept:
            self._before[name] = self.kept.pop(name)

    def note(self, name: str, *, given: float, left: float) -> None:
        """Remember norms for ``error``."""
        self._sizes[name] = given, left

    def commit(self) -> None:
        """The step that the last messages were for was taken."""
        self._spare |= {name: kept for name, kept in self._before.items() if kept is not None}
        self._before.clear()

    def revert(self) -> None:
        """It was not: what was left out before is still to be sent, what it left out is not."""
        for name, kept in self._before.items():
            if name in self.kept:
                self._spare[name] = self.kept.pop(name)
            if kept is not None:
                self.kept[name] = kept
        self._before.clear()

    def error(self) -> float | None:
        """Norm of what the last messages of all names left out, relative to what they were to hold."""
        given = math.fsum(given**2 for given, _ in self._sizes.values())
        left = math.fsum(left**2 for _, left in self._sizes.values())
        return (left / given) ** 0.5 if given else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPart:
    """Whose part of which tensor an owner's residual is."""

    size: int
    rank: int
    start: int
    length: int
    """Of the whole tensor."""
    rounds: int
    """Sums so far."""

    @property
    def whose(self) -> tuple[int, int, int, int]:
        """What must be the same for an owner's residual to be of use as such."""
        return self.size, self.rank, self.start, self.length


def clip_worker_gradient(values: Tensor, clip_norm: float | None, workers: int) -> None:
    """Bound one worker's share of a gradient before something of it is left out (Lin et al. 2018).

    A bound on the sum alone would come too late: most of an outlier would be left out at first, and go
    into one step after the other. The shares of ``workers`` that do not depend on each other have a sum
    of the norm that they are allowed together; whoever is within it is not touched.
    """
    if clip_norm is None:
        return
    limit = clip_norm / workers**0.5
    norm = float(torch.linalg.vector_norm(values))
    if math.isfinite(norm) and norm > limit:
        values.mul_(limit / norm)


def pack_state(
    worker: ErrorFeedback, owner: ErrorFeedback, places: Mapping[str, OwnerPart]
) -> dict[str, Tensor]:
    """Everything by name, for a checkpoint; copies."""
    state = {_WORKER + name: kept.clone() for name, kept in worker.kept.items()}
    state |= {_OWNER + name: kept.clone() for name, kept in owner.kept.items()}
    for name, place in places.items():
        numbers = (place.size, place.rank, place.start, place.length, place.rounds)
        state[_PLACE + name] = torch.tensor(numbers)
    return state


def unpack_state(
    state: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, OwnerPart]]:
    """What workers, owners and places hold, by name; copies."""
    worker, owner, places = (
        {
            name.removeprefix(prefix): kept.clone()
            for name, kept in state.items()
            if name.startswith(prefix)
        }
        for prefix in (_WORKER, _OWNER, _PLACE)
    )
    return worker, owner, {name: _read_place(kept) for name, kept in places.items()}


def fold_owner_residuals(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same amount without owners: what they have becomes part of what they have as workers."""
    worker, owner, places = unpack_state(state)
    for name, kept in owner.items():
        place = places[name]
        whole = worker.setdefault(name, torch.zeros(place.length))
        whole[place.start : place.start + len(kept)].add_(kept)
    folded = {name: kept for name, kept in state.items() if not name.startswith(_OWNER)}
    return folded | {_WORKER + name: kept for name, kept in worker.items()}


def redistribute_residuals(
    states: Sequence[Mapping[str, Tensor]], size: int
) -> list[dict[str, Tensor]]:
    """Hand what some workers have to another number of them, which may be more or fewer.

    The total stays the same: who has no successor of his own adds to somebody else's. What all have
    alike everyone gets.
    """
    folded = [fold_owner_residuals(state) for state in states]
    common = {name: kept for name, kept in folded[0].items() if not name.startswith(_WORKER)}
    shared: list[dict[str, Tensor]] = [dict(common) for _ in range(size)]
    for number, state in enumerate(folded):
        into = shared[number % size]
        for name, kept in state.items():
            if name.startswith(_WORKER):
                into[name] = into[name] + kept if name in into else kept.clone()
    return shared


def _read_place(kept: Tensor) -> OwnerPart:
    size, rank, start, length, rounds = kept.tolist()
    return OwnerPart(size=size, rank=rank, start=start, length=length, rounds=rounds)
