"""What is shown: every command and its help, some errors, and the moving parts of a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from tests.screens.canned import NOW, CannedClient, training_items
from yunlu.cli.main import VERBS, main
from yunlu.render.terminal.page import indented, make_console
from yunlu.render.terminal.pool_tables import pool_page
from yunlu.render.terminal.run_display import LiveDisplay
from yunlu.render.terminal.study_tables import LiveStudy
from yunlu.tuning.values import TrialState

if TYPE_CHECKING:
    from yunlu.tuning.facts import StudyView

JOB = """\
name: python-docs
task: language-modeling
model: {name: transformer, args: {layers: 4, width: 256}}
data: {train: docs/*.txt, max_length: 256}
train: {epochs: 3, batch: 32, optimizer: {name: adamw, lr: 1e-3}}
"""
SEARCH = "search: {space: {train.optimizer.lr: 1e-4 .. 1e-1 log}, trials: 40}\n"
ROWS = "model,gpus\nllama-3.1-8b,8\n"
MACHINE = """\
machines:
  - name: lab
    device: A100-80GB
    devices: 8
    cost:
      purchase_dollars: 140000
      years: 4
      power_kw: 5
      dollars_per_kwh: 0.15
      utilisation: 0.6
      yearly_dollars: 6000
"""
FILES = {"job.yaml": JOB, "tune.yaml": JOB + SEARCH, "rows.csv": ROWS, "lab.yaml": MACHINE}


@dataclass(frozen=True)
class Screen:
    """Something that is shown."""

    name: str
    show: Callable[[], object]


def _command(name: str, *tokens: str) -> Screen:
    return Screen(name, lambda: main(list(tokens)))


COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "job.yaml"),
    "train detach": ("train", "job.yaml", "--detach"),
    "finetune": ("finetune", "last", "job.yaml", "--detach"),
    "resume queued": ("resume", "queued"),
    "tune": ("tune", "tune.yaml"),
    "tune plan": ("tune", "tune.yaml", "--plan"),
    "tune resume": ("tune", "--resume", "digits-search"),
    "plan": ("plan", "job.yaml"),
    "plan explain": ("plan", "job.yaml", "--explain", "--top", "1"),
    "plan problems": ("plan", "job.yaml", "--budget", "0.05"),
    "plan compare": ("plan", "--compare", "job.yaml", "tune.yaml"),
    "plan predict": ("plan", "predict", "rows.csv"),
    "plan rehearse": ("plan", "job.yaml", "--rehearse", "--top", "1"),
    "plan measure": ("plan", "job.yaml", "--measure"),
    "resize": ("resize", "last", "--devices", "3"),
    "join": ("join", "node-a:29500", "--token-file", "job.yaml"),
    "submit": ("submit", "job.yaml", "--team", "vison"),
    "submit to a pool": ("submit", "job.yaml", "--priority", "1"),
    "pool": ("pool", "--once"),
    "pool up": ("pool", "up"),
    "pool down": ("pool", "down"),
    "pool why": ("pool", "why"),
    "pool change": ("pool", "change", "last", "--priority", "3"),
    "priority": ("priority", "last", "3"),
    "pause": ("pause", "last"),
    "ps": ("ps",),
    "show": ("show", "last"),
    "show group": ("show", "group"),
    "logs": ("logs", "last"),
    "study": ("study",),
    "study show": ("study", "show"),
    "study best": ("study", "best"),
    "study report": ("study", "report"),
    "study stop": ("study", "stop"),
    "study stop idle": ("study", "stop", "idle"),
    "stop": ("stop", "last"),
    "du": ("du",),
    "rm": ("rm", "last", "--yes"),
    "prune": ("prune", "--older", "30d", "--keep-best", "--dry-run"),
    "report": ("report",),
    "report failed": ("report", "failed"),
    "report group": ("report", "group"),
    "report tuned": ("report", "tuned"),
    "init": ("init", "text-classification", "reviews.csv", "-o", "new.yaml", "--force"),
    "validate": ("validate", "job.yaml"),
    "catalog": ("catalog",),
    "catalog offers": ("catalog", "--gpu", "h100", "--cloud", "aws,lambda,huawei"),
    "catalog devices": ("catalog", "--devices", "--gpu", "h100,gb200,ascend-910b2,tpu-v5p"),
    "catalog show": ("catalog", "show", "rtx-4090"),
    "catalog own": ("catalog", "own", "lab.yaml"),
    "catalog add": ("catalog", "add", "lab.yaml"),
    "catalog remove": ("catalog", "remove", "own:lab"),
    "doctor": ("doctor",),
    "selftest": ("selftest", "--output", "selftest.json"),
    "probe": ("probe", "--show"),
    "probe forget": ("probe", "--forget"),
    "error unknown device": ("plan", "job.yaml", "--set", "goal.gpu=[H1000]"),
    "error unknown key": ("train", "job.yaml", "--set", "train.batchsize=64"),
    "error no job": ("train", "nothing.yaml"),
    "error usage": ("train",),
    "error unknown command": ("trian",),
}
"""By name: the words after ``yunlu``."""
NESTED = {
    "pool": ("up", "down", "why", "change", "simulate", "spot"),
    "catalog": ("show", "update", "add", "remove", "own"),
    "study": ("list", "show", "best", "report", "stop"),
}
WITHOUT_OUTPUT = {"schema", "catalog update", "pool simulate", "pool spot", "study list"}
"""Commands of which only the help is kept: JSON, long replays of files, and what another name shows."""
ENDING_WITH_ONE = {"plan problems", "plan rehearse", "rm", "selftest"}
"""Commands whose answer is bad news."""


def every_command() -> list[str]:
    """All verbs, and the commands below them."""
    verbs = [verb for group in VERBS.values() for verb in group]
    return [*verbs, *(f"{verb} {below}" for verb, names in NESTED.items() for below in names)]


def every_screen() -> list[Screen]:
    """In the order of the help."""
    screens = [_command(name, *tokens) for name, tokens in COMMANDS.items()]
    helps = [_command("help", "--help"), *(
        _command(f"help {name}", *name.split(), "--help") for name in every_command()
    )]  # fmt: skip
    return [
        *screens,
        *helps,
        Screen("pool of a busy machine", _show_busy_pool),
        Screen("moving train", _show_moving_train),
        Screen("moving study", _show_moving_study),
    ]


def _show_busy_pool() -> None:
    _print(indented(pool_page(CannedClient().pool_here(), now=NOW)))


def _show_moving_train() -> None:
    """The part of the screen that moves, in the midst of a training."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    display = LiveDisplay(console)
    try:
        for item in list(training_items())[:900]:
            display.show(item)
        _print(display._moving())
    finally:
        display.close()


def _show_moving_study() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, height=40)
    display = LiveStudy(console)
    try:
        view: StudyView = CannedClient().study("living")
        assert any(facts.state is TrialState.RUNNING for facts in view.trials)
        display.show(view)
        _print(display.page())
    finally:
        display.close()


def _print(block: object) -> None:
    # Spinners turn with the clock of the console.
    console = make_console()
    console.get_time = lambda: 0.0
    console.print(block)
