"""``yunlu pool``, ``submit``, ``priority``, ``pause``: share devices among jobs, and say why so."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter
from rich.text import Text

from yunlu.client import default_client
from yunlu.core.errors import StoreError
from yunlu.render.terminal.page import (
    indented,
    make_console,
    print_json,
    print_lines,
    print_value,
    state_text,
    title_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from yunlu.scheduler.pool_view import PoolView

Number = Annotated[int | None, Parameter(show_default=False)]

_REFRESH_S = 0.5

pool = App(
    name="pool",
    help="Share devices among jobs: start a pool, watch it, explain its decisions.",
    group_commands=Group("Commands"),
)
pool.command(
    "yunlu.lab.simulate_command:simulate",
    name="simulate",
    help="Replay recorded jobs on a cluster with one policy or several.",
)
pool.command(
    "yunlu.lab.spot_command:spot",
    name="spot",
    help="Replay a job with a deadline on recorded spot machines: what it would have cost.",
)


@pool.default
def show_pool(*, once: bool = False, json: bool = False) -> int:
    """Show nodes, who holds which devices, and the queue with predicted starts and ends.

    Args:
        once: Print it once, instead of keeping it up to date until Ctrl-C.
        json: Print it once, as one JSON object.
    """
    client = default_client()
    if json:
        print_json(_dump(client.pool()))
        return 0
    from rich.live import Live  # noqa: PLC0415 (slow to import)

    from yunlu.render.terminal.pool_tables import pool_page  # noqa: PLC0415 (as above)

    console = make_console()
    if once or not console.is_terminal:
        console.print(indented(pool_page(client.pool(), now=time.time())))
        return 0
    with Live(console=console, auto_refresh=False, screen=False) as live:
        try:
            while True:
                live.update(indented(pool_page(client.pool(), now=time.time())), refresh=True)
                time.sleep(_REFRESH_S)
        except KeyboardInterrupt:
            return 0


@pool.command
def up(
    *,
    devices: Number = None,
    slurm: Annotated[str | None, Parameter(show_default=False)] = None,
    ray: Annotated[str | None, Parameter(show_default=False)] = None,
    policy: str = "yunlu",
    round_s: Annotated[float, Parameter(name="--round")] = 30.0,
    quota: tuple[str, ...] = (),
    borrow: tuple[str, ...] = (),
    weight: tuple[str, ...] = (),
    idle_s: Annotated[float, Parameter(name="--idle")] = 300.0,
    max_nodes: Number = None,
    max_dollars: Annotated[float | None, Parameter(show_default=False)] = None,
    team_dollars: tuple[str, ...] = (),
    price: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Turn this machine, or a cluster, into a pool; one for each home. Active runs are adopted.

    Without options, the pool has the settings it was last up with; with any option, only those given.

    Args:
        devices: Number of devices: GPUs, or equal CPU shares. Default: all GPUs, or all cores.
        slurm: A Slurm partition instead of this machine; "" is its default one.
        ray: The address of a Ray cluster instead, such as head:10001; on a node of it: ray.
        policy: Allocation policy: yunlu, fifo, ..., or your own module:Class.
        round_s: Seconds between two decisions; an event leads to a decision at once.
        quota: Devices guaranteed to a team: vision=8; may be repeated.
        borrow: Idle devices that a team may borrow beyond its quota: vision=4. Default: any number.
        weight: Weight of a team when idle devices are shared out; 1 for the others: vision=2.
        idle_s: Seconds after which an idle node is released, where nodes can be requested.
        max_nodes: Most nodes, where nodes can be requested; permanent ones count.
        max_dollars: Most that all nodes may cost per hour.
        team_dollars: Most that nodes requested for a team may cost per hour: vision=12.50.
        price: Price of a node type per hour: a100=32.77, a100-spot=9.80; may be repeated.
        json: Print one JSON line.
    """
    if sum(choice is not None for choice in (devices, slurm, ray)) > 1:
        raise StoreError("--devices, --slurm and --ray exclude each other")
    if devices is not None and devices < 1:
        raise StoreError(f"--devices: {devices} is not a number of devices", hint="say 1 or more")
    if not round_s > 0:
        raise StoreError(f"--round: {round_s:g} is not above 0")
    for name, number in (("idle", idle_s), ("max-nodes", max_nodes), ("max-dollars", max_dollars)):
        if number is not None and not number >= 0:
            raise StoreError(f"--{name}: {number:g} is below 0")
    started = default_client().pool_up(
        executor=_address(devices, slurm, ray),
        policy=policy,
        round_s=round_s,
        quotas={team: int(count) for team, count in _read_pairs("quota", quota, int)},
        borrow={team: int(count) for team, count in _read_pairs("borrow", borrow, int)},
        weights=dict(_read_pairs("weight", weight, float)),
        team_dollars_per_hour=dict(_read_pairs("team-dollars", team_dollars, float)),
        prices=dict(_read_pairs("price", price, float, of="machine", example="a100=32.77")),
        idle_s=idle_s,
        max_nodes=max_nodes,
        max_dollars_per_hour=max_dollars,
    )
    view, settings = started.view, started.settings
    if json:
        print_json({"is_up": True, "pid": started.pid, "devices": view.devices,
                    "nodes": len(view.nodes), "policy": settings.policy,
                    "home": started.home})  # fmt: skip
        return 0
    console = make_console()
    lines = [
        Text(
            f" up          {_count(view.devices, 'device')} on {_count(len(view.nodes), 'node')}, "
            f"policy {settings.policy} (process {started.pid})"
        )
    ]
    if started.is_as_before:
        lines.append(Text(f" as it was last: {settings.executor}; options change it", style="dim"))
    if view.limits:
        lines.append(Text(f" limits      {view.limits}", style="dim"))
    lines += [Text(f" {trouble}", style="yellow") for trouble in view.troubles.values()]
    lines.append(Text(" yunlu submit JOB queues a job; yunlu pool shows its progress", style="dim"))
    for line in lines:
        print_lines(console, line)
    return 0


