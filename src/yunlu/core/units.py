"""Human-readable numbers: bytes, durations, counts; estimates with the digits that they are known to."""

from __future__ import annotations

import math


def show_bytes(count: float) -> str:
    """``1536`` → ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def show_duration(seconds: float) -> str:
    """``75`` → ``1 min 15 s``; ``0.0021`` → ``2.1 ms``."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours >= _MOST_HOURS:
        return _show_days(seconds)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


_MOST_HOURS = 48
_MOST_DAYS = 1000
_DAY_S = 86_400.0
_YEAR_S = 365.25 * _DAY_S


def _show_days(seconds: float) -> str:
    """``2 d 5 h``, ``180 d``, ``2.7 years``."""
    hours = round(seconds / 3600)
    if hours < 10 * 24:
        return f"{hours // 24} d {hours % 24} h"
    days = seconds / _DAY_S
    return f"{days:.0f} d" if days < _MOST_DAYS else f"{_significant(seconds / _YEAR_S)} years"


_UNITS = (
    ("µs", 1e-6, 1000.0),
    ("ms", 1e-3, 1000.0),
    ("s", 1.0, 90.0),
    ("min", 60.0, 90.0),
    ("h", 3600.0, float(_MOST_HOURS)),
    ("d", _DAY_S, float(_MOST_DAYS)),
    ("years", _YEAR_S, math.inf),
)
"""A unit of time, its seconds, and up to how many of them it is used for an estimate."""


def estimate_time(value: float, low: float, high: float) -> tuple[str, str]:
    """A time and its interval in one unit, with the digits that the interval supports: ``15 min``, ``12–21 min``."""
    unit, size = _time_unit(value)
    digit = supported_digit(value / size, low / size, high / size)
    middle, least, most = (show_rounded(part / size, digit) for part in (value, low, high))
    return f"{middle} {unit}", f"{least}–{most} {unit}" if least != most else ""


def show_share(part_s: float, whole_s: float) -> str:
    """A part of a time, in the unit of the whole: ``0.75 min`` of ``15 min``."""
    unit, size = _time_unit(whole_s)
    return f"{part_s / size:.2g} {unit}" if part_s < 100 * size else f"{part_s / size:.0f} {unit}"


def _time_unit(value: float) -> tuple[str, float]:
    fitting = ((unit, size) for unit, size, most in _UNITS if value < size * most)
    return next(fitting, _UNITS[-1][:2])


def estimate_dollars(value: float, low: float, high: float) -> tuple[str, str]:
    """Money in whole dollars or in cents, as the interval supports: ``$5.50``, ``$4.30–$7.70``."""
    digit = supported_digit(value, low, high)
    middle, least, most = (_money(part, digit) for part in (value, low, high))
    return middle, f"{least}–{most}" if least != most else ""


def estimate_count(value: float, low: float, high: float) -> tuple[str, str]:
    """A count or pace: ``190k``, ``140k–230k``."""
    digit = supported_digit(value, low, high)
    middle, least, most = (_short_count(part, digit) for part in (value, low, high))
    return middle, f"{least}–{most}" if least != most else ""


def supported_digit(value: float, low: float, high: float) -> float:
    """The size of the last digit worth writing: a power of ten.

    The rounding rule of the Particle Data Group (Review of Particle Physics, introduction, 5.3), with half
    the interval for the error; never more than three digits of the value.
    """
    finite = all(math.isfinite(part) for part in (value, low, high))
    digit = 10.0 ** (math.floor(math.log10(abs(value))) - 2) if finite and value else 0.0
    half = (high - low) / 2 if finite else 0.0
    if half > 0:
        power = math.floor(math.log10(half))
        digit = max(digit, 10.0 ** (power - (1 if half / 10.0**power < _TWO_DIGITS else 0)))
    return digit


_TWO_DIGITS = 3.55
"""An error whose digits are below 355 is written with two of them, else with one."""
_CENT = 0.01


def show_rounded(value: float, digit: float) -> str:
    """A number to a digit, without the noise beyond it: ``650``, ``2.3``."""
    if not math.isfinite(value) or digit <= 0:
        return show_number(value)
    decimals = max(0, -round(math.log10(digit)))
    rounded = round(value / digit) * digit
    return show_count(rounded) if abs(rounded) >= 1e6 else f"{rounded:,.{decimals}f}"


def _money(dollars: float, digit: float) -> str:
    if digit >= 1:
        return f"${show_rounded(dollars, digit)}"
    return (
        f"${show_rounded(round(dollars / digit) * digit if digit else dollars, min(digit, _CENT))}"
    )


def _short_count(count: float, digit: float) -> str:
    for size, unit in _COUNT_UNITS:
        if abs(count) >= size:
            return f"{show_rounded(count / size, min(max(digit / size, 0.01), 1e3))}{unit}"
    return show_rounded(count, digit)


_COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show_count(count: float) -> str:
    """``12_300_000`` → ``12.3M``."""
    for size, unit in _COUNT_UNITS:
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.1f}"


def show_number(value: float) -> str:
    """A metric with four significant digits, without needless zeros."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.3e}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def _significant(value: float) -> str:
    return f"{value:.2g}" if value < 10 else show_count(round(value))
