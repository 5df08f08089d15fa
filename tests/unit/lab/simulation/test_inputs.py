"""Workloads and clusters as users write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from yunlu.lab.simulate_command import make_policy
from yunlu.lab.simulation.cluster import parse_cluster
from yunlu.lab.simulation.profiles import SimulationError, load_workload, load_workloads
from yunlu.scheduler.policies import PolicyError

HEAD = "name,time,application,num_replicas,batch_size"


def test_jobs_are_read_in_the_order_of_their_submission(tmp_path: Path) -> None:
    path = tmp_path / "night.csv"
    path.write_text(f"{HEAD},category\nb,60.0,light,2,64,x\na,5,heavy,1,32,y\n")
    workload = load_workload(path)
    assert workload.name == "night"
    assert [job.name for job in workload.jobs] == ["a", "b"]
    assert isinstance(workload.jobs[1].submitted_at, int)
    assert (workload.jobs[1].asked_devices, workload.jobs[1].asked_batch) == (2, 64)


def test_a_directory_is_all_its_files_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 2):
        (tmp_path / f"workload-{number}.csv").write_text(f"{HEAD}\na,0,light,1,32\n")
    assert [each.name for each in load_workloads(tmp_path)] == ["workload-2", "workload-10"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column name"),
        (HEAD, "no rows"),
        (f"{HEAD}\na,soon,light,1,32\n", "line 2: time is 'soon'"),
        (f"{HEAD}\na,-1,light,1,32\n", "below 0"),
        (f"{HEAD}\na,0,light,0,32\n", "num_replicas is '0'"),
        (f"{HEAD}\na,0,light,1,32\na,1,light,1,32\n", "line 3: the name 'a'"),
    ],
)
def test_bad_workloads_are_refused_with_the_line(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(content)
    with pytest.raises(SimulationError, match=message):
        load_workload(path)


def test_absent_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="cannot be read"):
        load_workloads(tmp_path / "no.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SimulationError, match="cannot be read"):
        load_workload(tmp_path / "bytes.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SimulationError, match="no CSV"):
        load_workloads(tmp_path / "empty")


def test_clusters_in_short(tmp_path: Path) -> None:
    nodes = parse_cluster("16x4")
    assert len(nodes) == 16
    assert {node.devices for node in nodes} == {4}
    mixed = parse_cluster("6x4:t4+2x8:a100")
    assert [node.type for node in mixed] == ["t4"] * 6 + ["a100"] * 2
    assert len({node.name for node in mixed}) == 8


def test_clusters_as_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes:\n- {count: 2, devices: 4, type: t4, dollars_per_hour: 3.9}\n")
    nodes = parse_cluster(str(path))
    assert [(node.devices, node.type, node.dollars_per_hour) for node in nodes] == [
        (4, "t4", 3.9)
    ] * 2
    path.write_text("nodes:\n- {count: 2, device: 4}\n")
    with pytest.raises(SimulationError, match=r"nodes\.0\.devices"):
        parse_cluster(str(path))
    path.write_text("nodes: [\n")
    with pytest.raises(SimulationError, match="cannot be read"):
        parse_cluster(str(path))


@pytest.mark.parametrize("text", ["", "16", "x4", "0x4", "4x0", "16x4 8x2", "-1x4", "16x4+"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(SimulationError, match="is not a cluster"):
        parse_cluster(text)


def test_policies_are_found_by_name_or_named_as_objects() -> None:
    assert make_policy("tiresias").policy.name == "tiresias"
    own = make_policy("yunlu.scheduler.policy.baselines:Fair")
    assert own.name == "fair"
    with pytest.raises(PolicyError, match="did you mean 'tiresias'"):
        make_policy("tiresia")
    with pytest.raises(PolicyError, match="no method decide"):
        make_policy("yunlu.lab.simulation.simulator:SimulationRules")
