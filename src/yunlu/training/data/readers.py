"""Readers of single files: bytes to columns. None of them executes what it reads."""

from __future__ import annotations

import csv
import io
import math
import re
import sys
import zipfile
from collections import Counter
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import DataError
from yunlu.core.limits import (
    FileLimits,
    check_archive,
    check_memory,
    check_shape,
    check_unpacked,
    decode_json,
    read_limits,
)
from yunlu.training.data.table import AudioRef, ImageRef, as_column, parse_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from yunlu.training.data.files import Location
    from yunlu.training.data.table import Column

_SOUND_MAGIC = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb")
_SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")


def columns_of_arrow(table: Any) -> dict[str, Column]:
    """Numbers become arrays (null is ``NaN``); everything else lists of Python values.

    A struct of ``bytes`` and ``path``, as Hugging Face stores media, becomes a file reference.
    """
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(column: Any) -> Column:
    import pyarrow as pa  # noqa: PLC0415 - heavy, and only these files need it

    kind = column.type
    is_whole_boolean = pa.types.is_boolean(kind) and not column.null_count
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or is_whole_boolean:
        return column.to_numpy()
    if pa.types.is_dictionary(kind):
        return [value for chunk in column.chunks for value in _shared(chunk)]
    values: list[Any] = column.to_pylist()
    if pa.types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}:
        return [_media(value) for value in values]
    return values


def _shared(chunk: Any) -> list[Any]:
    """Values of a dictionary: rows that repeat one share it."""
    values: list[Any] = chunk.dictionary.to_pylist()
    return [None if row is None else values[row] for row in chunk.indices.to_pylist()]


def _media(value: dict[str, Any] | None) -> ImageRef | AudioRef | None:
    if value is None:
        return None
    data, path = value["bytes"], value["path"] or "(inline)"
    is_sound = path.lower().endswith(_SOUND_SUFFIXES) or (data or b"").startswith(_SOUND_MAGIC)
    # A WebP image is a RIFF file too.
    if is_sound and (data or b"")[8:12] != b"WEBP":
        return AudioRef(path, data)
    return ImageRef(path, data)


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


Columns = dict[str, "Column"]
_NEARLY_ALL = 0.95


def read_lines(file: Location) -> Columns:
    """One sample per non-empty line: ``text``, or ``label`` and ``text`` of ``label<TAB>sentence``.

    It is the second when at least 95 % of the lines have exactly one tab with something on both
    sides; a line that then has not is an error rather than a sample with a wrong label.
    """
    text = decode(file)
    _check_values(file, text, text.count("\n"))
    lines = [
        (number, line.strip("\r\n"))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    pairs = [(number, line.split("\t")) for number, line in lines]
    wrong = [number for number, pair in pairs if len(pair) != 2 or not all(map(str.strip, pair))]
    if not lines or len(wrong) > (1 - _NEARLY_ALL) * len(lines):
        return {"text": [line for _, line in lines]}
    if wrong:
        raise DataError(
            f"{file.url}, line {wrong[0]}: expected label<TAB>sentence, as on the other lines "
            f"({len(wrong)} of {len(lines)} differ)",
            hint="give the line one tab, or remove it",
        )
    return {
        "label": [pair[0].strip() for _, pair in pairs],
        "text": [pair[1].strip() for _, pair in pairs],
    }


def read_csv(file: Location, *, header: bool | None = None) -> Columns:
    """Comma-, semicolon- or tab-separated values, whichever the first line has most of.

    ``header`` says whether the first row names the columns; ``None`` finds out (``has_header``).
    """
    text = decode(file)
    first = text.split("\n", 1)[0]
    delimiter = max((",", ";", "\t"), key=first.count)
    return _columns_of_rows(_rows(text, delimiter, file), file, header=header)


def read_tsv(file: Location, *, header: bool | None = None) -> Columns:
    """Tab-separated values; quotes are ordinary characters where they do not close."""
    text = decode(file)
    try:
        rows = _rows(text, "\t", file)
    except DataError:
        rows = _rows(text, "\t", file, quoting=csv.QUOTE_NONE)
    return _columns_of_rows(rows, file, header=header)


def read_json(file: Location) -> Columns:
    """JSON lines, or one list, of objects; a key that an object lacks is ``None`` (``NaN``)."""
    text = decode(file)
    _check_values(file, text, sum(map(text.count, ",[{")))
    if text.lstrip().startswith("["):
        records: list[Any] = [(number, item) for number, item in enumerate(_json(text, file), 1)]
        unit = "item"
    else:
        lines = enumerate(text.split("\n"), start=1)
        records = [(n, _json(line, file, line_number=n)) for n, line in lines if line.strip()]
        unit = "line"
    names: dict[str, None] = {}
    for number, record in records:
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise DataError(f"{file.url}, {unit} {number}: expected a JSON object, found {kind}")
        names.update(dict.fromkeys(record))
    # A key of its own in each record would make as many columns, each as long as the table.
    check_shape(file.url, limits=read_limits(), columns=len(names))
    check_memory(file.url, 8 * len(names) * len(records), read_limits())
    return {name: as_column([record.get(name) for _, record in records]) for name in names}


def read_parquet(file: Location) -> Columns:
    """Parquet; nested lists stay lists."""
    import pyarrow as pa  # noqa: PLC0415 - heavy, and only these files need it
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        return read_columns(pq.ParquetFile, file.read(), file.url)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file.url} is not a complete Parquet file: {error}") from error


