"""What the supervisor tells of the crew: events, figures, failures; each thing once."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yunlu.runs.events import ErrorRaised, StragglerSeen, WorkerGroupFormed, WorkerLost, WorkerRank
from yunlu.runs.run_store import Log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.planning.layout import Layout
    from yunlu.runs.events import Event
    from yunlu.runs.run_store import RunStore
    from yunlu.training.elastic.membership import Membership, WorkerRecord
    from yunlu.training.elastic.messages import Failed
    from yunlu.training.elastic.watchdog import HealthVerdict

_CAUSE_S = 0.3
"""A connection ends a moment before the node knows how the process did."""


def count_oom_kills() -> int:
    """Processes of our control group that the system ended for want of memory, so far."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition(":")[2].strip()
        for folder in (Path("/sys/fs/cgroup") / group.strip("/"), Path("/sys/fs/cgroup")):
            events = folder / "memory.events"
            if events.exists():
                words = events.read_text().split()
                return int(dict(zip(words[::2], words[1::2], strict=True)).get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
    return 0


@dataclass
class EventReporter:
    """Writes to the run's directory."""

    run: RunStore
    _faults: dict[int, tuple[float, WorkerLost]] = field(
        default_factory=dict[int, tuple[float, WorkerLost]]
    )
    _oom_kills: int = field(default_factory=count_oom_kills)

    def emit(self, event: Event) -> None:
        """One event, after the faults that came before it."""
        self.flush_faults()
        self.run.emit(event)

    def tell_fault(self, worker: WorkerRecord, what: str, detail: str) -> None:
        """A worker is lost; told as soon as its cause is known."""
        event = WorkerLost(cause=what, step=worker.step, detail=detail or None, **_who(worker))
        if detail:
            self.emit(event)
        else:
            self._faults[worker.number] = (time.monotonic() + _CAUSE_S, event)

    def explain_exit(self, number: int, code: int) -> str:
        """The cause of an end, in words; completes a fault that waits for it."""
        words = _exit_words(code)
        if code == -signal.SIGKILL and (kills := count_oom_kills()) > self._oom_kills:
            self._oom_kills = kills
            words += ": the system ended it because memory ran out"
        if number in self._faults:
            _, event = self._faults[number]
            self._faults[number] = (0.0, event.model_copy(update={"detail": words}))
        return words

    def flush_faults(self, now: float | None = None) -> None:
        """Tell the faults whose cause is known, or will not be."""
        due = [n for n, (at, _) in self._faults.items() if now is None or at <= now]
        for number in due:
            _, event = self._faults.pop(number)
            self.run.emit(event.model_copy(update={"at": time.time()}))

    def tell_crew(
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
        """A new generation works."""
        ranks = [
            WorkerRank(**_who(worker), **layout.place_of(worker.rank)._asdict())
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

    def tell_straggler(self, worker: WorkerRecord, verdict: HealthVerdict) -> None:
        """A worker computes longer than the others, or does so no more."""
        ratio, step = round(verdict.ratio, 2), worker.step
        is_over = verdict.what == "recovered"
        self.emit(StragglerSeen(ratio=ratio, step=step, recovered=is_over, **_who(worker)))

    def tell_failure(self, failure: Failed, worker: WorkerRecord | None) -> None:
        """The first failure of a worker's own, with its traceback."""
        who = _who(worker) if worker is not None else {}
        if worker is not None:
            detail = failure.message
            self.emit(WorkerLost(cause="failed", step=worker.step, detail=detail, **who))
        self.emit(ErrorRaised(**failure.model_dump(exclude={"kind"}), **who))

    def tell_hopeless(self, words: str, worker: WorkerRecord | None) -> None:
        """It cannot go on, and nobody said why."""
        log = f"logs/worker-{worker.number}.log" if worker is not None else "worker.log"
        message = f"{words[:1].upper()}{words[1:]}."
        hint = f"{self.run.location(log)} has its last words."
        self.emit(ErrorRaised(code="training", message=message, hint=hint))

    def write_figures(self, membership: Membership, generation: int) -> None:
        """How long the last step of each took, about once a second."""
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
            with suppress(OSError):  # figures are not worth a run
                self.run.append(Log.RANK_METRICS, [record])


def _who(worker: WorkerRecord) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "worker": str(worker.number),
        "host": worker.host,
        "pid": worker.pid,
    }


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
