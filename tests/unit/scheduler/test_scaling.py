"""Machines that come and go."""

from tests.unit.scheduler.clouds import CALM, Cluster
from tests.unit.scheduler.world import Even
from yunlu.executors.executor import Reserve
from yunlu.hardware.fleet import Node, Placement
from yunlu.scheduler.policy.values import Demand, PoolState
from yunlu.scheduler.pool_store import PoolSettings
from yunlu.scheduler.scaling import Scaler, make_scaler
from yunlu.scheduler.spot import Mode


def state(now, *, nodes=(), jobs=()):
    return PoolState(now=now, nodes=tuple(nodes), jobs=tuple(jobs))


def cloud(*names):
    return [Node(name=name, devices=2, type="cloud") for name in names]


def job(name, held=(), **more):
    placement = Placement(tuple(held))
    return Demand(id=name, submitted_at=0.0, speed=Even(), remaining=1e6, held=placement, **more)


def test_machines_are_asked_for_once_and_given_back_when_idle():
    cluster = Cluster()
    scaler = Scaler(cluster, CALM)
    wanting = [job("a", max_devices=4)]
    assert scaler.follow(state(0.0, jobs=wanting), {})
    assert cluster.asked == [2]
    assert not scaler.follow(state(5.0, jobs=wanting), {})  # they are on their way
    nodes = cloud("c1", "c2")
    scaler.follow(state(60.0, nodes=nodes, jobs=[job("a", (("c1", 2), ("c2", 2)), max_devices=4)]),
                  {"c1": 2, "c2": 2})  # fmt: skip
    assert cluster.asked == [2]
    scaler.follow(state(70.0, nodes=nodes), {})
    assert cluster.asked == [2]  # not yet: somebody may come
    scaler.follow(state(200.0, nodes=nodes), {})
    assert cluster.asked == [2, 0]


def test_machines_that_are_there_anyway_are_used_first():
    cluster = Cluster()
    standing = [Node(name="s1", devices=2, type="standing")]
    wanting = [job("a", max_devices=1)]
    Scaler(cluster, CALM).follow(state(0.0, nodes=standing, jobs=wanting), {})
    assert cluster.asked == []


def test_machines_of_the_same_type_that_are_there_anyway_are_not_taken_for_those_that_come():
    cluster = Cluster()
    standing = [Node(name="s1", devices=2, type="cloud"), Node(name="s2", devices=2, type="cloud")]
    scaler = Scaler(cluster, CALM)
    scaler.follow(state(0.0, nodes=standing, jobs=[job("a", max_devices=1)]), {})
    assert cluster.asked == []
    many = [job(name, min_devices=2, max_devices=2) for name in "abc"]
    scaler.follow(state(1.0, nodes=standing, jobs=many), {})
    assert cluster.asked == [1]
    cluster.names = ("c1",)
    nodes = [*standing, *cloud("c1")]
    scaler.follow(state(2.0, nodes=nodes), {})
    scaler.follow(state(100.0, nodes=nodes), {})
    assert cluster.asked == [1, 0]  # and never fewer than none


def test_limits_of_a_pool_bind_its_scaler():
    for limits, most in ((PoolSettings(grow_after_s=0.0, max_nodes=1), 1),
                         (PoolSettings(grow_after_s=0.0, quotas={"": 2}, borrow={"": 2}), 2),
                         (PoolSettings(grow_after_s=0.0), 3)):  # fmt: skip
        cluster = Cluster()
        wanting = [job(name, min_devices=2, max_devices=2) for name in "abc"]
        make_scaler(cluster, limits).follow(state(0.0, jobs=wanting), {})
        assert cluster.asked == [most]


def test_executor_whose_machines_are_fixed_is_never_asked():
    assert Scaler(object(), CALM).follow(state(0.0), {}) == {}


class Bazaar:
    """A cluster with machines of both markets, all asleep."""

    def __init__(self):
        self.awake = {"cloud": 0, "cloud-spot": 0}

    def reserves(self):
        return tuple(
            Reserve(type="cloud", devices=2, awake=count, most=3, is_spot=kind.endswith("-spot"))
            for kind, count in self.awake.items()
        )

    def scale(self, kind, nodes):
        self.awake[kind] = nodes


PRICED = {"grow_after_s": 0.0, "prices": {"cloud": 2.0, "cloud-spot": 0.5}}


def test_the_cheaper_market_is_asked_unless_a_deadline_says_otherwise():
    for modes, expected in (
        ({}, {"cloud": 0, "cloud-spot": 1}),
        ({"a": Mode.ON_DEMAND}, {"cloud": 1, "cloud-spot": 0}),
        ({"a": Mode.IDLE}, {"cloud": 0, "cloud-spot": 0}),
    ):
        bazaar = Bazaar()
        wanting = [job("a", min_devices=2, max_devices=2, deadline_at=1e7)]
        make_scaler(bazaar, PoolSettings(**PRICED)).follow(
            state(0.0, jobs=wanting), {}, modes=modes
        )
        assert bazaar.awake == expected


def test_dollars_of_a_team_bind_its_machines():
    bazaar = Bazaar()
    settings = PoolSettings(**PRICED, team_dollars_per_hour={"vision": 1.0})
    wanting = [job(name, min_devices=2, max_devices=2, team="vision") for name in "abc"]
    make_scaler(bazaar, settings).follow(state(0.0, jobs=wanting), {})
    assert bazaar.awake == {"cloud": 0, "cloud-spot": 2}


def test_machine_whose_devices_are_all_taken_by_others_is_no_offer():
    full = Node(name="s1", devices=0, type="cloud")
    cluster = Cluster()
    wanting = [job("a", min_devices=2, max_devices=2)]
    Scaler(cluster, CALM).follow(state(0.0, nodes=[full], jobs=wanting), {})
    assert cluster.asked == [1]


def test_machines_on_their_way_are_told_until_they_are_there_and_asked_for_in_one_sentence():
    cluster = Cluster()
    scaler = Scaler(cluster, CALM)
    wanting = [job("a", max_devices=4)]
    assert scaler.follow(state(0.0, jobs=wanting), {})
    assert [(each.at, each.devices) for each in scaler.pending_nodes] == [(60.0, 2)] * 2
    cluster.awake = 0  # as where only what is there is counted
    assert not scaler.follow(state(20.0, jobs=wanting), {})
    assert cluster.asked == [2, 2]
    cluster.awake = 2
    scaler.follow(state(30.0, nodes=cloud("c1"), jobs=wanting), {})
    assert [each.at for each in scaler.pending_nodes] == [37.5]  # late, as the first took 30 s
    scaler.follow(state(35.0, nodes=cloud("c1", "c2"), jobs=wanting), {})
    assert scaler.pending_nodes == ()
