"""Sphinx extension: search in Chinese by pairs of characters, in the index and in the query alike.

Sphinx's own way needs a dictionary for the index, and still takes what a reader types for one word.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sphinx.search.en import SearchEnglish

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_RUN = re.compile(r"[\u3400-\u9fff]+|[A-Za-z0-9_]+")


class ChineseSearch(SearchEnglish):
    """Pairs of Chinese characters, and English words."""

    lang = "zh"
    language_name = "English"  # names the stemmer in the page: English words are stemmed
    js_splitter_code = """
function splitQuery(query) {
  const runs = query.match(/[\\u3400-\\u9fff]+|[A-Za-z0-9_]+/g) || [];
  return runs.flatMap((run) => {
    if (!/[\\u3400-\\u9fff]/.test(run) || run.length < 3) return [run];
    return Array.from({ length: run.length - 1 }, (_, i) => run.slice(i, i + 2));
  });
}
"""

    def split(self, input: str) -> list[str]:
        """Words of a text."""
        return [word for run in _RUN.findall(input) for word in _pairs(run)]


def _pairs(run: str) -> list[str]:
    if run.isascii() or len(run) < 3:
        return [run]
    return [run[at : at + 2] for at in range(len(run) - 1)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_search_language(ChineseSearch)
    return {"parallel_read_safe": True}
