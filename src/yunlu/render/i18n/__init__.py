"""Texts for people, each in English and in Chinese.

``en.json`` and ``zh.json`` hold the same keys. Pages carry both languages and show one. What a terminal
shows is made in English and looked up in ``zh/ROOM.json`` when it is shown: see ``chinese``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from yunlu.core.settings import read_language
from yunlu.core.value import Value
from yunlu.render.i18n.chinese import to_chinese


class BilingualText(Value):
    """The same text in both languages."""

    en: str
    zh: str
    code: bool = False
    """An identifier: set in the font of code."""

    def __html__(self) -> str:
        """Both languages as markup; an attribute of the page's root hides one of them."""
        if self.code:
            return Markup("<code>{}</code>").format(self.en)
        if self.en == self.zh:
            return escape(self.en)
        return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(self.en, self.zh)

    def __add__(self, other: BilingualText | str) -> BilingualText:
        """This text followed by another."""
        tail = other if isinstance(other, BilingualText) else same(other)
        return BilingualText(en=self.en + tail.en, zh=self.zh + tail.zh)


def text(key: str, **fields: Any) -> BilingualText:
    """The text of a key; fields that are bilingual themselves enter in the same language."""
    return BilingualText(
        en=_texts("en")[key].format(**{name: _english(item) for name, item in fields.items()}),
        zh=_texts("zh")[key].format(**{name: _chinese(item) for name, item in fields.items()}),
    )


def known_text(prefix: str, name: str) -> BilingualText:
    """The text of ``prefix.name``; the name itself where there is none."""
    key = f"{prefix}.{name}"
    return text(key) if key in _texts("en") else same(name)


def say(key: str, **fields: Any) -> str:
    """The text of a key in the user's language."""
    message = text(key, **fields)
    return message.zh if read_language() == "zh" else message.en


def translated(english: str, *, is_label: bool = False) -> BilingualText:
    """A text that the program made in English, such as the reason of a choice, and its Chinese."""
    return BilingualText(en=english, zh=to_chinese(english, is_label=is_label))


def same(name: str, *, code: bool = False) -> BilingualText:
    """A name that is the same in both languages."""
    return BilingualText(en=name, zh=name, code=code)


def _english(value: Any) -> Any:
    return value.en if isinstance(value, BilingualText) else value


def _chinese(value: Any) -> Any:
    return value.zh if isinstance(value, BilingualText) else value


@cache
def _texts(language: str) -> dict[str, str]:
    return json.loads(Path(__file__).with_name(f"{language}.json").read_text(encoding="utf-8"))
