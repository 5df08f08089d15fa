"""A study of successive halving on shares of this machine, for real: one share for each trial, and elastic.

``make bench-tune-live`` runs this; ``benchmarks/README.md`` says how to read what it prints.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console
from rich.table import Table

from benchmarks.tune_live_parts.study_runs import (
    Mode,
    StudyRecord,
    make_job,
    predict_study,
    run_study,
)

if TYPE_CHECKING:
    from yunlu.tuning.forecast import StudyForecast

MODES: tuple[Mode, ...] = ("static", "elastic")
GOAL = 1.4


def main() -> int:
    """Live through the study in both ways, in turns, and print the table."""
    request = _parse()
    screen = Console(stderr=True)
    directory = (request.keep or Path(tempfile.mkdtemp(prefix="yunlu-tune-"))).absolute()
    job = make_job(trials=request.trials, steps=request.steps, seed=request.seed)
    with screen.status("planning"):
        forecasts = predict_study(job, devices=request.devices)
    records: list[StudyRecord] = []
    for turn in range(request.repeat):
        for mode in request.modes:
            home = directory / f"{mode}-{turn}"
            home.mkdir(parents=True)
            with screen.status(f"{mode}: 0 of {request.trials} trials") as status:
                records.append(
                    run_study(
                        job,
                        home,
                        mode=mode,
                        devices=request.devices,
                        watch=lambda view, mode=mode: status.update(
                            f"{mode}: {len(view.trials)} of {request.trials} trials begun, "
                            f"{sum(facts.state.is_over for facts in view.trials)} over"
                        ),
                    )
                )
            _write(request.json, records, forecasts)
    Console(width=120).print(_table(records, forecasts))
    ratio = compare(records)
    words = "" if ratio is None else f"static / elastic: {ratio:.2f} (to reach: {GOAL})\n"
    print(f"{words}runs and logs: {directory}")  # noqa: T201 (its product)
    is_whole = all(each.samples_lost == 0 and each.done for each in records)
    return 0 if is_whole and (ratio is None or ratio >= GOAL) else 1


def compare(records: list[StudyRecord]) -> float | None:
    """The median makespan of static over that of elastic; None where one is missing."""
    spans = {mode: [each.makespan_s for each in records if each.mode == mode] for mode in MODES}
    return median(spans["static"]) / median(spans["elastic"]) if all(spans.values()) else None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=4, help="shares of this machine (4)")
    parser.add_argument("--trials", type=int, default=9, help="settings that begin (9)")
    parser.add_argument("--steps", type=int, default=160, help="steps of a rung (160)")
    parser.add_argument("--seed", type=int, default=0, help="decides the settings")
    parser.add_argument("--repeat", type=int, default=1, help="how often, in turns (1)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--keep", type=Path, help="directory for runs and logs")
    return parser.parse_args()


def _table(records: list[StudyRecord], forecasts: dict[Mode, StudyForecast]) -> Table:
    table = Table(title="successive halving, live", title_justify="left")
    for title in ("", "makespan, s", "predicted", "trials", "to the end", "attempts", "resizes",
                  "samples lost", "best loss"):  # fmt: skip
        table.add_column(title, justify="right" if title else "left")
    for each in records:
        seconds = forecasts[each.mode].seconds
        assert seconds is not None
        table.add_row(
            each.mode,
            f"{each.makespan_s:.1f}",
            f"{seconds.value:.0f} ({seconds.low:.0f} to {seconds.high:.0f})",
            str(each.trials),
            str(each.done),
            str(each.attempts),
            str(each.resizes),
            str(each.samples_lost),
            f"{each.best:.4f}",
        )
    return table


def _write(
    path: Path | None, records: list[StudyRecord], forecasts: dict[Mode, StudyForecast]
) -> None:
    if path is not None:
        content = {
            "studies": [asdict(each) for each in records],
            "predicted": {mode: each.model_dump(mode="json") for mode, each in forecasts.items()},
        }
        path.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
