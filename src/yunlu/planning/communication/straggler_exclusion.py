"""Choose stragglers to exclude; the remaining workers take over their samples. Pure.

Which samples a step holds does not depend on who computes them, so this keeps every guarantee.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from yunlu.core.units import show_duration
from yunlu.planning.communication.method_choice import choose
from yunlu.planning.machine_profile import FiniteFigures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from yunlu.planning.communication.measurements import WireFigures
    from yunlu.planning.communication.method_choice import MethodDecision, MethodQuery

_GAIN = 0.25
"""Least gain of the time to the same loss per excluded host; less does not justify an idle device."""
_LAGGING = 1.5
"""A straggler is this many times slower than most others: where all links are slow, there is none."""
_LEAVE_S = 5.0
"""Cost of an exclusion: the others rendezvous again, and measure their links."""
_WORTH = 2.0
"""Factor by which the gain must exceed that cost."""


class StragglerExclusion(FiniteFigures):
    """Hosts to exclude, and why."""

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    step_s: float
    """Predicted step time without them."""
    reason: str


def find_stragglers_to_exclude(
    decision: MethodDecision, figures: WireFigures, *, steps_left: int | None = None
) -> StragglerExclusion | None:
    """The hosts without which the same loss is reached at least a quarter sooner; none where all are of use.

    The first worker's host always stays: it speaks for all.
    """
    best, retained = decision, figures
    for fewer, rest in _leave_one_by_one(decision, figures):
        # Of two equally slow hosts, only excluding both gains anything.
        if fewer.chosen.cost_s <= (1 - _GAIN) * best.chosen.cost_s:
            best, retained = fewer, rest
    if retained is figures:
        return None
    gained_s = decision.chosen.cost_s - best.chosen.cost_s
    if steps_left is not None and gained_s * steps_left < _WORTH * _LEAVE_S:
        return None
    gone = tuple(host for host in figures.host_names if host not in retained.host_names)
    ranks = tuple(rank for rank, host in enumerate(figures.hosts) if host in gone)
    text = (
        f"{', '.join(gone)} {'steps' if len(gone) == 1 else 'step'} aside: a step without is"
        f" predicted to take {show_duration(best.chosen.step_s)}, not"
        f" {show_duration(decision.chosen.step_s)}"
    )
    return StragglerExclusion(hosts=gone, ranks=ranks, step_s=best.chosen.step_s, reason=text)


def _leave_one_by_one(
    decision: MethodDecision, figures: WireFigures
) -> Iterator[tuple[MethodDecision, WireFigures]]:
    """The choice without one, two, ... hosts that the others wait for most."""
    retained = figures
    while result := [
        (choose(rest, _with_more(decision, size=figures.size, of=rest.size)), rest)
        for rest in _without_each(retained)
    ]:
        fewer, retained = min(result, key=lambda item: item[0].chosen.cost_s)
        yield fewer, retained


def _with_more(decision: MethodDecision, *, size: int, of: int) -> MethodQuery:
    """The same query for fewer workers, each with more samples."""
    question, more = decision.question, size / of
    work = question.work.model_copy(update={"compute_s": question.work.compute_s * more})
    return question.model_copy(update={"work": work})


def _without_each(figures: WireFigures) -> Iterator[WireFigures]:
    """Without the host of the slowest compute, and without that of the slowest link, if they lag."""
    names = figures.host_names
    if len(names) == 1:
        return
    rates = np.array(figures.bytes_per_s)
    np.fill_diagonal(rates, 0.0)
    # Its best links in both directions: a slow host makes one link of every other host slow too.
    links = 1 / np.minimum(rates.max(axis=0), rates.max(axis=1))
    if len(names) == 2:
        links[0] = 0.0  # a single host would wait for no link
    paces = np.zeros(len(names))
    if figures.compute_s:
        np.maximum.at(paces, figures.host_numbers, np.array(figures.compute_s))
    for slowest in sorted({_find_lagging(links), _find_lagging(paces)}):
        if slowest > 0:
            yield figures.without(names[slowest])


def _find_lagging(spans: NDArray[np.float64]) -> int:
    """The host that lags behind the rest; the first, which always stays, where none does."""
    slowest = 1 + int(spans[1:].argmax())
    is_lagging = spans[slowest] > _LAGGING * np.median(np.delete(spans, slowest))
    return slowest if is_lagging else 0
