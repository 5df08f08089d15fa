"""Limits on foreign files, and bounded readers: unpacked streams, archives, JSON.

The environment sets the limits, not the job: whoever wrote a hostile file may have written the job beside it.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from yunlu.core.errors import DataError, ModelError, YunluError, did_you_mean
from yunlu.core.settings import limits_setting
from yunlu.core.units import show_bytes

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Callable
    from pathlib import Path

VARIABLE = "YUNLU_LIMITS"
_ASSUMED_BYTES = 16 << 30

_UNITS = {
    **{unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t"))},
    **{f"{unit}b": 1000**power for power, unit in enumerate(("", "k", "m", "g", "t"))},
    **{f"{unit}ib": 1024**power for power, unit in enumerate(("k", "m", "g", "t"), start=1)},
}
_ENTRY = re.compile(r"(?P<name>\w+)\s*=\s*(?P<number>[0-9][0-9_]*(\.[0-9]+)?)\s*(?P<unit>[a-z]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Largest foreign content that is read; ``YUNLU_LIMITS="memory=64GiB, pixels=500M"`` raises them."""

    memory: int
    """Bytes that one data set or model may take in memory. Default: half of what this machine has.
    The size of a file is not limited: what is not held at once may be as long as it likes."""
    ratio: float = 250.0
    """Bytes unpacked from one packed byte. Tables and logs reach 5 to 60, one-hot tables about 100;
    gzip cannot exceed 1032, bzip2, xz and zstd can."""
    ratio_from: int = 64 << 20
    """Bytes up to which nobody asks for the ratio: small files of zeros are honest, and harmless."""
    pixels: int = 80_000_000
    """Width × height of one image. Cameras make up to 60 million."""
    samples: int = 500_000_000
    """Samples × channels of one sound: 3 hours of mono at 44.1 kHz."""
    channels: int = 64
    """Channels of one sound: ambisonics of the 7th order have 64."""
    sample_rate_min: int = 1_000
    """Hertz. Below, resampling to a usual rate multiplies a sound: 1 Hz to 16 kHz by 16,000."""
    sample_rate_max: int = 768_000
    """Hertz: the highest rate of converters on sale."""
    rows: int = 1_000_000_000
    """Samples of one table: each costs memory even where it has no content."""
    columns: int = 100_000
    """Columns of one table, or arrays of one archive. Gene expression has 60,000."""
    depth: int = 100
    """Nesting of lists and mappings in JSON and in job files."""
    document: int = 64 << 20
    """Bytes of one JSON document, such as a model's configuration. Indices of the largest models: 10 MB."""
    job: int = 1 << 20
    """Bytes of one job file."""


def read_limits() -> FileLimits:
    """``YUNLU_LIMITS``, else the defaults."""
    return parse_limits(limits_setting())


@cache
def parse_limits(text: str) -> FileLimits:
    """The defaults, with what ``name=number`` pairs, separated by commas or spaces, set otherwise."""
    values: dict[str, Any] = {}
    known = {field.name: field for field in fields(FileLimits)}
    for entry in re.split(r"[,\s]+(?=[a-z_]+\s*=)|[,\s]+$", text.strip().lower()):
        if not entry:
            continue
        match = _ENTRY.fullmatch(entry)
        if match is None or match["unit"] not in _UNITS:
            raise YunluError(
                f"{VARIABLE}: {entry!r} is not a limit.",
                hint=f'write name=number, such as {VARIABLE}="memory=64GiB, pixels=500M"',
            )
        if match["name"] not in known:
            raise YunluError(
                f"{VARIABLE}: there is no limit {match['name']!r}.",
                hint=did_you_mean(match["name"], known),
            )
        number = float(match["number"].replace("_", "")) * _UNITS[match["unit"]]
        values[match["name"]] = number if match["name"] == "ratio" else int(number)
    if "memory" not in values:
        values["memory"] = usable_memory() // 2
    return FileLimits(**values)


def usable_memory() -> int:
    """Bytes of memory of this machine, or of the container."""
    from yunlu.core.cgroup import read_cgroup  # noqa: PLC0415 (only readers of data need it)

    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # not POSIX
        total = _ASSUMED_BYTES
    allowed = read_cgroup().memory_bytes
    return total if allowed is None else min(total, allowed)


def over_limit(
    message: str, name: str, needed: float | None = None, *, kind: type[YunluError] = DataError
) -> YunluError:
    """The error of content above a limit, with the setting that would admit it."""
    return kind(
        message,
        hint=f"if you trust where it comes from, raise the limit: "
        f"{VARIABLE}={name}={_enough(name, needed)}",
    )


def check_memory(
    where: str, count_bytes: float, limits: FileLimits, *, kind: type[YunluError] = DataError
) -> None:
    """Refuse content that would take more memory than one data set may."""
    if count_bytes > limits.memory:
        raise over_limit(
            f"{where} takes at least {show_bytes(count_bytes)} in memory; "
            f"at most {show_bytes(limits.memory)} are allowed",
            "memory",
            count_bytes,
            kind=kind,
        )


def check_unpacked(
    where: str,
    unpacked: int,
    packed: int,
    limits: FileLimits,
    *,
    factor: float = 1.0,
    kind: type[YunluError] = DataError,
) -> None:
    """Refuse what unpacks to too much, by itself or for its packed size.

    ``factor`` is for formats whose honest files pack better than streams of bytes do.
    """
    check_memory(where, unpacked, limits, kind=kind)
    if unpacked > limits.ratio_from and unpacked > limits.ratio * factor * max(packed, 1):
        raise over_limit(
            f"{where} unpacks {show_bytes(unpacked)} or more from {show_bytes(packed)}: "
            f"above {limits.ratio * factor:,.0f} to 1, as files do that are made to fill a memory",
            "ratio",
            unpacked / max(packed, 1) / factor,
            kind=kind,
        )


