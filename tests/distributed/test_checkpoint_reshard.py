"""Saved under any layout, loaded under any other, exactly; damaged or cut short, the one before."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.checkpoints import load, read
from tests.distributed.ranks import run_world
from yunlu.planning.layouts import AXES, Layout, parse_layout
from yunlu.training.checkpoint import files
from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.checkpoint.storage import LocalStorage
from yunlu.training.checkpoint.store import CheckpointStore, SaveGroup
from yunlu.training.engine_state import (
    empty_optimizer_shards,
    fill_optimizer,
    install_optimizer,
    optimizer_shards,
    parameter_shards,
)
from yunlu.training.optim.fused_adam import FusedAdam
from yunlu.training.parallel.redistribute import gather_specs, redistribute
from yunlu.training.parallel.world import World
from yunlu.training.tensor_slices import fill, join_groups, shard_of, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.training.tensor_slices import TensorShard

pytestmark = pytest.mark.distributed

SOURCES = ["single", "dp3", "fsdp4", "fsdp2", "fsdp3", "tp2", "fsdp2 x tp2", "pp2", "dp2 x fsdp2"]
TARGETS = ["single", "dp2", "fsdp2", "fsdp3", "tp2", "pp2", "fsdp2 x tp2", "pp2 x fsdp2"]
STAGES = (("up", "down"), ("norm", "out"))


def layout(name: str) -> Layout:
    found = parse_layout(name)
    assert found is not None
    return found


def make(seed: int) -> dict[str, nn.Module]:
    """Sizes that no number of workers divides evenly, and a bias shorter than four workers."""
    torch.manual_seed(seed)
    layers = {
        "up": nn.Linear(6, 10),
        "down": nn.Linear(10, 7),
        "norm": nn.BatchNorm1d(7),
        "out": nn.Linear(7, 3),
    }
    for layer in layers.values():
        for tensor in (*layer.parameters(), *layer.buffers()):
            value = torch.randn(tensor.shape) * 10
            tensor.data.copy_(value)
    return layers


def spread(world: World, seed: int) -> nn.Module:
    """The model of a seed, cut by torch as the layout says."""
    layers = make(seed)
    if world.layout.pp > 1:
        layers = {name: layers[name] for name in STAGES[world.coordinates.pp]}
    part = nn.Module()
    for name, layer in layers.items():
        part.add_module(name, layer.to(world.device))
    tp = world.axis("tp")
    if tp is not None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(part, tp, {name: plan[name] for name in plan if name in layers})
    shards = world.axis("dp", "fsdp")
    if world.layout.fsdp > 1:
        fully_shard(part, mesh=shards)
    return part


def local(tensor: Tensor) -> Tensor:
    return tensor.detach()._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


class State:
    """A model and its optimiser; three models of torch's give the truth for weights and moments."""

    def __init__(self, world: World, seed: int) -> None:
        self.part = spread(world, seed)
        self.leaves = {name: local(weight) for name, weight in self.part.named_parameters()}
        groups = [
            {
                "params": [leaf for leaf in self.leaves.values() if leaf.ndim > 1],
                "weight_decay": 0.1,
            },
            {"params": [leaf for leaf in self.leaves.values() if leaf.ndim < 2], "weight_decay": 0},
        ]
        self.optimizer = FusedAdam(groups, lr=0.5, betas=(0.8, 0.9), eps=1e-8, decoupled=True)
        self.names = parameter_shards(
            [self.part], [*self.part.parameters()], [*self.leaves.values()]
        )
        self.moments: dict[str, dict[str, Tensor]] = {}

    def remember(self, world: World, seed: int) -> State:
        for number, key in enumerate(("exp_avg", "exp_avg_sq"), start=1):
            model = spread(world, seed + number)
            self.moments[key] = {
                name: local(weight).clone() for name, weight in model.named_parameters()
            }
        for name, leaf in self.leaves.items():
            moments = {key: values[name] for key, values in self.moments.items()}
            self.optimizer.state[leaf] = {"step": torch.tensor(7.0), **moments}
        return self

    def shards(self) -> tuple[dict[str, dict[str, TensorShard]], dict[str, Any]]:
        optimizer, packed = optimizer_shards(self.optimizer, self.names)
        return {"model": weights_of([self.part]), "optimizer": optimizer}, packed

    def check(self, truth: State) -> None:
        for name, tensor in self.part.state_dict().items():
            assert torch.equal(local(tensor), local(truth.part.state_dict()[name])), name
        for name, leaf in self.leaves.items():
            kept = self.optimizer.state[leaf]
            assert kept["step"].item() == 7
            for key, values in truth.moments.items():
                assert torch.equal(kept[key], values[name]), (name, key)
        assert [group["weight_decay"] for group in self.optimizer.param_groups] == [0.1, 0]
        assert self.optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def store(root: Path, world: World, group: Any = None, **options: Any) -> CheckpointStore:
    settings = {"keep_last": 3, "keep_best": 1, "saved": lambda entry, seconds: None} | options
    return CheckpointStore(
        root, metric="loss", lower_is_better=True,
        group=SaveGroup(rank=world.rank, size=world.layout.world, token="g1", group=group), **settings,
    )  # fmt: skip


