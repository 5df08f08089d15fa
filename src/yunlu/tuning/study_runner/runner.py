"""Runs the trials of a study: reads their events, asks the search method, applies its decisions.

Each tick loads (new events), decides (the method, which is pure) and applies (runs start, continue, are
held or pruned). A trial is recorded before its run starts, and the state of a run is read from its own
events: after a kill at any moment, the next runner continues where this one was.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import did_you_mean
from yunlu.jobs.run import detect_lost, new_record
from yunlu.runs.run_store import Log, log_end
from yunlu.runs.states import RunState
from yunlu.tuning.facts import best_point, find_best
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.study_runner.slots import SlotAllocation
from yunlu.tuning.study_runner.trial_runs import (
    TrialEvents,
    TrialStarter,
    drop_checkpoints,
    find_run,
    has_finished,
    read_verdict,
    write_verdict,
)
from yunlu.tuning.values import (
    Continue,
    EndStudy,
    Judgement,
    Point,
    StartTrial,
    StudySnapshot,
    TrialState,
    Verdict,
    WaitForResults,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from yunlu.jobs.run_record import RunRecord
    from yunlu.runs.run_store import RunStore
    from yunlu.tuning.facts import StudyState, StudyView, TrialFacts
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_dir import StudyRequest, StudyStatus
    from yunlu.tuning.study_runner.slots import Elastic, Slots
    from yunlu.tuning.study_runner.trial_runs import RungScore
    from yunlu.tuning.values import Action, Method


@dataclass(slots=True, kw_only=True)
class WatchedTrial:
    """A started trial and the events read so far."""

    number: int
    """Of its trial."""
    run: RunStore
    record: RunRecord
    events: TrialEvents
    verdict_sent: str = ""
    """``hold`` or ``prune``, once sent."""
    checked_at: float = 0.0
    lost: int = 0
    """Times that its worker was lost since its last evaluation."""


class StudyLimits:
    """Remaining time and budget."""

    def __init__(
        self,
        records: Records,
        allocation: SlotAllocation,
        watched_trials: Mapping[int, WatchedTrial],
        *,
        clock_at: float,
    ) -> None:
        """``clock_at`` is the start of the deadline."""
        self._records, self._allocation, self._watched_trials = records, allocation, watched_trials
        self._clock_at = clock_at

    def seconds_left(self) -> float | None:
        """Until the deadline or the end of the budget, whichever comes first; None: no limit."""
        ends = [left for left in (self._time_left(), self._money_left()) if left is not None]
        return max(min(ends), 0.0) if ends else None

    def pays_for_start(self) -> bool:
        """Whether the budget pays for the start-up of one more trial."""
        left, starts = self._money_left(), len(self._allocation.queue) + 1
        return left is None or left >= self._allocation.wall_s_of(starts * self._allocation.start_s)

    def find_end(self, is_asked_to_stop: Callable[[], bool]) -> tuple[StudyState, str] | None:
        """State and reason with which the study ends now; None while it continues."""
        if is_asked_to_stop() or self._records.dir.stop.exists():
            return "stopped", "asked to stop"
        for left, reason in (
            (self._time_left(), "the deadline has passed"),
            (self._money_left(), "the budget is spent"),
        ):
            if left is not None and left <= 0:
                return "finished", reason
        return None

    def _time_left(self) -> float | None:
        deadline = self._records.request.deadline_s
        return None if deadline is None else self._clock_at + deadline - time.time()

    def _money_left(self) -> float | None:
        """In wall seconds of all devices."""
        dollars = self._records.request.dollars
        if dollars is None:
            return None
        now = time.time()
        spent_s = sum(self._spent_s(facts, now) for facts in self._records.facts())
        return self._allocation.seconds_for(dollars - (self._allocation.dollars(spent_s) or 0.0))

    def _spent_s(self, facts: TrialFacts, now: float) -> float:
        watched = self._watched_trials.get(facts.number)
        if watched is None:
            return facts.device_seconds
        spent_s = watched.events.device_seconds(now)
        if watched.events.state not in {RunState.PENDING, RunState.PLANNING}:
            return spent_s
        # A worker reads a stop request only once it has started: its start-up counts as spent.
        return max(spent_s, facts.device_seconds + self._allocation.start_s)


ALIKE = 3
"""Equal failures without a success that end a study."""


def find_values(
    request: StudyRequest, events: TrialEvents, score: RungScore, *, dollars: float | None
) -> tuple[float, ...]:
    """Objectives of one evaluation, smaller is better; an error where one is not reported."""
    figures = score.metrics | {
        "seconds": score.device_seconds,
        "parameters": float(events.parameters),
    }
    figures |= {} if dollars is None else {"cost": dollars}
    for metric in request.metrics:
        if metric not in figures:
            raise StudyError(
                f"{metric} is never reported: the evaluations of this task do not give it",
                hint=did_you_mean(metric, figures),
            )
    return tuple(
        (-figures[metric] if direction == "maximize" else figures[metric]) + 0.0
        for metric, direction in zip(request.metrics, request.directions, strict=True)
    )


def check_metrics_reported(request: StudyRequest, events: TrialEvents) -> None:
    """Error for a run whose plan has no evaluations."""
    if events.plan and not events.plan.evaluate_every:
        raise StudyError(
            f"{request.metrics[0]} is never reported: the job has no evaluations on validation data",
            hint="name data.validation or hold out a share (data.split.validation), "
            "and set train.evaluate to steps or epoch",
        )


def check_failures(facts: Sequence[TrialFacts], message: str, *, hint: str | None = None) -> None:
    """End the study if a failed trial shows that none will succeed."""
    if any(best_point(fact.trial) or fact.state is TrialState.DONE for fact in facts):
        return
    if "asks for the metric" in message:  # the same for every setting
        raise StudyError(message, hint=hint)
    failed = [fact for fact in facts if fact.state is TrialState.FAILED]
    alike = [item for item in failed if _bare(item.error or "") == _bare(message)]
    if len(alike) >= ALIKE:
        first = failed[0]
        logs = f"yunlu logs {first.run} shows the whole of it" if first.run else None
        raise StudyError(
            f"the first {len(failed)} trials failed alike: {first.error}", hint=hint or logs
        )


def _bare(message: str) -> str:
    """Without numbers, which differ from trial to trial."""
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", message)


class MethodDecisions:
    """Queries the search method of a study."""

    def __init__(
        self, records: Records, method: Method, allocation: SlotAllocation, limits: StudyLimits
    ) -> None:
        self._records, self._method = records, method
        self._allocation, self._limits = allocation, limits

    def choose(self) -> Action:
        """Next action for a free slot."""
        return self._method.choose(self._snapshot())

    def judge(self, number: int) -> Judgement:
        """Verdict on a trial after its newest evaluation; ``until`` lies beyond where it continues."""
        trial, snapshot = self._records.trial(number), self._snapshot()
        judgement = self._method.judge(number, snapshot)
        until = max(trial.until, judgement.until)
        verdict = judgement.verdict
        if verdict is Verdict.GO_ON and until <= trial.rung:
            verdict = Verdict.HOLD
        if verdict is Verdict.HOLD and trial.rung >= trial.until:
            # It waits for the verdict: no need to leave where it would be resumed at once.
            move = self._method.choose(_as_held(snapshot, number))
            if isinstance(move, Continue) and move.number == number and move.until > trial.rung:
                verdict, until = Verdict.GO_ON, move.until
        return Judgement(verdict, until, judgement.reason)

    def _snapshot(self) -> StudySnapshot:
        request, trials = self._records.request, self._records.trials()
        left = None if request.trials is None else max(request.trials - len(trials), 0)
        return StudySnapshot(
            trials=trials,
            rungs=max(request.rungs, 1),
            objectives=len(request.metrics),
            trials_left=left,
            seconds_left=self._limits.seconds_left(),
            workers=self._allocation.workers,
        )


def _as_held(snapshot: StudySnapshot, number: int) -> StudySnapshot:
    trials = list(snapshot.trials)
    trials[number] = replace(trials[number], state=TrialState.HELD)
    return replace(snapshot, trials=trials)


_LOST = 3
"""Lost workers allowed between two evaluations."""


class TrialCompletion:
    """Updates trials whose run has ended."""

    def __init__(
        self,
        records: Records,
        allocation: SlotAllocation,
        slots: Slots,
        starter: TrialStarter,
        watched_trials: dict[int, WatchedTrial],
    ) -> None:
        """``watched_trials``: by trial number; ended ones are removed."""
        self._records, self._allocation, self._slots = records, allocation, slots
        self._starter, self._watched_trials = starter, watched_trials

    def unwatch(self, watched: WatchedTrial) -> None:
        """Stop watching a run."""
        self._watched_trials.pop(watched.number, None)
        self._allocation.leave(watched.run)

    def complete(self, watched: WatchedTrial, *, is_ending: bool) -> None:
        """Update the trial of an ended run; nothing is restarted while the study ends."""
        events, spent_s = watched.events, watched.events.device_seconds(time.time())
        cost: dict[str, Any] = {
            "device_seconds": spent_s,
            "dollars": self._allocation.dollars(spent_s),
            "devices": 0,
        }
        match events.state:
            case RunState.FINISHED:
                self.unwatch(watched)
                self._finish(watched, cost)
            case RunState.STOPPED if watched.verdict_sent == "prune" or events.reason.startswith(
                "pruned"
            ):
                self.unwatch(watched)
                self._records.end(watched.number, TrialState.PRUNED, reason=events.reason, **cost)
                self._slots.release(watched.run, for_good=True)
                drop_checkpoints(watched.run)
            case RunState.STOPPED:
                self.unwatch(watched)
                self._hold(watched, cost, is_ending=is_ending)
            case RunState.LOST if watched.lost < _LOST and not is_ending:
                watched.lost += 1
                self._records.change_trial(watched.number, **cost)
                self._allocation.enqueue(watched.number, watched.run)
                self._allocation.leave(watched.run)
            case _:
                self.unwatch(watched)
                self._fail(watched, cost)

    def _finish(self, watched: WatchedTrial, cost: dict[str, Any]) -> None:
        """Of finished trials, only the best keeps its checkpoints; all keep their exported models."""
        before = find_best(self._records.facts())
        self._records.end(watched.number, TrialState.DONE, reason="", **cost)
        best = find_best(self._records.facts())
        is_best = best is not None and best.number == watched.number
        worse = before if is_best else self._records.facts()[watched.number]
        if (
            worse is not None
            and worse.state is TrialState.DONE
            and not self._starter.saves_checkpoints
        ):
            run = find_run(worse.run or "")
            if run is not None:
                drop_checkpoints(run)

    def _hold(self, watched: WatchedTrial, cost: dict[str, Any], *, is_ending: bool) -> None:
        trial = self._records.trial(watched.number)
        goes_on = not watched.verdict_sent and trial.until > trial.rung and not is_ending
        state = TrialState.RUNNING if goes_on else TrialState.HELD
        self._records.change_trial(
            watched.number, state=state, reason=watched.events.reason, **cost
        )
        if goes_on:  # its extension came too late, or somebody else stopped it
            self._allocation.enqueue(watched.number, watched.run)
        else:
            self._slots.release(watched.run, for_good=False)

    def _fail(self, watched: WatchedTrial, cost: dict[str, Any]) -> None:
        error = watched.events.error
        message = (error.message if error else watched.events.reason) or "its worker was lost"
        self._records.end(watched.number, TrialState.FAILED, error=message, **cost)
        check_failures(self._records.facts(), message, hint=error.hint if error else None)


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
