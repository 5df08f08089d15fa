"""The texts: both languages have every one of them, and every one is used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import yunlu.render
from yunlu.render.i18n import BilingualText, known_text, same, text

RENDER = Path(yunlu.render.__file__).parent
EN, ZH = (
    json.loads((RENDER / "i18n" / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("en", "zh")
)
SAME = {"layout.rank", "metric.f1", "metric.r2", "workers.rank"}
"""Called the same in both languages."""


def test_both_languages_have_the_same_keys_in_the_same_order() -> None:
    assert list(EN) == list(ZH)


@pytest.mark.parametrize("key", list(EN))
def test_a_text_has_the_same_fields_in_both_languages(key: str) -> None:
    assert EN[key]
    assert sorted(re.findall(r"{\w+}", EN[key])) == sorted(re.findall(r"{\w+}", ZH[key]))
    assert re.search("[一-鿿]", ZH[key]) or key in SAME
    assert not re.search("[一-鿿]", EN[key])


def test_every_text_is_used() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in RENDER.rglob("*")
        if path.suffix in {".py", ".j2"}
    )
    # Keys that are put together: text(f"curve.{key}"), say(f"..."), text('state.' ~ state), known_text("metric", ...).
    prefixes = {
        *re.findall(r"""\b(?:text|spoken|say)\(\s*f["']([\w.]+\.)\{""", sources),
        *re.findall(r"""\btext\('([\w.]+\.)' ~""", sources),
        *(f"{name}." for name in re.findall(r"""\bknown_text\(\s*["']([\w.]+)["']""", sources)),
    }
    unused = [
        key
        for key in EN
        if f"'{key}'" not in sources
        and f'"{key}"' not in sources
        and key.rpartition(".")[0] + "." not in prefixes
    ]
    assert unused == []


def test_fields_enter_in_the_language_of_the_text() -> None:
    label = text("study.card.best", metric=known_text("metric", "loss"))
    assert (label.en, label.zh) == ("Best Loss", "最佳损失")


def test_names_without_a_text_stay_as_they_are() -> None:
    assert known_text("metric", "my_metric") == same("my_metric")


def test_a_page_carries_both_languages_escaped() -> None:
    assert BilingualText(en="<a>", zh="甲").__html__() == (
        '<span lang="en">&lt;a&gt;</span><span lang="zh">甲</span>'
    )
    assert same("<a>").__html__() == "&lt;a&gt;"
    assert same("<a>", code=True).__html__() == "<code>&lt;a&gt;</code>"
