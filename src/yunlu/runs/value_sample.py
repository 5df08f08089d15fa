"""A bounded sample of many values, in their order: every n-th, and n doubles when it is full."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_CAPACITY = 1 << 14


class ValueSample:
    """All values as long as they are few, else evenly spaced ones."""

    def __init__(self, *, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._parts: list[FloatArray] = []
        self._size = self._seen = 0
        self._stride = 1

    def add(self, values: FloatArray) -> None:
        """Take in the next values."""
        first = -self._seen % self._stride
        self._seen += len(values)
        sample = values[first :: self._stride].copy()
        if len(sample):
            self._parts.append(sample)
            self._size += len(sample)
        while self._size > self._capacity:
            whole = np.concatenate(self._parts)[::2]
            self._parts, self._size = [whole.copy()], len(whole)
            self._stride *= 2

    @property
    def values(self) -> FloatArray:
        """What was retained."""
        return np.concatenate(self._parts) if self._parts else np.empty(0)

    def latest_quarter(self) -> FloatArray:
        """The last of four equal parts."""
        values = self.values
        return values[len(values) * 3 // 4 :]
