"""Faults of code that never ran on an accelerator, one worker: each check fails without its cure."""

from __future__ import annotations

import math
import os
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pretend_accelerator as pretend
import torch
from torch import nn

from tests.distributed.parity import Sentences, make_job
from tests.pretend.programs.checks import run_checks
from tests.pretend.programs.device import in_child
from yunlu.training.checkpoint.host_copy import HostBuffer, HostCopy
from yunlu.training.clipping import Clipper, measure_square
from yunlu.training.device import (
    CPU,
    can_pin,
    open_device,
    random_kept,
    random_state,
    restore_random_state,
    seed_device,
    synchronize,
    used_kind,
)
from yunlu.training.device_feed import StepCopies
from yunlu.training.evaluate import evaluate
from yunlu.training.models.networks import ConvGRU
from yunlu.training.models.transformer import TransformerClassifier
from yunlu.training.precision import Precision
from yunlu.training.precision.adaptive import DeviceLossScale
from yunlu.training.probe import _accelerators
from yunlu.training.tasks.task import Batch

FIRST, SECOND = torch.device("npu:0"), torch.device("npu:1")


def on_second() -> dict[str, torch.Tensor]:
    return {f"weight {n}": torch.full((1000,), float(n), device=SECOND) for n in range(4)}


def check_a_checkpoint_waits_for_the_tensors_own_device() -> None:
    tensors = on_second()
    views = HostBuffer().lay_out(tensors)
    assert all(view.is_pinned() for view in views.values())
    copy = HostCopy(views, tensors)
    found: list[bool] = []

    def save() -> None:
        assert torch.accelerator.current_device_index() == 0
        copy.run()
        found.extend(
            view.tolist() == [float(number)] * 1000 for number, view in enumerate(views.values())
        )

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert found == [True] * 4


def check_a_checkpoint_is_copied_beside_the_computation() -> None:
    weights = {"a": torch.ones(1000, device=SECOND), "mean": torch.ones(1000, device=SECOND)}
    views = HostBuffer().lay_out(weights)
    copy = HostCopy(views, weights, moving={"mean"})
    weights["mean"].add_(1)  # by the forward pass of the next step
    with pretend.counting() as counts:
        copy.run()
    assert views["mean"].tolist() == views["a"].tolist() == [1] * 1000
    assert counts["synchronizations"] == counts["waits_stream"] == 1
    weights["a"].add_(1)  # by its update: ordered after the copies
    assert not pretend.races()


def check_reserved_memory_becomes_pinned() -> None:
    buffer = HostBuffer()
    buffer.reserve(10_000)
    (view,) = buffer.lay_out({"a": torch.ones(10, device=SECOND)}).values()
    assert view.is_pinned()


def check_only_the_own_device_gets_a_context() -> None:
    def work() -> None:
        device = open_device("npu", 1)
        seed_device(device, 3)
        assert [found.name for found in _accelerators()] == ["Pretend npu 1"] * 2
        with random_kept():
            torch.rand(2, device=device)
        random_state()
        synchronize(device)
        assert pretend.contexts() == [1]

    assert in_child(work) == 0


def check_a_job_on_the_cpu_leaves_the_accelerators_alone() -> None:
    def work() -> None:
        assert used_kind() is None
        assert random_state() is None
        assert not can_pin([CPU])
        weights = {"a": torch.ones(10)}
        views = HostBuffer().lay_out(weights)
        HostCopy(views, weights).run()
        assert not views["a"].is_pinned()
        task, job = Sentences(), make_job()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns before it initialises all devices
            evaluate(
                task,
                task.build(job),
                task.load(job).train,
                precision=Precision("fp32", CPU),
                device=CPU,
                micro_batch=80,
            )
        assert pretend.contexts() == []

    assert in_child(work) == 0


def check_a_fork_after_fp8_was_prepared_can_use_its_device() -> None:
    """Workers are forked from the process that prepares."""
    from yunlu.training import prepare

    asked: list[object] = []
    prepare.convert_to_fp8 = lambda model, device: asked.append(device) or ["0"]  # type: ignore[assignment]

    def work() -> None:
        prepare._convert_to_fp8(SimpleNamespace(warn=None), nn.Linear(16, 16))  # type: ignore[arg-type]
        assert asked == [None]
        assert in_child(lambda: torch.ones(2, device=FIRST)) == 0

    assert in_child(work) == 0


