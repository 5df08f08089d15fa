"""Runs the trials of a study: reads their events, asks the search method, applies its decisions.

Each tick loads (new events), decides (the method, which is pure) and applies (runs start, continue, are
held or pruned). A trial is recorded before its run starts, and the state of a run is read from its own
events: after a kill at any moment, the next runner continues where this one was.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunlu.jobs.run import detect_lost, new_record
from yunlu.runs.run_store import Log, log_end
from yunlu.runs.states import RunState
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.study_runner.limits import StudyLimits
from yunlu.tuning.study_runner.method_decisions import MethodDecisions
from yunlu.tuning.study_runner.objectives import check_metrics_reported, find_values
from yunlu.tuning.study_runner.slot_allocation import SlotAllocation
from yunlu.tuning.study_runner.trial_completion import TrialCompletion
from yunlu.tuning.study_runner.trial_events import TrialEvents, has_finished
from yunlu.tuning.study_runner.trial_runs import (
    find_run,
    read_verdict,
    write_verdict,
)
from yunlu.tuning.study_runner.trial_start import TrialStarter
from yunlu.tuning.study_runner.watched_trial import WatchedTrial
from yunlu.tuning.values import (
    Continue,
    EndStudy,
    Judgement,
    Point,
    StartTrial,
    TrialState,
    Verdict,
    WaitForResults,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.runs.run_store import RunStore
    from yunlu.tuning.facts import StudyState, StudyView
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_dir import StudyStatus
    from yunlu.tuning.study_runner.slot_allocation import Elastic
    from yunlu.tuning.study_runner.slots import Slots
    from yunlu.tuning.study_runner.trial_events import RungScore
    from yunlu.tuning.values import Method

_TICK_S = 0.03
_ALIVE_S = 1.0
"""Interval of the check whether workers are alive."""
_SHOW_S = 0.2
_LEAVE_S = 120.0
"""Time limit for held trials to save when the study ends."""
_REPEATS = 100
"""Repeated settings in a row after which the space counts as exhausted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """How a study ended."""

    state: StudyState
    reason: str
    view: StudyView


def run_to_end(
    records: Records,
    *,
    method: Method,
    slots: Slots,
    on_change: Callable[[StudyView], None] | None = None,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
    elastic: Elastic = "auto",
) -> StudyOutcome:
    """Run a study until its end; refuse where another process runs it.

    Args:
        records: The study.
        method: How it searches.
        slots: Where its trials run.
        on_change: Receives the study a few times a second.
        is_asked_to_stop: Checked in every tick: trials are held, and the study can continue later.
        elastic: Whether the number of devices of a trial may change while it runs; ``auto``: where
            trials are long enough.
    """
    with records.dir.locked_by_runner():
        runner = StudyRunner(records, method, slots, elastic=elastic, on_change=on_change)
        return runner.run(is_asked_to_stop)


