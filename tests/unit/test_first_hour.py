"""The walk through the first hour counts what it runs."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _load() -> Any:
    loader = SourceFileLoader("first_hour_script", str(ROOT / "scripts" / "first_hour"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module
    was, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = was
    return module


first_hour = _load()


@pytest.fixture
def walk(tmp_path: Path) -> Any:
    (tmp_path / "yunlu").mkdir()
    made = first_hour.Walk(tmp_path / "yunlu", python=sys.executable, columns=80, show=False)
    made.begin("part")
    return made


def test_commands_and_lines_are_counted(walk: Any) -> None:
    code = "import os; print(os.environ['COLUMNS']); print(81 * 'x')"
    walk.run([sys.executable, "-c", code], shown="it")
    walk.write(walk.clone / "job.yaml", first_hour.SEARCH)
    (part,) = walk.parts
    assert (part.commands, part.output_lines, part.lines_written) == (1, 2, 3)
    assert part.wide == [f"it: {81 * 'x'}"]
    assert not part.failed


def test_a_command_that_fails_is_told(walk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    walk.run([sys.executable, "-c", "import sys; sys.exit('no')"], shown="it")
    assert walk.parts[0].failed == ["it: exit code 1"]
    first_hour.print_table(walk.parts, 80)
    assert "it: exit code 1" in capsys.readouterr().out


def test_nothing_that_the_readme_shows_is_wider_than_a_terminal(walk: Any) -> None:
    (walk.clone / "README.md").write_text((ROOT / "README.md").read_text())
    first_hour.read_readme(walk)
    assert walk.parts[-1].output_lines > 10
    assert walk.parts[-1].wide == []


def test_the_table_of_the_user_has_a_target(tmp_path: Path) -> None:
    first_hour.write_flowers(tmp_path / "flowers.csv")
    head, *rows = (tmp_path / "flowers.csv").read_text().splitlines()
    assert head.split(",")[-1] == "label"
    assert len(rows) == 300
