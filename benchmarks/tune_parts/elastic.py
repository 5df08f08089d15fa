"""A bracket of successive halving on a few devices: one device for each trial, against shares that change.

Simulated. Every rung waits for all of its trials (Jamieson and Talwalkar, arXiv 1502.07943; the first
bracket of Hyperband, arXiv 1603.06560). Static: a trial has one device, and whoever is left over has one
still. Elastic: ``yunlu.tuning.study_runner.device_shares`` decides anew whenever a trial arrives. A change of devices costs a
trial 5 % of what it then still has before it, also when it only goes on from its checkpoint with another
number than it last had.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.tune_parts.figures import Figure
from yunlu.tuning.study_runner.device_shares import DeviceClaim, share_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

RESIZE = 0.05
"""Of the time left up to the rung, on the new devices."""
GOAL = 2.3
_DEVICES = (4, 8, 16)
_PROTOTYPE = {4: "1.6", 8: "2.5", 16: "4.0"}
_NOTHING_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Trials that begin, and how far whoever is promoted trains."""

    trials: int = 81
    eta: int = 3
    uneven: float = 0.0
    """Deviation of the logarithm of a trial's speed: settings differ in what they cost."""
    seed: int = 0

    def legs(self) -> list[list[float]]:
        """Of each rung: what each of its trials still has to train, in units of the first one."""
        rng = np.random.default_rng(self.seed)
        units = np.exp(rng.normal(0.0, self.uneven, self.trials))
        length, reached, legs = 1.0, 0.0, list[list[float]]()
        while len(units):
            legs.append([float(unit) * (length - reached) for unit in units])
            kept = len(units) // self.eta
            # Who is good has nothing to do with who is fast: the first few are as good as any.
            units, reached, length = units[:kept], length, length * self.eta
        return legs


@dataclass(slots=True, kw_only=True)
class _Runner:
    """A trial on its way to the rung."""

    number: int
    work: float
    held: int = 0
    last: int = 0
    """Devices it had before this rung; 0: it begins here."""
    pause: float = 0.0


def run_static(bracket: Bracket, devices: int) -> float:
    """The makespan with one device for each."""
    total = 0.0
    for leg in bracket.legs():
        free_at = [0.0] * devices
        for work in leg:
            first = min(range(devices), key=free_at.__getitem__)
            free_at[first] += work
        total += max(free_at)
    return total


def run_elastic(
    bracket: Bracket, devices: int, *, power: float = 1.0, pause: float | None = None
) -> float:
    """The makespan where devices are shared anew whenever a trial arrives.

    Args:
        bracket: What is trained.
        devices: On how many.
        power: Speed on k devices is k to this power.
        pause: What a change costs, in units of the first rung; None: 5 % of what is left.
    """
    total, last = 0.0, dict[int, int]()
    for leg in bracket.legs():
        runners = [_Runner(number=n, work=work, last=last.get(n, 0)) for n, work in enumerate(leg)]
        total += _run_rung(runners, devices, power=power, pause=pause)
        last = {runner.number: runner.held for runner in runners}
    return total


def _run_rung(
    runners: Sequence[_Runner], devices: int, *, power: float, pause: float | None
) -> float:
    now, left = 0.0, [*runners]
    while left:
        shares = share_devices(devices, [_claim(r, devices, power, pause) for r in left])
        assert sum(shares.values()) <= devices
        for runner in left:
            _give(runner, shares[runner.number], power, pause)
        spans = [r.pause + r.work / r.held**power if r.held else inf for r in left]
        step = min(spans)
        assert step < inf, "nobody moves"
        now += step
        for runner in left:
            _advance(runner, step, power)
        left = [runner for runner in left if runner.work > _NOTHING_S or runner.pause > _NOTHING_S]
    return now


def _claim(runner: _Runner, devices: int, power: float, pause: float | None) -> DeviceClaim:
    """As the study would see it: what a change costs is guessed for an even share of the devices."""
    work = runner.work + runner.pause * (runner.held**power if runner.held else 0.0)
    cost = RESIZE * work / devices**power if pause is None else pause
    start = cost if runner.last and not runner.held else 0.0
    return DeviceClaim(
        number=runner.number, work_s=work, held=runner.held, power=power,
        resize_s=cost, start_s=start, promise=1.0 / (1 + runner.number),
    )  # fmt: skip


def _give(runner: _Runner, devices: int, power: float, pause: float | None) -> None:
    if devices == runner.held:
        return
    had = runner.held or runner.last
    runner.held = devices
    if had and had != devices:
        runner.pause += RESIZE * runner.work / devices**power if pause is None else pause


def _advance(runner: _Runner, step: float, power: float) -> None:
    if not runner.held:
        return
    paused = min(runner.pause, step)
    runner.pause -= paused
    runner.work = max(0.0, runner.work - (step - paused) * runner.held**power)


def power_of(efficiency: float, devices: int = 8) -> float:
    """The power with which so many devices reach this share of the ideal speed."""
    return 1.0 + log(efficiency) / log(devices)


def measure(
    _folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    *,
    quick: bool = False,
) -> list[Figure]:
    """Makespan of static over that of elastic."""
    say("elastic: brackets of halving, simulated")
    whole = Bracket()
    figures = [
        Figure(
            name=f"elastic rungs, {devices} devices: static / elastic",
            value=run_static(whole, devices) / run_elastic(whole, devices),
            at_least=GOAL if devices == 8 else None,
            compared=f"{whole.trials} trials; a prototype: {_PROTOTYPE[devices]}",
        )
        for devices in _DEVICES
    ]
    figures += [
        Figure(
            name=f"the same, {efficiency:.0%} of ideal speed on 8",
            value=run_static(whole, 8) / run_elastic(whole, 8, power=power_of(efficiency)),
            compared="speed on k devices: k to a power",
        )
        for efficiency in (0.9, 0.8)
    ]
    figures.append(
        Figure(
            name="the same, a resize costs 5 % of the first rung",
            value=run_static(whole, 8) / run_elastic(whole, 8, pause=RESIZE),
            compared="as long for everyone, however little is left",
        )
    )
    figures.append(_measure_uneven(seeds=3 if quick else 20))
    small = Bracket(trials=27)
    figures.append(
        Figure(
            name="the same, 27 trials",
            value=run_static(small, 8) / run_elastic(small, 8),
            compared="8 devices",
        )
    )
    return figures


def _measure_uneven(*, seeds: int) -> Figure:
    ratios = [
        run_static(bracket, 8) / run_elastic(bracket, 8, power=power_of(0.9))
        for bracket in (Bracket(uneven=0.3, seed=seed) for seed in range(seeds))
    ]
    return Figure(
        name="the same, 90 % efficiency, trials of unequal speed",
        value=median(ratios),
        compared=f"deviation 30 %; {min(ratios):.2f} to {max(ratios):.2f} over {seeds} seeds",
    )
