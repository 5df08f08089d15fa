"""Events and metrics of a worker group, written by the supervisor."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import StoreError
from yunlu.core.processes import ExitDescriber
from yunlu.runs.events import ErrorRaised, StragglerSeen, WorkerGroupFormed, WorkerLost, WorkerRank
from yunlu.runs.run_store import Log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.planning.layouts import Layout
    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore
    from yunlu.training.elastic.membership import Membership, WorkerRecord
    from yunlu.training.elastic.messages import Failed
    from yunlu.training.elastic.watchdog import HealthVerdict

_CAUSE_S = 0.3
"""The connection closes slightly before the node reports the exit code."""


@dataclass
class EventReporter:
    """Writes events and metrics of the run, each fault once."""

    run: RunStore
    _faults: dict[int, tuple[float, WorkerLost]] = field(
        default_factory=dict[int, tuple[float, WorkerLost]]
    )
    _exits: ExitDescriber = field(default_factory=ExitDescriber)

    def emit(self, event: Event) -> None:
        """Emit an event, after all pending faults."""
        self.flush_faults()
        self.run.emit(event)

    def report_fault(self, worker: WorkerRecord, what: str, detail: str) -> None:
        """Report a lost worker as soon as the cause is known."""
        event = WorkerLost(cause=what, step=worker.step, detail=detail or None, **_identify(worker))
        if detail:
            self.emit(event)
        else:
            self._faults[worker.number] = (time.monotonic() + _CAUSE_S, event)

    def explain_exit(self, number: int, code: int) -> str:
        """Describe an exit code; completes the pending fault of that worker."""
        text = self._exits.describe(code)
        if number in self._faults:
            _, event = self._faults[number]
            self._faults[number] = (0.0, event.model_copy(update={"detail": text}))
        return text

    def flush_faults(self, now: float | None = None) -> None:
        """Emit pending faults whose cause is known, or is overdue."""
        due = [n for n, (at, _) in self._faults.items() if now is None or at <= now]
        for number in due:
            _, event = self._faults.pop(number)
            self.run.emit(event.model_copy(update={"at": time.time()}))

    def report_group(
        self,
        generation: int,
        layout: Layout,
        workers: Iterable[WorkerRecord],
        *,
        reason: str,
        from_step: int,
        redone_steps: int,
        lost_s: float | None,
    ) -> None:
        """Report a generation that completed its first step."""
        ranks = [
            WorkerRank(**_identify(worker), **layout.place_of(worker.rank)._asdict())
            for worker in sorted(workers, key=lambda worker: worker.rank or 0)
            if worker.rank is not None
        ]
        self.emit(
            WorkerGroupFormed(
                generation=generation,
                layout=str(layout),
                reason=reason,
                from_step=from_step,
                redone_steps=redone_steps,
                lost_s=None if lost_s is None else round(lost_s, 4),
                ranks=tuple(ranks),
            )
        )

    def report_straggler(self, worker: WorkerRecord, verdict: HealthVerdict) -> None:
        """Report that a worker became, or no longer is, a straggler."""
        ratio, step = round(verdict.ratio, 2), worker.step
        is_over = verdict.what == "recovered"
        self.emit(StragglerSeen(ratio=ratio, step=step, recovered=is_over, **_identify(worker)))

    def report_failure(self, failure: Failed, worker: WorkerRecord | None) -> None:
        """Report the error with which the run fails, with its traceback."""
        who = _identify(worker) if worker is not None else {}
        if worker is not None:
            detail = failure.message
            self.emit(WorkerLost(cause="failed", step=worker.step, detail=detail, **who))
        self.emit(ErrorRaised(**failure.model_dump(exclude={"kind"}), **who))

    def report_hopeless(self, text: str, worker: WorkerRecord | None) -> None:
        """Report that the run cannot continue, where no worker reported an error."""
        log = f"logs/worker-{worker.number}.log" if worker is not None else "worker.log"
        message = f"{text[:1].upper()}{text[1:]}."
        hint = f"{self.run.location(log)} has its output."
        self.emit(ErrorRaised(code="training", message=message, hint=hint))

    def write_metrics(self, membership: Membership, generation: int) -> None:
        """Write the last step time of each rank, about once a second."""
        ranks = [
            {
                "rank": worker.rank,
                "worker": str(worker.number),
                "step_s": round(worker.last_step[1], 6),
                "wait_s": round(worker.last_step[2], 6),
                "memory_bytes": worker.heartbeat.memory_bytes,
                "phase": worker.heartbeat.phase,
            }
            for worker in membership.with_status("busy")
            if worker.last_step is not None
            and worker.heartbeat is not None
            and worker.rank is not None
        ]
        if ranks:
            step = max(worker.step for worker in membership.with_status("busy"))
            record = {"at": time.time(), "generation": generation, "step": step, "ranks": ranks}
            with suppress(OSError, StoreError):  # metrics must not fail a run
                self.run.append(Log.RANK_METRICS, [record])


def _identify(worker: WorkerRecord) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "worker": str(worker.number),
        "host": worker.host,
        "pid": worker.pid,
    }
