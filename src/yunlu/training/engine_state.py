"""State of an engine: tensor shards and JSON.

The same state is written to a checkpoint, read back under any layout, and sent between live workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.core.errors import DataError
from yunlu.training.checkpoint import state as states
from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.optimizer_state import (
    empty_optimizer_shards,
    fill_optimizer,
    install_optimizer,
    optimizer_shards,
    parameter_shards,
)
from yunlu.training.tensor_slices import (
    ShardGroupReader,
    TensorShard,
    full_slice,
    weights_of,
)
from yunlu.training.tensor_slices import fill as fill_shards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.training.checkpoint.files import CheckpointReader
    from yunlu.training.engine import Engine
    from yunlu.training.tensor_slices import TensorSpec

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
            tensors["random"], state["random"] = states.copy_random()
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
            states.restore_random(_load(reader.group("random")), state["random"])
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
