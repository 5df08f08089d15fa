import io
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.sample_events import sample
from tests.waiting import LIMIT_S, wait_until
from yunlu.cli.main import main
from yunlu.jobs import lifecycle
from yunlu.jobs.run_log import MetricRecord
from yunlu.render.terminal.run_display import (
    DisplayedProgress,
    JsonDisplay,
    LiveDisplay,
    PlainDisplay,
    step_line,
)
from yunlu.runs.events import (
    DataOpened,
    Evaluated,
    MemoryExhausted,
    ModelBuilt,
    PlanMade,
    PrecisionChanged,
    ProgressReported,
    RolledBack,
    StateChanged,
    StepSkipped,
    TraceWritten,
    WarningRaised,
)
from yunlu.runs.run_store import Document
from yunlu.spec.job import Job

FAKE = Path(__file__).parents[1] / "jobs" / "fake_worker.py"
PLAN = {
    "device": "cpu", "precision": "fp32", "batch": 32, "micro_batch": 32, "accumulation": 1,
    "steps": 100, "steps_per_epoch": 10, "warmup_steps": 1, "lr": 0.001, "weight_decay": 0.0,
    "evaluate_every": 10, "checkpoint_every": 10, "best_metric": "accuracy",
    "stopping_metric": "accuracy", "compile": "none", "workers": 0, "threads": 1,
    "choices": [
        {"name": "precision", "value": "fp32", "reason": "exact on this device"},
        {"name": "batch", "value": "32", "reason": "set in the job", "pinned": True},
    ],
    "prediction": {
        "memory_bytes": 2**28, "step_s": 0.01, "samples_per_s": 3200.0, "total_s": 4.0,
        "dollars": 0.25,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch):
    """Runs are worked on by a program that writes what a worker writes, without torch."""
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", (sys.executable, str(FAKE)))


@pytest.fixture
def job_file(tmp_path):
    def write(fate="finish"):
        file = tmp_path / "digits.yaml"
        model = {"name": "mlp", "args": {"fate": fate}}
        file.write_text(
            f"task: tabular-classification\nmodel: {json.dumps(model)}\ndata: synthetic:x\n"
        )
        return str(file)

    return write


def event(kind, **data):
    return sample(kind, at=1000.0, **data)


def metric(step, **changes):
    record = {
        "step": step, "epoch": step / 10, "loss": 0.25, "lr": 5e-4, "samples": 32 * step,
        "at": 1000.0 + step / 10, "memory_bytes": 2**30,
    }  # fmt: skip
    return MetricRecord(record={**record, **changes})


def story():
    yield event(StateChanged, state="planning")
    yield event(ProgressReported, phase="loading data")
    yield event(DataOpened, source="synthetic:x", train=1000, validation=50, test=0)
    yield event(ModelBuilt, name="mlp", parameters=12_400)
    yield event(PlanMade, **PLAN)
    yield event(StateChanged, state="running", resumed_from_step=10)
    yield metric(11)
    yield metric(50)
    yield event(WarningRaised, message="the validation part is small")
    yield event(Evaluated, split="validation", step=50, loss=0.3, metrics={"accuracy": 0.91})


def test_terminal_keeps_what_happened_and_moves_what_happens():
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=110)
    display = LiveDisplay(console)
    for happening in story():
        display.show(happening)
    moving = io.StringIO()
    Console(file=moving, width=110).print(display._moving())
    display.close()
    kept = console.export_text()
    for words in (
        "1,000 train · 50 validation",
        "mlp, 12.4k parameters",
        "exact on this device",
        "256.0 MiB · 10.0 ms a step · 3.2k samples/s · 4.0 s in all · $0.25",
        "from the checkpoint of step 10",
        "the validation part is small",
        "accuracy 0.91",
    ):
        assert words in kept
    text = moving.getvalue()
    assert "50%" in text
    assert "step 50/100  epoch 5.0/10  ETA 5.0 s" in text
    assert "loss 0.25  lr 5.00e-04  samples/s 320.0  memory 1.0 GiB" in text


def test_narrow_terminal_keeps_the_bar_on_one_line():
    console = Console(file=io.StringIO(), force_terminal=True, width=50)
    display = LiveDisplay(console)
    for happening in story():
        display.show(happening)
    display.close()
    out = io.StringIO()
    Console(file=out, width=50).print(display._moving())
    assert len(out.getvalue().splitlines()) == 2


def test_pipe_gets_plain_lines():
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=140))
    for happening in story():
        display.show(happening)
    display.show(metric(51))  # 0.1 s after the last line: left out
    display.show(metric(100))
    text = out.getvalue()
    assert "\x1b" not in text
    assert not re.search(r" $", text, re.MULTILINE)
    assert "step 51/" not in text
    assert re.search(r"train +step 100/100  epoch 10.0/10  loss 0.25", text)
    assert "loading data ..." in text