class StudyRunner:
    """One attempt at running a study."""

    def __init__(
        self,
        records: Records,
        method: Method,
        slots: Slots,
        *,
        elastic: Elastic = "auto",
        on_change: Callable[[StudyView], None] | None = None,
    ) -> None:
        self._records, self._slots = records, slots
        self._on_change = on_change
        self._watched: dict[int, WatchedTrial] = {}
        self._allocation = SlotAllocation(records, method, slots, elastic=elastic)
        self._starter = TrialStarter(records, slots)
        self._completion = TrialCompletion(
            records, self._allocation, slots, self._starter, self._watched
        )
        self._has_news = True
        """Whether anything happened since the method last chose to wait."""
        self._shown_at = 0.0
        self._repeats = 0
        self._end: tuple[StudyState, str] | None = None
        self._is_exhausted = ""
        """Why no more trials start."""
        self._status: StudyStatus = records.dir.read_status()
        self._limits = StudyLimits(
            records, self._allocation, self._watched, clock_at=self._find_clock()
        )
        self._decider = MethodDecisions(records, method, self._allocation, self._limits)

    # Main loop.

    def run(self, is_asked_to_stop: Callable[[], bool]) -> StudyOutcome:
        """Tick until the study is over."""
        clock_at = self._find_clock()
        began_at = self._status.began_at or clock_at
        idle_s = self._status.idle_until(time.time())
        about = {"began_at": began_at, "clock_at": clock_at, "idle_s": idle_s}
        self._note("running", "", ended_at=None, **about)
        try:
            self._recover()
            while self._end is None:
                self._tick(is_asked_to_stop)
            state, reason = self._end
            self._hold_all(reason)
        except BaseException as error:
            reason = error.message if isinstance(error, StudyError) else f"{error!r}"
            if isinstance(error, StudyError):
                self._stop_all()
            is_own = isinstance(error, (StudyError, Exception))
            self._note("failed" if is_own else "stopped", reason, ended_at=time.time())
            raise
        self._note(state, reason, ended_at=time.time())
        self._show(always=True)
        return StudyOutcome(state=state, reason=reason, view=self._records.view())

    def _find_clock(self) -> float:
        """Start of the deadline: kept after a kill, new after a regular end."""
        status = self._status
        is_cut_off = status.clock_at is not None and status.ended_at is None
        return status.clock_at or time.time() if is_cut_off else time.time()

    def _note(self, state: StudyState, reason: str, **updates: Any) -> None:
        about = {"state": state, "reason": reason, "devices": self._slots.devices, **updates}
        self._status = self._status.model_copy(update=about)
        self._records.dir.write_status(self._status)

    def _tick(self, is_asked_to_stop: Callable[[], bool]) -> None:
        for watched in [*self._watched.values()]:
            self._receive(watched)
        self._end = self._limits.find_end(is_asked_to_stop)
        if self._end is None:
            self._start_more()
        if self._end is None and not self._watched and not self._allocation.queue:
            self._end = ("finished", self._is_exhausted or "nothing more is worth trying")
        if self._end is None:
            self._allocation.rebalance([*self._watched.values()])
            for number, run in self._allocation.start_queued([*self._watched.values()]):
                self._watch(number, run)
            self._show()
            time.sleep(_TICK_S)

    def _show(self, *, always: bool = False) -> None:
        if self._on_change is None or (not always and time.time() - self._shown_at < _SHOW_S):
            return
        self._shown_at = time.time()
        self._on_change(self._records.view())

    # Load: events of the runs.

    def _recover(self) -> None:
        """Recover the trials of an earlier runner: running, held, or recorded but never started."""
        for facts in self._records.facts():
            trial = facts.trial
            if trial.state.is_over:
                continue
            run = find_run(facts.run) if facts.run else None
            if run is None:
                if facts.run is not None:
                    reason = f"its run {facts.run} was removed"
                    self._records.end(trial.number, TrialState.FAILED, error=reason)
                else:
                    self._allocation.enqueue(trial.number, self._starter.make_run(trial.number))
                continue
            is_cut_off = trial.state is TrialState.HELD and trial.rung < trial.until
            if trial.state is TrialState.HELD and not (is_cut_off or has_finished(run)):
                continue
            watched = self._watch(trial.number, run)
            before = trial.rung
            if trial.state is TrialState.HELD:
                self._records.change_trial(trial.number, state=TrialState.RUNNING)
            watched.verdict_sent = next(
                (k for k in ("prune", "hold") if k in read_verdict(run)), ""
            )
            if is_cut_off:
                watched.verdict_sent = ""
            self._receive(watched)
            now = self._records.trial(trial.number)
            if trial.number in self._watched and 0 < now.rung == before < self._total(watched):
                self._judge(watched)  # the runner may have been killed before it decided

    def _watch(self, number: int, run: RunStore) -> WatchedTrial:
        watched = self._watched.get(number)
        if watched is None:
            record = new_record(run)
            assert record is not None
            devices = self._records.facts()[number].devices or 1
            events = TrialEvents(devices=devices)
            watched = self._watched[number] = WatchedTrial(
                number=number, run=run, record=record, events=events
            )
        watched.verdict_sent = ""
        return watched

    def _receive(self, watched: WatchedTrial) -> None:
        """Apply new events of a run; where there are none, this only compares the size of the log."""
        now = time.monotonic()
        if now - watched.checked_at > _ALIVE_S:
            watched.checked_at = now
            watched.record = detect_lost(watched.run, watched.record)
        size = log_end(watched.run, Log.EVENTS)
        if not size:
            self._completion.unwatch(watched)
            self._records.end(watched.number, TrialState.FAILED, error="its run was removed")
            return
        if size <= watched.events.offset:
            return
        for event, offset in watched.run.read_events(offset=watched.events.offset):
            result = watched.events.apply_event(event)
            watched.events.offset = offset
            if result is not None:
                self._take_evaluation(watched, result)
        self._check_plan(watched)
        if not watched.events.state.is_active:
            self._has_news = True
            self._completion.complete(watched, is_ending=self._end is not None)

    def _check_plan(self, watched: WatchedTrial) -> None:
        check_metrics_reported(self._records.request, watched.events)
        if watched.events.rungs > self._records.request.rungs:
            self._records.change(rungs=watched.events.rungs)

    def _total(self, watched: WatchedTrial) -> int:
        return watched.events.rungs or self._records.request.rungs

    def _take_evaluation(self, watched: WatchedTrial, score: RungScore) -> None:
        trial = self._records.trial(watched.number)
        if score.rung <= trial.rung or trial.state.is_over:
            return  # repeated after a crash: the same value
        spent_s = score.device_seconds
        dollars = self._allocation.dollars(spent_s)
        values = find_values(self._records.request, watched.events, score, dollars=dollars)
        self._records.add_point(
            watched.number,
            Point(score.rung, values, spent_s),
            at=score.at,
            device_seconds=spent_s,
            dollars=dollars,
            devices=watched.events.devices,
        )
        self._has_news, watched.lost = True, 0
        if score.rung < self._total(watched) and not watched.verdict_sent and self._end is None:
            self._judge(watched)

    # Decide.

    def _judge(self, watched: WatchedTrial) -> None:
        judgement = self._decider.judge(watched.number)
        if judgement.verdict is not Verdict.GO_ON:
            self._send_verdict(watched, judgement)
        elif judgement.until > self._records.trial(watched.number).until:
            self._records.change_trial(watched.number, until=judgement.until)
            write_verdict(watched.run, {"until": judgement.until})

    def _send_verdict(self, watched: WatchedTrial, judgement: Judgement) -> None:
        kind = watched.verdict_sent = "prune" if judgement.verdict is Verdict.PRUNE else "hold"
        self._slots.release(watched.run, for_good=kind == "prune")
        write_verdict(watched.run, {kind: judgement.reason})
        if self._allocation.ignores_verdicts:  # asynchronous workers do not read verdicts
            self._slots.stop(watched.run, now=kind == "prune")

    def _start_more(self) -> None:
        """Ask the method for actions until no slot is free or it waits."""
        while self._has_news and self._end is None:
            if len(self._watched) + len(self._allocation.queue) >= self._allocation.workers:
                return
            if not self._limits.pays_for_start():
                if not self._watched and not self._allocation.queue:
                    self._end = (
                        "finished",
                        "the rest of the budget does not pay for another start",
                    )
                return
            move = self._decider.choose()
            match move:
                case StartTrial():
                    if not self._begin(move):
                        self._has_news = False
                case Continue(number=number, until=until):
                    self._continue(number, until)
                case WaitForResults():
                    self._has_news = False
                case EndStudy(reason=reason):
                    self._is_exhausted, self._has_news = reason, False

    def _begin(self, move: StartTrial) -> bool:
        """Start a trial; false where no more may start."""
        request = self._records.request
        if request.trials is not None and len(self._records.facts()) >= request.trials:
            self._is_exhausted = f"{request.trials} trials were requested"
            return False
        if self._starter.record_duplicate(move):
            self._repeats += 1
            if self._repeats >= _REPEATS:
                self._is_exhausted = "every suggested setting was tried before"
            return self._repeats < _REPEATS
        self._repeats = 0
        number = self._starter.begin(move)
        self._allocation.enqueue(number, self._starter.make_run(number))
        return True

    def _continue(self, number: int, until: int) -> None:
        trial = self._records.trial(number)
        if trial.state.is_over or until <= trial.rung:
            raise StudyError(
                f"trial {number} is {trial.state} at rung {trial.rung}: it cannot continue to {until}"
            )
        if trial.state is TrialState.HELD:
            run = find_run(self._records.facts()[number].run or "")
            if run is None:
                self._records.end(number, TrialState.FAILED, error="its run was removed")
                return
            self._records.change_trial(number, state=TrialState.RUNNING, until=until, reason="")
            self._allocation.enqueue(number, run)
        elif until > trial.until:
            self._records.change_trial(number, until=until)
            watched = self._watched.get(number)
            if watched is not None and not watched.verdict_sent:
                write_verdict(watched.run, {"until": until})

    # End.

    def _hold_all(self, reason: str) -> None:
        """Hold running trials, and wait until they have saved."""
        for number in self._allocation.clear():
            self._records.change_trial(number, state=TrialState.HELD, reason="not started")
        for watched in self._watched.values():
            if watched.verdict_sent:
                continue
            self._send_verdict(watched, Judgement(Verdict.HOLD, reason=reason))
            if watched.events.state in {RunState.PENDING, RunState.PLANNING}:
                self._slots.stop(watched.run)
        deadline = time.monotonic() + _LEAVE_S
        while self._watched:
            for watched in [*self._watched.values()]:
                self._receive(watched)
            if self._watched and time.monotonic() > deadline:
                self._stop_all()
            time.sleep(_TICK_S)
        for facts in self._records.facts():
            run = find_run(facts.run) if facts.run else None
            if facts.state is TrialState.HELD and run is not None:
                write_verdict(run, {})  # whoever resumes the run by hand trains it to its end

    def _stop_all(self) -> None:
        """End what still runs, at once."""
        for watched in [*self._watched.values()]:
            self._slots.stop(watched.run, now=True)
            self._completion.unwatch(watched)
            self._records.change_trial(
                watched.number, state=TrialState.HELD, reason="ended at once"
            )
