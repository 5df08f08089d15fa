"""Every worker tells how fast it computes, and all hear the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.training_device import device_of
from yunlu.planning.layouts import Layout
from yunlu.training.communication import engine_communication
from yunlu.training.parallel.world import form_world

pytestmark = pytest.mark.distributed


def _compare(
    rank: int, path: str, turns: list[list[float]], spans: list[list[float]]
) -> tuple[tuple[float, ...], int]:
    """Who is disturbed once does as many turns as the others when all look again."""
    size = len(turns)
    world = form_world(
        Layout(dp=size), rank, dist.FileStore(path, size), secret=b"test", device=device_of(rank)
    )
    pacer = engine_communication.ComputePace()
    for seconds in spans[rank]:
        pacer.record(seconds, replicas=2 * size)
    left = list(turns[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_communication, "measure_turns", lambda: left.pop(0))
        found = pacer.gather_step_times(world, planned_s=0.1)
    world.close()
    return found, len(turns[rank]) - len(left)


def test_who_is_slow_again_and_again_is_slow(tmp_path: Path) -> None:
    turns = [[100.0] * 3, [40.0, 99.0, 99.0], [25.0] * 3]
    everyone = run_ranks(_compare, 3, str(tmp_path / "store"), turns, [[]] * 3)
    for spans, tries in everyone:
        assert spans == pytest.approx((0.1, 0.1, 0.4), rel=0.02)
        assert tries == 3


def test_steps_that_were_made_among_more_are_told_for_fewer(tmp_path: Path) -> None:
    spans = [[9.0, *[0.1] * 9], [0.3] * 9]
    for found, tries in run_ranks(_compare, 2, str(tmp_path / "store"), [[100.0]] * 2, spans):
        assert found == pytest.approx((0.2, 0.6))
        assert tries == 0  # nobody need be asked for more


def test_a_newcomer_makes_a_burst_with_the_others(tmp_path: Path) -> None:
    spans = [[0.1] * 9, []]
    for found, tries in run_ranks(_compare, 2, str(tmp_path / "store"), [[100.0]] * 2, spans):
        assert found == pytest.approx((0.2, 0.2))
        assert tries == 1


def test_a_burst_is_over_in_its_time() -> None:
    assert engine_communication.measure_turns(0.0) > 0
