"""Everything of an engine that a run needs to go on: as boxes of tensors, and as JSON.

The same is written to a checkpoint, read back under any layout, and passed between live workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunlu.core.errors import DataError
from yunlu.training.checkpoint import state as states
from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.parallel.optimizer_state import (
    fill_optimizer,
    install_optimizer,
    optimizer_shards,
    parameter_shards,
    wanted_optimizer,
)
from yunlu.training.parallel.tensor_slices import (
    ShardGroupReader,
    TensorShard,
    full_slice,
    weights_of,
)
from yunlu.training.parallel.tensor_slices import fill as fill_pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yunlu.training.checkpoint.reader import CheckpointReader
    from yunlu.training.engine import Engine
    from yunlu.training.parallel.tensor_slices import TensorSpec

Groups = dict[str, dict[str, TensorShard]]


class EngineState:
    """What an engine holds, found once: FSDP shows other tensors in the middle of a step."""

    def __init__(self, engine: Engine, whole_aliases: Mapping[str, str]) -> None:
        self._engine = engine
        self.aliases = dict(whole_aliases)
        parts = engine.wrapped.parts
        self.model = weights_of(parts, aliases=whole_aliases)
        self._leaves = parameter_shards(
            parts, engine.wrapped.weights, engine.wrapped.leaves, aliases=whole_aliases
        )

    def moving(self) -> set[str]:
        """Names of what forward passes change, as a checkpoint has them: running averages."""
        trained = {
            self.aliases.get(name, name)
            for part in self._engine.wrapped.parts
            for name, _ in part.named_parameters()
        }
        return {f"model/{name}" for name in self.model if name not in trained}

    def pieces(self) -> Groups:
        """Live tensors, by group; the optimiser's exist from its first step on."""
        moments, _ = optimizer_shards(self._engine.optimizer, self._leaves)
        found: Groups = {"model": self.model, "optimizer": moments}
        if self._engine.average is not None:
            found["ema"] = weights_of([self._engine.average.module], aliases=self.aliases)
        return found

    def numbers(self) -> dict[str, Any]:
        """The rest, as JSON; the same on all workers."""
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
            "course": engine.batch_schedule.state(),
            "plateau": engine.plateau.state(),
            "micro_batch": engine.micro_batch,
            "layout": _describe_layout(engine),
            "averaged": None if average is None else int(average.n_averaged),
            "fingerprint": engine.splits.fingerprint,
        }

    def wanted(self, specs: Mapping[str, TensorSpec]) -> Groups:
        """Tensors to be filled from somewhere that has these (``<group>/<name>``)."""
        prefix = "optimizer/"
        moments = {
            name.removeprefix(prefix): spec
            for name, spec in specs.items()
            if name.startswith(prefix)
        }
        found = self.pieces()
        found["optimizer"] = wanted_optimizer(self._engine.optimizer, self._leaves, moments)
        return found

    def install(self, filled: Groups, numbers: dict[str, Any], *, step: int) -> None:
        """Go on from tensors that were filled, after ``step`` steps."""
        engine = self._engine
        engine.wrapped.release_gathered()
        self._check_data(numbers)
        install_optimizer(engine.optimizer, self._leaves, filled["optimizer"], numbers["optimizer"])
        self._adopt(numbers, step=step)

    def snapshot(self, *, metrics: dict[str, float], extra: dict[str, Any]) -> Snapshot:
        """What this worker contributes to a checkpoint; live tensors are copied by who saves."""
        engine = self._engine
        tensors: dict[str, Any] = {}
        state = self.numbers() | {"extra": extra}
        if engine.world.layout.is_single:
            # Among others the numbers of a step are its own: see ``seed_step``.
            tensors["random"], state["random"] = states.copy_random()
        pair, about = engine.noise.pair()
        if pair and not engine.wrapped.is_partitioned:
            tensors["noise"], state["noise_pair"] = pair, about
        kept = engine.communication.state()
        if kept:
            rank = engine.world.rank
            tensors["communication"] = {f"{rank}:{name}": value for name, value in kept.items()}
        state["communicating"] = engine.world.layout.world if kept else 0
        return Snapshot(
            step=engine.steps_done,
            tensors=tensors,
            pieces=self.pieces(),
            state=state,
            metrics=metrics,
        )

    def read(self, reader: CheckpointReader) -> dict[str, Any]:
        """Continue from a checkpoint of any layout; returns what the watchers had kept in it."""
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
            kept = _load(reader.group("communication"))
            engine.communication.communicator.restore(_by_worker(kept, state["communicating"]))
        if "random" in state and engine.world.layout.is_single:
            states.restore_random(_load(reader.group("random")), state["random"])
        return state["extra"]

    def read_weights(self, reader: CheckpointReader) -> None:
        """Only the weights, and their average."""
        self._engine.wrapped.release_gathered()
        fill_pieces(self.model.values(), reader.group("model"))
        average = self._engine.average
        if average is not None:
            fill_pieces(
                weights_of([average.module], aliases=self.aliases).values(), reader.group("ema")
            )

    def _adopt(self, numbers: dict[str, Any], *, step: int) -> None:
        engine = self._engine
        engine.precision.restore(numbers["precision"])
        engine.clipper.restore(numbers["clipping"])
        engine.guard.restore(numbers["guard"])
        # Checkpoints of earlier versions have neither.
        engine.noise.adopt(numbers.get("noise", {}))
        engine.batch_schedule.restore(numbers.get("course", {}))
        engine.plateau.restore(numbers["plateau"])
        if numbers.get("layout") == _describe_layout(engine):
            # More may not have fitted; of another layout's workers that says nothing.
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


def _by_worker(kept: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{} for _ in range(size)]
    for key, value in kept.items():
        rank, _, name = key.partition(":")
        found[int(rank)][name] = value
    return found


def _load(reader: ShardGroupReader) -> dict[str, Any]:
    return {
        name: reader.read(name, full_slice(spec.shape)) for name, spec in reader.specs().items()
    }
