"""The pages agree with the tree and with each other."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import (
    ROOT,
    Block,
    anchors,
    blocks,
    code_words,
    headings,
    links,
    name_of,
    pages,
    table_rows,
)

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
            "optimizers",
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
            "coming-from",
            "security",
            "accelerators",
            "notebooks",
            "ascend",
            "clean-up",
            "python",
            "tasks",
            "use-the-model",
            "faq",
        )
    ),
]
DESIGN_NOTES = sorted(DOCS.glob("design-*.md"))
ABOUT_THE_CODE = [DOCS / "architecture.md", DOCS / "guided-tour.md", *DESIGN_NOTES]
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


@pytest.mark.parametrize("page", ABOUT_THE_CODE, ids=name_of)
def test_files_that_pages_about_the_code_name_exist(page: Path) -> None:
    named = set(re.findall(r"[\w./-]*\w\.(?:py|md|toml)\b", page.read_text(encoding="utf-8")))
    folders = {word for word in code_words(page) if re.fullmatch(r"(?:\w+/)+", word)}
    assert sum(name.endswith(".py") for name in named) + len(folders) >= 8
    source = ROOT / "src" / "yunlu"
    for name in named:
        assert any((place / name).is_file() for place in (ROOT, DOCS, source)), f"no file {name}"
    for name in folders:  # a row of a table may name a folder inside its room
        assert (ROOT / name).is_dir() or any(source.glob(f"**/{name}")), f"no folder {name}"


@pytest.mark.parametrize("page", ABOUT_THE_CODE, ids=name_of)
def test_classes_that_pages_about_the_code_name_exist(page: Path) -> None:
    """A class by its name, and what it has: ``Coordinator``, ``Scheduler.step``."""
    classes = _members_by_class()
    for word in code_words(page):
        if match := re.fullmatch(r"([A-Z][a-z]+(?:[A-Z][a-z]*)*)(?:\.(\w+))?(?:\(.*\))?", word):
            name, member = match.groups()
            assert name in classes, f"there is no class {name}"
            assert member is None or member in classes[name], f"{name} has no {member}"


@cache
def _members_by_class() -> dict[str, set[str]]:
    """Methods and annotated fields of every class in the source; nothing is imported."""
    classes: dict[str, set[str]] = {}
    for path in (ROOT / "src" / "yunlu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                members = classes.setdefault(node.name, set())
                for part in node.body:
                    if isinstance(part, ast.FunctionDef):
                        members.add(part.name)
                    elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        members.add(part.target.id)
    return classes


@pytest.mark.parametrize("page", DESIGN_NOTES, ids=name_of)
def test_a_design_note_has_every_part_and_is_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"Problem", "Invariants", "Faults", "Where it is", "Rejected"} <= set(titles)
    assert any(block.language == "mermaid" for block in blocks(page))


def test_the_design_notes_are_linked_from_the_architecture() -> None:
    assert len(DESIGN_NOTES) >= 3
    assert {page.name for page in DESIGN_NOTES} <= set(links(DOCS / "architecture.md"))


def test_the_architecture_fits_in_a_hundred_lines() -> None:
    assert len((DOCS / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 100


_REMARK = re.compile(r"(?:^|(?<=\s))# .*$", re.MULTILINE)


def _without_remarks(block: Block) -> str:
    """The code, whatever language its comments are in and how far they stand from it."""
    return re.sub(r"[ ]+$", "", _REMARK.sub("", block.source), flags=re.MULTILINE)


@pytest.mark.parametrize("chinese", [chinese for _, chinese in TRANSLATED], ids=name_of)
def test_a_chinese_page_is_chinese_throughout(chinese: Path) -> None:
    """Comments in its blocks, too; a reader is 你 everywhere; links lead to Chinese pages."""
    assert "您" not in chinese.read_text(encoding="utf-8")
    remarks = [
        remark
        for block in blocks(chinese)
        for remark in _REMARK.findall(block.source)
        if not remark.startswith("# yaml-language-server")
    ]
    sentences = [remark for remark in remarks if re.search(r"[A-Za-z]+ [a-z]+", remark)]
    assert [remark for remark in sentences if not re.search("[一-鿿]", remark)] == []
    own = chinese.with_name(chinese.name.replace(".zh-CN", ""))
    elsewhere = {english for english, _ in TRANSLATED} - {own}
    targets = [chinese.parent / link.partition("#")[0] for link in links(chinese)]
    assert [target for target in targets if target.resolve() in elsewhere] == []


def test_jobs_are_jobs_in_chinese() -> None:
    """A task is another thing."""
    for _, chinese in TRANSLATED:
        text = chinese.read_text(encoding="utf-8")
        assert not re.search("任务文件|训练任务|提交任务|任务队列", text), chinese.name


@pytest.mark.parametrize(("english", "chinese"), TRANSLATED)
def test_a_page_and_its_translation_show_the_same(english: Path, chinese: Path) -> None:
    assert [_without_remarks(b) for b in blocks(english)] == [
        _without_remarks(b) for b in blocks(chinese)
    ]
    assert headings(english) == headings(chinese)
    assert [row[0] for row in table_rows(english) if row[0].startswith("`")] == [
        row[0] for row in table_rows(chinese) if row[0].startswith("`")
    ]
    assert chinese.name in links(english)
    assert english.name in links(chinese)
