"""A checkpoint in files: complete or absent, checksummed, free of pickles.

A directory ``step-0000000123`` holds one safetensors file per worker that wrote, ``state.json`` and
``manifest.json``, which says which file holds which box of which tensor, and the size and checksum of
each file. Every worker writes its file and then a report of it; the leader publishes when all reports
are there. Loading verifies every byte first: torch and safetensors load a flipped bit without a word.
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

_LOOK_S = (0.002, 0.1)
"""How often the leader looks for the others' reports, at first and later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one worker contributes of everything a run needs to go on."""

    step: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    """By group (``model``, ``optimizer``, ``random``), whole tensors that nobody else changes."""
    shards: dict[str, dict[str, TensorShard]] = field(
        default_factory=dict[str, dict[str, TensorShard]]
    )
    """By group, parts of live tensors: they are copied before training goes on."""
    state: dict[str, Any]
    """JSON, the same on all workers; the leader's is written."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """The evaluation made at this very step, if there was one."""

    @property
    def groups(self) -> list[str]:
        """Also those without a tensor."""
        return sorted({*self.tensors, *self.shards})

    def all_shards(self) -> dict[str, TensorShard]:
        """Everything as pieces named ``<group>/<name>``; those that hold nothing are left out."""
        kept = {
            group: {name: shard_of(name, tensor) for name, tensor in tensors.items()}
            for group, tensors in self.tensors.items()
        }
        return {
            shard.name: shard
            for shard in [*join_groups(kept), *join_groups(self.shards)]
            if not shard.region.is_empty or 0 in shard.shape
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """A published checkpoint, by its manifest."""

    path: Path
    """Of a local one; else its name alone."""
    where: str
    """Path or URL, for people."""
    step: int
    metrics: dict[str, float]
    bytes: int


class SaveAbandonedError(Exception):
    """The save was given up."""


def write_part(
    place: CheckpointStorage,
    directory: str,
    crew: SaveGroup,
    shards: Mapping[str, TensorShard],
    *,
    groups: list[str],
    between: Callable[[], None],
) -> None:
    """Write this worker's file, then its report."""
    tensors = {name: shard.tensor.detach().cpu().contiguous() for name, shard in shards.items()}
    with place.create(directory, _file_of(crew.rank)) as stream:
        described = write_tensors(stream, tensors, between)
    told = {
        name: [shard.shape, CODES[shard.tensor.dtype], shard.region.offset, shard.region.size]
        for name, shard in shards.items()
    }
    report = {"version": VERSION, "file": described, "tensors": told, "groups": groups}
    place.put(directory, _report_of(crew.rank), pack_manifest(report))


def report_failure(place: CheckpointStorage, directory: str, crew: SaveGroup, why: str) -> None:
    """Tell the leader not to wait for this worker."""
    report = {"version": VERSION, "failed": why}
    place.put(directory, _report_of(crew.rank), pack_manifest(report))


def publish(
    place: CheckpointStorage,
    directory: str,
    crew: SaveGroup,
    snapshot: Snapshot,
    *,
    patience_s: float,
    between: Callable[[], None],
) -> CheckpointEntry:
    """Wait for everyone's report, check that nothing is missing, and make it a checkpoint."""
    state = json.dumps(snapshot.state).encode()
    place.put(directory, STATE, state)
    reports = _await_reports(place, directory, crew, patience_s, between)
    body = _merge(snapshot, reports)
    body["files"][STATE] = describe_bytes(state)
    for file, described in body["files"].items():
        if place.size(directory, file) != described["bytes"]:
            raise CheckpointError(
                f"{file} of step {snapshot.step} is not as long as it was written."
            )
    packed = pack_manifest(body)
    manifest = parse_manifest(packed, directory)  # a hole is found now, not when it is needed
    for rank in range(crew.size):
        place.remove(directory, _report_of(rank))
    between()
    name = place.publish(directory, snapshot.step, packed)
    return _entry(place, name, manifest)


def entries(place: CheckpointStorage) -> list[CheckpointEntry]:
    """Published checkpoints with a readable manifest, oldest first; contents are not verified."""
    found: list[CheckpointEntry] = []
    for name in place.published():
        try:
            found.append(_entry(place, name, parse_manifest(place.get(name, MANIFEST), name)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda entry: entry.step)


def _await_reports(
    place: CheckpointStorage,
    directory: str,
    crew: SaveGroup,
    patience_s: float,
    between: Callable[[], None],
) -> list[dict[str, Any]]:
    deadline = time.monotonic() + patience_s
    pause_s, longest_s = _LOOK_S
    reports: dict[int, dict[str, Any]] = {}
    while True:
        for rank in set(range(crew.size)) - set(reports):
            data = place.get(directory, _report_of(rank))
            if data is not None:
                reports[rank] = unpack(data, directory)
                if "failed" in reports[rank]:
                    raise CheckpointError(
                        f"Worker {rank} could not save its part: {reports[rank]['failed']}"
                    )
        if len(reports) == crew.size:
            return [reports[rank] for rank in range(crew.size)]
        between()
        if time.monotonic() > deadline:
            silent = sorted(set(range(crew.size)) - set(reports))
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
            known = tensors.setdefault(name, {"shape": shape, "dtype": code, "pieces": []})
            if (known["shape"], known["dtype"]) != (shape, code):
                raise CheckpointError(f"Workers disagree on the shape or type of {name}.")
            known["pieces"].append([_file_of(rank), offset, size])
    return {
        "version": VERSION,
        "step": snapshot.step,
        "metrics": snapshot.metrics,
        "groups": sorted({group for report in reports for group in report["groups"]}),
        "files": {_file_of(rank): report["file"] for rank, report in enumerate(reports)},
        "tensors": tensors,
    }


def _entry(place: CheckpointStorage, name: str, manifest: Manifest) -> CheckpointEntry:
    return CheckpointEntry(
        path=place.root / name if isinstance(place, LocalStorage) else Path(name),
        where=place.where(name),
        step=manifest.step,
        metrics=manifest.metrics,
        bytes=manifest.nbytes,
    )


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _report_of(rank: int) -> str:
    return f"rank-{rank:05d}.json"
