"""P2P groups carry the messages of every schedule in the order in which they are received."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import pairwise, product
from typing import TYPE_CHECKING

import pytest

from yunlu.planning.layouts import Layout
from yunlu.training.parallel.p2p_groups import rounds
from yunlu.training.parallel.pipeline_schedules import Action, actions

if TYPE_CHECKING:
    from yunlu.planning.layouts import Schedule

LAYOUTS = [
    *(Layout(pp=pp, schedule="1f1b") for pp in (2, 3, 4)),
    *(Layout(pp=pp, schedule="gpipe") for pp in (2, 3)),
    *(
        Layout(pp=pp, schedule="interleaved", stages_per_rank=stages)
        for pp, stages in product((2, 3, 4), (2, 3))
    ),
]


def _order(schedule: Schedule, layout: Layout, rank: int, micros: int) -> list[Action]:
    return actions(
        schedule,
        rank=rank,
        ranks=layout.pp,
        stages_per_rank=layout.stages_per_rank,
        micros=micros,
    )


def _messages(layout: Layout, micros: int, *, are_sent: bool) -> dict[tuple[str, int, int], list]:
    """What goes over each P2P group, in the order of its sender or of its receiver."""
    found: dict[tuple[str, int, int], list] = defaultdict(list)
    for rank in range(layout.pp):
        for action in _order(layout.schedule, layout, rank, micros):
            step = 1 if action.kind == "forward" else -1
            other = action.stage + (step if are_sent else -step)
            if not 0 <= other < layout.stages:
                continue
            kind = "activation" if action.kind == "forward" else "gradient"
            ends = (rank, other % layout.pp) if are_sent else (other % layout.pp, rank)
            into = other if are_sent else action.stage
            found[kind, *ends].append((into, action.micro))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda at: f"{at} {at.schedule}")
@pytest.mark.parametrize("micros", [1, 2, 3, 7])
def test_each_p2p_group_is_sent_and_received_in_one_order(layout: Layout, micros: int) -> None:
    sent = _messages(layout, micros, are_sent=True)
    assert sent == _messages(layout, micros, are_sent=False)
    formed = {(kind, *edge) for kind, edges in rounds(layout) for edge in edges}
    assert set(sent) <= formed, "there is a P2P group for every message"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda at: f"{at} {at.schedule}")
def test_a_worker_has_at_most_one_p2p_group_in_a_round(layout: Layout) -> None:
    for _, edges in rounds(layout):
        assert set(Counter(end for edge in edges for end in edge).values()) == {1}


def test_two_plain_stages_need_one_lane_each_way() -> None:
    assert rounds(Layout(pp=2)) == [("activation", [(0, 1)]), ("gradient", [(1, 0)])]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda at: f"{at} {at.schedule}")
@pytest.mark.parametrize("micros", [1, 2, 3, 7])
def test_one_receive_ahead_on_each_lane_ends_every_schedule(layout: Layout, micros: int) -> None:
    """A send ends when the other end has posted its receive; no computation waits for one."""
    left = [deque(_order(layout.schedule, layout, rank, micros)) for rank in range(layout.pp)]
    sent: dict[tuple[str, int, int], set[tuple[int, int]]] = defaultdict(set)
    expected = _messages(layout, micros, are_sent=False)
    taken: Counter[tuple[str, int, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, orders in enumerate(left):
            while orders:
                kind, stage, micro = orders[0]
                step = 1 if kind == "forward" else -1
                lane_kind = "activation" if kind == "forward" else "gradient"
                if 0 <= stage - step < layout.stages:
                    p2p_group = (lane_kind, (stage - step) % layout.pp, rank)
                    assert expected[p2p_group][taken[p2p_group]] == (stage, micro)
                    if (stage, micro) not in sent[p2p_group]:
                        break
                    taken[p2p_group] += 1
                if 0 <= stage + step < layout.stages:
                    to = stage + step
                    sent[lane_kind, rank, to % layout.pp].add((to, micro))
                orders.popleft()
                moved = True
    assert not any(left)


def test_rounds_form_a_ring_where_the_last_stage_meets_the_first() -> None:
    upward = {
        edge for kind, edges in rounds(Layout(pp=4)) if kind == "activation" for edge in edges
    }
    assert upward == {*pairwise(range(4)), (3, 0)}
