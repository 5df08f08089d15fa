"""Studies of toy trials: real processes, run directories and storage; only the training is made up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest

from tests.integration import toy_study
from tests.integration.toy_study import EPOCHS, ToySlots, toy_job
from tests.integration.toy_trial import STEPS_PER_RUNG, loss_of
from yunlu.executors.worker_process import recorded_worker
from yunlu.runs.events import AttemptStarted
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, RunStore
from yunlu.tuning.facts import StudyView
from yunlu.tuning.records import read_view
from yunlu.tuning.study import Study
from yunlu.tuning.study_dir import StudyDir, StudyError
from yunlu.tuning.study_runner.runner import run_to_end
from yunlu.tuning.values import (
    Action,
    Continue,
    EndStudy,
    Judgement,
    StartTrial,
    StudySnapshot,
    TrialState,
    Verdict,
    WaitForResults,
)

ROOT = Path(__file__).parents[2]
KILLS = 4


@pytest.fixture(autouse=True)
def nobody_left_behind(own_home: Path) -> Iterator[None]:
    yield
    for process in psutil.process_iter(["cmdline"]):
        if any(str(own_home) in word for word in process.info["cmdline"] or ()):
            process.kill()


def optimize(study: Study, **options: Any) -> StudyView:
    study.optimize(slots=options.pop("slots", ToySlots()), elastic=False, **options)
    return study.view()


def steps_of(run: RunStore) -> list[int]:
    return [record["step"] for record, _ in run.read_metrics()]


def runs_of(home: Path, study: str) -> dict[int, list[RunStore]]:
    """Every run of a trial there is, by the trial's number."""
    found: dict[int, list[RunStore]] = {}
    for path in home.glob(f"{study}-*/trial.json"):
        found.setdefault(json.loads(path.read_text())["number"], []).append(open_run(path.parent))
    return found


