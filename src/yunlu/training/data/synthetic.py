"""Synthetic data sets: ``synthetic:NAME``, the same on every machine, no download.

Synthetic speech by espeak-ng: keywords, and digit strings with transcripts.
Validation and test use voices, speeds and pitches that do not occur in training: a model
that memorises its clips fails on them.
"""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from yunlu.core.errors import DataError, MissingPartError, did_you_mean
from yunlu.core.files import make_directory, write_atomically
from yunlu.core.settings import read_settings
from yunlu.training.data.audio import read_audio
from yunlu.training.data.table import DataTable

if TYPE_CHECKING:
    from collections.abc import Sequence

Generator = Callable[[int], DataTable | Path]
"""Takes a seed; returns the table, or the file or folder it wrote (below ``Settings.cache``)."""

GENERATORS: dict[str, Generator] = {}
SYNTHETIC_SEED = 20250101
"""Fixed: a synthetic data set does not depend on the job's seed."""

# Module of each name; imported on demand, since some generators need more packages.
_MODULES = {
    "films": __name__,
    "reviews": "yunlu.training.data.synthetic",
    "dates": "yunlu.training.data.synthetic",
    "python-docs": "yunlu.training.data.synthetic",
    "spoken-words": "yunlu.training.data.synthetic",
    "spoken-digits": "yunlu.training.data.synthetic",
}


def generator_of(name: str) -> Callable[[Generator], Generator]:
    """Register a generator under ``synthetic:NAME``."""

    def register(generator: Generator) -> Generator:
        GENERATORS[name] = generator
        return generator

    return register


def generate(name: str) -> DataTable | Path:
    """Generate the data set of that name."""
    if name not in GENERATORS and name in _MODULES:
        importlib.import_module(_MODULES[name])
    if name not in GENERATORS:
        raise DataError(
            f"There is no synthetic data set named {name!r}",
            hint=did_you_mean(name, _MODULES.keys() | GENERATORS.keys()),
        )
    return GENERATORS[name](SYNTHETIC_SEED)