def test_json_lines_are_strict_json():
    out = io.StringIO()
    display = JsonDisplay("digits-1", out)
    for happening in story():
        display.show(happening)
    display.show(metric(51, loss=math.nan, grad_norm=math.inf))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.getvalue().splitlines()]
    assert lines[0] == {"event": "state", "run": "digits-1", "at": 1000.0, "state": "planning"}
    assert (lines[-1]["event"], lines[-1]["loss"], lines[-1]["grad_norm"]) == (
        "metrics", "NaN", "Infinity",
    )  # fmt: skip


def test_what_the_engine_does_about_trouble_is_one_line_each():
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=140))
    display.show(event(StepSkipped, step=7, reason="overflow", loss=1.0, norm="Infinity"))
    display.show(event(StepSkipped, step=8, reason="not finite", loss="NaN", norm=2.0))
    display.show(event(RolledBack, step=9, to_step=5, skipping=[8, 9]))
    display.show(event(MemoryExhausted, step=9, micro_batch=4, message="too much"))
    display.show(
        event(PrecisionChanged, step=9, module="head", to="full", reason="overflows", low_share=0.5)
    )
    display.show(event(TraceWritten, path="trace.json.gz", steps=3, table=[]))
    assert out.getvalue().splitlines() == [
        " skipped     step 8: update left out, not finite (loss nan, norm 2)",
        " rolled back step 9: back to step 5, then on past the bad samples",
        " memory      step 9: memory ran out, micro-batch is now 4",
        " precision   step 9: head to full precision, overflows",
        " trace       3 steps traced: trace.json.gz",
    ]
    display.show(metric(10))
    assert "skipped 2" in out.getvalue()  # the overflow is counted too


def test_trials_take_one_line_for_each_setting():
    trials = [
        {"name": "precision", "value": "bf16", "sample_s": 0.1, "speedup": 1.47, "is_adopted": True},
        {"name": "precision", "value": "fp16", "sample_s": 9.0, "speedup": 0.01, "is_adopted": False},
        {
            "name": "compile", "value": "inductor", "sample_s": 0.1, "speedup": 1.02,
            "is_adopted": False, "remembered": True,
        },
    ]  # fmt: skip
    out = io.StringIO()
    PlainDisplay(Console(file=out, width=140)).show(event(PlanMade, **PLAN, trials=trials))
    assert " tried       precision  bf16 ×1.47 ✔ · fp16 ×0.01\n" in out.getvalue()
    assert "             compile    inductor ×1.02  remembered\n" in out.getvalue()


def test_profile_is_a_key_of_the_job(job_file):
    assert main(["train", job_file(), "--profile", "--name", "traced"]) == 0
    assert (
        json.loads((lifecycle.find("traced").path / Document.JOB).read_bytes())["train"]["profile"]
        is True
    )


def test_pace_forgets_what_a_resumed_life_undid():
    course = DisplayedProgress()
    course.plan = PLAN
    for step in (10, 20):
        course.take(metric(step))
    assert course.samples_per_s == pytest.approx(320)
    course.take(metric(15, at=5000.0))
    assert course.samples_per_s is None
    assert "ETA" not in step_line(course)


def test_train_shows_the_plan_the_result_and_where_it_is(job_file, capsys):
    assert main(["train", job_file(), "--name", "mine"]) == 0
    out = capsys.readouterr().out
    run = lifecycle.find("mine")
    assert "exact on this device" in out
    assert str(run.path / Document.REPORT_PAGE) in out
    assert (run.path / Document.REPORT_PAGE).exists()
    assert "\x1b" not in out


