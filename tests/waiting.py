"""Waiting for what must become true, as the contracts do it."""

from __future__ import annotations

from yunlu.testing.waiting import LIMIT_S, wait_until

__all__ = ["LIMIT_S", "wait_until"]
