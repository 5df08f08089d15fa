"""Loading of data sources: find, read folders and files, split; data sets of other packages."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from yunlu.core.errors import DataError, YunluError, did_you_mean, missing_part
from yunlu.core.limits import check_memory, read_limits
from yunlu.training.data.files import Location, locate
from yunlu.training.data.readers import (
    READERS,
    SUFFIXES,
    Columns,
    columns_of_arrow,
    decode,
    format_of,
    read_csv,
    read_json,
    read_tsv,
)
from yunlu.training.data.synthetic import generate
from yunlu.training.data.table import AudioRef, Column, DataTable, FileRef, ImageRef
from yunlu.training.models.hf import is_commit, split_revision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.spec.job import DataSpec


SKLEARN = ("digits", "iris", "wine", "breast_cancer", "diabetes")
_ASK_S = 20.0
HF_MARKS = ("dataset_dict.json", "state.json")
"""Files that identify a folder written by ``save_to_disk``."""
# Split names in use, and the split they mean.
PARTS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


def load_sklearn(name: str) -> DataTable:
    """A toy data set of scikit-learn: features and ``label`` (class names) or ``target``."""
    if name not in SKLEARN:
        raise DataError(f"no data set sklearn:{name}", hint=did_you_mean(name, SKLEARN))
    try:
        from sklearn import datasets  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise missing_part("scikit-learn", "train", f"sklearn:{name}") from error

    if name == "digits":
        digits: Any = datasets.load_digits()
        images = (digits.images / 16.0).astype(np.float32)
        return DataTable({"image": images, "label": digits.target.astype(np.int64)})
    bunch: Any = (
        datasets.load_diabetes(scaled=False) if name == "diabetes" else _load(datasets, name)
    )
    columns: dict[str, Column] = {
        str(feature): np.asarray(bunch.data[:, index], dtype=np.float64)
        for index, feature in enumerate(bunch.feature_names)
    }
    if name == "diabetes":
        columns["target"] = np.asarray(bunch.target, dtype=np.float64)
    else:
        columns["label"] = [str(bunch.target_names[index]) for index in bunch.target]
    return DataTable(columns)


def load_hub(name: str) -> dict[str, DataTable]:
    """``NAME[@REVISION][:CONFIGURATION]`` from the Hugging Face hub; its splits by part."""
    datasets = _datasets(f"hf:{name}")
    repository, _, configuration = name.partition(":")
    repository, revision = split_revision(repository)
    try:
        # Data sets with code are refused: trust_remote_code is never passed.
        loaded = datasets.load_dataset(
            repository,
            configuration or None,
            revision=dataset_commit(repository, revision) or revision,
        )
    except Exception as error:  # the hub, its cache and each builder raise their own
        raise DataError(
            f"cannot load the data set hf:{name}: {_first_line(error)}",
            hint="check the name and the network; data sets that need a script are not supported",
        ) from error
    return _by_part(loaded, f"hf:{name}", fingerprint="")


@cache
def dataset_commit(repository: str, revision: str | None) -> str | None:
    """Commit that a revision (a branch, a tag; by default ``main``) of a data set stands for now.

    None where the hub cannot be asked; then the local cache, if any, decides.
    """
    if is_commit(revision):
        return revision
    from huggingface_hub import HfApi  # noqa: PLC0415 - comes with datasets

    try:
        return HfApi().dataset_info(repository, revision=revision, timeout=_ASK_S).sha
    except Exception:  # noqa: BLE001 - the loader tells what is wrong
        return None


def load_saved(folder: Path, fingerprint: str) -> dict[str, DataTable]:
    """A folder written by ``save_to_disk``; its splits by part."""
    datasets = _datasets(str(folder))
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"{folder} is not a complete saved data set: {_first_line(error)}",
            hint="write it again with save_to_disk",
        ) from error
    return _by_part(loaded, str(folder), fingerprint=fingerprint)


def _by_part(loaded: Any, source: str, *, fingerprint: str) -> dict[str, DataTable]:
    splits: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    parts = {PARTS[name]: split for name, split in splits.items() if name in PARTS}
    if "train" not in parts:
        if len(splits) > 1:
            raise DataError(f"{source} has no split named train; it has {', '.join(splits)}")
        parts = {"train": next(iter(splits.values()))}
    return {
        part: DataTable(_columns(split), f"{fingerprint}:{part}" if fingerprint else "")
        for part, split in parts.items()
    }


def _columns(split: Any) -> dict[str, Column]:
    from datasets import Audio, ClassLabel, Image  # noqa: PLC0415 - optional

    classes: dict[str, list[str]] = {}
    for name, feature in split.features.items():
        if isinstance(feature, (Image, Audio)):
            # Kept encoded; the task decodes them.
            split = split.cast_column(name, type(feature)(decode=False))
        elif isinstance(feature, ClassLabel):
            classes[name] = feature.names
    columns = columns_of_arrow(split.with_format("arrow")[:])
    for name, names in classes.items():
        columns[name] = [names[int(index)] if index >= 0 else None for index in columns[name]]
    return columns


def _datasets(purpose: str) -> Any:
    try:
        import datasets  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise missing_part("datasets", "hf", f"reading {purpose}") from error
    return datasets


def _load(datasets: Any, name: str) -> Any:
    return getattr(datasets, f"load_{name}")()


def _first_line(error: Exception) -> str:
    if isinstance(error, YunluError):
        return error.message
    return (str(error).splitlines() or [type(error).__name__])[0]


# Each use of the seed draws from a stream of its own.
_SPLIT_STREAM, _LIMIT_STREAM = 1, 2


def split_indices(count: int, shares: Mapping[str, float], *, seed: int) -> dict[str, np.ndarray]:
    """Indices of ``train`` and of each held-out part; every part has at least one sample.

    A part's samples depend on the count, its share and the seed alone, and keep their order.
    """
    sizes = {part: max(1, round(share * count)) for part, share in shares.items() if share > 0}
    if sum(sizes.values()) >= count:
        requested = " and ".join(f"{size} for {part}" for part, size in sizes.items())
        raise DataError(
            f"{count} sample{'s' * (count != 1)} cannot be split: {requested or 'nothing held out'} "
            f"would leave none to train on",
            hint="give more data, name data.validation and data.test, or set their split to 0",
        )
    order = np.random.default_rng((seed, _SPLIT_STREAM)).permutation(count)
    parts: dict[str, np.ndarray] = {}
    taken = 0
    for part, size in sizes.items():
        parts[part] = np.sort(order[taken : taken + size])
        taken += size
    parts["train"] = np.sort(order[taken:])
    return parts


def limit_indices(count: int, limit: int, *, seed: int) -> np.ndarray:
    """At most ``limit`` random indices: data is often sorted by label."""
    order = np.random.default_rng((seed, _LIMIT_STREAM)).permutation(count)
    return np.sort(order[:limit])


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


_HELD_OUT = ("validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The three parts of a data set."""

    train: DataTable
    validation: DataTable | None
    test: DataTable | None
    full_train: DataTable
    """The training data before holding out: a rare label may be in the held-out part."""
    fingerprint: str
    """Fingerprint of everything read, before splitting; independent of the seed."""
    source: str


