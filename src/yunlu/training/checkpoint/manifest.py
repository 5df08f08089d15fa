"""The manifest of a checkpoint: the region of each tensor in each file, and all checksums.

It is untrusted input: everything is checked before a byte of another file is read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import xxhash

from yunlu.core.errors import CheckpointError
from yunlu.core.json_decode import decode_json
from yunlu.training.checkpoint.tensor_files import DTYPES
from yunlu.training.parallel.tensor_slices import (
    TensorSlice,
    TensorSpec,
    full_slice,
    missing_elements,
)

STATE = "state.json"
VERSION = 2
_FILES = re.compile(r"rank-\d{5}\.safetensors|state\.json")
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A region of a tensor in a file, under the tensor's name."""

    file: str
    region: TensorSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint."""

    step: int
    metrics: dict[str, float]
    groups: list[str]
    """All groups, also empty ones."""
    files: dict[str, dict[str, Any]]
    """Size and checksum by name."""
    specs: dict[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    stored_shards: dict[str, list[StoredShard]] = field(
        default_factory=dict[str, list[StoredShard]]
    )

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file["bytes"] for file in self.files.values())


def pack_manifest(body: dict[str, Any]) -> bytes:
    """Serialised manifest with a checksum of its own."""
    return json.dumps({**body, "checksum": _checksum(body)}).encode()


def parse_manifest(data: bytes | None, name: str) -> Manifest:
    """Parse and check a manifest; ``name`` is the checkpoint's, for errors."""
    body = unpack(data, name)
    try:
        return _ManifestParser(name).manifest(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _altered(name, f"{type(error).__name__} {error}") from error


def unpack(data: bytes | None, name: str) -> dict[str, Any]:
    """The body of a manifest with a valid checksum and a known version."""
    try:
        body = decode_json(data or b"")
        checksum = body.pop("checksum")
        version = body["version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"Checkpoint {name} is torn: no readable manifest.") from error
    if checksum != _checksum(body):
        raise _altered(name, "its checksum is wrong")
    if version != VERSION:
        raise CheckpointError(
            f"Checkpoint {name} has format {version}; this Yunlu reads {VERSION}.",
            hint="Resume with the Yunlu version that wrote it.",
        )
    return body


class _ManifestParser:
    def __init__(self, name: str) -> None:
        self._name = name

    def manifest(self, body: dict[str, Any]) -> Manifest:
        files = body["files"]
        for file, described in files.items():
            self._require(_FILES.fullmatch(file), f"no file is called {file!r}")
            _size(described["bytes"])
        self._require(STATE in files, "it has no state")
        groups = [str(group) for group in body["groups"]]
        manifest = Manifest(
            step=_size(body["step"]),
            metrics=dict(body["metrics"]),
            groups=groups,
            files=files,
        )
        for name, entry in body["tensors"].items():
            shape = _numbers(entry["shape"])
            self._require(name.partition("/")[0] in groups, f"{name!r} is in no group")
            self._require(entry["dtype"] in DTYPES, f"{name!r} has an unknown type")
            stored_shards = [
                StoredShard(file, TensorSlice(_numbers(offset), _numbers(size)))
                for file, offset, size in entry["shards"]
            ]
            for stored in stored_shards:
                self._check(name, shape, stored, files)
            regions = [stored.region for stored in stored_shards]
            self._require(not missing_elements(full_slice(shape), regions), f"{name!r} has a hole")
            manifest.specs[name] = TensorSpec(shape, DTYPES[entry["dtype"]])
            manifest.stored_shards[name] = stored_shards
        return manifest

    def _check(
        self, name: str, shape: tuple[int, ...], stored: StoredShard, files: dict[str, Any]
    ) -> None:
        region = stored.region
        self._require(
            stored.file in files and stored.file != STATE, f"{name!r} is in an unknown file"
        )
        self._require(
            len(region.offset) == len(region.size) == len(shape), f"{name!r} is cut wrongly"
        )
        inside = all(
            start + length <= end
            for start, length, end in zip(region.offset, region.size, shape, strict=True)
        )
        self._require(inside, f"a piece of {name!r} lies outside it")

    def _require(self, condition: object, problem: str) -> None:
        if not condition:
            raise _altered(self._name, problem)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_size(value) for value in values)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r} is not a size")
    return value


def _altered(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"Checkpoint {name} is damaged: its manifest was altered ({why}).")


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
