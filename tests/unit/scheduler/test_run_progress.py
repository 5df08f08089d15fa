"""What is read from a run's logs."""

import pytest

from tests.sample_events import sample
from yunlu.core.files import append_lines
from yunlu.runs.events import AttemptStarted, BatchChanged, PlanMade, WorkerGroupFormed
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Log, write_submitted_plan
from yunlu.scheduler.run_progress import RunProgress


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return open_run(tmp_path / "run")


def form_group(run, generation, workers, **more):
    ranks = [{"rank": rank, "host": "here"} for rank in range(workers)]
    run.emit(sample(WorkerGroupFormed, generation=generation, ranks=ranks, **more))


def steps(run, first, count, generation, *, step_s, wait_s=0.0, **more):
    append_lines(
        run.path / Log.METRICS,
        [
            {"step": step, "at": 1000.0 + step, "attempt": 1, "generation": generation,
             "compute_s": step_s - wait_s, "communication_s": wait_s, **more}
            for step in range(first, first + count)
        ],
    )  # fmt: skip


def test_step_times_are_told_for_each_number_of_workers(run):
    run.emit(sample(AttemptStarted, number=1))
    run.emit(sample(PlanMade, batch=64, micro_batch=16, steps=100))
    progress = RunProgress(run)
    steps(run, 1, 6, 1, step_s=0.4)
    assert progress.take()
    assert progress.seen("cpu") == ()  # nobody has said yet how many made them
    form_group(run, 1, 2)
    steps(run, 7, 4, 1, step_s=0.4)
    progress.take()
    form_group(run, 2, 4, lost_s=1.5)
    steps(run, 11, 6, 2, step_s=0.25, wait_s=0.05)
    progress.take()
    two, four = progress.seen("cpu")
    assert (two.devices, two.nodes, two.local_batch) == (2, 1, 16)
    assert two.accumulate_s == pytest.approx(0.2)
    assert two.step_s == pytest.approx(0.2)
    assert (four.devices, four.local_batch) == (4, 16)
    assert four.accumulate_s == pytest.approx(0.2)
    assert four.step_s == pytest.approx(0.25)
    assert (progress.step, progress.steps, progress.resizes_s) == (16, 100, [1.5])
    assert progress.pace_s(4) == pytest.approx(0.25)
    assert not progress.take()


def test_the_submitted_plan_counts_until_the_worker_has_refined_it(run):
    write_submitted_plan(run, sample(PlanMade, batch=32, micro_batch=4, steps=50).plan)
    progress = RunProgress(run)
    progress.take()
    assert (progress.base_batch, progress.micro_batch, progress.steps) == (32, 4, 50)
    run.emit(sample(PlanMade, batch=32, micro_batch=16, steps=51))
    progress.take()
    assert (progress.base_batch, progress.micro_batch, progress.steps) == (32, 16, 51)


def test_plain_worker_counts_as_one(run):
    run.emit(sample(PlanMade, batch=8, micro_batch=8, steps=10))
    records = [{"step": n, "at": 1.0, "compute_s": 0.1} for n in range(1, 7)]
    append_lines(run.path / Log.METRICS, records)
    progress = RunProgress(run)
    progress.take()
    (seen,) = progress.seen("cpu")
    assert (seen.devices, seen.step_s) == (1, pytest.approx(0.1))


def test_a_start_counts_from_the_beginning_of_the_process(run):
    run.emit(sample(AttemptStarted, number=1, began_at=990.0))
    steps(run, 1, 1, None, step_s=0.1)
    progress = RunProgress(run)
    progress.take()
    assert progress.startup_s == pytest.approx(11.0)


def test_noise_is_per_base_batch(run):
    run.emit(sample(PlanMade, batch=8, micro_batch=8, steps=10))
    append_lines(
        run.path / Log.METRICS, [{"step": 1, "at": 1.0, "noise_sqr": 2.0, "noise_var": 24.0}]
    )
    progress = RunProgress(run)
    progress.take()
    assert progress.noise == (2.0, 3.0)


def test_torn_and_strange_lines_are_passed_over(run):
    (run.path / Log.METRICS).write_text(
        '{"step": 1, "at": 1}\n{"step": \n[1]\n{"loss": 2}\n{"step": 2'
    )
    progress = RunProgress(run)
    progress.take()
    assert progress.step == 1


def test_batch_that_follows_the_workers_is_followed(run):
    run.emit(sample(PlanMade, batch=8, micro_batch=8, steps=100))
    run.emit(BatchChanged(step=5, batch=16, steps=60))
    progress = RunProgress(run)
    progress.take()
    assert (progress.base_batch, progress.batch, progress.steps) == (8, 16, 60)
