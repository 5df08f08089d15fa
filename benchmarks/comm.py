"""Ways of communicating over slow links: hosts with limited bandwidth on this machine, dense DDP as the measure.

``make bench-comm`` runs this; ``benchmarks/README.md`` says how to read what it prints. Needs root.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, from anywhere

from rich.console import Console

from benchmarks.comm_parts.figures import (
    judge_sums,
    judge_training,
    make_sum_tables,
    make_training_tables,
)
from benchmarks.comm_parts.sums_trial import SIZES, SumTime, measure_sums
from benchmarks.comm_parts.trial import Result, TrialError, run_trial
from benchmarks.comm_parts.workload import Workload, entropy
from benchmarks.comm_parts.yunlu_trial import run_yunlu
from benchmarks.measurement import gather
from benchmarks.netrig import Rig, RigError, why_no_rig

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = ("allreduce", "training", "straggler", "auto")
METHODS = (
    "ddp", "ddp-hook:hook=fp16", "ring", "direct", "fp16", "int8", "int4", "topk",
    "powersgd:rank=4", "local:every=4,codec=int4", "local:every=4,codec=onebit", "diloco:every=100",
)  # fmt: skip
"""Of the plain loop; each but the first two is Yunlu's, without its engine."""
STRAGGLER_METHODS = (
    "ddp", "int8", "local:every=4,codec=int4", "diloco:every=100",
    "yunlu exact", "yunlu near", "yunlu relaxed",
)  # fmt: skip
AUTO_METHODS = (
    "ddp", "yunlu all-reduce", "yunlu ring", "yunlu direct", "yunlu exact",
    "yunlu direct + int8", "yunlu direct + onebit", "yunlu near",
    "yunlu direct + powersgd", "yunlu local + int4", "yunlu local + onebit", "yunlu relaxed",
)  # fmt: skip
"""What a job says after ``yunlu``: a guarantee, for which Yunlu chooses, or a fixed choice."""
SMOOTHED = frozenset({"straggler", "auto"})
"""Parts with rows of the engine, which keeps no weights to be looked at later: loss is that of training."""
STEPS, TARGET = 400, 0.6
QUICK_STEPS, QUICK_TARGET = 60, 3.05
BUSY = 3
"""Competitors for the core of a busy host."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run on a rig of its own."""

    part: str
    rate: str
    hosts: int
    method: str = ""
    setting: str = ""
    round: int = 0

    @property
    def title(self) -> str:
        """For the bar."""
        words = (self.part, self.method, f"{self.hosts} hosts", self.rate, self.setting)
        return ", ".join(word for word in words if word)


@dataclass(slots=True)
class Found:
    """All that was measured."""

    sums: list[SumTime] = field(default_factory=list[SumTime])
    results: dict[str, list[Result]] = field(default_factory=dict[str, list[Result]])
    chosen: dict[tuple[str, str, str], str] = field(default_factory=dict[tuple[str, str, str], str])


