"""A checkpoint on disk: complete or absent, checksummed, free of pickles.

A directory ``step-0000000123`` holds safetensors files, ``state.json`` and ``manifest.json`` with
the size and checksum of each file. It is written aside and published by one rename. Loading
verifies every byte first: torch and safetensors load a flipped bit without a word.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from yunlu.core.errors import CheckpointError
from yunlu.core.files import sync_directory, sync_tree

if TYPE_CHECKING:
    from torch import Tensor

_MANIFEST = "manifest.json"
_STATE = "state.json"
_VERSION = 1
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a run needs to go on, as plain tensors and JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """File name without suffix (``model``, ``optimizer``, ``ema``, ``random``) → named tensors."""
    state: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """The evaluation made at this very step, if there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A published checkpoint, by its manifest."""

    path: Path
    step: int
    metrics: dict[str, float]
    bytes: int


def write(root: Path, snapshot: Snapshot) -> Entry:
    """Write aside, flush, publish. On any failure nothing published is touched."""
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{snapshot.step:010d}"
    aside = root / f".part-{final.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        for name, tensors in snapshot.tensors.items():
            save_file(tensors, aside / f"{name}.safetensors")
        (aside / _STATE).write_text(json.dumps(snapshot.state))
        sizes = {file.name: _describe(file) for file in sorted(aside.iterdir())}
        body = {
            "version": _VERSION,
            "step": snapshot.step,
            "metrics": snapshot.metrics,
            "files": sizes,
        }
        (aside / _MANIFEST).write_text(json.dumps({**body, "checksum": _checksum(body)}))
        sync_tree(aside)
        if final.exists():  # a damaged one of an earlier life, or the same step saved again
            discard(final)
        aside.rename(final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_directory(root)
    return _entry(final, body)


def entries(root: Path) -> list[Entry]:
    """Published checkpoints with a readable manifest, oldest first; contents are not verified."""
    found: list[Entry] = []
    for path in sorted(root.glob("step-*")):
        try:
            found.append(_entry(path, _read_manifest(path)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda entry: entry.step)


def steps_on_disk(root: Path) -> list[Path]:
    """Every published directory, newest first, readable or not."""
    return sorted(root.glob("step-*"), reverse=True)


def step_of(path: Path) -> int:
    """The step a published directory is named after."""
    return int(path.name.removeprefix("step-"))


def read(path: Path) -> Snapshot:
    """Verify every byte, then load. Refuses a torn or altered checkpoint."""
    body = _read_manifest(path)
    for name, expected in body["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"Checkpoint {path.name} is torn: {name} is missing.")
        if _describe(file) != expected:
            raise CheckpointError(
                f"Checkpoint {path.name} is damaged: {name} does not match its checksum."
            )
    try:
        tensors = {
            Path(name).stem: load_file(path / name)
            for name in body["files"]
            if name.endswith(".safetensors")
        }
        state = json.loads((path / _STATE).read_text())
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"Checkpoint {path.name} cannot be read: {error}") from error
    return Snapshot(step=body["step"], tensors=tensors, state=state, metrics=body["metrics"])


def discard(path: Path) -> None:
    """Remove a checkpoint: first out of sight by one rename, then at leisure."""
    trash = path.with_name(f".trash-{path.name}-{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(root: Path) -> None:
    """Clear what a killed process left half-written or half-deleted."""
    for path in [*root.glob(".part-*"), *root.glob(".trash-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        checksum = manifest.pop("checksum")
        version = manifest["version"]
        # A name that leaves the directory would make us read someone else's file.
        safe = all(Path(name).name == name for name in manifest["files"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"Checkpoint {path.name} is torn: no readable manifest.") from error
    if checksum != _checksum(manifest) or not safe:
        raise CheckpointError(f"Checkpoint {path.name} is damaged: its manifest was altered.")
    if version != _VERSION:
        raise CheckpointError(
            f"Checkpoint {path.name} has format {version}; this Yunlu reads {_VERSION}.",
            hint="Resume with the Yunlu version that wrote it.",
        )
    return manifest


def _entry(path: Path, body: dict[str, Any]) -> Entry:
    return Entry(
        path=path,
        step=body["step"],
        metrics=body["metrics"],
        bytes=sum(file["bytes"] for file in body["files"].values()),
    )


def _describe(file: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return {"bytes": file.stat().st_size, "xxh3_128": digest.hexdigest()}


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