def wait_for_change(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Until the file is another one, or the process is gone."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    while process.poll() is None and (path.stat().st_mtime_ns if path.exists() else 0) == before:
        time.sleep(0.01)


class Rungs:
    """Three trials, each held at every rung: the next one goes on in turn."""

    def choose(self, snapshot: StudySnapshot) -> Action:
        if len(snapshot.trials) < 3:
            return StartTrial({"train.optimizer.lr": 10.0 ** -(len(snapshot.trials) + 1)}, until=1)
        held = [trial for trial in snapshot.trials if trial.state is TrialState.HELD]
        if held:
            trial = min(held, key=lambda trial: (trial.rung, trial.number))
            return Continue(trial.number, trial.rung + 1)
        return (
            WaitForResults()
            if any(not t.state.is_over for t in snapshot.trials)
            else EndStudy("all are done")
        )

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        del number, snapshot
        return Judgement(Verdict.HOLD, reason="in turn")


class Eager:
    """One trial that is let on from rung to rung; it never leaves its place."""

    def choose(self, snapshot: StudySnapshot) -> Action:
        if snapshot.trials:
            return EndStudy("one is enough")
        return StartTrial({"train.optimizer.lr": 0.01}, until=1)

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        return Judgement(Verdict.GO_ON, until=snapshot.trials[number].rung + 1)


class Ruthless:
    """Every second trial is given up at its first evaluation."""

    def choose(self, snapshot: StudySnapshot) -> Action:
        number = len(snapshot.trials)
        return (
            StartTrial({"train.optimizer.lr": 0.1 / (number + 1)}, until=1)
            if number < 3
            else WaitForResults()
        )

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        if number % 2 == 0:
            return Judgement(Verdict.PRUNE, reason="an even number")
        return Judgement(Verdict.GO_ON, until=snapshot.rungs)


class Repeating:
    """The same two settings again and again."""

    def choose(self, snapshot: StudySnapshot) -> Action:
        return StartTrial(
            {"train.optimizer.lr": (0.1, 0.01)[len(snapshot.trials) % 2]}, until=snapshot.rungs
        )

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        return Judgement(Verdict.GO_ON, until=snapshot.trials[number].until)


def test_a_study_records_every_trial_and_optuna_reads_it(own_home: Path) -> None:
    view = optimize(Study(toy_job(trials=3), name="first"))
    assert (view.state, len(view.trials)) == ("finished", 3)
    for facts in view.trials:
        lr = facts.params["train.optimizer.lr"]
        expected = [(rung, (loss_of(lr, rung),)) for rung in range(1, EPOCHS + 1)]
        assert facts.curve == expected
        assert facts.state is TrialState.DONE
        run = open_run(own_home / str(facts.run))
        assert json.loads((run.path / Document.JOB).read_text())["train"]["optimizer"]["lr"] == lr
        assert facts.device_seconds > 0
    assert view.best is not None
    known = optuna.load_study(study_name="first", storage=view.storage)
    assert known.best_trial.number == view.best.number
    assert known.best_value == view.best.value
    assert known.best_trial.user_attrs["run"] == view.best.run
    assert known.best_trial.intermediate_values[1] == view.best.curve[0][1][0]


def test_a_metric_to_maximise_keeps_its_sign() -> None:
    view = optimize(Study(toy_job(trials=2), maximize="accuracy", name="up"))
    assert view.directions == ("maximize",)
    best = max(view.trials, key=lambda facts: facts.value or 0)
    assert view.best is not None
    assert view.best.number == best.number
    assert (view.best.value or 0) > 0
    assert best.points[-1].value == -best.curve[-1][1][0]


@pytest.mark.slow
def test_a_held_trial_goes_on_from_its_checkpoint_and_repeats_no_step(own_home: Path) -> None:
    study = Study(toy_job(), name="rungs")
    run_to_end(study.records, method=Rungs(), slots=ToySlots(), elastic=False)
    assert [facts.state for facts in study.trials] == [TrialState.DONE] * 3
    for facts in study.trials:
        run = open_run(own_home / str(facts.run))
        assert steps_of(run) == [*range(1, EPOCHS * STEPS_PER_RUNG + 1)]
        assert [point.rung for point in facts.points] == [*range(1, EPOCHS + 1)]
        watched_trials = [
            event for event, _ in run.read_events() if isinstance(event, AttemptStarted)
        ]
        assert 1 <= len(watched_trials) <= EPOCHS


def test_a_trial_that_is_let_on_never_leaves_its_place(own_home: Path) -> None:
    study = Study(toy_job(), name="eager")
    run_to_end(study.records, method=Eager(), slots=ToySlots(), elastic=False)
    run = open_run(own_home / str(study.trials[0].run))
    assert sum(isinstance(event, AttemptStarted) for event, _ in run.read_events()) == 1


def test_pruned_trials_end_at_once_and_lose_their_checkpoints(own_home: Path) -> None:
    study = Study(toy_job(trials=3), name="pruned")
    run_to_end(study.records, method=Ruthless(), slots=ToySlots(), elastic=False)
    states = [facts.state for facts in study.trials]
    assert states == [TrialState.PRUNED, TrialState.DONE, TrialState.PRUNED]
    for facts in study.trials[::2]:
        run = open_run(own_home / str(facts.run))
        assert facts.reason == "pruned at rung 1: an even number"
        last = [event for event, _ in run.read_events()][-1]
        assert (last.state, last.reason) == ("stopped", facts.reason)
        assert steps_of(run) == [*range(1, STEPS_PER_RUNG + 1)]
        assert not (run.path / Area.CHECKPOINTS).exists()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [pytest.param("none", marks=pytest.mark.long), "asha"])
