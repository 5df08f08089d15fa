"""Machines that are alike change their roles, and runs stay where they are."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from yunlu.hardware.fleet import NOTHING, Node, Placement
from yunlu.scheduler.policy.placement import minimise_moves
from yunlu.scheduler.policy.values import Demand

NODES = tuple(Node(name=name, devices=2) for name in "abcd")


def on(**shares):
    return Placement(tuple(shares.items()))


def job(name, held=NOTHING, **more):
    return Demand(id=name, submitted_at=0.0, speed=None, held=held, **more)


def test_run_that_shrinks_keeps_the_machine_that_it_is_led_from():
    jobs = [job("wide", on(b=2, a=2)), job("new")]
    found = minimise_moves({"wide": on(a=2), "new": on(b=2)}, jobs, NODES)
    assert found == {"wide": on(b=2), "new": on(a=2)}


def test_run_that_grows_grows_where_it_is():
    jobs = [job("one", on(c=1)), job("other", on(a=1))]
    found = minimise_moves({"one": on(a=2), "other": on(b=2)}, jobs, NODES)
    assert found == {"one": on(c=2), "other": on(a=2)}


def test_machines_of_who_must_stay_and_of_another_kind_keep_their_roles():
    nodes = (*NODES[:2], Node(name="big", devices=8), Node(name="e", devices=2, is_leaving=True))
    jobs = [job("pinned", on(a=1), is_pinned=True), job("b", on(big=2)), job("c", on(e=2))]
    decided = {"pinned": on(a=1), "b": on(b=2), "c": on(big=2)}
    assert minimise_moves(decided, jobs, nodes) == decided


shares = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 2), max_size=3).map(
    lambda found: Placement(tuple(found.items()))
)


@given(
    held=st.lists(shares, max_size=5), wanted=st.lists(shares, max_size=5), pins=st.integers(0, 31)
)
def test_nothing_changes_but_the_names(held, wanted, pins):
    jobs = [job(str(i), each, is_pinned=bool(pins >> i & 1)) for i, each in enumerate(held)]
    decided = {str(i): each for i, each in enumerate(wanted) if each}
    for one in jobs:
        if one.is_pinned and one.held:
            decided[one.id] = one.held
    found = minimise_moves(decided, jobs, NODES)

    def by_node(placements):
        rows = {node.name: Counter() for node in NODES}
        for name, placed in placements.items():
            for node, count in placed.shares:
                rows[node][name] += count
        return rows

    before = sorted(tuple(sorted(row.items())) for row in by_node(decided).values())
    after = sorted(tuple(sorted(row.items())) for row in by_node(found).values())
    assert before == after
    assert all(found[one.id] == one.held for one in jobs if one.is_pinned and one.held)
