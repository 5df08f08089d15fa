"""PowerSGD: low-rank compression of gradient matrices (Vogels et al. 2019)."""

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
    """Position of a row-major matrix in a flat tensor."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """End position."""
        return self.start + self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        """View of the matrix."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


def as_matrix(start: int, weight: Tensor) -> MatrixSlice | None:
    """Matrix of a weight's gradient in memory order: first dimension by all others; None for vectors."""
    order = sorted(range(weight.ndim), key=lambda dim: -weight.stride(dim))
    if weight.ndim <= 1 or not weight.numel():
        return None
    rows = weight.shape[order[0]]
    return MatrixSlice(start, rows, weight.numel() // rows)


class PowerSgdAllReduce:
    """All-reduce on a transport, matrices by low-rank factors; bitwise equal on all workers.

    Other values, and matrices too small to gain, are summed exactly. The residual is added
    the next time. If any share is not finite, the sum is NaN on all workers and no state is kept.

    Bitwise equality needs the same libraries and processors: each worker multiplies the factors itself.

    Args:
        matrices: Matrices in the tensor of each key; without any it is treated as a square one.
        rank: Rank of the factors.
        allreduce: All-reduce of the factors.
        clip_norm: Gradient clipping norm of the job; see ``clip_worker_gradient``.
    """

    def __init__(
        self,
        matrices: Mapping[int, Sequence[MatrixSlice]],
        *,
        rank: int = 4,
        allreduce: AllReduceFunction = direct_allreduce,
        clip_norm: float | None = None,
    ) -> None:
        self.rank = rank
        self._matrices = dict(matrices)
        self._allreduce = allreduce
        self._clip_norm = clip_norm
        self._feedback = ErrorFeedback()
        self._factors: dict[str, Tensor] = {}
        """Right factors of each key, concatenated: the start of the next step."""

    def __call__(self, transport: Transport, flat: Tensor, key: int, tag: int) -> None:
        """Leave the sum in ``flat``; exact for negative keys, which are not gradients."""
        if key < 0 or not len(flat):
            self._allreduce(transport, flat, tag=tag)
            return
        name = str(key)
        values = flat if flat.dtype == torch.float32 else flat.float()
        clip_worker_gradient(values, self._clip_norm, transport.size)
        matrices = self._compressible(key, len(flat))
        norm = self._feedback.add_to(name, values)
        if transport.size == 1:
            self._feedback.drop(name)
            flat.copy_(values)
            return
        views = [matrix.of(values) for matrix in matrices]
        right = self._split(
            self._initial_factors(name, matrices), [view.shape[1] for view in views]
        )
        # The left factors and all other values are sent together.
        rest = _gaps(values, matrices)
        message = _join([*map(torch.mm, views, right), *rest])
        self._allreduce(transport, message, tag=tag)
        if not _is_finite(message):
            flat.fill_(torch.nan)  # known to all: no worker waits for the other factors
            return
        factors_length = sum(view.shape[0] for view in views) * self.rank
        left = [
            _orthogonal(factor)
            for factor in self._split(message[:factors_length], [view.shape[0] for view in views])
        ]
        own = [view.T @ factor for view, factor in zip(views, left, strict=True)]
        total = _join(own)
        self._allreduce(transport, total, tag=tag)
        self._store_residual(name, values, matrices, [left, own], norm)
        self._factors[name] = total
        for view, factor, other in zip(
            views, left, self._split(total, [view.shape[1] for view in views]), strict=True
        ):
            torch.mm(factor, other.T, out=view)
        sizes = [len(part) for part in rest]
        for part, reduced in zip(rest, message[factors_length:].split(sizes), strict=True):
            part.copy_(reduced)
        if values is not flat:
            flat.copy_(values)

    def commit(self) -> None:
        """The step was applied."""
        self._feedback.commit()

    def revert(self) -> None:
        """The step was discarded."""
        self._feedback.revert()

    def error(self) -> float | None:
        """See ``ErrorFeedback``."""
        return self._feedback.error()

    def state(self) -> dict[str, Tensor]:
        """Residuals and factors by name."""
        factors = {_FACTOR + name: factor.clone() for name, factor in self._factors.items()}
        return pack_state(self._feedback, ErrorFeedback(), {}) | factors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state``, or the result of ``redistribute_residuals``."""
        worker, _, _ = unpack_state(state)
        self._feedback = ErrorFeedback(worker)
        self._factors = {
            name.removeprefix(_FACTOR): previous.clone()
            for name, previous in state.items()
            if name.startswith(_FACTOR)
        }

    def _compressible(self, key: int, length: int) -> list[MatrixSlice]:
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

    def _initial_factors(self, name: str, matrices: Sequence[MatrixSlice]) -> Tensor:
        """Initial right factors: those of the last step, or random ones, equal on all workers."""
        length = sum(matrix.columns for matrix in matrices) * self.rank
        previous = self._factors.get(name)
        if previous is not None and len(previous) == length:
            return previous
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randn(length, generator=generator)

    def _split(self, factors: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        parts = factors.split([length * self.rank for length in lengths])
        return [part.view(-1, self.rank) for part in parts]

    def _store_residual(
        self,
        name: str,
        values: Tensor,
        matrices: Sequence[MatrixSlice],
        factors: Sequence[Sequence[Tensor]],
        norm: float,
    ) -> None:
        """Store the error of this worker's own factors, which is smaller than that of the sum's."""
        if not matrices:
            return
        residual = self._feedback.buffer(name, len(values)).zero_()
        for matrix, left, other in zip(matrices, *factors, strict=True):
            torch.addmm(matrix.of(values), left, other.T, alpha=-1, out=matrix.of(residual))
        self._feedback.store_residual(name, residual)
        self._feedback.record_norms(
            name, given=norm, residual=float(torch.linalg.vector_norm(residual))
        )


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)


def _gaps(values: Tensor, matrices: Sequence[MatrixSlice]) -> list[Tensor]:
    """Views of the values between the matrices."""
    ordered = sorted(matrices, key=lambda matrix: matrix.start)
    starts = [0, *(matrix.stop for matrix in ordered)]
    stops = [*(matrix.start for matrix in ordered), len(values)]
    return [values[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop]


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values.sum()))


def _orthogonal(factor: Tensor) -> Tensor:
    """Orthonormal columns with the same span; arbitrary ones where all are zero."""
    return torch.linalg.qr(factor).Q
