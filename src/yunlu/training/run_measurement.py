"""Measured counterpart of the prediction, read from the run's logs over all its attempts."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

from yunlu.planning.plan import Measurement
from yunlu.runs.events import AttemptStarted

if TYPE_CHECKING:
    from yunlu.hardware.machine import Machine
    from yunlu.runs.run_store import RunStore


def measure_run(directory: RunStore, *, samples: int, machine: Machine) -> Measurement:
    """Memory, step time, throughput, total time and cost of a run that is about to finish."""
    # A step that a later attempt repeated is logged twice; the later record wins. Two numbers of each
    # step, not its record: millions of records would not fit into memory beside the model.
    spans_s, memory_bytes = dict[int, float](), 0
    for record, _ in directory.read_metrics():
        spans_s[record["step"]] = record["data_s"] + record["compute_s"]
        memory_bytes = max(memory_bytes, record.get("memory_bytes", 0))
    spans = list(spans_s.values())
    total_s = _active_seconds(directory)
    price = machine.dollars_per_hour
    return Measurement(
        memory_bytes=memory_bytes,
        step_s=median(spans) if spans else 0.0,
        samples_per_s=samples / sum(spans) if spans else 0.0,
        total_s=total_s,
        dollars=None if price is None else price * total_s / 3600,
    )


def _active_seconds(directory: RunStore) -> float:
    total_s, began_at, seen_at = 0.0, None, 0.0
    for event, _ in directory.read_events():
        if isinstance(event, AttemptStarted):
            total_s += seen_at - began_at if began_at is not None else 0.0
            began_at = event.began_at
        seen_at = event.at
    return total_s + (time.time() - began_at if began_at is not None else 0.0)