def part_of(world: World, name: str) -> World | None:
    """The first workers of a world, in a layout of their own; none on the others."""
    shape = layout(name)
    axes = [axis for axis in AXES if shape.size_of(axis) > 1]
    mesh = None
    if axes:
        ranks = torch.arange(shape.world).view([shape.size_of(axis) for axis in axes])
        mesh = DeviceMesh(world.device.type, ranks, mesh_dim_names=tuple(axes))
    if world.rank >= shape.world:
        return None
    return World(layout=shape, rank=world.rank, device=world.device, mesh=mesh)


def _save(world: World, root: Path, group: Any) -> None:
    state = State(world, 100).remember(world, 100)
    kept = store(root, world, group)
    shards, packed = state.shards()
    for step in (1, 2):
        kept.save(Snapshot(step=step, shards=shards, state={"optimizer": packed}), defer=step == 2)
        kept.finish_copy()
    kept.close()


def _load(world: World, root: Path, group: Any, truth: State) -> None:
    state = State(world, 10)
    kept = store(root, world, group)
    model = {"model": weights_of([state.part])}
    reader = kept.open_newest(pytest.fail, targets=lambda _: join_groups(model))
    kept.close()
    assert reader is not None
    assert reader.step == 2
    fill(model["model"].values(), reader.group("model"))
    packed = reader.state["optimizer"]
    fill_optimizer(state.optimizer, state.names, reader.group("optimizer"), packed)
    state.check(truth)