def main() -> int:
    """Measure, print the tables, and say by the exit code whether every run gave figures."""
    asked = _parse()
    screen = Console(stderr=True)
    reason = why_no_rig()
    if reason is not None:
        screen.print(f"This benchmark needs hosts with links that it can limit: {reason}.")
        return 2
    cases = list(_list_cases(asked))
    found = Found()
    _, failed = gather(
        lambda: None,
        ((case.title, _measure(case, asked, found)) for case in cases),
        total=len(cases),
        screen=screen,
    )
    print(_heading(asked))  # noqa: T201 (its product)
    print(_make_tables(found, asked.target))  # noqa: T201
    if asked.json:
        _write(asked.json, found, asked.target)
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeat")
    parser.add_argument("--rounds", type=int, default=3, help="of each case (3)")
    parser.add_argument("--quick", action="store_true", help="few steps, for a first look")
    parser.add_argument("--steps", type=int, help=f"of training ({STEPS}; quick {QUICK_STEPS})")
    parser.add_argument("--target", type=float, help=f"loss ({TARGET}; quick {QUICK_TARGET})")
    parser.add_argument("--hosts", default="2,4", help="of all-reduce (2,4); training has the last")
    parser.add_argument("--rates", default="100mbit,20mbit", help="of training (100mbit,20mbit)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="of training, instead of all")
    parser.add_argument(
        "--undisturbed-ddp", action="store_true", help="DDP without a straggler only: it is slow"
    )
    parser.add_argument("--json", type=Path, help="write every run and verdict here")
    parser.add_argument("--keep", type=Path, help="directory for logs and runs")
    asked = parser.parse_args()
    asked.steps = asked.steps or (QUICK_STEPS if asked.quick else STEPS)
    asked.target = asked.target or (QUICK_TARGET if asked.quick else TARGET)
    asked.host_counts = [int(count) for count in asked.hosts.split(",")]
    return asked


def _list_cases(asked: argparse.Namespace) -> Iterator[Case]:
    """Those of one rate and round stand together, so they see one weather."""
    parts = asked.only or PARTS
    hosts, rates = asked.host_counts[-1], asked.rates.split(",")
    if "allreduce" in parts:  # its rounds are within one run
        for count in asked.host_counts:
            for rate in ("100mbit", "none"):
                yield Case("allreduce", rate, count)
    methods = {"training": METHODS, "straggler": STRAGGLER_METHODS, "auto": AUTO_METHODS}
    for part, listed in methods.items():
        if part not in parts:
            continue
        for rate in rates[:1] if part == "straggler" else rates:
            for number in range(asked.rounds):
                for method in asked.methods or listed:
                    if part != "straggler" or method == "ddp":
                        yield Case(part, rate, hosts, method, "", number)
                    if part == "straggler" and not (method == "ddp" and asked.undisturbed_ddp):
                        yield Case(part, rate, hosts, method, "one link at a quarter", number)
                        yield Case(part, rate, hosts, method, "one host busy", number)


def _measure(case: Case, asked: argparse.Namespace, found: Found) -> Case | str:
    """Run it, and put down its figures; a text is why there are none."""
    place = asked.keep and asked.keep / case.title.replace(" ", "-").replace("/", "") / str(
        case.round
    )
    last = case.hosts - 1
    busy = {last: BUSY} if case.setting == "one host busy" else {}
    try:
        # A busy host and what it is compared with: each host keeps to one core, in turn.
        with Rig(case.hosts, rate=case.rate, pin=case.part == "straggler") as rig:
            if case.part == "allreduce":
                rounds = 3 * asked.rounds
                sizes = SIZES[::2] if asked.quick else SIZES
                found.sums += measure_sums(rig, rate=case.rate, rounds=rounds, sizes=sizes)
                return case
            if case.setting == "one link at a quarter":
                rig.rate(last, _quarter(case.rate))
            words: dict[str, Any] = {
                "rate": case.rate,
                "setting": case.setting,
                "round_number": case.round,
            }
            if case.method.startswith("yunlu "):
                run = run_yunlu(
                    rig, case.method.removeprefix("yunlu "), steps=asked.steps, busy=busy,
                    directory=place, **words,
                )  # fmt: skip
                found.chosen[case.rate, case.setting, case.method] = run.chosen
                result = run.result
            else:
                result = run_trial(
                    rig, case.method, steps=asked.steps, every=max(5, asked.steps // 40),
                    busy=busy, directory=place, **words,
                )  # fmt: skip
            found.results.setdefault(case.part, []).append(result)
    except (RigError, TrialError, OSError) as error:
        return str(error)
    return case


def _quarter(rate: str) -> str:
    number = rate.rstrip("kmgbit")
    return f"{float(number) / 4:g}{rate.removeprefix(number)}"


def _make_tables(found: Found, target: float) -> str:
    tables = [make_sum_tables(found.sums)] if found.sums else []
    for part, results in found.results.items():
        smooth = part in SMOOTHED
        tables.append(make_training_tables(results, target, smooth=smooth, chosen=found.chosen))
    return "\n".join(tables)


def _write(path: Path, found: Found, target: float) -> None:
    content = {
        "sums": [asdict(each) for each in found.sums],
        "runs": {part: [asdict(each) for each in runs] for part, runs in found.results.items()},
        "chosen": [[*key, words] for key, words in found.chosen.items()],
        "figures": {
            "sums": judge_sums(found.sums),
            **{
                part: judge_training(runs, target, smooth=part in SMOOTHED)
                for part, runs in found.results.items()
            },
        },
    }
    path.write_text(json.dumps(content))


def _heading(asked: argparse.Namespace) -> str:
    listed = ", ".join(f"{name} {metadata.version(name)}" for name in ("yunlu", "torch"))
    work = Workload()
    return (
        f"{listed}; {asked.rounds} rounds (of sums, three times as many), medians. Training: {work.layers} layers of {work.width}, "
        f"{work.host_batch} × {work.length} letters a host, {asked.steps} steps; the text's entropy "
        f"is {entropy(work):.3f} nats a letter.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
