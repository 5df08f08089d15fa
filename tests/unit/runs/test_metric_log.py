"""Metrics are one log, sealed or not, whenever the writer dies."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.memory_store import MemoryRunStore
from tests.waiting import LIMIT_S
from yunlu.runs import metric_writer
from yunlu.runs.home import open_run
from yunlu.runs.metric_segments import SegmentName, decode_columns, decode_records, encode_segment
from yunlu.runs.metric_writer import RECENT_LINES, MetricWriter, seal_metrics
from yunlu.runs.run_store import Area, Log, last_record
from yunlu.runs.step_batches import LatestSteps, read_batches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from yunlu.runs.run_store import RunStore


def make_records(first: int, last: int) -> list[dict[str, Any]]:
    """Records with all that a worker writes, and noise in all digits."""
    draw = random.Random(first)
    return [
        {
            "step": step,
            "epoch": step * 64 / 50_000,
            "loss": draw.gauss(2, 0.1),
            "lr": 1e-3 * math.cos(step / 1e5),
            "grad_norm": draw.lognormvariate(0, 1),
            "samples": step * 64,
            "items": 64.0,
            "data_s": draw.lognormvariate(-9, 1),
            "compute_s": draw.gauss(0.002, 1e-4),
            "communication_s": 0.0,
            "evaluate_s": 0.0,
            "checkpoint_s": 0.0,
            "at": 1.8e9 + step * 0.002 + draw.gauss(0, 1e-4),
            "attempt": 1,
            "memory_bytes": 1_234_567_890,
        }
        for step in range(first, last + 1)
    ]


def steps_of(run: RunStore, offset: int = 0) -> list[int]:
    return [record["step"] for record, _ in run.read_metrics(offset=offset)]


def test_thousands_of_steps_take_sixty_bytes_each(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    writer = MetricWriter(run)
    for first in range(1, 6001, 250):
        writer.append(make_records(first, first + 249))
    writer.close()
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert stored / 6000 <= 60
    assert steps_of(run) == [*range(1, 6001)]


def test_sealed_records_are_those_that_were_written(tmp_path: Path) -> None:
    run, records = open_run(tmp_path), make_records(1, 300)
    records[7] |= {"tokens": 12, "padding": 3, "own": 0.5}
    run.append(Log.METRICS, records)
    assert seal_metrics(run) == 300 - RECENT_LINES
    read = [record for record, _ in run.read_metrics()]
    for wanted, found in zip(records, read, strict=True):
        assert found.keys() == wanted.keys()
        assert found["at"] == pytest.approx(wanted["at"], abs=1e-6)
        for name in ("step", "loss", "lr", "grad_norm", "epoch", "samples", "memory_bytes"):
            assert found[name] == wanted[name]
        assert found["compute_s"] == pytest.approx(wanted["compute_s"], rel=1e-7)
    assert read[7]["own"] == 0.5


def test_positions_stay_when_records_are_sealed(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(Log.METRICS, make_records(1, 50))
    with (tmp_path / Log.METRICS).open("a") as torn:
        torn.write('{"step": 51, "a')
    run.append(Log.METRICS, [{"no": "step"}, *make_records(51, 200)])
    before = {after: record["step"] for record, after in run.read_metrics()}
    end = run.metric_end()
    seal_metrics(run)
    run.append(Log.METRICS, make_records(201, 300))
    seal_metrics(run)
    after = {position: record["step"] for record, position in run.read_metrics()}
    assert {position: after[position] for position in before} == before
    assert steps_of(run, end) == [*range(201, 301)]
    for position, step in before.items():
        assert steps_of(run, position) == [*range(step + 1, 301)]


def test_the_newest_steps_are_read_without_a_segment(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(Log.METRICS, make_records(1, 500))
    seal_metrics(run)
    for segment in (tmp_path / Area.METRICS).iterdir():
        segment.write_bytes(b"gone")
    assert last_record(run, Log.METRICS)["step"] == 500
    assert steps_of(run) == [*range(501 - RECENT_LINES, 501)]


def test_other_tools_read_a_segment(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(Log.METRICS, make_records(1, 100))
    seal_metrics(run)
    (segment,) = (tmp_path / Area.METRICS).iterdir()
    table = pa.ipc.open_file(segment).read_all()
    assert table["step"].to_pylist() == [*range(1, 101 - RECENT_LINES)]
    assert table["at"][0].as_py().year == 2027
    assert {"loss", "lr", "grad_norm"} <= {*table.column_names}


_CHILD = """
import sys
from yunlu.runs import metric_writer
from yunlu.runs.home import open_run

