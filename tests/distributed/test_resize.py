"""From one layout to another and back: the same curve, each with the micro-batch planned for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.parity import STEPS, Recorder, Sentences, make_job, make_plan, train
from tests.distributed.ranks import run_ranks, run_world
from tests.training_device import device_of
from yunlu.planning.layouts import Layout
from yunlu.training import loop
from yunlu.training.engine import Engine
from yunlu.training.parallel.redistribute import gather_specs, redistribute
from yunlu.training.parallel.world import World, form_world
from yunlu.training.tasks.task import TrainingInputs
from yunlu.training.tensor_slices import join_groups

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
DP2, PP2 = Layout(dp=2), Layout(pp=2)
PHASES = [(DP2, 8, 6), (PP2, 4, 5), (PP2, 4, 5), (DP2, 8, 6)]
"""Layout, the plan's micro-batch, and steps; in the second phase memory runs out."""


class Few(Recorder):
    """Ends after so many steps."""

    left = 0

    def after_step(self, step: loop.Step) -> bool:
        self.left -= 1
        return super().after_step(step) or not self.left


def build(world: World, micro_batch: int) -> Engine:
    job, task = make_job(), Sentences("tied")
    parts = TrainingInputs(task=task, model=task.build(job), splits=task.load(job))
    plan = make_plan(
        world.layout, job, micro_batch=micro_batch, kernel="fused", device=world.device.type
    )
    return Engine(job, plan, parts, lambda *_, **__: None, world=world)


def _move(rank: int, directory: str) -> tuple[list[float], list[int]]:
    recorder, sizes = Few([], []), list[int]()
    before: Engine | None = None
    for phase, (layout, micro_batch, steps) in enumerate(PHASES):
        store = dist.FileStore(str(Path(directory) / str(phase)), 2)
        world = form_world(layout, rank, store, secret=b"test", device=device_of(rank))
        engine = build(world, micro_batch)
        if before is not None:
            held = join_groups(before.state.shards())
            wanted = engine.state.target_shards(gather_specs(held))
            redistribute(held, join_groups(wanted))
            numbers = json.loads(json.dumps(before.state.numbers()))
            engine.state.install(wanted, numbers, step=before.steps_done)
        sizes.append(engine.micro_batch)
        if phase == 1:
            engine.micro_batch = 2
        recorder.left = steps
        loop.run(engine, recorder)
        before = engine
        world.close()
    return recorder.losses, sizes


def test_a_micro_batch_is_kept_only_under_the_layout_it_was_found_for(tmp_path: Path) -> None:
    expected, _ = train(World(layout=Layout(), rank=0, device=CPU), "tied", {})
    for losses, sizes in run_ranks(_move, 2, str(tmp_path)):
        assert sizes == [8, 4, 2, 8]
        assert len(losses) == STEPS
        assert losses == pytest.approx(expected, abs=1e-5)


def _rejoin(world: World) -> list[int]:
    engine = build(world, 8)
    engine.micro_batch = 3
    sizes: list[int] = []
    for others in (world, World(layout=Layout(), rank=0, device=CPU)):
        engine.rejoin(others, micro_batch=16)
        sizes.append(engine.micro_batch)
    return sizes


def test_an_engine_that_stays_takes_the_micro_batch_of_another_layout() -> None:
    assert run_world(_rejoin, DP2) == [[3, 16]] * 2
