"""What the pages show works: Python runs, jobs load, the first page's job is the example's own."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import warnings
from inspect import signature
from pathlib import Path
from unittest import SkipTest

import pytest
import yaml
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from tests.docs.pages import ROOT, Block, blocks, name_of, pages
from yunlu.spec.load import job_from_mapping

# Translations show the same blocks, which another test compares: once is enough.
WITH_PYTHON = [
    page
    for page in pages()
    if not page.name.endswith(".zh-CN.md")
    if any(block.language == "python" for block in blocks(page))
]
JOBS = [
    (page, block)
    for page in pages()
    for block in blocks(page)
    if block.language == "yaml" and isinstance(found := yaml.safe_load(block.source), dict)
    if {"task", "model", "data"} <= found.keys()
]
# `<!-- skip: next -->` above a block, invisible to readers, says that it must not run.
BOOK = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader would stand: beside the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # own code makes its directory importable
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_every_python_block_runs_in_the_order_of_its_page(page: Path, folder: Path) -> None:
    """A test class that a page shows is run too."""
    if page.stem == "coming-from":  # what other tools warn of in their own blocks is theirs
        warnings.simplefilter("ignore")
    document = BOOK.parse(page)
    document.namespace["__name__"] = f"page_{page.stem}"
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest:
            continue
    for shown in [value for name, value in document.namespace.items() if name.startswith("Test")]:
        _run_as_pytest_would(shown, folder)


def _run_as_pytest_would(shown: type, tmp_path: Path) -> None:
    for name in dir(shown):
        if name.startswith("test_"):
            test = getattr(shown(), name)
            test(**({"tmp_path": tmp_path} if "tmp_path" in signature(test).parameters else {}))


def _where(value: object) -> str:
    if isinstance(value, Path):
        return name_of(value)
    return f"line {value.line}" if isinstance(value, Block) else ""


@pytest.mark.parametrize(("page", "block"), JOBS, ids=_where)
def test_every_whole_job_is_valid(page: Path, block: Block) -> None:
    job_from_mapping(yaml.safe_load(block.source), where=f"{name_of(page)}:{block.line}")


def test_the_first_job_of_the_readme_is_the_example_it_names() -> None:
    shown = next(block for block in blocks(ROOT / "README.md") if block.language == "yaml")
    example = (ROOT / "examples" / "digits.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(shown.source) == yaml.safe_load(example)


def test_the_blocks_are_found() -> None:
    assert {"README.md", "docs/python.md", "docs/tasks.md"} <= set(map(name_of, WITH_PYTHON))
    assert len(JOBS) >= 8


@pytest.mark.slow
def test_the_python_example_reaches_its_figure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (ROOT / "examples" / "python_api.py").read_text(encoding="utf-8")
    expected = re.search(r"^expects: test accuracy >= ([\d.]+)$", source, re.MULTILINE)
    assert expected
    assert len(source.splitlines()) < 60
    runpy.run_path(str(folder / "examples" / "python_api.py"), run_name="__main__")
    reached = re.search(r"^accuracy +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert reached
    assert float(reached[1]) >= float(expected[1])
