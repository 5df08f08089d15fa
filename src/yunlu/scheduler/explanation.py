"""Explanation of a run's allocation: its phase, the last decision, other holders."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import StoreError
from yunlu.core.units import show_duration
from yunlu.core.value import Value
from yunlu.jobs.lifecycle import read_record
from yunlu.scheduler.allocation_record import read_allocation
from yunlu.scheduler.control import find_service
from yunlu.scheduler.pool_store import PoolStore
from yunlu.scheduler.queue import read_entry

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.runs.run_store import RunStore
    from yunlu.scheduler.allocation_record import AllocationRecord
    from yunlu.scheduler.queue import QueueEntry

_FEW = 8


class LoggedDecision(Value):
    """One decision on the run."""

    at: float
    code: str
    text: str
    was: int = 0
    devices: int = 0
    figures: dict[str, Any]


class Explanation(Value):
    """The answer to ``yunlu pool why``."""

    run: str
    standing: str
    """Current state, in one sentence."""
    holders: dict[str, int]
    """Devices that each run holds now."""
    history: tuple[LoggedDecision, ...]
    """Decisions about the run, oldest first."""

    @property
    def last(self) -> LoggedDecision | None:
        """The newest decision."""
        return self.history[-1] if self.history else None


def explain(home: Path, run: RunStore) -> Explanation:
    """Build the explanation from the stored files."""
    entry = read_entry(run)
    if entry is None:
        raise StoreError(
            f"{run.id} is not in the queue: the pool decides nothing about it",
            hint="yunlu submit queues a job; yunlu ps lists every run",
        )
    pool_store = PoolStore(home)
    view = pool_store.read_view() or {}
    is_up = find_service(home) is not None
    runs: list[dict[str, Any]] = view.get("runs") or []
    own = next((one_run for one_run in runs if one_run.get("id") == run.id), None)
    holders = {
        str(one_run["id"]): int(one_run["devices"]) for one_run in runs if one_run.get("devices")
    }
    history = [
        result for line in pool_store.read_decisions(run.id) if (result := _read_decision(line))
    ]
    return Explanation(
        run=run.id,
        standing=_standing(run, entry, read_allocation(run), own, is_up=is_up),
        holders=holders if is_up else {},
        history=tuple(history[-_FEW:]),
    )


def _standing(
    run: RunStore,
    entry: QueueEntry,
    allocation: AllocationRecord,
    own: dict[str, Any] | None,
    *,
    is_up: bool,
) -> str:
    state = read_record(run).state
    again = f"yunlu resume {run.id} queues it again"
    wait_s = allocation.wait_s() - (time.time() - (allocation.failed_at or 0.0))
    times = "once" if allocation.failures == 1 else f"{allocation.failures} times"
    cases = (
        (not state.is_active and not state.can_resume, f"{state}"),
        (bool(allocation.given_up), f"given up: {allocation.given_up}"),
        (entry.wish == "pause" and not allocation.shares, f"paused; {again}"),
        (entry.wish == "stop" and not allocation.shares, f"stopped by its owner; {again}"),
        (not is_up, f"{state}, and no pool is up: yunlu pool up starts one"),
        (
            allocation.is_backing_off(time.time()),
            f"failed {times}, tried again in {show_duration(max(wait_s, 0.0))}: {allocation.failure}",
        ),
        (own is None, f"{state}; the pool has not looked at it yet"),
    )
    return next((text for holds, text in cases if holds), "") or _words(own or {})


def _words(own: dict[str, Any]) -> str:
    devices, phase = int(own.get("devices") or 0), str(own.get("phase"))
    text = f"{phase} on {devices} device{'s' * (devices != 1)}" if devices else phase
    if own.get("wanted") and own["wanted"] != devices:
        text += f", and to have {own['wanted']}"
    start_at, end_at = own.get("start_at"), own.get("end_at")
    if not devices and start_at is not None:
        text += f"; starts in about {show_duration(max(0.0, start_at - time.time()))}"
    if end_at is not None:
        text += f"; ends in about {show_duration(max(0.0, end_at - time.time()))}"
    return text


def _read_decision(line: dict[str, Any]) -> LoggedDecision | None:
    try:
        return LoggedDecision(
            at=float(line["at"]),
            code=str(line["code"]),
            text=str(line["text"]),
            was=sum(int(count) for _, count in line.get("was") or ()),
            devices=sum(int(count) for _, count in line.get("shares") or ()),
            figures=dict(line.get("figures") or {}),
        )
    except (KeyError, TypeError, ValueError):
        return None
