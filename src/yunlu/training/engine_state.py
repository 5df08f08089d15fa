"""State of an engine: tensor shards and JSON.

The same state is written to a checkpoint, read back under any layout, and sent between live workers:
the optimiser's shards are named after the weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yunlu.core.errors import CheckpointError, DataError
from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.determinism import copy_random, restore_random
from yunlu.training.tensor_slices import (
    ShardGroupReader,
    TensorShard,
    TensorSlice,
    TensorSpec,
    fill,
    full_slice,
    shard_of,
    weights_of,
)
from yunlu.training.tensor_slices import fill as fill_shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from yunlu.training.checkpoint.files import CheckpointReader
    from yunlu.training.engine import Engine
    from yunlu.training.tensor_slices import ShardReader


_KINDS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Plain numbers are stored as scalars whose name ends in ``:<type>``: JSON is written by one worker
only, which does not hold the weights of the others."""
_NAMES = {kind.__name__: kind for kind in _KINDS}
_PARAMETER_KEYS = ("params", "param_names")


def parameter_shards(
    parts: Iterable[nn.Module],
    weights: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    aliases: Mapping[str, str] | None = None,
) -> dict[int, TensorShard]:
    """Shards of the weights, by ``id`` of each leaf.

    Args:
        parts: The modules that hold the weights, with names of the full model.
        weights: The modules' weights.
        leaves: Tensors that the optimiser updates: the weights, or plain tensors over their memory.
        aliases: See ``weights_of``.
    """
    names: dict[int, str] = {}
    for part in parts:
        for name, weight in part.named_parameters():
            names.setdefault(id(weight), (aliases or {}).get(name, name))
    return {
        id(leaf): replace(shard_of(names[id(weight)], weight), tensor=leaf.detach())
        for weight, leaf in zip(weights, leaves, strict=True)
    }


def optimizer_shards(
    optimizer: Any, names: Mapping[int, TensorShard]
) -> tuple[dict[str, TensorShard], dict[str, Any]]:
    """The state as shards named ``<weight>/<key>``, and the hyperparameters by weight as JSON.

    Args:
        optimizer: torch's, or one with the same ``state`` and ``param_groups``, over plain tensors.
        names: Shard of the weight, by ``id`` of such a tensor.
    """
    shards: dict[str, TensorShard] = {}
    for leaf, state in optimizer.state.items():
        weight = names[id(leaf)]
        for key, value in state.items():
            shard = _state_shard(weight, key, value)
            if shard is not None:
                shards[shard.name] = shard
    return shards, {"groups": _describe_groups(optimizer, names)}


def empty_optimizer_shards(
    optimizer: Any, names: Mapping[int, TensorShard], specs: Mapping[str, TensorSpec]
) -> dict[str, TensorShard]:
    """Uninitialised shards for the state in ``specs``, sized for this worker's weights."""
    by_weight: dict[str, list[str]] = {}
    for name in specs:
        by_weight.setdefault(name.rpartition("/")[0], []).append(name)
    targets: dict[str, TensorShard] = {}
    for group in optimizer.param_groups:
        for leaf in group["params"]:
            weight = names[id(leaf)]
            for name in by_weight.get(weight.name, ()):
                spec = specs[name]
                region = weight.region if spec.shape == weight.shape else full_slice(spec.shape)
                tensor = torch.empty(
                    region.size, dtype=spec.dtype, device=_device(name, leaf, group)
                )
                targets[name] = TensorShard(name, spec.shape, region, tensor)
    return targets


def install_optimizer(
    optimizer: Any,
    names: Mapping[int, TensorShard],
    filled: Mapping[str, TensorShard],
    packed: Mapping[str, Any],
) -> None:
    """Load the state in these shards."""
    by_weight: dict[str, dict[str, Any]] = {}
    for name, shard in filled.items():
        weight, _, key = name.rpartition("/")
        key, _, kind = key.partition(":")
        value = _NAMES[kind](shard.tensor.item()) if kind else shard.tensor
        by_weight.setdefault(weight, {})[key] = value
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    position = 0
    for group in optimizer.param_groups:
        indices = range(position, position + len(group["params"]))
        position += len(group["params"])
        weights = [names[id(leaf)].name for leaf in group["params"]]
        settings = {key: value for key, value in group.items() if key not in _PARAMETER_KEYS}
        groups.append(settings | _find_group(packed, weights) | {"params": list(indices)})
        state |= {
            index: by_weight[name]
            for index, name in zip(indices, weights, strict=True)
            if name in by_weight
        }
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"The state does not fit the optimiser: {error}") from error


def fill_optimizer(
    optimizer: Any, names: Mapping[int, TensorShard], reader: ShardReader, packed: Mapping[str, Any]
) -> None:
    """Load the state from a reader, sharded as this worker's weights."""
    targets = empty_optimizer_shards(optimizer, names, reader.specs())
    fill(targets.values(), reader)
    install_optimizer(optimizer, names, targets, packed)