def load_tables(data: DataSpec, *, seed: int) -> Tables:
    """Read and split the data of a job; deterministic.

    A part comes from where the job names it, else from the source's own split of that name, else
    from a share of the training data.
    """
    parts = read_source(data.train, data)
    if "train" not in parts:
        raise DataError(f"{data.train} has no training part; it has {', '.join(parts)}")
    for part in _HELD_OUT:
        named = getattr(data, part)
        if named is not None:
            named_parts = read_source(named, data)
            parts[part] = (
                named_parts[part] if part in named_parts else next(iter(named_parts.values()))
            )
    for part, table in parts.items():
        if not len(table):
            raise DataError(f"the {part} data is empty: {getattr(data, part) or data.train}")
    fingerprint = _combine({part: table.fingerprint for part, table in parts.items()})
    full_train = parts["train"]
    shares = {part: getattr(data.split, part) for part in _HELD_OUT if part not in parts}
    if any(shares.values()):
        chosen = split_indices(len(full_train), shares, seed=seed)
        parts |= {part: full_train.take(indices) for part, indices in chosen.items()}
    if data.limit is not None:
        parts = {part: _limit(table, data.limit, seed=seed) for part, table in parts.items()}
    return Tables(
        train=parts["train"],
        validation=parts.get("validation"),
        test=parts.get("test"),
        full_train=full_train,
        fingerprint=fingerprint,
        source=data.train,
    )


def read_source(source: str, data: DataSpec) -> dict[str, DataTable]:
    """Read one source, by split; sources without splits are all ``train``."""
    scheme, _, name = source.partition(":")
    if scheme == "sklearn":
        return {"train": load_sklearn(name)}
    if scheme == "synthetic":
        generated = generate(name)
        if isinstance(generated, DataTable):
            return {"train": generated}
        return _read_location(locate(str(generated)), "auto")
    if scheme == "hf" and not name.startswith("//"):
        return _read_hf(name)
    location = locate(source, data.options)
    return _read_location(location, data.format)


def is_hub_dataset(source: str) -> bool:
    """Whether a source is a data set on the hub: ``hf:NAME`` that is no path here."""
    scheme, _, name = source.partition(":")
    if scheme != "hf" or name.startswith(("//", ".", "/", "~")):
        return False
    return not Path(name).expanduser().is_dir()


def read_text(path: str, options: Mapping[str, Any] | None = None) -> str:
    """The raw text of a file, of all ``*.txt`` in a folder (by path), or of ``synthetic:NAME``."""
    if path.startswith("synthetic:"):
        generated = generate(path.removeprefix("synthetic:"))
        if isinstance(generated, DataTable):
            return "\n".join(str(line) for line in generated["text"])
        path, options = str(generated), None
    location = locate(path, options)
    if not location.is_folder:
        text = decode(location)
    else:
        files = [file for file in location.files() if file.suffix == ".txt"]
        if not files:
            raise DataError(f"{location.url} has no .txt files")
        text = "\n".join(decode(file) for file in files)
    if not text.strip():
        raise DataError(f"{location.url} has no text: it is empty")
    return text


