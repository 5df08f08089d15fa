"""The documentation site: every page and link of both languages, the build, its search."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors
from tests.integration.chromium import CHROMIUM, open_browser

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import make_site
finally:
    sys.path.remove(str(SCRIPTS))
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)|<a href=\"(?P<other>[^\"]+)\">")


@pytest.mark.parametrize("language", make_site.LANGUAGES)
def test_links_of_the_site_lead_to_pages_and_headings(tmp_path: Path, language: str) -> None:
    pages = {page.name for page in make_site.stage(ROOT, tmp_path / language, language)}
    others = {f"{'index' if name == 'README' else name}.html" for name in pages}
    checked = 0
    for page in (tmp_path / language).rglob("*.md"):
        text = re.sub(
            r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
        )
        for found in LINK.finditer(text):
            if found["other"]:  # the same page in the other language
                target = (page.parent / found["other"]).resolve()
                language_of = target.relative_to(tmp_path).parts[0]
                assert language_of == ({*make_site.LANGUAGES} - {language}).pop()
                assert target.relative_to(tmp_path / language_of).as_posix() in others
            elif not re.match(r"https?:|mailto:", found["target"]):
                path, _, anchor = found["target"].partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), f"{page.name}: {found['target']}"
                assert ".zh-CN" not in path
                assert not anchor or anchor in anchors(target), f"{page.name}: {found['target']}"
            checked += 1
    assert checked > 200


def test_every_page_stands_in_the_menu_once() -> None:
    listed = [name for _, _, names in make_site.GROUPS for name in names]
    pages = {page.name for page in make_site.find_pages(ROOT, "en")}
    assert len(listed) == len(set(listed))
    assert set(listed) <= pages
    menu = make_site.make_menu(make_site.find_pages(ROOT, "zh"), "zh")
    assert {line for line in menu.splitlines() if re.match(r"[\w./-]+$", line)} == pages - {
        "README"
    }


def test_chinese_lines_are_joined_and_code_stays(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "staged"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("# A\n\n[中文](README.zh-CN.md) [b](docs/b.md#one)\n")
    (root / "README.zh-CN.md").write_text(
        "# 甲\n\n[English](README.md)，第一行\n第二行 [乙](docs/b.md#one)\n\n- 一\n- 二\n\n"
        "```mermaid\n甲\n乙 [x](docs/b.md)\n```\n"
    )
    (root / "docs" / "b.md").write_text("# B\n\n## One\n\n[top](../README.md) [file](x.txt)\n")
    (root / "docs" / "x.txt").write_text("x")
    make_site.stage(root, folder / "zh", "zh")
    text = (folder / "zh" / "index.md").read_text()
    assert '<a href="../en/index.html">English</a>，第一行第二行 [乙](docs/b.md#one)' in text
    assert "- 一\n- 二" in text
    assert "```text\n甲\n乙 [x](docs/b.md)\n```" in text
    assert "docs/b" in text.rpartition("{toctree}")[2]
    assert "[top](../index.md) [file](x.txt)" in (folder / "zh" / "docs" / "b.md").read_text()
    assert (folder / "zh" / "docs" / "x.txt").read_text() == "x"


def _build(site: Path, *options: str) -> None:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    command = [sys.executable, str(SCRIPTS / "make_site.py"), str(site), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    _build(tmp_path)
    for language, word in (("en", "Clean up"), ("zh", "清理")):
        page = (tmp_path / language / "docs" / "clean-up.html").read_text(encoding="utf-8")
        assert f"<h1>{word}<" in page
        assert "yunlu.train" in (tmp_path / language / "docs" / "api.html").read_text("utf-8")
        pages = "".join(path.read_text("utf-8") for path in (tmp_path / language).rglob("*.html"))
        assert not re.search(r"""<(?:script|link|img)[^>]*(?:src|href)=["'](?:https?:)?//""", pages)
    assert 'href="zh/index.html"' in (tmp_path / "index.html").read_text("utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with two pages in two languages."""
    root = tmp_path / "project"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("# Start\n\n[next](docs/tidy.md)\n")
    (root / "docs" / "tidy.md").write_text("# Tidy\n\nOld checkpoints are pruned.\n")
    (root / "docs" / "tidy.zh-CN.md").write_text(
        "# 整理\n\n保留最好的检查点，用 prune 删除其他的。\n"
    )
    return root


def test_a_link_that_leads_nowhere_fails_the_build(project: Path, tmp_path: Path) -> None:
    (project / "docs" / "tidy.md").write_text("# Tidy\n\n[gone](#no-such-heading)\n")
    with pytest.raises(AssertionError, match="no-such-heading"):
        _build(tmp_path / "site", "--root", str(project))


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor google-chrome is installed")
def test_a_page_is_found_by_what_it_says(project: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    _build(site, "--root", str(project))
    with open_browser() as browser:
        page = browser.new_page()
        for language, query, title in (
            ("en", "pruned checkpoint", "Tidy"),
            ("zh", "最好的检查点", "整理"),
            ("zh", "prune", "整理"),
        ):
            page.goto(f"{(site / language / 'search.html').as_uri()}?q={query}")
            page.locator("#search-results li a", has_text=title).first.wait_for()
        page.goto(f"{(site / 'zh' / 'search.html').as_uri()}?q=检点")
        page.locator("#search-results .search-summary").wait_for()
        assert page.locator("#search-results li a").count() == 0
