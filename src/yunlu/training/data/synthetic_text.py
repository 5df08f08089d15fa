"""Synthetic texts: reviews and dates; and Python's own documentation."""

from __future__ import annotations

import datetime
import platform
import random
from typing import TYPE_CHECKING

from yunlu.core.errors import DataError
from yunlu.core.files import write_atomically
from yunlu.core.private_files import make_directory
from yunlu.core.settings import read_settings
from yunlu.training.data.synthetic import generator_of
from yunlu.training.data.table import DataTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_REVIEWS = 6000
_DATES = 10_000

_PRODUCTS = (
    "lamp", "kettle", "backpack", "keyboard", "phone", "tent", "blender", "camera", "printer", "chair",
    "watch", "bicycle", "radio", "toaster", "jacket", "desk", "heater", "speaker", "knife", "suitcase",
)  # fmt: skip
_ASPECTS = (
    "handle", "finish", "battery", "manual", "weight", "colour", "sound", "build", "delivery", "price",
    "packaging", "cable", "design", "support", "display", "switch", "lid", "fabric", "motor", "app",
)  # fmt: skip
_GOOD = (
    "good",
    "great",
    "lovely",
    "solid",
    "reliable",
    "superb",
    "handy",
    "pleasant",
    "impressive",
    "sturdy",
)
_BAD = (
    "bad",
    "awful",
    "flimsy",
    "useless",
    "noisy",
    "terrible",
    "clumsy",
    "ugly",
    "disappointing",
    "weak",
)
_DEGREES = ("", "", "really ", "very ", "quite ", "surprisingly ")
_OPENERS = (
    "",
    "",
    "bought it last month: ",
    "a week in, ",
    "honest opinion: ",
    "after some use, ",
    "as a gift, ",
)
_CLOSERS = (
    "",
    "",
    " that is my {product}.",
    " typical {product}.",
    " five people share this {product}.",
    " it is my second {product}.",
)
_BOTH = (" and ", ", and ", "; also, ")
_CONTRAST = (", but ", ", yet ", "; still, ")


@generator_of("reviews")
def generate_reviews(seed: int) -> DataTable:
    """Product reviews of three sentiments, for which counting good and bad words is not enough.

    Half of the clauses are negated ("not bad at all"), and after a contrast
    the second clause decides. Sentences are unique, so train and test do not overlap.
    """
    rng = random.Random(seed)  # noqa: S311 - data, not secrets
    moods: dict[str, Callable[[random.Random], str]] = {
        "negative": lambda rng: _opinion(rng, good=False),
        "neutral": _shrug,
        "positive": lambda rng: _opinion(rng, good=True),
    }
    examples: dict[str, str] = {}
    while len(examples) < _REVIEWS:
        mood = rng.choice(list(moods))
        product = rng.choice(_PRODUCTS)
        closer = rng.choice(_CLOSERS).format(product=product)
        sentence = f"{rng.choice(_OPENERS)}{moods[mood](rng)}.{closer}"
        examples.setdefault(sentence, mood)
    return DataTable({"label": list(examples.values()), "text": list(examples)})


def _opinion(rng: random.Random, *, good: bool) -> str:
    first, second = rng.sample(_ASPECTS, 2)
    contrast = rng.random() < 0.25
    link = rng.choice(_CONTRAST if contrast else _BOTH)
    return _clause(rng, first, good=good != contrast) + link + _clause(rng, second, good=good)


def _clause(rng: random.Random, aspect: str, *, good: bool) -> str:
    if rng.random() < 0.7:
        word = rng.choice(_GOOD if good else _BAD)
        return f"the {aspect} is {rng.choice(_DEGREES)}{word}"
    word = rng.choice(_BAD if good else _GOOD)
    return rng.choice(
        (
            f"the {aspect} is not {word} at all",
            f"the {aspect} is anything but {word}",
            f"nobody would call the {aspect} {word}",
            f"there is nothing {word} about the {aspect}",
        )
    )


def _shrug(rng: random.Random) -> str:
    first, second = rng.sample(_ASPECTS, 2)
    good, bad = rng.choice(_GOOD), rng.choice(_BAD)
    one, other = (good, bad) if rng.random() < 0.5 else (bad, good)
    clauses = [
        f"the {first} is neither {one} nor {other}",
        rng.choice(
            (
                f"some call the {second} {one}, others {other}",
                f"the {second} is as {one} as it is {other}",
                f"the {second} is what you would expect",
            )
        ),
    ]
    rng.shuffle(clauses)
    return rng.choice(_BOTH).join(clauses)


_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_FIRST, _LAST = datetime.date(1950, 1, 1), datetime.date(2049, 12, 31)


@generator_of("dates")
def generate_dates(seed: int) -> DataTable:
    """Dates in many written forms, and in ISO 8601; numeric forms are day.month.year."""
    rng = random.Random(seed)  # noqa: S311 - data, not secrets
    span = (_LAST - _FIRST).days
    examples: dict[str, str] = {}
    while len(examples) < _DATES:
        date = _FIRST + datetime.timedelta(days=rng.randint(0, span))
        examples.setdefault(_write_date(rng, date), date.isoformat())
    return DataTable({"source": list(examples), "target": list(examples.values())})


def _write_date(rng: random.Random, date: datetime.date) -> str:
    day, month, year = date.day, _MONTHS[date.month - 1], date.year
    weekday, short = _DAYS[date.weekday()], month[:3]
    ordinal = f"{day}{_ending(day)}"
    forms = (
        f"{day} {month} {year}",
        f"{month} {day}, {year}",
        f"{weekday}, {month} {day}, {year}",
        f"{weekday[:3]} {day} {short} {year}",
        f"the {ordinal} of {month} {year}",
        f"{month} {ordinal} {year}",
        f"{day}-{short}-{year}",
        f"{day} {short} '{year % 100:02d}",
        f"{day}.{date.month}.{year}",
        f"{date:%d.%m.%Y}",
        f"{date:%Y/%m/%d}",
        f"{date:%Y%m%d}",
        f"{year}年{date.month}月{day}日",
    )
    text = rng.choice(forms)
    return rng.choice((text, text, text.lower(), text.upper()))


def _ending(day: int) -> str:
    if day in {11, 12, 13}:
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


@generator_of("python-docs")
def generate_python_docs(seed: int) -> Path:  # noqa: ARG001 - not random
    """The language reference in CPython's ``help()``: half a megabyte of real prose."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - some distributions leave it out
    except ImportError as error:
        raise DataError(
            "synthetic:python-docs: this Python comes without the texts of help().",
            hint="install Python's documentation package, or use your own text file",
        ) from error
    text = "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"
    path = read_settings().cache / f"python-docs-{platform.python_version()}.txt"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        make_directory(path.parent)
        write_atomically(path, text)
    return path
