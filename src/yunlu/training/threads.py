"""How many CPU threads a model deserves: measured once, then remembered.

More threads are not always faster: small layers wait longer for each other than they compute, and
the cores of a rented machine may not all be there. The number changes the rounding of sums, so a
choice is kept for the next run of the same shape on the same machine: the same job and seed then
give the same losses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash

from yunlu.core.files import write_atomically
from yunlu.core.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from yunlu.catalog.machine import Machine
    from yunlu.spec.job import Job

_WORTH_IT = 1.2
"""How much faster all threads must be than one: below that they are better left to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """The number chosen, and how much faster all threads were than one when it was measured."""

    count: int
    gain: float | None


def choose_threads(
    job: Job, machine: Machine, *, shape: Sequence[float], time_pass: Callable[[], float]
) -> Threads:
    """One thread or all; sets torch to the choice.

    Args:
        job: Its task and model belong to what a choice is remembered for.
        machine: Where it was measured.
        shape: Numbers that tell one pass from another: parameters, arithmetic, samples.
        time_pass: Times one pass as torch stands.
    """
    available = torch.get_num_threads()  # honours OMP_NUM_THREADS
    if job.train.threads != "auto":
        chosen = Threads(count=job.train.threads, gain=None)
    elif available == 1 or machine.best_device.kind != "cpu":
        chosen = Threads(count=available, gain=None)
    else:
        where = [machine.hostname, available, torch.__version__]
        asked = [job.task, job.model.model_dump(mode="json"), *shape]
        key = xxhash.xxh3_64_hexdigest(json.dumps([where, asked], sort_keys=True).encode())
        path = read_settings().cache / "threads" / f"{key}.json"
        try:
            gain = float(json.loads(path.read_text())["gain"])
        except (OSError, ValueError, KeyError, TypeError):
            gain = _measure_gain(available, time_pass)
            _remember(path, gain)
        chosen = Threads(count=available if gain >= _WORTH_IT else 1, gain=gain)
    torch.set_num_threads(chosen.count)
    return chosen


def _measure_gain(available: int, time_pass: Callable[[], float]) -> float:
    seconds: dict[int, float] = {}
    for count in (available, 1):
        torch.set_num_threads(count)
        seconds[count] = time_pass()
    return seconds[1] / max(seconds[available], 1e-9)


def _remember(path: Path, gain: float) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"gain": gain}))
    except OSError:
        return  # without a cache the next run measures again
