"""Trouble inside a run: bad samples are left out or gone back from, short memory splits the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.sample_events import EventT
from yunlu.runs.events import (
    ErrorRaised,
    Evaluated,
    MemoryExhausted,
    PlanMade,
    PrecisionChanged,
    RolledBack,
    StepSkipped,
    WarningRaised,
)
from yunlu.runs.run_store import Area, Log, RunStore
from yunlu.runs.states import RunState
from yunlu.training.tasks.python_objects import ObjectTask
from yunlu.training.tasks.task import Batch
from yunlu.training.worker import run as live

MakeRun = Callable[..., RunStore]


def events(run: RunStore, kind: type[EventT]) -> list[EventT]:
    return [event for event, _ in run.read_events() if isinstance(event, kind)]


def losses(run: RunStore) -> dict[int, float]:
    return {record["step"]: record["loss"] for record, _ in run.read_metrics()}


def points(count: int = 300, *, poisoned: range = range(0)) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count + 20, 6, generator=generator)
    targets = (inputs[:, :1] * 2 + inputs[:, 1:2]).contiguous()
    inputs[list(poisoned)] = math.nan
    return {
        "train": (inputs[:count], targets[:count]),
        "validation": (inputs[count:], targets[count:]),
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def test_a_poisoned_sample_costs_its_step_and_no_more(make_run: MakeRun) -> None:
    run = make_run(epochs=2, batch=20, checkpoint=5)
    task = ObjectTask(model=network(), data=points(poisoned=range(7, 8)))
    assert live(run.path, task=task) is RunState.FINISHED
    skipped = events(run, StepSkipped)
    assert len(skipped) == 2  # once an epoch
    assert {skip.reason for skip in skipped} == {"not finite"}
    assert not events(run, RolledBack)
    steps = {skip.step for skip in skipped}
    assert losses(run).keys() == set(range(1, 31)) - steps
    assert all(math.isfinite(loss) for loss in losses(run).values())
    weights = load_file(run.path / Area.MODEL / "model.safetensors")
    assert all(torch.isfinite(weight).all() for weight in weights.values())


class Poison(ObjectTask):
    """Losses that are not finite at some passes of training."""

    def __init__(self, *, bad: range, **parts: Any) -> None:
        super().__init__(**parts)
        self._bad, self._passes, self.counts = bad, 0, False

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        loss, outputs = super().loss(model, batch)
        self._passes += model.training
        return (loss * math.nan if self._passes in self._bad else loss), outputs


def test_a_run_of_bad_steps_goes_back_to_a_checkpoint_and_on_past_them(make_run: MakeRun) -> None:
    run = make_run(epochs=4, batch=20, checkpoint=5, threads=1, micro_batch=20, trial_share=0.0)
    task = Poison(model=network(), data=points(), bad=range(40, 46))
    assert live(run.path, task=task) is RunState.FINISHED
    (back,) = events(run, RolledBack)
    assert back.to_step < min(back.skipping) + 1 <= back.step
    skips = events(run, StepSkipped)
    passed = [skip.step for skip in skips if skip.reason == "passed over"]
    assert passed, "the bad steps are not tried again"
    left_out = {skip.step for skip in skips}
    assert losses(run).keys() | left_out == set(range(1, 61))


def test_without_a_checkpoint_to_go_back_to_the_run_ends_with_advice(make_run: MakeRun) -> None:
    run = make_run(epochs=4, batch=20, checkpoint=1000, trial_share=0.0)
    task = Poison(model=network(), data=points(), bad=range(30, 10**6))
    assert live(run.path, task=task) is RunState.FAILED
    (error,) = events(run, ErrorRaised)
    assert "not finite at step" in error.message


def test_a_guard_that_may_do_nothing_ends_the_run_at_the_first_bad_step(make_run: MakeRun) -> None:
    run = make_run(epochs=1, batch=20, guard={"skips": 0, "rollbacks": 0})
    task = ObjectTask(model=network(), data=points(poisoned=range(7, 8)))
    assert live(run.path, task=task) is RunState.FAILED
    assert len(events(run, StepSkipped)) == 1


class Crowded(ObjectTask):
    """A device on which more than ``room`` samples at once do not fit, once training runs."""

    def __init__(self, *, run: RunStore, room: int, **parts: Any) -> None:
        super().__init__(**parts)
        self._run, self._room = run, room

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        running = b'"running"' in (self._run.path / Log.EVENTS).read_bytes()
        if running and model.training and batch.samples > self._room:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return super().loss(model, batch)


def test_short_memory_splits_the_batch_and_changes_nothing_else(make_run: MakeRun) -> None:
    settings = {"epochs": 2, "batch": 20, "micro_batch": 20, "evaluate": "never"}
    whole, split = make_run(**settings), make_run(**settings)
    assert live(whole.path, task=ObjectTask(model=network(), data=points())) is RunState.FINISHED
    task = Crowded(run=split, room=5, model=network(), data=points())
    assert live(split.path, task=task) is RunState.FINISHED
    assert [e.micro_batch for e in events(split, MemoryExhausted)] == [10, 5]
    assert losses(split) == pytest.approx(losses(whole), rel=1e-4)


def test_memory_too_short_for_one_sample_ends_the_run_with_advice(make_run: MakeRun) -> None:
    run = make_run(epochs=1, batch=20)
    task = Crowded(run=run, room=0, model=network(), data=points())
    assert live(run.path, task=task) is RunState.FAILED
    (error,) = events(run, ErrorRaised)
    assert "Memory ran out" in error.message


def test_the_batch_grows_at_the_end_of_an_epoch(make_run: MakeRun) -> None:
    run = make_run(epochs=3, batch=50, grow_batch={"every": 1, "limit": 120})
    assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FINISHED
    items = [record["items"] for record, _ in run.read_metrics()]
    assert items == [50] * 6 + [100] * 3 + [120, 120, 60]
    scored = [e.step for e in events(run, Evaluated)]
    assert scored == [6, 9, 12]


def test_released_gradients_train_like_kept_ones(make_run: MakeRun) -> None:
    settings = {"epochs": 2, "batch": 20, "clip": None, "optimizer": {"kernel": "single"}}
    kept, freed = make_run(**settings), make_run(**settings, gradient_release=True)
    for run in (kept, freed):
        assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FINISHED
    assert losses(freed) == pytest.approx(losses(kept), rel=1e-5)
    norms = [[r["grad_norm"] for r, _ in run.read_metrics()] for run in (kept, freed)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_noise_scale_is_measured_all_along(make_run: MakeRun) -> None:
    run = make_run(steps=400, batch=4, optimizer={"name": "adamw", "lr": 1e-4})
    assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FINISHED
    found = [r["noise_scale"] for r, _ in run.read_metrics() if "noise_scale" in r]
    assert found
    assert all(value > 0 for value in found)


class Loud(nn.Module):
    """One layer whose answers FP16 cannot hold, between two that it can."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.loud, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        nn.init.uniform_(self.loud.weight, -2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.loud(self.first(x) * 1e4).float() / 1e5)