@pool.command
def down(*, stop_jobs: bool = False, json: bool = False) -> int:
    """End the service of the pool. Its runs continue, and the next service adopts them.

    Args:
        stop_jobs: Also save and stop every run; they stay in the queue.
        json: Print one JSON line.
    """
    ended = default_client().pool_down(stop_jobs=stop_jobs)
    if json:
        print_value(ended)
        return 0
    runs = "runs save and stop, and stay queued" if stop_jobs else "runs continue"
    make_console().print(f" down; {runs}" if ended.was_up else " no pool was up")
    return 0


@pool.command
def why(run: str = "last", /, *, json: bool = False) -> int:
    """Explain what the pool decided on a run, and what it waits for.

    Args:
        run: Its id, a unique prefix of it, or: last.
        json: Print it as one JSON object.
    """
    explanation = default_client().pool_why(run)
    if json:
        print_value(explanation)
        return 0
    from yunlu.render.terminal.pool_tables import why_page  # noqa: PLC0415 (slow to import)

    make_console().print(indented(why_page(explanation)))
    return 0


@pool.command
def change(
    run: str,
    /,
    *,
    priority: Number = None,
    deadline: Annotated[str | None, Parameter(show_default=False)] = None,
    budget: Annotated[str | None, Parameter(show_default=False)] = None,
    min_devices: Number = None,
    max_devices: Number = None,
    json: bool = False,
) -> int:
    """Change priority, deadline, budget or devices of a queued run, also while it runs.

    Args:
        run: Its id, a unique prefix of it, or: last.
        priority: Higher goes first; 0 is usual.
        deadline: When it should be finished, from now: 90min, 36h; or: none.
        budget: Most it may cost in all, in dollars; or: none.
        min_devices: Fewest devices it starts on.
        max_devices: Most devices it is given.
        json: Print the new terms as one JSON line.
    """
    terms = (priority, deadline, budget, min_devices, max_devices)
    if all(term is None for term in terms):
        raise StoreError(
            "nothing is to be changed", hint="say --priority, --deadline, --budget, ..."
        )
    client = default_client()
    run_id = client.run(run).id
    entry = client.pool_change(
        run_id,
        priority=priority,
        deadline=deadline,
        budget=budget,
        min_devices=min_devices,
        max_devices=max_devices,
    )
    if json:
        print_json({"run": run_id, **entry.model_dump(mode="json")})
        return 0
    from yunlu.render.terminal.pool_tables import terms_line  # noqa: PLC0415 (slow to import)

    terms = terms_line(entry, now=time.time())
    print_lines(make_console(), Text.assemble((run_id, "bold"), f": {terms}"))
    return 0


def _dump(view: PoolView) -> dict[str, object]:
    """What is known: without a service, only the queue."""
    return view.model_dump(mode="json", exclude_unset=True)


def _address(devices: int | None, slurm: str | None, ray: str | None) -> str:
    if slurm is not None:
        return f"slurm://{slurm}"
    if ray is not None:
        is_whole = "://" in ray or ray.partition("?")[0] == "ray"
        return ray if is_whole else f"ray://{ray}"
    return "local" if devices is None else f"local://?devices={devices}"


