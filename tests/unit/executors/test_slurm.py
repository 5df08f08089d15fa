"""What Slurm prints, as versions 22.05 to 24.11 print it."""

from __future__ import annotations

import pytest

from yunlu.executors.executor import ExecutorError, LeaseState
from yunlu.executors.slurm import SlurmExecutor, read_nodes, read_queue


def test_a_queue_is_read_with_reasons() -> None:
    text = (
        "12|yunlu:run:n1.0|PENDING|Resources||yunlu devices=2\n"
        "13|yunlu:run:n2.1|RUNNING|None|n2|yunlu devices=1\n"
        "14|yunlu:run:n3.2|PREEMPTED|None|n3|yunlu devices=1\n"
        "15|yunlu:run:c1.3|CONFIGURING|None|c1|yunlu devices=1\n"
        "16|yunlu:run:c2.4|NODE_FAIL|None|c2|yunlu devices=1\n"
        "17|a|b|PENDING|(ReqNodeNotAvail, UnavailableNodes:n9)||(null)\n"
        "slurm_load_jobs error\n"
    )
    jobs = list(read_queue(text))
    assert [job.lease_state for job in jobs[:5]] == [
        LeaseState.WAITING, LeaseState.RUNNING, LeaseState.GONE, LeaseState.WAITING, LeaseState.GONE,
    ]  # fmt: skip
    assert "wait" in jobs[0].words
    assert "Resources" in jobs[0].words
    assert jobs[1].words == ""
    assert "preempted" in jobs[2].words
    assert "being started" in jobs[3].words
    assert "node failed" in jobs[4].words


@pytest.mark.parametrize(
    ("state", "absent", "asleep", "leaving"),
    [
        ("IDLE", False, False, False),
        ("MIXED+PLANNED", False, False, False),
        ("IDLE+CLOUD+POWERED_DOWN", False, True, False),
        ("IDLE+CLOUD+POWERING_UP", False, False, False),
        ("IDLE+CLOUD+NOT_RESPONDING+POWERING_UP", False, False, False),
        ("IDLE+CLOUD+POWERED_DOWN+POWER_UP", False, False, False),
        ("IDLE+CLOUD+POWERING_UP+POWER_DOWN", False, True, False),
        ("ALLOCATED+DRAIN", False, False, True),
        ("DOWN*", True, False, False),
        ("DOWN+CLOUD+NOT_RESPONDING", True, False, False),
        ("IDLE*", True, False, False),
        ("IDLE+DRAIN+MAINTENANCE", False, False, True),
    ],
)
def test_the_state_of_a_node_is_read(state: str, absent: bool, asleep: bool, leaving: bool) -> None:
    line = (
        f"NodeName=n1 CPUAlloc=1 CPUTot=8 Gres=(null) State={state} Partitions=main,spot Reason=a b"
    )
    (node,) = read_nodes(line)
    assert (node.is_absent, node.is_asleep, node.is_leaving) == (absent, asleep, leaving)
    assert node.is_waking == ("_UP" in state and not asleep)
    assert (node.cpus, node.used_cpus, node.gpus) == (8, 1, 0)
    assert node.partitions == {"main", "spot"}


@pytest.mark.parametrize(
    ("gres", "count", "kind"),
    [
        ("gpu:2", 2, ""),
        ("gpu:a100:4(S:0-1)", 4, "a100"),
        ("gpu:tesla_v100-sxm2:8,shard:32", 8, "tesla_v100-sxm2"),
        ("shard:8,gpu:1", 1, ""),
        ("gpu:(null):2(IDX:0-1)", 2, ""),
        ("npu:ascend910b:8(S:0-3)", 8, "ascend910b"),
        ("gpu:0,npu:2", 2, ""),
        ("(null)", 0, ""),
    ],
)
def test_gpus_are_counted(gres: str, count: int, kind: str) -> None:
    (node,) = read_nodes(f"NodeName=n1 CPUTot=8 Gres={gres} GresUsed={gres} State=IDLE")
    assert (node.gpus, node.used_gpus, node.gpu_type) == (count, count, kind)
    assert node.gres == ("npu" if "npu" in gres else "gpu")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("slurm://main?acount=me", "did you mean 'account'"),
        ("slurm://main?minutes=soon", "minutes is not a whole number"),
        ("slurm?cpus=", "cpus is not a whole number"),
        ("slurm?cpus=0", "cpus is not a whole number"),
        ("slurm?memory_mb=4G", "memory_mb is not a whole number"),
        ("slurm?device=tpu", "say auto, gpu, npu, cpu"),
        ("slurm?spot=true", "say yes, no"),
    ],
)
def test_an_address_with_a_mistake_is_refused(address: str, words: str) -> None:
    with pytest.raises(ExecutorError) as refused:
        SlurmExecutor(address)
    assert words in str(refused.value)


def test_features_say_which_nodes_are_spot() -> None:
    lines = "NodeName=n1 AvailableFeatures=a100,Spot State=IDLE\nNodeName=n2 State=IDLE\n"
    assert [node.is_spot for node in read_nodes(lines)] == [True, False]
