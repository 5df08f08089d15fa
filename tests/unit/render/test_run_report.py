"""The report as people see it: the page, the terminal, the command."""

from __future__ import annotations

import io
import json
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from yunlu.cli.main import main
from yunlu.core.errors import StoreError
from yunlu.jobs.report_builder import build_report
from yunlu.planning.plan import PlanChange
from yunlu.render.run_report import render_page, write_report
from yunlu.render.terminal.event_lines import plan_block
from yunlu.render.terminal.page import TerminalConsole
from yunlu.render.terminal.report_summary import print_summary, sparkline
from yunlu.runs.events import PlanMade, StepSkipped
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document, RunStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.jobs.report_model import Report

# The same runs as in the tests of the value, written by the same hand.
RUNS: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[1] / "jobs" / "test_report_builder.py")
)


@pytest.fixture
def finished(tmp_path: Path) -> RunStore:
    return RUNS["write_classification"](tmp_path / "digits-1")


def summary_text(report: Report, *, width: int = 100) -> str:
    console = TerminalConsole(file=io.StringIO(), width=width)
    print_summary(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_page_asks_for_nothing_beyond_itself(finished: RunStore) -> None:
    page = render_page(build_report(finished))

    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page


def test_hostile_text_is_only_text(finished: RunStore) -> None:
    page = render_page(build_report(finished))

    assert RUNS["SCRIPT"] not in page
    assert "&lt;script&gt;window.hacked = 1&lt;/script&gt;" in page
    # Two kinds of scripts: the page's own, and data that browsers never run.
    assert set(re.findall(r"<script[^>]*>", page)) == {
        "<script>",
        '<script type="application/json">',
    }


def test_what_the_worker_changed_in_the_submitted_plan_is_shown_below_it(
    finished: RunStore,
) -> None:
    change = PlanChange(name="precision", planned="<bf16>", refined="fp32", reason="it is faster")
    report = build_report(finished)
    assert "Changed since the plan was submitted" not in render_page(report)
    assert report.plan is not None
    plan = report.plan.model_copy(update={"refinements": (change,)})
    finished.emit(PlanMade(plan=plan))
    page = render_page(build_report(finished))
    assert "Changed since the plan was submitted" in page
    assert "与提交时计划的不同" in page
    assert "&lt;bf16&gt;" in page
    console = TerminalConsole(file=io.StringIO(), width=100)
    console.print(plan_block(plan))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"refined +precision <bf16> → fp32 +it is faster", shown)


def test_hover_data_is_json_and_cannot_leave_its_element(finished: RunStore) -> None:
    run = RUNS["write_failed"](finished.path.with_name("failed"))
    page = render_page(build_report(run))

    found = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    loss = json.loads(found[0], parse_constant=pytest.fail)
    assert loss["series"][0]["y"][-1] == "nan"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_reader_s_language_comes_first_and_both_are_there(
    finished: RunStore, language: str
) -> None:
    page = render_page(build_report(finished), language=language)

    assert f'data-language="{language}"' in page
    assert '<span lang="en">Confusion matrix</span><span lang="zh">混淆矩阵</span>' in page


@pytest.mark.parametrize("kind", ["write_regression", "write_failed"])
def test_a_page_without_confusion_or_end_is_whole(tmp_path: Path, kind: str) -> None:
    write: Callable[[Path], RunStore] = RUNS[kind]
    page = render_page(build_report(write(tmp_path / "r")))

    assert page.endswith("</html>")
    assert 'class="heat' not in page


def test_what_the_engine_went_through_is_on_the_page(tmp_path: Path) -> None:
    page = render_page(build_report(RUNS["write_tuned"](tmp_path / "t")))

    for drawn in ("noise_scale", "batch", "low_share", "loss_scale", "padding_share"):
        assert f'data-key="{drawn}"' in page
    loss = page[page.index('id="chart-train_loss"') : page.index('id="chart-validation-accuracy"')]
    for kind in ("skip", "rollback", "out_of_memory"):
        assert f'<path class="mark {kind}"' in loss
    assert '<h3><span lang="en">Autotuning before the first step' in page
    assert page.count("aten::operator_") == 2 * 10  # 15 rows, each with its name as a title too
    assert '<span lang="zh">算子之外：前向</span>' in page
    assert RUNS["SCRIPT"] not in page
    assert "overflow in fp16" in page
    assert 'class="key mark skip"></i><span lang="en">Update skipped' in page


def test_overflows_are_a_sentence_and_not_a_row_each(tmp_path: Path) -> None:
    writer = RUNS["Writer"](tmp_path / "r", None)
    writer.train(range(1, 41), loss=lambda step: 1.0)
    for step in range(1, 31):
        writer.emit(StepSkipped(step=step, reason="overflow", loss=1.0, norm="Infinity"))
    page = render_page(build_report(writer.run))

    assert "loss scale was being adjusted: 30" in page
    assert "mark skip" not in page
    assert 'id="incidents"' not in page


