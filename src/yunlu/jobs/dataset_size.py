"""Dataset size of a job, counted without decoding or loading the data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.core.errors import DataError
from yunlu.planning.plan import DatasetSize
from yunlu.spec.task_traits import traits_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.spec.job import DataSpec, Job

# Default of data.max_length when a text is read: blocks of a short text are short.
_SHORT, _LONG, _MANY_BYTES = 128, 512, 8 << 20
_SKLEARN = {"digits": 1797, "iris": 150, "wine": 178, "breast_cancer": 569, "diabetes": 442}
_SYNTHETIC = {"films": 16_000, "reviews": 6_000, "dates": 10_000}
_SYNTHETIC_PARTS = {"spoken-words": (448, 72, 160), "spoken-digits": (480, 60, 120)}
_PYTHON_DOCS_BYTES = 520_000
_BYTES_PER_TOKEN = {"bytes": 1.0, "bpe": 3.0}
_BYTES_PER_HF_TOKEN = 4.0
_LINES = {".csv": 1, ".tsv": 0, ".jsonl": 0, ".ndjson": 0, ".txt": 0, ".text": 0}
"""Formats with one sample per line, and their number of header lines."""
_MEDIA = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".wav", ".flac"}
_READ_BYTES = 64 << 20
"""Of a larger file so much is read, and the rest is extrapolated."""


def measure_dataset(job: Job, *, seq: int) -> DatasetSize:
    """Samples of each split; ``seq`` tokens each where text is one stream."""
    data = job.data
    if data.samples is not None or data.tokens is not None:
        tokens = data.tokens or 0
        train = data.samples or max(1, round(tokens / seq))
        retained = 1.0 - data.split.validation - data.split.test
        held = {part: round(train * getattr(data.split, part) / retained) for part in _HELD_OUT}
        return _limited(DatasetSize(train=train, **held), data)
    scheme, _, name = data.train.partition(":")
    if scheme == "synthetic" and name in _SYNTHETIC_PARTS:
        train, validation, test = _SYNTHETIC_PARTS[name]
        return _limited(DatasetSize(train=train, validation=validation, test=test), data)
    whole = _count(job, data.train, seq)
    parts: dict[str, int] = {}
    for part in _HELD_OUT:
        own = getattr(data, part)
        share = getattr(data.split, part)
        parts[part] = _count(job, own, seq) if own is not None else round(whole * share)
    held_out = sum(parts[part] for part in _HELD_OUT if getattr(data, part) is None)
    return _limited(DatasetSize(train=max(whole - held_out, 1), **parts), data)


def block_length(job: Job) -> int:
    """Tokens per sample where neither the job nor the model says."""
    if not traits_of(job.task).is_stream:
        return _LONG
    try:
        size = _bytes_of(job.data.train)
    except DataError:
        return _LONG
    return _LONG if size > _MANY_BYTES else _SHORT


_HELD_OUT = ("validation", "test")


def _limited(amounts: DatasetSize, data: DataSpec) -> DatasetSize:
    if data.limit is None:
        return amounts
    return DatasetSize(
        train=min(amounts.train, data.limit),
        validation=min(amounts.validation, data.limit),
        test=min(amounts.test, data.limit),
    )


def _count(job: Job, source: str, seq: int) -> int:
    scheme, _, name = source.partition(":")
    if scheme == "sklearn" and name in _SKLEARN:
        return _SKLEARN[name]
    if scheme == "synthetic" and name in _SYNTHETIC:
        return _SYNTHETIC[name]
    if traits_of(job.task).is_stream and not _is_table(source):
        tokens = _bytes_of(source) / _bytes_per_token(job)
        return max(1, round(tokens / seq))
    return sum(_count_file(file, source) for file in _files(source))


def _is_table(source: str) -> bool:
    return Path(source).suffix.lower() in {".csv", ".tsv", ".jsonl", ".parquet", ".pq"}


def _bytes_per_token(job: Job) -> float:
    tokenizer = job.data.tokenizer
    if tokenizer == "auto":
        tokenizer = "hf" if job.model.name.startswith("hf:") else "bytes"
    return _BYTES_PER_TOKEN.get(tokenizer, _BYTES_PER_HF_TOKEN)


def _bytes_of(source: str) -> int:
    if source == "synthetic:python-docs":
        return _PYTHON_DOCS_BYTES
    return sum(file.stat().st_size for file in _files(source))


def _files(source: str) -> Iterator[Path]:
    """Files behind a local path; other sources cannot be counted cheaply."""
    path = Path(source).expanduser()
    try:
        matches = (
            [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())
        )
    except OSError:
        matches = []
    if not matches:
        raise _uncounted(source)
    yield from matches


def _count_file(file: Path, source: str) -> int:
    suffix = file.suffix.lower()
    if suffix in _LINES:
        return max(_count_lines(file) - _LINES[suffix], 0)
    if suffix in _MEDIA:
        return 1
    if suffix in {".parquet", ".pq"}:
        return _count_rows(file, source)
    if suffix == ".npy":
        return _count_array(file, source)
    if file.is_relative_to(Path(source).expanduser()) and file != Path(source).expanduser():
        return 0  # other files beside the samples of a folder
    raise _uncounted(source)


def _count_lines(file: Path) -> int:
    size, seen, lines, last = file.stat().st_size, 0, 0, b"\n"
    with file.open("rb") as stream:
        while seen < _READ_BYTES and (piece := stream.read(1 << 20)):
            seen += len(piece)
            lines += piece.count(b"\n")
            last = piece[-1:]
    if seen < size:
        return round(lines * size / seen)
    return lines + (last != b"\n")


def _count_rows(file: Path, source: str) -> int:
    try:
        from pyarrow import parquet  # noqa: PLC0415 - slow to import, used by few
    except ImportError:
        raise _uncounted(source) from None
    try:
        return parquet.read_metadata(file).num_rows  # pyright: ignore[reportUnknownMemberType]
    except Exception:  # noqa: BLE001 (Arrow has exceptions of its own; the reader says what is wrong)
        raise _uncounted(source) from None


def _count_array(file: Path, source: str) -> int:
    import numpy as np  # noqa: PLC0415

    try:
        return len(np.load(file, mmap_mode="r"))
    except (OSError, ValueError, TypeError):  # cut short, objects, or a single value
        raise _uncounted(source) from None


def _uncounted(source: str) -> DataError:
    return DataError(
        f"data.train: the samples of {source!r} cannot be counted without loading them.",
        hint="say how many there are, as data.samples or data.tokens (--set data.samples=100000), "
        "or how long to train, as train.steps",
    )
