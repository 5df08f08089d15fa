"""How workers communicated: choices with what was predicted and what followed, in every view."""

from __future__ import annotations

import io
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from yunlu.cli.main import main
from yunlu.core.files import append_lines
from yunlu.jobs.communication import Communication, communication_lines
from yunlu.jobs.report_builder import build_report
from yunlu.jobs.report_model import Report
from yunlu.render.run_report import render_page, write_report
from yunlu.render.terminal.report_summary import print_summary
from yunlu.runs.events import CommunicationChosen, StateChanged
from yunlu.runs.run_store import Log, RunStore
from yunlu.runs.states import RunState

RUNS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("test_report_builder.py")))
SCRIPT: str = RUNS["SCRIPT"]
LINKS = {
    "hosts": ["node-a", "node-a", "node-b"],
    "latency_s": [[2e-5, 1e-4], [1.5e-4, 2e-5]],
    "bytes_per_s": [[2e9, 12.5e6], [3.1e6, 2e9]],
    "send_bytes_per_s": [12.5e6, 3.1e6],
    "receive_bytes_per_s": [12.4e6, 12.5e6],
    "compute_s": [0.05, 0.06, 0.2],
}
DENSE = {"method": "all-reduce", "codec": "none", "every": 1, "delay_steps": 0, "rank": 4}
INT4 = DENSE | {"method": "direct", "codec": "int4"}
LOCAL = DENSE | {"method": "local", "codec": "int4", "every": 4, "delay_steps": 1}
AVERAGED = "local int4, every 4 steps, in the background"


def predicted(step_s: float, *, bytes_per_step: float) -> dict[str, float]:
    return {
        "step_s": step_s,
        "exchange_s": 0.03,
        "hidden_s": 0.02,
        "bytes_per_step": bytes_per_step,
        "steps_factor": 1.02,
        "one_exchange_s": 0.03,
    }


class Talk:
    """A run of three workers on two hosts, on a clock of its own."""

    def __init__(self, path: Path) -> None:
        self.writer = RUNS["Writer"](path, RUNS["job_of"]("text-classification"))
        self.run: RunStore = self.writer.run
        self.writer.begin()

    def choose(self, step: int, name: str, setting: dict[str, Any], **more: Any) -> None:
        told = {"guarantee": "near", "reason": f"{name}: links of 24.8 to 100 Mbit/s"}
        data = {"step": step, "chosen": name, "setting": setting, **told, **more}
        self.writer.emit(CommunicationChosen(**data), after=0.5)

    def measure(self, step: int, name: str, setting: dict[str, Any], step_s: float) -> None:
        others = [("all-reduce", 0.4), ("ring", 0.41)]
        self.choose(
            step,
            name,
            setting,
            reason=f"{name}: links of 24.8 to 100 Mbit/s; 3.10 times as fast as all-reduce to the same loss",
            predicted=predicted(step_s, bytes_per_step=1e5),
            candidates=[
                {"name": each, "step_s": seconds, "cost_s": 1.02 * seconds}
                for each, seconds in [(name, step_s), *others]
            ],
            refused=[{"name": "topk", "reason": f"it is relaxed, near was asked for {SCRIPT}"}],
            links=LINKS,
        )

    def train(self, first: int, last: int, *, every: int = 1, **more: float) -> None:
        """Steps of 0.1 s, and an exchange of 0.04 s and 100 kB in each ``every``-th."""
        records: list[dict[str, Any]] = []
        for step in range(first, last + 1):
            exchanges = step % every == 0
            self.writer.now += 0.1 + 0.04 * exchanges
            record = {
                "step": step, "epoch": step / 45, "loss": 1 / step, "lr": 1e-3, "samples": 32 * step,
                "items": 32, "at": self.writer.now, "attempt": 1, "data_s": 0.0, "compute_s": 0.1,
                "communication_s": 0.04 * exchanges, "sent_bytes": 1e5 * exchanges, **more,
            }  # fmt: skip
            records.append(record)
        append_lines(self.run.path / Log.METRICS, records)


