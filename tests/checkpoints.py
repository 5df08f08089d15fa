"""State kept and read back the way a run does it, for tests of what must survive that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from yunlu.training.checkpoint.files import CheckpointEntry, CheckpointReader, Snapshot
from yunlu.training.checkpoint.storage import LocalStorage
from yunlu.training.checkpoint.store import CheckpointStore
from yunlu.training.engine_state import (
    fill_optimizer,
    optimizer_shards,
    parameter_shards,
)
from yunlu.training.tensor_slices import TensorSlice, TensorSpec, full_slice

if TYPE_CHECKING:
    from pathlib import Path


class Memory:
    """Whole tensors to read from, without a disk."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(tuple(one.shape), one.dtype) for name, one in self.tensors.items()}

    def read(self, name: str, region: TensorSlice) -> Tensor:
        return self.tensors[name][region.within(full_slice(self.tensors[name].shape))]


def write(root: Path, snapshot: Snapshot) -> Path:
    """Save one checkpoint; its directory."""
    saved: list[CheckpointEntry] = []
    store = CheckpointStore(
        root,
        keep_last=9,
        keep_best=1,
        metric="loss",
        lower_is_better=True,
        saved=lambda entry, seconds: saved.append(entry),
    )
    store.save(snapshot)
    store.close()
    return saved[0].path


def read(path: Path) -> CheckpointReader:
    """A checkpoint in a local directory, every byte of it verified."""
    reader = CheckpointReader(LocalStorage(path.parent), path.name)
    reader.verify()
    return reader


def load(reader: CheckpointReader, group: str) -> dict[str, Tensor]:
    """The tensors of one group, put together."""
    found = reader.group(group)
    return {name: found.read(name, full_slice(spec.shape)) for name, spec in found.specs().items()}


def copy_optimizer(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a checkpoint keeps of an optimiser: tensors by weight, and JSON."""
    weights = list(model.parameters())
    shards, packed = optimizer_shards(optimizer, parameter_shards([model], weights, weights))
    copies = {name: shard.tensor.clone() for name, shard in shards.items()}
    return copies, json.loads(json.dumps(packed))


def restore_optimizer(
    model: nn.Module, optimizer: Any, tensors: dict[str, Tensor], packed: dict[str, Any]
) -> None:
    """Go on from such a copy."""
    weights = list(model.parameters())
    names = parameter_shards([model], weights, weights)
    fill_optimizer(optimizer, names, Memory(tensors), packed)
