"""The conductor of a study: reads what the runs of the trials tell, asks the method, and sees to it.

Each beat loads (what happened), decides (the method, which is pure) and applies (runs start, go on, are
held or given up). A trial is recorded before its run starts, and what becomes of a run is read from its
own events: a conductor that is killed at any moment is followed by one that goes on where it was.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunlu.jobs.run import new_record, detect_lost
from yunlu.runs.run_store import Log, log_end
from yunlu.runs.states import RunState
from yunlu.tuning.study_runner.method_decisions import MethodDecisions
from yunlu.tuning.study_runner.slot_allocation import SlotAllocation
from yunlu.tuning.study_runner.limits import StudyLimits
from yunlu.tuning.study_runner.watched_trial import WatchedTrial
from yunlu.tuning.study_runner.objectives import find_values, check_metrics_reported
from yunlu.tuning.study_runner.trial_completion import TrialCompletion
from yunlu.tuning.study_runner.trial_start import TrialStarter
from yunlu.tuning.study_runner.trial_events import TrialEvents, has_finished
from yunlu.tuning.study_runner.trial_runs import (
    find_run,
    read_verdict,
    write_verdict,
)
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.values import (
    StartTrial,
    EndStudy,
    Continue,
    Judgement,
    Point,
    TrialState,
    Verdict,
    WaitForResults,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.runs.run_store import RunStore
    from yunlu.tuning.study_runner.slot_allocation import Elastic
    from yunlu.tuning.study_runner.slots import Slots
    from yunlu.tuning.study_runner.trial_events import RungScore
    from yunlu.tuning.facts import StudyState, StudyView
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_dir import StudyStatus
    from yunlu.tuning.values import Method

_BEAT_S = 0.03
_ALIVE_S = 1.0
"""How often it is asked whether the workers are still there."""
_SHOW_S = 0.2
_LEAVE_S = 120.0
"""How long held trials may take to save when the study ends."""
_REPEATS = 100
"""Settings in a row that were all tried before: nothing is left to find."""


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
    places: Slots,
    on_change: Callable[[StudyView], None] | None = None,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
    elastic: Elastic = "auto",
) -> StudyOutcome:
    """Conduct a study until its end; refuses where somebody else does.

    Args:
        records: The study.
        method: How it searches.
        places: Where its trials run.
        on_change: Shown the study a few times a second while things happen.
        is_asked_to_stop: Looked at in every beat: trials are held, and the study can go on later.
        elastic: Whether trials may get more devices, and give them up again, while they run; ``auto``
            where they are long enough.
    """
    with records.dir.conducting():
        conductor = StudyRunner(records, method, places, elastic=elastic, on_change=on_change)
        return conductor.run(is_asked_to_stop)


class StudyRunner:
    """One life of the conductor of a study."""

    def __init__(
        self,
        records: Records,
        method: Method,
        places: Slots,
        *,
        elastic: Elastic = "auto",
        on_change: Callable[[StudyView], None] | None = None,
    ) -> None:
        self._records, self._places = records, places
        self._on_change = on_change
        self._live: dict[int, WatchedTrial] = {}
        self._hosting = SlotAllocation(records, method, places, elastic=elastic)
        self._starter = TrialStarter(records, places)
        self._rests = TrialCompletion(records, self._hosting, places, self._starter, self._live)
        self._has_news = True
        """Whether anything happened since the method last had nothing to do."""
        self._shown_at = 0.0
        self._repeats = 0
        self._end: tuple[StudyState, str] | None = None
        self._is_exhausted = ""
        """Why nothing more begins."""
        self._status: StudyStatus = records.dir.read_status()
        self._limits = StudyLimits(records, self._hosting, self._live, clock_at=self._find_clock())
        self._decider = MethodDecisions(records, method, self._hosting, self._limits)

    # The whole.

    def run(self, is_asked_to_stop: Callable[[], bool]) -> StudyOutcome:
        """Beat until the study is over."""
        clock_at = self._find_clock()
        began_at = self._status.began_at or clock_at
        rested_s = self._status.after_rest(time.time())
        about = {"began_at": began_at, "clock_at": clock_at, "rested_s": rested_s}
        self._note("running", "", ended_at=None, **about)
        try:
            self._adopt()
            while self._end is None:
                self._beat(is_asked_to_stop)
            state, reason = self._end
            self._wind_up(reason)
        except BaseException as error:
            words = error.message if isinstance(error, StudyError) else f"{error!r}"
            if isinstance(error, StudyError):
                self._give_up()
            is_own = isinstance(error, (StudyError, Exception))
            self._note("failed" if is_own else "stopped", words, ended_at=time.time())
            raise
        self._note(state, reason, ended_at=time.time())
        self._show(always=True)
        return StudyOutcome(state=state, reason=reason, view=self._records.view())

    def _find_clock(self) -> float:
        """Since when the deadline counts: one who was killed goes on, one who had ended begins anew."""
        status = self._status
        is_cut_off = status.clock_at is not None and status.ended_at is None
        return status.clock_at or time.time() if is_cut_off else time.time()

    def _note(self, state: StudyState, reason: str, **updates: Any) -> None:
        about = {"state": state, "reason": reason, "devices": self._places.devices, **updates}
        self._status = self._status.model_copy(update=about)
        self._records.dir.write_status(self._status)

    def _beat(self, is_asked_to_stop: Callable[[], bool]) -> None:
        for live in [*self._live.values()]:
            self._hear(live)
        self._end = self._limits.find_end(is_asked_to_stop)
        if self._end is None:
            self._start_more()
        if self._end is None and not self._live and not self._hosting.queue:
            self._end = ("finished", self._is_exhausted or "nothing more is worth trying")
        if self._end is None:
            self._hosting.share([*self._live.values()])
            for number, run in self._hosting.start_queued([*self._live.values()]):
                self._watch(number, run)
            self._show()
            time.sleep(_BEAT_S)

    def _show(self, *, always: bool = False) -> None:
        if self._on_change is None or (not always and time.time() - self._shown_at < _SHOW_S):
            return
        self._shown_at = time.time()
        self._on_change(self._records.view())

    # Loading: what the runs tell.

    def _adopt(self) -> None:
        """Take over what an earlier conductor left: running, held, or recorded and never begun."""
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
                    self._hosting.enqueue(trial.number, self._starter.make_run(trial.number))
                continue
            is_cut_off = trial.state is TrialState.HELD and trial.rung < trial.until
            if trial.state is TrialState.HELD and not (is_cut_off or has_finished(run)):
                continue
            live = self._watch(trial.number, run)
            before = trial.rung
            if trial.state is TrialState.HELD:
                self._records.change_trial(trial.number, state=TrialState.RUNNING)
            live.ruled = next((k for k in ("prune", "hold") if k in read_verdict(run)), "")
            if is_cut_off:
                live.ruled = ""
            self._hear(live)
            now = self._records.trial(trial.number)
            if trial.number in self._live and 0 < now.rung == before < self._total(live):
                self._judge(live)  # it may have been killed before it had said so

    def _watch(self, number: int, run: RunStore) -> WatchedTrial:
        live = self._live.get(number)
        if live is None:
            record = new_record(run)
            assert record is not None
            devices = self._records.facts()[number].devices or 1
            story = TrialEvents(devices=devices)
            live = self._live[number] = WatchedTrial(number=number, run=run, record=record, story=story)
        live.ruled = ""
        return live

    def _hear(self, live: WatchedTrial) -> None:
        """Take in what a run has told since; a look at the size of a file where that is nothing."""
        now = time.monotonic()
        if now - live.looked_at > _ALIVE_S:
            live.looked_at = now
            live.record = detect_lost(live.run, live.record)
        size = log_end(live.run, Log.EVENTS)
        if not size:
            self._rests.forget(live)
            self._records.end(live.number, TrialState.FAILED, error="its run was removed")
            return
        if size <= live.story.offset:
            return
        for event, offset in live.run.read_events(offset=live.story.offset):
            found = live.story.take(event)
            live.story.offset = offset
            if found is not None:
                self._take_evaluation(live, found)
        self._check_plan(live)
        if not live.story.state.is_active:
            self._has_news = True
            self._rests.take(live, is_ending=self._end is not None)

    def _check_plan(self, live: WatchedTrial) -> None:
        check_metrics_reported(self._records.asked, live.story)
        if live.story.rungs > self._records.asked.rungs:
            self._records.change(rungs=live.story.rungs)

    def _total(self, live: WatchedTrial) -> int:
        return live.story.rungs or self._records.asked.rungs

    def _take_evaluation(self, live: WatchedTrial, found: RungScore) -> None:
        trial = self._records.trial(live.number)
        if found.rung <= trial.rung or trial.state.is_over:
            return  # made again after a crash: the same
        spent_s = found.device_seconds
        dollars = self._hosting.dollars(spent_s)
        values = find_values(self._records.asked, live.story, found, dollars=dollars)
        self._records.add_point(
            live.number,
            Point(found.rung, values, spent_s),
            at=found.at,
            device_seconds=spent_s,
            dollars=dollars,
            devices=live.story.devices,
        )
        self._has_news, live.lost = True, 0
        if found.rung < self._total(live) and not live.ruled and self._end is None:
            self._judge(live)

    # Deciding.

    def _judge(self, live: WatchedTrial) -> None:
        judged = self._decider.judge(live.number)
        if judged.verdict is not Verdict.GO_ON:
            self._rule(live, judged)
        elif judged.until > self._records.trial(live.number).until:
            self._records.change_trial(live.number, until=judged.until)
            write_verdict(live.run, {"until": judged.until})

    def _rule(self, live: WatchedTrial, judged: Judgement) -> None:
        kind = live.ruled = "prune" if judged.verdict is Verdict.PRUNE else "hold"
        self._places.let_go(live.run, for_good=kind == "prune")
        write_verdict(live.run, {kind: judged.reason})
        if self._hosting.is_deaf:  # workers that do not wait for each other know no gate
            self._places.stop(live.run, now=kind == "prune")

    def _start_more(self) -> None:
        """Ask the method what to do with the places that are free, until it has nothing more."""
        while self._has_news and self._end is None:
            if len(self._live) + len(self._hosting.queue) >= self._hosting.workers:
                return
            if not self._limits.pays_for_start():
                if not self._live and not self._hosting.queue:
                    self._end = ("finished", "what is left of the budget does not pay for a start")
                return
            move = self._decider.choose()
            match move:
                case StartTrial():
                    if not self._begin(move):
                        self._has_news = False
                case Continue(number=number, until=until):
                    self._go_on(number, until)
                case WaitForResults():
                    self._has_news = False
                case EndStudy(reason=reason):
                    self._is_exhausted, self._has_news = reason, False

    def _begin(self, move: StartTrial) -> bool:
        """Begin a trial; false where no more may."""
        asked = self._records.asked
        if asked.trials is not None and len(self._records.facts()) >= asked.trials:
            self._is_exhausted = f"{asked.trials} trials were asked for"
            return False
        if self._starter.repeats(move):
            self._repeats += 1
            if self._repeats >= _REPEATS:
                self._is_exhausted = "every setting it finds was tried before"
            return self._repeats < _REPEATS
        self._repeats = 0
        number = self._starter.begin(move)
        self._hosting.enqueue(number, self._starter.make_run(number))
        return True

    def _go_on(self, number: int, until: int) -> None:
        trial = self._records.trial(number)
        if trial.state.is_over or until <= trial.rung:
            raise StudyError(
                f"trial {number} is {trial.state} at rung {trial.rung}: it cannot go on to {until}"
            )
        if trial.state is TrialState.HELD:
            run = find_run(self._records.facts()[number].run or "")
            if run is None:
                self._records.end(number, TrialState.FAILED, error="its run was removed")
                return
            self._records.change_trial(number, state=TrialState.RUNNING, until=until, reason="")
            self._hosting.enqueue(number, run)
        elif until > trial.until:
            self._records.change_trial(number, until=until)
            live = self._live.get(number)
            if live is not None and not live.ruled:
                write_verdict(live.run, {"until": until})

    # The end.

    def _wind_up(self, reason: str) -> None:
        """Hold what runs, and wait until it has saved."""
        for number in self._hosting.clear():
            self._records.change_trial(number, state=TrialState.HELD, reason="not begun")
        for live in self._live.values():
            if live.ruled:
                continue
            self._rule(live, Judgement(Verdict.HOLD, reason=reason))
            if live.story.state in {RunState.PENDING, RunState.PLANNING}:
                self._places.stop(live.run)
        deadline = time.monotonic() + _LEAVE_S
        while self._live:
            for live in [*self._live.values()]:
                self._hear(live)
            if self._live and time.monotonic() > deadline:
                self._give_up()
            time.sleep(_BEAT_S)
        for facts in self._records.facts():
            run = find_run(facts.run) if facts.run else None
            if facts.state is TrialState.HELD and run is not None:
                write_verdict(run, {})  # whoever resumes the run by hand trains it to its end

    def _give_up(self) -> None:
        """End what still runs, at once."""
        for live in [*self._live.values()]:
            self._places.stop(live.run, now=True)
            self._rests.forget(live)
            self._records.change_trial(live.number, state=TrialState.HELD, reason="ended at once")
