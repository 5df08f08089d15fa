"""PowerSGD: of each matrix of gradients, what a few columns and rows can tell (Vogels et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from yunlu.training.communication.allreduce import direct_allreduce
from yunlu.training.communication.error_feedback import (
    ErrorFeedback,
    clip_worker_gradient,
    pack_state,
    unpack_state,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.training.communication.allreduce import AllReduceFunction
    from yunlu.training.communication.transport import Transport

_FACTOR = "factor/"
_SEED = 20190531


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """Where in a flat tensor a matrix lies, row by row."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        """A view of it."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


def as_matrix(start: int, weight: Tensor) -> MatrixSlice | None:
    """A weight's gradient, laid out as the weight is: one dimension by all others; none of a vector."""
    order = sorted(range(weight.ndim), key=lambda dim: -weight.stride(dim))
    if weight.ndim <= 1 or not weight.numel():
        return None
    rows = weight.shape[order[0]]
    return MatrixSlice(start, rows, weight.numel() // rows)


class PowerSgdAllReduce:
    """Adds up tensors over a wire, matrices by factors; all workers get the same bits.

    What is no matrix, or too small to gain by it, is added up exactly. What the factors left out is added
    the next time. Where some share is not finite the sum is NaN for all, and nothing is kept of it.

    Workers with the same libraries and processors get the same bits: each multiplies the factors itself.

    Args:
        matrices: Which matrices the tensor of each key holds. Without any it is taken for a square one.
        rank: How many columns and rows.
        add_up: How to add up factors.
        clip_norm: What the job bounds the gradient's norm by: see ``clip_worker_gradient``.
    """

    def __init__(
        self,
        matrices: Mapping[int, Sequence[MatrixSlice]],
        *,
        rank: int = 4,
        add_up: AllReduceFunction = direct_allreduce,
        clip_norm: float | None = None,
    ) -> None:
        self.rank = rank
        self._matrices = dict(matrices)
        self._add_up = add_up
        self._clip_norm = clip_norm
        self._residual = ErrorFeedback()
        self._factors: dict[str, Tensor] = {}
        """Each key's right factors, in a row: where the next step begins."""

    def __call__(self, transport: Transport, flat: Tensor, key: int, tag: int) -> None:
        """Leave the sum in ``flat``; exactly, for keys below zero: those are not gradients."""
        if key < 0 or not len(flat):
            self._add_up(transport, flat, tag=tag)
            return
        name = str(key)
        values = flat if flat.dtype == torch.float32 else flat.float()
        clip_worker_gradient(values, self._clip_norm, transport.size)
        matrices = self._worthwhile(key, len(flat))
        norm = self._residual.add_to(name, values)
        if transport.size == 1:
            self._residual.drop(name)
            flat.copy_(values)
            return
        views = [matrix.of(values) for matrix in matrices]
        right = self._split(self._start(name, matrices), [view.shape[1] for view in views])
        # The left factors and all that is no matrix travel together.
        rest = _others(values, matrices)
        message = _join([*map(torch.mm, views, right), *rest])
        self._add_up(transport, message, tag=tag)
        if not _is_finite(message):
            flat.fill_(torch.nan)  # all know it: nobody waits for the other factors
            return
        factors_length = sum(view.shape[0] for view in views) * self.rank
        left = [
            _orthogonal(factor)
            for factor in self._split(message[:factors_length], [view.shape[0] for view in views])
        ]
        mine = [view.T @ factor for view, factor in zip(views, left, strict=True)]
        total = _join(mine)
        self._add_up(transport, total, tag=tag)
        self._keep(name, values, matrices, [left, mine], norm)
        self._factors[name] = total
        for view, factor, other in zip(
            views, left, self._split(total, [view.shape[1] for view in views]), strict=True
        ):
            torch.mm(factor, other.T, out=view)
        sizes = [len(part) for part in rest]
        for part, found in zip(rest, message[factors_length:].split(sizes), strict=True):
            part.copy_(found)
        if values is not flat:
            flat.copy_(values)

    def commit(self) -> None:
        """The step that the last sums were for was taken."""
        self._residual.commit()

    def revert(self) -> None:
        """It was not."""
        self._residual.revert()

    def error(self) -> float | None:
        """See ``ErrorFeedback``."""
        return self._residual.error()

    def state(self) -> dict[str, Tensor]:
        """Residuals and factors by name."""
        factors = {_FACTOR + name: factor.clone() for name, factor in self._factors.items()}
        return pack_state(self._residual, ErrorFeedback(), {}) | factors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state`` gave, or ``share_out`` made of it."""
        worker, _, _ = unpack_state(state)
        self._residual = ErrorFeedback(worker)
        self._factors = {
            name.removeprefix(_FACTOR): kept.clone()
            for name, kept in state.items()
            if name.startswith(_FACTOR)
        }

    def _worthwhile(self, key: int, length: int) -> list[MatrixSlice]:
        matrices = self._matrices.get(key)
        if matrices is None:
            side = int(length**0.5)
            matrices = self._matrices[key] = (
                [MatrixSlice(0, side, length // side)] if side > 1 else []
            )
        return [
            matrix
            for matrix in matrices
            if (matrix.rows + matrix.columns) * self.rank * 2 <= matrix.rows * matrix.columns
        ]

    def _start(self, name: str, matrices: Sequence[MatrixSlice]) -> Tensor:
        """The right factors to begin with: the last step's, or random ones, the same for all."""
        length = sum(matrix.columns for matrix in matrices) * self.rank
        kept = self._factors.get(name)
        if kept is not None and len(kept) == length:
            return kept
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randn(length, generator=generator)

    def _split(self, factors: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        parts = factors.split([length * self.rank for length in lengths])
        return [part.view(-1, self.rank) for part in parts]

    def _keep(
        self,
        name: str,
        values: Tensor,
        matrices: Sequence[MatrixSlice],
        factors: Sequence[Sequence[Tensor]],
        norm: float,
    ) -> None:
        """Keep what our own factors cannot tell: that is less than what the sum's cannot."""
        if not matrices:
            return
        left = self._residual.room(name, len(values)).zero_()
        for matrix, one, other in zip(matrices, *factors, strict=True):
            torch.addmm(matrix.of(values), one, other.T, alpha=-1, out=matrix.of(left))
        self._residual.keep(name, left)
        self._residual.note(name, given=norm, left=float(torch.linalg.vector_norm(left)))


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)


def _others(values: Tensor, matrices: Sequence[MatrixSlice]) -> list[Tensor]:
    """Views of what lies between the matrices."""
    ordered = sorted(matrices, key=lambda matrix: matrix.start)
    starts = [0, *(matrix.stop for matrix in ordered)]
    stops = [*(matrix.start for matrix in ordered), len(values)]
    return [values[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop]


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values.sum()))


def _orthogonal(factor: Tensor) -> Tensor:
    """The same columns, orthogonal; any others where they are all zero."""
    return torch.linalg.qr(factor).Q
