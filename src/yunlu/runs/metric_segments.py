"""Sealed segments of the metrics: Arrow IPC files, compressed, one row per record.

pandas, polars, DuckDB and pyarrow read them as they are. A worker writes them with pyarrow, which its extra
installs anyway; the core reads them with nanoarrow, a hundredth of its size.
"""

from __future__ import annotations

import io
import math
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import missing_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_WHOLE = frozenset(
    {
        *("step", "attempt", "samples", "memory_bytes", "tokens", "padding"),
        *("generation", "noise_parts"),
    }
)
_SECONDS = frozenset(
    {
        *("data_s", "compute_s", "communication_s", "evaluate_s", "checkpoint_s"),
        *("exchange_s", "compression_error"),
    }
)
"""Measured to fewer digits than 32 bits hold; the other numbers are stored as they are."""
_INSTANT = "at"
"""Stored in microseconds, as a time."""
_PER_SECOND = 1_000_000
_MOST_WHOLE = 1 << 63

_MAGIC = b"ARROW1\0\0"
_MOST_BYTES = 64 << 20
"""Of a segment, packed or unpacked: ours have less than four."""
_NAME = re.compile(r"(\d{12})-(\d{12})\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentName:
    """Which records of the log a segment has."""

    start: int
    """Position of the first."""
    end: int
    """Position after the last."""

    def __str__(self) -> str:
        return f"{self.start:012d}-{self.end:012d}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentColumn:
    """One named number of all records of a segment."""

    values: memoryview
    """Whole numbers of 64 bits, or floats of 32 or 64."""
    is_present: memoryview | None
    """A bit per record, the lowest first; None where every record has the number."""
    per_unit: int
    """What the values are to be divided by."""


def parse_name(name: str) -> SegmentName | None:
    """None for a file that is no segment."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) >= int(match[2]):
        return None
    return SegmentName(start=int(match[1]), end=int(match[2]))


def encode_segment(records: Sequence[Mapping[str, Any] | None]) -> bytes:
    """A segment with these records; None for a line that was no record, so that positions stay."""
    try:
        import pyarrow as pa  # noqa: PLC0415 (slow to import; workers alone write)
        from pyarrow import ipc  # noqa: PLC0415
    except ImportError as error:
        raise missing_part("pyarrow", "train", "Packing metrics") from error

    names = dict.fromkeys(name for record in records if record for name in record)
    columns: dict[str, Any] = {}
    for name in names:
        values = [None if record is None else _as_stored(name, record) for record in records]
        if any(value is not None for value in values):
            columns[name] = pa.array(values, type=_type_of(name, pa))
    if not columns:
        columns["step"] = pa.nulls(len(records), pa.int64())
    table = pa.table(columns)
    target = io.BytesIO()
    options = ipc.IpcWriteOptions(compression="zstd")
    with ipc.new_file(target, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=max(len(records), 1))
    return target.getvalue()


def _type_of(name: str, pa: Any) -> Any:
    if name == _INSTANT:
        return pa.timestamp("us", tz="UTC")
    if name in _WHOLE:
        return pa.int64()
    return pa.float32() if name in _SECONDS else pa.float64()


def _as_stored(name: str, record: Mapping[str, Any]) -> float | None:
    """A number that its column can hold, else None."""
    value = record.get(name)
    if not isinstance(value, (int, float)):
        return None
    try:
        stored = float(value)
    except OverflowError:
        return None
    if name != _INSTANT and name not in _WHOLE:
        return stored
    if not math.isfinite(stored):
        return None
    whole = round(stored * _PER_SECOND) if name == _INSTANT else int(value)
    return whole if -_MOST_WHOLE < whole < _MOST_WHOLE else None


def decode_columns(data: bytes) -> tuple[int, dict[str, SegmentColumn]]:
    """Number of records, and their numbers by name; ``ValueError`` for what is no segment."""
    from nanoarrow import ArrayStream  # noqa: PLC0415 (only where metrics are read)
    from nanoarrow.ipc import InputStream  # noqa: PLC0415

    _check_sizes(data)
    # An IPC file is a stream behind eight bytes.
    source = io.BytesIO(data)
    source.seek(len(_MAGIC))
    columns: dict[str, SegmentColumn] = {}
    length = 0
    try:
        with InputStream.from_readable(source) as stream:
            for batch in ArrayStream(stream):
                length = len(batch)
                for index, field in enumerate(batch.schema.fields):
                    column = _read_column(batch.child(index), length)
                    if column is not None:
                        columns[field.name] = column
    except (RuntimeError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    return length, columns


def _read_column(array: Any, length: int) -> SegmentColumn | None:
    """None for a column of another type."""
    kind = array.schema.type.name
    formats = {"INT64": "q", "TIMESTAMP": "q", "DOUBLE": "d", "FLOAT": "f"}
    if kind not in formats or array.offset or len(array) != length:
        return None
    is_present, values = (memoryview(buffer).cast("B") for buffer in array.buffers)
    size = struct.calcsize(formats[kind])
    has_gaps = is_present.nbytes > 0  # left out where every value is there
    if values.nbytes < length * size or (has_gaps and is_present.nbytes * 8 < length):
        return None
    return SegmentColumn(
        values=values[: length * size].cast(formats[kind]),
        is_present=is_present if has_gaps else None,
        per_unit=_PER_SECOND if kind == "TIMESTAMP" else 1,
    )


def decode_records(data: bytes) -> list[dict[str, Any] | None]:
    """The records of a segment; None where a line was no record."""
    length, columns = decode_columns(data)
    records: list[dict[str, Any]] = [{} for _ in range(length)]
    for name, column in columns.items():
        values: list[Any] = column.values.tolist()
        if column.per_unit != 1:
            values = [value / column.per_unit for value in values]
        bits = column.is_present
        for index, value in enumerate(values):
            if bits is None or bits[index >> 3] >> (index & 7) & 1:
                records[index][name] = value
    return [record or None for record in records]


def _check_sizes(data: bytes) -> None:
    """Refuse what would unpack to more than a segment can be: the reader believes what is written there."""
    if not data.startswith(_MAGIC) or len(data) > _MOST_BYTES:
        raise ValueError("it is no segment")
    try:
        unpacked = sum(_unpacked_bytes(data))
    except (struct.error, IndexError) as error:
        raise ValueError("it is damaged") from error
    if not 0 <= unpacked <= _MOST_BYTES:
        raise ValueError(f"it unpacks to {unpacked} bytes, more than a segment can have")


_SCHEMA, _RECORDS = 1, 3
_MOST_MESSAGES = 16


def _unpacked_bytes(data: bytes) -> Iterator[int]:
    """Bytes of each buffer once unpacked (Arrow's columnar format, "Encapsulated message format")."""
    at = len(_MAGIC)
    for _ in range(_MOST_MESSAGES):
        marker, length = struct.unpack_from("<Ii", data, at)
        if marker != 0xFFFFFFFF or length < 0:
            raise IndexError
        if length == 0:
            return
        message = data[at + 8 : at + 8 + length]
        body = at + 8 + length
        table = struct.unpack_from("<I", message)[0]
        kind = _field(message, table, 1, "<B")
        if kind == _RECORDS:
            yield from _buffer_bytes(data, message, table, body)
        elif kind != _SCHEMA:
            raise IndexError
        at = body + _field(message, table, 3, "<q")
        if at < body:
            raise IndexError
    raise IndexError


def _buffer_bytes(data: bytes, message: bytes, table: int, body: int) -> Iterator[int]:
    header = _target(message, table, 2)
    vector = _target(message, header, 2)
    is_packed = _place(message, header, 3) is not None
    for index in range(struct.unpack_from("<I", message, vector)[0]):
        offset, length = struct.unpack_from("<qq", message, vector + 4 + 16 * index)
        if offset < 0 or length < 0:
            raise IndexError
        unpacked = struct.unpack_from("<q", data, body + offset)[0] if is_packed and length else -1
        if unpacked < -1:
            raise IndexError
        yield length if unpacked == -1 else unpacked


def _place(message: bytes, table: int, index: int) -> int | None:
    """Where a field of a flatbuffer's table stands; None where it is left out."""
    layout = table - struct.unpack_from("<i", message, table)[0]
    if layout < 0 or table < 0:
        raise IndexError
    if 4 + 2 * index >= struct.unpack_from("<H", message, layout)[0]:
        return None
    offset = struct.unpack_from("<H", message, layout + 4 + 2 * index)[0]
    return table + offset if offset else None


def _field(message: bytes, table: int, index: int, form: str) -> int:
    place = _place(message, table, index)
    return 0 if place is None else struct.unpack_from(form, message, place)[0]


def _target(message: bytes, table: int, index: int) -> int:
    place = _place(message, table, index)
    if place is None:
        raise IndexError
    return place + struct.unpack_from("<I", message, place)[0]
