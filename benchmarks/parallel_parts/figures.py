"""From two logs of steps to an overhead. Plain numbers: no torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.parallel_parts.workload import LAYOUTS
from benchmarks.trainers_parts.figures import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 1.03
"""Yunlu's step over the hand-written one's."""
EQUAL_LOSS = 1e-5
"""At every step, in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run of two processes did."""

    layout: str
    contender: str
    round: int
    step_s: float
    """Median over the steps after the warm-up."""
    cpu_s: float
    """Processor seconds per step, of all processes together."""
    losses: tuple[float, ...]


def summarize(
    at: Sequence[float], cpu: Sequence[tuple[float, float]], *, warmup: int
) -> tuple[float, float]:
    """Seconds and processor seconds per step, from the ends of the steps and readings of the clock.

    Args:
        at: When each step ended.
        cpu: Instants, and processor seconds used until then by all processes together.
        warmup: Steps that are not counted.
    """
    steady = at[warmup - 1 :]
    if len(steady) < 2:
        raise ValueError(f"{len(at)} steps are too few to leave out {warmup}")
    used = interpolate(cpu, steady[-1]) - interpolate(cpu, steady[0])
    return median(late - early for early, late in pairwise(steady)), used / (len(steady) - 1)


def interpolate(readings: Sequence[tuple[float, float]], at: float) -> float:
    """The value at an instant, on the line between the readings around it."""
    before = [reading for reading in readings if reading[0] <= at]
    after = [reading for reading in readings if reading[0] > at]
    if not before or not after:
        raise ValueError("no readings around this instant")
    (early, low), (late, high) = before[-1], after[0]
    return low + (high - low) * (at - early) / (late - early)


def ratios(runs: Sequence[Run], layout: str, figure: str) -> Spread | None:
    """Yunlu's over the hand-written script's, round by round."""
    found = {(run.contender, run.round): run for run in runs if run.layout == layout}
    values = [
        getattr(run, figure) / getattr(found["hand", number], figure)
        for (contender, number), run in found.items()
        if contender == "yunlu" and ("hand", number) in found
    ]
    return spread(values) if values else None


def loss_gap(runs: Sequence[Run], layout: str) -> float | None:
    """The largest difference between the losses of any two runs of a layout, at any step."""
    own = [run.losses for run in runs if run.layout == layout]
    if len(own) < 2 or len({len(losses) for losses in own}) > 1:
        return None
    return max(max(step) - min(step) for step in zip(*own, strict=True))


def judge(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Per layout: both ratios, the losses, and whether the overhead is small enough."""
    verdicts: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        wall, cpu = ratios(runs, layout, "step_s"), ratios(runs, layout, "cpu_s")
        gap = loss_gap(runs, layout)
        if wall is None or cpu is None:
            continue
        verdicts.append(
            {
                "layout": layout,
                "step": wall.middle,
                "cpu": cpu.middle,
                "loss_gap": gap,
                # Two that learn different things have no common speed.
                "met": wall.middle <= LIMIT and gap is not None and gap <= EQUAL_LOSS,
            }
        )
    return verdicts


def make_table(runs: Sequence[Run]) -> str:
    """Steps per second of both, and the ratios."""
    rows = [
        "| layout | by hand, steps/s | Yunlu, steps/s | time per step, Yunlu ÷ hand | "
        + "CPU time per step, ÷ | largest difference of losses | at most 1.03 |",
        "|---|---|---|---|---|---|---|",
    ]
    verdicts = {verdict["layout"]: verdict for verdict in judge(runs)}
    for layout, title in LAYOUTS.items():
        own = [run for run in runs if run.layout == layout]
        if not own:
            continue
        cells = [f"`{layout}`: {title}"]
        cells += [_speed(own, contender) for contender in ("hand", "yunlu")]
        shown = [ratios(runs, layout, figure) for figure in ("step_s", "cpu_s")]
        cells += ["–" if each is None else each.show("{:.3f}") for each in shown]
        gap = loss_gap(runs, layout)
        cells.append("–" if gap is None else f"{gap:.0e}")
        met = verdicts.get(layout, {}).get("met")
        cells.append("–" if met is None else "reached" if met else "**not reached**")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _speed(runs: Sequence[Run], contender: str) -> str:
    speeds = [1 / run.step_s for run in runs if run.contender == contender]
    return spread(speeds).show() if speeds else "–"