def read_numpy(file: Location) -> Columns:
    """``.npz``: a column per array. ``.npy``: a column per field, or ``x`` for the whole array.

    Arrays of Python objects are pickles, and refused.
    """
    content = file.read()
    if not content.startswith((b"\x93NUMPY", b"PK")):
        raise DataError(f"{file.url} is neither an .npy nor an .npz file", hint="check data.format")
    try:
        _check_arrays(file, content)
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            names = loaded.dtype.names
            arrays = {name: loaded[name] for name in names} if names else {"x": loaded}
        else:
            arrays = {name: loaded[name] for name in loaded.files}
    except DataError:
        raise
    except Exception as error:  # zipfile, zlib, struct and numpy each raise their own
        hint = "save numbers or fixed-length strings; arrays of objects are pickles, which can run code"
        raise DataError(f"{file.url} cannot be read as NumPy arrays: {error}", hint=hint) from error
    # A member of an .npz that is not an array is returned as bytes.
    foreign = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
    if foreign:
        raise DataError(f"{file.url}: {', '.join(foreign)} is not a NumPy array")
    flat = [name for name, array in arrays.items() if array.ndim == 0]
    if flat:
        raise DataError(f"{file.url}: {', '.join(flat)} is a single value, not one per sample")
    return {name: _array_column(array) for name, array in arrays.items()}


READERS: dict[str, Callable[[Location], Columns]] = {
    "text": read_lines,
    "csv": read_csv,
    "tsv": read_tsv,
    "jsonl": read_json,
    "parquet": read_parquet,
    "numpy": read_numpy,
}

SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".npy": "numpy",
    ".npz": "numpy",
}
PICKLED = (".pkl", ".pickle", ".pt", ".pth", ".joblib", ".bin", ".ckpt")


def format_of(file: Location) -> str:
    """How to read a file, by its suffix, else by its first bytes."""
    if file.suffix in SUFFIXES:
        return SUFFIXES[file.suffix]
    head = file.read(8)
    if file.suffix in PICKLED or re.match(rb"\x80[\x02-\x05]", head):
        raise DataError(
            f"{file.url} is a pickle, which can run code when it is opened; Yunlu reads none",
            hint="convert it where you trust it: to .parquet, .jsonl, .csv or .npz",
        )
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"\x93NUMPY"):
        return "numpy"
    if head.lstrip()[:1] in {b"{", b"["}:
        return "jsonl"
    known = ", ".join(SUFFIXES)
    raise DataError(
        f"cannot tell the format of {file.url} by its name or its first bytes",
        hint=f"set data.format ({', '.join(READERS)}), or use one of the suffixes {known}",
    )


def decode(file: Location) -> str:
    """The file's text: UTF-8, with or without a byte-order mark."""
    try:
        return file.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.url} is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})",
            hint="convert it, such as: iconv -f GB18030 -t UTF-8",
        ) from error


def _rows(
    text: str, delimiter: str, file: Location, *, quoting: Any = csv.QUOTE_MINIMAL
) -> list[list[str]]:
    csv.field_size_limit((1 << 31) - 1)  # the default refuses texts above 128 KiB
    _check_values(file, text, text.count("\n") + text.count(delimiter))
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, quoting=quoting, strict=True)
    rows: list[list[str]] = []
    try:
        for row in reader:
            if not row or (len(row) == 1 and not row[0].strip()):
                continue
            if rows and len(row) != len(rows[0]):
                raise DataError(
                    f"{file.url}, line {reader.line_num}: {len(row)} cells, "
                    f"where the first row has {len(rows[0])}"
                )
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{file.url}, line {reader.line_num}: {error}") from error
    return rows


