"""Audio as tensors: decoding, mixing to mono, resampling, log-mel features."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from yunlu.core.errors import DataError, missing_part
from yunlu.core.limits import check_sample_rate, over_limit, read_limits
from yunlu.training.data.table import FileRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.training.data.table import Column

# Shapes: S samples of sound, T frames, F mel bands, K frequency bins of a spectrum.

FRAMES_PER_SECOND = 100
MEL_BANDS = 40
MEMORY_LIMIT_BYTES = 512 * 2**20
"""Features of one split are cached up to this size; others are computed on demand."""
_WINDOW_S = 0.025
_FLOOR = 1e-6
"""Floor of the power: keeps the logarithm finite."""


class LogMel:
    """Log-mel spectrogram: 25 ms Hann windows every 10 ms, triangular bands even on the mel scale."""

    def __init__(self, sample_rate: int, bands: int = MEL_BANDS) -> None:
        self.sample_rate, self.bands = sample_rate, bands
        self.hop = max(1, sample_rate // FRAMES_PER_SECOND)
        window = max(2, round(sample_rate * _WINDOW_S))
        # Twice the window: the bin spacing is below the narrowest band.
        self.bins = 2 ** math.ceil(math.log2(2 * window))
        self._window = torch.hann_window(window)
        self._filters = mel_filters(sample_rate, bands=bands, bins=self.bins // 2 + 1)

    def __call__(self, wave: Tensor) -> Tensor:
        """Frames ``(T, F)``, one per hop begun, of a mono wave in -1..1."""
        spectrum = torch.stft(
            wave,
            self.bins,
            hop_length=self.hop,
            win_length=len(self._window),
            window=self._window,
            pad_mode="constant",
            return_complex=True,
        )
        # Normalised by the window's energy: white noise of power p has p in every bin.
        power = spectrum.abs().square() / self._window.square().sum()
        return torch.log(power.T @ self._filters + _FLOOR)


class LogMelFrontEnd:
    """Front end: log-mel frames ``(T, F)``, each band normalised over the training data."""

    per_second = FRAMES_PER_SECOND

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.transform = LogMel(sample_rate)
        self._mean = self._deviation = torch.zeros(self.transform.bands)

    def learn(self, features: Sequence[Tensor]) -> None:
        """Fit the statistics on the training data."""
        self.restore(*measure(features))

    def restore(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        """Take statistics that were fitted before."""
        self._mean, self._deviation = torch.tensor(mean), torch.tensor(deviation)

    def normalise(self, features: Tensor) -> Tensor:
        """Normalise to mean 0 and deviation 1 over the training data."""
        return (features - self._mean) / self._deviation

    def describe(self) -> dict[str, Any]:
        """Settings of the front end, for the export."""
        return {
            "input": "log-mel",
            "sample_rate": self.sample_rate,
            "hop": self.transform.hop,
            "bins": self.transform.bins,
            "bands": self.transform.bands,
            "mean": self._mean.tolist(),
            "deviation": self._deviation.tolist(),
        }


class WaveformFrontEnd:
    """Front end: raw waveforms ``(S,)``, each normalised to mean 0 and deviation 1."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = self.per_second = sample_rate

    def transform(self, wave: Tensor) -> Tensor:
        """Normalise one waveform."""
        return (wave - wave.mean()) / torch.sqrt(wave.var(correction=0) + 1e-7)

    def learn(self, features: Sequence[Tensor]) -> None:
        """Nothing to fit: each waveform is normalised by itself."""

    def normalise(self, features: Tensor) -> Tensor:
        """Unchanged."""
        return features

    def describe(self) -> dict[str, Any]:
        """Settings of the front end, for the export."""
        return {"input": "wave", "sample_rate": self.sample_rate}


