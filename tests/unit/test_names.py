"""Names: a class name is used once, and words that the field does not use stay out."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from scripts.house_figures import find_private_words

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "yunlu"
SHARED_CLASS_NAMES: dict[str, str] = {}
"""Class names that may be used twice, each with its reason."""
RETIRED = re.compile(
    r"\b(captain|helm|steward|crews?|roster|logbook|muster|foretell\w*|foretold|foresee\w*|rigs?"
    r"|stillborn|barren|steering|audition|conductor|founding|entitlement)\b",
    re.IGNORECASE,
)
"""Private words of earlier versions; the glossary has the field's word for each."""
TEST_WORDS = {"rig", "rigs"}
"""In tests and benchmarks a rig is what the word says: a test set-up."""
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def source_trees() -> dict[Path, ast.Module]:
    return {
        path.relative_to(SOURCE): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def test_a_class_name_is_used_once(source_trees: dict[Path, ast.Module]) -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in source_trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path))
    repeated = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert repeated.keys() == SHARED_CLASS_NAMES.keys(), repeated


def test_locals_and_functions_have_names_of_the_field(
    source_trees: dict[Path, ast.Module],
) -> None:
    """``found`` and ``_settle`` do not say what a variable holds or a function does."""
    local_names, functions = find_private_words(source_trees)
    assert not local_names
    assert not functions


def test_private_words_are_found_where_they_stand() -> None:
    source = "def _settle(kept):\n    found = [each for each in kept]\n    word.found = found\n"
    local_names, functions = find_private_words({Path("a.py"): ast.parse(source)})
    assert sorted(local_names) == ["a.py:1: kept", "a.py:2: each", "a.py:2: found"]
    assert functions == ["a.py:1: _settle"]


@pytest.mark.parametrize("room", sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
def test_no_room_uses_a_retired_word(room: str) -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted((SOURCE / room).rglob("*"))
        if path.suffix in {".py", ".j2", ".js", ".json", ".css"}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if RETIRED.search(line.replace("_", " "))
    }
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_uses_a_retired_word(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if RETIRED.search(line)]


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts", "tests"])
def test_no_test_or_benchmark_uses_a_retired_word(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".yaml"}
        and path.name not in {"test_names.py", "house_figures.py"}
        for number, line in enumerate(
            [str(path.relative_to(ROOT)), *path.read_text(encoding="utf-8").splitlines()]
        )
        for word in RETIRED.findall(line.replace("_", " "))
        if word.lower() not in TEST_WORDS
    }
    assert not found
