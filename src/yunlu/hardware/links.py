"""Link: latency and bandwidth between two workers."""

from __future__ import annotations

from yunlu.core.value import Value


class Link(Value):
    """What carries the bytes between two workers."""

    name: str
    bytes_per_s: float
    """What one worker sends while it also receives."""
    message_s: float
    """Before the first byte: what even an empty exchange takes."""


LOOPBACK = Link(name="loopback", bytes_per_s=8e8, message_s=3e-4)
"""Two processes of one machine over TCP with gloo, measured once on two cores in a quiet moment."""

PCIE = Link(name="pcie", bytes_per_s=1.2e10, message_s=2e-5)
"""GPUs of one machine without a faster link of their own."""