class AudioFeatures:
    """Features of a column of audio, before normalisation; cached up to a limit."""

    def __init__(
        self,
        column: Column,
        front: LogMelFrontEnd | WaveformFrontEnd,
        *,
        limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        self._column, self._front = column, front
        self.cached: list[Tensor] = []
        """Features of the first clips, up to the limit; also used for statistics."""
        used = 0
        for row in range(len(column)):
            self.cached.append(self._compute(row))
            used += self.cached[-1].nbytes
            if used >= limit_bytes:
                break

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> Tensor:
        """Features of one clip."""
        if index < len(self.cached):
            return self.cached[index]
        return self._compute(index)

    def _compute(self, row: int) -> Tensor:
        wave, _ = read_audio(self._column[row], row=row, sample_rate=self._front.sample_rate)
        return self._front.transform(wave)


def read_audio(item: Any, *, row: int = 0, sample_rate: int | None = None) -> tuple[Tensor, int]:
    """Read one clip as a mono waveform in -1..1, at ``sample_rate`` (its own by default)."""
    if isinstance(item, np.ndarray) and item.ndim == 1 and item.dtype.kind == "f":
        return _read_array(item, row, sample_rate)
    ref = FileRef(item) if isinstance(item, str) else item
    if not isinstance(ref, FileRef):
        raise DataError(
            f"row {row}: a sound file was expected, not {type(item).__name__}",
            hint="name the column of sounds with data.input",
        )
    samples, rate = _decode(ref)
    if not len(samples):
        raise DataError(f"{ref} holds no sound", hint="remove it from the data")
    if not np.isfinite(samples).all():
        raise DataError(f"{ref} holds samples that are not finite numbers")
    _check_samples(str(ref), len(samples) * (sample_rate or rate) // rate)
    mono = samples.mean(axis=1, dtype=np.float32)
    return torch.from_numpy(resample(mono, rate, sample_rate or rate)), sample_rate or rate


def resample(wave: np.ndarray, rate: int, target_rate: int) -> np.ndarray:
    """Resample to another rate, with a low-pass filter."""
    if rate == target_rate:
        return wave
    from scipy.signal import resample_poly  # noqa: PLC0415 - slow to import, rarely needed

    common = math.gcd(rate, target_rate)
    return resample_poly(wave, target_rate // common, rate // common).astype(np.float32)


_LOWEST_HZ = 20.0


def mel_filters(sample_rate: int, *, bands: int, bins: int) -> Tensor:
    """Weights ``(K, F)`` of triangles with centres even on the mel scale (O'Shaughnessy, 1987)."""
    nyquist = sample_rate / 2
    edges = _to_hz(torch.linspace(_to_mel(_LOWEST_HZ), _to_mel(nyquist), bands + 2).double())
    frequencies = torch.linspace(0, nyquist, bins).double()[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies - left) / (centre - left)
    falling = (right - frequencies) / (right - centre)
    return torch.minimum(rising, falling).clamp(min=0).float()


def measure(features: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each band over all frames."""
    frames = torch.cat(list(features)).double()
    deviation = frames.std(dim=0, correction=0)
    deviation = torch.where(deviation > 1e-5, deviation, torch.ones_like(deviation))
    return frames.mean(dim=0).tolist(), deviation.tolist()


def _decode(ref: FileRef) -> tuple[np.ndarray, int]:
    try:
        import soundfile  # noqa: PLC0415 - loads a C library; only sounds need it
    except (ImportError, OSError) as error:
        raise missing_part("soundfile", "train", "Reading sound files") from error
    data = ref.read()
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            # The header alone: what it claims is checked before room is made for it.
            _check_sound(str(ref), sound.samplerate, sound.channels, sound.frames)
            return sound.read(dtype="float32", always_2d=True), sound.samplerate
    except (soundfile.SoundFileError, TypeError, ValueError) as error:
        reason = "the file is empty" if not data else "it is not a sound file, or is cut short"
        raise DataError(
            f"{ref} cannot be read as sound: {reason}",
            hint="WAV, FLAC, OGG and MP3 are read; replace the file, or remove it from the data",
        ) from error


def _check_sound(where: str, rate: int, channels: int, frames: int) -> None:
    limits = read_limits()
    check_sample_rate(where, rate, limits)
    if channels > limits.channels:
        raise over_limit(
            f"{where} claims {channels:,} channels; at most {limits.channels:,} are read",
            "channels",
            channels,
        )
    _check_samples(where, frames * channels)


def _check_samples(where: str, samples: int) -> None:
    most = read_limits().samples
    if samples > most:
        raise over_limit(
            f"{where} claims {samples:,} samples of sound; at most {most:,} are read",
            "samples",
            samples,
        )


def _read_array(wave: np.ndarray, row: int, sample_rate: int | None) -> tuple[Tensor, int]:
    if sample_rate is None:
        raise DataError(
            "audio arrays have no sample rate",
            hint="set data.sample_rate, e.g. 16000",
        )
    if not len(wave) or not np.isfinite(wave).all():
        raise DataError(f"row {row}: the sound is empty or holds numbers that are not finite")
    return torch.from_numpy(wave.astype(np.float32)), sample_rate


def _to_mel(hertz: float) -> float:
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def _to_hz(mel: Tensor) -> Tensor:
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
