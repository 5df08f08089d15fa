"""The log of a worker group: nothing of it is lost with whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from yunlu.runs.home import open_run
from yunlu.runs.run_store import Log, RunStore
from yunlu.training.topology.worker_group import WorkerGroupLog


def make_log(run: RunStore) -> WorkerGroupLog:
    return WorkerGroupLog(run, device=torch.device("cpu"), attempt=1, forward=lambda *_: None)


def do_steps(log: WorkerGroupLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.add({"step": step, "loss": 1.0 / step})
        log.add_to_ledger(step, 8, step * 1000)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def read(run: RunStore) -> list[dict[str, Any]]:
    return [record for record, _ in run.read_metrics()]


def test_another_worker_writes_what_the_leader_took_to_its_grave(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    leader, other = make_log(run), make_log(run)
    for log, is_leader in ((leader, True), (other, False)):
        log.begin(1, 0, is_leader=is_leader)
        do_steps(log, 1, 5)
        log.flush()
        do_steps(log, 6, 9)
    assert steps_in(run.path / Log.LEDGER) == [1, 2, 3, 4, 5]
    other.begin(2, 9, is_leader=True)  # the leader was killed before its next flush
    assert steps_in(run.path / Log.METRICS) == steps_in(run.path / Log.LEDGER) == list(range(1, 10))
    do_steps(other, 10, 11)
    other.flush()
    assert steps_in(run.path / Log.METRICS) == steps_in(run.path / Log.LEDGER) == list(range(1, 12))
    assert [record["generation"] for record in read(run)] == [1] * 9 + [2] * 2


def test_steps_that_were_undone_are_not_told_but_done_again(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    log = make_log(run)
    log.begin(1, 0, is_leader=True)
    do_steps(log, 1, 4)
    log.flush()
    do_steps(log, 5, 7)
    log.begin(2, 6, is_leader=True)  # everyone goes back to where six steps were done
    assert steps_in(run.path / Log.LEDGER) == [1, 2, 3, 4, 5, 6]
    log.begin(3, 3, is_leader=True)
    do_steps(log, 4, 5)
    log.flush()
    assert steps_in(run.path / Log.LEDGER) == [1, 2, 3, 4, 5, 6, 4, 5]
    assert {r["step"]: r["generation"] for r in read(run)} == {1: 1, 2: 1, 3: 1, 4: 3, 5: 3, 6: 1}
