"""A checkpoint in files: complete or absent, checksummed, free of pickles.

A directory ``step-0000000123`` holds one safetensors file per worker that wrote, ``state.json`` and
``manifest.json``, which lists the region of each tensor in each file, and the size and checksum of each
file. Every worker writes its file and then a report; the leader publishes once all reports exist.
Loading verifies every byte first: torch and safetensors load a flipped bit silently.

One file of tensors in the safetensors format, written in one pass with its checksum.
The library writes to local paths only, and its file would have to be read again for the checksum.

The manifest of a checkpoint: the region of each tensor in each file, and all checksums.
It is untrusted input: everything is checked before a byte of another file is read.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from yunlu.core.errors import CheckpointError
from yunlu.core.limits import decode_json
from yunlu.training.checkpoint.storage import MANIFEST, CheckpointStorage, LocalStorage
from yunlu.training.tensor_slices import (
    ShardGroupReader,
    TensorShard,
    TensorSlice,
    TensorSpec,
    full_slice,
    join_groups,
    missing_elements,
    shard_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import BinaryIO

    from yunlu.training.checkpoint.store import SaveGroup

BLOCK_BYTES = 1 << 22

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Type names of the format."""

DTYPES = {code: dtype for dtype, code in CODES.items()}


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names sorted by element size, widest first: aligns every tensor without gaps."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def write_tensors(
    stream: BinaryIO, tensors: Mapping[str, Tensor], between: Callable[[], None]
) -> dict[str, Any]:
    """Write contiguous CPU tensors; returns size and checksum of the file.

    ``between`` is called between blocks and may raise, to abandon the write.
    """
    digest = xxhash.xxh3_128()
    count = 0
    for block in _blocks(tensors):
        between()
        digest.update(block)
        stream.write(block)
        count += len(block)
    return {"bytes": count, "xxh3_128": digest.hexdigest()}


def describe(stream: BinaryIO) -> dict[str, Any]:
    """Size and checksum of a file."""
    digest = xxhash.xxh3_128()
    count = 0
    while block := stream.read(BLOCK_BYTES):
        digest.update(block)
        count += len(block)
    return {"bytes": count, "xxh3_128": digest.hexdigest()}


def describe_bytes(data: bytes) -> dict[str, Any]:
    """Size and checksum of a small file."""
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    names = in_file_order(tensors)
    yield _header(tensors, names)
    for name in names:
        flat = tensors[name].detach().reshape(-1)
        if flat.numel():
            data = memoryview(cast("Any", flat.view(torch.uint8).numpy()))
            for start in range(0, len(data), BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]


def _header(tensors: Mapping[str, Tensor], names: list[str]) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        code = CODES[tensors[name].dtype]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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


