"""Synthetic speech by espeak-ng: keywords, and digit strings with transcripts.

Validation and test use voices, speeds and pitches that do not occur in training: a model
that memorises its clips fails on them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from yunlu.core.errors import DataError, MissingPartError
from yunlu.core.private_files import make_directory
from yunlu.core.settings import read_settings
from yunlu.training.data.audio import read_audio
from yunlu.training.data.synthetic import generator_of

if TYPE_CHECKING:
    from collections.abc import Sequence

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
