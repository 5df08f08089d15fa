"""The per-step metric log; records are buffered and written a few times a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from yunlu.runs.run_store import Log
from yunlu.training.memory.resident import peak_resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.runs.run_store import RunStore

_FLUSH_EVERY_S = 0.5
_FLUSH_AT = 256
_TRACKED_PER_FLUSH = 10
_TRACKED = (
    *("compute_s", "data_s", "epoch", "grad_norm", "loss", "loss_scale"),
    *("low_share", "lr", "memory_bytes", "noise_scale"),
)


class MetricLog:
    """Appends one record per step to the metrics of the run (keys: ``METRIC_KEYS``)."""

    def __init__(
        self,
        run: RunStore,
        *,
        device: torch.device,
        attempt: int,
        forward: Callable[[dict[str, float], int], None],
    ) -> None:
        self._run = run
        self._device = device
        self._attempt = attempt
        self._forward = forward
        self._pending: list[dict[str, Any]] = []
        self._deferred: dict[str, float] = {}
        self._flushed_at = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of one step."""
        record["at"], record["attempt"] = time.time(), self._attempt
        for field, seconds in self._deferred.items():
            record[field] += seconds
        self._deferred.clear()
        self._pending.append(record)

    def charge(self, field: str, seconds: float) -> None:
        """Charge seconds spent after the last step to its record."""
        if self._pending:
            self._pending[-1][field] += seconds
        else:  # already written, or skipped: charge the next record
            self._deferred[field] = self._deferred.get(field, 0.0) + seconds

    def flush_if_due(self) -> None:
        """Write pending records a few times a second."""
        due = time.monotonic() - self._flushed_at >= _FLUSH_EVERY_S
        if due or len(self._pending) >= _FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        """Write pending records."""
        records, self._pending = self._pending, []
        self._flushed_at = time.monotonic()
        if not records:
            return
        memory = self._memory_bytes()
        for record in records:
            record["memory_bytes"] = memory
        self._run.append(Log.METRICS, records)
        # Trackers get a sample of the points; the log above has them all.
        stride = -(-len(records) // _TRACKED_PER_FLUSH)
        for record in records[::-stride][::-1]:
            self._forward(_for_trackers(record), record["step"])

    def _memory_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_resident_bytes()


def _for_trackers(record: dict[str, Any]) -> dict[str, float]:
    return {f"train/{name}": float(record[name]) for name in _TRACKED if name in record}
