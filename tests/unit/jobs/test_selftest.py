"""The self-test: which checks it plans, when losses agree, and what it says of runs that go wrong."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.waiting import wait_until
from yunlu.client.local import LocalClient
from yunlu.core.errors import JobError, YunluError
from yunlu.jobs import selftest
from yunlu.jobs.selftest import SelftestCheck, SelftestProgress, SelftestResult
from yunlu.jobs.selftest_plan import (
    COMPARED_STEPS,
    compare_losses,
    find_gap,
    has_fallen,
    make_selftest_job,
    plan_checks,
)
from yunlu.render.terminal.selftest_page import selftest_page

EVERY = ("fp32", "bf16", "fp16", "fp8")


def made(devices: int, kind: str = "npu", **options: object) -> dict[str, str]:
    """Checks that would be made, each with its layout."""
    plan = plan_checks(kind, devices=devices, precisions=EVERY, **options)  # type: ignore[arg-type]
    return {check.name: check.layout for check in plan if not check.skip}


def test_every_layout_family_that_fits_the_devices_is_checked() -> None:
    one, two, eight = made(1), made(2), made(8)
    assert not {"dp", "fsdp", "tp", "pp", "fsdp+tp"} & set(one)
    assert {"text", "resume", "kill", "image", "table", "bf16", "fp16", "compile"} <= set(one)
    assert (one["kill"], two["kill"]) == ("single", "dp2")
    assert (two["dp"], two["fsdp"], two["tp"], two["pp"]) == ("dp2", "fsdp2", "tp2", "pp2")
    assert "fsdp+tp" not in two
    assert (eight["dp"], eight["fsdp+tp"]) == ("dp8", "fsdp4 x tp2")
    assert made(7)["dp"] == "dp4"  # every replica has the same share of the batch


def test_what_is_left_out_says_why() -> None:
    plan = plan_checks("cpu", devices=1, precisions=("fp32",), quick=True)
    skipped = {check.name: check.skip for check in plan if check.skip}
    assert skipped["cpu"] == "the CPU is what is tested"
    assert skipped["dp"] == "needs two devices"
    assert skipped["bf16"] == "this cpu does not compute in bf16 itself"
    assert skipped["image"] == "left out by --quick"
    assert set(made(2, only=("tp",))) == {"cpu", "text", "tp"}


def test_every_check_is_a_job_that_can_be_read(tmp_path: Path) -> None:
    for devices in (1, 2, 4, 8):
        for check in plan_checks("npu", devices=devices, precisions=EVERY):
            job = make_selftest_job(check, tmp_path, steps=20)
            assert job.train.steps == 20
            if not check.skip:
                assert job.devices == job.layout.said_workers == check.devices


def test_losses_are_compared_step_by_step() -> None:
    expected = dict.fromkeys(range(1, 20), 1.0)
    found = compare_losses({**expected, 3: 1.01, 15: 2.0}, expected, steps=COMPARED_STEPS)
    assert (found.step, round(found.relative, 3)) == (3, 0.01)
    assert compare_losses({}, expected).relative == math.inf
    assert find_gap({1: 1.0, 2: math.nan}, 2) == 2
    assert find_gap({1: 1.0, 2: 1.0}, 2) is None
    assert has_fallen({1: 2.0, 2: 1.0})
    assert not has_fallen({1: 1.0, 2: 2.0})


@pytest.mark.usefixtures("fake_worker")
def test_it_runs_by_the_public_verbs_and_leaves_nothing_behind(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "100")
    monkeypatch.setenv("HCCL_SECRET_KEY", "hidden-from-everyone")
    begun: list[SelftestProgress] = []
    result = LocalClient().selftest(checks=["image"], devices=1, on_progress=begun.append)
    outcomes = {check.name: (check.outcome, check.detail) for check in result.checks}
    assert outcomes["text"] == outcomes["image"] == ("ok", "loss 1 → 0.05")
    assert outcomes["table"] == ("skipped", "not asked for")
    assert result.has_passed
    assert [step.check for step in begun] == ["text", "text", "image"]
    assert SelftestResult.model_validate_json(result.model_dump_json()) == result
    assert result.environment["HCCL_BUFFSIZE"] == "100"
    assert not {"YUNLU_HOME", "HCCL_SECRET_KEY", "PATH"} & set(result.environment)
    assert not own_home.exists()


def test_a_first_run_that_fails_explains_itself_and_the_rest_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "print('no memory for hf_0123456789abcdefghijklmnop'); raise SystemExit(3)"
    worker = (sys.executable, "-c", program)
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", worker)
    result = LocalClient().selftest(quick=True)
    text, *others = (check for check in result.checks if check.name in {"text", "kill", "resume"})
    assert text.outcome == "failed"
    assert "no memory for ***" in text.detail
    assert text.log == ("no memory for ***",)
    assert {check.detail for check in others} == {"one worker alone does not train: see text"}
    assert not result.has_passed


def test_a_run_that_hangs_is_given_up_and_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    program = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    worker = (sys.executable, "-c", program)
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", worker)
    monkeypatch.setattr(selftest, "_RUN_S", 0.0)
    result = LocalClient().selftest(checks=["text"])
    (text,) = (check for check in result.checks if check.name == "text")
    assert (text.outcome, text.detail) == ("failed", "no end after 0 s, at step 0")
    if pid.exists():
        wait_until(lambda: not psutil.pid_exists(int(pid.read_text())), "the worker is gone")


@pytest.mark.usefixtures("fake_worker")
def test_when_the_time_is_over_the_rest_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(begun: SelftestProgress) -> None:
        if begun.of:
            monkeypatch.setattr(selftest, "_TOTAL_S", 0.0)

    result = LocalClient().selftest(quick=True, devices=1, on_progress=end)
    details = {check.name: check.detail for check in result.checks}
    assert details["text"].startswith("loss 1")
    assert details["resume"] == details["kill"] == "the 0 minutes were over"
    assert result.has_passed


def test_what_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="no check 'tpp'"):
        LocalClient().selftest(checks=["tpp"])
    monkeypatch.setenv("YUNLU_ACCELERATORS", "npu:2")
    with pytest.raises(YunluError, match="3 devices were asked for, and 2 can be seen"):
        LocalClient().selftest(devices=3)


def test_the_table_fits_eighty_columns_and_names_what_failed() -> None:
    checks = (
        SelftestCheck(name="text", outcome="ok", detail="losses within 1e-05 % of the CPU's"),
        SelftestCheck(
            name="fsdp+tp", layout="fsdp4 x tp2", outcome="failed", seconds=12.3,
            detail="step 2: loss 3.5, the CPU's 3.4 (2.9 % off, 0.1 % allowed)",
        ),
        SelftestCheck(name="bf16", outcome="skipped", detail="this npu does not compute in bf16"),
    )  # fmt: skip
    result = SelftestResult.model_construct(
        at=0.0, took_s=61.0, is_quick=False, packages={"torch": "2.13.0"}, kind="npu",
        device="Ascend910B2", devices=8, checks=checks,
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(selftest_page(result, "result.json"))
    shown = console.file.getvalue()
    assert "✗ failed" in shown
    assert "step 2: loss 3.5" in shown
    assert "✗ 1 of 3 checks failed.  1 ok, 1 skipped" in shown
    assert "Send this file with your report" in shown
    assert "result.json" in shown
    assert max(map(len, shown.splitlines())) <= 80
