"""This machine in the catalog, and what finished runs teach about it."""

from __future__ import annotations

import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.sample_events import sample
from tests.unit.planning.test_machine_profile import pace, planned, probe
from tests.unit.planning.test_planner import job
from yunlu.core.errors import StoreError
from yunlu.core.files import append_lines
from yunlu.jobs import calibration as known
from yunlu.jobs.report_builder import build_report
from yunlu.planning import calibration as learnt
from yunlu.planning.calibration import Calibration
from yunlu.planning.machine_profile import FOLDER, StartFigures, dump_profiles
from yunlu.planning.plan import Measurement
from yunlu.render.run_report import write_report
from yunlu.runs.events import (
    AttemptStarted,
    MemoryExhausted,
    PlanMade,
    PredictionMeasured,
    StateChanged,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, Log, RunStore


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("YUNLU_CACHE", str(cache))
    return cache


def store_probe(cache: Path, **changes: object) -> None:
    folder = cache / FOLDER
    folder.mkdir(parents=True)
    fields = {"torch": metadata.version("torch"), **changes}
    (folder / f"{socket.gethostname()}.json").write_bytes(dump_profiles([probe(**fields)]))


def finished_run(
    home: Path, name: str, *, slower: float = 1.5, state: str = "finished", **guessed: Any
) -> RunStore:
    """As a worker leaves it, with steps that took longer than predicted."""
    path = home / name
    path.mkdir(parents=True)
    run, plan = open_run(path), planned(**guessed)
    assert plan.estimate is not None
    (run.path / Document.JOB).write_text(job().model_dump_json())
    (run.path / Document.PLAN).write_text(plan.model_dump_json())
    measured = Measurement(
        memory_bytes=plan.estimate.raw["memory_bytes"],
        step_s=slower * plan.estimate.raw["step_s"],
        samples_per_s=10.0,
        total_s=60.0,
        dollars=None,
    )
    for each in ("planning", "running"):
        run.emit(StateChanged(state=each))
    run.emit(PlanMade(plan=plan))
    run.emit(PredictionMeasured(measured=measured))
    run.emit(StateChanged(state=state))
    return run


def test_a_machine_that_was_never_probed_is_no_offer() -> None:
    assert known.this_machine() is None


def test_a_torn_probe_is_as_none(own_cache: Path) -> None:
    store_probe(own_cache)
    path = own_cache / FOLDER / f"{socket.gethostname()}.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert known.stored_probe() is None


def test_this_machine_is_a_device_and_an_offer_without_a_price(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_probe(own_cache)
    found = known.this_machine()
    assert found is not None
    device, offer = found
    assert (offer.cloud, offer.device, offer.devices) == ("here", device.name, 1)
    assert offer.dollars_per_hour == 0.0
    assert device.peak_flops == {"fp32": pytest.approx(4e9, rel=0.01)}
    assert device.memory_bytes_per_s == 1e10
    assert "yunlu probe" in device.source("peak_flops.fp32")
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", "1.25")
    assert known.offer_of(probe()).dollars_per_hour == 1.25


def started_run(home: Path, name: str, start_s: float | None, *, own_process: bool = True) -> None:
    """A run that began at 1000 and made its first step later, or none."""
    (home / name).mkdir(parents=True)
    run = open_run(home / name)
    run.emit(sample(AttemptStarted, began_at=1000.0, own_process=own_process))
    steps = [] if start_s is None else [start_s, start_s + 1.0]
    append_lines(
        run.path / Log.METRICS, [{"step": n, "at": 1000.0 + s} for n, s in enumerate(steps, 1)]
    )


def test_how_long_a_start_takes_is_told_by_runs_that_started(own_home: Path) -> None:
    assert known.usual_start_s() is None
    for name, start_s in {"slow": 9.0, "usual": 7.0, "quick": 6.0, "none": None}.items():
        started_run(own_home, name, start_s)
    for name in ("fit-1", "fit-2", "fit-3"):
        started_run(own_home, name, 0.1, own_process=False)
    (own_home / "fit-1" / "events.jsonl").write_text('{"v": 1, "kind": "attempt", "at": 0}\n')
    assert known.usual_start_s() == 7.0


def test_before_any_run_the_probe_tells_how_long_a_start_takes(own_cache: Path) -> None:
    store_probe(own_cache, start=StartFigures(torch_s=2, worker_s=4, cpu_s=3, resident_bytes=1))
    assert known.usual_start_s() == 4.0


def test_a_finished_run_teaches_once_however_often_its_report_is_written(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "home", "one")
    write_report(run)
    first = known.read_calibration()
    assert {each.quantity for each in first.figures} == {"step_s", "memory_bytes"}
    assert first.belief("test (4 cores)").factor > 1.1
    write_report(run)
    assert known.read_calibration() == first


def test_runs_that_ended_without_a_report_are_found(own_home: Path) -> None:
    for name in ("a", "b"):
        finished_run(own_home, name)
    finished_run(own_home, "failed", state="failed")
    assert known.read_calibration().figures == ()
    found = known.read_calibration(refresh=True)
    assert {each.run for each in found.figures} == {known.name_run(own_home / n) for n in "ab"}


def test_a_run_out_of_memory_or_without_prediction_teaches_nothing(tmp_path: Path) -> None:
    shrunk = finished_run(tmp_path, "shrunk")
    shrunk.emit(MemoryExhausted(step=1, micro_batch=1, message=""))
    old = finished_run(tmp_path, "old")
    lines = [json.loads(line) for line in (old.path / Log.EVENTS).read_text().splitlines()]
    for line in lines:
        line.get("plan", {}).pop("estimate", None)
    (old.path / Log.EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = finished_run(tmp_path, "other")
    (other.path / Log.EVENTS).write_text(
        (other.path / Log.EVENTS).read_text().replace('"version": 1', '"version": 0')
    )
    assert known.learn_from([shrunk, old, other]) == 0


def test_what_deleted_runs_taught_can_be_dropped(
    tmp_path: Path, own_home: Path, own_cache: Path
) -> None:
    runs = [finished_run(own_home, name) for name in ("kept", "gone")]
    elsewhere = finished_run(tmp_path / "another project", "far")
    assert known.learn_from([*runs, elsewhere]) == 3
    assert str(tmp_path) not in (own_cache / learnt.FILE).read_text()
    shutil.rmtree(runs[1].path)
    assert known.forget_deleted() == 1
    left = {known.name_run(run.path) for run in (runs[0], elsewhere)}
    assert {each.run for each in known.read_calibration().figures} == left
    assert known.forget_deleted() == 0


def test_everything_can_be_dropped(own_home: Path, own_cache: Path) -> None:
    assert known.forget_all() == 0
    store_probe(own_cache)
    known.learn_from([finished_run(own_home, "one")])
    assert known.forget_all() == 1
    assert known.read_calibration().figures == ()
    assert known.stored_probe() is None


def test_a_run_that_an_earlier_version_named_by_its_place_counts_once(
    own_home: Path, own_cache: Path
) -> None:
    run = finished_run(own_home, "one")
    old = [each.model_copy(update={"run": str(run.path)}) for each in known.figures_of(run)]
    own_cache.mkdir()
    (own_cache / learnt.FILE).write_text(Calibration(figures=tuple(old)).model_dump_json())
    assert known.learn_from([run]) == 0


def test_where_nothing_can_be_written_what_is_known_is_told_all_the_same(
    own_home: Path, own_cache: Path
) -> None:
    finished_run(own_home, "one")
    own_cache.write_text("a file where the folder should be")
    assert known.read_calibration(refresh=True).figures == ()
    assert known.forget_deleted() == known.forget_all() == 0


def test_only_figures_of_the_installed_torch_count_whoever_built_it(own_cache: Path) -> None:
    store_probe(own_cache, torch="0.1")
    assert known.stored_probe() is None
    shutil.rmtree(own_cache)
    store_probe(own_cache, torch=metadata.version("torch").partition("+")[0] + "+other")
    assert known.stored_probe() is not None


def test_a_probe_knows_the_threads_it_was_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    four = probe(threads=4, paces=(pace(threads=1), pace(threads=4)))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert known.knows_threads(four)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not known.knows_threads(four)
    assert known.knows_threads(probe(kind="cuda", threads=4))
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(known, "_usual_threads", lambda: {4, 8})
    assert known.knows_threads(four)
    assert not known.knows_threads(probe(threads=1))


def test_how_busy_the_machine_was_is_kept_with_what_a_run_teaches(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "one", busy=2.5)
    busy = {each.quantity: each.busy for each in known.figures_of(run)}
    assert busy == {"step_s": 2.5, "memory_bytes": 1.0}


def test_runs_that_end_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    runs = [finished_run(tmp_path, f"r{i}") for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda run: known.learn_from([run]), runs))
    assert len({each.run for each in known.read_calibration().figures}) == 8


def test_a_place_that_cannot_be_written_is_said_and_no_report_fails_for_it(
    tmp_path: Path, own_cache: Path
) -> None:
    run = finished_run(tmp_path, "one")
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="cannot be written"):
        known.learn_from([run])
    assert write_report(run).state == "finished"


def test_the_report_shows_estimated_predicted_and_measured_side_by_side(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "one", slower=1.05)
    report = build_report(run)
    step = report.comparison("step_s")
    assert report.plan is not None
    assert report.plan.estimate is not None
    assert step.estimated == report.plan.estimate.step_s
    assert step.predicted == report.plan.prediction.step_s
    assert step.measured == pytest.approx(1.05 * report.plan.estimate.raw["step_s"])
    assert step.interval == report.plan.estimate.intervals["step_s"]
    assert step.inside is True
    assert (
        build_report(finished_run(tmp_path, "two", slower=9.0)).comparison("step_s").inside is False
    )
    unfinished = build_report(finished_run(tmp_path, "three", state="stopped"))
    assert unfinished.comparison("total_s").inside is None


def test_a_total_without_a_predicted_start_up_is_not_shown_as_predicted(
    tmp_path: Path,
) -> None:
    probed = build_report(finished_run(tmp_path, "probed")).comparison("total_s")
    assert probed.estimated is not None
    hurried = build_report(finished_run(tmp_path, "hurried", start=None))
    for quantity in ("total_s", "dollars"):
        found = hurried.comparison(quantity)
        assert (found.estimated, found.interval, found.inside) == (None, None, None)
        assert found.predicted is not None
    assert hurried.comparison("step_s").estimated is not None