class CheckpointReader:
    """Reads regions of tensors; each file is verified before anything in it is used."""

    def __init__(self, storage: CheckpointStorage, directory: str) -> None:
        self._storage, self._name = storage, directory
        self._manifest = parse_manifest(storage.get(directory, MANIFEST), directory)
        self._clear: Callable[[], object] | None = None
        self._open: dict[str, Any] = {}
        self.step = self._manifest.step
        self.metrics = self._manifest.metrics
        self.state: dict[str, Any] = self._read_state()

    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors it holds, named ``<group>/<name>``."""
        return self._manifest.specs

    def group(self, name: str) -> ShardGroupReader:
        """The tensors of one group."""
        return ShardGroupReader(self, name)

    def verify(
        self, targets: Iterable[TensorShard] | None = None, *, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Compare checksums of the files that hold the target shards, or of all files.

        ``share``: (rank, size) of workers that divide the files among them.
        """
        files = sorted(self._manifest.files) if targets is None else self._files_of(targets)
        rank, size = share
        for file in files[rank::size]:
            if file != STATE:
                self._file(file)

    def read(self, name: str, region: TensorSlice) -> Tensor:
        """Read a region of a tensor."""
        spec = self._manifest.specs[name]
        stored_shards = self._find_stored(name, region)
        for stored in stored_shards:
            self._file(stored.file)
        try:
            if len(stored_shards) == 1 and stored_shards[0].region == region:
                return self._file(stored_shards[0].file).get_tensor(name)
            result = torch.empty(region.size, dtype=spec.dtype)
            for stored in stored_shards:
                common = region.intersect(stored.region)
                result[common.within(region)] = self._slice(name, stored, common)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"Checkpoint {self._name} cannot be read: {error}") from error
        return result

    def close(self) -> None:
        """Close the files, and delete downloads."""
        self._open.clear()
        if self._clear is not None:
            self._clear()
            self._clear = None

    def _find_stored(self, name: str, region: TensorSlice) -> list[StoredShard]:
        candidates = self._manifest.stored_shards[name]
        exact = [stored for stored in candidates if stored.region == region]
        if exact:
            return exact[:1]
        return [stored for stored in candidates if not stored.region.intersect(region).is_empty]

    def _slice(self, name: str, stored: StoredShard, common: TensorSlice) -> Tensor:
        file = self._file(stored.file)
        if common == stored.region:  # also the only way to read a scalar
            return file.get_tensor(name)
        return file.get_slice(name)[common.within(stored.region)]

    def _files_of(self, targets: Iterable[TensorShard]) -> list[str]:
        known = self._manifest.stored_shards
        shards = [shard for shard in targets if shard.name in known]
        return sorted(
            {
                stored.file
                for shard in shards
                if not shard.region.is_empty
                for stored in self._find_stored(shard.name, shard.region)
            }
        )

    def _file(self, file: str) -> Any:
        """Open a file after verifying its checksum and its contents."""
        if file in self._open:
            return self._open[file]
        path = self._storage.fetch(self._name, file, self._make_scratch)
        if path is None:
            raise CheckpointError(f"Checkpoint {self._name} is torn: {file} is missing.")
        with path.open("rb") as stream:
            self._compare(file, describe(stream))
        try:
            opened = cast("Any", safe_open(path, framework="pt"))
            self._check_contents(file, opened)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"Checkpoint {self._name} cannot be read: {error}") from error
        self._open[file] = opened
        return opened

    def _make_scratch(self) -> Path:
        if self._clear is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="yunlu-checkpoint-"))
            self._clear = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def _check_contents(self, file: str, opened: Any) -> None:
        names = set(opened.keys())
        for name, stored_shards in self._manifest.stored_shards.items():
            for stored in stored_shards:
                if stored.file != file:
                    continue
                content = opened.get_slice(name) if name in names else None
                code = CODES[self._manifest.specs[name].dtype]
                if (
                    content is None
                    or tuple(content.get_shape()) != stored.region.size
                    or content.get_dtype() != code
                ):
                    raise CheckpointError(
                        f"Checkpoint {self._name} is damaged: {file} does not hold {name} as its manifest says."
                    )

    def _read_state(self) -> dict[str, Any]:
        data = self._storage.get(self._name, STATE)
        if data is None:
            raise CheckpointError(f"Checkpoint {self._name} is torn: {STATE} is missing.")
        self._compare(STATE, describe_bytes(data))
        try:
            return decode_json(data)
        except ValueError as error:
            raise CheckpointError(f"Checkpoint {self._name} cannot be read: {error}") from error

    def _compare(self, file: str, description: dict[str, Any]) -> None:
        if description != self._manifest.files[file]:
            raise CheckpointError(
                f"Checkpoint {self._name} is damaged: {file} does not match its checksum."
            )


