"""The engine on one device: the CPU's losses, to the bit where the kernels are the CPU's; memory that runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.parity import Recorder, Sentences, make_job, make_plan
from tests.pretend.programs.checks import run_checks
from yunlu.planning.layouts import Layout
from yunlu.runs.events import MemoryExhausted
from yunlu.training import loop
from yunlu.training.engine import Engine
from yunlu.training.memory.out_of_memory import free_memory
from yunlu.training.tasks.task import TrainingInputs


def train(
    device: str, make: str = "tied", *, micro_batch: int = 4, precision: str = "fp32", **asked: Any
) -> tuple[list[float], list[float], list[Any]]:
    """Losses, gradient norms and events of 22 steps."""
    kernel = asked.pop("kernel", "fused")
    job, task = make_job(**asked), Sentences(make)
    parts = TrainingInputs(task=task, model=task.build(job), splits=task.load(job))
    plan = make_plan(Layout(), job, micro_batch=micro_batch, kernel=kernel, device=device)
    events: list[Any] = []
    engine = Engine(job, plan.model_copy(update={"precision": precision}), parts, events.append)
    recorder = Recorder([], [])
    loop.run(engine, recorder)
    engine.close()
    return recorder.losses, recorder.norms, events


def check_losses_are_the_cpus_to_the_bit() -> None:
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("tied", {}),
        ("normed", {"micro_batch": 32}),
        ("llama", {"kernel": "foreach"}),
        ("untied", {"kernel": "single", "clip": "adaptive", "l1": 1e-4}),
        (
            "uneven",
            {"ema": 0.9, "optimizer": {"name": "momentum", "lr": 0.01}, "kernel": "foreach"},
        ),
    )
    for make, asked in cases:
        there, here = train("npu", make, **asked), train("cpu", make, **asked)
        assert there[0] == here[0], make
        # Norms of the device are taken of all gradients at once: another order of the same sums.
        assert there[1] == pytest.approx(here[1], rel=1e-6), make


def check_lower_precisions_learn_as_on_the_cpu() -> None:
    # Autocast's lists are those of accelerators, not the CPU's: other operations are rounded.
    for precision, allowed in (("bf16", 5e-3), ("fp16", 1e-3)):
        there, _, _ = train("npu", precision=precision)
        here, _, _ = train("cpu", precision=precision)
        exact, _, _ = train("cpu")
        assert there == pytest.approx(here, rel=allowed), precision
        assert there == pytest.approx(exact, rel=allowed), precision
        assert there != exact, precision


def check_memory_that_runs_out_costs_speed_and_nothing_else() -> None:
    def peak(micro_batch: int) -> int:
        free_memory()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        train("npu", micro_batch=micro_batch)
        return torch.accelerator.max_memory_allocated() - before

    roomy, _, told = train("npu", micro_batch=8)
    assert not told
    most, little = peak(32), peak(8)
    assert most > 1.2 * little, (most, little)
    free_memory()
    _, total = torch.accelerator.get_memory_info()
    room = (most + little) // 2
    left = total - torch.accelerator.memory_allocated() - room
    ballast = torch.empty(left, dtype=torch.uint8, device="npu")
    short, _, told = train("npu", micro_batch=32)
    del ballast
    assert [type(event) for event in told] == [MemoryExhausted] * len(told)
    assert told
    assert told[-1].micro_batch in {8, 16}
    assert "out of memory. Tried to allocate" in told[0].message
    assert short == pytest.approx(roomy, rel=1e-6)


if __name__ == "__main__":
    run_checks(dict(globals()))
