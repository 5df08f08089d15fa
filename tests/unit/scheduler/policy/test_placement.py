"""Counts become machines: packed, kept together, and nobody is moved without need."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scheduler.policy.states import make_nodes, on
from yunlu.hardware.fleet import Node
from yunlu.scheduler.policy.placement import PlacementRequest, place


def test_who_has_what_it_wants_stays() -> None:
    kept = PlacementRequest(id="a", devices=2, held=on(("n1", 2)), stays=True)
    new = PlacementRequest(id="b", devices=4)
    placed = place(make_nodes(3), [new, kept])
    assert placed.placements["a"] == kept.held
    assert placed.moved == frozenset()


def test_the_fullest_machine_that_fits_is_taken() -> None:
    kept = PlacementRequest(id="a", devices=2, held=on(("n1", 2)), stays=True)
    placed = place(
        make_nodes(3),
        [kept, PlacementRequest(id="b", devices=1), PlacementRequest(id="c", devices=1)],
    )
    assert placed.placements["b"].shares == (("n1", 1),)
    assert placed.placements["c"].shares == (("n1", 1),)


def test_whole_machines_go_to_wide_jobs_and_the_smallest_make_room() -> None:
    kept = [
        PlacementRequest(id="a", devices=1, held=on(("n0", 1)), stays=True),
        PlacementRequest(id="b", devices=2, held=on(("n1", 2)), stays=True),
    ]
    placed = place(make_nodes(3), [*kept, PlacementRequest(id="wide", devices=8)])
    assert placed.placements["wide"].nodes == 2
    assert placed.placements["b"] == kept[1].held
    assert placed.placements["a"].shares == (("n1", 1),)
    assert placed.moved == {"a"}


def test_a_hole_is_made_where_the_fewest_devices_move() -> None:
    kept = [
        PlacementRequest(id="a", devices=1, held=on(("n0", 1)), stays=True),
        PlacementRequest(id="b", devices=2, held=on(("n0", 2)), stays=True),
        PlacementRequest(id="c", devices=3, held=on(("n1", 3)), stays=True),
        PlacementRequest(id="d", devices=3, held=on(("n2", 3)), stays=True),
    ]
    placed = place(make_nodes(3), [*kept, PlacementRequest(id="new", devices=2)])
    assert placed.placements["new"].shares == (("n0", 2),)
    assert placed.moved == {"a"}


def test_nothing_is_put_on_a_machine_that_leaves() -> None:
    nodes = [Node(name="n0", devices=4, is_leaving=True), *make_nodes(2)[1:]]
    was_there = PlacementRequest(id="a", devices=2, held=on(("n0", 2)), stays=True)
    pinned = PlacementRequest(id="p", devices=1, held=on(("n0", 1)), is_pinned=True)
    placed = place(
        nodes,
        [
            was_there,
            pinned,
            PlacementRequest(id="b", devices=2),
            PlacementRequest(id="c", devices=2),
        ],
    )
    assert placed.placements["a"].shares == (("n1", 2),)
    assert placed.placements["p"] == pinned.held
    assert placed.unplaced == {"c"}
    assert placed.moved == {"a"}


def test_machines_of_one_network_go_together() -> None:
    nodes = [
        Node(name=f"n{number}", devices=4, domain="left" if number % 2 else "right")
        for number in range(6)
    ]
    placed = place(nodes, [PlacementRequest(id="wide", devices=12)])
    domains = {node.domain for node in nodes if node.name in dict(placed.placements["wide"].shares)}
    assert len(domains) == 1


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_devices_are_promised_once_and_small_jobs_are_not_split(data: st.DataObject) -> None:
    nodes = make_nodes(data.draw(st.integers(1, 6)))
    left = 4 * len(nodes)
    wants: list[PlacementRequest] = []
    while left and len(wants) < 12:
        size = data.draw(st.sampled_from([size for size in (1, 2, 4, 8, 12) if size <= left]))
        wants.append(PlacementRequest(id=f"j{len(wants)}", devices=size))
        left -= size
    first = place(nodes, wants)
    assert not first.unplaced
    # Some keep their size, the others change it.
    freed = 0
    again: list[PlacementRequest] = []
    for want in wants:
        held = first.placements[want.id]
        if data.draw(st.booleans()):
            again.append(PlacementRequest(id=want.id, devices=want.devices, held=held, stays=True))
        else:
            freed += want.devices
    left += freed
    while left and data.draw(st.booleans()):
        size = data.draw(st.sampled_from([size for size in (1, 2, 4, 8, 12) if size <= left]))
        again.append(PlacementRequest(id=f"k{len(again)}", devices=size))
        left -= size
    second = place(nodes, again)
    assert not second.unplaced
    for placed, asked in ((first, wants), (second, again)):
        used = {node.name: 0 for node in nodes}
        for want in asked:
            placement = placed.placements[want.id]
            assert placement.devices == want.devices
            assert placement.nodes == max(1, want.devices // 4)
            for name, count in placement.shares:
                used[name] += count
        assert max(used.values()) <= 4
    moved = {want.id for want in again if want.stays and second.placements[want.id] != want.held}
    assert moved == second.moved