def _columns_of_rows(rows: list[list[str]], file: Location, *, header: bool | None) -> Columns:
    if not rows:
        return {}
    check_shape(file.url, limits=read_limits(), rows=len(rows), columns=len(rows[0]))
    columns = [list(cells) for cells in zip(*rows, strict=True)]
    if has_header(columns) if header is None else header:
        names = [cells[0].strip() for cells in columns]
        columns = [cells[1:] for cells in columns]
        if not columns[0]:
            raise DataError(f"{file.url} has a header and no rows")
        if not names[0] and columns[0] == [str(row) for row in range(len(columns[0]))]:
            names, columns = names[1:], columns[1:]  # the row numbers that pandas writes
        names = [name or f"column_{number}" for number, name in enumerate(names, start=1)]
        _check_distinct(names, file)
    else:
        names = _names_without_header(columns)
    return {name: parse_cells(cells) for name, cells in zip(names, columns, strict=True)}


def has_header(columns: Sequence[Sequence[str]]) -> bool:
    """Whether the first row names the columns.

    It does when none of its cells is a number or occurs again in its own column, as a label would,
    and they are distinct and filled, or one of them stands above numbers.
    """
    first = [cells[0].strip() for cells in columns]
    if any(isinstance(parse_cells([cell]), np.ndarray) for cell in first):
        return False
    if any(name and cells[0] in set(cells[1:]) for name, cells in zip(first, columns, strict=True)):
        return False
    if all(first) and len(set(first)) == len(first):
        return True
    return any(
        name and len(cells) > 1 and isinstance(parse_cells(cells[1:]), np.ndarray)
        for name, cells in zip(first, columns, strict=True)
    )


def _check_distinct(names: Sequence[str], file: Location) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{file.url} has more than one column named {', '.join(map(repr, twice))}",
            hint="give each column its own name in the first line",
        )


def _names_without_header(columns: list[list[str]]) -> list[str]:
    """Names of columns without a header; a column of words beside one of sentences is the label."""
    names = [f"column_{number}" for number in range(1, len(columns) + 1)]
    if len(columns) != 2:
        return names
    spaced = [sum(" " in cell.strip() for cell in cells) / len(cells) for cells in columns]
    if spaced[0] <= 1 - _NEARLY_ALL and spaced[1] >= 0.5:
        return ["label", "text"]
    if spaced[1] <= 1 - _NEARLY_ALL and spaced[0] >= 0.5:
        return ["text", "label"]
    return names


def _json(text: str, file: Location, *, line_number: int = 0) -> Any:
    try:
        # Data scraped from the net has halves of emoji; one of them should not end a training.
        return decode_json(text, replace_lone=True)
    except ValueError as error:
        where = f", line {line_number}" if line_number else ""
        hint = "one JSON object per line, or one list of objects"
        raise DataError(f"{file.url}{where} is not valid JSON: {error}", hint=hint) from error


_BYTES_PER_VALUE = 100
"""A Python text, and its place in a list: what a cell of two letters takes in memory."""


def _check_values(file: Location, text: str, values: int) -> None:
    """Refuse, before it is taken apart, a text whose values would not fit in memory."""
    check_memory(file.url, sys.getsizeof(text) + _BYTES_PER_VALUE * values, read_limits())


def _check_arrays(file: Location, content: bytes) -> None:
    """Refuse arrays that claim more than the file can hold, before room is made for them."""
    limits = read_limits()
    if content.startswith(b"\x93NUMPY"):
        _check_array(file.url, io.BytesIO(content), len(content))
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_archive(archive, file.url, limits)
        for member in archive.infolist():
            with archive.open(member) as stream:
                is_array = stream.read(6) == b"\x93NUMPY"
                stream.seek(0)
                if is_array:
                    _check_array(f"{file.url}: {member.filename}", stream, member.file_size)


def _check_array(where: str, stream: IO[bytes], size: int) -> None:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0
    shape, _, dtype = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(stream)
    count, size = math.prod(shape), size - stream.tell()
    check_shape(where, limits=read_limits(), rows=shape[0] if shape else 0)
    if not dtype.hasobject and count * dtype.itemsize > size:
        raise DataError(
            f"{where} claims an array of {count * dtype.itemsize:,} bytes, but holds {size:,}",
            hint="the file is cut short or damaged: write it again",
        )
    # Texts become Python values, of up to 4 bytes a letter.
    texts = 4 * count * dtype.itemsize if dtype.kind in "SU" else 0
    check_memory(where, texts + (_BYTES_PER_VALUE * count if texts else 0), read_limits())


def _array_column(array: np.ndarray) -> Column:
    if array.dtype.kind in "US":
        kind = np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
        return kind.tolist()
    return array
