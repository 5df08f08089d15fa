"""The public API of a study: ask, tell, optimize, best."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from yunlu.core.html_table import html_table
from yunlu.core.units import show_number
from yunlu.jobs.job_input import build_job
from yunlu.tuning.facts import find_best, rank_trials
from yunlu.tuning.records import open_study, turn_values
from yunlu.tuning.setup import (
    create_study,
    find_limits,
    make_method_of,
    open_or_create,
    with_search,
)
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.study_runner.runner import check_failures, run_to_end
from yunlu.tuning.study_runner.trial_runs import make_job
from yunlu.tuning.values import EndStudy, Point, StartTrial, StudySnapshot, TrialState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from yunlu.spec.job import Job
    from yunlu.tuning.facts import StudyState, StudyView, TrialFacts
    from yunlu.tuning.forecast import StudyForecast
    from yunlu.tuning.records import Records
    from yunlu.tuning.study_runner.slots import Elastic, Slots
    from yunlu.tuning.values import Action, Method, Params


def check_function(function: Any, dollars: float | None) -> None:
    """Refuse what cannot be called, and budgets that cannot be tracked."""
    if not callable(function):
        raise StudyError(
            f"optimize calls a function for each trial, and {function!r} is none",
            hint="trials=N says how many there are; without a function they are runs of the job",
        )
    if dollars is not None:
        raise StudyError(
            "a budget applies to runs: the cost of your own function is unknown",
            hint="limit it by trials or deadline",
        )


def read_numbers(value: Any) -> list[float]:
    """One number or several, be they Python's, an array's or a tensor's."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        has_parts = hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0
        return [float(item) for item in value] if has_parts else [float(value)]
    except (TypeError, ValueError):
        raise StudyError(
            f"a trial was told to have the value {value!r}, which is not a number",
            hint="tell a number, or a list of them where there are several objectives",
        ) from None


def describe_error(error: Exception) -> str:
    """Why a trial failed, in one line."""
    return error.message if isinstance(error, StudyError) else f"{type(error).__name__}: {error}"


_TOLD = ("done", "pruned", "failed")
_SHOWN_TRIALS = 10


@dataclass(frozen=True, slots=True)
class AskedTrial:
    """A trial for your own program to run; then ``tell`` its value."""

    number: int
    params: Params
    job: Job | None
    """The study's job with the setting applied."""

    def __getitem__(self, field: str) -> Any:
        """The value of one field."""
        return self.params[field]