def test_train_as_json_writes_nothing_but_json(job_file, capsys):
    assert main(["train", job_file(), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["state"] == "finished"
    assert sum(line["event"] == "metrics" for line in lines) == 20


def test_failed_run_ends_with_its_error_and_code_1(job_file, capsys):
    assert main(["train", job_file("fail")]) == 1
    said = capsys.readouterr().err
    assert "The loss is not finite at step 15." in said
    assert "Lower train.optimizer.lr." in said
    assert "Traceback" not in said


def test_lost_run_quotes_the_last_words_of_its_worker(job_file, capsys):
    assert main(["train", job_file("die at once")]) == 1
    said = capsys.readouterr().err
    assert "exit code 3" in said
    assert "a library is missing" in said


def test_detached_run_is_watched_by_logs(job_file, capsys):
    assert main(["train", job_file(), "--detach", "--json"]) == 0
    run_id = json.loads(capsys.readouterr().out)["run"]
    assert main(["logs", "-f", run_id[:8]]) == 0
    out = capsys.readouterr().out
    assert re.search(r"state +✔ finished", out)
    assert main(["logs", "last"]) == 0
    assert "accuracy 0.9" in capsys.readouterr().out


def test_logs_as_json_lines_are_those_of_the_training(job_file, capsys):
    main(["train", job_file(), "--json"])
    trained = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for words in ([], ["-f"]):
        assert main(["logs", "last", "--json", *words]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        events = [line for line in lines if line["event"] not in {"metrics", "output"}]
        at = {(line["event"], line.get("at")) for line in trained}
        assert len(events) > 5
        assert {(line["event"], line["at"]) for line in events if line["event"] != "state"} <= at
        assert events[-1]["state"] == "finished"
    run = lifecycle.find("last")
    with run.open_text_log("worker.log") as log:
        log.write(b"a library says \x1b[31mhello\n")
    main(["logs", "last", "--json", "--lines", "1"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["run"]) == ("output", run.id)
    assert last["text"].endswith("hello")


def test_ps_and_show_tell_the_same_in_words_and_json(job_file, capsys):
    assert main(["ps"]) == 0
    assert "no runs" in capsys.readouterr().out
    main(["train", job_file()])
    capsys.readouterr()
    assert main(["ps"]) == 0
    out = capsys.readouterr().out
    assert "✔ finished" in out
    assert "100%" in out
    assert "accuracy 0.9" in out
    main(["ps", "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    assert main(["show", "last"]) == 0
    out = capsys.readouterr().out
    assert "tabular-classification · mlp" in out
    assert "exact on this device" in out
    main(["show", "last", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert [row["split"] for row in shown["evaluations"]] == ["validation", "test"]
    assert "report" in shown["paths"]


def test_ps_shows_the_newest_and_says_how_many_more(capsys):
    job = Job.model_validate(
        {"task": "tabular-classification", "model": "mlp", "data": "synthetic:x"}
    )
    for _ in range(22):
        lifecycle.stop(lifecycle.submit(job))
    assert main(["ps"]) == 0
    assert "2 older: yunlu ps --all" in capsys.readouterr().out
    main(["ps", "--all", "--json"])
    assert len(capsys.readouterr().out.splitlines()) == 22


def test_stop_of_a_resting_run_says_so(job_file, capsys):
    main(["train", job_file()])
    capsys.readouterr()
    assert main(["stop", "last"]) == 0
    assert "has ended: nothing to stop" in capsys.readouterr().out


def test_stopped_run_is_resumed_from_its_step(job_file, capsys):
    main(["train", job_file("wait"), "--detach"])
    run = lifecycle.find("last")
    wait_until(lambda: len(list(run.read_metrics())) == 15, "what it does before it waits")
    capsys.readouterr()
    assert main(["stop", "last", "--now"]) == 0
    assert "resume" in capsys.readouterr().out
    assert main(["resume", "last"]) == 0
    assert [record["step"] for record, _ in run.read_metrics()][15:] == [*range(11, 21)]


def test_plan_shows_the_choices_without_making_a_run(job_file, capsys, own_home):
    assert main(["plan", job_file(), "--measure"]) == 0
    assert "exact on this device" in capsys.readouterr().out
    assert main(["plan", job_file(), "--measure", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 20
    assert not own_home.exists()


def start_cli(*words):
    script = (
        "import sys; import yunlu.executors.worker_process as local; from yunlu.cli.main import main;"
        f"local.WORKER = (sys.executable, {str(FAKE)!r}); sys.exit(main({list(words)!r}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_until(cli, event, **data):
    for line in cli.stdout:
        said = json.loads(line)
        if said["event"] == event and data.items() <= said.items():
            return
    raise AssertionError(f"ended without {event}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_saves_stops_with_code_130_and_resumes(job_file, capsys, number):
    cli = start_cli("train", job_file("wait"), "--json")
    read_until(cli, "metrics", step=15)
    cli.send_signal(number)
    out, err = cli.communicate(timeout=LIMIT_S)
    assert cli.returncode == 130
    assert "stopping: saving a checkpoint (again to kill)" in err
    assert [json.loads(line)["event"] for line in out.splitlines()][-2:] == ["checkpoint", "state"]
    assert main(["resume"]) == 0
    out = capsys.readouterr().out
    assert "from the checkpoint of step 10" in out
    assert "step 20/20" in out


@pytest.mark.slow
def test_second_interrupt_kills(job_file):
    cli = start_cli("train", job_file("hang"), "--json")
    read_until(cli, "metrics", step=15)
    cli.send_signal(signal.SIGINT)
    read_until(cli, "state", state="stopping")
    cli.send_signal(signal.SIGINT)
    _, err = cli.communicate(timeout=LIMIT_S)
    assert cli.returncode == 130
    assert "killed" in err
