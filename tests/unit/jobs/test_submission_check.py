"""A job for rented devices is rehearsed first: refused for errors of its own, and for nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from yunlu.core.errors import DataError, ModelError, RehearsalError
from yunlu.jobs import submission_check
from yunlu.jobs.model_profile import rehearse
from yunlu.jobs.submission_check import check_before_paying
from yunlu.planning.layouts import Layout
from yunlu.planning.plan import Hardware, Plan, Prediction, RankRehearsal, Rehearsal
from yunlu.spec.job import Job

GIB = 1 << 30
JOB = Job.model_validate(
    {"task": "language-modeling", "model": "transformer", "data": "synthetic:reviews"}
)
PLAN = Plan(
    device="cuda", threads=1, micro_batch=4, accumulation=1, layout=Layout(), batch=4, steps=10,
    steps_per_epoch=10, warmup_steps=0, lr=1e-3, weight_decay=0.01, evaluate_every=0, checkpoint_every=0,
    best_metric="loss", stopping_metric="loss", workers=0, choices=(),
    prediction=Prediction(memory_bytes=1, step_s=1, samples_per_s=1, total_s=1, dollars=None),
    hardware=Hardware(cloud="aws", instance="p4d.24xlarge", memory_bytes=40.0 * GIB),
)  # fmt: skip


def check(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Rehearsal], *, executor: str = "slurm://a"
) -> str:
    monkeypatch.setattr(submission_check, "rehearse", lambda *_, **__: answer())
    return check_before_paying(JOB, PLAN, executor=executor)


def rehearsal(peak: float) -> Rehearsal:
    rank = RankRehearsal(rank=0, peak_bytes=int(peak), phase="activations", parts={})
    return Rehearsal(ranks=(rank,), kernels="cpu", cpu_s=1.0, samples=4)


def fail(error: Exception) -> Callable[[], Rehearsal]:
    def answer() -> Rehearsal:
        raise error

    return answer


def test_an_error_of_the_job_refuses_it_and_says_how_to_submit_it_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModelError, match="the step fails") as caught:
        check(monkeypatch, fail(ModelError("the step fails")))
    assert caught.value.hint is not None
    assert "--no-rehearse" in caught.value.hint


@pytest.mark.parametrize(
    "error", [RehearsalError("it took longer than 180 s"), DataError("no such file here")], ids=str
)
def test_what_is_not_the_fault_of_the_job_is_only_noted(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert check(monkeypatch, fail(error)) == f"not rehearsed: {error}"


def test_what_does_not_fit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, lambda: rehearsal(39 * GIB)) == ""
    note = check(monkeypatch, lambda: rehearsal(41 * GIB))
    assert "worker 0, more than the 40.0 GiB of aws p4d.24xlarge" in note


def test_nothing_is_rehearsed_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = fail(AssertionError("it was rehearsed"))
    assert check(monkeypatch, answer, executor="local?nodes=2") == ""


def test_a_rehearsal_that_dies_or_takes_too_long_is_no_error_of_the_job(tmp_path: Path) -> None:
    dies = (sys.executable, "-c", "import os; os._exit(9)")
    with pytest.raises(RehearsalError, match="exit code 9"):
        rehearse(JOB, PLAN, command=dies)
    waits = (sys.executable, "-c", "import threading; threading.Event().wait()")
    with pytest.raises(RehearsalError, match="longer than 0 s"):
        rehearse(JOB, PLAN, limit_s=0.3, command=waits)
    answer = json.dumps({"found": rehearsal(1e9).model_dump(mode="json")})
    answers = (sys.executable, "-c", f"print({answer!r})")
    assert rehearse(JOB, PLAN, command=answers).peak_bytes == 1e9
