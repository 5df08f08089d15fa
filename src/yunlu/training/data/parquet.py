"""Parquet files, column by column, within the limits on foreign files."""

from __future__ import annotations

import io
from importlib import import_module
from typing import TYPE_CHECKING, Any

from yunlu.core.limits import FileLimits, check_shape, check_unpacked
from yunlu.core.settings import read_limits
from yunlu.training.data.arrow import columns_of_arrow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from yunlu.training.data.table import Column

_LARGE_CHUNK_BYTES, _ROWS_AT_ONCE = 512 << 20, 1 << 10
"""An Arrow dictionary ends at 2 GiB: larger chunks of text are read plainly, a few rows at a time."""
_WIDTHS = {
    "BOOLEAN": 1,
    "INT32": 4,
    "FLOAT": 4,
    "INT64": 8,
    "DOUBLE": 8,
    "INT96": 12,
    "BYTE_ARRAY": 8,  # the reference of a row to its text
}
_RUN_LENGTH_FACTOR = 4
"""Runs and dictionaries are what the format is for: an honest one-hot table of a million rows packs 400
to 1 beyond what the codec of its pages does."""


def read_columns(open_file: Callable[..., Any], content: bytes, where: str) -> dict[str, Column]:
    """The columns of a file, unless it claims, or turns out, to hold more than the limits allow.

    One column after the other: of a file whose footer lies about its sizes, one page (of 2 GiB, the
    format's own limit) is unpacked before its size is known, not one for each column.
    """
    import pyarrow as pa  # noqa: PLC0415 - heavy, and only these files need it

    limits = read_limits()
    footer = open_file(io.BytesIO(content)).metadata
    _check_footer(footer, len(content), where, limits)
    columns: dict[str, Column] = {}
    held = 0
    # A dictionary stays one: a text of a megabyte that a million rows refer to is held once.
    shared = _text_paths(footer, large=False)
    large = {path.partition(".")[0] for path in _text_paths(footer, large=True)}
    file = open_file(io.BytesIO(content), read_dictionary=shared)
    for field in file.schema_arrow:
        pieces: list[Any] = []
        for batch in _batches(file, field.name, is_plain=field.name.partition(".")[0] in large):
            column = batch.select([field.name])  # asked for "a", it also gives the column "a.b"
            held += _python_bytes(column.column(0))
            check_unpacked(where, held, len(content), limits, factor=_RUN_LENGTH_FACTOR)
            pieces.append(column)
        columns |= columns_of_arrow(pa.Table.from_batches(pieces, pa.schema([field])))
    return columns


def _batches(file: Any, name: str, *, is_plain: bool) -> Iterator[Any]:
    """A column, by row groups: the builder of a dictionary goes through all of it for each batch."""
    if is_plain:
        yield from file.iter_batches(_ROWS_AT_ONCE, columns=[name], use_threads=False)
        return
    for group in range(file.metadata.num_row_groups):
        table = file.read_row_group(group, columns=[name], use_threads=False)
        yield from table.to_batches()


def _check_footer(footer: Any, packed: int, where: str, limits: FileLimits) -> None:
    check_shape(where, limits=limits, rows=footer.num_rows, columns=footer.num_columns)
    sizes = (sum(_chunk_sizes(footer, column)) for column in range(footer.num_columns))
    check_unpacked(where, sum(sizes), packed, limits)
    # The width of plain values, times the rows: no page has to be read to know it.
    width = sum(_width(footer.schema.column(column)) for column in range(footer.num_columns))
    check_unpacked(where, width * footer.num_rows, packed, limits, factor=_RUN_LENGTH_FACTOR)


def _width(leaf: Any) -> int:
    if leaf.max_repetition_level:
        return 0
    return (
        leaf.length if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS[leaf.physical_type]
    )


def _chunk_sizes(footer: Any, column: int) -> list[int]:
    groups = range(footer.num_row_groups)
    return [footer.row_group(group).column(column).total_uncompressed_size for group in groups]


def _text_paths(footer: Any, *, large: bool) -> list[str]:
    """Columns of text with, or without, a chunk that is too large for a dictionary."""
    return [
        footer.schema.column(column).path
        for column in range(footer.num_columns)
        if footer.schema.column(column).physical_type == "BYTE_ARRAY"
        and (max(_chunk_sizes(footer, column), default=0) > _LARGE_CHUNK_BYTES) is large
    ]


def _python_bytes(array: Any) -> int:
    """Bytes that the values take once they are columns; a text is shared by rows that repeat it."""
    import pyarrow as pa  # noqa: PLC0415 - heavy, and only these files need it

    kind = array.type
    if pa.types.is_dictionary(kind):
        return array.dictionary.nbytes + 8 * len(array)
    if pa.types.is_struct(kind):
        return 64 * len(array) + sum(map(_nested_bytes, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return 64 * len(array) + _nested_bytes(array.flatten())
    return array.nbytes


def _nested_bytes(array: Any) -> int:
    """As ``_python_bytes``, of values inside others: there each is a Python value of its own."""
    import pyarrow as pa  # noqa: PLC0415 - heavy, and only these files need it

    if pa.types.is_dictionary(array.type) and _is_text(array.dictionary.type):
        compute: Any = import_module("pyarrow.compute")  # its functions are made at run time
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        return (compute.sum(lengths).as_py() or 0) + 50 * len(array)
    return max(_python_bytes(array), 8 * len(array))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa  # noqa: PLC0415 - heavy, and only these files need it

    kinds = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
    return any(kind.equals(text) for text in kinds)