def _state_shard(weight: TensorShard, key: str, value: Any) -> TensorShard | None:
    if value is None:  # e.g. SGD before its first momentum
        return None
    name = f"{weight.name}/{key}"
    if not isinstance(value, Tensor):
        kind = type(value)
        if kind not in _KINDS:
            raise CheckpointError(
                f"The optimiser keeps {key} ({kind.__name__}) for {weight.name}, which is no tensor or number.",
                hint="Use an optimiser whose state is tensors and numbers.",
            )
        value, name = torch.tensor(value, dtype=_KINDS[kind]), f"{name}:{kind.__name__}"
    shape = tuple(value.shape)
    if shape == weight.region.size:
        return TensorShard(name, weight.shape, weight.region, value.detach())
    # Blocks of an 8-bit state, or rows and columns of a factored one, are specific to this sharding.
    if value.numel() > 1 and weight.region != full_slice(weight.shape):
        raise CheckpointError(
            f"The optimiser's {key} of {weight.name} is {list(shape)}, which cannot be sharded as the weight "
            f"is ({list(weight.region.size)} of {list(weight.shape)}).",
            hint="Use an optimiser with full states (adamw, momentum), or a layout with dp only.",
        )
    return TensorShard(name, shape, TensorSlice((0,) * len(shape), shape), value.detach())


def _describe_groups(optimizer: Any, names: Mapping[int, TensorShard]) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        numbers = {
            key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key not in _PARAMETER_KEYS
        }
        weights = [names[id(leaf)].name for leaf in group["params"]]
        described.append({"weights": weights, "values": numbers})
    return described


def _find_group(packed: Mapping[str, Any], weights: list[str]) -> dict[str, Any]:
    """The saved values of a group with one of these weights; else the values common to all groups."""
    groups: list[dict[str, Any]] = packed["groups"]
    weight_names = set(weights)
    for group in groups:
        if not weight_names.isdisjoint(group["weights"]):
            values = group["values"]
            break
    else:
        # Weights of another stage: values common to all groups apply.
        values = {
            key: value
            for key, value in (groups[0]["values"] if groups else {}).items()
            if all(group["values"].get(key) == value for group in groups)
        }
    # JSON has no tuples, which optimisers compare and unpack.
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }


def _device(name: str, leaf: Tensor, group: Mapping[str, Any]) -> torch.device:
    # As in torch: the step count stays on the CPU unless the kernel runs on the device.
    is_step = name.rpartition("/")[2].partition(":")[0] == "step"
    on_device = not is_step or group.get("capturable") or group.get("fused")
    return leaf.device if on_device else torch.device("cpu")


Groups = dict[str, dict[str, TensorShard]]


