"""The metrics of a run as one log: sealed segments, then a tail of JSON lines.

The worker appends to the tail. From time to time it seals the older lines of it: they are written as a
segment, which appears whole or not at all, and then the tail is replaced by one without them, whose first line
says how many records lie before it. Whoever reads opens the tail first: all segments that it counts on are
there by then. A segment that reaches into the tail, left by a process that died between the two writes, is cut
off there. So nothing is lost or read twice, whenever the writer dies.

Positions count the lines of the log from its beginning, whether they are sealed or not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from yunlu.core.limits import decode_json
from yunlu.runs.items import Area, Log
from yunlu.runs.metric_segments import SegmentName, decode_records, parse_name

if TYPE_CHECKING:
    from collections.abc import Iterator

_START = "from"


class StoredItems(Protocol):
    """What of a run store is needed here."""

    def read(self, name: str, *, offset: int = 0) -> bytes | None:
        """As of ``RunStore``."""
        ...

    def names(self, area: str) -> list[str]:
        """As of ``RunStore``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedPart:
    """Records of a segment."""

    start: int
    """Position of its first record."""
    skip: int
    """So many of them, from the first on, stand in an earlier segment or were not asked for."""
    end: int
    """Position after the last that counts."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTail:
    """The lines that are not sealed yet."""

    start: int
    """Position of the first."""
    lines: bytes
    """Whole lines, and perhaps half a one, which is being written."""

    @property
    def end(self) -> int:
        """Position after the last whole line."""
        return self.start + self.lines.count(b"\n")

    def whole_lines(self, *, skip: int = 0) -> Iterator[bytes]:
        """The lines without those at the beginning that are to be skipped."""
        at = 0
        while (after := self.lines.find(b"\n", at) + 1) > 0:
            if skip <= 0:
                yield self.lines[at:after]
            skip, at = skip - 1, after


def read_tail(run: StoredItems) -> MetricTail:
    """The tail as it is now."""
    content = run.read(Log.METRICS)
    if content is None:
        return MetricTail(start=max((name.end for name in _segments(run)), default=0), lines=b"")
    first, _, rest = content.partition(b"\n")
    start = _parse_start(first)
    return (
        MetricTail(start=0, lines=content) if start is None else MetricTail(start=start, lines=rest)
    )


def make_tail(start: int, lines: bytes) -> bytes:
    """Content of a tail that begins at a position."""
    return json.dumps({_START: start}).encode() + b"\n" + lines


def read_parts(run: StoredItems, *, offset: int = 0) -> Iterator[SealedPart | MetricTail]:
    """The log from a position on, segment by segment, and the tail at last."""
    tail, position = read_tail(run), offset
    names = sorted(_segments(run), key=lambda name: (name.start, -name.end))
    for name in names if position < tail.start else ():
        end = min(name.end, tail.start)
        if end <= position or name.start >= tail.start:
            continue
        data = run.read(f"{Area.METRICS}/{name}")
        if data is None:
            continue
        skip = max(position - name.start, 0)
        yield SealedPart(start=name.start, skip=skip, end=end, data=data)
        position = end
    yield tail


def read_lines(run: StoredItems, *, offset: int = 0) -> Iterator[tuple[Any, int]]:
    """Records from a position on, each with the position after it; a damaged segment is left out."""
    for part in read_parts(run, offset=offset):
        if isinstance(part, SealedPart):
            yield from _read_sealed(part)
        else:
            yield from decode_tail(part, offset=offset)


def decode_tail(tail: MetricTail, *, offset: int = 0) -> Iterator[tuple[Any, int]]:
    """Records of the tail from a position on, each with the position after it; torn lines are left out."""
    skip = max(offset - tail.start, 0)
    for position, line in enumerate(tail.whole_lines(skip=skip), tail.start + skip + 1):
        record = decode_line(line)
        if record is not None:
            yield record, position


def decode_line(line: bytes) -> Any:
    """The record of a line; None for a torn or empty one."""
    try:
        return decode_json(line, replace_lone=True) if line.strip() else None
    except ValueError:
        return None


def _read_sealed(part: SealedPart) -> Iterator[tuple[Any, int]]:
    try:
        records = decode_records(part.data)
    except ValueError:
        return
    wanted = records[part.skip : part.end - part.start]
    for position, record in enumerate(wanted, part.start + part.skip + 1):
        if record is not None:
            yield record, position


def _segments(run: StoredItems) -> list[SegmentName]:
    return [name for text in run.names(Area.METRICS) if (name := parse_name(text)) is not None]


def _parse_start(line: bytes) -> int | None:
    """The position that the first line of a tail says; None where it is a record itself."""
    first = decode_line(line)
    start = first.get(_START) if isinstance(first, dict) and len(first) == 1 else None
    return start if isinstance(start, int) and 0 <= start < 10**12 else None
