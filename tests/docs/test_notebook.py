"""The example notebook runs in a real kernel, and shows what is stored in it."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.pages import ROOT
from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from pathlib import Path

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
LOCAL_PATH = re.compile(r"(?<![\w.~:/<])/(?:work|tmp|home|root|Users|usr|opt|var|mnt)/")
NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
ID = re.compile(r"-[0-9a-f]{6}\b")


class Skeleton(HTMLParser):
    """Tags with their classes, and words; what a run measures or draws is left out."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._closed = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._closed += tag in {"svg", "details", "style"}
        kind = dict(attrs).get("class") or ""
        # As many as there are round numbers, evaluations, or things to warn of on this machine.
        varies = tag in {"tr", "td"} or kind == "warning" or (tag == "span" and kind in {"", "y"})
        if not self._closed and not varies:
            self.parts.append(f"{tag}.{kind}" if kind else tag)

    def handle_endtag(self, tag: str) -> None:
        self._closed -= tag in {"svg", "details", "style"}


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shape(output: Any) -> tuple[Any, ...]:
    """What must be the same whenever it is run."""
    data = output.get("data", {})
    if "text/html" in data:
        return (output.output_type, *Skeleton(data["text/html"]).parts)
    text = data.get("text/plain") or output.get("text", "")
    return output.output_type, NUMBER.sub("#", ID.sub("-id", text))


@pytest.mark.slow
def test_the_example_notebook_shows_what_is_stored_in_it(tmp_path: Path) -> None:
    stored: Any = nbformat.read(NOTEBOOK, as_version=4)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    fresh: Any = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "examples")}}
    NotebookClient(fresh, timeout=LIMIT_S, kernel_name="python3", resources=resources).execute()
    for before, after in zip(cells(stored), cells(fresh), strict=True):
        assert [shape(output) for output in before.outputs] == [
            shape(output) for output in after.outputs
        ], before.source
    blocks = [output.data["text/html"] for cell in cells(fresh) for output in cell.outputs
              if "text/html" in output.get("data", {})]  # fmt: skip
    runs = [block for block in blocks if 'class="yunlu-run' in block]
    assert len(runs) == 3
    assert all('class="yunlu-run finished"' in block for block in runs)
    assert all(block.count('class="chart"') == 2 for block in runs)
    accuracy = re.search(r"test accuracy</small> <b>([\d.]+) %", runs[0])
    assert accuracy
    assert float(accuracy[1]) >= 95
    assert "a callback asked: accurate enough after" in runs[1]
    assert "worst_class" in runs[1]


def test_the_stored_notebook_was_executed_and_names_no_machine() -> None:
    stored: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    assert [cell.execution_count for cell in cells(stored)] == list(
        range(1, len(cells(stored)) + 1)
    )
    assert all(cell.outputs for cell in cells(stored)[:-1])
    assert not LOCAL_PATH.search(NOTEBOOK.read_text(encoding="utf-8"))
    assert not any(output.output_type == "error" for c in cells(stored) for output in c.outputs)
