"""Waiting for what must become true: on a machine that others load, it takes as long as it takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 600.0
"""How long to wait for what takes seconds on an idle machine; below pytest's own limit for a test."""


def wait_until(
    condition: Callable[[], object],
    what: str,
    *,
    meanwhile: Callable[[], object] | None = None,
    explain: Callable[[], object] | None = None,
    limit_s: float = LIMIT_S,
    pause_s: float = 0.02,
) -> None:
    """Return as soon as a condition holds; fail the test if it never does.

    Args:
        condition: What must become true.
        what: The same in words, for the failure.
        meanwhile: Called each time that the condition does not hold yet; may fail the test early.
        explain: Called for the failure: logs, events, whatever shows why.
        limit_s: A limit for tests that hang; no test passes or fails by how fast something was.
        pause_s: Between two looks.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if meanwhile is not None:
            meanwhile()
        if time.monotonic() > deadline:
            details = "" if explain is None else f"\n{explain()}"
            raise AssertionError(f"not within {limit_s:.0f} s: {what}{details}")
        time.sleep(pause_s)
