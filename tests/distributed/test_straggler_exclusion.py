"""Who had better step aside is known by rank: in another world it is somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from tests.distributed.parity import make_plan
from tests.distributed.ranks import run_ranks
from tests.even_links import make_even
from tests.training_device import device_of
from yunlu.planning.layouts import Layout
from yunlu.spec.job import Job
from yunlu.training.communication.communicator import ExpectedStep
from yunlu.training.communication.engine_communication import ComputePace
from yunlu.training.communication.method_selector import MethodSelector
from yunlu.training.parallel.world import form_world

pytestmark = pytest.mark.distributed


def _meet_again(rank: int, path: str) -> tuple[int, ...]:
    """Two of one machine go on without the one of another that stood between them."""
    layout = Layout(dp=2)
    told = {"task": "language-modeling", "model": "transformer", "data": "text.txt"}
    job = Job.model_validate({**told, "train": {"batch": 8}})
    plan = make_plan(layout, job, micro_batch=4, kernel="fused")
    selector = MethodSelector(job, plan, lambda *_, **__: None, ComputePace())
    hosts = ("10.0.0.1", "10.0.0.2", "10.0.0.1")
    selector.excluded = (1,)
    selector._measurements = make_even(hosts, latency_s=1e-4, bytes_per_s=1e6)
    world = form_world(
        layout, rank, dist.FileStore(path, 2), secret=b"test", device=device_of(rank)
    )
    selector.open(world, nn.Linear(4, 4), lambda _: ExpectedStep(8, 0), steps_done=3).close()
    world.close()
    return selector.excluded


def test_ranks_of_another_world_step_aside_no_more(tmp_path: Path) -> None:
    assert run_ranks(_meet_again, 2, str(tmp_path / "store")) == [(), ()]
