"""What the comparisons share: the words of their command line, the bar, what they print and write."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from rich.console import Console

Run = TypeVar("Run")


def make_parser(
    about: str | None, *, only: Collection[str], kind: str, contenders: Collection[str]
) -> argparse.ArgumentParser:
    """Rounds, cases and places; ``kind`` is what ``--only`` chooses from."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each contender (5)")
    parser.add_argument("--quick", action="store_true", help="fewer steps, for a first look")
    parser.add_argument("--only", action="append", choices=only, help=f"a {kind}; repeat")
    parser.add_argument(
        "--contenders", nargs="+", choices=contenders, default=list(contenders), metavar="NAME",
        help=f"of {', '.join(contenders)}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write every run and verdict here")
    parser.add_argument("--keep", type=Path, help="directory for data, logs and runs")
    return parser


def gather(
    make_data: Callable[[], None],
    rounds: Iterable[tuple[str, Run | str]],
    *,
    total: int,
    screen: Console,
) -> tuple[list[Run], int]:
    """Measure, with a bar; the runs that gave figures, and how many did not.

    ``rounds`` gives the title of each run, and its figures, or why it failed.
    """
    runs: list[Run] = []
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Interrupted, it shows what it has.
    with (
        suppress(KeyboardInterrupt),
        Progress(*columns, TimeElapsedColumn(), console=screen) as bar,
    ):
        task = bar.add_task("making the data", total=total)
        make_data()
        bar.update(task, description="measuring")
        for title, found in rounds:
            bar.update(task, description=title, advance=1)
            if isinstance(found, str):
                failed += 1
                screen.print(f"{title} failed: {found}", markup=False)
            else:
                runs.append(found)
    return runs, failed


def write_figures(path: Path, runs: Iterable[Any], figures: Any) -> None:
    """Every run and verdict, as JSON."""
    path.write_text(json.dumps({"runs": [asdict(run) for run in runs], "figures": figures}))
