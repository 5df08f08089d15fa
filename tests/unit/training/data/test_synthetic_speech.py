import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile

from yunlu.core.errors import DataError, MissingPartError
from yunlu.training.data.synthetic import (
    DIGITS,
    SAMPLE_RATE,
    SPLITS,
    WORDS,
    Clip,
    add_noise,
    find_espeak,
    make_folder,
    plan_digits,
    plan_words,
    write_clips,
)

needs_espeak = pytest.mark.skipif(
    shutil.which("espeak-ng") is None,
    reason="espeak-ng is not installed (apt-get install espeak-ng)",
)
FEW = [
    Clip(path=f"{part}/{word}/a.wav", text=word, voice="en-us+f1", speed=150, pitch=50)
    for part in ("train", "test")
    for word in ("yes", "no")
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path))
    return tmp_path / "synthetic"


@pytest.mark.parametrize("plan", [plan_words, plan_digits])
def test_the_plan_is_the_same_for_the_same_seed(plan: object) -> None:
    assert plan(1) == plan(1)  # pyright: ignore[reportCallIssue]
    assert plan(1) != plan(2)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("plan", [plan_words, plan_digits])
def test_nobody_speaks_in_two_parts_nor_at_the_same_speed_and_pitch(plan: object) -> None:
    clips: list[Clip] = plan(0)  # pyright: ignore[reportCallIssue]
    by_part = {part.name: [c for c in clips if c.path.startswith(part.name)] for part in SPLITS}

    assert len({clip.path for clip in clips}) == len(clips)
    for held_out in ("validation", "test"):
        for trait in ("voice", "speed", "pitch"):
            heard = {getattr(clip, trait) for clip in by_part["train"]}
            assert heard.isdisjoint(getattr(clip, trait) for clip in by_part[held_out])


def test_every_word_is_as_frequent_as_every_other() -> None:
    for part in SPLITS:
        counts = Counter(clip.text for clip in plan_words(0) if clip.path.startswith(part.name))
        assert set(counts) == set(WORDS)
        assert len(set(counts.values())) == 1


def test_digits_come_in_strings_of_two_to_four() -> None:
    texts = [clip.text.split() for clip in plan_digits(0)]

    assert {len(words) for words in texts} == {2, 3, 4}
    assert {word for words in texts for word in words} == set(DIGITS)


def test_noise_and_silence_leave_the_speech_well_above_them() -> None:
    speech = np.sin(np.arange(4000)).astype("f4")

    rough = add_noise(speech, np.random.default_rng(0))

    assert 0.02 * SAMPLE_RATE * 2 <= len(rough) - len(speech) <= 0.15 * SAMPLE_RATE * 2
    assert np.abs(rough).max() <= 1
    quiet = rough[:150]
    assert 0 < quiet.std() < 0.3 * rough[2000:3000].std()


@pytest.mark.speech
@needs_espeak
def test_the_same_clips_are_made_byte_for_byte(tmp_path: Path) -> None:
    for copy in ("one", "other"):
        write_clips(tmp_path / copy, FEW, seed=3, program=find_espeak())

    for clip in FEW:
        one, other = (tmp_path / copy / clip.path for copy in ("one", "other"))
        assert one.read_bytes() == other.read_bytes()
        info = soundfile.info(one)
        assert (info.samplerate, info.channels) == (SAMPLE_RATE, 1)
        assert 0.2 < info.duration < 2


@pytest.mark.speech
@needs_espeak
def test_every_voice_sounds_different(tmp_path: Path) -> None:
    """espeak-ng answers an unknown variant with its usual voice, and says nothing."""
    voices = [voice for part in SPLITS for voice in part.voices]
    clips = [
        Clip(path=f"{number}.wav", text="down", voice=voice, speed=150, pitch=50)
        for number, voice in enumerate(voices)
    ]
    write_clips(tmp_path, clips, seed=0, program=find_espeak())

    durations = [soundfile.info(tmp_path / clip.path).frames for clip in clips]
    sounds = {(tmp_path / clip.path).read_bytes() for clip in clips}
    assert len(sounds) == len(voices) == len(set(voices))
    assert min(durations) > 0.2 * SAMPLE_RATE


@pytest.mark.speech
@needs_espeak
def test_two_concurrent_generators_leave_one_complete_copy(cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(make_folder, "few", FEW, seed=0, with_transcripts=False) for _ in range(2)
        ]
        folders = {task.result() for task in made}

    assert len(folders) == 1
    assert [path.name for path in cache.iterdir()] == [folders.pop().name]
    assert len(list(cache.rglob("*.wav"))) == len(FEW)


@pytest.mark.speech
@needs_espeak
def test_a_copy_made_before_is_used_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = [Clip(path="train/1.wav", text="one two", voice="en+m1", speed=150, pitch=50)]
    made = make_folder("few", clips, seed=0, with_transcripts=True)
    monkeypatch.setenv("PATH", "")  # espeak-ng is gone

    assert make_folder("few", clips, seed=0, with_transcripts=True) == made
    assert (made / "train/transcripts.tsv").read_text() == "file\ttext\n1.wav\tone two\n"


def test_without_espeak_the_user_is_told_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(MissingPartError, match="espeak-ng") as found:
        make_folder("few", FEW, seed=0, with_transcripts=False)

    assert found.value.hint == "apt-get install espeak-ng"


def test_a_synthesiser_that_fails_leaves_nothing_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "espeak-ng"
    program.write_text("#!/bin/sh\necho no such voice >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(DataError, match="no such voice"):
        make_folder("few", FEW, seed=0, with_transcripts=False)

    assert list(cache.iterdir()) == []
