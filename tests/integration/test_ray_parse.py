"""What a Ray cluster says, understood without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from yunlu.core.errors import MissingPartError
from yunlu.executors import ray_executor
from yunlu.executors.executor import ExecutorError, LeaseState, Reserve
from yunlu.executors.lease_executor import LeaseRecord
from yunlu.executors.ray_executor import (
    ClusterSurvey,
    PlacementGroupInfo,
    RayExecutor,
    RayNode,
    count_awake,
    lease_name,
    read_growth,
    read_leases,
    read_nodes,
    size_bundles,
    size_selectors,
)
from yunlu.executors.ray_watchdog import RAYLET_GONE
from yunlu.hardware.fleet import Node

CPUS = RayNode(id="aaaaaaaa", name="10.0.0.1", resources={"CPU": 4.0, "memory": 1e9})
GPUS = RayNode(
    id="bbbbbbbb",
    name="10.0.0.2",
    resources={"CPU": 32.0, "GPU": 8.0, "accelerator_type:A100": 1.0},
    labels={"ray.io/market-type": "spot", "ray.io/availability-zone": "z1"},
)
HEAD = RayNode(id="cccccccc", name="10.0.0.3", resources={"memory": 1e9})


def _record(*nodes: str) -> LeaseRecord:
    record = LeaseRecord(address="ray")
    for place, node in enumerate(nodes):
        record, _ = record.grant(node, 2, is_lead=place == 0)
    return record


def test_devices_are_gpus_where_there_are_any_and_a_bare_head_has_none() -> None:
    assert read_nodes(ClusterSurvey(nodes=(HEAD, GPUS, CPUS))) == (
        Node(name="10.0.0.1", devices=4, type="cpu"),
        Node(name="10.0.0.2", devices=8, type="A100", domain="z1", is_spot=True),
    )
    assert [node.devices for node in read_nodes(ClusterSurvey(nodes=(GPUS,)), device="cpu")] == [32]


def test_what_other_programs_hold_is_not_ours_to_give() -> None:
    busy = CPUS.model_copy(update={"available": {"CPU": 1.0}})
    ours = PlacementGroupInfo(
        name="yunlu/r/n.0", state="CREATED", node=CPUS.id, resources={"CPU": 2.0}
    )
    assert read_nodes(ClusterSurvey(nodes=(busy,)))[0].devices == 1
    assert read_nodes(ClusterSurvey(nodes=(busy,), groups=(ours,)))[0].devices == 3


def test_raylets_that_share_a_machine_have_names_of_their_own() -> None:
    twin = CPUS.model_copy(update={"id": "dddddddd"})
    found = read_nodes(ClusterSurvey(nodes=(CPUS, twin, GPUS)))
    assert [node.name for node in found] == ["10.0.0.1-aaaaaa", "10.0.0.1-dddddd", "10.0.0.2"]


def test_a_node_that_is_drained_gets_nothing_new() -> None:
    draining = CPUS.model_copy(update={"is_draining": True})
    assert read_nodes(ClusterSurvey(nodes=(draining,)))[0].is_leaving


def test_leases_run_wait_or_are_gone() -> None:
    record = _record("10.0.0.1", "10.0.0.2", "10.0.0.9", "10.0.0.1", "10.0.0.1")
    names = [lease_name("run", lease.name) for lease in record.leases]
    groups = (
        PlacementGroupInfo(name=names[0], state="CREATED", node=CPUS.id),
        PlacementGroupInfo(name=names[1], state="PENDING"),
        PlacementGroupInfo(name=names[2], state="PENDING"),  # its node has died meanwhile
        PlacementGroupInfo(name=names[3], state="CREATED", node=CPUS.id),  # its actor has died
        PlacementGroupInfo(
            name=names[4], state="CREATED", node=CPUS.id
        ),  # has said itself that it is over
        PlacementGroupInfo(name=lease_name("other", "10.0.0.1.0"), state="CREATED", node=CPUS.id),
        PlacementGroupInfo(name=lease_name("run", "10.0.0.1.77"), state="CREATED", node=CPUS.id),
    )
    living = {*names, lease_name("run", "10.0.0.1.77")} - {names[3]}
    survey = ClusterSurvey(nodes=(CPUS, GPUS), groups=groups, actors=frozenset(living))
    seen = read_leases(survey, run="run", record=record, ended={record.leases[4].name: "so"})
    assert [each.state for each in seen.values()] == [
        LeaseState.RUNNING,
        LeaseState.WAITING,
        LeaseState.GONE,
        LeaseState.GONE,
        LeaseState.GONE,
        LeaseState.RUNNING,  # a stranger, for its owner to end
    ]
    assert [each.handle for each in seen.values()][:5] == names
    assert seen[record.leases[4].name].reason == "so"
    assert "10.0.0.9" in seen[record.leases[2].name].reason
    assert [name for name, each in seen.items() if each.has_lost_node] == [record.leases[2].name]
    told = read_leases(survey, run="run", record=record, ended={record.leases[0].name: RAYLET_GONE})
    assert told[record.leases[0].name].has_lost_node  # Ray notices later


def test_the_reason_why_an_actor_could_not_begin_is_told() -> None:
    record = _record("10.0.0.1")
    name = lease_name("run", record.leases[0].name)
    survey = ClusterSurvey(
        nodes=(CPUS,),
        groups=(PlacementGroupInfo(name=name, state="CREATED", node=CPUS.id),),
        errors={name: "it does not see the directory"},
    )
    (seen,) = read_leases(survey, run="run", record=record, ended={}).values()
    assert (seen.state, seen.reason) == (LeaseState.GONE, "it does not see the directory")


def test_what_the_autoscaler_can_start_is_in_reserve_and_asked_for() -> None:
    growth = read_growth("cpu:4x3,A100:8x2")
    assert count_awake(ClusterSurvey(nodes=(CPUS, HEAD)), growth) == (
        Reserve(type="cpu", devices=4, awake=1, most=3, nodes=(CPUS.name,)),
        Reserve(type="A100", devices=8, awake=0, most=2),
    )
    room = size_bundles(growth, {"cpu": 2, "A100": 9})
    assert room == [{"CPU": 4}] * 2 + [{"GPU": 8, "accelerator_type:A100": 0.001}] * 2
    assert size_bundles(growth, {"cpu": 0}) == []
    with pytest.raises(ExecutorError, match="grow=A100"):
        read_growth("A100")


def test_npus_are_counted_and_asked_for_by_their_own_name() -> None:
    growth = read_growth("npu:8x2,Ascend910B:8x1,gpu:4x1")
    nodes = (
        RayNode(id="a", name="a", resources={"CPU": 64, "NPU": 8}),
        RayNode(
            id="b", name="b", resources={"CPU": 64, "NPU": 8, "accelerator_type:Ascend910B": 1}
        ),
        RayNode(id="c", name="c", resources={"CPU": 64, "GPU": 4}),
    )
    assert [kind.awake for kind in count_awake(ClusterSurvey(nodes=nodes), growth)] == [1, 1, 1]
    assert size_bundles(growth, {"npu": 1, "Ascend910B": 1, "gpu": 1}) == [
        {"NPU": 8},
        {"NPU": 8, "accelerator_type:Ascend910B": 0.001},
        {"GPU": 4},
    ]
    assert [
        (node.devices, node.type) for node in ray_executor.read_nodes(ClusterSurvey(nodes=nodes))
    ] == [
        (8, "npu"),
        (8, "Ascend910B"),
        (4, "gpu"),
    ]


def test_spot_nodes_are_a_kind_of_their_own() -> None:
    growth = read_growth("A100:8x2,A100-spot:8x3")
    labels = {"ray.io/market-type": "spot"}
    spot = RayNode(
        id="s", name="s", resources={"GPU": 8, "accelerator_type:A100": 1}, labels=labels
    )
    own, cheap = count_awake(ClusterSurvey(nodes=(spot,)), growth)
    assert (own.kind, own.awake, cheap.kind, cheap.awake) == ("A100", 0, "A100-spot", 1)
    wanted = {"A100": 1, "A100-spot": 2}
    assert len(size_bundles(growth, wanted)) == 3
    markets = [each["ray.io/market-type"] for each in size_selectors(growth, wanted)]
    assert markets == ["!spot", "spot", "spot"]
    assert size_selectors(read_growth("cpu:4x3"), {"cpu": 2}) == []  # no market is to be chosen


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str) -> None:
        return None

    monkeypatch.setattr(ray_executor, "find_spec", nothing)
    with pytest.raises(MissingPartError, match=r"yunlu\[ray\]"):
        RayExecutor("ray://nowhere:10001").nodes()


def test_an_address_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ExecutorError, match="neither cpu nor gpu"):
        RayExecutor("ray?device=abacus")
    with pytest.raises(ExecutorError, match="did you mean 'device'"):
        RayExecutor("ray?devise=cpu")


def test_the_room_does_not_load_ray(tmp_path: Path) -> None:
    import subprocess
    import sys

    words = "import sys, yunlu.executors.ray_executor; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True, cwd=tmp_path)
