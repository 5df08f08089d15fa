"""Build the documentation site from the Markdown of the project: one site for each language, warnings are errors.

    python scripts/make_site.py [DIRECTORY]    # default: site/

The pages are read as they are: GitHub shows the same files. A page without a translation stands in the Chinese site
in English, so that no link leads nowhere.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("en", "zh")
FOLDERS = (".", "docs", "examples", "benchmarks")
TITLES = {"en": "Yunlu", "zh": "云炉"}
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Start", "入门", ("docs/job-file", "docs/python", "docs/tasks", "docs/scikit-learn", "examples/README")),
    (
        "Train",
        "训练",
        (
            "docs/finetuning", "docs/self-tuning", "docs/precision", "docs/memory", "docs/optimizers",
            "docs/large-batch", "docs/stability", "docs/accelerators", "docs/ascend", "docs/data-limits",
        ),
    ),
    ("Plan", "计划", ("docs/planning", "docs/catalog", "docs/probe", "docs/planner-model")),
    ("Tune and share", "调优与共享", ("docs/tuning", "docs/pool", "docs/pool-simulation", "docs/pool-spot")),
    ("Many workers", "多个工作进程", ("docs/layouts", "docs/communication")),
    ("Look after", "维护", ("docs/clean-up", "docs/security", "SECURITY")),
    (
        "Reference",
        "参考",
        ("docs/api", "docs/glossary", "docs/architecture", "docs/guided-tour", "docs/dependencies", "CONTRIBUTING"),
    ),
)  # fmt: skip
"""Sections of the menu. A page that is in none stands under the last heading."""
MORE = ("More", "更多")
INDEX = "README"

_FENCE = re.compile(r"^( {0,3}```)(\w*)[^\n]*\n.*?^ {0,3}```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_CHINESE = ".zh-CN.md"
_BROKEN_LINE = re.compile(r"(?<=[\u3001-\u9fff\uff01-\uff1f])\n *(?=[\u3400-\u9fff\uff08])")
"""A line of Chinese that goes on in the next: a browser would show a space there."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of one language."""

    name: str
    """Path below the root, without suffix; the same in every language."""
    source: Path


def find_pages(root: Path, language: str) -> list[Page]:
    """Every page of the project, in this language where it is translated."""
    pages: list[Page] = []
    for folder in FOLDERS:
        for english in sorted((root / folder).glob("*.md")):
            if english.name.endswith(_CHINESE):
                continue
            chinese = english.with_name(english.stem + _CHINESE)
            source = chinese if language == "zh" and chinese.exists() else english
            pages.append(Page(english.relative_to(root).with_suffix("").as_posix(), source))
    return pages


def stage(root: Path, folder: Path, language: str) -> list[Page]:
    """Write the pages of a language, and the files that they link to, as Sphinx reads them."""
    pages = find_pages(root, language)
    for page in pages:
        target = folder / f"{_place(page.name)}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = page.source.read_text(encoding="utf-8")
        text = _rewrite(text, page, pages, root=root, folder=folder, language=language)
        if page.name == INDEX:
            text += "\n" + make_menu(pages, language)
        target.write_text(text, encoding="utf-8")
    return pages


def make_menu(pages: list[Page], language: str) -> str:
    """The menu of the site: groups in their order, then what nobody put into one."""
    known = {page.name for page in pages} - {INDEX}
    listed = {name for _, _, names in GROUPS for name in names}
    rest = tuple(sorted(known - listed))
    parts: list[str] = []
    for english, chinese, names in (*GROUPS, (*MORE, rest)):
        caption = chinese if language == "zh" else english
        lines = [name for name in names if name in known]
        parts.append(
            f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(lines) + "\n```\n"
        )
    return "\n".join(parts)


def _place(name: str) -> str:
    return "index" if name == INDEX else name


