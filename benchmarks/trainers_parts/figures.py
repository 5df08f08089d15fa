"""From single runs to ratios, verdicts and the table. Plain numbers: no torch, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.trainers_parts.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NAMES = {
    "hand": "hand-written loop",
    "bare": "bare loop",
    "hf": "HF Trainer",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "yunlu": "Yunlu",
}
MODES = {"same": "same settings", "defaults": "defaults, Yunlu `auto`"}

EQUAL_STEPS, EQUAL_LOSS = 100, 1e-4
"""Same settings: the first losses are equal. Later ones are not: rounding grows with the steps."""
BAND, BAND_FLOOR = 0.15, 0.02
"""Any settings: the mean loss of the last tenth of the steps, as a share of how far it has fallen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one process measured."""

    workload: str
    mode: str
    contender: str
    round: int
    cpu_s: float
    """Processor seconds per step, of the whole process."""
    wall_s: float
    start_cpu_s: float
    """Processor seconds from the start of the process to the first step."""
    peak_bytes: int
    """Largest resident memory of the process, to its end."""
    training_peak_bytes: int
    """The same, up to the last step."""
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    middle: float
    low: float
    high: float

    def show(self, form: str = "{:.2f}") -> str:
        """The median, and the range where there is one."""
        middle, low, high = (form.format(value) for value in (self.middle, self.low, self.high))
        return middle if low == high else f"{middle} ({low} to {high})"


def spread(values: Iterable[float]) -> Spread:
    """Median and range."""
    found = sorted(values)
    return Spread(median(found), found[0], found[-1])


Compare = dict[str, "Callable[[Run, Run], float]"]
COMPARE: Compare = {
    "cpu": lambda run, base: run.cpu_s / base.cpu_s,
    "wall": lambda run, base: run.wall_s / base.wall_s,
    "speed": lambda run, base: base.wall_s / run.wall_s,
    "start": lambda run, base: run.start_cpu_s - base.start_cpu_s,
    "memory": lambda run, base: (run.peak_bytes - base.peak_bytes) / 2**20,
    "training_memory": lambda run, base: (
        (run.training_peak_bytes - base.training_peak_bytes) / 2**20
    ),
}
"""How a run is set against another of the same round."""


def against(runs: Sequence[Run], base: Sequence[Run], figure: str) -> Spread | None:
    """A figure of one contender against another's, round by round."""
    bases = {run.round: run for run in base}
    pairs = [(run, bases[run.round]) for run in runs if run.round in bases]
    return spread(COMPARE[figure](*pair) for pair in pairs) if pairs else None