def _read_hf(name: str) -> dict[str, DataTable]:
    if is_hub_dataset(f"hf:{name}"):
        return load_hub(name)
    return _read_location(locate(str(Path(name).expanduser())), "hf")


def _read_location(location: Location, form: str) -> dict[str, DataTable]:
    if location.is_folder:
        return _read_folder(location, form)
    if form in {"images", "wav", "hf"}:
        raise DataError(f"{location.url} is a file; data.format {form} needs a folder")
    columns = READERS[format_of(location) if form == "auto" else form](location)
    fingerprint = location.fingerprint()
    return {
        part: DataTable(part_columns, f"{fingerprint}:{part}")
        for part, part_columns in _split_arrays(columns).items()
    }


def _read_folder(folder: Location, form: str) -> dict[str, DataTable]:
    children = folder.children()
    if not children:
        raise DataError(f"{folder.url} is empty")
    names = {child.name for child in children}
    if form == "hf" or (form == "auto" and names & set(HF_MARKS)):
        if not folder.is_local:
            raise DataError(f"{folder.url}: a saved Hugging Face data set must be a local folder")
        return load_saved(Path(folder.path), folder.fingerprint())
    parts = _named_parts(children)
    if parts:
        return {
            part: _read_location(child, form if child.is_folder or form in READERS else "auto")[
                "train"
            ]
            for part, child in parts.items()
        }
    files = folder.files()
    kind = form if form in {"images", "wav"} else media_of(files) if form == "auto" else None
    if kind is not None:
        return {"train": read_media(folder, files, kind)}
    return {"train": _read_shards(folder, files, form)}


def _named_parts(children: list[Location]) -> dict[str, Location]:
    """``train`` beside ``test`` or ``validation``, as folders or as files such as ``test.csv``."""
    parts: dict[str, Location] = {}
    for child in children:
        stem = child.name if child.is_folder else PurePosixPath(child.name).stem
        if stem.lower() in PARTS and (child.is_folder or child.suffix in SUFFIXES):
            part = PARTS[stem.lower()]
            if part in parts:
                raise DataError(f"{parts[part].url} and {child.url} are both the {part} data")
            parts[part] = child
    return parts if "train" in parts and len(parts) > 1 else {}


def _read_shards(folder: Location, files: list[Location], form: str) -> DataTable:
    """Files of one format, in the order of their names, as one table."""
    suffixes = {suffix for suffix, known in SUFFIXES.items() if form in {"auto", known}}
    shards = [file for file in files if file.suffix in suffixes]
    formats = sorted({SUFFIXES[file.suffix] for file in shards})
    if len(formats) != 1:
        contents = (
            f"files of several formats ({', '.join(formats)})" if formats else "no data files"
        )
        raise DataError(
            f"{folder.url} holds {contents}",
            hint=f"expected images or sounds in a folder per label, or {', '.join(sorted(suffixes))}",
        )
    tables: list[Columns] = []
    held = 0
    for shard in shards:
        tables.append(READERS[formats[0]](shard))
        held += sum(map(_held_bytes, tables[-1].values()))
        check_memory(folder.url, held, read_limits())
    for shard, columns in zip(shards, tables, strict=True):
        if set(columns) != set(tables[0]):
            raise DataError(
                f"{shard.url} has the columns {', '.join(columns)}; {shards[0].name} has "
                f"{', '.join(tables[0])}"
            )
    joined = {name: _join([columns[name] for columns in tables]) for name in tables[0]}
    return DataTable(joined, folder.fingerprint())


def _held_bytes(column: Column) -> int:
    """Bytes a column takes: nearly, since values inside lists are not counted."""
    if isinstance(column, np.ndarray):
        return column.nbytes
    return sys.getsizeof(column) + sum(map(sys.getsizeof, column))


def _join(columns: list[Column]) -> Column:
    if all(isinstance(column, np.ndarray) for column in columns):
        return np.concatenate(columns)
    # Mixed numeric and text shards make a text column.
    return [
        str(value) if isinstance(column, np.ndarray) else value
        for column in columns
        for value in column
    ]


def _split_arrays(columns: Columns) -> dict[str, Columns]:
    """Split arrays such as ``x_train, y_train, x_test, y_test`` of one file by part."""
    parts: dict[str, Columns] = {}
    for name, column in columns.items():
        stem, _, part = name.rpartition("_")
        if not stem or part not in PARTS:
            return {"train": columns}
        parts.setdefault(PARTS[part], {})[stem] = column
    return parts if "train" in parts else {"train": columns}


def _limit(table: DataTable, limit: int, *, seed: int) -> DataTable:
    return table if len(table) <= limit else table.take(limit_indices(len(table), limit, seed=seed))


def _combine(fingerprints: Mapping[str, str]) -> str:
    listing = "\n".join(f"{part} {value}" for part, value in sorted(fingerprints.items()))
    return xxhash.xxh3_128(listing.encode()).hexdigest()
