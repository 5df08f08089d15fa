"""When machines that were asked for will be there."""

import pytest

from yunlu.executors.executor import Reserve
from yunlu.scheduler.scaling import PendingNodes


def update(pending_nodes, now, *, asked=0, there=0, awake=0, waking=()):
    reserve = Reserve(type="gpu", devices=2, awake=awake, most=4, waking=waking)
    return pending_nodes.update([reserve], {"gpu": asked}, {"gpu": there}, now=now)


def test_machine_is_expected_after_the_time_that_others_took():
    pending_nodes = PendingNodes()
    (guessed,) = update(pending_nodes, 0.0, asked=1)
    assert guessed.at == pending_nodes.boot_s("gpu") == 60.0
    (late,) = update(pending_nodes, 80.0, asked=1)
    assert late.at == 100.0  # it is late: a while longer
    assert update(pending_nodes, 90.0, asked=1, there=1, awake=1) == ()
    assert pending_nodes.boot_s("gpu") == 90.0
    (second,) = update(pending_nodes, 100.0, asked=2, there=1, awake=1)
    assert (second.at, second.devices, second.type) == (190.0, 2, "gpu")


def test_machines_that_somebody_else_woke_are_on_their_way_too():
    found = update(PendingNodes(), 5.0, awake=2, waking=("c1", "c2"))
    assert [(each.node, each.at) for each in found] == [("c1", 65.0), ("c2", 65.0)]


def test_machine_that_is_not_wanted_any_more_teaches_nothing():
    pending_nodes = PendingNodes()
    update(pending_nodes, 0.0, asked=2)
    assert len(update(pending_nodes, 10.0, asked=1)) == 1
    assert update(pending_nodes, 20.0) == ()
    assert pending_nodes.boot_s("gpu") == 60.0


@pytest.mark.parametrize(("waited_s", "expected"), [(599.0, 1), (601.0, 0)])
def test_machine_that_never_comes_is_not_counted_on_for_ever(waited_s, expected):
    pending_nodes = PendingNodes()
    update(pending_nodes, 0.0, asked=1)
    assert len(update(pending_nodes, waited_s, asked=1)) == expected


def test_more_than_there_can_be_are_not_expected():
    assert len(update(PendingNodes(), 0.0, asked=9, there=1)) == 3


def test_machines_that_were_there_from_the_first_look_on_teach_nothing():
    pending_nodes = PendingNodes()
    update(pending_nodes, 0.0, there=2, awake=3)
    update(pending_nodes, 7.0, there=3, awake=3)
    assert pending_nodes.boot_s("gpu") == 7.0  # only the one that came
