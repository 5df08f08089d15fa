"""The next step's batches are fetched while the device computes; knobs that a device lacks are not turned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pretend_accelerator as pretend
import torch

from tests.pretend.programs.checks import raises, run_checks
from yunlu.core.errors import DataError, YunluError
from yunlu.training.compiler import compile_model, compiled_call
from yunlu.training.determinism import copy_random, restore_random
from yunlu.training.device import kind_of
from yunlu.training.device_feed import DeviceFeed
from yunlu.training.step_clock import DeviceClock
from yunlu.training.tasks.task import Batch

NPU = torch.device("npu:1")


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(1).item()]


def steps(count: int = 5, micros: int = 3) -> Iterator[list[Batch]]:
    """Samples that draw random numbers, as augmentation does."""
    for step in range(count):
        yield [
            Batch(
                inputs=(torch.tensor(draw()), torch.full((2,), step)),
                targets={"target": torch.tensor([step, micro]), "name": "n"},
                samples=1,
                items=1,
            )
            for micro in range(micros)
        ]


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.default_generator.manual_seed(1)


def check_batches_arrive_one_by_one_and_equal() -> None:
    seed()
    expected = list(steps())
    seed()
    feed = DeviceFeed(steps(), NPU)
    for expected_step in expected:
        with pretend.counting() as counts:
            step = next(feed)
            moved = [micro.to(NPU) for micro in step]
            feed.prepare()
        assert counts["synchronizations"] == 0
        assert step[0].inputs[0].is_pinned()
        for there, micro in zip(expected_step, moved, strict=True):
            assert type(micro) is Batch
            assert micro.inputs[0].device == NPU
            assert micro.inputs[0].tolist() == there.inputs[0].tolist()
            assert micro.targets["target"].tolist() == there.targets["target"].tolist()
            assert micro.targets["name"] == "n"
    with raises(StopIteration):
        next(feed)
    assert not pretend.races()


def check_only_two_micro_batches_are_on_the_device() -> None:
    big = [
        [Batch(inputs=(torch.zeros(1 << 18),), targets=torch.zeros(1), samples=1, items=1)] * 1
        + [Batch(inputs=(torch.zeros(1 << 18),), targets=torch.zeros(1), samples=1, items=1)] * 7
    ]
    feed = DeviceFeed(iter(big), NPU)
    before = torch.accelerator.memory_allocated(NPU)
    torch.accelerator.reset_peak_memory_stats(NPU)
    for micro in next(feed):
        micro.to(NPU)
        torch.accelerator.synchronize(NPU)  # as a step that computes with it
    peak = torch.accelerator.max_memory_allocated(NPU) - before
    assert peak <= 3.1 * (1 << 20), peak


def check_a_checkpoint_resumes_with_the_same_numbers() -> None:
    seed()
    feed = DeviceFeed(steps(), NPU)
    next(feed)
    feed.prepare()
    saved = copy_random(feed.random_before)
    second, state = next(feed)[0].to(NPU).inputs[0].tolist(), torch.get_rng_state()
    restore_random(*saved)
    again = steps()
    assert next(again)[0].inputs[0].tolist() == second
    assert torch.equal(torch.get_rng_state(), state)


def check_a_feed_that_is_replaced_has_drawn_nothing() -> None:
    seed()
    feed = DeviceFeed(steps(), NPU)
    next(feed)
    before = torch.get_rng_state()
    feed.prepare()
    assert not torch.equal(torch.get_rng_state(), before)
    feed.drop()
    assert torch.equal(torch.get_rng_state(), before)


def check_an_error_of_the_data_ends_the_step_that_needs_it() -> None:
    def broken() -> Iterator[list[Batch]]:
        yield from steps(1)
        raise DataError("row 7 is no image")

    feed = DeviceFeed(broken(), NPU)
    next(feed)
    feed.prepare()
    with raises(DataError, "row 7"):
        next(feed)


def check_the_clock_tells_computing_from_waiting_for_data() -> None:
    clock = DeviceClock(NPU)
    times: Any = SimpleNamespace(compute_s=5.0, wait_s=0.0, data_s=0.0)
    begun_at = clock.begin()
    torch.ones(4, device=NPU).add_(1)
    clock.end_compute(begun_at)
    clock.exchanged()
    torch.accelerator.synchronize(NPU)
    clock._fetched_at = begun_at + 3.0  # the host fetched for three seconds
    clock.split(times, 0.0)
    assert 2.5 < times.data_s <= 3.0
    assert abs(times.compute_s + times.wait_s + times.data_s - 5.0) < 1e-6 + times.wait_s
    clock.split(times, 0.0)  # a step that was passed over has no times
    assert times.compute_s <= 2.5


def check_a_compiler_is_tried_only_where_the_device_has_one() -> None:
    with raises(YunluError, "npu"):
        compile_model(torch.nn.Linear(2, 2), "inductor", NPU)
    kind, model = kind_of("npu"), torch.nn.Linear(2, 2)
    kind.compiler_problem = lambda: None
    try:
        compile_model(model, "inductor", NPU)
    finally:
        del kind.compiler_problem
    assert compiled_call(model) is not None


if __name__ == "__main__":
    run_checks(dict(globals()))
