"""From outcomes to medians, worst cases, ratios and verdicts. Plain numbers: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.faults_parts.trials import Outcome

NAMES = {
    "torchrun": "torchrun, own store",
    "torchrun-default": "torchrun, as it comes",
    "torchft": "torchft",
    "yunlu": "Yunlu",
}
FAULTS = {
    "worker killed": "SIGKILL of one of two workers (rank 0 and 1 in turn)",
    "worker hung": "SIGSTOP of one of two workers",
    "node killed": "SIGKILL of everything on one of two nodes; later the node comes back",
    "node cut off": "the cable of one of two nodes; later the node comes back, started anew",
    "cable back": "the cable of one of two nodes, put back a few steps later; nothing is started",
    "worker joins": "one worker trains, a second is asked for",
    "many kills": "a worker killed again and again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One line of the figures to reach."""

    title: str
    faults: tuple[str, ...]
    figure: str
    limit: float
    over: str | None = None
    """The peer of the same round that the figure is divided by."""
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        """Whether a measurement reaches it."""
        return value >= self.limit if self.at_least else value <= self.limit


_NODE = ("node killed", "node cut off")
_LOST = (*_NODE, "cable back")
TARGETS = (
    Target(title="worker killed → next step, over torchrun's", faults=("worker killed",),
           figure="next_step_s", limit=1 / 5, over="torchrun"),
    Target(title="worker killed → next step, over torchft's", faults=("worker killed",),
           figure="next_step_s", limit=1 / 2, over="torchft"),
    Target(title="worker killed → next step, s", faults=("worker killed",),
           figure="next_step_s", limit=1.0),
    Target(title="node lost → next step, over torchrun's", faults=_LOST,
           figure="next_step_s", limit=1 / 5, over="torchrun"),
    Target(title="worker back → step of the full group, over torchft's",
           faults=("worker killed",), figure="joined_s", limit=1 / 3, over="torchft"),
    Target(title="cable back → step of the full group, over torchft's", faults=("cable back",),
           figure="joined_s", limit=1 / 3, over="torchft"),
    Target(title="node started → step of the full group, over torchft's", faults=_NODE,
           figure="joined_s", limit=1 / 3, over="torchft"),
    Target(title="worker joins → step of the full group, over torchft's",
           faults=("worker joins",), figure="joined_s", limit=1 / 3, over="torchft"),
    Target(title="worker hung → next step, s", faults=("worker hung",),
           figure="next_step_s", limit=10.0),
    Target(title="samples lost or repeated, worst trial", faults=tuple(FAULTS),
           figure="amiss", limit=0.0),
    Target(title="effective training time under kills", faults=("many kills",),
           figure="effective", limit=0.95, at_least=True),
)  # fmt: skip


def figure_of(outcome: Outcome, figure: str) -> float | None:
    """A number of one trial; ``amiss`` is every sample that was not trained on exactly once."""
    if figure == "amiss":
        parts = (outcome.lost, outcome.repeated)
        return None if None in parts else float(sum(part or 0 for part in parts))
    value = getattr(outcome, figure)
    return None if value is None else float(value)


def select(outcomes: Iterable[Outcome], contender: str, faults: Sequence[str]) -> list[Outcome]:
    """The trials of one contender."""
    return [each for each in outcomes if each.contender == contender and each.fault in faults]


def measured(outcomes: Sequence[Outcome], target: Target, contender: str) -> list[float]:
    """One number per trial, divided by the peer's of the same fault and round where one is named."""
    own = select(outcomes, contender, target.faults)
    if target.over is None:
        return [value for each in own if (value := figure_of(each, target.figure)) is not None]
    base = {
        (each.fault, each.round): figure_of(each, target.figure)
        for each in select(outcomes, target.over, target.faults)
    }
    ratios: list[float] = []
    for each in own:
        value, other = figure_of(each, target.figure), base.get((each.fault, each.round))
        if value is not None and other:
            ratios.append(value / other)
    return ratios


def judge(outcomes: Sequence[Outcome], contender: str = "yunlu") -> list[dict[str, Any]]:
    """Each figure to reach that was measured. A trial that failed reaches none of its figures."""
    verdicts: list[dict[str, Any]] = []
    for target in TARGETS:
        values = measured(outcomes, target, contender)
        failures = [each for each in select(outcomes, contender, target.faults) if each.failure]
        if not values and not failures:
            continue
        # Samples are right in every trial or they are not right.
        strict = target.figure == "amiss"
        value = (max(values) if strict else median(values)) if values else None
        verdicts.append(
            {
                "title": target.title,
                "limit": target.limit,
                "at_least": target.at_least,
                "median": value,
                "worst": (min if target.at_least else max)(values) if values else None,
                "trials": len(values) + len(failures),
                "failed": len(failures),
                "met": value is not None and target.is_met(value) and not failures,
            }
        )
    return verdicts


def make_tables(outcomes: Sequence[Outcome]) -> str:
    """One table per fault, then the verdicts."""
    parts = [_fault_table(fault, outcomes) for fault in FAULTS]
    verdicts = judge(outcomes)
    if verdicts:
        rows = ["| figure | to reach | median | worst | trials | |", "|---|---|---|---|---|---|"]
        rows += [_verdict_row(verdict) for verdict in verdicts]
        parts.append("### Figures to reach\n\n" + "\n".join(rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def _fault_table(fault: str, outcomes: Sequence[Outcome]) -> str:
    found = {name: select(outcomes, name, (fault,)) for name in NAMES}
    found = {name: each for name, each in found.items() if each}
    if not found:
        return ""
    rows = [f"### {fault}: {FAULTS[fault]}", ""]
    rows += [
        "| | next step, s | full group again, s | longest pause meanwhile, s | effective time | "
        + "steps done again | samples lost | seen twice | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, own in found.items():
        cells = [NAMES[name]]
        cells += [_show(own, figure) for figure in ("next_step_s", "joined_s", "pause_s")]
        cells.append(_show(own, "effective", worst_is_least=True))
        cells += [_show(own, figure, "{:.0f}") for figure in ("redone_steps", "lost", "repeated")]
        failed = [each for each in own if each.failure]
        cells.append(f"{len(failed)} of {len(own)}")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _show(
    outcomes: Sequence[Outcome],
    figure: str,
    form: str = "{:.2f}",
    *,
    worst_is_least: bool = False,
) -> str:
    values = [value for each in outcomes if (value := figure_of(each, figure)) is not None]
    if not values:
        return "–"
    worst = (min if worst_is_least else max)(values)
    middle, end = form.format(median(values)), form.format(worst)
    return middle if middle == end else f"{middle} (worst {end})"


def _verdict_row(verdict: dict[str, Any]) -> str:
    side = "at least" if verdict["at_least"] else "at most"
    numbers = ["–" if value is None else f"{value:.2f}" for value in
               (verdict["median"], verdict["worst"])]  # fmt: skip
    said = "reached" if verdict["met"] else "**not reached**"
    failed = f", {verdict['failed']} failed" if verdict["failed"] else ""
    return (
        f"| {verdict['title']} | {side} {verdict['limit']:.2f} | {numbers[0]} | {numbers[1]} "
        f"| {verdict['trials']}{failed} | {said} |"
    )
