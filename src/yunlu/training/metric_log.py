"""The per-step log: collected as tensors, written a few times a second, never per step."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch

from yunlu.core.errors import TrainingError
from yunlu.core.files import append_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FLUSH_EVERY_S = 0.5
_FLUSH_AT = 256


class MetricLog:
    """Appends one record per step to ``metrics.jsonl`` (keys: ``core.rundir.METRIC_KEYS``)."""

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device,
        allow_overflow: bool,
        forward: Callable[[dict[str, float], int], None],
    ) -> None:
        self._path = path
        self._device = device
        self._allow_overflow = allow_overflow
        self._forward = forward
        self._process = psutil.Process()
        self._pending: list[dict[str, Any]] = []
        self._flushed_at = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        """Take one step; loss and norm may be tensors on a device."""
        record["at"] = time.time()
        self._pending.append(record)

    def charge(self, part: str, seconds: float) -> None:
        """Add to what held up training after the step just taken."""
        self._pending[-1][part] += seconds

    def flush_if_due(self) -> None:
        """Write what is pending, a few times a second."""
        due = time.monotonic() - self._flushed_at >= _FLUSH_EVERY_S
        if due or len(self._pending) >= _FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        """Write what is pending; refuses a loss that is not finite."""
        records, self._pending = self._pending, []
        self._flushed_at = time.monotonic()
        if not records:
            return
        # One transfer for all steps: a device is waited for a few times a second at most.
        values = torch.stack(
            [torch.stack((record["loss"], record["grad_norm"])).float() for record in records]
        ).tolist()
        memory = self._memory_bytes()
        healthy = 0
        for record, (loss, norm) in zip(records, values, strict=True):
            record |= {"loss": loss, "grad_norm": norm, "memory_bytes": memory}
            if not self._is_healthy(loss, norm):
                break
            healthy += 1
        append_lines(self._path, records[:healthy])
        for record in records[:healthy]:
            self._forward(_for_trackers(record), record["step"])
        if healthy < len(records):
            raise _diverged(records[healthy])

    def check(self) -> None:
        """Raise now if a pending step is not finite: before such weights are scored or saved."""
        for record in self._pending:
            if not self._is_healthy(float(record["loss"]), float(record["grad_norm"])):
                self.flush()

    def _is_healthy(self, loss: float, norm: float) -> bool:
        return math.isfinite(loss) and (self._allow_overflow or math.isfinite(norm))

    def _memory_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._process.memory_info().rss


def _for_trackers(record: dict[str, Any]) -> dict[str, float]:
    names = {"loss", "lr", "grad_norm", "epoch", "memory_bytes", "data_s", "compute_s"}
    return {f"train/{name}": float(record[name]) for name in sorted(names)}


def _diverged(record: dict[str, Any]) -> TrainingError:
    what = "loss" if not math.isfinite(record["loss"]) else "gradient"
    return TrainingError(
        f"The {what} is not finite at step {record['step']} "
        f"(loss {record['loss']}, gradient norm {record['grad_norm']}, "
        f"learning rate {record['lr']:g}).",
        hint="Lower train.optimizer.lr, lengthen train.schedule.warmup, tighten train.clip.norm, "
        "or look for NaN in the data. Checkpoints from before are kept.",
    )
