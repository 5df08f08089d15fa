"""The pages agree with the tree and with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, blocks, headings, links, name_of, pages, table_rows

DOCS = ROOT / "docs"
TRANSLATED = [
    (ROOT / "README.md", ROOT / "README.zh-CN.md"),
    (DOCS / "job-file.md", DOCS / "job-file.zh-CN.md"),
    *(
        (DOCS / f"{name}.md", DOCS / f"{name}.zh-CN.md")
        for name in (
            "precision",
            "data-limits",
            "large-batch",
            "stability",
            "memory",
            "finetuning",
            "self-tuning",
            "layouts",
            "communication",
            "planning",
            "catalog",
            "probe",
            "pool",
            "pool-simulation",
            "pool-spot",
            "tuning",
            "scikit-learn",
            "security",
        )
    ),
]
WEB = ("https://", "http://", "mailto:")
LOCAL_PATH = re.compile(r"(?<![\w.~:/])/(?:work|tmp|home|root|Users|usr|opt|var|mnt)/")


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        if link.startswith(WEB):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} leaves the project"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_no_page_names_a_path_of_one_machine(page: Path) -> None:
    assert not LOCAL_PATH.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [DOCS / "architecture.md", DOCS / "guided-tour.md"], ids=name_of)
def test_files_that_the_tour_and_the_architecture_name_exist(page: Path) -> None:
    named = set(re.findall(r"[\w./-]*\w\.(?:py|md|toml)\b", page.read_text(encoding="utf-8")))
    assert sum(name.endswith(".py") for name in named) >= 8
    for name in named:
        places = (ROOT, DOCS, ROOT / "src" / "yunlu")
        assert any((place / name).is_file() for place in places), f"{name} does not exist"


def test_the_architecture_fits_in_a_hundred_lines() -> None:
    assert len((DOCS / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize(("english", "chinese"), TRANSLATED)
def test_a_page_and_its_translation_show_the_same(english: Path, chinese: Path) -> None:
    assert [block.source for block in blocks(english)] == [b.source for b in blocks(chinese)]
    assert headings(english) == headings(chinese)
    assert [row[0] for row in table_rows(english) if row[0].startswith("`")] == [
        row[0] for row in table_rows(chinese) if row[0].startswith("`")
    ]
    assert chinese.name in links(english)
    assert english.name in links(chinese)