def test_the_terminal_tells_findings_and_where_traced_steps_spent_their_time(
    tmp_path: Path,
) -> None:
    text = summary_text(build_report(RUNS["write_tuned"](tmp_path / "t")), width=140)

    for words in ("· Rolled back 1 ×", "aten::mm", "23.5%", "backward 54%", "trace.json.gz"):
        assert words in text


def test_very_many_labels_and_evaluations_are_cut_to_what_can_be_read(tmp_path: Path) -> None:
    writer = RUNS["Writer"](tmp_path / "r", None)
    for step in range(1, 1001):
        writer.evaluate("validation", step, 1 / step, metrics={"accuracy": step % 700 / 1000})
    confusion = RUNS["confusion_of"]([f"label {i}" for i in range(90)])
    writer.evaluate("test", 1000, 0.1, metrics={"accuracy": 0.6}, confusion=confusion)
    page = render_page(build_report(writer.run))

    assert page.count('class="right') == 40
    assert 150 < page.count('<th scope="row"><span lang="en">Validation</span>') < 210
    assert re.search(r'<tr class="best">.*?<td>699</td>', page, re.DOTALL)


def test_the_terminal_tells_the_essentials(finished: RunStore) -> None:
    text = summary_text(build_report(finished))

    for words in ("finished", "97.22 %", "validation ★", "× 1.09", "compute", "report.html", "18"):
        assert words in text


def test_the_terminal_survives_labels_that_would_steer_it(tmp_path: Path) -> None:
    writer = RUNS["Writer"](tmp_path / "r", None)
    confusion = {"labels": ["[red]a[/nope]", "\x1b]0;title\x07"], "counts": [[1, 0], [0, 1]]}
    writer.evaluate("test", 1, 0.5, metrics={"accuracy": 1.0}, confusion=confusion)
    text = summary_text(build_report(writer.run))

    assert "[red]a[/…" in text or "[red]a[/nope]" in text
    assert "\x1b" not in text


def test_a_failed_run_says_why_on_the_terminal(tmp_path: Path) -> None:
    text = summary_text(build_report(RUNS["write_failed"](tmp_path / "f")))

    assert "The loss is not finite at step 31." in text
    assert "→ Lower train.optimizer.lr." in text
    assert "××" in text


def test_a_run_without_anything_is_told_too(tmp_path: Path) -> None:
    assert "pending" in summary_text(build_report(open_run(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], "█▇▆▅▄▃▂▁"),
        ([1.0, float("nan"), 1.0], "▁×▁"),
        ([float("inf")], "×"),
        ([], ""),
    ],
)
def test_sparklines_rise_fall_and_break(values: list[float], drawn: str) -> None:
    assert sparkline(values) == drawn


def test_the_command_takes_a_path_and_prints_json(
    finished: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    code = main(["report", str(finished.path), "--json", "--html", str(page)])

    assert code == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    assert page.read_bytes() == (finished.path / Document.REPORT_PAGE).read_bytes()


def test_the_command_prints_the_summary(
    finished: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(finished.path)]) == 0
    assert "Predicted beside measured" in capsys.readouterr().out


def test_the_command_opens_the_page(finished: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    main(["report", str(finished.path), "--open"])

    assert opened == [(finished.path / Document.REPORT_PAGE).as_uri()]


def test_an_unknown_run_and_an_unwritable_page_are_said_in_words(
    finished: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "no-such-run"]) == 1
    assert main(["report", str(finished.path), "--html", str(tmp_path / "no" / "p.html")]) == 1

    words = capsys.readouterr().err
    assert "Traceback" not in words
    assert "cannot be written" in words


def test_the_page_is_the_same_each_time(finished: RunStore) -> None:
    write_report(finished)
    first = (finished.path / Document.REPORT_PAGE).read_bytes()
    write_report(finished)

    assert (finished.path / Document.REPORT_PAGE).read_bytes() == first


def test_secrets_of_the_job_never_reach_the_report(tmp_path: Path) -> None:
    options = {"key": "AKIA", "client_kwargs": {"aws_secret_access_key": "hush"}, "anon": False}
    data = {"train": "https://me:hunter2@host/data.csv", "options": options}
    writer = RUNS["Writer"](tmp_path / "r", RUNS["job_of"]("tabular-classification", data=data))
    write_report(writer.run)

    for file in (writer.run.path / Document.REPORT, writer.run.path / Document.REPORT_PAGE):
        text = file.read_text()
        assert not any(secret in text for secret in ("AKIA", "hush", "hunter2"))
        assert "anon" in text


def test_a_full_disk_is_said_in_words(finished: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(finished), "write", refuse)
    with pytest.raises(StoreError, match="No space left on device"):
        write_report(finished)
