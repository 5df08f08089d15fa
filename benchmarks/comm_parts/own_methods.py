"""Yunlu's own ways of communicating, as methods of the plain loop: the engine is left out of it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from benchmarks.comm_parts.methods import Method, Seat, Summed, split_weights
from yunlu.training.communication.allreduce import ALGORITHMS
from yunlu.training.communication.allreducer import ThreadedAllReducer
from yunlu.training.communication.compressed import make_compressed_allreducer
from yunlu.training.communication.local_updates import METHODS as LOCAL_METHODS
from yunlu.training.communication.local_updates import WeightAveraging
from yunlu.training.communication.powersgd import as_matrix
from yunlu.training.communication.transport import connect

if TYPE_CHECKING:
    from torch import nn

    from yunlu.training.communication.powersgd import MatrixSlice
    from yunlu.training.communication.transport import Transport


def make_sum(seat: Seat, name: str) -> Method:
    """An exact sum, in a thread beside the backward pass."""
    add = ALGORITHMS[name]
    allreducer = ThreadedAllReducer(
        _connect(seat), lambda transport, flat, _key, tag: add(transport, flat, tag=tag)
    )
    return Summed(
        seat,
        lambda flat, key: allreducer.begin(flat, key=key),
        sent_bytes=lambda: allreducer.traffic().sent_bytes,
        close=allreducer.close,
    )


class Compressed(Summed):
    """Sums of packed gradients: options ``block``, ``share``, ``rank``."""

    def __init__(self, seat: Seat, codec: str) -> None:
        options = seat.options
        self._allreducer = make_compressed_allreducer(
            _connect(seat),
            codec,
            block=int(options["block"]) if "block" in options else None,
            share=float(options.get("share", "0.01")),
            rank=int(options.get("rank", "4")),
            matrices=_find_matrices(seat),
        )
        super().__init__(
            seat,
            lambda flat, key: self._allreducer.begin(flat, key=key),
            sent_bytes=lambda: self._allreducer.traffic().sent_bytes,
            close=self._allreducer.close,
        )

    def after_update(self, model: nn.Module) -> None:  # noqa: ARG002 (the loop's word)
        """What was left out is kept for the next step."""
        self._allreducer.commit()


class Local(Method):
    """Workers that meet now and then; the options are the fields of ``LocalRules``."""

    is_replicated = False

    def __init__(self, seat: Seat, name: str) -> None:
        super().__init__(seat)
        kinds = {each.name: str(each.type) for each in fields(LOCAL_METHODS[name])}
        casts = {"int": int, "float": float, "str": str}
        given = {key: casts[kinds[key]](value) for key, value in seat.options.items()}
        rules = replace(LOCAL_METHODS[name], **given)
        self._averaging = WeightAveraging(list(seat.model.parameters()), _connect(seat), rules)
        self._together = make_sum(seat, "direct") if rules.from_step else None
        self._step = 0

    def after_backward(self, model: nn.Module) -> None:
        """Of the first steps, the mean."""
        if self._together is None:
            return
        self._together.after_backward(model)
        if self._step + 1 == self._averaging.rules.from_step:
            self._together.close()
            self._together = None

    def after_update(self, model: nn.Module) -> None:  # noqa: ARG002 (the loop's word)
        """Meet, where it is time to."""
        self._step += 1
        self._averaging.after_update(self._step)

    def sent_bytes(self) -> int | None:
        """By the wire's count; of the first steps, which are summed, none."""
        return None if self._averaging.rules.from_step else self._averaging.traffic().sent_bytes

    def close(self) -> None:
        """Hang up."""
        if self._together is not None:
            self._together.close()
        self._averaging.close()


def _find_matrices(seat: Seat) -> dict[int, list[MatrixSlice]]:
    found: dict[int, list[MatrixSlice]] = {}
    for key, group in enumerate(split_weights(seat)):
        start = 0
        for weight in group:
            matrix = as_matrix(start, weight)
            if matrix is not None:
                found.setdefault(key, []).append(matrix)
            start += weight.numel()
    return found


def _connect(seat: Seat) -> Transport:
    return connect(
        seat.store,
        seat.rank,
        seat.size,
        seat.address,
        name=f"wire{_next_wire()}",
        secret=b"benchmark",
    )


_wires = 0


def _next_wire() -> int:
    """Every worker makes its wires in the same order."""
    global _wires  # noqa: PLW0603 (one worker is one process)
    _wires += 1
    return _wires
