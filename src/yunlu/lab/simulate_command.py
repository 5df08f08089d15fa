"""``yunlu pool simulate``: replay a recorded workload under several policies."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path  # noqa: TC003 (the command line is read from it)
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from yunlu.core.imports import POLICIES, known_names
from yunlu.core.units import show_duration
from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.figures import check_plot_directory, write_plots
from yunlu.lab.simulation.profiles import SimulationError, load_profiles, load_workloads
from yunlu.lab.simulation.sia import (
    BELIEVED_RESTART_S,
    SLOWDOWN,
    SiaEstimator,
    SiaPolicy,
    apply_sia_rules,
    load_prior,
    load_typed_profiles,
)
from yunlu.lab.simulation.simulator import Faults, SimulationRules
from yunlu.lab.simulation.simulator import simulate as replay
from yunlu.render.terminal.page import (
    ACCENT,
    TerminalConsole,
    indented,
    make_console,
    plain_table,
    print_json,
)
from yunlu.scheduler.policies import open_policy
from yunlu.scheduler.policy.allocator import Allocator, AllocatorOptions
from yunlu.scheduler.policy.fitting import Fitter
from yunlu.scheduler.policy.speed_by_type import CrossTypeFitter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.table import Table

    from yunlu.hardware.fleet import Node
    from yunlu.lab.simulation.profiles import Profiles, Workload
    from yunlu.lab.simulation.simulator import SimulationResult
    from yunlu.scheduler.policy.goodput import Estimator
    from yunlu.scheduler.policy.values import Policy

    Runs = dict[str, list[SimulationResult]]

_COLUMNS = (
    "policy", "average", "", "median", "p99", "makespan", "waiting",
    "restarts", "device-h", "in use", "decision",
)  # fmt: skip


def simulate(
    *,
    trace: Path,
    profiles: Path,
    cluster: str,
    policy: tuple[str, ...],
    interval: float = 60.0,
    restart: float = 30.0,
    events: bool = False,
    blind: bool = False,
    length_error: float = 1.0,
    crashes: float = 0.0,
    step_noise: float = 0.0,
    interference: float = 0.0,
    seed: int = 0,
    sia_rules: bool = False,
    plot: Annotated[Path | None, Parameter(show_default=False)] = None,
    json: bool = False,
) -> int:
    """Replay a recorded workload under one or more policies, and compare them.

    Times are of jobs from submission to end; docs/pool-simulation.md tells how files look.

    Args:
        trace: A CSV file of jobs, or a directory of such files.
        profiles: A directory with measurements of each application.
        cluster: Nodes and devices on each, 16x4 or 6x4:t4+2x8:a100, or a YAML file.
        policy: Who decides; may be repeated, or several with commas; or your own, module:Class.
        interval: Seconds between decisions.
        restart: Seconds without progress after a job's devices change.
        events: Decide also whenever a job comes or ends.
        blind: Do not tell policies how long jobs are.
        length_error: Declared lengths are wrong by up to this factor either way.
        crashes: Share of the jobs that crash once.
        step_noise: Spread of step times, 0.1 for 10 %.
        interference: Share of its speed a job loses beside another that also spans nodes.
        seed: Of all that is random in these troubles.
        sia_rules: Restarts and speeds as in the simulator of Sia, whose profiles have several device types.
        plot: Draw pictures into this directory.
        json: Print one JSON line for each workload and policy.
    """
    rules = SimulationRules(
        interval_s=_whole(interval),
        restart_s=_whole(restart),
        is_event_driven=events,
        declares_length=not blind,
    )
    faults = Faults(
        seed=seed,
        length_error=length_error,
        crash_share=crashes,
        step_noise=step_noise,
        interference=interference,
    )
    _check(rules, faults)
    names = [name.strip() for text in policy for name in text.split(",") if name.strip()]
    if not names:
        raise SimulationError(f"--policy: name a policy; known: {', '.join(policy_names())}.")
    nodes = parse_cluster(cluster)
    types = dict.fromkeys(node.type for node in nodes)
    for name in names:  # a misspelt name should fail before the others are simulated
        if len(types) == 1 or name not in TYPE_AWARE:
            make_policy(name)
    if plot is not None:
        check_plot_directory(plot)
    workloads = load_workloads(trace)
    used = [job.application for workload in workloads for job in workload.jobs]

    def make(name: str) -> SimulatedPolicy:
        if len(types) == 1 or name not in TYPE_AWARE:
            return make_policy(name)
        return make_type_aware_policy(name, profiles, used, nodes, SLOWDOWN if sia_rules else None)

    if len(types) == 1:
        known = load_profiles(profiles, types, used)
    else:
        known = load_typed_profiles(profiles, used, tuple(types))
    runs = _run_all(
        {name: partial(make, name) for name in names},
        workloads,
        known,
        nodes,
        rules=apply_sia_rules(rules) if sia_rules else rules,
        faults=faults,
    )
    if json:
        for outcome in (one_outcome for outcomes in runs.values() for one_outcome in outcomes):
            print_json({**outcome.summary(), "jct_s": outcome.jct_s})
    else:
        _print_page(make_console(), runs, nodes)
    if plot is not None:
        made = write_plots(runs, plot)
        if not json:
            make_console().print(f"\n {len(made)} pictures in {plot}", style="dim")
    return 0


def _run_all(
    policies: Mapping[str, Callable[[], SimulatedPolicy]],
    workloads: Sequence[Workload],
    profiles: Profiles,
    nodes: Sequence[Node],
    *,
    rules: SimulationRules,
    faults: Faults,
) -> Runs:
    runs: Runs = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = TerminalConsole(stderr=True)
    shown = sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        total = len(policies) * sum(len(workload.jobs) for workload in workloads)
        bar = progress.add_task("", total=total)
        before = 0
        for name, make in policies.items():
            for workload in workloads:
                progress.update(bar, description=f"{name} · {workload.name}")
                contestant = make()

                def watch(_now: float, ended: int, before: int = before) -> None:
                    progress.update(bar, completed=before + ended)

                outcome = replay(
                    workload,
                    profiles,
                    nodes,
                    contestant.policy,
                    rules=contestant.adapt_rules(rules),
                    estimator=contestant.estimator,
                    faults=faults,
                    watch=watch,
                )
                runs.setdefault(name, []).append(outcome)
                before += len(workload.jobs)
    return runs


def _print_page(console: TerminalConsole, runs: Runs, nodes: Sequence[Node]) -> None:
    workloads = [outcome.workload for outcome in next(iter(runs.values()))]
    devices = sum(node.devices for node in nodes)
    jobs = sum(len(outcome.jobs) for outcome in next(iter(runs.values())))
    title = workloads[0] if len(workloads) == 1 else f"{len(workloads)} workloads"
    head = Text(f"\n {title}", style=f"bold {ACCENT}")
    head.append(f"  {jobs} jobs · {len(nodes)} nodes · {devices} devices\n", style="not bold dim")
    console.print(head)
    console.print(indented(_table(runs)))
    if len(workloads) > 1:
        console.print()
        console.print(indented(_workload_table(runs, workloads)))
    first = next(iter(runs))
    if len(runs) > 1:
        text = "; other figures are means over workloads" if len(workloads) > 1 else ""
        console.print(f"\n ratios are to {first}{text}", style="dim")


def _table(runs: Runs) -> Table:
    table = plain_table()
    priced = any(outcome.dollars for outcomes in runs.values() for outcome in outcomes)
    for title in (*_COLUMNS, *(("cost",) if priced else ())):
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    first = _means(next(iter(runs.values())))
    best = min(_means(outcomes)["jct_average_s"] for outcomes in runs.values())
    for name, outcomes in runs.items():
        means = _means(outcomes)
        average = means["jct_average_s"]
        style = f"bold {ACCENT}" if average == best and len(runs) > 1 else "bold"
        cells = [
            Text(name, style=style),
            Text(_seconds(average), style=style),
            Text(_ratio(average, first["jct_average_s"]), style="dim"),
            _seconds(means["jct_p50_s"]),
            _seconds(means["jct_p99_s"]),
            show_duration(means["makespan_s"]),
            f"{means['waiting_average']:.1f} jobs",
            f"{means['restarts_per_job']:.2f}/job",
            f"{means['device_hours']:,.0f}",
            f"{means['utilisation']:.0%}",
            show_duration(means["decision_cpu_s"]),
        ]
        if priced:
            cells.append(f"${means['dollars']:,.0f}")
        table.add_row(*cells)
    return table


def _workload_table(runs: Runs, workloads: Sequence[str]) -> Table:
    """The average of each workload by itself."""
    table = plain_table()
    table.add_column("average, s", no_wrap=True)
    for name in runs:
        table.add_column(name, justify="right", no_wrap=True)
    reference = next(iter(runs.values()))
    for index, workload in enumerate(workloads):
        cells: list[Text] = []
        for outcomes in runs.values():
            average = outcomes[index].average_s
            ratio = _ratio(average, reference[index].average_s)
            cells.append(Text.assemble(f"{average:,.0f}", (f" {ratio}", "dim")))
        table.add_row(workload, *cells)
    return table


def _means(outcomes: Sequence[SimulationResult]) -> Mapping[str, float]:
    summaries: list[dict[str, Any]] = [outcome.summary() for outcome in outcomes]
    return {
        name: sum(summary[name] for summary in summaries) / len(summaries)
        for name, value in summaries[0].items()
        if not isinstance(value, str)
    }


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}×" if reference else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s"


def _whole(value: float) -> float:
    """As an integer where it is one: whole seconds stay exact."""
    return int(value) if value.is_integer() else value


def _check(rules: SimulationRules, faults: Faults) -> None:
    limits = (
        ("--interval", rules.interval_s, rules.interval_s > 0, "above 0"),
        ("--restart", rules.restart_s, rules.restart_s >= 0, "at least 0"),
        ("--length-error", faults.length_error, faults.length_error >= 1, "at least 1"),
        ("--crashes", faults.crash_share, 0 <= faults.crash_share <= 1, "from 0 to 1"),
        ("--step-noise", faults.step_noise, 0 <= faults.step_noise < 1, "from 0 to below 1"),
        ("--interference", faults.interference, 0 <= faults.interference < 1, "from 0 to below 1"),
    )  # fmt: skip
    for option, value, is_good, text in limits:
        if not is_good or not math.isfinite(value):
            raise SimulationError(f"{option}: {value:g} is not {text}.")


BLIND = "yunlu-blind"
"""Knows what Pollux knows: no lengths, and nothing of other jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPolicy:
    """A new policy with everything it needs."""

    name: str
    policy: Policy
    estimator: Estimator | None = None
    """None: jobs keep the batch they ask for, and the policy sees their true speed."""
    is_shared: bool = False
    """Whether jobs of one application learn from each other."""
    declares_length: bool = True

    def adapt_rules(self, rules: SimulationRules) -> SimulationRules:
        """The simulation rules as this policy needs them."""
        return replace(
            rules,
            is_shared=self.is_shared,
            declares_length=rules.declares_length and self.declares_length,
        )