class EngineState:
    """State of an engine; collected once, since FSDP exposes other tensors during a step."""

    def __init__(self, engine: Engine, model_aliases: Mapping[str, str]) -> None:
        self._engine = engine
        self.aliases = dict(model_aliases)
        parts = engine.wrapped.parts
        self.model = weights_of(parts, aliases=model_aliases)
        self._leaves = parameter_shards(
            parts, engine.wrapped.weights, engine.wrapped.leaves, aliases=model_aliases
        )

    def moving(self) -> set[str]:
        """Checkpoint names of tensors that forward passes change: running averages."""
        trained = {
            self.aliases.get(name, name)
            for part in self._engine.wrapped.parts
            for name, _ in part.named_parameters()
        }
        return {f"model/{name}" for name in self.model if name not in trained}

    def shards(self) -> Groups:
        """Live shards, by group; the optimiser's exist from its first step on."""
        moments, _ = optimizer_shards(self._engine.optimizer, self._leaves)
        shards: Groups = {"model": self.model, "optimizer": moments}
        if self._engine.average is not None:
            shards["ema"] = weights_of([self._engine.average.module], aliases=self.aliases)
        return shards

    def numbers(self) -> dict[str, Any]:
        """The other state, as JSON; the same on all workers."""
        engine = self._engine
        _, groups = optimizer_shards(engine.optimizer, self._leaves)
        average = engine.average
        return {
            "aliases": self.aliases,
            "optimizer": groups,
            "precision": engine.precision.state(),
            "clipping": engine.clipper.state(),
            "guard": engine.guard.state(),
            "noise": engine.noise.numbers(),
            "batch_schedule": engine.batch_schedule.state(),
            "plateau": engine.plateau.state(),
            "micro_batch": engine.micro_batch,
            "layout": _describe_layout(engine),
            "averaged": None if average is None else int(average.n_averaged),
            "fingerprint": engine.splits.fingerprint,
        }

    def target_shards(self, specs: Mapping[str, TensorSpec]) -> Groups:
        """Shards to be filled from a source with these tensors (``<group>/<name>``)."""
        prefix = "optimizer/"
        moments = {
            name.removeprefix(prefix): spec
            for name, spec in specs.items()
            if name.startswith(prefix)
        }
        shards = self.shards()
        shards["optimizer"] = empty_optimizer_shards(self._engine.optimizer, self._leaves, moments)
        return shards

    def install(self, filled: Groups, numbers: dict[str, Any], *, step: int) -> None:
        """Install filled shards as the state after ``step`` steps."""
        engine = self._engine
        engine.wrapped.release_gathered()
        self._check_data(numbers)
        install_optimizer(engine.optimizer, self._leaves, filled["optimizer"], numbers["optimizer"])
        self._adopt(numbers, step=step)

    def snapshot(self, *, metrics: dict[str, float], extra: dict[str, Any]) -> Snapshot:
        """This worker's part of a checkpoint; the checkpoint store copies the live tensors."""
        engine = self._engine
        tensors: dict[str, Any] = {}
        state = self.numbers() | {"extra": extra}
        if engine.world.layout.is_single:
            # With several workers each step is seeded: see ``seed_step``.
            tensors["random"], state["random"] = copy_random(engine.random_before_fetch)
        pair, about = engine.noise.pair()
        if pair and not engine.wrapped.is_partitioned:
            tensors["noise"], state["noise_pair"] = pair, about
        buffers = engine.communication.state()
        if buffers:
            rank = engine.world.rank
            tensors["communication"] = {f"{rank}:{name}": value for name, value in buffers.items()}
        state["communicating"] = engine.world.layout.world if buffers else 0
        return Snapshot(
            step=engine.steps_done,
            tensors=tensors,
            shards=self.shards(),
            state=state,
            metrics=metrics,
        )

    def read(self, reader: CheckpointReader) -> dict[str, Any]:
        """Restore a checkpoint of any layout; returns the state of the callbacks in it."""
        engine, state = self._engine, reader.state
        self._check_data(state)
        self.read_weights(reader)
        fill_optimizer(
            engine.optimizer, self._leaves, reader.group("optimizer"), state["optimizer"]
        )
        self._adopt(state, step=reader.step)
        if "noise_pair" in state and not engine.wrapped.is_partitioned:
            first = _load(reader.group("noise"))["first"]
            engine.noise.adopt_pair(first, state["noise_pair"])
        if state.get("communicating"):
            buffers = _load(reader.group("communication"))
            engine.communication.communicator.restore(_by_worker(buffers, state["communicating"]))
        if "random" in state and engine.world.layout.is_single:
            restore_random(_load(reader.group("random")), state["random"])
        return state["extra"]

    def read_weights(self, reader: CheckpointReader) -> None:
        """Restore only the weights and their moving average."""
        self._engine.wrapped.release_gathered()
        fill_shards(self.model.values(), reader.group("model"))
        average = self._engine.average
        if average is not None:
            fill_shards(
                weights_of([average.module], aliases=self.aliases).values(), reader.group("ema")
            )

    def _adopt(self, numbers: dict[str, Any], *, step: int) -> None:
        engine = self._engine
        engine.precision.restore(numbers["precision"])
        engine.clipper.restore(numbers["clipping"])
        engine.guard.restore(numbers["guard"])
        # Absent in checkpoints of earlier versions.
        engine.noise.adopt(numbers.get("noise", {}))
        engine.batch_schedule.restore(numbers.get("batch_schedule", {}))
        engine.plateau.restore(numbers["plateau"])
        if numbers.get("layout") == _describe_layout(engine):
            # Memory may have run out with more; another layout needs other memory.
            engine.micro_batch = min(engine.micro_batch, numbers["micro_batch"])
        if engine.average is not None and numbers["averaged"] is not None:
            engine.average.n_averaged.fill_(numbers["averaged"])
        engine.steps_done = step

    def _check_data(self, numbers: dict[str, Any]) -> None:
        if numbers["fingerprint"] != self._engine.splits.fingerprint:
            raise DataError(
                "The data has changed since this run began, so it cannot be resumed exactly.",
                hint="Bring the old data back, or start a new run on the new data.",
            )


def _describe_layout(engine: Engine) -> dict[str, Any]:
    return engine.world.layout.model_dump(mode="json")


def _by_worker(buffers: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    by_rank: list[dict[str, Any]] = [{} for _ in range(size)]
    for key, value in buffers.items():
        rank, _, name = key.partition(":")
        by_rank[int(rank)][name] = value
    return by_rank


def _load(reader: ShardGroupReader) -> dict[str, Any]:
    return {
        name: reader.read(name, full_slice(spec.shape)) for name, spec in reader.specs().items()
    }
