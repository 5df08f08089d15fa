"""One trial: a contender is started, hurt, watched, and ended."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.faults_parts.contenders import Contender, ContenderError
from benchmarks.faults_parts.history import (
    account,
    effective_share,
    longest_pause_s,
    next_of_size,
    next_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.faults_parts.journal import Step

_POLL_S = 0.005
_START_S, _RECOVER_S = 180.0, 180.0
_WARM_STEPS = 8
_SETTLE_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one trial measured; what it could not measure is none."""

    fault: str
    contender: str
    round: int
    next_step_s: float | None = None
    """From the fault to the next completed step."""
    joined_s: float | None = None
    """From the (re)start of what was lost to a step of the full group."""
    pause_s: float | None = None
    """The longest time without a step while the other joined."""
    redone_steps: int | None = None
    lost: int | None = None
    repeated: int | None = None
    effective: float | None = None
    failure: str | None = None


def try_worker_killed(contender: Contender, *, round_number: int) -> dict[str, float | None]:
    """SIGKILL of one worker: rank 0 and rank 1 in turn."""
    rank = round_number % 2
    return _hurt(contender, lambda: contender.kill(rank), back=lambda: contender.restore(rank))


def try_worker_hung(contender: Contender, *, round_number: int) -> dict[str, float | None]:
    """SIGSTOP of one worker. It stays stopped."""
    at, before = _strike(contender, lambda: contender.stop(1 - round_number % 2))
    found = _wait(contender, lambda steps: next_step(steps, after=at, group=before.group))
    return {"next_step_s": found.at - at}


def try_node_killed(contender: Contender, *, round_number: int) -> dict[str, float | None]:
    """Everything that runs on the second node; then the node comes back."""
    del round_number  # the first holds the meeting point of torchrun and torchft
    return _hurt(contender, lambda: contender.kill_node(1), back=lambda: contender.return_node(1))


def try_node_cut(contender: Contender, *, round_number: int) -> dict[str, float | None]:
    """The second node's cable; then the node comes back, empty."""
    del round_number
    return _hurt(contender, lambda: contender.cut_node(1), back=lambda: contender.return_node(1))


def try_cable_back(contender: Contender, *, round_number: int) -> dict[str, float | None]:
    """The second node's cable, pulled and put back; nobody starts anything again."""
    del round_number
    return _hurt(contender, lambda: contender.cut_node(1), back=lambda: contender.mend_node(1))


def try_worker_joins(contender: Contender, *, round_number: int) -> dict[str, float | None]:
    """One worker trains; another is asked for."""
    del round_number
    at, before = _strike(contender, contender.enlarge, size=1)
    full = _wait(contender, lambda steps: next_of_size(steps, after=at, size=2, group=before.group))
    _wait_for_steps(contender, _SETTLE_STEPS, after=full.at, size=2)
    pause_s = longest_pause_s(contender.journal.steps, after=before.at, until=full.at)
    return {"joined_s": full.at - at, "pause_s": pause_s}


def try_many_kills(
    contender: Contender, *, round_number: int, every_s: float, length_s: float
) -> dict[str, float | None]:
    """A kill every so often: the share of the time in which training moved on."""
    _warm_up(contender)
    began_at = time.time()
    faults: list[float] = []
    while (due := began_at + every_s * (len(faults) + 0.5)) < began_at + length_s:
        _watch_until(contender, due)
        rank = (round_number + len(faults)) % 2
        with suppress(ContenderError):  # nobody is there to be killed: it is still recovering
            faults.append(contender.kill(rank))
            if not contender.restarts_itself:
                contender.restore(rank)
            continue
        faults.append(time.time())
    _watch_until(contender, began_at + length_s)
    contender.journal.refresh()
    share = effective_share(
        contender.journal.steps, faults=faults, began_at=began_at, ended_at=began_at + length_s
    )
    return {"effective": share}


TRIALS: dict[str, Callable[..., dict[str, float | None]]] = {
    "worker killed": try_worker_killed,
    "worker hung": try_worker_hung,
    "node killed": try_node_killed,
    "node cut off": try_node_cut,
    "cable back": try_cable_back,
    "worker joins": try_worker_joins,
    "many kills": try_many_kills,
}
NODE_TRIALS = frozenset({"node killed", "node cut off", "cable back"})
"""Each worker is started apart, as on a node of its own."""


def run_trial(
    contender: Contender,
    trial: Callable[..., dict[str, float | None]],
    *,
    fault: str,
    name: str,
    round_number: int,
    **options: float,
) -> Outcome:
    """From the start of the contender to its end, whatever happens between."""
    failure: str | None = None
    found: dict[str, float | None] = {}
    try:
        (contender.start_alone if trial is try_worker_joins else contender.start)()
        found = trial(contender, round_number=round_number, **options)
    except (ContenderError, TimeoutError) as error:
        failure = str(error)
    finally:
        contender.end()
    total = account(contender.committed(), contender.samples_of)
    return Outcome(
        fault=fault,
        contender=name,
        round=round_number,
        failure=failure,
        redone_steps=total.redone_steps,
        lost=total.lost,
        repeated=total.repeated,
        **found,  # pyright: ignore[reportArgumentType]
    )


def _hurt(
    contender: Contender, strike: Callable[[], float], *, back: Callable[[], float]
) -> dict[str, float | None]:
    at, before = _strike(contender, strike)
    # torchft's replica is put back at once, as its scheduler would; a node stays away for a while.
    returns_at_once = not contender.nodes and not contender.restarts_itself
    back_at = back() if returns_at_once else at
    found = _wait(contender, lambda steps: next_step(steps, after=at, group=before.group))
    if contender.nodes:
        _wait_for_steps(contender, _SETTLE_STEPS, after=found.at, size=1)
        back_at = back()
    full = _wait(
        contender,
        lambda steps: next_of_size(steps, after=max(at, back_at), size=2, group=before.group),
    )
    _wait_for_steps(contender, _SETTLE_STEPS, after=full.at, size=2)
    since = max(step.at for step in contender.journal.steps if step.at <= max(found.at, back_at))
    return {
        "next_step_s": found.at - at,
        "joined_s": full.at - back_at,
        "pause_s": longest_pause_s(contender.journal.steps, after=since, until=full.at),
    }


def _strike(
    contender: Contender, strike: Callable[[], float], *, size: int = 2
) -> tuple[float, Step]:
    _warm_up(contender, size=size)
    at = strike()
    contender.journal.refresh()
    return at, max((step for step in contender.journal.steps if step.at <= at), key=lambda s: s.at)


def _warm_up(contender: Contender, *, size: int = 2) -> None:
    _wait_for_steps(contender, _WARM_STEPS, after=contender.ready_at, size=size, limit_s=_START_S)


def _wait_for_steps(
    contender: Contender, count: int, *, after: float, size: int, limit_s: float = _RECOVER_S
) -> None:
    """Until so many steps of at least this size are completed."""

    def enough(steps: list[Step]) -> Step | None:
        found = {step.step: step for step in steps if step.at > after and step.size >= size}
        return max(found.values(), key=lambda step: step.at) if len(found) >= count else None

    _wait(contender, enough, limit_s=limit_s)


def _wait(
    contender: Contender, find: Callable[[list[Step]], Step | None], *, limit_s: float = _RECOVER_S
) -> Step:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        contender.journal.refresh()
        found = find(contender.journal.steps)
        if found is not None:
            return found
        time.sleep(_POLL_S)
    raise TimeoutError(f"no such step within {limit_s:.0f} s")


def _watch_until(contender: Contender, at: float) -> None:
    while time.time() < at:
        contender.journal.refresh()
        time.sleep(0.05)