def check_a_worker_without_gradients_has_its_zero_on_the_device() -> None:
    weights = [torch.ones(3, device=SECOND, requires_grad=True) for _ in range(3)]
    nothing = measure_square(weights, [1, 2, 2])
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0)
    torch.accelerator.synchronize(SECOND)
    with pretend.counting() as counts:
        square = measure_square(weights, [1, 2, 2])
    assert counts["synchronizations"] == 0
    both = torch.stack((nothing, square))
    assert both.device == SECOND
    assert both.dtype == torch.float32
    assert both.tolist() == [0, 24]


def check_clipping_asks_nothing_of_the_host() -> None:
    from yunlu.spec.train import ClipSpec

    clipper = Clipper(ClipSpec(norm="adaptive"))
    clipper.restore({"statistics": [40.0, 1.0, 0.01]})
    gradients = [torch.full((4,), 4.0, device=SECOND)]
    with pretend.counting() as counts:
        clipper.clip(gradients, torch.full((), 8.0, device=SECOND))
    assert counts["synchronizations"] == 0
    assert 0 < gradients[0].square().sum().sqrt().item() < 2


def check_the_generator_of_the_device_is_kept() -> None:
    def draw() -> list[float]:
        return torch.rand(4, device="npu").tolist()

    torch.accelerator.set_device_index(0)
    seed_device(FIRST, 5)
    state = random_state()
    first = draw()
    restore_random_state(state)
    with random_kept():
        assert draw() == first
    assert draw() == first
    seed_device(FIRST, 5)
    assert draw() == first


def check_lengths_are_read_on_the_host() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 9, 9, 2])
    frames, ids = torch.randn(4, 9, 8), torch.randint(0, 16, (25,))
    models: list[tuple[nn.Module, tuple[torch.Tensor, ...]]] = [
        (ConvGRU(8, 5, hidden=8, layers=1, dropout=0.0), (frames, lengths)),
        (
            TransformerClassifier(
                vocabulary=16, max_length=16, classes=3, width=16, layers=1, heads=2
            ),
            (ids, lengths),
        ),
    ]
    for model, inputs in models:
        expected = model.eval()(*inputs)
        batch = Batch(inputs=inputs, targets=lengths, samples=4, items=4, on_host=(1,))
        (here,) = StepCopies([batch], SECOND, torch.Stream(SECOND)).batches()
        moved = here.to(SECOND)
        assert moved.inputs[1].device == CPU
        model.to(SECOND)
        with pretend.counting() as counts:
            found = model(*moved.inputs)
        assert counts["synchronizations"] == counts["waits_copy_from_host"] == 0, counts
        torch.testing.assert_close(found.cpu(), expected)


def check_timers_wait_for_the_device() -> None:
    from yunlu.training.autotune.timer import ModelTimer

    timer: Any = ModelTimer.__new__(ModelTimer)
    timer.device = FIRST
    with pretend.counting() as counts:
        timer._timed(lambda: torch.ones(4, device=FIRST) + 1)
    # Before, too: work that was asked for earlier is none of its time.
    assert counts["waits_device"] == 2


def check_an_overflow_is_known_without_another_wait() -> None:
    weight = nn.Parameter(torch.ones(4, device=FIRST))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scale = DeviceLossScale(FIRST)
    before = scale.value
    for gradient, norm, is_applied in ((0.5, 1.0, True), (math.inf, math.inf, False)):
        with pretend.counting() as counts:
            weight.grad = torch.full_like(weight, gradient * scale.value)
            scale.unscale(optimizer)
            scale.note_norm(norm)
            assert scale.step(optimizer) is is_applied
        assert counts["synchronizations"] == 0
    assert weight.tolist() == [0.5] * 4
    assert (scale.value, scale.skips) == (before / 2, 1)
    again = DeviceLossScale(FIRST)
    again.restore(scale.state())
    assert (again.value, again.skips) == (scale.value, 1)


if __name__ == "__main__":
    assert os.environ["PRETEND_NO_FLOAT64"] == "1"
    # Those that fork come first: a process that has used a device cannot.
    checks = dict(globals())
    forking = [
        name
        for name in checks
        if name.startswith("check_") and "in_child" in checks[name].__code__.co_names
    ]
    run_checks(
        {name: checks[name] for name in sorted(checks, key=lambda name: name not in forking)}
    )
