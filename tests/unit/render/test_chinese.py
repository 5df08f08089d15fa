"""Chinese on the terminal: every text of the source has one, terms agree, names of others stay as they are."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from scripts import missing_texts

from tests.docs.pages import ROOT, table_rows
from yunlu.cli.main import VERBS, main
from yunlu.core.errors import YunluError
from yunlu.core.settings import read_language
from yunlu.render.i18n.chinese import to_chinese
from yunlu.render.terminal.line_breaks import break_lines
from yunlu.render.terminal.page import TerminalConsole
from yunlu.render.terminal.verbatim import Verbatim
from yunlu.spec.counterparts.table import TABLE, answer_key
from yunlu.spec.load import load_job

ROOMS = missing_texts.rooms()
TEXTS = {
    (room, english): chinese
    for room in (*ROOMS, "library")
    for english, chinese in missing_texts.catalogue(room).items()
}
HAN = re.compile("[一-鿿]")
AS_IT_IS = re.compile(
    r"yunlu|pip |--|chmod|unset|source|YUNLU_|rank|train\.|model\.|[A-Z]|\{0\}|pid|cgroup|apt-get"
    r"|all-reduce|torch|, zero1|\(\{0\} of|job: |goal\.|dp\d|\(chosen|worker\.log|seq_len|search\.|plan predict|there is nothing"
)
"""Beginnings of texts that are the same in both languages: commands, keys, names."""
COMMAND = re.compile(r"`[^`]*`|(?:yunlu|nodes:)(?: [a-z-]+)+")
TERMS = (
    "job",
    "plan",
    "run",
    "study",
    "trial",
    "node",
    "device",
    "checkpoint",
    "layout",
    "pool",
    "catalog",
    "worker",
    "step",
    "sample",
    "model",
    "metric",
    "rung",
    "policy",
    "evaluation",
)
"""Words of the glossary that have one translation wherever a text uses them."""


@pytest.fixture
def chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNLU_LANG", "zh")


@pytest.mark.parametrize("room", ROOMS)
def test_every_text_of_a_room_has_a_chinese_text(room: str) -> None:
    """``python scripts/missing_texts.py --write`` adds what is missing, to be filled in."""
    assert missing_texts.missing(room) == {}


def test_every_chinese_text_is_of_a_text_that_the_source_still_has() -> None:
    assert missing_texts.orphaned() == []


def test_chinese_texts_hold_values_of_their_english_texts_only() -> None:
    for (room, english), chinese in TEXTS.items():
        where = f"{room}: {english}"
        assert set(re.findall(r"\{\d+\}", chinese)) <= set(re.findall(r"\{\d+\}", english)), where
        assert HAN.search(chinese) or AS_IT_IS.match(english), where
        assert "您" not in chinese, where


def test_a_text_of_two_rooms_has_one_translation() -> None:
    translations: dict[str, set[str]] = {}
    for (_, english), chinese in TEXTS.items():
        translations.setdefault(english, set()).add(chinese)
    assert {english: several for english, several in translations.items() if len(several) > 1} == {}


def test_a_term_has_one_translation() -> None:
    """As the glossary has it; a text may do without the word, but may not use that of another term."""
    glossary = {row[0]: row[1] for row in table_rows(ROOT / "docs" / "glossary.md")}
    others = {
        "job": ("任务文件", "训练任务"),
        "plan": ("规划书",),
        "device": ("装置",),
        "pool": ("池子",),
    }
    unusual = []
    for term in TERMS:
        using = [
            (english, chinese)
            for (_, english), chinese in TEXTS.items()
            if re.search(rf"(?<![\w./-]){term}s?(?![\w./:=-])", COMMAND.sub("", english))
            and HAN.search(chinese)
        ]
        with_it = [english for english, chinese in using if glossary[term] in chinese]
        assert using, term
        assert len(with_it) >= 0.75 * len(using), (term, sorted(set(dict(using)) - set(with_it)))
        unusual += [(term, zh) for _, zh in using for other in others.get(term, ()) if other in zh]
    assert unusual == []


def test_jobs_and_tasks_are_told_apart() -> None:
    for (room, english), chinese in TEXTS.items():
        if re.search(r"\bjobs?\b", english) and not re.search(
            r"\btasks?\b", english, re.IGNORECASE
        ):
            assert "任务" not in chinese, f"{room}: {english}"


@pytest.mark.parametrize(
    ("variables", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW.UTF-8"}, "zh"),
        ({"LC_MESSAGES": "zh_CN", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LC_ALL": "zh_CN", "LANG": "de_DE"}, "zh"),
        ({"YUNLU_LANG": "en", "LC_ALL": "zh_CN"}, "en"),
        ({"YUNLU_LANG": "zh", "LC_ALL": "C"}, "zh"),
        ({"YUNLU_LANG": "", "LANG": "zh_CN"}, "zh"),
    ],
)
def test_the_language_is_yunlus_own_variable_or_that_of_the_system(
    variables: dict[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("YUNLU_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_language() == language


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("There is no job file a.yaml.", "作业文件 a.yaml 不存在。"),
        ("error: There is no job file a.yaml.", "错误：作业文件 a.yaml 不存在。"),
        ("0.478 of 23.5 GiB", "0.478/23.5 GiB"),
        ("  → yunlu logs -f last shows it", "  → yunlu logs -f last shows it"),
        (
            "batch 32: a safe start for most models, of 120 samples",
            "批量 32：对多数模型稳妥的起点，120 个样本",
        ),
        ("step 3/9  epoch 1/2  loss 0.5", "第 3/9 步  第 1/2 轮  损失 0.5"),
        # What nobody translated stays, beside what somebody did; so do the words of others.
        ("a.csv: Zeppelins are not helicopters", "a.csv: Zeppelins are not helicopters"),
        ("there is no run 'no job'; did you mean 'nojob'?", None),
        (
            "--set 'search={trials: 2, space: {train.batch: [1, 2]}}'",
            "--set 'search={trials: 2, space: {train.batch: [1, 2]}}'",
        ),
        ("known: batch, steps, workers", "已知：batch, steps, workers"),
    ],
)
def test_a_text_is_matched_with_its_values(english: str, chinese: str | None) -> None:
    translated = to_chinese(english)
    assert translated == chinese if chinese is not None else "'no job'" in translated


def test_a_text_inside_of_a_text_is_translated_too() -> None:
    inner = "did you mean 'iris'? (known: iris, wine)"
    text = to_chinese(f"job.yaml: 2 problems\n  line 4, column 9: train.x: unknown key; {inner}")
    assert text == (
        "job.yaml: 2 个问题\n  第 4 行第 9 列：train.x: 未知的键；你是否想写 'iris'？（已知：iris, wine）"
    )


def test_what_stands_for_another_tools_argument_is_chinese() -> None:
    """Every remark of the tables; what is to be written stays as YAML has it."""
    assert [
        row.name for row in TABLE if row.remark and not HAN.search(to_chinese(row.remark))
    ] == []
    answer = answer_key("per_device_train_batch_size", 64, {})
    assert to_chinese(answer or "") == "此处 train.batch 计入所有设备；请写 train.batch: 64"
    answer = answer_key("num_train_epochs", 3, {})
    assert to_chinese(answer or "") == "Transformers 对 train.epochs 的叫法；请写 train.epochs: 3"
    answer = answer_key("run_eagerly", True, {})
    assert "Keras 的 run_eagerly 在此处没有对应项：" in to_chinese(answer or "")


def test_a_line_never_begins_with_a_mark() -> None:
    lines = break_lines(Text("甲乙丙丁，戊己庚辛。"), 8)
    assert [line.plain for line in lines] == ["甲乙丙", "丁，戊己", "庚辛。"]


def test_words_of_others_are_not_translated(chinese: None) -> None:
    console = TerminalConsole(width=80, record=True, file=io.StringIO())
    table = Table.grid(padding=(0, 1))
    table.add_row(Verbatim("0.478 of 23.5 GiB"), "0.478 of 23.5 GiB")
    console.print(table)
    assert console.export_text().split() == ["0.478", "of", "23.5", "GiB", "0.478/23.5", "GiB"]


def test_styles_stay_with_the_words_they_were_of(chinese: None) -> None:
    console = TerminalConsole(
        record=True, width=80, force_terminal=True, color_system="standard", file=io.StringIO()
    )
    console.print(Text.assemble(("run-1", "bold"), " has ended: nothing to stop"))
    assert "\x1b[1mrun-1\x1b[0m 已结束：无需停止" in console.export_text(styles=True)


def test_a_single_word_is_translated_in_headings_and_labels_only(
    chinese: None, capsys: pytest.CaptureFixture[str]
) -> None:
    named = Table("run", "state")
    named.add_row("model", "step")  # a run may be called so
    labels = Table.grid(padding=(0, 1))
    labels.add_row("memory", "3 GiB")
    TerminalConsole(width=60).print(named)
    TerminalConsole(width=60).print(labels)
    shown = capsys.readouterr().out
    assert "运行" in shown
    assert "状态" in shown
    assert "model" in shown
    assert "内存 3 GiB" in shown


def test_a_log_is_shown_as_it_was_written(
    chinese: None, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "There is no job file a.yaml."
    TerminalConsole(width=60).print_verbatim(Text(line))
    assert capsys.readouterr().out == f"{line}\n"


def _help(tokens: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*tokens, "--help"]) == 0
    return capsys.readouterr().out


JOB = """\
task: language-modeling
model: hf:meta-llama/Llama-3.2-1B
data: {train: corpus.txt, tokens: 100000000, max_length: 1024}
train: {batch: 64, epochs: 1}
goal: {gpu: [A100-80GB], cloud: [aws], max_devices: 8}
"""
SENTENCE = re.compile(r"(?:(?<![\w./=-])[A-Za-z][a-z]+(?![\w./=:-])[,;:]? +){3}[a-z]+")
"""Four words in a row that are no command."""


@pytest.mark.parametrize(
    "tokens",
    [
        (),
        *((verb,) for verbs in VERBS.values() for verb in verbs),
        ("pool", "up"),
        ("pool", "change"),
        ("study", "show"),
        ("catalog", "own"),
    ],
)
def test_help_is_chinese_throughout(
    tokens: tuple[str, ...],
    chinese: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = _help(tokens, capsys)
    assert HAN.search(shown)
    assert "用法：" in shown
    assert SENTENCE.findall(shown) == []
    for word in ("[default", "[required", "Parameters", "Commands", "Usage"):
        assert word not in shown


def test_errors_are_chinese_and_their_codes_are_not(
    chinese: None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("task: text-classification\nmodell: mlp\ndata: x.csv\n")
    assert main(["validate", "job.yaml"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("错误：job.yaml: 1 个问题\n")
    assert "modell: 未知的键；你是否想写 'model'？" in shown
    with pytest.raises(YunluError) as caught:
        load_job("none.yaml")
    assert (caught.value.code, caught.value.message) == ("job", "There is no job file none.yaml.")


def test_usage_errors_are_chinese(chinese: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plna"]) == 2
    assert main(["plan", "--top", "x"]) == 2
    assert main(["train", "--nonsense"]) == 2
    shown = capsys.readouterr().err
    assert "没有命令 'plna'；你是否想写 'plan'？" in shown
    assert '--top 的值无效：无法把 "x" 转换为 int。' in shown
    assert "未知的选项：--nonsense。" in shown


def test_what_programs_read_is_english(
    chinese: None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    assert main(["plan", str(job), "--json"]) == 0
    inside = capsys.readouterr().out
    monkeypatch.setenv("YUNLU_LANG", "en")
    assert main(["plan", str(job), "--json"]) == 0
    outside = capsys.readouterr().out
    assert not HAN.search(inside)
    assert set(json.loads(inside)) == set(json.loads(outside))


def test_a_plan_is_chinese_on_the_terminal(
    chinese: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    assert main(["plan", str(job), "--explain"]) == 0
    shown = capsys.readouterr().out
    assert SENTENCE.findall(shown) == []
    for words in ("硬件", "布局", "费用与时间的最佳平衡", "每步：", "单设备内存："):
        assert words in shown


def test_english_users_load_no_catalogue() -> None:
    program = (
        "import sys; from yunlu.cli.main import main; main(['--help']);"
        "assert not [name for name in sys.modules if 'chinese' in name or 'translation' in name]"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"YUNLU_LANG": "en", "PATH": ""},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
