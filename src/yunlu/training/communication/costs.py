"""Cost of encoding and adding on this machine, measured in milliseconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from yunlu.planning.communication.measurements import CodecCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from yunlu.training.communication.codecs.codec import Codec

_FEW, _MANY = 1 << 10, 1 << 18
_TRIALS = 3


def measure_codecs(
    names: Iterable[str], make_codec: Callable[[str], Codec]
) -> tuple[CodecCost, ...]:
    """Seconds per value of each codec, the best of a few trials."""
    return tuple(_measure(name, make_codec(name)) for name in names)


def measure_adding() -> float:
    """Bytes per second of adding one array to another."""
    total, share = (np.ones(_MANY, dtype=np.float32) for _ in range(2))
    return total.nbytes / _best(lambda: np.add(total, share, out=total))


def measure_low_rank(rank: int = 4) -> CodecCost:
    """Cost of PowerSGD per matrix element: two products, and the reconstruction."""
    side = 512
    matrix = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    thin = torch.linalg.qr(matrix[:, :rank])[0]

    def pack() -> Tensor:
        first, _ = torch.linalg.qr(matrix @ thin)
        return matrix.T @ first

    def restore() -> Tensor:
        return thin @ thin.T

    return CodecCost(
        name="powersgd",
        bytes_per_value=8 * rank / side,
        encode_s_per_value=_best(pack) / side**2,
        decode_s_per_value=_best(restore) / side**2,
    )


def _measure(name: str, codec: Codec) -> CodecCost:
    spans = {count: _time(codec, count) for count in (_FEW, _MANY)}
    (few_packed, few_unpacked), (packed, unpacked) = spans[_FEW], spans[_MANY]
    more = _MANY - _FEW
    return CodecCost(
        name=name,
        bytes_per_value=codec.size_bytes(_MANY) / _MANY,
        encode_s_per_value=max(packed - few_packed, 0.0) / more,
        decode_s_per_value=max(unpacked - few_unpacked, 0.0) / more,
        call_s=(few_packed + few_unpacked) / 2,
    )


def _time(codec: Codec, count: int) -> tuple[float, float]:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    data = torch.zeros(codec.size_bytes(count), dtype=torch.uint8)
    total = torch.zeros(count)
    packed = _best(lambda: codec.encode(values, data, seed=1))
    return packed, _best(lambda: codec.decode(data, total, add=True))


def _best(run: Callable[[], object]) -> float:
    run()  # warm up memory and threads
    spans: list[float] = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        run()
        spans.append(time.perf_counter() - began)
    return min(spans)
