"""The arithmetic of ``benchmarks/faults.py`` and ``benchmarks/parallel.py``."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.faults_parts.figures import FAULTS, TARGETS, judge, make_tables
from benchmarks.faults_parts.history import (
    account,
    effective_share,
    longest_pause_s,
    next_of_size,
    next_step,
    step_times,
)
from benchmarks.faults_parts.journal import Journal, Pen, Step
from benchmarks.faults_parts.processes import Processes, is_alive
from benchmarks.faults_parts.trials import TRIALS, Outcome
from benchmarks.faults_parts.workload import Workload, make_text, read_blocks
from benchmarks.faults_parts.yunlu_contender import RunJournal, make_job
from benchmarks.parallel_parts import figures as parallel
from benchmarks.parallel_parts.rounds import cpu_seconds
from benchmarks.parallel_parts.workload import LAYOUTS, MICRO_BATCH
from hypothesis import given
from hypothesis import strategies as st

from tests.sample_events import sample
from tests.waiting import wait_until
from yunlu.runs.events import DataOpened, WorkerGroupFormed
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, Log
from yunlu.spec.job import Job
from yunlu.training.data.sample_order import StepOrder, digest_of

WORKLOAD = Workload(samples=32, batch=4, length=8)


def done(
    step: int, at: float, *, group: str = "a", size: int = 2, share: slice = slice(None)
) -> Step:
    samples = tuple(WORKLOAD.samples_of(step)[share])
    return Step(step=step, at=at, group=group, size=size, samples=samples)


def test_steps_of_the_group_that_was_hurt_are_no_recovery() -> None:
    steps = [done(0, 1.0), done(1, 2.01), done(2, 7.0, group="b", size=1), done(3, 9.0, group="c")]
    assert next_step(steps, after=2.0, group="a") == steps[2]
    assert next_of_size(steps, after=2.0, size=2, group="a") == steps[3]
    assert next_step(steps[:2], after=2.0, group="a") is None


def test_the_longest_pause_counts_the_wait_before_the_first_and_after_the_last_step() -> None:
    steps = [done(0, 1.0), done(1, 2.0), done(2, 2.5)]
    assert longest_pause_s(steps, after=0.5, until=2.5) == 1.0
    assert longest_pause_s(steps, after=2.0, until=6.0) == 3.5


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=8))
def test_a_group_that_goes_back_repeats_steps_but_loses_no_sample(
    attempts: list[tuple[int, int]],
) -> None:
    steps: list[Step] = []
    reached, again = 0, 0
    for attempt, (length, back) in enumerate(attempts):
        start = max(0, reached - back) if attempt else 0
        again += reached - start
        steps += [
            done(start + index, len(steps) + index, group=str(attempt)) for index in range(length)
        ]
        reached = start + length
    steps = [
        Step(step=each.step, at=float(at), group=each.group, size=2, samples=each.samples)
        for at, each in enumerate(steps)
    ]
    found = account(steps, WORKLOAD.samples_of)
    assert (found.redone_steps, found.lost, found.repeated) == (again, 0, 0)


def test_shares_add_up_and_a_missing_one_is_a_loss() -> None:
    halves = slice(0, None, 2), slice(1, None, 2)
    steps = [done(0, 1.0, share=halves[0]), done(0, 1.1, share=halves[1])]
    assert account(steps, WORKLOAD.samples_of).lost == 0
    alone = [*steps, done(1, 2.0, group="b", size=1, share=halves[0])]
    assert account(alone, WORKLOAD.samples_of).lost == 2
    # A step that nobody has done is lost whole, and one that came twice is seen twice.
    assert account([*steps, done(2, 3.0)], WORKLOAD.samples_of).lost == 4
    assert account([*steps, *steps], WORKLOAD.samples_of).repeated == 4


def test_effective_time_loses_what_passes_until_a_new_step() -> None:
    steps = [done(step, float(step)) for step in range(11)]  # one a second, until 10
    # Killed at 10; goes on from step 6 at 15, and has new ground at 19.
    steps += [done(6 + index, 15.0 + index, group="b") for index in range(16)]
    share = effective_share(steps, faults=[10.0], began_at=0.0, ended_at=30.0)
    assert share == pytest.approx(1 - (20.0 - 10.0 - 1.0) / 30.0)
    assert effective_share(steps, faults=[], began_at=0.0, ended_at=30.0) == 1.0
    # Struck again while it recovers: the same seconds are not lost twice.
    again = effective_share(steps, faults=[10.0, 12.0], began_at=0.0, ended_at=30.0)
    assert again == pytest.approx(share)


def test_step_times_are_taken_within_a_group() -> None:
    steps = [
        done(0, 0.0),
        done(1, 2.0),
        done(1, 2.5),
        done(2, 9.0, group="b"),
        done(3, 10.0, group="b"),
    ]
    assert sorted(step_times(steps)) == [1.0, 2.0]


def outcome(contender: str, number: int = 0, fault: str = "worker killed", **rest: Any) -> Outcome:
    exact = {"redone_steps": 0, "lost": 0, "repeated": 0}
    return Outcome(contender=contender, round=number, fault=fault, **exact | rest)


def test_ratios_are_taken_within_a_round_and_a_fault() -> None:
    outcomes = [
        outcome("torchrun", 0, next_step_s=10.0),
        outcome("torchrun", 1, next_step_s=40.0),
        outcome("torchft", 0, next_step_s=2.0, joined_s=8.0),
        outcome("yunlu", 0, next_step_s=1.0, joined_s=1.0),
        outcome("yunlu", 1, next_step_s=4.0, joined_s=4.0),
    ]
    found = {each["title"]: each for each in judge(outcomes)}
    assert found["worker killed → next step, over torchrun's"]["median"] == pytest.approx(0.1)
    assert found["worker killed → next step, over torchft's"]["median"] == pytest.approx(0.5)
    assert found["worker killed → next step, over torchft's"]["met"]
    assert not found["worker killed → next step, s"]["met"]  # a median of 2.5
    assert "worker hung → next step, s" not in found


def test_a_sample_amiss_in_one_trial_of_many_is_not_forgiven() -> None:
    outcomes = [outcome("yunlu", number, next_step_s=0.5) for number in range(9)]
    title = "samples lost or repeated, worst trial"
    verdict = next(each for each in judge(outcomes) if each["title"] == title)
    assert verdict["met"]
    outcomes.append(outcome("yunlu", 9, next_step_s=0.5, lost=1))
    verdict = next(each for each in judge(outcomes) if each["title"] == title)
    assert not verdict["met"]


def test_a_failed_trial_reaches_no_figure() -> None:
    outcomes = [outcome("yunlu", 0, next_step_s=0.5), outcome("yunlu", 1, failure="hung")]
    verdict = next(each for each in judge(outcomes) if each["title"].endswith("next step, s"))
    assert (verdict["failed"], verdict["trials"], verdict["met"]) == (1, 2, False)


def test_the_tables_show_medians_worst_cases_and_failures() -> None:
    outcomes = [outcome("torchrun", n, next_step_s=float(5 + n), redone_steps=n) for n in range(3)]
    outcomes.append(outcome("torchrun", 3, failure="no such step within 180 s"))
    table = make_tables(outcomes)
    assert "| torchrun, own store | 6.00 (worst 7.00) |" in table
    assert "| 1 of 4 |" in table
    assert "Figures to reach" not in table


def test_every_fault_can_be_tried_and_every_target_names_one() -> None:
    assert TRIALS.keys() == FAULTS.keys()
    assert {fault for target in TARGETS for fault in target.faults} == FAULTS.keys()


@given(st.integers(0, 200))
def test_every_sample_comes_once_per_epoch(epoch: int) -> None:
    per_epoch = WORKLOAD.samples // WORKLOAD.batch
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    seen = Counter(sample for step in steps for sample in WORKLOAD.samples_of(step))
    assert seen == Counter(range(WORKLOAD.samples))


def test_blocks_overlap_by_one(tmp_path: Path) -> None:
    make_text(tmp_path / "text.txt", WORKLOAD)
    blocks = read_blocks(tmp_path / "text.txt", WORKLOAD)
    assert blocks.shape == (32, 9)
    assert np.array_equal(blocks[1:, 0], blocks[:-1, -1])


def test_a_journal_reads_on_and_leaves_half_a_line_for_later(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.jsonl"
    journal = Journal([path, tmp_path / "journal-1.jsonl"])
    journal.refresh()
    pen = Pen(path)
    pen.start(0)
    pen.complete(4, group="7", size=2, samples=[1, 2])
    with path.open("a") as file:
        file.write('{"step": 5, "group"')
    journal.refresh()
    journal.refresh()
    assert [(step.step, step.samples) for step in journal.steps] == [(4, (1, 2))]
    assert [worker.pid for worker in journal.workers] == [os.getpid()]


def test_a_run_directory_is_read_as_a_journal(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.emit(sample(DataOpened, train=32))
    ranks = [{"rank": 0}, {"rank": 1}]
    run.emit(sample(WorkerGroupFormed, generation=3, ranks=ranks))
    (run.path / Log.METRICS).write_text(json.dumps({"step": 1, "at": 5.0, "generation": 3}) + "\n")
    member = {"rank": 1, "pid": os.getpid(), "process_started_at": 0.0}
    gone = {"rank": 0, "pid": 2**22 + 1, "process_started_at": 0.0}
    (run.path / Document.WORKER_GROUP).write_text(json.dumps({"workers": [member, gone]}))
    journal = RunJournal([], workload=WORKLOAD)
    journal.follow(tmp_path)
    journal.refresh()
    (step,) = journal.steps
    assert (step.step, step.group, step.size) == (0, "3", 2)
    assert [worker.rank for worker in journal.workers] == [1]


def test_the_ledger_of_a_run_answers_only_for_the_right_samples(tmp_path: Path) -> None:
    order = StepOrder(samples=32, batch=4, seed=0).steps_from(0)
    right, wrong = next(order), next(order) + 1
    run = open_run(tmp_path)
    run.emit(sample(DataOpened, train=32))
    records = [
        {"step": step, "generation": 1, "samples": 4, "digest": f"{digest_of(taken):016x}"}
        for step, taken in ((1, right), (2, wrong))
    ]
    (run.path / Log.LEDGER).write_text("".join(json.dumps(record) + "\n" for record in records))
    journal = RunJournal([], workload=WORKLOAD)
    journal.follow(tmp_path)
    journal.refresh()
    assert account(journal.read_ledger(), journal.samples_of).lost == 4


def test_the_job_of_the_benchmark_is_one(tmp_path: Path) -> None:
    job = Job.model_validate(make_job(tmp_path / "text.txt", WORKLOAD))
    assert job.train.batch == WORKLOAD.batch


def test_what_a_trial_started_is_found_again_and_ended(tmp_path: Path) -> None:
    processes = Processes(log=tmp_path / "log")
    words = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
    words += "'import time; time.sleep(600)'], start_new_session=True); time.sleep(600)"
    processes.start([sys.executable, "-c", words], node=1)
    try:
        wait_until(lambda: len(processes.on_node(1)) >= 2, "both processes")
        family = processes.on_node(1)
        assert len(family) == 2
        assert processes.on_node(0) == []
        os.kill(family[-1], signal.SIGSTOP)  # one that is stopped goes, too
    finally:
        processes.end()
    assert not any(is_alive(pid) for pid in family)
    assert processes.is_over()


def run_of(contender: str, number: int = 0, **rest: Any) -> parallel.Run:
    values: dict[str, Any] = {"layout": "dp2", "step_s": 1.0, "cpu_s": 2.0, "losses": (3.0, 2.0)}
    return parallel.Run(contender=contender, round=number, **values | rest)


def test_the_warm_up_is_not_counted() -> None:
    at = [10.0, 20.0, 21.0, 22.0, 23.0]
    cpu = [(0.0, 0.0), (20.0, 30.0), (30.0, 50.0)]
    assert parallel.summarize(at, cpu, warmup=2) == pytest.approx((1.0, 2.0))
    with pytest.raises(ValueError, match="too few"):
        parallel.summarize(at, cpu, warmup=5)


def test_overhead_is_judged_round_by_round_and_only_of_equal_losses() -> None:
    runs = [
        run_of("hand", 0),
        run_of("yunlu", 0, step_s=1.02),
        run_of("hand", 1, step_s=4.0),
        run_of("yunlu", 1, step_s=4.0),
    ]
    (verdict,) = parallel.judge(runs)
    assert verdict["step"] == pytest.approx(1.01)
    assert verdict["met"]
    (verdict,) = parallel.judge([*runs, run_of("yunlu", 2, losses=(3.0, 2.1))])
    assert not verdict["met"]
    assert "| 1.010 (1.000 to 1.020) |" in parallel.make_table(runs)


def test_every_layout_has_its_micro_batch() -> None:
    assert LAYOUTS.keys() == MICRO_BATCH.keys()


def test_processor_time_is_read_past_a_name_with_brackets() -> None:
    own = Path("/proc/self/stat").read_text()
    renamed = own[: own.index("(")] + "(a) b (c))" + own[own.rindex(")") + 1 :]
    assert cpu_seconds(renamed) == cpu_seconds(own) > 0
