"""Data locations: local paths and fsspec URLs, and their fingerprints."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import fsspec
import xxhash
from fsspec.compression import compr
from fsspec.registry import known_implementations
from fsspec.utils import infer_compression

from yunlu.core.errors import DataError, MissingPartError, YunluError, did_you_mean, missing_part
from yunlu.core.limits import check_memory, read_bounded, read_limits

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_HASHED_BYTES_LOCAL = 1 << 30
_HASHED_BYTES_REMOTE = 1 << 26


@dataclass(frozen=True, slots=True)
class Location:
    """A file or folder on some file system."""

    fs: Any = field(repr=False)
    path: str
    """Path in the file system's own notation."""
    is_folder: bool
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @property
    def url(self) -> str:
        """Absolute path or URL, for display and for fsspec."""
        return self.path if self.is_local else str(self.fs.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's own file system."""
        return "file" in _protocols(self.fs)

    @property
    def name(self) -> str:
        """The last part of the path, without a compression suffix."""
        name = PurePosixPath(self.path).name
        return PurePosixPath(name).stem if name.endswith(COMPRESSED) else name

    @property
    def suffix(self) -> str:
        """``.csv`` for ``a.CSV`` and for ``a.csv.gz``."""
        return PurePosixPath(self.name).suffix.lower()

    def read(self, count: int | None = None) -> bytes:
        """The file's bytes (or its first ``count``), decompressed as its name says."""
        with reading(self.url), self.fs.open(self.path, "rb") as file:
            codec = infer_compression(self.path)
            if codec is None:
                return read_whole(file, self.url) if count is None else file.read(count)
            open_codec = cast("dict[str, Any]", compr)[codec]
            with open_codec(file, mode="rb") as unpacked:
                if count is not None:
                    return unpacked.read(count)
                return read_bounded(unpacked, self.url, read_limits(), packed=file.tell)

    def children(self) -> list[Location]:
        """Direct children, by name, without hidden ones."""
        with reading(self.url):
            infos = self.fs.ls(self.path, detail=True)
        return [self._child(info) for info in _visible(infos, self.path)]

    def files(self) -> list[Location]:
        """All files below, by path, without hidden ones."""
        return [self._child(info) for info in self._listing()]

    def relative(self, inside: Location) -> str:
        """Relative path of a location below this one."""
        return inside.path[len(self.path.rstrip("/")) + 1 :]

    def fingerprint(self) -> str:
        """Changes with the name, size or content of any file below; the same on every machine.

        Above 1 GiB in total (64 MiB for remote files) the content is not read: size and
        modification time, or the store's own checksum, are used instead.
        """
        with reading(self.url):
            infos = self._listing() if self.is_folder else [self.fs.info(self.path)]
        total = sum(int(info.get("size") or 0) for info in infos)
        by_content = total <= (_HASHED_BYTES_LOCAL if self.is_local else _HASHED_BYTES_REMOTE)
        digest = xxhash.xxh3_128()
        for info in infos:
            file = self._child(info) if self.is_folder else self
            name = self.relative(file) if self.is_folder else ""
            digest.update(f"{name}\0{info.get('size')}\0".encode())
            if by_content:
                self._hash_into(digest, file)
            else:
                marks = [str(info.get(key)) for key in ("ETag", "checksum", "mtime", "modified")]
                digest.update("\0".join(marks).encode())
        return digest.hexdigest()

    def _listing(self) -> list[Mapping[str, Any]]:
        infos: list[Mapping[str, Any]] = []
        with reading(self.url):
            for path, info in self.fs.find(self.path, detail=True).items():
                if info.get("islink") and self.fs.isdir(path):
                    # A linked folder is followed once; links inside it are not, to avoid cycles.
                    below = self.fs.find(f"{path}/", detail=True).values()
                    infos += [file for file in below if not self.fs.isdir(file["name"])]
                else:
                    infos.append(info)
        return _visible(infos, self.path)

    def _child(self, info: Mapping[str, Any]) -> Location:
        path = str(info["name"]).rstrip("/")
        return Location(self.fs, path, info["type"] == "directory", self.options)

    def _hash_into(self, digest: xxhash.xxh3_128, file: Location) -> None:
        with reading(file.url), self.fs.open(file.path, "rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)


def locate(path: str, options: Mapping[str, Any] | None = None) -> Location:
    """Find a local path or fsspec URL; a missing one is a ``DataError`` with similar names."""
    options = dict(options or {})
    fs, inner = _open_file_system(path, options)
    try:
        with reading(path):
            info = fs.info(inner)
    except _AbsentError as error:
        url = Location(fs, inner, is_folder=False, options=options).url
        raise DataError(f"no such file or folder: {url}", hint=_similar(fs, inner)) from error
    return Location(fs, inner, info["type"] == "directory", options)


def read_whole(file: Any, where: str) -> bytes:
    """All bytes of an open file that is not compressed, unless they exceed the memory limit."""
    limits, size = read_limits(), getattr(file, "size", None)
    if not size:  # not known, or a device that claims to be empty
        return read_bounded(file, where, limits)
    check_memory(where, size, limits)
    return file.read()


@contextmanager
def reading(what: str) -> Generator[None]:
    """Convert errors of storage back ends to a ``DataError`` that names the file."""
    try:
        yield
    except YunluError:
        raise
    except FileNotFoundError as error:
        raise _AbsentError(f"no such file or folder: {what}") from error
    except PermissionError as error:
        raise DataError(f"no permission to read {what}: {error}") from error
    except ImportError as error:  # a codec, such as zstandard
        raise MissingPartError(f"reading {what} needs another package: {error}") from error
    except Exception as error:
        # Each back-end (botocore, aiohttp, paramiko, ...) has exceptions of its own.
        raise DataError(f"cannot read {what}: {error or type(error).__name__}") from error


class _AbsentError(DataError):
    """The file does not exist."""


def _open_file_system(path: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    protocol = path.split("://", 1)[0] if "://" in path else "file"
    if protocol == "file":
        local = path.removeprefix("file://")
        path = str(Path(local).expanduser().absolute())
    try:
        return fsspec.core.url_to_fs(path, **options)
    except ImportError as error:
        raise _missing_backend(protocol) from error
    except ValueError as error:
        if "Protocol not known" not in str(error):
            raise DataError(f"cannot open {path}: {error}") from error
        raise DataError(
            f"{path}: unknown kind of storage {protocol!r}",
            hint=did_you_mean(protocol, ("file", "s3", "gs", "az", "hdfs", "sftp", "https", "hf")),
        ) from error
    except TypeError as error:  # an option the file system does not have
        raise DataError(f"data.options do not fit {protocol}://: {error}") from error


def _missing_backend(protocol: str) -> MissingPartError:
    if protocol in {"s3", "s3a"}:
        return missing_part("s3fs", "s3", f"reading {protocol}:// URLs")
    known = known_implementations[protocol]
    package = known["class"].split(".")[0]
    # fsspec's own file systems need a package that only its message names.
    hint = known.get("err") if package == "fsspec" else f"pip install {package}"
    return MissingPartError(
        f"reading {protocol}:// URLs needs a package that is not installed.", hint=hint
    )


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _visible(infos: Iterable[Mapping[str, Any]], root: str) -> list[Mapping[str, Any]]:
    visible = [
        info
        for info in infos
        if str(info["name"]).rstrip("/") != root.rstrip("/")
        and not any(
            part.startswith(".") for part in str(info["name"])[len(root) :].split("/") if part
        )
    ]
    return sorted(visible, key=lambda info: str(info["name"]))


def _similar(fs: Any, path: str) -> str | None:
    """Hint with names similar to the missing one."""
    parent = Location(fs, str(PurePosixPath(path).parent), is_folder=True)
    try:
        names = [child.path.rsplit("/", 1)[-1] for child in parent.children()]
    except YunluError:
        return f"the folder {parent.url} does not exist either"
    name = PurePosixPath(path).name
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"{parent.url} has {', '.join(near)}"
    return f"{parent.url} has no similar name" if names else f"{parent.url} is empty"
