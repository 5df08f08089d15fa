"""``yunlu pool spot``: cost of a job with a deadline on spot, replayed on a trace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - the command line is read from annotations
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from yunlu.core.errors import YunluError
from yunlu.core.units import show_duration
from yunlu.render.terminal.page import indented, make_console, plain_table, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from yunlu.lab.spot.replay import PolicySummary
    from yunlu.scheduler.spot import DeadlineJob, SpotMarket

_HOUR_S = 3600.0
Words = Annotated[str | None, Parameter(show_default=False)]


class SpotError(YunluError):
    """Invalid options of a spot replay."""

    code = "spot"


def spot(
    *trace: Path,
    work: float = 24.0,
    deadline: float = 36.0,
    restart: float = 0.1,
    price: float = 0.3,
    instance: Words = None,
    zone: str = "",
    below: float = 1.0,
    starts: int = 10,
    seed: int = 0,
    past: bool = True,
    interruptions: bool = False,
    optimum: bool = True,
    plot: Annotated[Path | None, Parameter(show_default=False)] = None,
    json: bool = False,
) -> int:
    """Replay a job with a deadline on the history of spot: its cost against on-demand.

    TRACE is a file of availability (JSON), several of them, directories of them, or a history of prices
    (CSV, also with gzip; then --instance says which). Nothing of the future is used but by the
    optimum, which knows it all.

    Args:
        trace: Files or directories.
        work: Hours of work.
        deadline: Hours from its start in which the work must be done.
        restart: Hours that each start costs.
        price: What spot costs against on-demand, where the trace does not say.
        instance: Which machine of a history of prices.
        zone: Only zones whose names begin so, of a history of prices.
        below: Spot counts as up while it costs less than this share of on-demand.
        starts: How many random starts in each zone.
        seed: Of the random starts.
        past: Whether the past of a zone before the job's start is known.
        interruptions: Take machines of a price history away at random, as the shipped model says.
        optimum: Seek the least that could have been paid, too.
        plot: Draw one job of each kind of policy, and all costs, into a file: out.png or out.svg.
        json: Print one JSON object.
    """
    import numpy as np  # noqa: PLC0415 - other verbs do not need it

    from yunlu.lab.spot.replay import draw_starts, replay_jobs, summarise_policies  # noqa: PLC0415

    job = _make_job(work, deadline, restart)
    if plot is not None:
        from yunlu.lab.spot.figures import check_spot_plot  # noqa: PLC0415

        check_spot_plot(plot)
    random = np.random.default_rng(seed)
    markets = _read(trace, price=price, instance=instance, zone=zone, below=below)
    markets = [
        market for market in markets if len(market) * market.step_s > job.deadline_s
    ] or markets
    if interruptions:
        from yunlu.lab.spot.replay import interrupt  # noqa: PLC0415
        from yunlu.scheduler.spot import PRIOR  # noqa: PLC0415

        markets = [interrupt(market, PRIOR, random=random) for market in markets]
    begun = draw_starts(markets, job, per_market=starts, random=random)
    trials = replay_jobs(job, begun, knows_past=past, with_optimum=optimum)
    standings = summarise_policies(trials)
    if plot is not None:
        from yunlu.lab.spot.figures import write_spot_plot  # noqa: PLC0415

        write_spot_plot(
            job, trials, dict(zip([market.name for market in markets], markets, strict=True)), plot
        )
    if json:
        record: dict[str, Any] = {
            "job": asdict(job),
            "zones": len(markets),
            "trials": len(trials),
            "seed": seed,
            "policies": [asdict(standing) for standing in standings],
        }
        print_json(record)
        return 0
    console = make_console()
    console.print(
        f" {show_duration(job.work_s)} of work, {show_duration(job.deadline_s)} to do it, "
        f"{show_duration(job.restart_s)} a start: {len(trials)} jobs, zones: {len(markets)}"
    )
    console.print(indented(_table(standings)))
    if plot is not None:
        console.print(f" picture in {plot}")
    return 0


def _make_job(work: float, deadline: float, restart: float) -> DeadlineJob:
    from yunlu.scheduler.spot import DeadlineJob  # noqa: PLC0415 - imports numpy's types only

    if not (work > 0 and restart >= 0):
        raise SpotError("--work must be above 0 and --restart not below it.")
    job = DeadlineJob(
        work_s=work * _HOUR_S, deadline_s=deadline * _HOUR_S, restart_s=restart * _HOUR_S
    )
    if not job.is_feasible:
        raise SpotError(
            f"--deadline: {deadline:g} h are not enough for {work:g} h of work and a start of "
            f"{restart:g} h, even on on-demand.",
            hint=f"give at least {work + restart:g} h",
        )
    return job


def _read(
    paths: Sequence[Path], *, price: float, instance: str | None, zone: str, below: float
) -> list[SpotMarket]:
    from yunlu.lab.spot.replay import read_availability, read_prices  # noqa: PLC0415

    if not 0 < price < 1:
        raise SpotError(f"--price: {price:g} is not between 0 and 1, the price of on-demand.")
    for path in paths:
        if not path.exists():
            raise SpotError(f"there is no {path}.", hint="name a file, or a directory of files")
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])
    ]
    if not files:
        raise SpotError(
            "no trace in " + ", ".join(map(str, paths)), hint="name files that end in .json"
        )
    markets: list[SpotMarket] = []
    for file in files:
        if ".csv" in file.suffixes:
            if instance is None:
                raise SpotError(
                    f"{file} holds many machines.", hint="say which: --instance p3.2xlarge"
                )
            markets += read_prices(file, instance=instance, zones=zone, below=below)
        else:
            markets.append(
                read_availability(file, spot_dollars_per_hour=price, on_demand_dollars_per_hour=1.0)
            )
    return markets


def _table(standings: Sequence[PolicySummary]) -> Table:
    table = plain_table()
    table.add_column("policy", no_wrap=True)
    for head in ("cost / on-demand", "worst", "late", "starts", "time on spot"):
        table.add_column(head, justify="right")
    for standing in standings:
        is_known = standing.starts == standing.starts
        table.add_row(
            standing.policy,
            f"{standing.ratio:.3f}",
            f"{standing.worst_ratio:.3f}",
            str(standing.late),
            f"{standing.starts:.1f}" if is_known else "–",
            f"{standing.spot_share:.0%}" if is_known else "–",
        )
    return table
