"""Whole steps of the engine on accelerators: one wait of the host in each, losses as on the CPU."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretend_accelerator as pretend
import torch
import torch.distributed as dist

from tests.distributed.parity import Sentences, make_job, make_plan
from tests.pretend.programs.workers import WORLD, run_ranks
from yunlu.planning.layouts import Layout
from yunlu.training import loop
from yunlu.training.device import max_memory_bytes, open_device
from yunlu.training.engine import Engine
from yunlu.training.parallel.world import World, form_world
from yunlu.training.tasks.task import TrainingInputs

STEPS = 5
CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    # Four micro-batches a step, or two on each of two workers.
    "tied": {"clip": "adaptive", "ema": 0.9, "precision": "fp16"},
    "normed": {"clip": {"norm": 0.5, "value": 0.2}, "l1": 1e-4, "kernel": "single"},
}


@dataclass
class Watcher:
    """Counts the waits of each step, as a log reads what it needs."""

    engine: Engine
    losses: list[float] = field(default_factory=list)
    steps_waits: list[dict[str, int]] = field(default_factory=list)
    steps: list[loop.Step] = field(default_factory=list)
    exchange_s: float = 0.0
    _before: dict[str, int] = field(default_factory=pretend.counters)

    def before_first_step(self) -> bool:
        return False

    def after_undone_step(self) -> None:
        raise AssertionError("nobody asks it to stop")

    def before_step(self) -> str:
        return ""

    def after_step(self, step: loop.Step) -> bool:
        self.losses.append(step.loss)
        self.steps.append(step)
        self.exchange_s = self.engine.health().get("exchange_s", 0.0)
        max_memory_bytes(self.engine.device)
        now = pretend.counters()
        names = [name for name in now if name.startswith(("waits", "copies"))]
        self.steps_waits.append(
            {
                name: now[name] - self._before[name]
                for name in names
                if now[name] != self._before[name]
            }
        )
        self._before = now
        return False


def train(
    model: str, device: torch.device, world: World | None = None, *, micro_batch: int = 8
) -> Watcher:
    settings = dict(SETTINGS[model])
    precision, kernel = settings.pop("precision", "fp32"), settings.pop("kernel", "fused")
    job, task = make_job(**settings, steps=STEPS), Sentences(model)
    layout = Layout() if world is None else world.layout
    plan = make_plan(layout, job, micro_batch=micro_batch, kernel=kernel).model_copy(
        update={"device": device.type, "precision": precision, "steps": STEPS}
    )
    inputs = TrainingInputs(task=task, model=task.build(job), splits=task.load(job))
    engine = Engine(job, plan, inputs, lambda *_, **__: None, world=world)
    watcher = Watcher(engine)
    loop.run(engine, watcher)  # type: ignore[arg-type]
    engine.close()
    return watcher


def check_waits(watcher: Watcher) -> None:
    # The first step also makes what stays: positions, moments, groups.
    for step in watcher.steps_waits[1:]:
        waits = {name: count for name, count in step.items() if name.startswith("waits")}
        assert waits == {"waits_copy_to_host": 1}, watcher.steps_waits
    # Inputs and targets come from pinned memory, beside the computation; after the last step none.
    for step in watcher.steps_waits[1:-1]:
        assert step["copies_late"] == step["copies_from_host"] > 0


def train_alone(model: str) -> None:
    device = open_device("npu", 0)
    watcher, expected = train(model, device), train(model, CPU)
    assert watcher.losses == expected.losses, (watcher.losses, expected.losses)
    assert all(step.wait_s == 0 for step in watcher.steps)
    check_waits(watcher)


def train_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    device = open_device("npu", rank)
    store = dist.FileStore(str(Path(folder, "store")), WORLD)
    world = form_world(Layout(dp=WORLD), rank, store, device=device, secret=b"0" * 32)
    for model in SETTINGS:
        watcher = train(model, device, world)
        check_waits(watcher)
        assert watcher.exchange_s > 0
        assert any(step.wait_s > 0 for step in watcher.steps), "the device tells of its waits"
        if rank == 0:
            Path(folder, model).write_text(json.dumps(watcher.losses))
    assert pretend.contexts() == [rank]
    assert not pretend.races()
    if rank == 0:
        for model in SETTINGS:
            # Statistics of a batch are those of the micro-batches of all workers.
            alone, found = (
                train(model, CPU, micro_batch=8 * WORLD).losses,
                json.loads(Path(folder, model).read_text()),
            )
            torch.testing.assert_close(found, alone, rtol=3e-4, atol=1e-4)


def train_stages(rank: int, folder: str) -> None:
    """Four stages on two workers: activations and gradients go both ways, from device to device."""
    torch.set_num_threads(1)
    device = open_device("npu", rank)
    store = dist.FileStore(str(Path(folder, "store")), WORLD)
    layout = Layout(pp=WORLD, schedule="interleaved", stages_per_rank=2)
    world = form_world(layout, rank, store, device=device, secret=b"0" * 32)
    watcher = train("tied", device, world, micro_batch=4)
    check_waits(watcher)
    assert not pretend.races()
    if rank == 0:
        alone = train("tied", CPU, micro_batch=4).losses
        torch.testing.assert_close(watcher.losses, alone, rtol=3e-4, atol=1e-4)


if __name__ == "__main__":
    assert os.environ["PRETEND_NO_FLOAT64"] == "1"
    code = run_ranks(train_two) or run_ranks(train_stages)
    train_alone("tied")
    assert pretend.contexts() == [0]
    sys.exit(code)
