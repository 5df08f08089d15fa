"""The report as a value, from run directories as a worker leaves them."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.sample_events import sample
from yunlu.core.files import append_lines
from yunlu.jobs.report_builder import build_report
from yunlu.jobs.report_model import Report
from yunlu.planning.plan import Choice, Measurement, Plan, Prediction
from yunlu.render.format import show_finding
from yunlu.render.run_report import write_report
from yunlu.runs.events import (
    AttemptStarted,
    CheckpointSaved,
    DataOpened,
    EnvironmentRecorded,
    ErrorRaised,
    Evaluated,
    Event,
    MemoryExhausted,
    ModelBuilt,
    ModelExported,
    PlanMade,
    PrecisionChanged,
    PredictionMeasured,
    RolledBack,
    StateChanged,
    StepSkipped,
    TraceWritten,
    WarningRaised,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, Log, RunStore
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

START = 1_760_000_000.0
SCRIPT = "<script>window.hacked = 1</script>"


class Writer:
    """Writes a run as a worker would, on a clock of its own."""

    def __init__(self, path: Path, job: dict[str, Any] | None) -> None:
        path.mkdir(parents=True)
        self.run = open_run(path)
        self.now = START
        self.attempt = 1
        if job is not None:
            (self.run.path / Document.JOB).write_text(json.dumps(job))

    def emit(self, event: Event, *, after: float = 0.0) -> None:
        self.now += after
        self.run.emit(event.model_copy(update={"at": self.now}))

    def begin(self, *, number: int = 1, resumed_from: int | None = None) -> None:
        self.attempt = number
        self.emit(sample(AttemptStarted, number=number, pid=4242, began_at=self.now - 2))
        self.emit(StateChanged(state=RunState.PLANNING))
        self.emit(StateChanged(state=RunState.RUNNING, resumed_from_step=resumed_from), after=3)

    def train(
        self,
        steps: Iterable[int],
        *,
        loss: Callable[[int], float],
        tokens: int = 1,
        more: Callable[[int], dict[str, float]] = lambda step: {},
        **same: float,
    ) -> None:
        noise, records = random.Random(7), list[dict[str, Any]]()
        for step in steps:
            compute_s, data_s = 0.04 + 0.004 * noise.random(), 0.004 + 0.006 * noise.random()
            checkpoint_s = 0.02 if step % 50 == 0 else 0.0
            self.now += compute_s + data_s + checkpoint_s + 0.002
            records.append(
                {
                    "step": step,
                    "epoch": step / 45,
                    "loss": loss(step),
                    "lr": 3e-3 * min(1, step / 30) * (0.5 + 0.5 * math.cos(step / 150)),
                    "grad_norm": 0.4 + 2 * math.exp(-step / 60) * (0.5 + noise.random()),
                    "samples": step * 32,
                    "items": 32 * tokens,
                    "at": self.now,
                    "attempt": self.attempt,
                    "data_s": data_s,
                    "compute_s": compute_s,
                    "communication_s": 0.0,
                    "checkpoint_s": checkpoint_s,
                    "memory_bytes": 300 * 2**20 + step * 2**15,
                    **same,
                    **more(step),
                }
            )
        append_lines(self.run.path / Log.METRICS, records)

    def evaluate(self, split: str, step: int, loss: float, **data: Any) -> None:
        self.emit(
            Evaluated(
                split=split,
                step=step,
                loss=loss,
                seconds=0.21,
                **({"metrics": {}} | data),
            ),
            after=0.21,
        )


def job_of(task: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "digits",
        "task": task,
        "model": {"name": "mlp"},
        "data": {"train": "sklearn:digits"},
        **more,
    }


def plan_of(*, steps: int, best_metric: str) -> dict[str, Any]:
    choices = (
        Choice(name="precision", value="fp32", reason="this CPU has no faster arithmetic"),
        Choice(name="micro-batch", value="32", reason="the whole batch fits: 0.3 of 7.1 GiB"),
        Choice(name="learning rate", value="0.003", reason="AdamW on a small network", pinned=True),
        Choice(name="checkpoint every", value="50 steps", reason="a save takes 12 ms"),
    )  # fmt: skip
    prediction = Prediction(
        memory_bytes=340e6, step_s=0.045, samples_per_s=710.0, total_s=26.0, dollars=0.0072
    )
    return Plan(
        device="cpu",
        precision="fp32",
        batch=32,
        micro_batch=32,
        accumulation=1,
        steps=steps,
        steps_per_epoch=45,
        warmup_steps=30,
        lr=3e-3,
        weight_decay=0.01,
        evaluate_every=45,
        checkpoint_every=50,
        best_metric=best_metric,
        stopping_metric=best_metric,
        compile="none",
        workers=0,
        threads=2,
        choices=choices,
        prediction=prediction,
    ).model_dump(mode="json")


def confusion_of(labels: list[str]) -> dict[str, Any]:
    size = len(labels)
    counts = [[18 if i == j else (i * 3 + j) % 7 // 5 for j in range(size)] for i in range(size)]
    return {"labels": labels, "counts": counts}


def falling_loss(step: int) -> float:
    return 2.3 * math.exp(-step / 90) + 0.08 + 0.05 * random.Random(step).random()


def write_classification(path: Path, *, steps: int = 450) -> RunStore:
    """A finished run with everything a report can show, and hostile text where data can put it."""
    writer = Writer(path, job_of("tabular-classification"))
    labels = [str(digit) for digit in range(9)] + [SCRIPT]
    writer.emit(StateChanged(state=RunState.PENDING))
    writer.begin()
    writer.emit(
        sample(
            EnvironmentRecorded,
            yunlu="0.1.0",
            python="3.11.9",
            platform="Linux-6.1-x86_64",
            packages={"torch": "2.13.0", "numpy": "2.3.1", "pydantic": "2.14.3"},
            git_commit="0bc8c08f1c2d3e4a5b6c7d8e9f00112233445566",
            git_dirty=True,
            devices=[{"kind": "cpu", "name": "AMD EPYC", "memory_bytes": 8 * 2**30}],
            argv=["yunlu", "train"],
        )
    )
    writer.emit(
        DataOpened(
            fingerprint="xxh3:5f2a",
            source="sklearn:digits",
            train=1437,
            validation=180,
            test=180,
            about={"labels": labels, "features": 64},
        )
    )
    writer.emit(ModelBuilt(name="mlp", parameters=12_810, trainable=12_810))
    writer.emit(sample(PlanMade, **plan_of(steps=steps, best_metric="accuracy")))
    for start in range(0, steps, 45):
        end = min(start + 45, steps)
        writer.train(range(start + 1, end + 1), loss=falling_loss)
        accuracy = 0.975 - 0.5 * math.exp(-end / 80) - (0.004 if end == steps else 0)
        metrics = {"accuracy": accuracy, "macro_f1": accuracy - 0.003}
        writer.evaluate("validation", end, falling_loss(end) + 0.04, metrics=metrics)
    (path / "checkpoints" / "step-450").mkdir(parents=True)
    for step in (400, 450):
        writer.emit(
            CheckpointSaved(
                step=step,
                path=f"checkpoints/step-{step}",
                bytes=158_720,
                seconds=0.031,
                stalled_s=0.004,
                metrics={"accuracy": 0.97},
            )
        )
    writer.emit(WarningRaised(message="the validation split has only 180 samples"))
    writer.evaluate(
        "test",
        steps,
        0.11,
        metrics={"accuracy": 0.9722, "macro_f1": 0.9714},
        confusion=confusion_of(labels),
        examples=[
            {"input": f"pixels {SCRIPT}", "expected": "3", "predicted": "3"},
            {"input": "0 0 5 13 9 1 0 0 …", "expected": "8", "predicted": "1"},
        ],
    )
    writer.emit(
        ModelExported(path="model", files=["model.safetensors", "README.md"], from_step=400)
    )
    measured = {"memory_bytes": 331e6, "step_s": 0.049, "samples_per_s": 645.0}
    writer.emit(PredictionMeasured(measured=Measurement(**measured, total_s=29.5, dollars=0.0081)))
    writer.emit(StateChanged(state=RunState.FINISHED))
    return writer.run


def write_regression(path: Path) -> RunStore:
    """Running still: no test score, no confusion, nothing measured yet."""
    writer = Writer(path, job_of("tabular-regression"))
    writer.begin()
    writer.emit(sample(PlanMade, **plan_of(steps=200, best_metric="rmse")))
    writer.train(range(1, 61), loss=falling_loss, tokens=17)
    for step, rmse in ((20, 3.0), (40, 1.5), (60, 2.0)):
        writer.evaluate("validation", step, rmse**2, metrics={"rmse": rmse, "r2": 0.5})
    return writer.run


def tuned_record(step: int) -> dict[str, float]:
    """What an engine that tunes itself adds to each record."""
    noise = random.Random(step)
    return {
        "tokens": 4096.0,
        "padding": 4096 * (0.3 + 0.1 * noise.random()),
        "noise_scale": 300 * math.exp(step / 200) * (0.6 + 0.8 * noise.random()),
        "loss_scale": 65536.0 / 2 ** min(step // 30, 4) * (2 if step > 300 else 1),
        "low_share": 1.0 if step < 60 else 0.94 if step < 200 else 0.91,
    }


def write_tuned(path: Path) -> RunStore:
    """A finished run of the engine that tunes itself: tries, trouble, noise, padding, a trace."""
    writer = Writer(path, job_of("text-classification"))
    writer.begin()
    writer.emit(ModelBuilt(name="transformer", parameters=10_400_000, trainable=10_400_000))
    trials = [
        ("precision", "bf16", 0.0021, 1.47, True, False),
        ("precision", "fp16", 0.49, 0.01, False, False),
        ("optimiser kernel", "fused", 0.00204, 1.03, True, False),
        ("micro-batch", "16", 0.0019, 1.08, True, True),
        ("padding", "bucket", 0.00095, 2.0, True, False),
        ("compile", "inductor", 0.00093, 1.02, False, False),
    ]
    keys = ("name", "value", "sample_s", "speedup", "is_adopted", "remembered")
    tried = [dict(zip(keys, trial, strict=True)) for trial in trials]
    writer.emit(sample(PlanMade, **plan_of(steps=450, best_metric="accuracy") | {"trials": tried}))
    writer.emit(MemoryExhausted(step=4, micro_batch=16, message="22.1 GiB were asked for"))
    writer.train(range(1, 61), loss=falling_loss, more=tuned_record, attempt=1)
    for step in (31, 32):
        writer.emit(StepSkipped(step=step, reason="overflow", loss=1.2, norm="Infinity"))
    for module in ("encoder.layers.3.attention", SCRIPT):
        writer.emit(
            PrecisionChanged(
                step=60,
                module=module,
                to="full",
                reason="outputs overflow in fp16",
                low_share=0.94,
            )
        )
    writer.train(range(61, 211), loss=falling_loss, more=tuned_record, attempt=1)
    writer.emit(StepSkipped(step=208, reason="spike", loss=14.2, norm=310.0))
    writer.emit(StepSkipped(step=209, reason="not finite", loss="NaN", norm="NaN"))
    writer.emit(StepSkipped(step=210, reason="not finite", loss="NaN", norm="NaN"))
    writer.emit(RolledBack(step=210, to_step=200, skipping=[208, 209, 210]))
    writer.train(range(201, 451), loss=falling_loss, more=tuned_record, attempt=1)
    phases = (("data", 0.004), ("forward", 0.04), ("backward", 0.071), ("clip", 0.002))
    spent = dict((*phases, ("step", 0.012), ("other", 0.003)))
    rows = [("aten::mm", 0.031, 390), ("aten::addmm", 0.02, 228), (SCRIPT, 0.011, 3)]
    rows += [("outside operators (forward)", 0.009, 3), ("aten::copy_", 0.004, 1440)]
    rows += [(f"aten::operator_{i}", 0.003 / i, 12 * i) for i in range(1, 16)]
    writer.emit(
        TraceWritten(
            path="trace.json.gz",
            steps=3,
            first_step=11,
            wall_s=0.132,
            phases=[{"name": k, "total_s": v, "share": v / 0.132} for k, v in spent.items()],
            table=[{"name": n, "self_s": s, "share": s / 0.132, "calls": c} for n, s, c in rows],
        )
    )
    writer.evaluate("validation", 450, 0.2, metrics={"accuracy": 0.91})
    writer.emit(StateChanged(state=RunState.FINISHED))
    return writer.run


def write_failed(path: Path) -> RunStore:
    """Diverged at step 31."""
    writer = Writer(path, job_of("tabular-classification"))
    writer.begin()
    writer.train(range(1, 33), loss=lambda step: math.nan if step > 30 else 2.0 + step)
    writer.emit(
        ErrorRaised(
            code="training",
            message="The loss is not finite at step 31.",
            hint="Lower train.optimizer.lr.",
            traceback="Traceback: loop.py",
        )
    )
    writer.emit(StateChanged(state=RunState.FAILED))
    return writer.run


@pytest.fixture
def finished(tmp_path: Path) -> RunStore:
    return write_classification(tmp_path / "digits-1")


def test_a_finished_run_is_told_completely(finished: RunStore) -> None:
    report = build_report(finished)

    assert report.state is RunState.FINISHED
    assert (report.name, report.task, report.model) == ("digits", "tabular-classification", "mlp")
    assert report.headline is not None
    assert (report.headline.metric, report.headline.value) == ("accuracy", 0.9722)
    assert {curve.key for curve in report.curves} == {
        "train_loss",
        "train_loss_smoothed",
        "validation_loss",
        "validation/accuracy",
        "validation/macro_f1",
        "lr",
        "grad_norm",
        "grad_norm_smoothed",
        "samples_per_s",
        "samples_per_s_smoothed",
        "memory_bytes",
    }
    assert report.evaluations[-1].split == "test"
    assert [row.step for row in report.evaluations if row.best] == [405]
    assert report.plan is not None
    assert report.plan.choices[0].reason == "this CPU has no faster arithmetic"
    assert [each.is_kept for each in report.checkpoints] == [False, True]
    assert report.exported is not None
    assert report.exported.from_step == 400
    assert "task: tabular-classification" in report.job_yaml
    assert "keep_last" not in report.job_yaml


def test_measured_figures_stand_beside_the_predicted_ones(finished: RunStore) -> None:
    step_time = build_report(finished).comparison("step_s")

    assert (step_time.predicted, step_time.measured) == (0.045, 0.049)
    assert step_time.ratio == pytest.approx(0.049 / 0.045)


def test_a_running_run_is_measured_from_its_records(tmp_path: Path) -> None:
    report = build_report(write_regression(tmp_path / "r"))

    assert report.state is RunState.RUNNING
    assert report.finished_at is None
    step_time, total = report.comparison("step_s"), report.comparison("total_s")
    assert step_time.measured == pytest.approx(0.049, abs=0.005)
    assert report.comparison("memory_bytes").measured == 300 * 2**20 + 60 * 2**15
    # A total that still grows is not compared, and costs what its hours cost.
    assert (total.so_far, total.ratio) == (True, None)
    assert total.measured is not None
    assert report.comparison("dollars").measured == pytest.approx(total.measured / 26 * 0.0072)


def test_the_lowest_error_is_the_best(tmp_path: Path) -> None:
    report = build_report(write_regression(tmp_path / "r"))

    assert [row.step for row in report.evaluations if row.best] == [40]
    assert report.headline is not None
    assert (report.headline.metric, report.headline.value) == ("rmse", 1.5)
    assert report.confusion is None


def test_items_have_a_curve_only_where_they_differ_from_samples(
    finished: RunStore, tmp_path: Path
) -> None:
    tokens = build_report(write_regression(tmp_path / "r"))

    assert build_report(finished).curve("items_per_s") is None
    items, samples = tokens.curve("items_per_s"), tokens.curve("samples_per_s")
    assert items is not None
    assert samples is not None
    assert items.values[5] == pytest.approx(17 * samples.values[5])


def test_values_that_are_not_finite_survive_the_trip_through_json(tmp_path: Path) -> None:
    run = write_failed(tmp_path / "f")
    write_report(run)
    report = Report.model_validate_json((run.path / Document.REPORT).read_bytes())

    loss = report.curve("train_loss")
    assert loss is not None
    assert [math.isnan(value) for value in loss.values] == [False] * 30 + [True] * 2
    smoothed = report.curve("train_loss_smoothed")
    assert smoothed is not None
    assert all(math.isfinite(value) for value in smoothed.values)
    assert report.failure is not None
    assert report.failure.hint == "Lower train.optimizer.lr."
    json.loads((run.path / Document.REPORT).read_text(), parse_constant=pytest.fail)  # strict JSON


def test_a_run_that_never_started_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    report = write_report(open_run(tmp_path / "empty"))

    assert (report.state, report.name, report.curves) == (RunState.PENDING, "empty", ())
    assert report.headline is None
    assert (tmp_path / "empty" / "report.html").is_file()


def test_torn_and_unknown_lines_are_passed_over(finished: RunStore) -> None:
    with (
        (finished.path / Log.EVENTS).open("a") as events,
        (finished.path / Log.METRICS).open("a") as metrics,
    ):
        events.write('{"kind": "of another version", "at": 1}\n[]\n{"kind": "sta')
        metrics.write('[1, 2]\n{"no": "step"}\n{"step": 451, "lo')

    assert build_report(finished).step == 450


def test_an_unreadable_job_does_not_hide_the_run(finished: RunStore) -> None:
    (finished.path / Document.JOB).write_text("{")

    assert build_report(finished).name == "digits-1"


def test_the_later_record_of_a_step_wins_and_undoes_what_followed_the_earlier(
    tmp_path: Path,
) -> None:
    writer = Writer(tmp_path / "r", None)
    writer.train(range(1, 6), loss=lambda step: 1.0)
    writer.train([3], loss=lambda step: 9.0)

    loss = build_report(writer.run).curve("train_loss")
    assert loss is not None
    assert (loss.steps, loss.values) == ((1, 2, 3), (1.0, 1.0, 9.0))


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_inside_a_resumed_life_loses_no_step(
    tmp_path: Path, jump_s: float
) -> None:
    writer = Writer(tmp_path / "r", None)
    writer.begin()
    writer.train(range(1, 101), loss=lambda step: 1.0, attempt=1)
    writer.begin(number=2, resumed_from=80)
    writer.train(range(81, 86), loss=lambda step: 2.0, attempt=2)
    writer.now += jump_s
    writer.train(range(86, 121), loss=lambda step: 2.0, attempt=2)
    writer.evaluate("validation", 120, 0.5)

    report = build_report(writer.run)
    loss = report.curve("train_loss")
    assert loss is not None
    assert loss.steps == tuple(range(1, 121))
    assert loss.values == (1.0,) * 80 + (2.0,) * 40
    assert [row.step for row in report.evaluations] == [120]


def test_a_life_that_has_not_stepped_yet_undoes_the_steps_it_will_do_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", None)
    writer.begin()
    writer.train(range(1, 101), loss=lambda step: 1.0, attempt=1)
    writer.now -= 86_400  # set back between the attempts
    writer.begin(number=2, resumed_from=80)

    report = build_report(writer.run)
    assert (report.step, report.resumed_from) == (80, (80,))


def test_a_rollback_undoes_evaluations_and_steps_until_they_are_done_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", None)
    writer.begin()
    writer.train(range(1, 61), loss=lambda step: 1.0, attempt=1)
    writer.evaluate("validation", 40, 1.0)
    writer.evaluate("validation", 60, 1.0)
    writer.emit(RolledBack(step=60, to_step=50, skipping=[58, 59, 60]))
    writer.train(range(51, 56), loss=lambda step: 3.0, attempt=1)

    report = build_report(writer.run)
    loss = report.curve("train_loss")
    assert loss is not None
    assert (report.step, loss.values[49:]) == (55, (1.0, 3.0, 3.0, 3.0, 3.0, 3.0))
    assert [row.step for row in report.evaluations] == [40]


def test_steps_undone_by_a_resume_are_left_out(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", None)
    writer.begin()
    writer.train(range(1, 101), loss=lambda step: 1.0)
    writer.evaluate("validation", 100, 1.0)
    writer.emit(
        StateChanged(
            state=RunState.LOST,
        ),
        after=3600,
    )
    writer.emit(StateChanged(state=RunState.PENDING))
    writer.begin(number=2, resumed_from=80)
    writer.train(range(81, 91), loss=lambda step: 2.0)

    report = build_report(writer.run)
    loss = report.curve("train_loss")
    assert loss is not None
    assert (loss.steps[-1], loss.values[79:81]) == (90, (1.0, 2.0))
    assert report.evaluations == ()
    assert (report.attempts, report.resumed_from) == (2, (80,))
    # The hour between the two attempts does not count.
    total = report.comparison("total_s").measured
    assert total is not None
    assert total < 60
    assert report.time is not None
    assert sum(report.time.totals.values()) == pytest.approx(total)


def test_time_shares_fill_every_stretch(finished: RunStore) -> None:
    time = build_report(finished).time

    assert time is not None
    for shares in zip(*time.shares.values(), strict=True):
        assert sum(shares) == pytest.approx(1)
    assert time.totals["compute"] == pytest.approx(450 * 0.042, rel=0.05)
    assert time.totals["checkpoint"] == pytest.approx(9 * 0.02)


def test_class_scores_follow_from_the_confusion(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "r", None)
    confusion = {"labels": ["cat", "dog", "eel"], "counts": [[8, 2, 0], [4, 6, 0], [0, 0, 0]]}
    writer.evaluate("test", 1, 0.5, metrics={"accuracy": 0.7}, confusion=confusion)

    matrix = build_report(writer.run).confusion
    assert matrix is not None
    cat, dog, eel = matrix.classes
    assert (cat.precision, cat.recall, cat.support) == (8 / 12, 0.8, 10)
    assert dog.f1 == pytest.approx(2 * 0.75 * 0.6 / (0.75 + 0.6))
    assert (eel.precision, eel.recall, eel.f1, eel.support) == (None, None, None, 0)


def test_what_the_engine_went_through_is_told(tmp_path: Path) -> None:
    report = build_report(write_tuned(tmp_path / "t"))

    assert [each.kind for each in report.incidents].count("skip") == 5
    assert [(each.kind, each.step) for each in report.incidents[-1:]] == [("rollback", 210)]
    said = {finding.key: show_finding(finding).en for finding in report.findings}
    assert list(said) == [
        "out_of_memory",
        "rollback",
        "skip",
        "overflow",
        "precision",
        "noise_below",
        "padding",
    ]
    assert "3 (not finite 2, loss spikes 1), the first at step 208" in said["skip"]
    assert "step 210 → 200" in said["rollback"]
    assert "micro-batch of 16" in said["out_of_memory"]
    assert "full precision for their numeric health: 2" in said["precision"]
    assert "94 %" in said["precision"]
    assert "The batch of 32 is below the gradient noise scale of about 2." in said["noise_below"]
    assert report.plan is not None
    assert [trial.is_adopted for trial in report.plan.trials] == [
        True,
        False,
        True,
        True,
        True,
        False,
    ]


def test_padding_and_true_tokens_are_counted(tmp_path: Path) -> None:
    report = build_report(write_tuned(tmp_path / "t"))

    assert report.padding is not None
    assert report.padding.tokens == 450 * 4096
    assert report.padding.share == pytest.approx(0.35, abs=0.01)
    tokens, samples = report.curve("tokens_per_s"), report.curve("samples_per_s")
    assert tokens is not None
    assert samples is not None
    true = 4096 * (1 - tuned_record(1)["padding"] / 4096)
    assert tokens.values[0] == pytest.approx(samples.values[0] * true / 32)
    assert report.curve("items_per_s") is None


def test_the_trace_survives_the_trip_through_json(tmp_path: Path) -> None:
    run = write_tuned(tmp_path / "t")
    write_report(run)
    trace = Report.model_validate_json((run.path / Document.REPORT).read_bytes()).trace

    assert trace is not None
    assert (trace.path, trace.steps, len(trace.table)) == ("trace.json.gz", 3, 20)
    assert trace.table[0].name == "aten::mm"


def test_a_run_without_any_of_it_has_none_of_it(finished: RunStore) -> None:
    report = build_report(finished)

    assert (report.findings, report.incidents, report.padding, report.trace) == ((), (), None, None)
    keys = {curve.key for curve in report.curves}
    assert not keys & {"noise_scale", "batch", "low_share", "loss_scale", "padding_share"}


@pytest.mark.parametrize(
    ("scale", "said"), [(8, "noise_above"), (30, "noise_near"), (700, "noise_below")]
)
def test_the_batch_is_judged_by_the_noise_of_the_gradient(
    tmp_path: Path, scale: float, said: str
) -> None:
    writer = Writer(tmp_path / "r", None)
    # Early estimates, and those that are no size at all, do not decide.
    unsure = {1: 1e9, 38: -5.0, 39: math.nan, 40: math.inf}
    writer.train(
        range(1, 41),
        loss=falling_loss,
        more=lambda step: {"noise_scale": unsure.get(step, scale)},
    )

    assert [finding.key for finding in build_report(writer.run).findings] == [said]


def test_incidents_and_traces_of_another_version_do_not_hide_the_run(finished: RunStore) -> None:
    lines = (
        {"kind": "skip", "why": "?"},
        {"kind": "skip", "step": "NaN"},
        {"kind": "rollback", "step": 3, "to_step": None},
        {"kind": "precision", "step": 3},
        {"kind": "trace", "table": "gone"},
    )
    finished.append(Log.EVENTS, [{"v": 1, "at": START, **line} for line in lines])
    report = write_report(finished)

    assert report.incidents == ()
    assert report.trace is None