def test_a_layer_that_overflows_in_fp16_is_moved_and_the_run_goes_on(make_run: MakeRun) -> None:
    settings = {"epochs": 3, "batch": 20, "precision": "fp16", "checkpoint": 5}
    adapted, fixed = make_run(**settings), make_run(**settings, adapt_precision=False)
    assert live(adapted.path, task=ObjectTask(model=Loud(), data=points())) is RunState.FINISHED
    moved = events(adapted, PrecisionChanged)
    assert {move.module for move in moved if move.to == "full"} == {"loud"}
    shares = [record["low_share"] for record, _ in adapted.read_metrics()]
    assert 0 < shares[-1] < 1
    assert len(events(adapted, StepSkipped)) <= 5
    assert live(fixed.path, task=ObjectTask(model=Loud(), data=points())) is RunState.FAILED


def test_an_explicit_precision_that_is_slower_here_is_warned_of(make_run: MakeRun) -> None:
    run = make_run(epochs=1, batch=20, precision="fp16")
    assert live(run.path, task=ObjectTask(model=network(), data=points())) is RunState.FINISHED
    from yunlu.training.probe import measured_speeds, probe_machine

    (fp16,) = [s for s in measured_speeds(probe_machine().best_device) if s.precision == "fp16"]
    warned = any("slower than fp32" in each.message for each in events(run, WarningRaised))
    assert warned == (fp16.relative_speed < 1)


def test_a_step_that_is_left_out_leaves_nothing_in_running_averages(make_run: MakeRun) -> None:
    run = make_run(epochs=2, batch=20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    task = ObjectTask(model=model, data=points(poisoned=range(7, 8)))
    assert live(run.path, task=task) is RunState.FINISHED
    assert len(events(run, StepSkipped)) == 2
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())
    assert all(math.isfinite(e.loss) for e in events(run, Evaluated))


def test_after_a_rollback_no_checkpoint_of_the_abandoned_line_is_left(make_run: MakeRun) -> None:
    run = make_run(epochs=3, batch=20, checkpoint=10, threads=1, micro_batch=20, trial_share=0.0)
    seen: list[int] = []

    class Looking(Poison):
        def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
            if model.training and events(run, RolledBack) and not seen:
                seen.extend(
                    int(path.name[5:]) for path in (run.path / Area.CHECKPOINTS).glob("step-*")
                )
            return super().loss(model, batch)

    task = Looking(model=network(), data=points(), bad=range(34, 40))
    assert live(run.path, task=task) is RunState.FINISHED
    (back,) = events(run, RolledBack)
    assert seen
    assert max(seen) == back.to_step


def test_released_gradients_go_back_at_the_first_bad_step(make_run: MakeRun) -> None:
    run = make_run(epochs=3, batch=20, checkpoint=5, clip=None, gradient_release=True, threads=1,
                   trial_share=0.0)  # fmt: skip
    task = Poison(model=network(), data=points(), bad=range(30, 31))
    assert live(run.path, task=task) is RunState.FINISHED
    assert len(events(run, RolledBack)) == 1


def test_a_run_leaves_somebodys_own_model_as_it_was(make_run: MakeRun) -> None:
    model = network()
    for options in ({"gradient_release": True, "clip": None}, {"recompute": "full"}, {}):
        run = make_run(epochs=1, batch=20, **options)
        assert live(run.path, task=ObjectTask(model=model, data=points())) is RunState.FINISHED
        model(torch.randn(3, 6)).sum().backward()
        assert all(weight.grad is not None for weight in model.parameters())
        assert "forward" not in vars(model[0])
        model.zero_grad()


def test_what_is_set_is_never_taken_from_what_was_tried(make_run: MakeRun) -> None:
    tried = make_run(epochs=1, batch=20, trial_share=0.0)
    live(tried.path, task=ObjectTask(model=network(), data=points()))
    kernel = events(tried, PlanMade)[0].plan.kernel
    other = "single" if kernel != "single" else "foreach"
    pinned = make_run(epochs=1, batch=20, trial_share=0.0, optimizer={"kernel": other})
    live(pinned.path, task=ObjectTask(model=network(), data=points()))
    assert events(pinned, PlanMade)[0].plan.kernel == other
