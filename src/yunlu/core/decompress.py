"""Reading of streams that may unpack to more than memory holds."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Protocol

from yunlu.core.errors import DataError, YunluError
from yunlu.core.limits import check_unpacked, over_limit

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Callable

    from yunlu.core.limits import FileLimits

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
