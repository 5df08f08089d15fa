"""Storage of checkpoints: a directory, or a prefix in an object store.

A directory is written under a temporary name and published by one rename. An object store cannot rename: there the
manifest is written last, and a checkpoint without one does not exist.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import fsspec

from yunlu.core.errors import CheckpointError, missing_part
from yunlu.core.files import (
    find_set_aside,
    make_directory,
    open_private,
    remove_tree,
    sync_directory,
    sync_tree,
    write_atomically,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from contextlib import AbstractContextManager
    from typing import BinaryIO

MANIFEST = "manifest.json"
_PUBLISHED = re.compile(r"step-(\d{10,})(?:\.[\w.-]+)?")


class CheckpointStorage(Protocol):
    """Holds checkpoints as directories of files."""

    def published(self) -> list[str]:
        """Names of the published directories, newest first, readable or not."""
        ...

    def begin(self, step: int, token: str) -> str:
        """The directory to write into; the same for all writers of this checkpoint."""
        ...

    def create(self, directory: str, file: str) -> AbstractContextManager[BinaryIO]:
        """A new file, durable at the end of the block."""
        ...

    def put(self, directory: str, file: str, data: bytes) -> None:
        """Write a small file atomically."""
        ...

    def get(self, directory: str, file: str) -> bytes | None:
        """Read a small file; None if absent."""
        ...

    def size(self, directory: str, file: str) -> int | None:
        """Size of a file; None if absent."""
        ...

    def fetch(self, directory: str, file: str, scratch: Callable[[], Path]) -> Path | None:
        """Local path of the file, downloaded to ``scratch()`` if remote; None if absent."""
        ...

    def remove(self, directory: str, file: str) -> None:
        """Remove one file, if it exists."""
        ...

    def publish(self, directory: str, step: int, manifest: bytes) -> str:
        """Publish a finished directory as the checkpoint of its step; returns its final name."""
        ...

    def discard(self, directory: str) -> None:
        """Remove a directory; unpublishes it first."""
        ...

    def sweep(self) -> None:
        """Remove what a killed process left half-written or half-deleted."""
        ...

    def where(self, directory: str) -> str:
        """Path or URL, for display."""
        ...


def step_of(directory: str) -> int:
    """The step of a published directory, from its name."""
    match = _PUBLISHED.fullmatch(directory)
    if match is None:
        raise CheckpointError(
            f"{directory} is not the name of a checkpoint, such as step-0000000100."
        )
    return int(match[1])


def open_storage(root: Path | str, options: Mapping[str, Any] | None = None) -> CheckpointStorage:
    """A local directory, or an fsspec URL with the options of its file system."""
    if isinstance(root, Path) or "://" not in root:
        return LocalStorage(Path(root))
    try:
        files, path = cast("tuple[Any, str]", fsspec.core.url_to_fs(root, **(options or {})))
    except ImportError as error:
        raise missing_part("s3fs", "s3", f"Saving checkpoints to {root}") from error
    return ObjectStorage(files, path.rstrip("/"), root.rstrip("/"))


class LocalStorage:
    """A directory of a file system that all workers share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def published(self) -> list[str]:
        """Directories with a published name."""
        names = [path.name for path in self.root.glob("step-*")]
        return sorted(filter(_PUBLISHED.fullmatch, names), reverse=True)

    def begin(self, step: int, token: str) -> str:
        """A hidden directory beside the published ones."""
        directory = f".part-step-{step:010d}-{token}"
        make_directory(self.root / directory)
        return directory

    @contextmanager
    def create(self, directory: str, file: str) -> Generator[BinaryIO]:
        """Flushed to disk at the end."""
        with open_private(self.root / directory / file, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def put(self, directory: str, file: str, data: bytes) -> None:
        """Written by a rename."""
        write_atomically(self.root / directory / file, data)

    def get(self, directory: str, file: str) -> bytes | None:
        """Symbolic links are not followed."""
        path = self.fetch(directory, file)
        return None if path is None else path.read_bytes()

    def size(self, directory: str, file: str) -> int | None:
        """Size on disk."""
        path = self.fetch(directory, file)
        return None if path is None else path.stat().st_size

    def fetch(
        self,
        directory: str,
        file: str,
        scratch: Callable[[], Path] | None = None,  # noqa: ARG002
    ) -> Path | None:
        """The file itself."""
        path = self.root / directory / file
        return path if path.is_file() and not path.is_symlink() else None

    def remove(self, directory: str, file: str) -> None:
        """Unlinked immediately."""
        (self.root / directory / file).unlink(missing_ok=True)

    def publish(self, directory: str, step: int, manifest: bytes) -> str:
        """Published by one rename, once everything is on disk."""
        aside, final = self.root / directory, self.root / f"step-{step:010d}"
        with open_private(aside / MANIFEST, "wb") as stream:
            stream.write(manifest)
        sync_tree(aside)
        if final.exists():  # a damaged one of an earlier attempt, or the same step saved again
            self.discard(final.name)
        aside.rename(final)
        sync_directory(self.root)
        return final.name

    def discard(self, directory: str) -> None:
        """Hidden by one rename, then deleted."""
        remove_tree(self.root / directory)

    def sweep(self) -> None:
        """All hidden directories."""
        for path in [*self.root.glob(".part-*"), *find_set_aside(self.root)]:
            shutil.rmtree(path, ignore_errors=True)

    def where(self, directory: str) -> str:
        """The path."""
        return str(self.root / directory)


class ObjectStorage:
    """A prefix of an object store, through fsspec."""

    def __init__(self, files: Any, path: str, url: str) -> None:
        self._files, self._path, self._url = files, path, url

    def published(self) -> list[str]:
        """Directories with a manifest."""
        names = [directory for directory, files in self._listing().items() if MANIFEST in files]
        return sorted(filter(_PUBLISHED.fullmatch, names), reverse=True)

    def begin(self, step: int, token: str) -> str:
        """A unique directory, even if the step was saved before: nothing is overwritten."""
        return f"step-{step:010d}.{token}"

    @contextmanager
    def create(self, directory: str, file: str) -> Generator[BinaryIO]:
        """Multipart upload while it is written."""
        with self._files.open(self._key(directory, file), "wb") as stream:
            yield stream

    def put(self, directory: str, file: str, data: bytes) -> None:
        """In one request."""
        self._files.pipe_file(self._key(directory, file), data)

    def get(self, directory: str, file: str) -> bytes | None:
        """In one request."""
        try:
            return cast("bytes", self._files.cat_file(self._key(directory, file)))
        except FileNotFoundError:
            return None

    def size(self, directory: str, file: str) -> int | None:
        """Size as the store reports it, without a cache."""
        self._files.invalidate_cache()
        try:
            return int(self._files.info(self._key(directory, file))["size"])
        except FileNotFoundError:
            return None

    def fetch(self, directory: str, file: str, scratch: Callable[[], Path]) -> Path | None:
        """Downloaded."""
        path = scratch() / file
        try:
            self._files.get_file(self._key(directory, file), str(path))
        except FileNotFoundError:
            return None
        return path

    def remove(self, directory: str, file: str) -> None:
        """In one request."""
        try:
            self._files.rm_file(self._key(directory, file))
        except FileNotFoundError:
            return

    def publish(self, directory: str, step: int, manifest: bytes) -> str:
        """Published by its manifest; an earlier checkpoint of this step is discarded afterwards."""
        self.put(directory, MANIFEST, manifest)
        for other in self.published():
            if other != directory and step_of(other) == step:
                self.discard(other)
        return directory

    def discard(self, directory: str) -> None:
        """The manifest is removed first: from then on the checkpoint does not exist."""
        self.remove(directory, MANIFEST)
        for file in self._listing().get(directory, ()):
            self.remove(directory, file)

    def sweep(self) -> None:
        """Directories without a manifest."""
        for directory, files in self._listing().items():
            if MANIFEST not in files and _PUBLISHED.fullmatch(directory):
                self.discard(directory)

    def where(self, directory: str) -> str:
        """The URL."""
        return f"{self._url}/{directory}"

    def _key(self, directory: str, file: str) -> str:
        return f"{self._path}/{directory}/{file}"

    def _listing(self) -> dict[str, list[str]]:
        self._files.invalidate_cache()
        files_by_directory: dict[str, list[str]] = {}
        for key in self._files.find(self._path):
            directory, _, file = key.removeprefix(f"{self._path}/").partition("/")
            if file:
                files_by_directory.setdefault(directory, []).append(file)
        return files_by_directory
