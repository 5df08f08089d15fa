"""Chinese for a text that the program made in English: looked up when it is shown, not when it is made.

Source, logs, events and JSON are English. The catalogues ``zh/ROOM.json`` are keyed by the template as
the source has it, ``{0}`` for each value: ``"the store {0} is full"``. A shown text is matched against
the templates, its values are translated in turn (a hint may hold the reason of another room), and what
matches nothing stays as it is: names, paths, texts of other libraries. Loaded only where the language
is Chinese.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

_FIELD = re.compile(r"\{(\d+)\}")
_LATIN_WORD = re.compile(r"[A-Za-z]{2}")
_SEPARATORS = (
    (re.compile(r"\n\s*"), None),
    (re.compile(r" {2,}"), None),
    (re.compile(r" · "), None),
    (re.compile(r": "), "："),
    (re.compile(r"(?<=[a-z0-9)'\"])\. (?=[A-Z])"), "。"),
    (re.compile(r"; "), "；"),
    (re.compile(r", "), "，"),
)
"""Where a text that no template fits is cut; a mark enters where the part before it was translated."""
_DEPTH = 8
_FREE = 5
"""Letters of its own from which on a template may hold values of any length ..."""
_FREE_INSIDE = 11
"""... and where it begins with a value."""
_FREE_LISTS = 10
"""Letters from which on a value may hold a comma."""
_FREE_ANYWHERE = 22
"""Letters from which on a value may be a message with a colon, wherever it stands."""
_BEFORE_MESSAGES = (": ", "; ", ". ", "? ", "(")
_BEFORE_COPIES = "; write "
"""What comes after it is to be copied, and holds colons of its own: ``train.batch: 64``."""
_MESSAGE = re.compile(r": |; ")
_OPENING = re.compile(r"(?:error|warning)$|(?:error|warning|[a-z_]+(?:\.[a-z_]+)+): ")
"""What stands before a message: no part of its first value."""
_NOT_SMALL = re.compile(r"^--|[;:\"]|,( |$)|[A-Za-z]{4,} +[A-Za-z]{4,}")
_COMMAND = re.compile(r"--set \S+[=:{]\S|[{}\\]")
"""To be copied as it is."""
_SHORT = 30
_FEW_WORDS = 4
_MARK = re.compile(r"[→✗✓✔✘×!·★•◑◔○●■–-]\s+")
"""What a line may begin with, before its text."""
_TAIL = re.compile(r"\s*(\.\.\.|…)$")
"""What a line may end with."""
_PARTED = re.compile(r"\n|\S {2,}| · ")
"""Parts beside each other: no value of one template."""


class Piece(NamedTuple):
    """A part of a translated text."""

    text: str
    start: int
    """Where in the English text it stands, or would stand."""
    is_copy: bool
    """Whether it is a value that was taken over as it is."""


class _Template(NamedTuple):
    literals: tuple[str, ...]
    """Text before the first value, between values, after the last."""
    chinese: tuple[str | int, ...]
    """Text, and numbers of values."""
    letters: int
    longest: str
    """The longest of its literals: a text without it does not fit."""
    is_free: bool
    """Whether it says enough to hold values of any length."""


def to_chinese(text: str, *, is_label: bool = False) -> str:
    """The text in Chinese, as far as the catalogues have it.

    ``is_label``: a heading or a label of ours, where single words are translated, too.
    """
    pieces = translate(text, is_label=is_label)
    return text if pieces is None else "".join(piece.text for piece in pieces)


@lru_cache(maxsize=4096)
def translate(text: str, *, is_label: bool = False) -> tuple[Piece, ...] | None:
    """The parts of the text in Chinese; None where nothing is to be translated."""
    if not _LATIN_WORD.search(text):
        return None
    if is_label and (chinese := _terms().get(text.strip())) is not None:
        return _framed(text, chinese)
    return _translate(text, 0, _DEPTH, is_label=is_label)


def _framed(text: str, chinese: str, offset: int = 0) -> tuple[Piece, ...]:
    """The text, between the spaces that stood around the English one."""
    head = len(text) - len(text.lstrip())
    tail = len(text.rstrip())
    return (
        Piece(text[:head], offset, is_copy=True),
        Piece(chinese, offset + head, is_copy=False),
        Piece(text[tail:], offset + tail, is_copy=True),
    )


def _translate(
    whole: str, offset: int, depth: int, *, is_label: bool = False
) -> tuple[Piece, ...] | None:
    """Translate the text that stands at ``offset`` of the original."""
    text = whole.strip()
    if depth == 0 or not _LATIN_WORD.search(text) or _is_quoted(text):
        return None
    head = whole.index(text)
    if is_label and (chinese := _terms().get(text)) is not None:
        pieces = (Piece(chinese, offset + head, is_copy=False),)
    else:
        at = offset + head
        pieces = (
            _fill_template(text, at, depth, is_free=True)
            or _translate_parts(text, at, depth, is_label=is_label)
            or _fill_template(text, at, depth, is_free=False)
        )
    if pieces is None:
        return None
    tail = head + len(text)
    return (
        Piece(whole[:head], offset, is_copy=True),
        *pieces,
        Piece(whole[tail:], offset + tail, is_copy=True),
    )


def _fill_template(
    text: str, offset: int, depth: int, *, is_free: bool
) -> tuple[Piece, ...] | None:
    """Fill a template that fits; those that say little by themselves come after all else."""
    exact, *templates = _catalogue()
    flat = text if "\n" not in text else " ".join(text.split())
    if (chinese := exact.get(text) or exact.get(flat)) is not None:
        return (Piece(chinese, offset, is_copy=False),)
    for template in templates[0 if is_free else 1]:
        if template.longest not in text or (spans := _match(template, text)) is None:
            continue
        pieces: list[Piece] = []
        at = offset
        for part in template.chinese:
            if isinstance(part, str):
                pieces.append(Piece(part, at, is_copy=False))
                continue
            start, end = spans[part]
            value = text[start:end]
            if (word := _words().get(value.strip())) is not None:
                inner = _framed(value, word, offset + start)
            else:
                inner = _translate(value, offset + start, depth - 1)
            pieces += inner or (Piece(value, offset + start, is_copy=True),)
            at = offset + end
        return tuple(pieces)
    return None


def _match(template: _Template, text: str) -> list[tuple[int, int]] | None:
    """Where the values of the template stand in the text; None where it does not fit."""
    first, *middle, last = template.literals
    if not text.startswith(first) or not text.endswith(last):
        return None
    spans: list[tuple[int, int]] = []
    start, limit = len(first), len(text) - len(last)
    for literal in middle:
        end = text.find(literal, start, limit) if literal else start
        if end < 0:
            return None
        spans.append((start, end))
        start = end + len(literal)
    spans.append((start, limit))
    return spans if start <= limit and _may_hold(template, text, spans) else None


def _may_hold(template: _Template, text: str, spans: list[tuple[int, int]]) -> bool:
    """Whether these are values of one text, not texts of several."""
    if not template.literals[0] and _OPENING.match(text[slice(*spans[0])]):
        return False
    is_many_lines = any("\n" in literal for literal in template.literals)
    for before, (start, end) in zip(template.literals, spans, strict=False):
        value = text[start:end]
        if is_many_lines:
            continue
        if _BEFORE_COPIES in template.literals and "\n" not in value:
            continue
        if _PARTED.search(value) or (value[:1] == " " and _LATIN_WORD.search(value)):
            return False
        if before.endswith(_BEFORE_MESSAGES):
            continue
        if template.letters < _FREE_ANYWHERE and _MESSAGE.search(value):
            return False
        if template.letters < _FREE_LISTS and ", " in value:
            return False
    return template.is_free or all(_is_small(text[start:end]) for start, end in spans)


def _is_small(value: str) -> bool:
    """A figure, a name, two or three words: no sentence that happens to hold an ``of``."""
    return (
        len(value) <= _SHORT and len(value.split()) <= _FEW_WORDS and not _NOT_SMALL.search(value)
    )


def _translate_parts(
    text: str, offset: int, depth: int, *, is_label: bool
) -> tuple[Piece, ...] | None:
    if "\n" not in text and _COMMAND.search(text):
        return None
    if (mark := _MARK.match(text)) and not _PARTED.search(text):
        rest = _translate(text[mark.end() :], offset + mark.end(), depth, is_label=is_label)
        return None if rest is None else (Piece(mark.group(), offset, is_copy=True), *rest)
    if (tail := _TAIL.search(text)) and tail.start():
        rest = _translate(text[: tail.start()], offset, depth, is_label=is_label)
        last = Piece(tail.group(), offset + tail.start(), is_copy=True)
        return None if rest is None else (*rest, last)
    for separator, mark in _SEPARATORS:
        cut = separator.search(text)
        if cut is None or cut.end() == len(text):
            continue
        first = text[: cut.start()]
        if mark == "；" and (word := _words().get(first)) is not None:
            before = _framed(first, word, offset)
        else:
            before = _translate(first, offset, depth, is_label=is_label)
        if before is None and mark in {"，", "；", "。"}:
            continue
        # Parts beside each other do not nest: many lines are no deeper than one.
        after = _translate(text[cut.end() :], offset + cut.end(), depth, is_label=is_label)
        if before is None and after is None:
            continue
        if mark == "，" and after is None:
            continue
        between = cut.group() if mark is None or before is None else mark
        return (
            *(before or (Piece(text[: cut.start()], offset, is_copy=True),)),
            Piece(between, offset + cut.start(), is_copy=mark is None),
            *(after or (Piece(text[cut.end() :], offset + cut.end(), is_copy=True),)),
        )
    return None


def _is_quoted(text: str) -> bool:
    """Words of others: what stands in quotes is shown as it is."""
    return len(text) > 1 and text[0] in "'\"`" and text[-1] == text[0] and text[0] not in text[1:-1]


@cache
def _catalogue() -> tuple[dict[str, str], list[_Template], list[_Template]]:
    """Texts without values, templates that say enough by themselves, and others: the most specific first."""
    exact: dict[str, str] = {}
    templates: list[_Template] = []
    for path in sorted(Path(__file__).with_name("zh").glob("*.json")):
        if path.stem in {"hidden", "terms", "words"}:
            continue
        for english, chinese in _read(path.stem).items():
            if not chinese:
                continue
            if _FIELD.search(english):
                templates.append(_template(english, chinese))
            elif " " in english:
                exact[english] = chinese
    templates.sort(key=lambda item: (-item.letters, -sum(map(len, item.literals))))
    free = [template for template in templates if template.is_free]
    return exact, free, [template for template in templates if not template.is_free]


def _template(english: str, chinese: str) -> _Template:
    literals = tuple(_FIELD.split(english)[::2])
    parts = _FIELD.split(chinese)
    letters = sum(len(re.sub(r"[^A-Za-z]", "", literal)) for literal in literals)
    return _Template(
        literals=literals,
        chinese=tuple(int(part) if i % 2 else part for i, part in enumerate(parts)),
        letters=letters,
        longest=max(literals, key=len),
        is_free=letters >= (_FREE if literals[0] else _FREE_INSIDE)
        or literals[0].endswith(_BEFORE_MESSAGES)
        or _BEFORE_COPIES in literals
        or "\n" in english,
    )


@cache
def _terms() -> dict[str, str]:
    """Single words of headings and labels."""
    return _read("terms")


@cache
def _words() -> dict[str, str]:
    """Words of ours that enter other texts as values: states, parts of the data."""
    return _read("words")


def _read(name: str) -> dict[str, str]:
    path = Path(__file__).with_name("zh") / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))
