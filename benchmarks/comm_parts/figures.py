"""From single runs to ratios and tables. Plain numbers: no torch, no clock."""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.trainers_parts.figures import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.comm_parts.sums_trial import SumTime
    from benchmarks.comm_parts.trial import Result

DENSE = "ddp"
SMOOTH = 20
"""Steps over which the loss of training is averaged, where nothing else is known."""
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bit": 1.0}


def bound_s(hosts: int, size_bytes: int, rate: str) -> float | None:
    """The time of the best sum: each host sends and receives ``2(n-1)/n`` of the tensor."""
    if rate == "none":
        return None
    number, unit = re.fullmatch(r"([0-9.]+)(\w+)", rate).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return 2 * (hosts - 1) / hosts * size_bytes * 8 / (float(number) * _UNITS[unit])


def curve(result: Result, *, smooth: bool) -> list[tuple[float, float]]:
    """Instants, and the loss then: held out, or of training over the last few steps.

    No sample comes twice, so both estimate the same; the second one lags behind, and is noisier.
    """
    if not smooth:
        return [(result.ends_s[step - 1], loss) for step, loss in result.held_out]
    losses = result.losses
    return [
        (result.ends_s[step], fmean(losses[step + 1 - SMOOTH : step + 1]))
        for step in range(SMOOTH - 1, len(losses))
    ]


def time_to(result: Result, target: float, *, smooth: bool = False) -> float | None:
    """Seconds until the loss is at the target, on the line between two points of the curve."""
    points = curve(result, smooth=smooth)
    if points and points[0][1] <= target:
        return points[0][0]
    for (early, before), (late, after) in pairwise(points):
        if after <= target:
            return early + (before - target) / (before - after) * (late - early)
    return None


def loss_at(result: Result, seconds: float, *, smooth: bool = False) -> float | None:
    """The last one known by then."""
    known = [loss for end, loss in curve(result, smooth=smooth) if end <= seconds]
    return known[-1] if known else None


def make_sum_tables(times: Sequence[SumTime]) -> str:
    """One for each number of hosts and rate: milliseconds, and the ratio to the bound or to gloo."""
    tables: list[str] = []
    for hosts, rate in dict.fromkeys((each.hosts, each.rate) for each in times):
        own = [each for each in times if (each.hosts, each.rate) == (hosts, rate)]
        sizes = sorted({each.bytes for each in own})
        what = "÷ gloo" if rate == "none" else "÷ bound"
        limit = "no limit" if rate == "none" else _show_rate(rate)
        title = f"**All-reduce, {hosts} hosts, {limit}**: milliseconds ({what})"
        rows = [
            "| | " + " | ".join(map(_show_bytes, sizes)) + " |",
            "|---" * (len(sizes) + 1) + "|",
        ]
        for way in dict.fromkeys(each.way for each in own):
            cells = [_sum_cell(own, way, size) for size in sizes]
            rows.append(f"| {way} | " + " | ".join(cells) + " |")
        tables.append(title + "\n\n" + "\n".join(rows) + "\n")
    return "\n".join(tables)


def judge_sums(times: Sequence[SumTime]) -> list[dict[str, Any]]:
    """Medians over rounds, and ratios taken within each round."""
    verdicts: list[dict[str, Any]] = []
    keys = dict.fromkeys((each.hosts, each.rate, each.way, each.bytes) for each in times)
    for hosts, rate, way, size in keys:
        own = {
            (each.way, each.round): each.s
            for each in times
            if (each.hosts, each.rate, each.bytes) == (hosts, rate, size)
        }
        mine = {number: s for (name, number), s in own.items() if name == way}
        to_gloo = [s / own["gloo", n] for n, s in mine.items() if ("gloo", n) in own]
        bound = bound_s(hosts, size, rate)
        verdicts.append(
            {
                "hosts": hosts,
                "rate": rate,
                "way": way,
                "bytes": size,
                "s": median(mine.values()),
                "to_bound": bound and median(mine.values()) / bound,
                "to_gloo": median(to_gloo) if to_gloo else None,
            }
        )
    return verdicts


def _sum_cell(times: Sequence[SumTime], way: str, size: int) -> str:
    for each in judge_sums([one for one in times if one.bytes == size]):
        if each["way"] == way:
            ratio = each["to_gloo"] if each["rate"] == "none" else each["to_bound"]
            return f"{each['s'] * 1e3:.1f}" + ("" if ratio is None else f" ({ratio:.2f})")
    return "–"


