"""Folders of images or audio: one folder per label, or a sheet with file names."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from yunlu.core.errors import DataError
from yunlu.training.data.readers import Columns, read_csv, read_json, read_tsv
from yunlu.training.data.table import AudioRef, DataTable, FileRef, ImageRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.data.files import Location
    from yunlu.training.data.table import Column

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
SOUNDS = (".wav", ".flac", ".ogg", ".mp3")
# A sheet beside the files, and what its second column holds.
_SHEETS = {"labels": "label", "transcripts": "text", "metadata": "label"}


def media_of(files: Sequence[Location]) -> str | None:
    """Kind of the files: ``images`` or ``wav``; None if neither, an error if both."""
    has_images = any(file.suffix in IMAGES for file in files)
    has_sounds = any(file.suffix in SOUNDS for file in files)
    if has_images and has_sounds:
        raise DataError(
            f"found both images ({_first(files, IMAGES)}) and sounds ({_first(files, SOUNDS)})",
            hint="set data.format to images or wav, or keep them in folders of their own",
        )
    return "images" if has_images else "wav" if has_sounds else None


def read_media(folder: Location, files: Sequence[Location], kind: str) -> DataTable:
    """``image`` or ``audio`` references, beside ``label`` (the folder's name) or a sheet's columns."""
    column, suffixes = ("image", IMAGES) if kind == "images" else ("audio", SOUNDS)
    media = {folder.relative(file): file for file in files if file.suffix in suffixes}
    if not media:
        raise DataError(f"{folder.url} has no {column} files", hint=f"known: {' '.join(suffixes)}")
    sheet = _find_sheet(folder, files)
    columns = _by_sheet(sheet, media, column) if sheet else _by_folder(folder, media, column)
    return DataTable(columns, folder.fingerprint())


def _find_sheet(folder: Location, files: Sequence[Location]) -> Location | None:
    sheets = [
        file
        for file in files
        if "/" not in folder.relative(file)
        and PurePosixPath(file.name).stem in _SHEETS
        and file.suffix in {".csv", ".tsv", ".jsonl"}
    ]
    if len(sheets) > 1:
        names = ", ".join(file.name for file in sheets)
        raise DataError(f"{folder.url} has several sheets: {names}", hint="keep one of them")
    return sheets[0] if sheets else None


def _by_folder(folder: Location, media: dict[str, Location], column: str) -> dict[str, Column]:
    bare = [name for name in media if "/" not in name]
    if bare:
        sheet = "labels.csv (file,label)" if column == "image" else "transcripts.tsv (file, text)"
        raise DataError(
            f"{folder.url}: {bare[0]} has no label: it is not in a folder named after one",
            hint=f"one folder per label ({folder.name}/LABEL/{bare[0]}), or a sheet {sheet}",
        )
    return {
        column: [_reference(file, column) for file in media.values()],
        "label": [name.split("/", 1)[0] for name in media],
    }


def _by_sheet(sheet: Location, media: dict[str, Location], column: str) -> dict[str, Column]:
    cells = _read_sheet(sheet, media)
    key = max(cells, key=lambda name: sum(str(value) in media for value in cells[name]))
    rest = [name for name in cells if name != key]
    if not rest:
        raise DataError(f"{sheet.url} names files only; expected a second column")
    names = [str(value) for value in cells[key]]
    for row, name in enumerate(names, start=1):
        if name not in media:
            raise DataError(f"{sheet.url}, row {row}: there is no file {name!r} in this folder")
    columns: dict[str, Column] = {column: [_reference(media[name], column) for name in names]}
    # With two columns the second one is unambiguous, whatever its header.
    second = _SHEETS[PurePosixPath(sheet.name).stem]
    titles = {rest[0]: "text" if rest[0].lower() == "text" else second} if len(rest) == 1 else {}
    return columns | {titles.get(name, name): cells[name] for name in rest}


def _read_sheet(sheet: Location, media: dict[str, Location]) -> Columns:
    if sheet.suffix == ".jsonl":
        return read_json(sheet)
    read = read_tsv if sheet.suffix == ".tsv" else read_csv
    cells = read(sheet)
    # A first row that names one of the files is not a header.
    return read(sheet, header=False) if any(name in media for name in cells) else cells


def _reference(file: Location, column: str) -> FileRef:
    kind = ImageRef if column == "image" else AudioRef
    return kind(file.url, options=tuple(file.options.items()))


def _first(files: Sequence[Location], suffixes: tuple[str, ...]) -> str:
    return next(file.name for file in files if file.suffix in suffixes)
