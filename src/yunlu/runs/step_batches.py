"""Metrics of a run as arrays, some thousand steps at a time: memory does not grow with the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from yunlu.runs.metric_log import MetricTail, SealedPart, decode_tail, read_parts
from yunlu.runs.metric_segments import decode_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from yunlu.runs.metric_segments import SegmentColumn
    from yunlu.runs.run_store import RunStore

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Consecutive records, by column."""

    size: int
    columns: Mapping[str, FloatArray]
    present: Mapping[str, BoolArray]
    """Which records have a number, where not all do."""

    @property
    def step(self) -> FloatArray:
        """The step of each record; every record has one."""
        return self.columns["step"]

    def has(self, name: str) -> BoolArray:
        """Which records have a number."""
        if name not in self.columns:
            return np.zeros(self.size, dtype=bool)
        mask = self.present.get(name)
        return np.ones(self.size, dtype=bool) if mask is None else mask

    def get(self, name: str, default: float = 0.0) -> FloatArray:
        """A number of each record, and a default where it has none."""
        if name not in self.columns:
            return np.full(self.size, default)
        mask = self.present.get(name)
        values = self.columns[name]
        return values if mask is None else np.where(mask, values, default)

    def take(self, mask: BoolArray) -> StepBatch:
        """The records that a mask selects."""
        if mask.all():
            return self
        return StepBatch(
            size=int(np.count_nonzero(mask)),
            columns={name: values[mask] for name, values in self.columns.items()},
            present={name: held[mask] for name, held in self.present.items()},
        )

    def records(self) -> list[dict[str, float]]:
        """The same record by record."""
        rows: list[dict[str, float]] = [{} for _ in range(self.size)]
        for name, values in self.columns.items():
            held = self.has(name).tolist()
            for row, value, is_held in zip(rows, values.tolist(), held, strict=True):
                if is_held:
                    row[name] = value
        return rows


def read_batches(run: RunStore) -> Iterator[StepBatch]:
    """All records that have a step, as they were logged; a damaged segment is left out."""
    for part in read_parts(run):
        if isinstance(part, SealedPart):
            batch = _read_sealed(part)
            if batch is not None and batch.size:
                yield batch
        else:
            yield from _read_tail(part)


def find_number(value: object) -> float | None:
    """A number, finite or not, also from its name in JSON (``"NaN"``); else None."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def numbers(data: Any) -> dict[str, float]:
    """The named numbers of a mapping; what is not a number is left out."""
    named = data.items() if isinstance(data, dict) else ()
    return {
        str(name): number for name, value in named if (number := find_number(value)) is not None
    }


def to_batch(records: Sequence[Mapping[str, float]]) -> StepBatch:
    """Records as columns."""
    columns: dict[str, FloatArray] = {}
    present: dict[str, BoolArray] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        held = np.array([name in record for record in records])
        columns[name] = np.array([record.get(name, 0.0) for record in records], dtype=np.float64)
        if not held.all():
            present[name] = held
    return StepBatch(size=len(records), columns=columns, present=present)


def _read_tail(tail: MetricTail) -> Iterator[StepBatch]:
    rows = (numbers(record) for record, _ in decode_tail(tail))
    records = (row for row in rows if math.isfinite(row.get("step", math.nan)))
    while batch := list(islice(records, BATCH_ROWS)):
        yield to_batch(batch)


def _read_sealed(part: SealedPart) -> StepBatch | None:
    try:
        length, columns = decode_columns(part.data)
    except ValueError:
        return None
    if "step" not in columns:
        return None
    batch = StepBatch(
        size=length,
        columns={name: _values(column) for name, column in columns.items()},
        present={
            name: np.unpackbits(
                np.frombuffer(column.is_present, np.uint8), count=length, bitorder="little"
            ).astype(bool)
            for name, column in columns.items()
            if column.is_present is not None
        },
    )
    wanted = np.zeros(length, dtype=bool)
    wanted[part.skip : part.end - part.start] = True
    return batch.take(wanted & batch.has("step"))


def _values(column: SegmentColumn) -> FloatArray:
    values = np.array(column.values, dtype=np.float64)  # a copy: the segment is let go
    return values / column.per_unit if column.per_unit != 1 else values


class LatestSteps:
    """The records of a run without those that it went back behind: one for each step, in order.

    The log's order decides, not its clock, which may have been set back. Made by one pass over the steps; each
    reading of the records is another pass, up to where the first one ended.
    """

    def __init__(
        self, run: RunStore, *, on_batch: Callable[[StepBatch], None] | None = None
    ) -> None:
        """``on_batch`` gets every batch as it was logged."""
        self._run = run
        self._rows = 0
        places: list[FloatArray] = []
        steps: list[FloatArray] = []
        newest = -math.inf
        for batch in read_batches(run):
            before = np.concatenate(([newest], batch.step[:-1]))
            back = np.flatnonzero(batch.step <= before)
            places.append((back + self._rows).astype(np.float64))
            steps.append(batch.step[back])
            newest = float(batch.step[-1])
            self._rows += batch.size
            if on_batch is not None:
                on_batch(batch)
        self._places = np.concatenate(places) if places else np.empty(0)
        after = np.concatenate(steps) if steps else np.empty(0)
        # The earliest step that the run went back to at each of these places, or later.
        self._earliest = np.append(np.minimum.accumulate(after[::-1])[::-1], math.inf)

    def batches(self) -> Iterator[StepBatch]:
        """The records, some thousand at a time."""
        at = 0
        for batch in read_batches(self._run):
            rows = np.arange(at, at + batch.size)
            at += batch.size
            later = np.searchsorted(self._places, rows, side="right")
            mask = (batch.step < self._earliest[later]) & (rows < self._rows)
            if mask.any():
                yield batch.take(mask)
            if at >= self._rows:
                return
