"""The report of a long run is that of a short one: the same figures, from a stream."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.contracts.memory_store import MemoryRunStore
from yunlu.jobs.report_builder import build_report
from yunlu.jobs.step_summary import PARTS, summarise_steps
from yunlu.runs.events import AttemptStarted, StateChanged
from yunlu.runs.metric_writer import MetricWriter, seal_metrics
from yunlu.runs.run_store import Log, write_job
from yunlu.runs.states import RunState
from yunlu.runs.step_batches import to_batch
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.runs.run_store import RunStore
    from yunlu.runs.step_batches import StepBatch

JOB = Job.model_validate(
    {"name": "long", "task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
)
Record = dict[str, float]


def make_records(count: int) -> list[Record]:
    draw, now, records, samples = random.Random(3), 1000.0, list[Record](), 0
    for step in range(1, count + 1):
        now += 0.5
        samples += 8 if step % 10 else 3
        records.append(
            {
                "step": step,
                "at": now,
                "attempt": 1 + step // 300,
                "loss": draw.random(),
                "samples": samples,
                "items": 100.0,
                "data_s": 0.1,
                "compute_s": draw.uniform(0.1, 0.2),
                "checkpoint_s": 0.05 if step % 7 == 0 else 0.0,
                "tokens": 200 + step % 5,
                "padding": step % 5,
                "memory_bytes": 1000 + step,
            }
        )
        if step % 3 == 0:
            records[-1]["noise_scale"] = 10.0 + step
    return records


def cut(records: list[Record], size: int) -> Iterator[StepBatch]:
    for first in range(0, len(records), size):
        yield to_batch(records[first : first + size])


def make_run(records: list[Record]) -> RunStore:
    run = MemoryRunStore()
    write_job(run, JOB)
    run.emit(StateChanged(state=RunState.PENDING))
    run.emit(AttemptStarted(number=1, pid=1, process_started_at=1.0, began_at=999.0, at=999.0))
    run.emit(StateChanged(state=RunState.PLANNING, at=999.5))
    run.emit(StateChanged(state=RunState.RUNNING, at=999.6))
    run.append(Log.METRICS, records)
    return run


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_it_does_not_matter_how_the_stream_is_cut(size: int) -> None:
    records = make_records(700)
    whole, pieces = summarise_steps(cut(records, 10_000)), summarise_steps(cut(records, size))
    assert pieces.steps == whole.steps == 700
    assert pieces.newest == whole.newest == records[-1]
    assert pieces.curves.keys() == whole.curves.keys()
    for name, curve in whole.curves.items():
        assert pieces.curves[name].points() == curve.points(), name
    assert pieces.shares[0] == whole.shares[0]
    for part in PARTS:
        assert pieces.shares[1][part] == pytest.approx(whole.shares[1][part])
    assert pieces.seconds == pytest.approx(whole.seconds)
    assert (pieces.step_s, pieces.memory_bytes) == (whole.step_s, whole.memory_bytes)
    assert pieces.samples == pytest.approx(whole.samples)
    assert pieces.late_noise.tolist() == whole.late_noise.tolist()


def test_the_figures_are_those_of_the_records() -> None:
    records = make_records(700)
    summary = summarise_steps(cut(records, 50))
    busy = sorted(record["data_s"] + record["compute_s"] for record in records)
    assert summary.step_s == busy[350]
    assert summary.samples == records[-1]["samples"]
    assert summary.tokens == sum(record["tokens"] for record in records)
    assert summary.memory_bytes == 1700
    # The short last batch of an epoch is not a change.
    assert {size for _, size in summary.curves["batch"].points()} == {8.0}
    assert summary.curves["loss"].points() == [(r["step"], r["loss"]) for r in records]
    assert min(summary.late_noise) > 500
    # One second in two is claimed by no part: the first step of an attempt has none before it.
    claimed = sum(summary.seconds.values())
    assert claimed == pytest.approx(sum(busy) + 100 * 0.05)


def test_a_sealed_log_has_the_same_report() -> None:
    records = make_records(900)
    plain, sealed = make_run(records), make_run(records)
    seal_metrics(sealed)
    one, other = build_report(plain), build_report(sealed)
    assert [curve.key for curve in one.curves] == [curve.key for curve in other.curves]
    for before, after in zip(one.curves, other.curves, strict=True):
        assert after.steps == before.steps
        assert after.values == pytest.approx(before.values, rel=1e-6)
    assert one.time is not None
    assert other.time is not None
    assert other.time.totals == pytest.approx(one.time.totals, abs=1e-3)
    assert other.step == one.step == 900


def test_a_long_run_has_bounded_curves_with_every_extreme() -> None:
    records = make_records(20_000)
    records[12_345]["loss"] = 1e6
    records[777]["loss"] = -1e6
    run = make_run([])
    writer = MetricWriter(run)
    for first in range(0, len(records), 2000):
        writer.append(records[first : first + 2000])
    writer.close()
    report = build_report(run)
    curves = {curve.key: curve for curve in report.curves}
    assert max(len(curve.steps) for curve in report.curves) <= 1000
    loss = dict(zip(curves["train_loss"].steps, curves["train_loss"].values, strict=True))
    assert (loss[12_346], loss[778]) == (1e6, -1e6)
    assert {1, 20_000} <= loss.keys()
    assert report.time is not None
    assert len(report.time.steps) == 60
