"""One composition of a step, whatever its terms come from."""

from __future__ import annotations

import pytest

from yunlu.planning.predict.local import STEP_PARTS, StepTime, compose_step


def step(**changes: float) -> StepTime:
    plain = dict.fromkeys(
        ("pipe_s", "waiting", "data_s", "optimizer_s", "input_s", "other_s"), 0.0
    ) | {"micros": 8.0, "own_s": 1.0, "stage_s": 1.0, "slowest_s": 1.0}
    return compose_step(**(plain | changes))


def test_the_parts_add_up() -> None:
    whole = step(stage_s=1.5, slowest_s=2.0, pipe_s=0.1, waiting=3.0, data_s=1.0, optimizer_s=2.0)
    assert tuple(whole.parts) == STEP_PARTS
    assert sum(whole.parts.values()) == pytest.approx(whole.total_s)


@pytest.mark.parametrize(("stages", "interleaved"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_the_bubble_is_the_share_of_a_step_in_which_a_stage_waits(
    stages: int, interleaved: int
) -> None:
    waits = stages - 1
    whole = step(waiting=waits / interleaved)
    share = waits / (interleaved * 8 + waits)  # Narayanan et al. 2021, section 2.2
    assert whole.pp_bubble_s == pytest.approx(share * whole.total_s)


def test_messages_of_cut_matrices_are_told_apart_from_compute() -> None:
    whole = step(own_s=1.0, stage_s=1.25, slowest_s=1.25)
    assert (whole.compute_s, whole.tp_s, whole.pp_bubble_s) == (8.0, 2.0, 0.0)