def late_loss(losses: Sequence[float]) -> float:
    """The mean of the last tenth."""
    return fmean(losses[-max(1, len(losses) // 10) :])


def agrees(run: Run, base: Run) -> bool:
    """Whether both learnt the same from as many samples."""
    if len(run.losses) != len(base.losses) or not all(map(math.isfinite, run.losses)):
        return False
    if run.mode == "same":
        pairs = zip(run.losses[:EQUAL_STEPS], base.losses[:EQUAL_STEPS], strict=True)
        if any(abs(one - other) > EQUAL_LOSS for one, other in pairs):
            return False
    fall = abs(base.losses[0] - late_loss(base.losses))
    return abs(late_loss(run.losses) - late_loss(base.losses)) <= max(BAND * fall, BAND_FLOOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One line of the figures to reach."""

    title: str
    workload: str
    mode: str
    figure: str
    bound: Literal["at most", "at least"]
    limit: float
    form: str = "{:.3f}"
    base: str = "hand"

    def is_met(self, value: float) -> bool:
        """Whether the median reaches it."""
        return value <= self.limit if self.bound == "at most" else value >= self.limit


TARGETS = (
    Target(title="CPU time per 2 ms step", workload="mlp", mode="same", figure="cpu",
           bound="at most", limit=1.03),
    Target(title="CPU time per step, 10M GPT, same settings", workload="gpt", mode="same",
           figure="cpu", bound="at most", limit=1.01),
    Target(title="speed, 10M GPT, `auto`", workload="gpt", mode="defaults", figure="speed",
           bound="at least", limit=1.5),
    Target(title="speed, text classifier, `auto`, over HF Trainer", workload="text",
           mode="defaults", figure="speed", bound="at least", limit=2.5, base="hf"),
    Target(title="CPU seconds to the first step, over the loop's: MLP", workload="mlp",
           mode="same", figure="start", bound="at most", limit=0.5, form="{:+.2f}"),
    Target(title="CPU seconds to the first step, over the loop's: GPT", workload="gpt",
           mode="same", figure="start", bound="at most", limit=0.5, form="{:+.2f}"),
    Target(title="peak memory over the loop's, MB: MLP", workload="mlp", mode="same",
           figure="memory", bound="at most", limit=40, form="{:+.0f}"),
    Target(title="peak memory over the loop's, MB: GPT", workload="gpt", mode="same",
           figure="memory", bound="at most", limit=40, form="{:+.0f}"),
)  # fmt: skip


def select(runs: Iterable[Run], workload: str, mode: str, contender: str) -> list[Run]:
    """The rounds of one row."""
    wanted = (workload, mode, contender)
    return [run for run in runs if (run.workload, run.mode, run.contender) == wanted]


def judge(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each figure to reach that was measured, with what was."""
    verdicts: list[dict[str, Any]] = []
    for target in TARGETS:
        found = against(
            select(runs, target.workload, target.mode, "yunlu"),
            select(runs, target.workload, target.mode, target.base),
            target.figure,
        )
        if found is None:
            continue
        verdicts.append(
            {
                "figure": target.title,
                "to reach": f"{target.bound} {target.form.format(target.limit)}",
                "measured": found.show(target.form),
                "met": target.is_met(found.middle),
            }
        )
    return verdicts


def make_table(runs: Sequence[Run]) -> str:
    """Everything measured, as Markdown."""
    parts: list[str] = []
    for workload in WORKLOADS.values():
        for mode, mode_title in MODES.items():
            rows = [
                row
                for contender in NAMES
                if (row := _row(runs, workload.name, mode, contender)) is not None
            ]
            if rows:
                parts += [f"\n### {workload.title} — {mode_title}\n", _HEAD, *rows]
    verdicts = judge(runs)
    if verdicts:
        parts += [
            "\n### Figures to reach\n",
            "| figure | to reach | Yunlu | |",
            "|---|---|---|---|",
        ]
        parts += [
            f"| {each['figure']} | {each['to reach']} | {each['measured']} | "
            f"{'reached' if each['met'] else 'not reached'} |"
            for each in verdicts
        ]
    return "\n".join(parts).strip()


_HEAD = (
    "| | CPU per step | wall per step | CPU s to first step | peak memory, MB "
    "| of it until the last step | late loss | loss agrees |\n|---|---|---|---|---|---|---|---|"
)


def _row(runs: Sequence[Run], workload: str, mode: str, contender: str) -> str | None:
    own, base = select(runs, workload, mode, contender), select(runs, workload, mode, "hand")
    if not own:
        return None
    forms = {
        "cpu": "{:.3f}", "wall": "{:.3f}", "start": "{:+.2f}",
        "memory": "{:+.0f}", "training_memory": "{:+.0f}",
    }  # fmt: skip
    found = {name: against(own, base, name) for name in forms}
    cells = [
        "–" if (one := found[name]) is None else one.show(form) for name, form in forms.items()
    ]
    if contender == "hand":  # what the others are set against
        cells[2] = spread(run.start_cpu_s for run in own).show()
        cells[3] = spread(run.peak_bytes / 2**20 for run in own).show("{:.0f}")
        cells[4] = spread(run.training_peak_bytes / 2**20 for run in own).show("{:.0f}")
    agreed = all(agrees(run, base[0]) for run in own) if base else None
    told = {True: "yes", False: "**no**", None: "–"}[agreed]
    loss = spread(late_loss(run.losses) for run in own).show("{:.4f}")
    return f"| {NAMES[contender]} | {' | '.join(cells)} | {loss} | {told} |"
