"""``yunlu pool``: the pool of this home, its machines, its queue, and why it does what it does."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter
from rich.live import Live

from yunlu.core.errors import StoreError, YunluError
from yunlu.core.settings import read_settings
from yunlu.jobs import service
from yunlu.render.terminal.page import indented, make_console, to_json
from yunlu.render.terminal.pool_tables import pool_page, terms_line, why_page
from yunlu.runs.states import RunState
from yunlu.scheduler import control
from yunlu.scheduler.explanation import explain
from yunlu.scheduler.pool_store import PoolStore, PoolSettings
from yunlu.scheduler.queue import change_terms, read_entry, scan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Number = Annotated[int | None, Parameter(show_default=False)]

_REFRESH_S = 0.5
_LOOK_S, _LOOK_AFAR_S = 1.0, 3.0
"""How often a machine, and how often a cluster, is asked how its runs stand."""

_RESTING = {"pause": "paused", "stop": "stopped"}
_PHASES = {
    RunState.PLANNING: "starting",
    RunState.RUNNING: "running",
    RunState.STOPPING: "leaving",
}
"""Of runs that go on without a service."""

pool = App(
    name="pool",
    help="Share devices among jobs: bring a pool up, watch it, ask why.",
    group_commands=Group("Commands"),
)
pool.command(
    "yunlu.cli.pool_simulate:simulate",
    name="simulate",
    help="Replay recorded jobs on a cluster with one policy or several.",
)
pool.command(
    "yunlu.cli.pool_spot:spot",
    name="spot",
    help="Replay a job with a deadline on recorded spot machines: what it would have cost.",
)


@pool.default
def show_pool(*, once: bool = False, json: bool = False) -> int:
    """Show machines, who holds what, and the queue with predicted starts and ends.

    Args:
        once: Print it once, instead of keeping it up to date until Ctrl-C.
        json: Print it once, as one JSON object.
    """
    home = service.home()
    if json:
        print(to_json(look(home)))
        return 0
    console = make_console()
    if once or not console.is_terminal:
        console.print(indented(pool_page(look(home), now=time.time())))
        return 0
    with Live(console=console, auto_refresh=False, screen=False) as live:
        try:
            while True:
                live.update(indented(pool_page(look(home), now=time.time())), refresh=True)
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
    """Turn this machine, or a cluster, into a pool; one for each home. Runs that go on are adopted.

    Without options, the pool is as it was when it was last up; with any, it is as they say.

    Args:
        devices: How many: GPUs, or equal shares of this machine's processors; all GPUs, else cores.
        slurm: A Slurm partition instead of this machine; "" is its default one.
        ray: The address of a Ray cluster instead, such as head:10001; on a node of it: ray.
        policy: How devices are shared: yunlu, fifo, ..., or your own module:Class.
        round_s: Seconds between decisions where nothing happens; what happens is answered at once.
        quota: Devices that are always a team's to claim: vision=8; may be repeated.
        borrow: How many more a team may hold while nobody else wants them: vision=4; any without a word.
        weight: How much of what is left over goes to a team, against 1 for the others: vision=2.
        idle_s: Seconds after which a machine that nobody uses is given back, where machines come and go.
        max_nodes: The most machines to have, where they come and go; those always there included.
        max_dollars: What all machines together may cost an hour.
        team_dollars: What the machines asked for a team may cost an hour: vision=12.50.
        price: What a machine of a kind costs an hour: a100=32.77, a100-spot=9.80; may be repeated.
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
    settings = PoolSettings(
        executor=_address(devices, slurm, ray),
        policy=policy,
        round_s=round_s,
        look_s=_LOOK_S if slurm is None and ray is None else _LOOK_AFAR_S,
        quotas={team: int(count) for team, count in _of_teams("quota", quota, int)},
        borrow={team: int(count) for team, count in _of_teams("borrow", borrow, int)},
        weights=dict(_of_teams("weight", weight, float)),
        team_dollars_per_hour=dict(_of_teams("team-dollars", team_dollars, float)),
        prices=dict(_of_teams("price", price, float, of="machine", example="a100=32.77")),
        idle_s=idle_s,
        max_nodes=max_nodes,
        max_dollars_per_hour=max_dollars,
        dollars_per_hour=read_settings().dollars_per_hour,
    )
    home = service.home()
    before = _as_before(home, settings)
    settings = before or settings
    from yunlu.scheduler.policies import open_policy  # noqa: PLC0415 (arrays are slow to import)

    open_policy(settings.policy)  # refused here rather than in the log
    found = control.bring_up(home, settings)
    view = look(home)
    devices_there, nodes_there = int(view.get("devices") or 0), len(view.get("nodes") or ())
    if json:
        print(to_json({"is_up": True, "pid": found.pid, "devices": devices_there,
                       "nodes": nodes_there, "policy": settings.policy, "home": str(home)}))  # fmt: skip
        return 0
    console = make_console()
    console.print(
        f" up          {_count(devices_there, 'device')} on {_count(nodes_there, 'node')}, "
        f"policy {settings.policy} (process {found.pid})"
    )
    if before is not None:
        console.print(f" as it was last: {before.executor}; options change it", style="dim")
    if view.get("limits"):
        console.print(f" limits      {view['limits']}", style="dim")
    for words in (view.get("troubles") or {}).values():
        console.print(f" {words}", style="yellow")
    console.print(
        " yunlu submit JOB queues a job; yunlu pool shows what becomes of it", style="dim"
    )
    return 0


