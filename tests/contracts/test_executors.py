"""Every executor keeps the contract: the same job, unchanged, on all of them."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.slurm_rig import SlurmRig, why_no_slurm
from yunlu.executors.registry import open_executor
from yunlu.hardware.fleet import Placement
from yunlu.testing.executors import ExecutorContract, ExecutorSetup, kill_processes

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class BuiltIn(ExecutorContract):
    @pytest.mark.long
    def test_a_run_comes_to_its_end(self, setup: ExecutorSetup, tmp_path: Path) -> None:
        super().test_a_run_comes_to_its_end(setup, tmp_path)


class TestLocal(BuiltIn):
    @classmethod
    @contextmanager
    def open_setup(cls, directory: Path) -> Generator[ExecutorSetup]:
        yield ExecutorSetup(
            executor=open_executor("local://?devices=4&node=here"),
            small=Placement((("here", 2),)),
            large=Placement((("here", 3),)),
            starter="yunlu.executors.local:start_worker",
            kill=kill_processes,
        )


class TestSlurm(BuiltIn):
    @classmethod
    @contextmanager
    def open_setup(cls, directory: Path) -> Generator[ExecutorSetup]:
        if (reason := why_no_slurm()) is not None:
            pytest.skip(reason)
        with SlurmRig(directory) as rig, pytest.MonkeyPatch.context() as patch:
            for name, value in rig.environment.items():
                patch.setenv(name, value)
            yield ExecutorSetup(
                executor=open_executor("slurm://main"),
                small=Placement((("n1", 2),)),
                large=Placement((("n1", 2), ("n2", 1))),
                starter="yunlu.executors.slurm:SlurmExecutor.submit",
                kill=kill_processes,
            )


@pytest.mark.long
class TestRay(BuiltIn):
    @classmethod
    @contextmanager
    def open_setup(cls, directory: Path) -> Generator[ExecutorSetup]:
        module = importlib.import_module("tests.contracts.executor_setups_ray")
        with module.open_ray_setup(directory) as setup:
            yield setup