def test_a_study_runner_killed_repeatedly_loses_no_trial_and_runs_none_twice(
    own_home: Path, stop: str
) -> None:
    draw, trials = random.Random(int(os.environ.get("YUNLU_SEED", "4"))), 5
    whole = optimize(Study(toy_job(trials=trials, stop=stop, args={"step_s": 0.02}), name="whole"))
    status = StudyDir(own_home / "studies" / "killed").status
    code = None
    for kill in range(KILLS + 1):
        runner = subprocess.Popen(
            [sys.executable, toy_study.__file__, "killed", str(trials), stop],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        try:
            if kill < KILLS:
                wait_for_change(status, runner)
                time.sleep(draw.uniform(0, 1.5))  # a moment to die at, whatever happens then
                runner.send_signal(signal.SIGKILL)
            code = runner.wait()
        finally:
            runner.kill()
            runner.wait()
    assert code == 0
    view = read_view("killed")
    assert view.state == "finished"
    assert [facts.params for facts in view.trials] == [facts.params for facts in whole.trials]
    runs = runs_of(own_home, "killed")
    assert sorted(runs) == [*range(trials)]
    for facts in view.trials:
        (run,) = runs[facts.number]
        assert run.id == facts.run
        steps = steps_of(run)
        assert steps == sorted(set(steps)), "a step was made twice"
        assert [point.rung for point in facts.points] == [*range(1, len(facts.points) + 1)]
    assert len([*own_home.glob("killed-*/job.json")]) == trials
    if stop == "none":
        assert [f.curve for f in view.trials] == [f.curve for f in whole.trials]


def test_a_second_study_runner_is_refused() -> None:
    study = Study(toy_job(trials=1), name="mine")
    with study.records.dir.locked_by_runner(), pytest.raises(StudyError, match="another process"):
        optimize(study)


@pytest.mark.slow
def test_the_same_command_goes_on_and_another_job_is_refused() -> None:
    first = optimize(Study(toy_job(trials=2), name="more"))
    again = optimize(Study(toy_job(trials=4), name="more"))
    assert [f.run for f in again.trials[:2]] == [f.run for f in first.trials]
    assert len(again.trials) == 4
    with pytest.raises(StudyError, match="of another job"):
        Study(toy_job(trials=4, seed=3), name="more")
    assert len(Study(name="more").trials) == 4


def test_a_study_asked_to_stop_holds_its_trials_and_goes_on_later(own_home: Path) -> None:
    study = Study(toy_job(trials=3, args={"step_s": 0.05}), name="paused")
    seen = threading.Event()

    def watch(view: StudyView) -> None:
        if any(facts.points for facts in view.trials):
            seen.set()
            StudyDir(view.path).request_stop()

    view = optimize(study, on_change=watch)
    assert (view.state, view.reason) == ("stopped", "asked to stop")
    assert seen.is_set()
    held = [facts for facts in view.trials if facts.state is TrialState.HELD]
    assert held
    view = optimize(Study(name="paused"))
    assert [facts.state for facts in view.trials] == [TrialState.DONE] * 3
    for facts in view.trials:
        steps = steps_of(open_run(own_home / str(facts.run)))
        assert steps == [*range(1, EPOCHS * STEPS_PER_RUNG + 1)]


@pytest.mark.slow
def test_time_and_money_end_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StudyError, match="no price is known") as refused:
        Study(toy_job(budget=1.0), name="poor")
    assert "YUNLU_DOLLARS_PER_HOUR" in str(refused.value.hint)
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", "3600")
    view = optimize(Study(toy_job(budget=2.0, args={"step_s": 0.05}), name="rich"))
    assert (view.state, view.reason) == ("finished", "the budget is spent")
    assert view.spent_dollars is not None
    assert view.spent_dollars == pytest.approx(view.spent_s / 2)  # two devices share the price
    assert view.spent_dollars >= 2.0
    view = optimize(Study(toy_job(deadline="2s", args={"step_s": 0.05}), name="late"))
    assert (view.state, view.reason) == ("finished", "the deadline has passed")
    assert not [facts for facts in view.trials if facts.state is TrialState.RUNNING]


@pytest.mark.slow
def test_a_held_trial_that_was_finished_by_hand_is_taken_in(own_home: Path) -> None:
    study = Study(toy_job(trials=3, stop="asha"), name="helped")
    held = [facts for facts in optimize(study).trials if facts.state is TrialState.HELD]
    run = open_run(own_home / (held[0].run or ""))
    ToySlots().start(run, 1)  # as ``yunlu resume`` does
    while (worker := recorded_worker(run)) is not None and worker.is_alive():
        time.sleep(0.02)
    study.optimize(slots=ToySlots(), elastic=False, trials=4)
    facts = study.trials[held[0].number]
    assert facts.state is TrialState.DONE
    assert [rung for rung, _ in facts.curve] == [1, 2, 3, 4]
    assert steps_of(run) == [*range(1, EPOCHS * STEPS_PER_RUNG + 1)]


@pytest.mark.slow
def test_three_failures_alike_end_a_study_and_one_does_not() -> None:
    with pytest.raises(StudyError, match="the first 3 trials failed alike: a rate of") as failed:
        optimize(Study(toy_job(args={"fails": True}, trials=50), name="bad"))
    assert failed.value.hint == "take another"
    view = read_view("bad")
    assert view.state == "failed"
    assert 3 <= view.count(TrialState.FAILED) <= 4
    space = {"train.optimizer.lr": [0.1, 0.01], "model.args.fails": [True, False]}
    study = Study(toy_job(space=space, method="grid", args={"fails": False}), name="half")
    view = optimize(study)
    assert view.state == "finished"
    assert [f.state for f in view.trials].count(TrialState.FAILED) == 2
    assert [f.state for f in view.trials].count(TrialState.DONE) == 2
    errors = [f.error or "" for f in view.trials if f.state is TrialState.FAILED]
    assert all("not to my liking" in error for error in errors)