def judge_training(
    results: Sequence[Result], target: float, *, smooth: bool = False
) -> list[dict[str, Any]]:
    """Per rate, setting and method; ratios to undisturbed dense DDP of the same round."""
    verdicts: list[dict[str, Any]] = []
    for rate, setting, method in dict.fromkeys((r.rate, r.setting, r.method) for r in results):
        own = [r for r in results if (r.rate, r.setting, r.method) == (rate, setting, method)]
        found: dict[str, list[float]] = {}

        def add(name: str, value: float | None, found: dict[str, list[float]] = found) -> None:
            if value is not None:
                found.setdefault(name, []).append(value)

        for result in own:
            same = [r for r in results if (r.rate, r.round) == (rate, result.round)]
            dense = next((r for r in same if r.method == DENSE and not r.setting), None)
            # When the first of them was done: how far the others were then.
            first_s = min(r.ends_s[-1] for r in same if r.setting == setting)
            reached_s = time_to(result, target, smooth=smooth)
            points = curve(result, smooth=smooth)
            add("steps_per_s", 1 / result.mean_step_s)
            add("step_bytes", result.step_bytes)
            add("wire_bytes", result.wire_bytes)
            add("final_loss", points[-1][1] if points else None)
            add("loss_then", loss_at(result, first_s, smooth=smooth))
            add("to_target_s", reached_s)
            if dense is None:
                continue
            dense_s = time_to(dense, target, smooth=smooth)
            add("speed", dense.mean_step_s / result.mean_step_s)
            add("fewer_bytes", dense.step_bytes / max(result.step_bytes, 1.0))
            if dense_s is not None and reached_s is not None:
                add("to_target", dense_s / reached_s)
        verdict: dict[str, Any] = {name: median(values) for name, values in found.items()}
        verdict["to_target_shown"] = (
            spread(found["to_target"]).show() if "to_target" in found else "–"
        )
        broken = any(result.is_equal is False for result in own)
        verdicts.append(
            {"rate": rate, "setting": setting, "method": method, "differs": broken, **verdict}
        )
    return verdicts


def make_training_tables(
    results: Sequence[Result],
    target: float,
    *,
    smooth: bool = False,
    chosen: dict[tuple[str, str, str], str] | None = None,
) -> str:
    """One for each rate and setting."""
    verdicts = judge_training(results, target, smooth=smooth)
    tables: list[str] = []
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("method", lambda v: _show_method(v, chosen or {})),
        ("steps/s", lambda v: _show(v, "steps_per_s", "{:.2f}")),
        ("÷ DDP", lambda v: _show(v, "speed", "{:.2f}")),
        ("KB per step and host", lambda v: _show(v, "step_bytes", "{:,.0f}", 1e-3)),
        ("by its own count", lambda v: _show(v, "wire_bytes", "{:,.0f}", 1e-3)),
        ("DDP's bytes ÷", lambda v: _show(v, "fewer_bytes", "{:.1f}")),
        ("loss at the end", lambda v: _show(v, "final_loss", "{:.3f}")),
        ("loss when the first was done", lambda v: _show(v, "loss_then", "{:.3f}")),
        (f"s to {target:g}", lambda v: _show(v, "to_target_s", "{:.0f}")),
        ("DDP's time ÷", lambda v: v["to_target_shown"]),
    ]
    for rate, setting in dict.fromkeys((v["rate"], v["setting"]) for v in verdicts):
        own = [v for v in verdicts if (v["rate"], v["setting"]) == (rate, setting)]
        title = f"**Training, {_show_rate(rate)}" + (f", {setting}**" if setting else "**")
        rows = ["| " + " | ".join(name for name, _ in columns) + " |", "|---" * len(columns) + "|"]
        rows += ["| " + " | ".join(cell(v) for _, cell in columns) + " |" for v in own]
        tables.append(title + "\n\n" + "\n".join(rows) + "\n")
    return "\n".join(tables)


def _show_method(verdict: dict[str, Any], chosen: dict[tuple[str, str, str], str]) -> str:
    words = f"`{verdict['method']}`"
    found = chosen.get((verdict["rate"], verdict["setting"], verdict["method"]))
    words += f": {found}" if found else ""
    return words + (" **(workers differ)**" if verdict["differs"] else "")


def _show(verdict: dict[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    return form.format(verdict[name] * scale) if verdict.get(name) is not None else "–"


def _show_rate(rate: str) -> str:
    return (
        "no limit" if rate == "none" else re.sub(r"([kmg])bit", r" \1bit/s", rate).replace("m", "M")
    )


def _show_bytes(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
