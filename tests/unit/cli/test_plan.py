"""``yunlu plan``: its table, its JSON, its refusals, and what it does not import."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

import yunlu
from yunlu.cli.main import main
from yunlu.planning.layouts import Layout
from yunlu.planning.search.options import PlanOptions
from yunlu.render.terminal.plan_options import comparison_table, options_table

FAKE_WORKER = (sys.executable, str(Path(__file__).parents[1] / "jobs" / "fake_worker.py"))
JOB = """\
task: language-modeling
model: hf:meta-llama/Llama-3.2-1B
data: {train: corpus.txt, tokens: 100000000, max_length: 1024}
train: {batch: 64, epochs: 1}
goal: {gpu: [A100-80GB, L4], cloud: [aws, gcp, lambda], max_devices: 8}
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "llama.yaml"
    path.write_text(JOB)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    told = capsys.readouterr()
    return code, told.out, " ".join(told.err.split())


def test_the_table_tells_hardware_layout_memory_time_cost_and_why(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, job, "--top", "4")
    assert code == 0
    for word in ("hardware", "layout", "memory", "pace", "time", "cost", "A100-80GB"):
        assert word in out
    for word in ("tokens/s", "/h", "bf16", "batch 64", "free", "cheapest", "layouts in"):
        assert word in out


def test_json_is_the_options(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, job, "--json", "--top", "2")
    assert code == 0
    assert len(json.loads(out)["options"]) == 2
    options = PlanOptions.model_validate_json(out)
    assert options == yunlu.plan(job, top=2)


def test_explain_tells_every_component(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, job, "--explain", "--top", "1")
    for word in ("activations", "weights", "optimizer", "computing", "a step", "start up"):
        assert word in out


def test_the_command_to_train_it_so_can_be_copied(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, job, "--explain", "--top", "1")
    (line,) = [line for line in out.splitlines() if "to train it so" in line]
    assert line.startswith("   to train it so: yunlu train JOB --set ")
    said = [word for word in shlex.split(line) if "=" in word]
    assert tuple(said) == yunlu.plan(job, top=1).best.overrides


def test_flags_are_the_jobs_goal(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "L4", "--cloud", "gcp,aws", "--max-devices", "4", "--spot"]
    _, out, _ = run(capsys, job, "--json", *flags, "--objective", "cost", "--top", "9")
    for option in json.loads(out)["options"]:
        hardware = option["hardware"]
        assert hardware["device"] == "L4"
        assert hardware["cloud"] in {"aws", "gcp"}
        assert hardware["nodes"] * hardware["devices_per_node"] <= 4
    assert json.loads(out)["objective"] == "cost"


def test_limits_that_nothing_meets_end_with_one_and_the_nearest(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, job, "--budget", "0.05")
    assert code == 1
    assert "goal.budget: nothing fits $0.05" in out
    assert "To change" in out
    code, out, _ = run(capsys, job, "--deadline", "1min", "--json")
    assert code == 1
    assert json.loads(out)["problems"][0].startswith("goal.deadline")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "H1000"], "there is no device 'H1000'"),
        (["--cloud", "awss"], "did you mean 'aws'"),
        (["--budget", "-5"], "--budget (goal.budget): expected a number above 0, got -5"),
        (["--deadline", "soon"], "(goal.deadline): expected a time such as '90min', '36h'"),
        (["--objective", "fun"], "(goal.objective): expected one of 'cost', 'time' or"),
        (["--max-devices", "0"], "--max-devices (goal.max_devices): expected a whole number"),
        (["--set", "goal.budget=-1"], "--set goal.budget: expected a number above 0"),
        (
            ["--gpu", "A100-80GB", "--cloud", "aws", "--max-devices", "4"],
            "goal.max_devices: 4 devices",
        ),
        (["--devices", "100000"], "100000 devices"),
        (["--top", "0"], "top: expected a whole number above 0"),
        (["--set", "train.micro_batch=3"], "train.micro_batch: 3 does not divide"),
        (["--set", "layout=tp3"], "cannot be cut 3 ways"),
        (["--set", "layout=cp2"], "context parallel is not available"),
        (["--plot", "out.gif"], "use one of .png, .svg, .html"),
        (["--compare"], "plan takes two job files, got 1"),
        (["--compare", "--top", "3"], "--top does not go with --compare"),
        (["--compare", "--explain", "--plot", "a.png"], "--explain, --plot do not go with"),
        (["--compare", "--measure"], "--measure does not go with --compare"),
        (["--measure", "--top", "5"], "--top does not go with --measure"),
        (["--measure", "--explain"], "--explain does not go with --measure"),
        (["--measure", "--plot", "a.png"], "--plot does not go with --measure"),
        (["--measure", "--gpu", "H100", "--max-devices", "4"], "--gpu, --max-devices do not"),
        (["other.yaml"], "plan takes one job file, got 2"),
    ],
)
def test_bad_input_is_told_in_words(
    flags: list[str], said: str, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, job, *flags)
    assert code == 1
    assert said in err
    assert "Traceback" not in err


