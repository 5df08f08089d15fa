"""Monotonic clock of the pool, starting at the time of day."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_JUMP_S = 5.0


class SteadyClock:
    """Seconds since the epoch at the start plus monotonic time since; setting the system clock has no effect."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._began_at, self._since = wall(), steady()
        self._told_s = 0.0

    def now(self) -> float:
        """Current time; all decisions use it."""
        return self._began_at + (self._steady() - self._since)

    def from_wall(self, at: float) -> float:
        """Convert a wall-clock time to this clock."""
        return at - self._wall() + self.now()

    def find_jump_s(self) -> float | None:
        """By how much the wall clock was set since the last call; None if it was not."""
        off_s = self._wall() - self.now()
        jump_s, self._told_s = off_s - self._told_s, off_s
        return jump_s if abs(jump_s) > _JUMP_S else None