metric_writer.SEGMENT_ROWS, metric_writer.RECENT_LINES = 20, 4
run = open_run(sys.argv[1])
writer, step = metric_writer.MetricWriter(run), run.metric_end()
while True:
    writer.append([{"step": n, "at": 1.0, "loss": n / 7} for n in range(step + 1, step + 6)])
    step += 5
    print(step, flush=True)
"""


def test_nothing_that_was_flushed_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    draw, run = random.Random(1), open_run(tmp_path / "run")
    (tmp_path / "run").mkdir()
    for _ in range(2):
        words, sealed = [sys.executable, "-c", _CHILD, str(tmp_path / "run")], None
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            flushed, more = 0, draw.randint(0, 40)
            for line in process.stdout:
                flushed, sealed = int(line), sealed or run.names(Area.METRICS)
                more -= bool(sealed)
                if more < 0:
                    break
            process.kill()
            flushed = max([flushed, *(int(line) for line in process.stdout if line[-1] == "\n")])
            process.wait(LIMIT_S)
        steps = steps_of(run)
        assert steps == [*range(1, len(steps) + 1)]
        assert len(steps) >= flushed
        assert sealed


class Died(BaseException):
    """The process ends here."""


class DyingStore(MemoryRunStore):
    """Dies before the write of that number."""

    left = math.inf

    def write(self, name: str, content: str | bytes, *, durable: bool = True) -> None:
        self.left -= 1
        if self.left < 0:
            raise Died
        super().write(name, content, durable=durable)


@pytest.mark.parametrize("writes", range(5))
def test_a_writer_that_dies_between_two_writes_loses_nothing(
    writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_writer, "SEGMENT_ROWS", 40)
    run = DyingStore()
    run.append(Log.METRICS, make_records(1, 200))
    run.left = writes
    with contextlib.suppress(Died):
        seal_metrics(run)
    run.left = math.inf
    assert steps_of(run) == [*range(1, 201)]
    # The next attempt seals in other pieces, over what the first one left.
    run.append(Log.METRICS, make_records(201, 230))
    monkeypatch.setattr(metric_writer, "SEGMENT_ROWS", 64)
    seal_metrics(run)
    assert steps_of(run) == [*range(1, 231)]
    assert [int(step) for batch in read_batches(run) for step in batch.step] == [*range(1, 231)]
    assert steps_of(run, 41) == [*range(42, 231)]


class InterruptedStore(MemoryRunStore):
    """Seals everything while somebody reads: after the tail, before the segments."""

    is_armed = False

    def names(self, area: str) -> list[str]:
        if self.is_armed and area == Area.METRICS:
            self.is_armed = False
            seal_metrics(self)
        return super().names(area)


def test_a_reader_sees_each_record_once_while_they_are_sealed() -> None:
    run = InterruptedStore()
    run.append(Log.METRICS, make_records(1, 200))
    seal_metrics(run)
    run.append(Log.METRICS, make_records(201, 400))
    run.is_armed = True
    assert steps_of(run) == [*range(1, 401)]
    assert not run.is_armed


class SlowStore(MemoryRunStore):
    """Writes a segment only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.is_writing = threading.Event()

    def write(self, name: str, content: str | bytes, *, durable: bool = True) -> None:
        if name.startswith(f"{Area.METRICS}/"):
            self.is_writing.set()
            assert self.may_write.wait(LIMIT_S)
        super().write(name, content, durable=durable)


