"""The Markdown of the project, taken apart: pages, code blocks, links, headings, table rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^ {0,3}```(?P<language>\S*)[^\n]*\n(?P<source>.*?)^ {0,3}```\s*$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of code."""

    language: str
    source: str
    line: int


def pages() -> list[Path]:
    """Every page a reader may open: at the root, in docs and in examples."""
    return sorted(
        path for folder in (".", "docs", "examples") for path in (ROOT / folder).glob("*.md")
    )


def name_of(page: Path) -> str:
    """How a failing test calls the page."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The page's fenced blocks, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["source"], text.count("\n", 0, found.start()) + 1)
        for found in _FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Where its links lead, anchors and all."""
    return [found["target"] for found in _LINK.finditer(prose(page))]


def code_words(page: Path) -> list[str]:
    """What stands between backquotes in its prose."""
    return _CODE.findall(prose(page))


def headings(page: Path) -> list[str]:
    """Its headings, each as the number of its hashes."""
    return re.findall(r"^#+(?= )", prose(page), re.MULTILINE)


def table_rows(page: Path) -> list[list[str]]:
    """The cells of every row of every table; rules are left out."""
    lines = [line.strip() for line in prose(page).splitlines()]
    rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return [row for row in cells if not all(set(cell) <= set("-: ") for cell in row)]


def anchors(page: Path) -> set[str]:
    """The fragments that its headings make, as GitHub spells them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in kept}