@generator_of("films")
def generate_ratings(seed: int) -> DataTable:
    """Film ratings from 1 to 5 by users with latent tastes.

    A rating is the sum of a mean, a user bias, an item bias, the agreement of five-dimensional user
    tastes and film traits (the largest part), and noise of 0.4 stars. Popularity is uneven: some
    films are rated by many.
    """
    users, items, ratings, taste_dims = 400, 240, 16_000, 5
    rng = np.random.default_rng(seed)
    taste, trait = rng.normal(size=(users, taste_dims)), rng.normal(size=(items, taste_dims))
    mood, quality = rng.normal(0, 0.3, users), rng.normal(0, 0.4, items)
    fame = rng.dirichlet(np.full(items, 2.0))
    # A user rates a film once: the top of (log popularity + Gumbel noise) samples without replacement.
    keys = np.log(fame)[None, :] + rng.gumbel(size=(users, items))
    pairs = np.sort(np.argpartition(-keys, ratings // users, axis=1)[:, : ratings // users])
    user, item = np.repeat(np.arange(users), ratings // users), pairs.reshape(-1)
    agreement = (taste[user] * trait[item]).sum(axis=1) / np.sqrt(taste_dims)
    stars = 3.2 + mood[user] + quality[item] + 0.9 * agreement + rng.normal(0, 0.4, len(user))
    order = rng.permutation(len(user))
    rating = np.clip(np.round(stars * 2) / 2, 1, 5).astype(np.float32)
    return DataTable(
        {
            "user": [f"u{number:03d}" for number in user[order].tolist()],
            "item": [f"film-{number:03d}" for number in item[order].tolist()],
            "rating": rating[order],
        }
    )


SAMPLE_RATE = 8000
WORDS = ("yes", "no", "up", "down", "left", "right", "stop", "go")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# A change of voices, words, noise or layout is a new version: old copies are never mixed with it.
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSplit:
    """Voices, speeds and pitches of one split."""

    name: str
    voices: tuple[str, ...]
    """espeak-ng's ``language+variant``."""
    speeds: tuple[int, ...]
    """Words per minute."""
    pitches: tuple[int, ...]
    """0 to 99."""
    takes: int
    """Repetitions of each word by each voice."""
    utterances: int
    """Number of digit strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One clip to synthesise; ``path`` is relative to the data set."""

    path: str
    text: str
    voice: str
    speed: int
    pitch: int


SPLITS = (
    SpeechSplit(
        name="train",
        voices=(
            "en-us+m1", "en-us+m2", "en-us+m4", "en-us+m7", "en-us+f1", "en-us+f3", "en-us+f4",
            "en+m3", "en+m8", "en+f1", "en+f2", "en-gb-x-rp+m5", "en-gb-x-rp+f5",
            "en-029+m3",
        ),
        speeds=(130, 145, 160, 175),
        pitches=(25, 40, 50, 65),
        takes=4,
        utterances=480,
    ),
    SpeechSplit(
        name="validation",
        voices=("en-us+m8", "en+f3", "en+m4"),
        speeds=(138, 168),
        pitches=(35, 55),
        takes=3,
        utterances=60,
    ),
    SpeechSplit(
        name="test",
        voices=("en-us+f2", "en-us+m3", "en+m1", "en+f4"),
        speeds=(135, 152, 170),
        pitches=(30, 45, 60),
        takes=5,
        utterances=120,
    ),
)  # fmt: skip


@generator_of("spoken-words")
def generate_spoken_words(seed: int) -> Path:
    """Eight words, one per clip, in folders named after them."""
    return make_folder("spoken-words", plan_words(seed), seed=seed, with_transcripts=False)


@generator_of("spoken-digits")
def generate_spoken_digits(seed: int) -> Path:
    """Two to four digits per clip, with a file of transcripts beside them."""
    return make_folder("spoken-digits", plan_digits(seed), seed=seed, with_transcripts=True)


def plan_words(seed: int) -> list[Clip]:
    """Clips of every word by every voice, at random speeds and pitches of the split."""
    rng = np.random.default_rng(seed)
    return [
        Clip(
            path=f"{split.name}/{word}/{voice.replace('+', '-')}-{take}.wav",
            text=word,
            voice=voice,
            speed=int(rng.choice(split.speeds)),
            pitch=int(rng.choice(split.pitches)),
        )
        for split in SPLITS
        for voice in split.voices
        for word in WORDS
        for take in range(split.takes)
    ]


def plan_digits(seed: int) -> list[Clip]:
    """Clips of digit strings, each by a random voice of the split."""
    rng = np.random.default_rng(seed)
    return [
        Clip(
            path=f"{split.name}/{number:04d}.wav",
            text=" ".join(rng.choice(DIGITS, size=int(rng.integers(2, 5)))),
            voice=str(rng.choice(split.voices)),
            speed=int(rng.choice(split.speeds)),
            pitch=int(rng.choice(split.pitches)),
        )
        for split in SPLITS
        for number in range(split.utterances)
    ]


def make_folder(name: str, clips: Sequence[Clip], *, seed: int, with_transcripts: bool) -> Path:
    """Write all clips to a temporary folder and publish it by one rename; reuses an existing copy."""
    final = read_settings().cache / "synthetic" / f"{name}-v{_VERSION}"
    if final.is_dir():
        return final
    program = find_espeak()
    make_directory(final.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=final.parent))
    try:
        write_clips(aside, clips, seed=seed, program=program)
        if with_transcripts:
            _write_transcripts(aside, clips)
        try:
            aside.rename(final)
        except OSError:
            # Another process was first, with the same content: use its copy.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def find_espeak() -> str:
    """The path of espeak-ng, or how to install it."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise MissingPartError(
            "Synthetic speech needs the program espeak-ng, which is not installed.",
            hint="apt-get install espeak-ng",
        )
    return program


def write_clips(directory: Path, clips: Sequence[Clip], *, seed: int, program: str) -> None:
    """Write each clip as a WAV file."""
    for folder in {(directory / clip.path).parent for clip in clips}:
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        # The noise is seeded by the clip's number: the order of threads does not matter.
        tasks = [
            pool.submit(
                _write_clip, directory, clip, np.random.default_rng((seed, number)), program
            )
            for number, clip in enumerate(clips)
        ]
        for task in tasks:
            task.result()


def _write_transcripts(directory: Path, clips: Sequence[Clip]) -> None:
    """Write one sheet of file names and texts for each split."""
    sheets: dict[Path, list[str]] = {}
    for clip in clips:
        path = directory / clip.path
        sheets.setdefault(path.parent, ["file\ttext"]).append(f"{path.name}\t{clip.text}")
    for folder, lines in sheets.items():
        (folder / "transcripts.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_clip(directory: Path, clip: Clip, rng: np.random.Generator, program: str) -> None:
    import soundfile  # noqa: PLC0415 - loads a C library; only sounds need it

    path = directory / clip.path
    _speak(clip, path, program)
    wave, _ = read_audio(str(path), sample_rate=SAMPLE_RATE)
    soundfile.write(path, add_noise(wave.numpy(), rng), SAMPLE_RATE, subtype="PCM_16")


def _speak(clip: Clip, path: Path, program: str) -> None:
    command = [program, "-v", clip.voice, "-s", str(clip.speed), "-p", str(clip.pitch)]
    try:
        completed = subprocess.run(  # noqa: S603 - a fixed program and arguments of our own
            [*command, "-w", str(path), clip.text], capture_output=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"espeak-ng took more than a minute to speak {clip.text!r}") from error
    if completed.returncode or not path.is_file():
        reason = completed.stderr.decode(errors="replace").strip()
        raise DataError(
            f"espeak-ng cannot speak {clip.text!r} as {clip.voice}: {reason or 'no sound'}",
            hint="apt-get install --reinstall espeak-ng espeak-ng-data",
        )


def add_noise(wave: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Vary the loudness, pad with silence, add white noise."""
    loudness = rng.uniform(0.2, 0.8) / max(float(np.abs(wave).max()), 1e-4)
    before, after = (int(SAMPLE_RATE * rng.uniform(0.02, 0.15)) for _ in range(2))
    speech = np.pad(wave * loudness, (before, after))
    decibels = rng.uniform(15, 30)
    noise = rng.normal(0, np.sqrt(np.mean(speech**2) / 10 ** (decibels / 10)), len(speech))
    return np.clip(speech + noise, -1, 1).astype(np.float32)


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
