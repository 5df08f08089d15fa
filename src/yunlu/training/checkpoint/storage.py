"""Where checkpoints lie: a directory, or a prefix in an object store.

A directory is written aside and published by one rename. An object store cannot rename: there the
manifest comes last, and a checkpoint without one does not exist.
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
from yunlu.core.files import sync_directory, sync_tree, write_atomically

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
        """The directory to write into; the same for all who write this checkpoint."""
        ...

    def create(self, directory: str, file: str) -> AbstractContextManager[BinaryIO]:
        """A new file, safe on disk at the end."""
        ...

    def put(self, directory: str, file: str, data: bytes) -> None:
        """A small file, whole or absent."""
        ...

    def get(self, directory: str, file: str) -> bytes | None:
        """A small file; none where there is none."""
        ...

    def size(self, directory: str, file: str) -> int | None:
        """How long a file is; none where there is none."""
        ...

    def bring(self, directory: str, file: str, scratch: Callable[[], Path]) -> Path | None:
        """The file on this machine, in ``scratch()`` where it has to be fetched; none if there is none."""
        ...

    def remove(self, directory: str, file: str) -> None:
        """Remove one file, if it is there."""
        ...

    def publish(self, directory: str, step: int, manifest: bytes) -> str:
        """Make a finished directory the checkpoint of its step; returns its name from now on."""
        ...

    def discard(self, directory: str) -> None:
        """Remove a directory, out of sight first."""
        ...

    def sweep(self) -> None:
        """Clear what a killed process left half-written or half-deleted."""
        ...

    def where(self, directory: str) -> str:
        """What a person finds it by."""
        ...


def step_of(directory: str) -> int:
    """The step a published directory is named after."""
    found = _PUBLISHED.fullmatch(directory)
    if found is None:
        raise CheckpointError(
            f"{directory} is not the name of a checkpoint, such as step-0000000100."
        )
    return int(found[1])


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
    """A directory of a file system, which all workers see."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def published(self) -> list[str]:
        """By name."""
        found = [path.name for path in self.root.glob("step-*")]
        return sorted(filter(_PUBLISHED.fullmatch, found), reverse=True)

    def begin(self, step: int, token: str) -> str:
        """Beside the published ones, hidden."""
        directory = f".part-step-{step:010d}-{token}"
        (self.root / directory).mkdir(parents=True, exist_ok=True)
        return directory

    @contextmanager
    def create(self, directory: str, file: str) -> Generator[BinaryIO]:
        """Flushed to the disk before it counts as written."""
        with (self.root / directory / file).open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def put(self, directory: str, file: str, data: bytes) -> None:
        """By a rename."""
        write_atomically(self.root / directory / file, data)

    def get(self, directory: str, file: str) -> bytes | None:
        """Not through a link, which could lead anywhere."""
        path = self.bring(directory, file)
        return None if path is None else path.read_bytes()

    def size(self, directory: str, file: str) -> int | None:
        """By the file system."""
        path = self.bring(directory, file)
        return None if path is None else path.stat().st_size

    def bring(
        self,
        directory: str,
        file: str,
        scratch: Callable[[], Path] | None = None,  # noqa: ARG002
    ) -> Path | None:
        """It is here already."""
        path = self.root / directory / file
        return path if path.is_file() and not path.is_symlink() else None

    def remove(self, directory: str, file: str) -> None:
        """At once."""
        (self.root / directory / file).unlink(missing_ok=True)

    def publish(self, directory: str, step: int, manifest: bytes) -> str:
        """By one rename, after everything is on the disk."""
        aside, final = self.root / directory, self.root / f"step-{step:010d}"
        (aside / MANIFEST).write_bytes(manifest)
        sync_tree(aside)
        if final.exists():  # a damaged one of an earlier life, or the same step saved again
            self.discard(final.name)
        aside.rename(final)
        sync_directory(self.root)
        return final.name

    def discard(self, directory: str) -> None:
        """Out of sight by one rename, then at leisure."""
        trash = self.root / f".trash-{directory.lstrip('.')}-{os.getpid()}"
        shutil.rmtree(trash, ignore_errors=True)
        try:
            (self.root / directory).rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)

    def sweep(self) -> None:
        """Whatever is hidden."""
        for path in [*self.root.glob(".part-*"), *self.root.glob(".trash-*")]:
            shutil.rmtree(path, ignore_errors=True)

    def where(self, directory: str) -> str:
        """Its path."""
        return str(self.root / directory)


class ObjectStorage:
    """A prefix of an object store, through fsspec."""

    def __init__(self, files: Any, path: str, url: str) -> None:
        self._files, self._path, self._url = files, path, url

    def published(self) -> list[str]:
        """Those with a manifest."""
        found = [directory for directory, files in self._listing().items() if MANIFEST in files]
        return sorted(filter(_PUBLISHED.fullmatch, found), reverse=True)

    def begin(self, step: int, token: str) -> str:
        """A directory of its own even where the step was saved before: nothing is overwritten."""
        return f"step-{step:010d}.{token}"

    @contextmanager
    def create(self, directory: str, file: str) -> Generator[BinaryIO]:
        """Uploaded in parts while it is written."""
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
        """As the store tells it, not as it was last heard."""
        self._files.invalidate_cache()
        try:
            return int(self._files.info(self._key(directory, file))["size"])
        except FileNotFoundError:
            return None

    def bring(self, directory: str, file: str, scratch: Callable[[], Path]) -> Path | None:
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
        """By its manifest; an earlier checkpoint of this step goes after that."""
        self.put(directory, MANIFEST, manifest)
        for other in self.published():
            if other != directory and step_of(other) == step:
                self.discard(other)
        return directory

    def discard(self, directory: str) -> None:
        """The manifest first: from then on it does not exist."""
        self.remove(directory, MANIFEST)
        for file in self._listing().get(directory, ()):
            self.remove(directory, file)

    def sweep(self) -> None:
        """Whatever has no manifest."""
        for directory, files in self._listing().items():
            if MANIFEST not in files and _PUBLISHED.fullmatch(directory):
                self.discard(directory)

    def where(self, directory: str) -> str:
        """Its URL."""
        return f"{self._url}/{directory}"

    def _key(self, directory: str, file: str) -> str:
        return f"{self._path}/{directory}/{file}"

    def _listing(self) -> dict[str, list[str]]:
        self._files.invalidate_cache()
        found: dict[str, list[str]] = {}
        for key in self._files.find(self._path):
            directory, _, file = key.removeprefix(f"{self._path}/").partition("/")
            if file:
                found.setdefault(directory, []).append(file)
        return found
