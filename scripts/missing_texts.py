"""List texts that a user can meet and that have no Chinese text yet, and Chinese texts no longer used.

    python scripts/missing_texts.py            # what is missing or orphaned, by room
    python scripts/missing_texts.py --write    # add the missing ones to the catalogues, to be filled in

Every string of the source that reads as text counts: two words or more, or any word that an error, a
heading or a condition inside of a text shows. Texts nobody sees stand in ``hidden.json``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from docstring_parser import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "yunlu"
CATALOGUES = SOURCE / "render" / "i18n" / "zh"
HIDDEN = "hidden"
"""The catalogue of strings that nobody sees."""
NOT_SHOWN = frozenset({"lab", "testing"})
"""Rooms for research and for tests."""

_TWO_WORDS = re.compile(r"[A-Za-z]{2,}(?:'s)?[,;:.]? +\S*[a-zA-Z{]|\{[,;:]? +[A-Za-z]{3,}")
_WORD = re.compile(r"[A-Za-z]{3,}")
_HEADINGS = frozenset({"add_column", "_section", "_small_table", "heading", "_head", "rule"})


@cache
def find_texts(room: str) -> dict[str, str]:
    """Templates of a room, with the place of the first one: ``{0}`` stands for a value."""
    texts: dict[str, str] = {}
    for path in room_files(room):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, template in (*_scan(tree), *(_find_help(tree) if room == "cli" else ())):
            texts.setdefault(template, f"{path.relative_to(ROOT)}:{line}")
    return texts


def _find_help(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What ``--help`` shows of the functions that are commands."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            parsed = parse(ast.get_docstring(node) or "")
            described = (parameter.description for parameter in parsed.params)
            for text in (parsed.short_description, parsed.long_description, *described):
                if text:
                    yield node.lineno, " ".join(text.split())


def room_files(room: str) -> list[Path]:
    """Files of a room; files beside the rooms are a room of their own name."""
    place = SOURCE / room
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return [path for path in files if path.parent != CATALOGUES.parent]


def rooms() -> list[str]:
    """Rooms whose texts a user can meet."""
    names = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    return sorted(names - NOT_SHOWN - {"__pycache__", "py"})


@cache
def catalogue(room: str) -> dict[str, str]:
    """The Chinese texts of a room, by their English templates."""
    path = CATALOGUES / f"{room}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def missing(room: str) -> dict[str, str]:
    """Texts of a room that no catalogue has, with their places."""
    names = (*rooms(), "terms", HIDDEN)
    known = {text for name in names for text, zh in catalogue(name).items() if zh}
    return {text: place for text, place in find_texts(room).items() if text not in known}


def orphaned() -> list[str]:
    """Texts of the catalogues that the source no longer has."""
    used = {text for room in rooms() for text in find_texts(room)}
    extra = set(catalogue("library"))
    return [
        f"{name}.json: {text}"
        for name in (*rooms(), HIDDEN)
        for text in catalogue(name)
        if text not in used | extra
    ]


def _scan(tree: ast.Module) -> Iterator[tuple[int, str]]:
    inner, single = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))  # documentation
        elif isinstance(node, ast.JoinedStr):
            _enter_template(node, inner, single)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            single.update(id(part) for part in _conditions(node))
        elif isinstance(node, ast.Call):
            name = _called(node)
            if name.endswith("Error") or name in _HEADINGS:
                values = [*node.args, *(word.value for word in node.keywords if word.arg == "hint")]
                single.update(id(value) for value in values)
    for node in ast.walk(tree):
        if id(node) in inner or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        template = _template(node).strip()
        pattern = _WORD if id(node) in single else _TWO_WORDS
        if pattern.search(re.sub(r"{\d+}", "{", template)):
            yield node.lineno, template


def _enter_template(node: ast.JoinedStr, inner: set[int], single: set[int]) -> None:
    for value in node.values:
        inner.add(id(value))
        if isinstance(value, ast.FormattedValue):
            if value.format_spec is not None:
                inner.update(id(part) for part in ast.walk(value.format_spec))
            single.update(id(part) for part in _conditions(value.value))


def _conditions(node: ast.AST) -> Iterator[ast.AST]:
    """The words that ``x if y else z`` chooses between."""
    for part in ast.walk(node):
        if isinstance(part, ast.IfExp):
            yield from (part.body, part.orelse)


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    assert isinstance(node, ast.JoinedStr)
    parts, count = "", 0
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts += str(value.value)
        else:
            parts, count = f"{parts}{{{count}}}", count + 1
    return parts


def _called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def main(options: list[str]) -> int:
    """Print what is missing or orphaned; the exit code says whether anything is."""
    total = 0
    for room in rooms():
        texts = missing(room)
        total += len(texts)
        for text, place in texts.items():
            print(f"{place}: {json.dumps(text, ensure_ascii=False)}")
        if texts and "--write" in options:
            path = CATALOGUES / f"{room}.json"
            whole = {**catalogue(room), **dict.fromkeys(texts, "")}
            path.write_text(json.dumps(whole, ensure_ascii=False, indent=1) + "\n", "utf-8")
    for entry in orphaned():
        print(f"no longer used: {entry}")
        total += 1
    print(f"{total} texts to do", file=sys.stderr)
    return min(total, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
