"""The random numbers of a step."""

from __future__ import annotations

import numpy as np
import torch
from torch.cuda import _queued_calls  # pyright: ignore[reportPrivateUsage]

from yunlu.training.determinism import seed_step

CPU = torch.device("cpu")


def test_a_step_draws_what_torch_would_from_its_own_seed():
    seed = int(np.random.SeedSequence((7, 3, 1)).generate_state(1, np.uint64)[0] >> 1)
    torch.manual_seed(seed)
    expected = torch.rand(5)
    seed_step(7, 3, 1, CPU)
    assert torch.equal(torch.rand(5), expected)
    seed_step(7, 3, 2, CPU)
    assert not torch.equal(torch.rand(5), expected)


def test_nothing_is_kept_of_steps_that_are_over():
    before = len(_queued_calls)
    for step in range(3):
        seed_step(0, step, 0, CPU)
    assert len(_queued_calls) == before
