"""A checkpoint in files: complete or absent, checksummed, free of pickles.

A directory ``step-0000000123`` holds one safetensors file per worker that wrote, ``state.json`` and
``manifest.json``, which lists the region of each tensor in each file, and the size and checksum of each
file. Every worker writes its file and then a report; the leader publishes once all reports exist.
Loading verifies every byte first: torch and safetensors load a flipped bit silently.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from yunlu.core.errors import CheckpointError
from yunlu.training.checkpoint.manifest import (
    STATE,
    VERSION,
    pack_manifest,
    parse_manifest,
    unpack,
)
from yunlu.training.checkpoint.storage import MANIFEST, CheckpointStorage, LocalStorage
from yunlu.training.checkpoint.tensor_files import CODES, describe_bytes, write_tensors
from yunlu.training.parallel.tensor_slices import TensorShard, join_groups, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yunlu.training.checkpoint.manifest import Manifest
    from yunlu.training.checkpoint.save_group import SaveGroup

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
