"""Which checks ``yunlu selftest`` makes on so many devices, their jobs, and when losses agree. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from yunlu.core.errors import JobError, did_you_mean
from yunlu.spec.job import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Family = Literal["reference", "single", "resume", "kill", "layout", "precision", "compile"]
SampleTask = Literal["text", "image", "table"]

COMPARED_STEPS = 12
"""Losses that are compared with those of the CPU: later ones drift apart by rounding alone."""
LONG_STEPS = (120, 2000)
"""Steps of a run that is disturbed: more on the second try, where the first was over too soon."""
_BATCH, _MOST_DEVICES = 16, 8
_TOLERANCES = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05, "fp8": 0.1}
"""Largest relative difference of a loss: other kernels round otherwise, and AdamW amplifies that."""
_WORDS = (
    "the cloud furnace melts grey ore into bright metal while rain falls on stone and wind turns "
    "over the slow mill of night"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCheck:
    """One check, and why it cannot be made here, if so."""

    name: str
    family: Family
    task: SampleTask = "text"
    layout: str = "single"
    precision: str = "fp32"
    devices: int = 1
    skip: str = ""


def plan_checks(
    kind: str,
    *,
    devices: int,
    precisions: Sequence[str],
    quick: bool = False,
    only: Sequence[str] = (),
) -> tuple[PlannedCheck, ...]:
    """Every check, the most telling first: the time may end before all are made."""
    most = 1 << (min(devices, _MOST_DEVICES).bit_length() - 1)
    many = max(most, 2)
    one = "" if most > 1 else "needs two devices"
    four = "" if most > 3 else "needs four devices"
    no_reference = "" if kind != "cpu" else "the CPU is what is tested"
    layouts = {
        "dp": (f"dp{many}", many, one),
        "fsdp": (f"fsdp{many}", many, one),
        "tp": ("tp2", 2, one),
        "pp": ("pp2", 2, one),
        "fsdp+tp": (f"fsdp{max(many // 2, 2)} x tp2", max(many, 4), four),
    }
    checks = [
        PlannedCheck(name="cpu", family="reference", skip=no_reference),
        PlannedCheck(name="text", family="single"),
        PlannedCheck(name="resume", family="resume"),
        PlannedCheck(name="kill", family="kill", layout="dp2", devices=2)
        if most > 1
        else PlannedCheck(name="kill", family="kill"),
        *(
            PlannedCheck(name=name, family="layout", layout=layout, devices=count, skip=skip)
            for name, (layout, count, skip) in layouts.items()
        ),
        PlannedCheck(name="image", family="single", task="image"),
        PlannedCheck(name="table", family="single", task="table"),
        *(
            PlannedCheck(
                name=name,
                family="precision",
                precision=name,
                skip="" if name in precisions else f"this {kind} does not compute in {name} itself",
            )
            for name in ("bf16", "fp16", "fp8")
        ),
        PlannedCheck(name="compile", family="compile"),
    ]
    return tuple(_left_out(check, quick=quick, only=only) for check in checks)


_QUICK = {"cpu", "text", "resume", "kill"}


def require_known(names: Sequence[str]) -> None:
    """Refuse checks that there are not."""
    for name in names:
        if name not in CHECK_NAMES:
            hint = did_you_mean(name, CHECK_NAMES)
            raise JobError(f"there is no check {name!r}", hint=hint)


def _left_out(check: PlannedCheck, *, quick: bool, only: Sequence[str]) -> PlannedCheck:
    # What others are compared with is always there.
    needed = {"cpu", "text"}
    if only and check.name not in {*only, *needed} and not check.skip:
        return replace(check, skip="not asked for")
    if quick and not only and check.name not in _QUICK and not check.skip:
        return replace(check, skip="left out by --quick")
    return check


def make_selftest_job(check: PlannedCheck, folder: Path, *, steps: int) -> Job:
    """The job of a check; everything that could differ between two runs is pinned."""
    task, model, data = _samples(check.task, folder)
    ways = math.prod(int(axis[-1]) for axis in check.layout.split(" x ") if "dp" in axis)
    micro_batch = _BATCH // 4 if "pp" in check.layout else _BATCH // ways
    train: dict[str, Any] = {
        "steps": steps,
        "batch": _BATCH,
        "micro_batch": micro_batch,
        "precision": check.precision,
        "compile": check.family == "compile",
        "evaluate": "never",
        "schedule": {"name": "constant", "warmup": 0},
        "optimizer": {"name": "adamw", "lr": 0.001},
        "checkpoint": {"every": max(steps // 10, 1)},
        "trial_share": 0.0,
        "threads": 1,
        "workers": 0,
    }
    return Job.model_validate(
        {
            "name": f"selftest-{check.name.replace('+', '-')}",
            "task": task,
            "model": model,
            "data": data,
            "train": train,
            "devices": check.devices,
            "layout": check.layout,
            # A spare takes the place of the killed worker; elsewhere it would only cost time.
            "spares": int(check.family == "kill" and check.devices > 1),
        }
    )


def _samples(task: SampleTask, folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    if task == "image":
        return (
            "image-classification",
            {"name": "cnn", "args": {"dropout": 0.0}},
            {"train": "sklearn:digits"},
        )
    if task == "table":
        data = {"train": "sklearn:breast_cancer"}
        return "tabular-classification", {"name": "mlp", "args": {"dropout": 0.0}}, data
    args = {"width": 64, "layers": 2, "heads": 4, "dropout": 0.0}
    text = {"train": str(folder / "text.txt"), "tokenizer": "bytes", "max_length": 32}
    return "language-modeling", {"name": "transformer", "args": args}, text


def make_text() -> str:
    """The same words in the same order on every machine."""
    draw, vocabulary = random.Random(0), _WORDS.split()  # noqa: S311 - not a secret
    return "\n".join(" ".join(draw.choice(vocabulary) for _ in range(12)) for _ in range(400))


@dataclass(frozen=True, slots=True)
class LossDifference:
    """Where two runs differ most."""

    step: int
    loss: float
    expected: float

    @property
    def relative(self) -> float:
        """Difference over what was expected; infinite where the loss is not finite."""
        if not math.isfinite(self.loss):
            return math.inf
        return abs(self.loss - self.expected) / max(abs(self.expected), 1e-12)


def compare_losses(
    losses: Mapping[int, float], expected: Mapping[int, float], *, steps: int | None = None
) -> LossDifference:
    """The largest difference over the steps that both have; a step that is missing is a NaN."""
    wanted = sorted(expected)[:steps]
    differences = [
        LossDifference(step, losses.get(step, math.nan), expected[step]) for step in wanted
    ]
    return max(differences, key=lambda item: item.relative)


def tolerance_of(precision: str) -> float:
    """Largest difference from the CPU's losses that is rounding."""
    return _TOLERANCES[precision]


def find_gap(losses: Mapping[int, float], steps: int) -> int | None:
    """First step that no worker made or whose loss is not finite; None if all are there."""
    for step in range(1, steps + 1):
        if not math.isfinite(losses.get(step, math.nan)):
            return step
    return None


def has_fallen(losses: Mapping[int, float]) -> bool:
    """Whether training helps: the loss falls by and large."""
    values = [losses[step] for step in sorted(losses)]
    return values[-1] < values[0] and sum(b < a for a, b in pairwise(values)) > 0


CHECK_NAMES = tuple(check.name for check in plan_checks("", devices=1, precisions=()))
