"""The contract of executors on a real Ray cluster of two nodes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.ray_rig import RayRig, why_no_ray
from yunlu.executors.ray_executor import RayExecutor
from yunlu.hardware.fleet import Placement
from yunlu.testing.executors import ExecutorSetup, kill_processes


@contextmanager
def open_ray_setup(directory: Path) -> Generator[ExecutorSetup]:
    del directory  # the names of Ray's sockets would be too long there
    if (reason := why_no_ray()) is not None:
        pytest.skip(reason)
    with RayRig(2, 1) as rig:
        first, second = rig.raylets
        executor = RayExecutor(rig.address)
        try:
            yield ExecutorSetup(
                executor=executor,
                small=Placement(((first, 2),)),
                large=Placement(((first, 2), (second, 1))),
                starter="yunlu.executors.ray_executor:RayExecutor.submit",
                kill=kill_processes,
            )
        finally:
            executor.close()
