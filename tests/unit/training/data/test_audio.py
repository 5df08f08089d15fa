import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from yunlu.core.errors import DataError
from yunlu.training.data.audio import (
    AudioFeatures,
    LogMel,
    LogMelFrontEnd,
    WaveformFrontEnd,
    measure,
    mel_filters,
    read_audio,
    resample,
)
from yunlu.training.data.table import AudioRef


def tone(hertz: float, *, rate: int = 8000, seconds: float = 0.5) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype("f4")


def write_wav(path: Path, wave: np.ndarray, rate: int = 8000) -> AudioRef:
    soundfile.write(path, wave, rate)
    return AudioRef(str(path))


@pytest.mark.parametrize("rate", [8000, 16_000])
@pytest.mark.parametrize("hertz", [200.0, 1000.0, 3000.0])
def test_a_pure_tone_is_loudest_in_the_band_around_it(hertz: float, rate: int) -> None:
    frames = LogMel(rate)(torch.from_numpy(tone(hertz, rate=rate)))

    def mel(frequency: float) -> float:
        return 2595 * np.log10(1 + frequency / 700)

    step = (mel(rate / 2) - mel(20)) / 41
    expected = (
        mel(hertz) - mel(20)
    ) / step - 1  # centres lie one step apart, the first one step up
    loudest = frames[10:-10].argmax(dim=1).float()
    assert (loudest - expected).abs().max() <= 0.75


def test_a_frame_is_the_logarithm_of_the_filtered_spectrum_of_its_window() -> None:
    transform = LogMel(8000)
    wave = np.random.default_rng(0).normal(size=4000).astype("f4")
    middle = 20 * transform.hop
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200)
    spectrum = np.fft.rfft(wave[middle - 100 : middle + 100] * window, n=transform.bins)
    power = np.abs(spectrum) ** 2 / np.sum(window**2)
    filters = mel_filters(8000, bands=40, bins=transform.bins // 2 + 1).numpy()

    frame = transform(torch.from_numpy(wave))[20]

    np.testing.assert_allclose(frame.numpy(), np.log(power @ filters + 1e-6), rtol=1e-3, atol=1e-3)


def test_white_noise_has_its_power_in_every_band() -> None:
    wave = torch.from_numpy(np.random.default_rng(0).normal(0, 0.1, 80_000).astype("f4"))
    transform = LogMel(8000)
    widths = mel_filters(8000, bands=40, bins=transform.bins // 2 + 1).sum(dim=0)

    power = transform(wave).exp().mean(dim=0) / widths

    np.testing.assert_allclose(power.numpy(), 0.01, rtol=0.15)


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 44_100])
def test_every_band_hears_something(rate: int) -> None:
    filters = mel_filters(rate, bands=40, bins=LogMel(rate).bins // 2 + 1)

    assert (filters.sum(dim=0) > 0.5).all()
    assert float(filters.min()) >= 0
    assert float(filters.max()) <= 1


@pytest.mark.parametrize("length", [1, 79, 80, 8000])
def test_a_sound_of_any_length_gives_a_frame_per_ten_milliseconds(length: int) -> None:
    assert LogMel(8000)(torch.zeros(length)).shape == (1 + length // 80, 40)


def test_channels_are_mixed_and_the_rate_is_kept_where_none_is_asked(tmp_path: Path) -> None:
    left, right = tone(440), np.zeros(4000, dtype="f4")
    ref = write_wav(tmp_path / "stereo.wav", np.stack([left, right], axis=1))

    wave, rate = read_audio(ref)

    assert rate == 8000
    np.testing.assert_allclose(wave.numpy(), left / 2, atol=1e-4)


def test_flac_and_bytes_are_read_as_well_as_wav_files(tmp_path: Path) -> None:
    wave = tone(440)
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, 8000, format="FLAC")

    read, rate = read_audio(AudioRef("inline.flac", buffer.getvalue()))

    assert rate == 8000
    np.testing.assert_allclose(read.numpy(), wave, atol=1e-4)


@pytest.mark.parametrize(("rate", "wanted"), [(16_000, 8000), (8000, 16_000), (22_050, 8000)])
def test_resampling_keeps_a_tone_and_its_loudness(rate: int, wanted: int) -> None:
    changed = resample(tone(440, rate=rate), rate, wanted)

    expected = tone(440, rate=wanted)
    assert abs(len(changed) - len(expected)) <= 1
    middle = slice(500, 3000)
    np.testing.assert_allclose(changed[middle], expected[middle], atol=0.01)


def test_resampling_removes_what_the_lower_rate_cannot_hold() -> None:
    changed = resample(tone(7000, rate=16_000), 16_000, 8000)

    assert np.abs(changed[200:-200]).max() < 0.02


@pytest.mark.parametrize("content", [b"", b"this is no sound at all", b"RIFF\x00\x00\x00\x00WAVE"])
def test_a_file_that_is_no_sound_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.wav"
    path.write_bytes(content)

    with pytest.raises(DataError, match=r"broken\.wav"):
        read_audio(AudioRef(str(path)))


def test_a_sound_without_samples_or_with_nan_is_named(tmp_path: Path) -> None:
    empty = write_wav(tmp_path / "empty.wav", np.zeros(0, dtype="f4"))
    with pytest.raises(DataError, match=r"empty\.wav holds no sound"):
        read_audio(empty)
    path = tmp_path / "nan.wav"
    soundfile.write(path, np.array([0.0, np.nan], dtype="f4"), 8000, subtype="FLOAT")
    with pytest.raises(DataError, match=r"nan\.wav.*not finite"):
        read_audio(AudioRef(str(path)))


def test_arrays_need_a_rate_and_files_must_be_files() -> None:
    assert read_audio(tone(440), sample_rate=8000)[1] == 8000
    with pytest.raises(DataError, match="no sample rate"):
        read_audio(tone(440))
    with pytest.raises(DataError, match="sound file was expected"):
        read_audio(3.5)


def test_sounds_beyond_the_limit_are_computed_when_asked_for(tmp_path: Path) -> None:
    refs = [write_wav(tmp_path / f"{hertz}.wav", tone(hertz)) for hertz in (300, 600, 900)]
    front = LogMelFrontEnd(8000)

    whole, part = AudioFeatures(refs, front), AudioFeatures(refs, front, limit_bytes=1)

    assert (len(whole.cached), len(part.cached), len(part)) == (3, 1, 3)
    for row in range(3):
        assert torch.equal(whole[row], part[row])


def test_features_are_normalised_by_the_training_sounds() -> None:
    features = [torch.randn(50, 40) * 3 + 7, torch.randn(20, 40) * 3 + 7]
    front = LogMelFrontEnd(8000)
    front.learn(features)

    frames = torch.cat([front.normalise(sound) for sound in features])

    torch.testing.assert_close(frames.mean(dim=0), torch.zeros(40), atol=1e-5, rtol=0)
    torch.testing.assert_close(frames.std(dim=0, correction=0), torch.ones(40))


def test_a_band_that_never_changes_is_not_blown_up() -> None:
    _, deviation = measure([torch.full((10, 2), 3.0)])

    assert deviation == [1.0, 1.0]


def test_waves_come_at_one_loudness_and_silence_stays_finite() -> None:
    front = WaveformFrontEnd(16_000)

    loud = front.transform(torch.from_numpy(tone(440)) * 0.01)

    assert float(loud.std()) == pytest.approx(1, abs=0.01)
    assert front.transform(torch.zeros(100)).abs().max() == 0