@pytest.mark.slow
def test_an_objective_that_is_never_reported_is_told_early() -> None:
    with pytest.raises(StudyError, match="f1 is never reported") as refused:
        optimize(Study(toy_job(trials=9), maximize="f1", name="unknown"))
    assert "accuracy" in str(refused.value.hint)
    assert len(read_view("unknown").trials) <= 2
    with pytest.raises(StudyError, match="no evaluations on validation data"):
        optimize(Study(toy_job(trials=9, args={"silent": True}), name="silent"))
    job = toy_job(trials=1)
    train = job.train.model_copy(update={"evaluate": "never"})
    with pytest.raises(StudyError, match=r"train\.evaluate is never"):
        Study(job.model_copy(update={"train": train}), name="never")


@pytest.mark.slow
def test_copies_of_a_population_begin_where_their_models_were(own_home: Path) -> None:
    stop = {"name": "pbt", "population": 4, "share": 0.5}
    view = optimize(Study(toy_job(stop=stop), name="pbt"))
    assert view.state == "finished"
    copies = [facts for facts in view.trials if facts.trial.copied_from]
    assert copies
    for facts in copies:
        assert facts.trial.copied_from is not None
        _, rung = facts.trial.copied_from
        steps = steps_of(open_run(own_home / str(facts.run)))
        assert min(steps) == rung * STEPS_PER_RUNG + 1
        assert [point.rung for point in facts.points][:1] == [rung + 1]
    assert any(facts.state is TrialState.DONE for facts in copies)


def test_a_setting_is_trained_once(own_home: Path) -> None:
    study = Study(toy_job(trials=4), name="twins")
    run_to_end(study.records, method=Repeating(), slots=ToySlots(1), elastic=False)
    view = study.view()
    assert [f.state for f in view.trials] == [TrialState.DONE] * 4
    assert [f.curve for f in view.trials[2:]] == [f.curve for f in view.trials[:2]]
    assert len(runs_of(own_home, "twins")) == len({json.dumps(dict(f.params)) for f in view.trials})
    for facts in view.trials:
        twins = [f for f in view.trials if f.params == facts.params and f.run is not None]
        assert len(twins) == 1
        if facts.run is None:
            assert facts.reason == f"the same setting as trial {twins[0].number}"


def test_ask_and_tell_and_ones_own_function() -> None:
    study = Study(toy_job(trials=12, parallel=3), minimize="loss", name="own")
    request = study.ask()
    assert request is not None
    assert request.job is not None
    assert request.job.train.optimizer.lr == request["train.optimizer.lr"]
    study.tell(request, 5.0)
    threads = set[int]()

    def trial(request: Any) -> float:
        threads.add(threading.get_ident())
        if request.number == 4:
            raise ValueError("not this one")
        return loss_of(request["train.optimizer.lr"], 1)

    study.optimize(trial)
    study.close()
    assert [facts.state for facts in study.trials].count(TrialState.DONE) == 11
    assert study.trials[4].error == "ValueError: not this one"
    assert study.best is not None
    assert study.best.value == min(f.value for f in study.trials if f.value is not None)
    with pytest.raises(StudyError, match="no trial 4 that waits"):
        study.tell(4, 1.0)
    again = Study(name="own")
    assert [facts.trial for facts in again.trials] == [facts.trial for facts in study.trials]
    with pytest.raises(StudyError, match="the first 3 trials failed alike"):
        Study(toy_job(), name="hopeless").optimize(lambda _: 1 / 0)


def test_two_objectives_keep_their_curves_and_their_front() -> None:
    job = toy_job(trials=4)
    assert job.search is not None
    search = {
        "space": {"train.optimizer.lr": "1e-4 .. 1e-1 log"},
        "objectives": ["loss", "seconds"],
    }
    view = optimize(Study(job, search=search, trials=4, method="random", name="two"))
    assert view.metrics == ("loss", "seconds")
    assert all(len(facts.points) == EPOCHS for facts in view.trials)
    assert view.front
    assert all(len(values) == 2 for facts in view.trials for _, values in facts.curve)
    known = optuna.load_study(study_name="two", storage=view.storage)
    assert {trial.number for trial in known.best_trials} == {f.number for f in view.front}
