"""Part 'curves': the comparison on recorded curves, its tables and its plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.tune_parts.contenders import CONTENDERS
from benchmarks.tune_parts.figures import Figure
from benchmarks.tune_parts.scoring import BASE, FRACTIONS, make_scales, score

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.tune_parts.runs import Run
    from benchmarks.tune_parts.scoring import Score

_REGRET = 0.22
_SPEEDUP = 6.0
_PLOTTED = tuple(step / 50 for step in range(1, 51))


def make_score_table(scores: Sequence[Score], title: str) -> Table:
    """A line for each contender."""
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for fraction in FRACTIONS:
        table.add_column(f"{fraction:.0%}", justify="right")
    for name in ("10–90 %", "speed-up", "runs", "trials", "resumed", "CPU s a run"):
        table.add_column(name, justify="right")
    for each in scores:
        table.add_row(
            CONTENDERS[each.contender].label,
            *(f"{each.regrets[fraction]:.3f}" for fraction in FRACTIONS),
            "–".join(f"{bound:.2f}" for bound in each.final_range),
            f"{each.speedup:.2f}",
            f"{each.runs}",
            f"{each.trials:.0f}",
            f"{each.resumed:.0f}",
            f"{each.cpu_s:.1f}",
        )
    return table


def make_task_table(scores: Sequence[Score]) -> Table:
    """A line for each task: regret at the end, the median over seeds."""
    table = Table(title="Final regret by task", title_justify="left")
    table.add_column("task")
    for each in scores:
        table.add_column(CONTENDERS[each.contender].label, justify="right")
    for task in scores[0].final_by_task:
        found = [each.final_by_task.get(task) for each in scores]
        table.add_row(task, *("" if value is None else f"{value:.3f}" for value in found))
    return table


def make_figures(scores: Sequence[Score]) -> list[Figure]:
    """What is asked of ours, beside the best of the others."""
    own = next((each for each in scores if each.contender == "yunlu"), None)
    others = [each for each in scores if each.contender not in {"yunlu", BASE}]
    if own is None:
        return []
    regret = min(others, key=lambda each: each.regrets[1.0], default=own)
    speedup = max(others, key=lambda each: each.speedup, default=own)
    return [
        Figure(
            name="final regret, mean over tasks of medians",
            value=own.regrets[1.0],
            at_most=_REGRET,
            compared=f"{CONTENDERS[regret.contender].label} {regret.regrets[1.0]:.3f}",
        ),
        Figure(
            name="speed-up to random's final value, geometric mean",
            value=own.speedup,
            at_least=_SPEEDUP,
            compared=f"{CONTENDERS[speedup.contender].label} {speedup.speedup:.2f}",
        ),
    ]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Regret over time, a line for each contender."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    library: Any = plt
    figure, axes = library.subplots(figsize=(8, 5), layout="constrained")
    for each in score(runs, make_scales(runs), _PLOTTED):
        is_own = each.contender == "yunlu"
        axes.plot(
            [100 * fraction for fraction in each.regrets],
            list(each.regrets.values()),
            label=f"{CONTENDERS[each.contender].label} ({each.regrets[1.0]:.2f})",
            linewidth=2.5 if is_own else 1.3,
            linestyle="--" if each.contender == BASE else "-",
            color="black" if is_own else None,
        )
    axes.set(xlabel="% of the budget", ylabel="regret", yscale="log", xlim=(0, 100))
    axes.set_yticks([0.1, 0.2, 0.3, 0.5, 1.0, 2.0], ["0.1", "0.2", "0.3", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title("Regret over simulated time: mean over tasks of medians over seeds")
    figure.savefig(path, dpi=120)
    library.close(figure)