def write_talk(path: Path) -> RunStore:
    """A slow link is noticed, and averaging takes the place of sums."""
    talk = Talk(path)
    talk.measure(0, "direct int4", INT4, 0.12)
    talk.train(1, 40, exchange_s=0.035, compression_error=0.08)
    talk.measure(40, AVERAGED, LOCAL, 0.11)
    talk.train(41, 100, every=4)
    talk.writer.emit(StateChanged(state=RunState.FINISHED))
    return talk.run


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    return write_talk(tmp_path / "talk-1")


def read(run: RunStore) -> Communication:
    found = build_report(run).communication
    assert found is not None
    return found


def summary_text(report: Report) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    print_summary(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_each_choice_has_what_followed_until_the_next(run: RunStore) -> None:
    first, second = read(run).choices
    assert (first.from_step, first.steps, first.name) == (0, 40, "direct int4")
    assert (second.from_step, second.steps, second.setting.every) == (40, 60, 4)
    assert first.compression_error == pytest.approx(0.08)
    assert second.compression_error is None


def test_predicted_stands_beside_measured(run: RunStore) -> None:
    found = {each.quantity: each for each in read(run).choices[0].expectations}
    assert list(found) == ["step_s", "exchange_s", "wait_s", "sent_bytes"]
    values = {name: (each.predicted, each.measured) for name, each in found.items()}
    assert values["step_s"] == pytest.approx((0.12, 0.14))
    assert values["exchange_s"] == pytest.approx((0.03, 0.035))
    assert values["wait_s"] == pytest.approx((0.01, 0.04))
    assert values["sent_bytes"] == pytest.approx((1e5, 1e5))
    assert found["step_s"].ratio == pytest.approx(0.14 / 0.12)


def test_rare_exchanges_are_spread_over_the_steps_between_them(run: RunStore) -> None:
    newest = read(run).newest
    step, sent = newest.expectation("step_s"), newest.expectation("sent_bytes")
    assert step is not None
    assert sent is not None
    # The median of single steps would know nothing of the exchange.
    assert (step.measured, sent.measured) == pytest.approx((0.11, 0.25e5))
    assert step.ratio == pytest.approx(1.0)
    exchange = newest.expectation("exchange_s")
    assert exchange is not None
    assert (exchange.measured, exchange.ratio) == (None, None)


def test_too_few_steps_for_an_exchange_have_no_ratio(tmp_path: Path) -> None:
    talk = Talk(tmp_path / "short")
    talk.measure(0, AVERAGED, LOCAL, 0.11)
    talk.train(1, 3, every=4)
    step = read(talk.run).newest.expectation("step_s")
    assert step is not None
    assert (step.measured, step.ratio) == (pytest.approx(0.1), None)


def test_links_are_told_by_host(run: RunStore) -> None:
    a, b = read(run).newest.links
    assert (a.host, a.workers, b.host, b.workers) == ("node-a", 2, "node-b", 1)
    assert (a.send_bytes_per_s, b.send_bytes_per_s) == (12.5e6, 3.1e6)
    assert b.bytes_per_s == (3.1e6, 2e9)
    assert a.latency_s == (2e-5, 1e-4)
    assert (a.compute_s, b.compute_s) == (0.06, 0.2)


def test_what_was_replaced_before_a_step_is_left_out(tmp_path: Path) -> None:
    talk = Talk(tmp_path / "twice")
    for _ in range(2):  # two workers may both tell
        talk.choose(0, "direct int4", INT4)
    talk.train(1, 8)
    talk.choose(8, "ring", DENSE | {"method": "ring"})
    assert [(each.name, each.steps) for each in read(talk.run).choices] == [
        ("direct int4", 8),
        ("ring", 0),
    ]


def test_who_stepped_aside_is_told_though_no_step_was_made_with_it(tmp_path: Path) -> None:
    talk = Talk(tmp_path / "aside")
    why = "node-b steps aside: a step without is predicted to take 0.5 s, not 1.2 s"
    more = {"links": LINKS, "predicted": predicted(1.2, bytes_per_step=1e5), "excluded": [2]}
    talk.choose(0, "ring", DENSE, reason=f"ring: links of 24.8 to 100 Mbit/s; {why}", **more)
    talk.choose(0, "all-reduce", DENSE, reason="all workers are on one machine")
    talk.train(1, 8)
    found = read(talk.run)
    assert [(each.name, each.excluded) for each in found.choices] == [
        ("ring", ("node-b",)),
        ("all-reduce", ()),
    ]
    assert f"at step 1 {why}" in list(communication_lines(found))
    page = render_page(build_report(talk.run))
    assert why in page
    assert "；排除 node-b" in page


def test_a_resumed_run_counts_its_steps_from_where_it_went_on(tmp_path: Path) -> None:
    talk = Talk(tmp_path / "resumed")
    talk.choose(0, "direct int4", INT4)
    talk.train(1, 30)
    talk.writer.begin(number=2, resumed_from=20)
    talk.choose(0, "ring", DENSE | {"method": "ring"})  # before the checkpoint is read
    talk.train(21, 50, attempt=2)
    choices = read(talk.run).choices
    assert [(each.name, each.from_step, each.steps) for each in choices] == [
        ("direct int4", 0, 20),
        ("ring", 20, 30),
    ]


def test_one_worker_has_no_such_section(tmp_path: Path) -> None:
    report = build_report(RUNS["write_classification"](tmp_path / "alone"))
    assert report.communication is None
    assert "exchange" not in summary_text(report)
    assert 'id="communication"' not in render_page(report)


@pytest.mark.parametrize(
    "data",
    [
        {"chosen": "ring"},
        {"chosen": "ring", "setting": None, "predicted": [], "candidates": {"a": 1}, "refused": 3},
        {
            "chosen": "ring",
            "links": {"hosts": ["a", "b"], "bytes_per_s": [[1.0]], "latency_s": "x"},
        },
        {
            "chosen": "ring",
            "predicted": {"step_s": "NaN", "exchange_s": 0},
            "setting": {"every": 0},
        },
        {"chosen": "ring", "candidates": [{"name": "ring"}, 3, {"name": "x", "step_s": 1.0}]},
    ],
)
def test_what_another_version_wrote_is_passed_over(tmp_path: Path, data: dict[str, Any]) -> None:
    talk = Talk(tmp_path / "other")
    line = {"v": 1, "kind": "communication", "at": talk.writer.now, **data}
    talk.run.append(Log.EVENTS, [line])
    talk.train(1, 4)
    report = build_report(talk.run)
    assert report.step == 4
    assert report.communication is None


def test_the_page_tells_the_choice_its_rivals_and_the_links(run: RunStore) -> None:
    page = render_page(build_report(run))
    section = page[page.index('<section id="communication">') : page.index('<section id="time">')]
    assert '<a href="#communication">' in page
    assert "后台进行" in section
    assert "每 4 步一次" in section
    assert "速度是 all-reduce 的 3.10 倍" in section
    for text in ("direct int4", "all-reduce", "node-b", "24.8 Mbit/s", "16 Gbit/s", "× 1.17"):
        assert text in section
    for chart in ("exchange_s", "sent_bytes", "compression_error"):
        assert f'id="chart-{chart}"' in section
    assert SCRIPT not in page
    english, chinese = (len(re.findall(f'<span lang="{each}">', section)) for each in ("en", "zh"))
    assert english == chinese


def test_the_terminal_needs_three_lines(run: RunStore) -> None:
    lines = list(communication_lines(read(run)))
    assert lines == [
        f"{AVERAGED} (near): links of 24.8 to 100 Mbit/s; 3.10 times as fast as all-reduce to the same loss",
        "110.0 ms a step (110.0 ms predicted, × 1.00); 24.4 KiB sent a step (97.7 KiB predicted, × 0.25)",
        "before step 41: direct int4",
    ]
    shown = summary_text(build_report(run))
    assert all(line[:60] in shown for line in lines)


def test_commands_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("YUNLU_HOME", str(tmp_path))
    run = write_talk(tmp_path / "talk-1")
    write_report(run)
    assert main(["report", "talk-1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report["communication"]["choices"]] == [
        "direct int4",
        AVERAGED,
    ]
    for verb in ("logs", "show"):
        assert main([verb, "talk-1"]) == 0
        assert "links of 24.8 to 100 Mbit/s" in " ".join(capsys.readouterr().out.split())
    assert main(["show", "talk-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["communication"]["chosen"] == AVERAGED