def make_policy(name: str) -> SimulatedPolicy:
    """A policy by name, or a user's ``module:Class``; its attribute ``estimator`` learns speeds."""
    if name == "yunlu":
        return SimulatedPolicy(name=name, policy=Allocator(), estimator=Fitter(), is_shared=True)
    if name == BLIND:
        return SimulatedPolicy(
            name=name,
            policy=Allocator(AllocatorOptions(learns_from_programs=False)),
            estimator=Fitter(),
            declares_length=False,
        )
    policy = open_policy(name)
    estimator: Estimator | None = getattr(policy, "estimator", None)
    return SimulatedPolicy(
        name=getattr(policy, "name", name),
        policy=policy,
        estimator=estimator,
        is_shared=bool(getattr(policy, "is_shared", False)),
    )


def policy_names() -> tuple[str, ...]:
    """Policies that can be simulated, besides a user's own."""
    return (*known_names(POLICIES), BLIND)


TYPE_AWARE = ("yunlu", BLIND, "sia")
"""Policies that distinguish device types; others treat all devices as equal."""


def make_type_aware_policy(
    name: str,
    profiles: Path,
    applications: Iterable[str],
    nodes: Sequence[Node],
    slowdown: Mapping[str, float] | None = None,
) -> SimulatedPolicy:
    """One of ``TYPE_AWARE``, for a pool of these nodes and the profiles in a directory."""
    sizes = {node.type: node.devices for node in nodes}
    types = tuple(sizes)
    prior = load_prior(profiles, applications, types, slowdown)
    if name == "sia":
        return SimulatedPolicy(
            name=name,
            policy=SiaPolicy(restart_s_by_program=BELIEVED_RESTART_S),
            estimator=SiaEstimator(prior=prior, node_devices=sizes),
            declares_length=False,
        )
    is_blind = name == BLIND
    return SimulatedPolicy(
        name=name,
        policy=Allocator(AllocatorOptions(learns_from_programs=not is_blind)),
        estimator=CrossTypeFitter(types=types, prior=prior),
        is_shared=not is_blind,
        declares_length=not is_blind,
    )