def test_steps_do_not_wait_for_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_writer, "SEGMENT_ROWS", 100)
    run = SlowStore()
    writer = MetricWriter(run)
    writer.append(make_records(1, 300))
    assert run.is_writing.wait(LIMIT_S)
    for first in range(301, 1001, 100):  # would hang here
        writer.append(make_records(first, first + 99))
    assert steps_of(run) == [*range(1, 1001)]
    run.may_write.set()
    writer.close()
    assert steps_of(run) == [*range(1, 1001)]
    assert len(run.names(Area.METRICS)) > 1


class FullStore(MemoryRunStore):
    """Has no room for segments."""

    def write(self, name: str, content: str | bytes, *, durable: bool = True) -> None:
        if name.startswith(f"{Area.METRICS}/"):
            raise OSError(28, "No space left on device")
        super().write(name, content, durable=durable)


def test_metrics_that_cannot_be_packed_stay_as_they_are() -> None:
    run = FullStore()
    writer = MetricWriter(run)
    writer.append(make_records(1, 900))
    writer.close()
    writer.close()
    assert steps_of(run) == [*range(1, 901)]
    (warning,) = (event for event, _ in run.read_events())
    assert "No space left" in getattr(warning, "message", "")


def test_half_a_segment_is_never_read(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.append(Log.METRICS, make_records(1, 200))
    seal_metrics(run)
    (segment,) = (tmp_path / Area.METRICS).iterdir()
    content = segment.read_bytes()
    newest = [*range(201 - RECENT_LINES, 201)]
    for size in range(0, len(content) - 1, 97):
        segment.write_bytes(content[:size])
        found = steps_of(run)
        # Without its end, which only other tools need, it is whole.
        assert found in (newest, [*range(1, 201)])
        assert len(found) == len(newest) or size > len(content) * 0.8
        for batch in read_batches(run):
            assert batch.size


SEGMENT = encode_segment([*make_records(1, 20), None, {"step": 21, "at": 1.0}])


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SEGMENT) - 1), st.integers(0, 2**32 - 1), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    )
)
def test_a_damaged_segment_is_records_or_left_out(changes: list[tuple[int, int, int]]) -> None:
    data = bytearray(SEGMENT)
    for at, value, size in changes:
        data[at : at + size] = value.to_bytes(4, "little")[:size]
    try:
        records = decode_records(bytes(data))
    except ValueError:
        return
    assert len(records) <= 1 << 20


def test_a_segment_that_would_unpack_to_gigabytes_is_refused() -> None:
    data = bytearray(SEGMENT)
    bomb = struct.pack("<q", 1 << 36)
    place = next(  # the first packed buffer: its size, then what zstd begins with
        at for at in range(8, len(data)) if data[at + 8 : at + 12] == b"\x28\xb5\x2f\xfd"
    )
    data[place : place + 8] = bomb
    with pytest.raises(ValueError, match="more than its records need"):
        decode_columns(bytes(data))


def test_a_file_of_another_kind_is_no_segment() -> None:
    target = io.BytesIO()
    table = pa.table({"name": ["a", "b"]})
    with pa.ipc.new_file(target, table.schema) as writer:
        writer.write_table(table)
    for data in (target.getvalue(), b"", b"PAR1", os.urandom(200)):
        with pytest.raises(ValueError, match=r"it is (damaged|no segment)"):
            decode_columns(data)


def latest(steps: list[int]) -> list[int]:
    """The same in the plainest way."""
    kept: list[int] = []
    for step in steps:
        kept = [earlier for earlier in kept if earlier < step]
        kept.append(step)
    return kept


def cut(steps: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(steps), size):
        yield steps[first : first + size]


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 10))
def test_steps_that_were_gone_back_behind_count_once(steps: list[int], size: int) -> None:
    run = MemoryRunStore()
    for number, few in enumerate(cut(steps, size)):
        records = [{"step": step, "at": 1.0, "loss": float(step)} for step in few]
        name = SegmentName(start=number * size, end=number * size + len(few))
        run.write(f"{Area.METRICS}/{name}", encode_segment(records))
    run.write(Log.METRICS, json.dumps({"from": len(steps)}) + "\n")
    found = [int(step) for batch in LatestSteps(run).batches() for step in batch.step]
    assert found == latest(steps)