def _rewrite(
    text: str, page: Page, pages: list[Page], *, root: Path, folder: Path, language: str
) -> str:
    """The page with links that hold inside of the site; blocks of code stay as they are."""
    names = {known.name for known in pages}

    def link(found: re.Match[str]) -> str:
        label, target = found["text"], found["target"]
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not path:
            return found[0]
        file = (page.source.parent / path).resolve()
        other = "zh" if file.name.endswith(_CHINESE) else "en"
        name = file.relative_to(root).as_posix().removesuffix(_CHINESE).removesuffix(".md")
        up = "../" * page.name.count("/")
        if name not in names:
            _copy(file, root, folder)
            return found[0]
        if name == page.name and other != language:  # the same page in the other language
            return f'<a href="{up}../{other}/{_place(name)}.html">{label}</a>'
        # An anchor of the other language's headings leads nowhere here: the page itself does.
        own = next(known.source for known in pages if known.name == name)
        suffix = f"#{anchor}" if anchor and own == file else ""
        return f"[{label}]({up}{_place(name)}.md{suffix})"

    def prose(part: str) -> str:
        part = _LINK.sub(link, part)
        return _BROKEN_LINE.sub("", part) if language == "zh" else part

    pieces: list[str] = []
    end = 0
    for fence in _FENCE.finditer(text):
        pieces.append(prose(text[end : fence.start()]))
        # No lexer knows it, and nothing is drawn without a program from elsewhere.
        pieces.append(fence[0].replace("```mermaid", "```text", 1))
        end = fence.end()
    return "".join((*pieces, prose(text[end:])))


def _copy(file: Path, root: Path, folder: Path) -> None:
    """A file that a page links to: readers get it as a download."""
    target = folder / file.relative_to(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        shutil.copyfile(file, target)


def build(root: Path, site: Path, language: str, *, staging: Path) -> None:
    """Build the site of one language; a warning is an error."""
    from sphinx.application import Sphinx  # noqa: PLC0415 (staging alone needs no Sphinx)
    from sphinx.errors import SphinxError  # noqa: PLC0415
    from sphinx.util.docutils import docutils_namespace  # noqa: PLC0415

    source = staging / language
    shutil.rmtree(site / language, ignore_errors=True)  # a page that was renamed would stay
    stage(root, source, language)
    style = staging / "static"
    style.mkdir(exist_ok=True)
    (style / "site.css").write_text(_STYLE, encoding="utf-8")
    with docutils_namespace():  # the next language registers the same directives again
        app = Sphinx(
            srcdir=source,
            confdir=None,
            outdir=site / language,
            doctreedir=staging / f"{language}-trees",
            buildername="html",
            confoverrides=settings(language, style),
            status=None,
            warningiserror=True,
            exception_on_warning=False,
        )
        app.build()
    if app.statuscode:
        raise SphinxError(f"{language}: the build has warnings")


def settings(language: str, style: Path) -> dict[str, object]:
    """Settings of Sphinx for one language."""
    return {
        "project": TITLES[language],
        "copyright": "Yunlu",
        "language": "zh_CN" if language == "zh" else "en",
        "extensions": ["myst_parser", "chinese_search"],
        "root_doc": "index",
        "html_theme": "furo",
        "html_title": TITLES[language],
        "html_search_language": "zh" if language == "zh" else "en",
        "html_static_path": [str(style)],
        "html_css_files": ["site.css"],
        "html_show_sourcelink": False,
        "html_copy_source": False,
        "highlight_language": "text",
        "myst_heading_anchors": 4,
        "myst_all_links_external": False,
        "nitpicky": True,
    }


_STYLE = """
table.docutils { margin-left: 0; }
table.docutils td, table.docutils th { white-space: normal; vertical-align: top; }
:lang(zh) body, html[lang^="zh"] body {
  font-family: -apple-system, "PingFang SC", "Noto Sans CJK SC", "Microsoft YaHei", sans-serif;
}
"""
_DOOR = """<!doctype html>
<meta charset="utf-8">
<title>Yunlu 云炉</title>
<script>location.replace((navigator.language.startsWith("zh") ? "zh" : "en") + "/index.html")</script>
<p><a href="en/index.html">English</a> · <a href="zh/index.html">中文</a></p>
"""


def main() -> int:
    """Build both languages."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "site")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project whose pages it shows")
    arguments = parser.parse_args()
    site, root = arguments.directory.absolute(), arguments.root.absolute()
    sys.path.insert(0, str(Path(__file__).parent))  # the extension for Chinese search
    with tempfile.TemporaryDirectory(prefix="yunlu-site-") as staging:
        for language in LANGUAGES:
            build(root, site, language, staging=Path(staging))
    (site / "index.html").write_text(_DOOR, encoding="utf-8")
    print(f"the site is in {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