def check_shape(where: str, *, limits: FileLimits, rows: int = 0, columns: int = 0) -> None:
    """Refuse a table of too many rows or columns."""
    for name, count, most in (("rows", rows, limits.rows), ("columns", columns, limits.columns)):
        if count > most:
            raise over_limit(
                f"{where} has {count:,} {name}; at most {most:,} are read", name, count
            )


def check_sample_rate(where: str, rate: int, limits: FileLimits) -> None:
    """Refuse a rate no converter has: resampling multiplies what it cannot divide."""
    if limits.sample_rate_min <= rate <= limits.sample_rate_max:
        return
    name = "sample_rate_min" if rate < limits.sample_rate_min else "sample_rate_max"
    raise over_limit(
        f"{where} claims {rate:,} samples per second; expected "
        f"{limits.sample_rate_min:,} to {limits.sample_rate_max:,}",
        name,
        rate,
    )


_IN_BYTES = frozenset({"memory", "ratio_from", "document", "job"})


def _enough(name: str, needed: float | None) -> str:
    if needed is None or not math.isfinite(needed):
        return "NUMBER"
    if name in _IN_BYTES:
        return f"{max(1, math.ceil(needed / 2**20))}MiB"
    return str(int(needed) if name == "sample_rate_min" else math.ceil(needed))


_AT_ONCE = 1 << 20


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


def read_bounded(
    stream: _Readable,
    where: str,
    limits: FileLimits,
    *,
    packed: Callable[[], int] | None = None,
    kind: type[YunluError] = DataError,
) -> bytes:
    """All bytes of a stream, unless they exceed the limits: then no more of it is unpacked.

    ``packed`` tells the bytes taken from the compressed file so far. They, not its whole size, are
    compared: a bomb inside a long file is found where it begins.
    """
    unpacked = io.BytesIO()
    while piece := stream.read(_AT_ONCE):
        unpacked.write(piece)
        size = unpacked.tell()
        check_unpacked(where, size, size if packed is None else packed(), limits, kind=kind)
    return unpacked.getvalue()


def check_archive(
    archive: zipfile.ZipFile,
    where: str,
    limits: FileLimits,
    *,
    kind: type[YunluError] = DataError,
) -> None:
    """Refuse a zip archive of too many members or bytes, by its directory.

    ``zipfile`` reads no more of a member than its directory entry says. Members may overlap, so
    their packed sizes are compared with the archive's own.
    """
    members = archive.infolist()
    if len(members) > limits.columns:
        message = f"{where} has {len(members):,} members; at most {limits.columns:,} are read"
        raise over_limit(message, "columns", len(members), kind=kind)
    size = sum(member.file_size for member in members)
    packed = sum(member.compress_size for member in members)
    if archive.fp is not None:
        packed = min(packed, archive.fp.seek(0, io.SEEK_END))
    check_unpacked(where, size, packed, limits, kind=kind)


_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE = re.compile("[\ud800-\udfff]")


class JsonError(ValueError):
    """The text is no JSON, or none that is read here."""


def decode_json(data: bytes | str, *, replace_lone: bool = False) -> Any:
    r"""Parse JSON; every fault is a ``JsonError``.

    A lone surrogate (``"\ud800"``) is half a character, which no file can hold: refused, or with
    ``replace_lone`` replaced as a decoder of damaged text would.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also bytes that are not UTF-8, and numbers of 5,000 digits
        raise JsonError(str(error)) from error
    if text.count("[") + text.count("{") > read_limits().depth:
        _check_depth(value)
    if _SURROGATE_ESCAPE.search(text) or _LONE.search(text):
        return _without_lone(value, replace=replace_lone)
    return value


def read_json(path: Path, *, kind: type[YunluError] = ModelError) -> Any:
    """Parse a JSON file of at most ``limits.document`` bytes; a fault is a ``kind`` that names it."""
    most = read_limits().document
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise over_limit(
                f"{path} is larger than {most:,} bytes, the most that is read of a JSON document",
                "document",
                path.stat().st_size,
                kind=kind,
            )
        return decode_json(data)
    except OSError as error:
        raise kind(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise kind(f"{path} is not readable JSON: {error}") from error


def _check_depth(value: Any) -> None:
    """Level by level: what is too deep for the parser is too deep for recursion here."""
    level = [value]
    for _ in range(read_limits().depth):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise _too_deep()


def _children(item: Any) -> list[Any]:
    """Lists and mappings inside one; a text or number is no level."""
    values = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [value for value in values if isinstance(value, dict | list)]


def _without_lone(value: Any, *, replace: bool) -> Any:
    if isinstance(value, str):
        if not _LONE.search(value):
            return value
        if not replace:
            raise JsonError(f"{value[:40]!a} holds half a character (a lone surrogate)")
        return _LONE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [_without_lone(item, replace=replace) for item in value]
    if isinstance(value, dict):
        return {
            _without_lone(key, replace=replace): _without_lone(item, replace=replace)
            for key, item in value.items()
        }
    return value


def _too_deep() -> JsonError:
    return JsonError(f"nested too deeply: more than {read_limits().depth} levels")