class Study:
    """A search for good settings of a job.

    Ask, tell and optimize may be called from several threads of one process; a study has one process
    at a time. A study is stored by its name: another program, or this one after a crash, continues it.
    """

    def __init__(
        self,
        job: str | Path | Job | None = None,
        *,
        minimize: str | None = None,
        maximize: str | None = None,
        name: str | None = None,
        search: Any = None,
        **options: Any,
    ) -> None:
        """Open the study of that name, or create one.

        Args:
            job: A job file or a ``Job``; without it, the study ``name`` must exist.
            minimize: The metric to make small, such as ``val_loss``.
            maximize: Or the one to make large.
            name: Of the study; the job's when not given.
            search: Instead of the job's ``search``: the same mapping, or its ``space`` alone.
            options: Other keys of ``search``: ``trials``, ``budget``, ``deadline``, ``parallel``,
                ``method``, ``stop``, ``seed``, ...
        """
        self._lock = threading.RLock()
        self._held = ExitStack()
        self._is_held = False
        self._abandoned: list[int] = []
        """Trials that an earlier process asked for and never reported."""
        self._method: Method | None = None
        if job is None:
            if name is None:
                raise StudyError("a study needs a job, or the name of one that was begun")
            self._records = open_study(name)
            return
        if minimize and maximize:
            raise StudyError("say minimize or maximize, not both", hint="several: objectives=[...]")
        if metric := minimize or maximize:
            direction = "minimize" if minimize else "maximize"
            options = {"metric": metric, "direction": direction} | options
        source = str(job) if isinstance(job, str | Path) else None
        request = with_search(build_job(job, (), {}), search, options)
        if request.search is None:
            create_study(request)  # says what is missing
        self._records = open_or_create(request, name=name, source=source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Its name."""
        return self._records.request.name

    @property
    def records(self) -> Records:
        """Its trials, for the runner."""
        return self._records

    @property
    def best(self) -> TrialFacts | None:
        """The best trial so far."""
        return find_best(self._records.facts())

    @property
    def trials(self) -> list[TrialFacts]:
        """All trials by number."""
        return self._records.facts()

    def view(self) -> StudyView:
        """Current view of the study."""
        return self._records.view()

    def _repr_html_(self) -> str:
        """Its best trials, for a notebook."""
        view = self.view()
        ranked = rank_trials(view.trials, best=view.best)
        names = [dimension.name for dimension in view.dimensions]
        rows = [
            (
                f"{facts.number}{' ★' if view.best is not None and facts.number == view.best.number else ''}",
                str(facts.state),
                "–" if facts.value is None else show_number(facts.value),
                *(str(facts.params.get(name, "–")) for name in names),
            )
            for facts in ranked[:_SHOWN_TRIALS]
        ]
        left_out = len(ranked) - len(rows)
        return html_table(
            rows,
            head=("trial", "state", view.metric, *names),
            title=f"{view.name}: {view.state}, {len(ranked)} trials",
            note=f"{left_out} more trials" if left_out else "",
        )

    def forecast(self, *, slots: Slots | None = None) -> StudyForecast:
        """What it will take, told once, before it begins: trials, time, cost; of runs of the job."""
        from yunlu.tuning.forecast import StudyForecast, predict_study  # noqa: PLC0415 - slow
        from yunlu.tuning.study_runner.slots import find_slots  # noqa: PLC0415 - looks for a pool

        request = self._records.request
        if request.forecast is not None:
            return StudyForecast.model_validate(request.forecast)
        slots = slots or find_slots(devices=request.devices)
        study = predict_study(request, devices=slots.devices)
        self._records.change(forecast=study.model_dump(mode="json"))
        return study

    def close(self) -> None:
        """Release the study, so that another process can run it."""
        with self._lock:
            if self._is_held and self._records.dir.read_status().state == "running":
                self._note("stopped", ended_at=time.time())
            self._held.close()
            self._is_held = False

    # Your own program.

    def ask(self, *, again: bool = True) -> AskedTrial | None:
        """A setting to try; None where nothing is worth trying, or not before other results.

        Trials that a process asked for and never told of, being killed, come first; with ``again``
        false they do not: somebody still trains them, and will tell of them by number.
        """
        with self._lock:
            self._hold()
            while again and self._abandoned:
                number = self._abandoned.pop(0)
                if not self._records.trial(number).state.is_over:
                    return self._lend(number)
            move = self._choose()
            if isinstance(move, StartTrial):
                return self._lend(self._records.begin(move.params, until=1))
            if isinstance(move, EndStudy):
                self._end(move.reason)
            return None

    def _end(self, reason: str) -> None:
        if all(facts.state.is_over for facts in self._records.facts()):
            self._note("finished", reason, ended_at=time.time())

    def _note(self, state: StudyState, reason: str = "", **updates: Any) -> None:
        status = self._records.dir.read_status()
        about = {"state": state, "reason": reason, **updates}
        self._records.dir.write_status(status.model_copy(update=about))

    def _lend(self, number: int) -> AskedTrial:
        request, params = self._records.request, dict(self._records.trial(number).params)
        job = None if request.job is None else make_job(request, number, params)
        return AskedTrial(number, params, job)

    def tell(
        self,
        trial: int | AskedTrial,
        value: float | Sequence[float] | None = None,
        *,
        state: Literal["done", "pruned", "failed"] = "done",
        error: str | None = None,
    ) -> None:
        """Report the result of a trial: its value or values, with the metric's own sign."""
        number = trial.number if isinstance(trial, AskedTrial) else trial
        if state not in _TOLD:
            raise StudyError(
                f"a trial cannot be told to be {state!r}", hint=f"say {', '.join(_TOLD)}"
            )
        point = None if value is None else self._point(value)
        with self._lock:
            self._hold()
            known = self._records.facts()
            if not 0 <= number < len(known) or known[number].state.is_over:
                raise StudyError(f"{self.name} has no trial {number} that waits for its result")
            if point is not None:
                self._records.add_point(number, point, at=time.time())
            elif state == "done":
                raise StudyError(f"trial {number} is done, but has no value")
            about = {} if error is None else {"error": error}
            self._records.end(number, TrialState(state), **about)

    def optimize(
        self,
        function: Callable[[AskedTrial], float | Sequence[float]] | None = None,
        *,
        trials: int | None = None,
        budget: float | None = None,
        deadline: str | None = None,
        parallel: int | None = None,
        slots: Slots | None = None,
        elastic: Elastic = "auto",
        on_change: Callable[[StudyView], None] | None = None,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> Self:
        """Search until a limit is reached or nothing more is worth trying.

        Args:
            function: Your own trial: takes what ``ask`` gives, returns the value. Without it trials
                are runs of the job.
            trials: The most trials in all.
            budget: The most they may cost, in dollars; of runs of the job.
            deadline: The longest it may take, such as ``2h``.
            parallel: How many at once; your own function is then called from as many threads.
            slots: Where the runs execute; default: the pool if one is up, else this machine.
            elastic: Whether runs may grow onto devices freed by others.
            on_change: Receives the study while it runs.
            is_asked_to_stop: Polled; ends the search so that it can continue later.
        """
        if function is not None:
            check_function(function, budget or self._records.request.dollars)
        self._limit(trials=trials, budget=budget, deadline=deadline, parallel=parallel)
        if function is not None:
            self._call(function, is_asked_to_stop)
            return self
        from yunlu.tuning.study_runner.slots import find_slots  # noqa: PLC0415 - looks for a pool

        self.close()
        run_to_end(
            self._records,
            method=self._open_method(),
            slots=slots or find_slots(devices=self._records.request.devices),
            on_change=on_change,
            is_asked_to_stop=is_asked_to_stop,
            elastic=elastic,
        )
        return self

    def _limit(self, **overrides: Any) -> None:
        job = self._records.request.job
        if job is None or all(value is None for value in overrides.values()):
            return
        search = with_search(job, None, overrides).search
        assert search is not None
        limits = find_limits(search)
        self._records.change(**{key: value for key, value in limits.items() if value is not None})

    def _call(
        self, function: Callable[[AskedTrial], Any], is_asked_to_stop: Callable[[], bool]
    ) -> None:
        limits = self._records.request
        parallel = limits.parallel or 1
        ends_at = math.inf if limits.deadline_s is None else time.monotonic() + limits.deadline_s
        with ThreadPoolExecutor(parallel) as pool:
            running = set[Any]()
            while not is_asked_to_stop() and time.monotonic() < ends_at:
                request = self.ask() if len(running) < parallel else None
                if request is not None:
                    running.add(pool.submit(self._carry_out, function, request))
                    continue
                if not running:
                    break
                _, running = wait(running, return_when=FIRST_COMPLETED)
                self._refuse_failures()
        if time.monotonic() >= ends_at:
            self._end("the deadline has passed")

    def _refuse_failures(self) -> None:
        facts = self._records.facts()
        failed = [fact for fact in facts if fact.state is TrialState.FAILED]
        if not failed:
            return
        try:
            check_failures(facts, failed[-1].error or "")
        except StudyError as error:
            self._note("failed", error.message, ended_at=time.time())
            raise

    def _carry_out(self, function: Callable[[AskedTrial], Any], request: AskedTrial) -> None:
        try:
            value = function(request)
            if value is None:
                raise StudyError("the function returned nothing, where a value was expected")
            self.tell(request, value)
        except Exception as error:  # noqa: BLE001 - the study continues without this trial
            self.tell(request, state="failed", error=describe_error(error))

    def _choose(self) -> Action:
        request, trials = self._records.request, self._records.trials()
        left = None if request.trials is None else max(request.trials - len(trials), 0)
        if left == 0:
            return EndStudy("all trials were started")
        snapshot = StudySnapshot(
            trials=trials,
            rungs=1,
            objectives=len(request.metrics),
            trials_left=left,
            workers=request.parallel or 1,
        )
        return self._open_method().choose(snapshot)

    def _open_method(self) -> Method:
        if self._method is None:
            self._method = make_method_of(self._records.request)
        return self._method

    def _hold(self) -> None:
        if not self._is_held:
            self._held.enter_context(self._records.dir.locked_by_runner())
            self._is_held = True
            self._records.refresh()
            known = self._records.facts()
            if self._records.request.rungs != 1 and not any(facts.run for facts in known):
                self._records.change(rungs=1)  # a reported value is that of a full trial
            status, now = self._records.dir.read_status(), time.time()
            began_at, idle_s = status.began_at or now, status.idle_until(now)
            self._note("running", began_at=began_at, idle_s=idle_s, ended_at=None)
            self._abandoned = [
                item.number for item in known if not item.state.is_over and item.run is None
            ]

    def _point(self, value: float | Sequence[float]) -> Point:
        directions = self._records.request.directions
        values = read_numbers(value)
        if len(values) != len(directions):
            text = "1 objective" if len(directions) == 1 else f"{len(directions)} objectives"
            were = "was" if len(values) == 1 else "were"
            raise StudyError(f"{self.name} has {text}, and {len(values)} {were} told")
        return Point(1, turn_values(values, directions), 0.0)


def tune(
    job: str | Path | Job | None = None,
    *,
    minimize: str | None = None,
    maximize: str | None = None,
    name: str | None = None,
    search: Mapping[str, Any] | None = None,
    function: Callable[[AskedTrial], float | Sequence[float]] | None = None,
    **options: Any,
) -> Study:
    """Search for good settings of a job, and return the study; arguments as of ``Study``."""
    study = Study(job, minimize=minimize, maximize=maximize, name=name, search=search, **options)
    if function is None and not study.trials:
        study.forecast()  # for its page
    return study.optimize(function)