def _read_pairs(
    option: str,
    texts: Iterable[str],
    kind: type[int | float],
    *,
    of: str = "team",
    example: str = "vision=8",
) -> Iterator[tuple[str, float]]:
    """Pairs of a name and a number: of teams, or node types."""
    for text in texts:
        team, _, figure = text.partition("=")
        try:
            number = kind(figure)
        except ValueError:
            number = -1
        if not team or not 0 <= number < math.inf or (option == "weight" and not number):
            raise StoreError(
                f"--{option}: {text!r} is not a {of} and a number", hint=f"say {example}"
            )
        yield team, number


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def submit(
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    plan: Annotated[str | None, Parameter(show_default=False)] = None,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    priority: int = 0,
    team: str = "",
    min_devices: Number = None,
    max_devices: Number = None,
    deadline: Annotated[str | None, Parameter(show_default=False)] = None,
    budget: Annotated[float | None, Parameter(show_default=False)] = None,
    rehearse: bool = True,
    json: bool = False,
) -> int:
    """Queue a job. The pool starts it in its turn, and gives it devices as they become free.

    A job that names its devices or its whole layout keeps that size, unless bounds are given here.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set train.epochs=3; may be repeated.
        plan: Train so as `yunlu plan JOB --json > FILE` planned it: FILE, or FILE:2 for its second option.
        name: Name of the run.
        priority: Higher goes first.
        team: Team whose quota it uses.
        min_devices: Fewest devices it starts on.
        max_devices: Most devices it is given.
        deadline: When it should be finished: 90min, 36h, 1d 12h from now.
        budget: Most it may cost, in dollars; it is paused when that is spent.
        rehearse: Before a pool on other machines gets it, run a step on fake tensors, to find its errors.
        json: Print one JSON line.
    """
    from yunlu.spec.load import load_job, source_of  # noqa: PLC0415 (slow to import)

    options = [f"name={name}"] if name else []
    client = default_client()
    queued = client.submit(
        load_job(job, overrides=(*overrides, *options)),
        source=source_of(job),
        plan=None if plan is None else client.load_plan(plan),
        priority=priority,
        team=team,
        min_devices=min_devices,
        max_devices=max_devices,
        deadline=deadline,
        budget=budget,
        rehearse=rehearse,
    )
    if json:
        answer = {"run": queued.run, "dir": queued.dir, "pool_is_up": queued.pool_is_up}
        note = {"rehearsal_note": queued.rehearsal_note} if queued.rehearsal_note else {}
        print_json(answer | note)
        return 0
    console = make_console()
    size = f"{queued.least}" if queued.is_rigid else f"{queued.least} or more"
    print_lines(console, title_text(queued.run, f"queued, on {size}"))
    if not queued.pool_is_up:
        print_lines(console, Text(" no pool is up yet: yunlu pool up starts it", style="yellow"))
    else:
        text = f" yunlu pool shows the queue; yunlu pool why {queued.run} explains"
        print_lines(console, Text(text))
    if queued.rehearsal_note:
        print_lines(console, Text(f" {queued.rehearsal_note}", style="yellow"))
    if near := queued.similar_team:
        text = f" team {team!r} has no quota; did you mean {near!r}? yunlu stop takes it back"
        print_lines(console, Text(text, style="yellow"))
    return 0


def priority(run: str, number: int, /, *, json: bool = False) -> int:
    """Change the priority of a queued run; the pool applies it at its next decision.

    Args:
        run: Its id, a unique prefix of it, or: last.
        number: Higher goes first; 0 is usual.
        json: Print one JSON line.
    """
    client = default_client()
    run_id = client.run(run).id
    entry = client.pool_change(run_id, priority=number)
    if json:
        print_json({"run": run_id, "priority": entry.priority})
        return 0
    make_console().print(Text.assemble((run_id, "bold"), f": priority {entry.priority}"))
    return 0


def pause(run: str = "last", /, *, json: bool = False) -> int:
    """Save a checkpoint, release the devices, and wait for `yunlu resume`.

    Args:
        run: Its id, a unique prefix of it, or: last.
        json: Print one JSON line.
    """
    client, console = default_client(), make_console()
    run_id = client.run(run).id
    with console.status(Text(f"pausing {run_id}: saving a checkpoint")):
        paused = client.pause(run_id)
    if json:
        print_json({"run": paused.id, "state": paused.state, "step": paused.step})
        return 0
    step = f" at step {paused.step}" if paused.step else ""
    result = f"is paused{step}; yunlu resume {paused.id} queues it again"
    if not paused.state.can_resume:
        result = f"has ended{step} before it could be paused"
    print_lines(console, Text.assemble(state_text(paused.state), f"  {paused.id} {result}"))
    return 0