def _save_and_load(world: World, roots: dict[str, Path]) -> list[tuple[str, str]]:
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3, 4)}
    parts = {name: part_of(world, name) for name in dict.fromkeys((*SOURCES, *TARGETS))}
    for name, root in roots.items():
        part = parts[name]
        if part is not None:
            _save(part, root, groups[part.layout.world])
    dist.barrier()
    done: list[tuple[str, str]] = []
    for target in TARGETS:
        part = parts[target]
        if part is None:
            continue
        truth = State(part, 100).remember(part, 100)
        for name, root in roots.items():
            _load(part, root, groups[part.layout.world], truth)
            done.append((name, target))
    return done


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One world does it all: most of the time of a world is its start."""
    root = tmp_path_factory.mktemp("saved")
    roots = {name: root / name.replace(" ", "") for name in SOURCES}
    done = run_world(_save_and_load, Layout(dp=4), roots)
    assert set(done[0]) == {(source, target) for source in SOURCES for target in TARGETS}
    return roots


def test_what_was_saved_under_any_layout_loads_under_any_other(saved: dict[str, Path]) -> None:
    assert set(saved) == set(SOURCES)


def test_replicas_write_each_box_once(saved: dict[str, Path]) -> None:
    for root in saved.values():
        loaded = read(root / "step-0000000002")
        held = sum(
            one.nbytes for group in ("model", "optimizer") for one in load(loaded, group).values()
        )
        on_disk = list((root / "step-0000000002").glob("*.safetensors"))
        headers = [int.from_bytes(file.read_bytes()[:8], "little") + 8 for file in on_disk]
        written = sum(file.stat().st_size for file in on_disk) - sum(headers)
        scalars = 5 * 8 * len(on_disk)
        assert held <= written <= held + scalars
        assert not list(root.glob(".part-*"))
    sizes = [
        file.stat().st_size for file in (saved["dp3"] / "step-0000000002").glob("*.safetensors")
    ]
    assert max(sizes) < 0.6 * sum(sizes)


def _hand_over(world: World) -> None:
    """The same without a disk: from whoever holds it to a layout of other shards."""
    old = State(world, 100).remember(world, 100)
    held, packed = old.shards()
    halves = part_of(world, "fsdp2 x tp2")
    assert halves is not None
    new = State(halves, 0)
    wanted = {"model": weights_of([new.part])}
    specs = gather_specs(held["optimizer"].values())
    wanted["optimizer"] = empty_optimizer_shards(new.optimizer, new.names, specs)
    redistribute(join_groups(held), join_groups(wanted))
    install_optimizer(new.optimizer, new.names, wanted["optimizer"], packed)
    new.check(State(halves, 100).remember(halves, 100))


def _hand_over_all(world: World) -> None:
    for source in ("fsdp4", "dp2 x fsdp2", "pp2 x fsdp2"):
        part = part_of(world, source)
        assert part is not None
        _hand_over(part)


def test_state_passes_between_live_workers_of_other_layouts() -> None:
    run_world(_hand_over_all, Layout(dp=4))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) - 5] ^= 4
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a flipped bit": lambda file, before: _flip(file),
    "a zeroed page": lambda file, before: file.write_bytes(file.read_bytes()[:-64] + bytes(64)),
    "a missing file": lambda file, before: file.unlink(),
    "a file of another save": lambda file, before: shutil.copy(before, file),
}


def _find(world: World, roots: dict[str, Path]) -> list[tuple[int | None, bool]]:
    found: list[tuple[int | None, bool]] = []
    for root in roots.values():
        said: list[str] = []
        kept = store(root, world)
        reader = kept.open_newest(said.append)
        kept.close()
        found.append((reader.step if reader else None, bool(said)))
    return found


def test_damage_in_any_file_is_found_by_all_and_the_one_before_is_used(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    roots: dict[str, Path] = {}
    for number, (name, damage) in enumerate(DAMAGES.items()):
        root = roots[name] = tmp_path / str(number)
        shutil.copytree(saved["fsdp4"], root)
        file = f"rank-{number % 4:05d}.safetensors"
        if name == "a file of another save":
            shutil.copytree(saved["fsdp3"] / "step-0000000001", root / "other")
            file, other = "rank-00001.safetensors", root / "other" / "rank-00001.safetensors"
        else:
            other = file
        damage(root / "step-0000000002" / file, other)
    found = run_world(_find, Layout(dp=3), roots)
    for number in range(len(roots)):
        assert {one[number][0] for one in found} == {1}, "all use the same"
        assert any(one[number][1] for one in found), "and it is told"


def _save_until_killed(world: World, root: Path, who: int, after: int) -> None:
    files.BLOCK_BYTES = 1 << 12
    kept = store(root, world, keep_last=2)
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if world.rank == who and calls == after:
            os.kill(os.getpid(), signal.SIGKILL)

    kept._check_abandoned = count
    weights = {name: torch.zeros(64, 100, device=world.device) for name in "abcd"}
    for step in range(1, 40):
        for weight in weights.values():
            weight.fill_(step)
        shards = {name: shard_of(name, weight) for name, weight in weights.items()}
        kept.save(Snapshot(step=step, shards={"model": shards}, state={"step": step}))


@pytest.mark.parametrize(("who", "after"), [(0, 47), (1, 60), (0, 140), (1, 155)])
def test_a_worker_killed_while_saving_leaves_the_checkpoint_before(
    tmp_path: Path, who: int, after: int
) -> None:
    with pytest.raises(RuntimeError, match=r"died without a word|failed"):
        run_world(_save_until_killed, Layout(dp=2), tmp_path, who, after, in_order=False)
    kept = CheckpointStore(
        tmp_path, keep_last=1, keep_best=1, metric="loss", lower_is_better=True,
        saved=lambda entry, seconds: None,
    )  # fmt: skip
    found = kept.open_newest(pytest.fail)
    kept.close()
    assert found is not None
    assert found.state["step"] == found.step >= 1
    for weight in load(found, "model").values():
        assert weight.unique().tolist() == [found.step]
    assert not list(tmp_path.glob(".*")), "what was half-written is swept"
    assert files.entries(LocalStorage(tmp_path))[-1].step == found.step
