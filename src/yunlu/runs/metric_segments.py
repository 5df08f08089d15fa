"""Sealed segments of the metrics: Arrow IPC files, compressed, one row per record.

pandas, polars and pyarrow read them as they are. A worker writes them with pyarrow, which its extra installs
anyway; the core reads them here, and needs a decompressor alone.
"""

from __future__ import annotations

import io
import math
import re
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.errors import missing_part

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor, ZstdError
else:
    from backports.zstd import ZstdDecompressor, ZstdError

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
_MOST_ROWS = 1 << 20
"""Ours have 4096 records."""
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

    values: memoryview[int] | memoryview[float]
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
    if not data.startswith(_MAGIC) or len(data) > _MOST_BYTES:
        raise ValueError("it is no segment")
    try:
        return _decode(data)
    except (struct.error, IndexError, UnicodeDecodeError, ZstdError) as error:
        raise ValueError(f"it is damaged: {error}") from error


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


# What follows reads "Arrow Columnar Format, Serialization and Interprocess Communication" as far as a segment
# goes: one schema and one batch of numbers. The small libraries trust what is written in a file, down to its
# offsets, and crash; a run may come from somebody else.

_SCHEMA, _RECORDS = 1, 3
_INTEGER, _FLOAT, _TIMESTAMP = 2, 3, 10
_ZSTD = 1
_MOST_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class _FlatTable:
    """A table of a flatbuffer: its fields by number, where they are not left out."""

    message: bytes
    at: int

    def field_offset(self, index: int) -> int | None:
        """Where a field stands."""
        layout = self.at - _unpack("<i", self.message, self.at)
        if 4 + 2 * index >= _unpack("<H", self.message, layout):
            return None
        offset = _unpack("<H", self.message, layout + 4 + 2 * index)
        return self.at + offset if offset else None

    def number(self, index: int, form: str) -> int:
        """A number; 0 where it is left out."""
        offset = self.field_offset(index)
        return 0 if offset is None else _unpack(form, self.message, offset)

    def target(self, index: int) -> int:
        """Where the table, text or vector begins that a field refers to."""
        offset = self.field_offset(index)
        if offset is None:
            raise IndexError("a field is missing")
        return offset + _unpack("<I", self.message, offset)

    def table(self, index: int) -> _FlatTable:
        """A table inside this one."""
        return _FlatTable(self.message, self.target(index))

    def tables(self, index: int) -> Iterator[_FlatTable]:
        """A vector of tables."""
        start = self.target(index)
        for number in range(min(_unpack("<I", self.message, start), _MOST_COLUMNS)):
            offset = start + 4 + 4 * number
            yield _FlatTable(self.message, offset + _unpack("<I", self.message, offset))

    def text(self, index: int) -> str:
        """A text."""
        start = self.target(index)
        return self.message[start + 4 : start + 4 + _unpack("<I", self.message, start)].decode()

    def pairs(self, index: int) -> list[tuple[int, int]]:
        """A vector of structures of two long numbers."""
        start = self.target(index)
        many = min(_unpack("<I", self.message, start), 2 * _MOST_COLUMNS)
        return [struct.unpack_from("<qq", self.message, start + 4 + 16 * n) for n in range(many)]


def _unpack(form: str, message: bytes, at: int) -> int:
    if at < 0:
        raise IndexError("an offset leads out of the file")
    return struct.unpack_from(form, message, at)[0]


def _decode(data: bytes) -> tuple[int, dict[str, SegmentColumn]]:
    schema, body = _read_message(data, len(_MAGIC))
    records, body = _read_message(data, body)
    if schema.number(1, "<B") != _SCHEMA or records.number(1, "<B") != _RECORDS:
        raise IndexError("it has no records")
    batch = records.table(2)
    length = batch.number(0, "<q")
    buffers = batch.pairs(2)
    codec = None if batch.field_offset(3) is None else batch.table(3).number(0, "<b")
    if not 0 <= length <= _MOST_ROWS or codec not in {None, _ZSTD}:
        raise IndexError("it has too many records, or is packed in another way")
    columns: dict[str, SegmentColumn] = {}
    fields = list(schema.table(2).tables(1))
    for index, field in enumerate(fields):
        form, per_unit = _format_of(field)
        size = struct.calcsize(form)
        validity, values = (
            _read_buffer(data, body, extent, most=most, is_packed=codec is not None)
            for extent, most in zip(
                buffers[2 * index : 2 * index + 2],
                (length // 8 + 64, length * size + 64),
                strict=True,
            )
        )
        if len(values) < length * size or 0 < len(validity) * 8 < length:
            raise IndexError("a column is too short")
        columns[field.text(0)] = SegmentColumn(
            values=memoryview(values)[: length * size].cast(form),
            is_present=memoryview(validity) if validity else None,
            per_unit=per_unit,
        )
    return length, columns


def _read_message(data: bytes, at: int) -> tuple[_FlatTable, int]:
    """The root of a message's flatbuffer, and where its body begins; the schema has none."""
    marker, length = struct.unpack_from("<II", data, at)
    if marker != 0xFFFFFFFF or length > len(data):
        raise IndexError("a message is torn")
    message = data[at + 8 : at + 8 + length]
    return _FlatTable(message, _unpack("<I", message, 0)), at + 8 + length


def _format_of(field: _FlatTable) -> tuple[Literal["q", "d", "f"], int]:
    """Format of a column's values, and what they are to be divided by."""
    kind, about = field.number(2, "<B"), field.table(3)
    if kind == _INTEGER and about.number(0, "<i") == 64:
        return "q", 1
    if kind == _FLOAT and (precision := about.number(0, "<h")) in {1, 2}:
        return "f" if precision == 1 else "d", 1
    if kind == _TIMESTAMP:
        return "q", _PER_SECOND
    raise IndexError("a column has another type")


def _read_buffer(
    data: bytes, body: int, extent: tuple[int, int], *, most: int, is_packed: bool
) -> bytes:
    """A buffer, unpacked to at most so many bytes."""
    offset, length = extent
    if min(offset, length) < 0 or body + offset + length > len(data):
        raise IndexError("a buffer leads out of the file")
    content = data[body + offset : body + offset + length]
    if not length or not is_packed:
        return content
    unpacked = _unpack("<q", content, 0)
    if unpacked == -1:  # would not have become smaller
        return content[8:]
    if not 0 <= unpacked <= most:
        raise IndexError(f"a buffer unpacks to {unpacked} bytes, more than its records need")
    return ZstdDecompressor().decompress(content[8:], max_length=unpacked)
