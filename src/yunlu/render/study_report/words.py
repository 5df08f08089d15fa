"""The texts of a study's page, each in English and in Chinese."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

TEMPLATES = Path(__file__).with_name("templates")


def words(key: str, **fields: Any) -> Markup:
    """A text in both languages; the root's attribute hides one of them."""
    english, chinese = _all()[key]
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(
        escape(english).format(**fields), escape(chinese).format(**fields)
    )


def known_word(prefix: str, name: str) -> Markup:
    """A name in both languages where we know it, else the name itself."""
    return words(f"{prefix}.{name}") if f"{prefix}.{name}" in _all() else escape(name)


def both(key: str) -> tuple[str, str]:
    """A text in English and in Chinese."""
    english, chinese = _all()[key]
    return english, chinese


@cache
def _all() -> dict[str, tuple[str, str]]:
    return json.loads((TEMPLATES / "words.json").read_text(encoding="utf-8"))
