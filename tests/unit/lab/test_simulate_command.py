"""``yunlu pool simulate``: what it prints and draws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from tests.unit.lab.simulation.toy import make_profiles
from yunlu.core.errors import YunluError
from yunlu.lab.simulate_command import simulate

PNG = b"\x89PNG"


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    make_profiles(tmp_path / "profiles")
    rows = ["name,time,application,num_replicas,batch_size"]
    rows += [f"j{place},{place * 50},{kind},{1 + place % 8},128" for place, kind in
             enumerate(["light", "heavy"] * 5)]  # fmt: skip
    (tmp_path / "trace").mkdir()
    for number in (1, 2):
        (tmp_path / "trace" / f"day-{number}.csv").write_text(
            "\n".join(rows[: 6 + 5 * number]) + "\n"
        )
    return {
        "trace": tmp_path / "trace" / "day-1.csv",
        "profiles": tmp_path / "profiles",
        "cluster": "2x4",
        "policy": ("fifo,tiresias", "fair"),
    }


def run(given: dict[str, Any], **changes: Any) -> int:
    options: dict[str, Any] = given | changes
    return simulate(**options)


def test_it_reads_a_command_line(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    app = App(result_action="return_value")
    app.default(simulate)
    words = [f"--{name}={given[name]}" for name in ("trace", "profiles", "cluster")]
    app([*words, "--policy", "fifo,fair", "--policy", "fixed", "--events", "--blind", "--json"])
    policies = [json.loads(line)["policy"] for line in capsys.readouterr().out.splitlines()]
    assert policies == ["fifo", "fair", "fixed"]


def test_policies_stand_in_one_table(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(given) == 0
    page = capsys.readouterr().out
    for word in ("fifo", "tiresias", "fair", "average", "p99", "makespan", "1.00×", "10 jobs"):
        assert word in page
    assert "cost" not in page


def test_json_tells_every_job(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run(given, trace=given["trace"].parent, json=True)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["policy"], each["workload"]) for each in records] == [
        (policy, workload)
        for policy in ("fifo", "tiresias", "fair")
        for workload in ("day-1", "day-2")
    ]
    for each in records:
        times = each["jct_s"].values()
        assert len(times) == each["jobs"] == 10
        assert each["jct_average_s"] == pytest.approx(sum(times) / 10)


def test_pictures_are_drawn(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("nodes:\n- {count: 2, devices: 4, dollars_per_hour: 2}\n")
    run(given, cluster=str(cluster), plot=tmp_path / "plots", policy=("fifo,fair",))
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {
        "allocation-day-1-fifo.png",
        "allocation-day-1-fair.png",
        "queue-day-1.png",
        "jct.png",
        "cost.png",
    }
    assert all((tmp_path / "plots" / name).read_bytes().startswith(PNG) for name in names)
    page = capsys.readouterr().out
    assert "cost" in page
    assert "5 pictures" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": ("fiffo",)}, "did you mean 'fifo'"),
        ({"policy": ()}, "name a policy"),
        ({"cluster": "many"}, "is not a cluster"),
        ({"interval": 0.0}, "--interval: 0"),
        ({"interval": float("nan")}, "--interval"),
        ({"length_error": 0.5}, "--length-error: 0.5"),
        ({"crashes": 1.5}, "--crashes: 1.5"),
        ({"cluster": "99999999x8"}, "cannot be simulated"),
        ({"cluster": "1x4", "policy": ("fifo",)}, "gives no job a device.* asks for 5 of 4"),
        ({"plot": Path("/dev/null")}, "--plot: no pictures can be written to /dev/null"),
        ({"cluster": "2x4:t9", "profiles": Path("nowhere")}, "not a directory"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    given: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(YunluError, match=message):
        run(given, **changes)


def test_help_of_the_pool_lists_the_commands_of_the_lab_without_loading_it() -> None:
    code = (
        "import sys; from yunlu.cli.main import main; main(['pool', '--help']); "
        "sys.exit(any(name.startswith('yunlu.lab') for name in sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "simulate" in ended.stdout
    assert "spot" in ended.stdout