def test_two_jobs_are_compared(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(job).with_name("longer.yaml")
    other.write_text(JOB.replace("epochs: 1", "epochs: 2"))
    code, out, _ = run(capsys, "--compare", job, str(other))
    assert code == 0
    assert "second / first" in out
    assert "longer.yaml" in out
    for label in ("hardware", "layout", "memory of a device", "tokens/s", "time", "cost"):
        assert label in out
    _, out, _ = run(capsys, "--compare", job, str(other), "--json")
    assert len(json.loads(out)) == 2


def test_problems_of_a_comparison_name_their_job(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(job).with_name("longer.yaml")
    other.write_text(JOB.replace("epochs: 1", "epochs: 2"))
    code, out, _ = run(capsys, "--compare", job, str(other), "--budget", "0.05")
    assert code == 1
    for name in (Path(job).name, "longer.yaml"):
        assert f" {name}: goal.budget: nothing fits $0.05" in out


@pytest.mark.parametrize(("columns", "stands"), [("119", False), ("120", True)])
def test_options_stand_side_by_side_from_120_columns_also_in_a_pipe(
    columns: str,
    stands: bool,
    job: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = run(capsys, job, "--top", "2")
    assert ("────" in out) is stands
    assert max(map(len, out.splitlines())) <= int(columns)


def test_a_suggestion_is_not_drowned_by_all_that_is_known(
    job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = run(capsys, job, "--gpu", "H1000")
    assert "did you mean 'H100'? (near it: " in err
    assert "are known)" in err
    assert "TPU" not in err


def test_a_picture_is_written(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = run(capsys, job, "--plot", str(tmp_path / "out.html"))
    assert code == 0
    assert "picture in" in out
    assert (tmp_path / "out.html").stat().st_size > 1000


def test_measure_lets_a_worker_settle_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", FAKE_WORKER)
    path = tmp_path / "job.yaml"
    path.write_text(
        "task: tabular-classification\ndata: synthetic:x\nmodel: {name: mlp, args: {fate: finish}}\n"
    )
    code, out, _ = run(capsys, str(path), "--measure", "--json")
    assert code == 0
    assert json.loads(out)["batch"] == 32
    code, out, _ = run(capsys, str(path), "--measure")
    assert code == 0
    assert "\n predicted " in out


ROWS = """\
source_id,model,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,gpu_type,gpus,global_batch,micro_batch,tp,pp,dp,precision
torchtitan,llama,32,4096,32,8,14336,128256,8192,H100,8,16,2,1,1,8,bf16
torchtitan,llama,,,,,,,8192,H100,8,16,2,1,1,8,bf16
torchtitan,llama,32,4096,32,8,14336,128256,8192,Abacus,8,16,2,1,1,8,bf16
"""


def test_rows_of_a_table_are_predicted_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    code, out, _ = run(capsys, "predict", str(path), "--json")
    assert code == 0
    first, second, third = json.loads(out)
    assert [row["row"] for row in (first, second, third)] == [0, 1, 2]
    pace = "tokens_per_s_per_device"
    assert 0 < first[f"{pace}_p10"] < first[pace] < first[f"{pace}_p90"]
    assert first["peak_memory_bytes_p10"] < first["peak_memory_bytes"]
    assert isinstance(first["fits"], bool)
    assert second["reason"]
    assert "Abacus" in third["reason"]
    code, out, _ = run(capsys, "predict", str(path))
    assert code == 0
    assert "tokens/s a device" in out
    assert "Abacus" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "plan predict takes one table, got 0"),
        (["gone.csv"], "There is no file gone.csv"),
        (["."], ". is a directory, not a table"),
        (["gone.csv", "--gpu", "H100"], "--gpu does not go with plan predict"),
        (["gone.csv", "--set", "a=1", "--devices", "8"], "--set, --devices do not go with"),
        (["gone.csv", "--compare"], "--compare does not go with plan predict"),
    ],
)
def test_a_table_that_is_not_there_is_told(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "predict", *words)
    assert code == 1
    assert said in err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", "has no rows"),
        ("a.csv", b"model,gpus\n", "has no rows"),
        ("a.csv", b"date,weather\n1,rain\n", "none of the columns"),
        ("a.csv", b"\xff\xfe\x00", "cannot be read as a table"),
        ("a.csv.gz", gzip.compress(b"model\nllama\n", mtime=0)[:-6], "cannot be read as a table"),
    ],
    ids=["empty", "no rows", "of something else", "no text", "cut off"],
)
def test_a_file_that_is_no_table_of_runs_is_refused(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    code, _, err = run(capsys, "predict", str(path))
    assert code == 1
    assert said in err
    assert "n_gpus" not in err


@pytest.mark.parametrize(
    ("batch", "replicas", "micro", "words"),
    [
        (512, 8, 2, "512 = 8 x 2 x 32"),
        (512, 7, 2, "512 = 7 x 2 x 36 + 8"),
        (5, 4, 2, "5 < 4 x 2"),
    ],
)
def test_how_a_batch_is_shared_out_is_a_true_equation(
    batch: int, replicas: int, micro: int, words: str, job: str
) -> None:
    best = yunlu.plan(job, top=1).best
    changes = {"batch": batch, "layout": Layout(dp=replicas), "micro_batch": micro}
    option = best.model_copy(update=changes)
    for table in (
        options_table(PlanOptions(options=(option,), objective="cost", layouts=1), width=300),
        options_table(PlanOptions(options=(option,), objective="cost", layouts=1), width=80),
        comparison_table(["a", "b"], [option, option]),
    ):
        console = Console(width=300, file=io.StringIO())
        console.print(table)
        shown = cast("io.StringIO", console.file).getvalue()
        assert words in shown


def test_planning_imports_no_torch(job: str) -> None:
    code = (
        "import sys; from yunlu.cli.main import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'matplotlib', 'sklearn'} & set(sys.modules);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", job], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hardware" in done.stdout