_POLL_S = (0.002, 0.1)
"""First and longest interval at which the leader polls for reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One worker's part of the state to resume a run."""

    step: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    """Full tensors by group (``model``, ``optimizer``, ``random``); nobody changes them."""
    shards: dict[str, dict[str, TensorShard]] = field(
        default_factory=dict[str, dict[str, TensorShard]]
    )
    """Shards of live tensors by group; copied before training goes on."""
    state: dict[str, Any]
    """JSON, the same on all workers; the leader's is written."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics of the evaluation at this step, if any."""

    @property
    def groups(self) -> list[str]:
        """All groups, also empty ones."""
        return sorted({*self.tensors, *self.shards})

    def all_shards(self) -> dict[str, TensorShard]:
        """All shards named ``<group>/<name>``, without empty ones."""
        full_tensors = {
            group: {name: shard_of(name, tensor) for name, tensor in tensors.items()}
            for group, tensors in self.tensors.items()
        }
        return {
            shard.name: shard
            for shard in [*join_groups(full_tensors), *join_groups(self.shards)]
            if not shard.region.is_empty or 0 in shard.shape
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """A published checkpoint, by its manifest."""

    path: Path
    """Local path; else only its name."""
    where: str
    """Path or URL, for display."""
    step: int
    metrics: dict[str, float]
    bytes: int


class SaveAbandonedError(Exception):
    """The save was abandoned."""


def write_part(
    storage: CheckpointStorage,
    directory: str,
    group: SaveGroup,
    shards: Mapping[str, TensorShard],
    *,
    groups: list[str],
    between: Callable[[], None],
) -> None:
    """Write this worker's file, then its report."""
    tensors = {name: shard.tensor.detach().cpu().contiguous() for name, shard in shards.items()}
    with storage.create(directory, _file_of(group.rank)) as stream:
        described = write_tensors(stream, tensors, between)
    tensor_entries = {
        name: [shard.shape, CODES[shard.tensor.dtype], shard.region.offset, shard.region.size]
        for name, shard in shards.items()
    }
    report = {"version": VERSION, "file": described, "tensors": tensor_entries, "groups": groups}
    storage.put(directory, _report_of(group.rank), pack_manifest(report))


def report_failure(storage: CheckpointStorage, directory: str, group: SaveGroup, why: str) -> None:
    """Report to the leader that this worker's save failed."""
    report = {"version": VERSION, "failed": why}
    storage.put(directory, _report_of(group.rank), pack_manifest(report))


def publish(
    storage: CheckpointStorage,
    directory: str,
    group: SaveGroup,
    snapshot: Snapshot,
    *,
    patience_s: float,
    between: Callable[[], None],
) -> CheckpointEntry:
    """Wait for all reports, check that nothing is missing, and publish the checkpoint."""
    state = json.dumps(snapshot.state).encode()
    storage.put(directory, STATE, state)
    reports = _await_reports(storage, directory, group, patience_s, between)
    body = _merge(snapshot, reports)
    body["files"][STATE] = describe_bytes(state)
    for file, described in body["files"].items():
        if storage.size(directory, file) != described["bytes"]:
            raise CheckpointError(
                f"{file} of step {snapshot.step} does not have the size that was written."
            )
    packed = pack_manifest(body)
    manifest = parse_manifest(packed, directory)  # a missing region fails now, not at loading
    for rank in range(group.size):
        storage.remove(directory, _report_of(rank))
    between()
    name = storage.publish(directory, snapshot.step, packed)
    return _entry(storage, name, manifest)


def entries(storage: CheckpointStorage) -> list[CheckpointEntry]:
    """Published checkpoints with a readable manifest, oldest first; contents are not verified."""
    published: list[CheckpointEntry] = []
    for name in storage.published():
        try:
            published.append(
                _entry(storage, name, parse_manifest(storage.get(name, MANIFEST), name))
            )
        except CheckpointError:
            continue
    return sorted(published, key=lambda entry: entry.step)


def _await_reports(
    storage: CheckpointStorage,
    directory: str,
    group: SaveGroup,
    patience_s: float,
    between: Callable[[], None],
) -> list[dict[str, Any]]:
    deadline = time.monotonic() + patience_s
    pause_s, longest_s = _POLL_S
    reports: dict[int, dict[str, Any]] = {}
    while True:
        for rank in set(range(group.size)) - set(reports):
            data = storage.get(directory, _report_of(rank))
            if data is not None:
                reports[rank] = unpack(data, directory)
                if "failed" in reports[rank]:
                    raise CheckpointError(
                        f"Worker {rank} could not save its part: {reports[rank]['failed']}"
                    )
        if len(reports) == group.size:
            return [reports[rank] for rank in range(group.size)]
        between()
        if time.monotonic() > deadline:
            silent = sorted(set(range(group.size)) - set(reports))
            raise CheckpointError(
                f"Workers {silent} have not saved their part within {patience_s:.0f} s.",
                hint="Is the directory of the run on a file system that all workers share?",
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _merge(snapshot: Snapshot, reports: list[dict[str, Any]]) -> dict[str, Any]:
    tensors: dict[str, dict[str, Any]] = {}
    for rank, report in enumerate(reports):
        for name, (shape, code, offset, size) in report["tensors"].items():
            known = tensors.setdefault(name, {"shape": shape, "dtype": code, "shards": []})
            if (known["shape"], known["dtype"]) != (shape, code):
                raise CheckpointError(f"Workers disagree on the shape or type of {name}.")
            known["shards"].append([_file_of(rank), offset, size])
    return {
        "version": VERSION,
        "step": snapshot.step,
        "metrics": snapshot.metrics,
        "groups": sorted({group for report in reports for group in report["groups"]}),
        "files": {_file_of(rank): report["file"] for rank, report in enumerate(reports)},
        "tensors": tensors,
    }


def _entry(storage: CheckpointStorage, name: str, manifest: Manifest) -> CheckpointEntry:
    return CheckpointEntry(
        path=storage.root / name if isinstance(storage, LocalStorage) else Path(name),
        where=storage.where(name),
        step=manifest.step,
        metrics=manifest.metrics,
        bytes=manifest.nbytes,
    )


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _report_of(rank: int) -> str:
    return f"rank-{rank:05d}.json"
