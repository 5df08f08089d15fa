"""Human-readable numbers: bytes, durations, counts."""

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
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def show_count(count: float) -> str:
    """``12_300_000`` → ``12.3M``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
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
