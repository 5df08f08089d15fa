"""The arithmetic of ``benchmarks/pool_live.py``."""

import pytest
from benchmarks.pool_live import summarise
from benchmarks.pool_parts.live import JobRecord
from benchmarks.pool_parts.predict import measure, predict_queue
from benchmarks.pool_parts.queue import BATCH, QUEUE, Arrival, Kind, make_job, make_queue

from yunlu.scheduler.allocation_record import RecordedTiming
from yunlu.scheduler.run_status import make_request


def seen(devices, step_s):
    return RecordedTiming(
        device_type="cpu", nodes=1, devices=devices, local_batch=BATCH // devices,
        accumulate_s=step_s, step_s=step_s,
    )  # fmt: skip


def job_record(name="a", *, steps=100, step_s=1.0, overhead_s=20.0, **more):
    given = {
        "name": name, "kind": "k", "submitted_at": 0.0, "started_at": 0.0,
        "ended_at": steps * step_s + overhead_s, "state": "finished", "attempts": 1, "resizes": 0,
        "trained_s": steps * step_s, "samples_lost": 0, "sizes": (), "resize_s": (),
        "seen": tuple(seen(count, step_s / count) for count in range(1, 5)),
    }  # fmt: skip
    return JobRecord(**{**given, **more})


def test_queue_has_a_dozen_elastic_jobs_of_fixed_sizes_for_who_wants_them():
    queue = make_queue(scale=0.5)
    assert len(queue) == len(QUEUE) == 12
    for arrival in queue:
        job, kind = make_job(arrival), arrival.kind
        request = make_request(job, least=kind.least, most=kind.most)
        assert (request.least, request.most, request.requested) == (1, 4, kind.asked)


@pytest.mark.parametrize(("asked", "expected"), [(1, 120), (2, 70), (4, 45)])
def test_job_alone_is_predicted_exactly(asked, expected):
    measured = measure([job_record()], devices=4)
    assert measured["k"].overhead_s == 20.0
    kind = Kind(name="k", task="", model="", args={}, steps=100, asked=asked)
    queue = [Arrival(name="a", at_s=0.0, kind=kind)]
    told = predict_queue(queue, measured, policy="fifo", devices=4, round_s=10, resize_s=1.0)
    assert (told.average_s, told.makespan_s, told.restarts) == (expected, expected, 0)


def test_figures_of_a_live_run():
    jobs = [job_record(), job_record("b", submitted_at=10.0, ended_at=50.0, attempts=2, resizes=3)]
    assert summarise(jobs) == {
        "average_s": 80.0, "makespan_s": 120.0, "restarts": 1, "resizes": 3, "samples_lost": 0,
    }  # fmt: skip
