"""Every example learns what its comment promises."""

from __future__ import annotations

import operator
import re
import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT, Yunlu

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
EXPECTS = re.compile(r"^# expects: test/(\w+) (>=|<=) ([\d.]+)$", re.MULTILINE)
GOES_ON = re.compile(r"^# fine-tunes: (\S+)$", re.MULTILINE)
COMPARE = {">=": operator.ge, "<=": operator.le}
LONG = {
    "dates",
    "finetune",
    "python_docs",
    "reviews",
    "spoken_digits",
    "spoken_words",
    "tune_reviews",
}
"""A minute each: ``make test-long`` runs them."""
TASKS = {
    "text-classification", "language-modeling", "seq2seq", "image-classification",
    "keyword-spotting", "speech-to-text", "recommendation", "tabular-classification",
    "tabular-regression",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=[pytest.mark.long] if path.stem in LONG else [])
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_an_example_reaches_its_figure(example: Path, yunlu: Yunlu) -> None:
    text = example.read_text()
    if "synthetic:spoken" in text and not shutil.which("espeak-ng"):
        pytest.skip("espeak-ng, which speaks this example's data, is not installed")
    match = EXPECTS.search(text)
    assert match, "an example says what to expect"
    metric, sign, figure = match.groups()
    verb: tuple[str | Path, ...] = ("train",)
    if start := GOES_ON.search(text):
        assert yunlu("train", example.parent / start[1], "--json").code == 0
        verb = ("finetune", "last")
    answer = yunlu(*verb, example, "--json")
    assert answer.code == 0, answer.err
    assert COMPARE[sign](answer.scores("test")[metric], float(figure))


def test_there_is_an_example_for_every_task() -> None:
    shown = {
        match.group(1)
        for example in EXAMPLES
        if (match := re.search(r"^task: ([\w-]+)", example.read_text(), re.MULTILINE))
    }
    assert shown == TASKS