@pool.command
def down(*, stop_jobs: bool = False, json: bool = False) -> int:
    """End the pool's service. Its runs go on, and the next service adopts them.

    Args:
        stop_jobs: Also let every run save and stop; they stay in the queue.
        json: Print one JSON line.
    """
    was_up = control.bring_down(service.home(), stop_jobs=stop_jobs)
    if json:
        print(to_json({"was_up": was_up, "stopped_jobs": stop_jobs}))
        return 0
    words = "down; runs go on" if not stop_jobs else "down; runs save and stop, and stay queued"
    make_console().print(f" {words}" if was_up else " no pool was up")
    return 0


@pool.command
def why(run: str = "last", /, *, json: bool = False) -> int:
    """Explain what the pool decided on a run, and what it waits for.

    Args:
        run: Its id, a unique beginning of it, or: last.
        json: Print it as one JSON object.
    """
    found = explain(service.home(), service.find(run))
    if json:
        print(to_json(found.model_dump(mode="json")))
        return 0
    make_console().print(indented(why_page(found)))
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
    """Change what was asked for a queued run, also while it runs; the pool follows at its next look.

    Args:
        run: Its id, a unique beginning of it, or: last.
        priority: Higher goes first; 0 is usual.
        deadline: When it should be done, from now: 90min, 36h; or: none.
        budget: What it may cost in all, in dollars; or: none.
        min_devices: It does not start on fewer.
        max_devices: It is never given more.
        json: Print what is asked for it now, as one JSON line.
    """
    asked = (priority, deadline, budget, min_devices, max_devices)
    if all(each is None for each in asked):
        raise StoreError(
            "nothing is to be changed", hint="say --priority, --deadline, --budget, ..."
        )
    store = service.find(run)
    entry = change_terms(
        store,
        priority=priority,
        deadline=deadline,
        budget=budget,
        min_devices=min_devices,
        max_devices=max_devices,
    )
    if json:
        print(to_json({"run": store.id, **entry.model_dump(mode="json")}))
        return 0
    make_console().print(f"[bold]{store.id}[/]: {terms_line(entry, now=time.time())}")
    return 0


def look(home: Path) -> dict[str, Any]:
    """What the service last saw; without one, the queue as its files have it."""
    found, view = control.find_service(home), PoolStore(home).read_view()
    if found is not None and view is not None:
        return {"is_up": True, "pid": found.pid, **view}
    queued: list[dict[str, Any]] = []
    troubles: dict[str, str] = {}
    for store in scan(home) if home.is_dir() else ():
        try:
            record, entry = service.read_record(store), read_entry(store)
        except YunluError as error:  # one that cannot be read does not hide the others
            troubles[store.id] = str(error)
            continue
        if entry is None or not (record.state.is_active or record.state.can_resume):
            continue
        queued.append(
            {
                "id": store.id,
                "state": record.state.value,
                "phase": _PHASES.get(record.state) or _RESTING.get(entry.wish, "waiting"),
                "priority": entry.priority,
                "team": entry.team,
                "progress": record.progress,
                "submitted_at": entry.submitted_at,
            }
        )
    queued.sort(key=lambda run: (-run["priority"], run["submitted_at"]))
    return {"is_up": False, "runs": queued, "nodes": [], "troubles": troubles}


def _as_before(home: Path, said: PoolSettings) -> PoolSettings | None:
    """How the pool was last up, where nothing was said; none where it never was."""
    nothing = PoolSettings(dollars_per_hour=said.dollars_per_hour)
    if said != nothing:
        return None
    with suppress(StoreError):  # of another version: a new one is written
        before = PoolStore(home).read_settings()
        return before if before != nothing else None
    return None


def _address(devices: int | None, slurm: str | None, ray: str | None) -> str:
    if slurm is not None:
        return f"slurm://{slurm}"
    if ray is not None:
        is_whole = "://" in ray or ray.partition("?")[0] == "ray"
        return ray if is_whole else f"ray://{ray}"
    return "local" if devices is None else f"local://?devices={devices}"


def _of_teams(
    option: str,
    texts: Iterable[str],
    kind: type[int | float],
    *,
    of: str = "team",
    example: str = "vision=8",
) -> Iterator[tuple[str, float]]:
    """A figure of each team, or kind of machine, that is named."""
    for text in texts:
        team, _, told = text.partition("=")
        try:
            number = kind(told)
        except ValueError:
            number = -1
        if not team or not 0 <= number < math.inf or (option == "weight" and not number):
            raise StoreError(
                f"--{option}: {text!r} is not a {of} and a number", hint=f"say {example}"
            )
        yield team, number


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
