"""Shares of devices among the trials of a study. Pure.

Two ways of searching want two things. Where the method waits until all trials of a rung have arrived
(successive halving, Hyperband), the last one counts: ``share_devices`` makes the longest of the times that are
left as short as it can. Where it waits for nobody, the best result counts: ``share_devices`` makes the sum of
``promise x time left`` as small as it can, the expected time to the best one; with shares that last,
these are near those known to be best for jobs that profit less and less from more devices (heSRPT:
Berg, Vesilo and Harchol-Balter, Performance 2020). While more trials wait than there are devices, each has
the fewest devices it can use, in both: then all devices are busy, and none of their time is wasted.

A trial pauses while it is resized. That pause is part of its time left with any other
number of devices than it has, so nobody is resized for less than it costs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import inf, log
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yunlu.tuning.values import Trial

MANY = 1 << 20
"""More than any pool has."""
USUAL_POWER = 0.95
"""Speed on k devices is k to this power, before anything was measured: 90 % of ideal on eight."""
_LEAST_POWER = 0.3
"""Lower bound: a slow measurement on more devices may be temporary, and would never be tried again."""
_PRIOR_PAIRS = 2.0
"""Weight of the default power, in measurements."""
_INERTIA = 1.25
"""Factor by which a resize must gain more than it costs: times are estimates."""
_WORTH_WAITING = 0.02
"""Devices stay as they are for a moment only where the rung ends sooner by this share of what is left,
and by more than the moment: when it ends is an estimate."""

_WORTH_SHRINKING = 0.15
"""Share of the remaining time that must be gained before a trial shrinks for another."""
_LEAST_PROMISE = 1e-3

Aim = Literal["rung", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaim:
    """A trial that runs, or waits to start or continue."""

    number: int
    work_s: float
    """Device-seconds up to the rung it may run to."""
    held: int = 0
    """Devices it holds; 0 while it waits."""
    beyond_s: float = 0.0
    """Device-seconds from that rung to the end of the training, times its probability."""
    promise: float = 0.5
    """Probability that it is among the best."""
    least: int = 1
    most: int = MANY
    multiple: int = 1
    """Only multiples of this can be used."""
    power: float = USUAL_POWER
    """Speed on k devices is k to this power."""
    resize_s: float = 1.0
    """Pause when its number of devices changes."""
    start_s: float = 0.0
    """Start-up time."""
    is_pinned: bool = False
    """Starting, resizing or leaving: keeps exactly what it holds."""

    def speed(self, devices: int) -> float:
        """As a multiple of one device's."""
        return float(devices**self.power) if devices else 0.0

    def span_s(self, devices: int, *, aim: Aim = "rung", inertia: float = _INERTIA) -> float:
        """Time until it reaches its rung, with so many devices from now on."""
        if devices < 1:
            return inf
        work_s = self.work_s + (self.beyond_s if aim == "best" else 0.0)
        pause_s = 0.0
        if devices != self.held:
            pause_s = self.resize_s * inertia if self.held else self.start_s
        return work_s / self.speed(devices) + pause_s

    def sizes(self, devices: int) -> range:
        """Numbers of devices that it can use, of so many."""
        first = -(-max(self.least, 1) // self.multiple) * self.multiple
        return range(first, min(self.most, devices) + 1, self.multiple)

    def smallest(self) -> int:
        """The fewest it can use."""
        return -(-max(self.least, 1) // self.multiple) * self.multiple


def share_devices(
    devices: int, claims: Sequence[DeviceClaim], *, aim: Aim = "rung"
) -> dict[int, int]:
    """Devices of each trial from now on.

    Args:
        devices: All there are.
        claims: Running trials keep at least their minimum; waiting ones may get 0.
        aim: ``rung`` where the method waits for all that run, ``best`` where it does not.
    """
    _check(claims)
    shares = {claim.number: claim.held for claim in claims if claim.is_pinned}
    movable = [claim for claim in claims if not claim.is_pinned]
    free = max(0, devices - sum(shares.values()))
    running = [claim for claim in movable if claim.held]
    if (
        sum(claim.smallest() for claim in running) > free
    ):  # devices were lost: evictions are decided elsewhere
        return {**shares, **{claim.number: claim.held for claim in movable}}
    waiting = sorted(
        (claim for claim in movable if not claim.held), key=lambda c: (-c.promise, c.number)
    )
    hosted, queued = _fit(free, running, waiting)
    if queued:
        return {**shares, **_crowd(free, running, waiting)}
    result = _solve(free, hosted, aim)
    if aim == "rung" and _pays_to_wait(devices, claims, result):
        result = {claim.number: claim.held for claim in movable}
    return {**shares, **result}


def find_promises(trials: Sequence[Trial]) -> dict[int, float]:
    """For each trial: the share of trials at its rung that it beats; 0.5 before one."""
    by_rung: dict[int, list[float]] = {}
    for trial in trials:
        for point in trial.points:
            by_rung.setdefault(point.rung, []).append(point.value)
    promises: dict[int, float] = {}
    for trial in trials:
        if not trial.points:
            promises[trial.number] = 0.5
            continue
        own, values = trial.points[-1].value, by_rung[trial.rung]
        beaten = sum(1.0 if own < other else 0.5 if own == other else 0.0 for other in values)
        # The trial itself is among them, as half a win: a single one gets 0.5.
        promises[trial.number] = beaten / len(values)
    return promises


def fit_power(pairs: Iterable[tuple[int, float, int, float]]) -> float:
    """Exponent of speed over devices, fitted to runs measured at two sizes."""
    top, bottom = USUAL_POWER * _PRIOR_PAIRS * log(2) ** 2, _PRIOR_PAIRS * log(2) ** 2
    for few, few_s, many, many_s in pairs:
        if few == many or min(few_s, many_s) <= 0:
            continue
        apart = log(many / few)
        top += apart * log(few_s / many_s)
        bottom += apart**2
    return min(max(top / bottom, _LEAST_POWER), 1.0)


def _check(claims: Sequence[DeviceClaim]) -> None:
    numbers = [claim.number for claim in claims]
    if len({*numbers}) != len(numbers):
        raise ValueError("a trial claims devices twice")


def _fit(
    free: int, running: Sequence[DeviceClaim], waiting: Sequence[DeviceClaim]
) -> tuple[list[DeviceClaim], list[DeviceClaim]]:
    """Claims that fit at their minimum, and those that do not."""
    hosted, queued = [*running], list[DeviceClaim]()
    left = free - sum(claim.smallest() for claim in running)
    for claim in waiting:
        fits = claim.smallest() <= left
        (hosted if fits else queued).append(claim)
        left -= claim.smallest() if fits else 0
    return hosted, queued


def _crowd(
    free: int, running: Sequence[DeviceClaim], waiting: Sequence[DeviceClaim]
) -> dict[int, int]:
    """More trials than devices: every device is busy anyhow, so minimum sizes are best.

    A large trial shrinks only where its size wastes more device-seconds than a resize.
    """
    shares: dict[int, int] = {}
    for claim in running:
        few = claim.smallest()
        now_s = claim.held * claim.span_s(claim.held)
        then_s = few * claim.work_s / claim.speed(few) + claim.held * claim.resize_s * _INERTIA
        shares[claim.number] = few if then_s < now_s else claim.held
    left = free - sum(shares.values())
    for claim in waiting:
        fits = claim.smallest() <= left
        shares[claim.number] = claim.smallest() if fits else 0
        left -= shares[claim.number]
    return shares


def _solve(free: int, claims: Sequence[DeviceClaim], aim: Aim) -> dict[int, int]:
    """The best sizes; a trial shrinks for another's growth only for a large gain."""
    solve = _favour if aim == "best" else _level
    result = solve(free, claims)
    shrinks = any(result[claim.number] < claim.held for claim in claims)
    if not shrinks or not all(claim.held for claim in claims):  # a starting trial must find room
        return result
    retained = solve(free, [replace(c, least=max(c.least, min(c.held, c.most))) for c in claims])
    worth = (1.0 - _WORTH_SHRINKING) * _cost(claims, retained, aim)
    return result if _cost(claims, result, aim) < worth else retained


def _cost(claims: Sequence[DeviceClaim], shares: Mapping[int, int], aim: Aim) -> float:
    spans = [(claim, claim.span_s(shares[claim.number], aim=aim)) for claim in claims]
    if aim == "best":
        return sum(max(claim.promise, _LEAST_PROMISE) * span for claim, span in spans)
    return max(span for _, span in spans)


def _level(free: int, claims: Sequence[DeviceClaim]) -> dict[int, int]:
    """Sizes that minimize the latest arrival; exact, including pauses."""
    if not claims:
        return {}
    spans = {c.number: {k: c.span_s(k) for k in c.sizes(free)} for c in claims}
    limits = sorted({span for one_span in spans.values() for span in one_span.values()})

    def need(limit: float) -> dict[int, int]:
        """The fewest devices with which each arrives in time."""
        return {
            number: next((k for k, span in item.items() if span <= limit), MANY)
            for number, item in spans.items()
        }

    at = bisect_left(limits, True, key=lambda limit: sum(need(limit).values()) <= free)
    shares = need(limits[at])
    return _use_rest(free - sum(shares.values()), claims, shares, spans)


def _use_rest(
    left: int,
    claims: Sequence[DeviceClaim],
    shares: dict[int, int],
    spans: Mapping[int, Mapping[int, float]],
) -> dict[int, int]:
    """The latest arrival cannot improve: leftover devices avoid shrinking or let others grow."""
    for claim in sorted(claims, key=lambda c: -c.held):
        more = claim.held - shares[claim.number]
        if claim.held in spans[claim.number] and 0 < more <= left:
            shares[claim.number] = claim.held
            left -= more
    while left:
        longest = sorted(claims, key=lambda c: (-spans[c.number][shares[c.number]], -c.promise))
        steps = ((c, _next_size(c, shares[c.number], left, spans[c.number])) for c in longest)
        result = next(((c, size) for c, size in steps if size), None)
        if result is None:
            break
        left -= result[1] - shares[result[0].number]
        shares[result[0].number] = result[1]
    return shares


def _next_size(claim: DeviceClaim, size: int, left: int, spans: Mapping[int, float]) -> int:
    """The next larger size that pays; 0 where none does."""
    if size != claim.held:  # starts, or is resized anyway: more devices cost nothing
        more = size + claim.multiple
        return more if more <= size + left and spans.get(more, inf) < spans[size] else 0
    best = min((k for k in spans if size < k <= size + left), key=lambda k: spans[k], default=size)
    return best if spans[size] - spans[best] > claim.resize_s else 0


def _pays_to_wait(devices: int, claims: Sequence[DeviceClaim], shares: Mapping[int, int]) -> bool:
    """Whether waiting for the next arrival, and sharing again then, is faster."""
    running = [claim for claim in claims if claim.held]
    if not running or all(shares.get(c.number, c.held) == c.held for c in claims):
        return False
    wait_s = min(claim.span_s(claim.held) for claim in running)
    left: list[DeviceClaim] = []
    for claim in claims:
        work_s = claim.work_s - wait_s * claim.speed(claim.held)
        if not claim.held or claim.span_s(claim.held) > wait_s:
            left.append(replace(claim, work_s=max(work_s, 0.0)))
    now_s = max(c.span_s(shares.get(c.number, c.held)) for c in claims)
    if not left:
        return False
    then = _level(devices - sum(c.held for c in left if c.is_pinned),
                  [c for c in left if not c.is_pinned])  # fmt: skip
    later_s = wait_s + max(c.span_s(then.get(c.number, c.held)) for c in left)
    return now_s - later_s > max(wait_s, _WORTH_WAITING * now_s)


def _favour(free: int, claims: Sequence[DeviceClaim]) -> dict[int, int]:
    """Sizes with the least sum of promise x time left, by dynamic programming over devices."""
    costs = [0.0] * (free + 1)
    chosen: list[list[int]] = []
    for claim in claims:
        weight = max(claim.promise, _LEAST_PROMISE)
        options = [(k, weight * claim.span_s(k, aim="best")) for k in claim.sizes(free)]
        after, choice = [inf] * (free + 1), [0] * (free + 1)
        for total in range(free + 1):
            for size, cost in options:
                if size <= total and costs[total - size] + cost < after[total]:
                    after[total], choice[total] = costs[total - size] + cost, size
        costs = after
        chosen.append(choice)
    shares: dict[int, int] = {}
    total = free
    for claim, choice in zip(reversed(claims), reversed(chosen), strict=True):
        shares[claim.number] = choice[total]
        total -= choice[total]
    return shares
