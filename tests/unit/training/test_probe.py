from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from yunlu.catalog.machine import Machine
from yunlu.training import probe
from yunlu.training.cgroup import Cgroup

if TYPE_CHECKING:
    from collections.abc import Callable


def test_this_machine_is_described_within_what_the_system_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("YUNLU_DOLLARS_PER_HOUR", "1.5")
    machine = probe.probe_machine()
    cpu = machine.devices[0]
    assert cpu.kind == "cpu"
    assert cpu.name
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 0 < cpu.memory_bytes <= machine.memory_bytes <= psutil.virtual_memory().total
    assert "fp32" in cpu.fast_precisions
    assert machine.dollars_per_hour == 1.5


@pytest.mark.parametrize(
    ("granted", "expected"), [(0.5, 1), (1.9, 1), (3.0, 3), (64.0, 4), (None, 4)]
)
def test_cores_are_the_smaller_of_affinity_and_grant(
    monkeypatch: pytest.MonkeyPatch, granted: float | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert probe.count_cores(Cgroup(cores=granted)) == expected


def test_a_containers_limit_bounds_total_and_free_memory() -> None:
    limits = Cgroup(memory_bytes=1 << 20, memory_used_bytes=1 << 19)
    assert probe._memory(limits) == (1 << 20, 1 << 19)
    full = Cgroup(memory_bytes=1 << 20, memory_used_bytes=1 << 21)
    assert probe._memory(full) == (1 << 20, 0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2": True}, ("fp32",)),
        ({"avx512_f": True, "avx512_bf16": False}, ("fp32",)),
        ({"avx512_bf16": True}, ("fp32", "bf16")),
        ({"amx_bf16": True, "amx_fp16": True}, ("fp32", "bf16", "fp16")),
        ({"bf16": True, "fp16_arith": True}, ("fp32", "bf16")),
    ],
)
def test_a_processor_is_fast_only_in_what_it_computes_natively(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert probe._cpu(1).fast_precisions == expected


def test_a_precision_is_worth_using_only_when_clearly_faster() -> None:
    assert probe.judge("fp32", 1.0, "cpu").is_worth_using
    assert probe.judge("bf16", 2.0, "cuda").is_worth_using
    assert not probe.judge("bf16", 1.05, "cpu").is_worth_using
    slow = probe.judge("fp16", 1 / 160, "cpu")
    assert not slow.is_worth_using
    assert "160" in slow.verdict
    assert "slower" in slow.verdict


def counting(seconds: float, clock: list[float], calls: list[float]) -> Callable[[], None]:
    def work() -> None:
        clock[0] += seconds
        calls.append(seconds)

    return work


def test_hopeless_work_is_timed_once_and_noise_is_outlived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])
    calls: list[float] = []
    assert probe._best_time(counting(0.1, clock, calls), hopeless_s=0.01) == pytest.approx(0.1)
    assert len(calls) == 2  # a first time to warm up, and the one that is timed

    noisy = iter([0.05, 0.004, 0.001, 0.009, *[0.002] * 100])

    def work() -> None:
        clock[0] += next(noisy)

    assert probe._best_time(work) == pytest.approx(0.001)


def test_the_program_prints_a_machine_and_a_verdict_for_each_precision(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert probe.main(["--measure"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert Machine.model_validate(found["machine"]).cores >= 1
    assert found["torch"] == {"version": torch.__version__, "problem": None}
    speeds = {speed["precision"]: speed for speed in found["measured"]["precisions"]}
    assert list(speeds) == ["fp32", "bf16", "fp16"]
    assert speeds["fp32"]["relative_speed"] == 1.0
    assert speeds["fp32"]["is_worth_using"]
    assert all(speed["relative_speed"] > 0 for speed in speeds.values())
