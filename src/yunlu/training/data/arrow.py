"""Arrow tables, from Parquet and Hugging Face data sets, as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.training.data.table import AudioRef, ImageRef

if TYPE_CHECKING:
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
