"""Link figures of identical hosts, as if they had been measured."""

from __future__ import annotations

import numpy as np

from yunlu.planning.communication.timing import WireFigures


def make_even(
    hosts: tuple[str, ...], *, latency_s: float, bytes_per_s: float, inside_bytes_per_s: float = 1e9
) -> WireFigures:
    """Figures of identical hosts."""
    count = len(dict.fromkeys(hosts))
    rates = np.full((count, count), bytes_per_s)
    np.fill_diagonal(rates, inside_bytes_per_s)
    return WireFigures(
        hosts=hosts,
        latency_s=((latency_s,) * count,) * count,
        bytes_per_s=tuple(tuple(row) for row in rates.tolist()),
        send_bytes_per_s=(bytes_per_s,) * count,
        receive_bytes_per_s=(bytes_per_s,) * count,
    )
