"""What launchers tell: understood, or refused with the reason."""

from __future__ import annotations

import pytest

from yunlu.core.errors import TrainingError
from yunlu.core.launch import detect_launch, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],head",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_torchrun() -> None:
    found = detect_launch(TORCHRUN)
    assert found is not None
    assert (found.rank, found.size, found.local_rank) == (3, 4, 1)
    assert (found.host, found.port, found.launcher) == ("head", 29500, "torchrun")


def test_srun_meets_at_the_first_node_on_a_port_all_derive_alike() -> None:
    found, other = detect_launch(SRUN), detect_launch({**SRUN, "SLURM_PROCID": "0"})
    assert found is not None
    assert other is not None
    assert (found.rank, found.size, found.host) == (2, 8, "gpu07")
    assert found.port == other.port


def test_mpirun_on_one_machine_needs_no_address() -> None:
    found = detect_launch(MPIRUN)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.host) == (1, 2, 1, "127.0.0.1")


def test_mpiexec_with_an_address() -> None:
    found = detect_launch(
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    )
    assert found is not None
    assert (found.rank, found.size, found.host) == (0, 2, "a")


def test_torchrun_inside_a_slurm_job_is_torchrun() -> None:
    found = detect_launch({**SRUN, **TORCHRUN})
    assert found is not None
    assert found.launcher == "torchrun"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},  # a batch script
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_a_plain_process_was_launched_by_nobody(variables: dict[str, str]) -> None:
    assert detect_launch(variables) is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({k: v for k, v in TORCHRUN.items() if k != "WORLD_SIZE"}, "WORLD_SIZE is not set"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "LOCAL_RANK is not set"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "MASTER_PORT is not set"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4"),
        ({**TORCHRUN, "RANK": "two"}, "not an integer"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "does not set the address of rank 0"),
    ],
)
def test_half_a_launch_is_refused_with_the_reason(variables: dict[str, str], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        detect_launch(variables)


def test_a_step_of_its_own_size_within_a_larger_job() -> None:
    found = detect_launch({**SRUN, "SLURM_STEP_NUM_TASKS": "3"})
    assert found is not None
    assert found.size == 3


def test_a_restart_bears_the_name_of_the_launch() -> None:
    again = {"TORCHELASTIC_RUN_ID": "night", "TORCHELASTIC_RESTART_COUNT": "2"}
    found = detect_launch({**TORCHRUN, **again})
    assert found is not None
    assert (found.id, found.restarts) == ("night", 2)
    found = detect_launch({**SRUN, "SLURM_RESTART_COUNT": "1"})
    assert found is not None
    assert (found.id, found.restarts) == ("4711.0", 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[03,05]-ib,x", "n03-ib"),
        ("x-1,y[2-3]", "x-1"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
