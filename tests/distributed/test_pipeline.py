"""Pipelines against one process: the same losses, gradients and answers, and faults that are told."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.distributed.ranks import run_world
from tests.waiting import LIMIT_S
from yunlu.planning.layouts import Layout
from yunlu.training.models.transformer import Block, CausalTransformer
from yunlu.training.parallel.pipeline import Pipeline
from yunlu.training.parallel.pipeline_stages import shared_names, split
from yunlu.training.tasks.task import Batch, call, logits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed

STEPS = 20
VOCABULARY = 32


def _build(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config)
    kind, _, layers = name.partition(" ")
    return CausalTransformer(
        vocabulary=VOCABULARY,
        max_length=16,
        width=16,
        layers=int(layers),
        heads=2,
        tied=kind != "untied",
        positions="learned" if kind == "learned" else "rotary",
    )


def _micros(
    step: int, replica: int, *, count: int, name: str, world: World | None = None
) -> list[Batch]:
    """Micro-batches of one replica, no two of one shape; those of the odd ones are packed."""
    device = torch.device("cpu") if world is None else world.device
    draw = torch.Generator().manual_seed(1000 * step + replica)
    made: list[Batch] = []
    for micro in range(count):
        rows, length = 1 + (micro + step) % 3, 3 + (2 * micro + step + replica) % 8
        ids = torch.randint(0, VOCABULARY, (rows, length + 1), generator=draw)
        inputs: Any = {"input_ids": ids[:, :-1]} if name == "llama" else (ids[:, :-1],)
        targets = ids[:, 1:]
        if micro % 2 and name != "llama":
            lengths = torch.full((rows,), length)
            inputs, targets = (ids[:, :-1].flatten(), lengths), targets.flatten()
        batch = Batch(inputs=inputs, targets=targets, samples=rows, items=targets.numel())
        made.append(batch.to(device))
    return made


def _loss(model: nn.Module, batch: Batch, items: int) -> Tensor:
    logits = logits_of(call(model, batch))
    summed = functional.cross_entropy(
        logits.flatten(0, -2), batch.targets.flatten(), reduction="sum"
    )
    return summed / items


def _items(step: int, replicas: int, count: int, name: str) -> int:
    batches = [_micros(step, replica, count=count, name=name) for replica in range(replicas)]
    return sum(micro.items for micros in batches for micro in micros)


def _train_alone(name: str, *, replicas: int, count: int) -> tuple[list[float], dict[str, Tensor]]:
    model = _build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        items, total = _items(step, replicas, count, name), 0.0
        for replica in range(replicas):
            for micro in _micros(step, replica, count=count, name=name):
                loss = _loss(model, micro, items)
                loss.backward()
                total += loss.item()
        losses.append(total)
        first = first or _gradients([model])
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def _gradients(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, weight in module.named_parameters():
            assert weight.grad is not None, name
            grad = weight.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    return found


def _make_pipeline(world: World, name: str) -> Pipeline:
    stages = split(_build(name).to(world.device), world.layout.stages)
    rank = world.coordinates.pp
    own = {number: stages[number] for number in range(rank, len(stages), world.layout.pp)}
    shared = shared_names(stages)
    mesh = world.axis("fsdp")
    if mesh is not None:
        for stage in own.values():
            layers = [part for part in stage.modules() if isinstance(part, Block)]
            for part in (*layers, stage):
                # As it is, and gathered but once for all micro-batches of a step.
                keeps = None if world.layout.schedule == "gpipe" else False
                sharded: Any = fully_shard(part, mesh=mesh, reshard_after_forward=keeps)
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return Pipeline(
        own,
        group=world.group("pp"),
        layout=world.layout,
        rank_in_pp=rank,
        shared=shared,
        p2p_groups=world.p2p_groups,
    )


def _sync(stage: nn.Module, *, is_on: bool) -> None:
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(is_on)
        stage.set_is_last_backward(is_on)
        stage.set_reshard_after_backward(is_on)


def _train(world: World, name: str, count: int) -> tuple[list[float], dict[str, Any]]:
    pipeline = _make_pipeline(world, name)
    weights = [weight for stage in pipeline.stages.values() for weight in stage.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        items = _items(step, world.layout.replicas, count, name)
        for stage in pipeline.stages.values():
            _sync(stage, is_on=False)
        total = pipeline.accumulate(
            _micros(step, world.replica, count=count, name=name, world=world),
            lambda model, batch, items=items: _loss(model, batch, items),
            lambda loss: loss.backward(),
            before_last=lambda number: _sync(pipeline.stages[number], is_on=True),
        )
        pipeline.sum_shared_gradients()
        losses.append(world.sum_over_all(total).item())
        first = first or _gradients(list(pipeline.stages.values()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.tolist() for key, value in first.items()}


@pytest.mark.parametrize(
    ("layout", "name", "count"),
    [
        (Layout(pp=2, schedule="gpipe"), "tied 3", 5),
        (Layout(pp=2, schedule="1f1b"), "learned 3", 1),
        (Layout(pp=2, schedule="interleaved", stages_per_rank=2), "tied 5", 5),
        pytest.param(Layout(pp=4, schedule="gpipe"), "untied 4", 2, marks=pytest.mark.long),
        (Layout(pp=3, schedule="interleaved", stages_per_rank=2), "tied 7", 4),
        pytest.param(Layout(pp=2, fsdp=2, schedule="gpipe"), "tied 3", 4, marks=pytest.mark.long),
        (Layout(pp=2, fsdp=2, schedule="interleaved", stages_per_rank=2), "tied 4", 5),
    ],
    ids=lambda value: f"{value} {value.schedule}" if isinstance(value, Layout) else str(value),
)
def test_a_pipeline_learns_as_one_process_does(layout: Layout, name: str, count: int) -> None:
    expected, gradients = _train_alone(name, replicas=layout.replicas, count=count)
    found = run_world(_train, layout, name, count)
    seen: set[str] = set()
    for losses, first in found:
        assert losses == pytest.approx(expected, abs=1e-5)
        for key, value in first.items():
            torch.testing.assert_close(torch.tensor(value), gradients[key], rtol=1e-5, atol=1e-6)
        seen.update(first)
    assert seen == set(gradients)


def _shared_stay_equal(world: World) -> list[Any]:
    pipeline = _make_pipeline(world, "tied 2")
    (stage,) = pipeline.stages.values()
    weight = stage.get_parameter("embedding.token.weight")
    pipeline.accumulate(
        _micros(0, 0, count=3, name="tied 2", world=world),
        lambda model, batch: _loss(model, batch, 7),
        lambda loss: loss.backward(),
    )
    pipeline.sum_shared_gradients()
    assert weight.grad is not None
    return weight.grad.tolist()


def test_copies_of_a_tied_weight_get_one_gradient_to_the_bit() -> None:
    one, other = run_world(_shared_stay_equal, Layout(pp=2))
    assert one == other


def _use_tied(world: World, users: set[int]) -> list[list[float] | None]:
    """A step in which only some stages have a gradient for a weight that all of them hold."""
    pipeline = _make_pipeline(world, "tied 2")
    (stage,) = pipeline.stages.values()
    weight = stage.get_parameter("embedding.token.weight")
    found: list[list[float] | None] = []
    for _ in range(2):
        weight.grad = torch.full_like(weight, world.rank + 1) if world.rank in users else None
        pipeline.sum_shared_gradients()
        found.append(None if weight.grad is None else weight.grad.unique().tolist())
    return found


@pytest.mark.parametrize(
    ("users", "expected"), [(set(), None), ({0}, [1.0]), ({1}, [2.0]), ({0, 1}, [3.0])]
)
def test_a_tied_weight_has_a_gradient_where_any_stage_used_it(
    users: set[int], expected: list[float] | None
) -> None:
    assert run_world(_use_tied, Layout(pp=2), users) == [[expected] * 2] * 2


def _freeze(world: World) -> list[bool]:
    pipeline = _make_pipeline(world, "untied 2")
    (stage,) = pipeline.stages.values()
    if world.rank == 0:
        stage.requires_grad_(False)
    pipeline.accumulate(
        _micros(0, 0, count=3, name="untied 2", world=world),
        lambda model, batch: _loss(model, batch, 7),
        lambda loss: loss.backward(),
    )
    return [weight.grad is not None for weight in stage.parameters()]


def test_a_frozen_first_stage_gets_no_gradient_and_blocks_nobody() -> None:
    first, last = run_world(_freeze, Layout(pp=2))
    assert not any(first)
    assert all(last)


def _answer(world: World, name: str) -> list[Any]:
    pipeline = _make_pipeline(world, name)
    pipeline.view.eval()
    batches = _micros(3, 0, count=3, name=name, world=world)
    return [call(pipeline.view, batch).tolist() for batch in batches]


@pytest.mark.parametrize(
    "layout", [Layout(pp=3), Layout(pp=2, schedule="interleaved", stages_per_rank=2)], ids=str
)
def test_every_rank_gets_the_answers_of_the_whole_model(layout: Layout) -> None:
    model = _build("tied 4").eval()
    for answers in run_world(_answer, layout, "tied 4"):
        for batch, answer in zip(_micros(3, 0, count=3, name="tied 4"), answers, strict=True):
            torch.testing.assert_close(torch.tensor(answer), call(model, batch))


def _is_cut(world: World, directory: str, stopped: int) -> str:
    """One rank stops for ever; the other is cut off while it waits for it."""
    pipeline = _make_pipeline(world, "tied 2")
    flag = Path(directory) / "stopped"
    if world.rank == stopped:
        reached = threading.Event()

        def stop(_: int) -> None:
            reached.set()
            threading.Event().wait()

        if stopped == 1:  # before its last backward; rank 0 never even begins
            threading.Thread(target=_run, args=(pipeline, world, stop), daemon=True).start()
            assert reached.wait(LIMIT_S)
        flag.touch()
        while flag.exists():
            reached.wait(0.01)
        return "stopped"
    outcome: list[str] = []
    worker = threading.Thread(target=_run, args=(pipeline, world, None, outcome), daemon=True)
    worker.start()
    while not flag.exists():
        worker.join(0.01)
        assert worker.is_alive(), outcome
    world.disconnect()
    worker.join(LIMIT_S)
    flag.unlink()
    return "still waits" if worker.is_alive() else outcome[0]


def _run(
    pipeline: Pipeline, world: World, before_last: Any, outcome: list[str] | None = None
) -> None:
    try:
        total = pipeline.accumulate(
            _micros(0, 0, count=3, name="tied 2", world=world),
            lambda model, batch: _loss(model, batch, 7),
            lambda loss: loss.backward(),
            before_last=before_last,
        )
        total.item()  # where the host waits for an accelerator
        if world.is_disconnected:
            raise RuntimeError("cut off")
        said = "done"
    except RuntimeError as error:
        said = f"failed: {error}"
    if outcome is not None:
        outcome.append(said)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_waits_for_a_stopped_one_is_freed_by_the_cut(
    tmp_path: Path, stopped: int
) -> None:
    said = run_world(_is_cut, Layout(pp=2), str(tmp_path), stopped)
    assert said[stopped] == "stopped"
    assert said[1 - stopped].startswith("failed: ")


def test_losses_are_those_of_a_model_that_knows_nothing_yet() -> None:
    losses, _ = _train_alone("tied 3", replicas=1, count=5)
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert losses[-1] != pytest.approx(losses[0], abs=1e-3)
