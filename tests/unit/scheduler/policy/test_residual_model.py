"""What the formula is off by: believed where it was measured, forgotten far from there."""

from __future__ import annotations

import numpy as np
import pytest

from yunlu.scheduler.policy.fitting import ResidualModel, fit_residuals


def learn(*points: tuple[int, int, float, float]) -> ResidualModel:
    nodes, devices, local, factor = zip(*points, strict=True)
    return fit_residuals(
        np.array(nodes), np.array(devices), np.array(local, dtype=float), np.log(np.array(factor))
    )


def predict(residuals: ResidualModel, nodes: int, devices: int, local: float) -> float:
    at = np.array([nodes]), np.array([devices]), np.array([local])
    return float(residuals.predict_factor(*at)[0])


def test_what_was_measured_is_told_again() -> None:
    found = learn((4, 16, 100.0, 0.9), (4, 16, 200.0, 1.05), (1, 4, 100.0, 1.2))
    assert predict(found, 4, 16, 100.0) == pytest.approx(0.9, abs=0.01)
    assert predict(found, 4, 16, 200.0) == pytest.approx(1.05, abs=0.01)
    assert predict(found, 1, 4, 100.0) == pytest.approx(1.2, abs=0.01)


def test_a_batch_says_less_of_others_the_further_they_are() -> None:
    found = learn((4, 16, 50.0, 1.0), (4, 16, 200.0, 1.1))
    near, between, far = (predict(found, 4, 16, local) for local in (190.0, 140.0, 60.0))
    assert 1.1 > near > between > far > 0.99


def test_a_shape_is_not_better_for_never_having_been_tried() -> None:
    found = learn(*((1, 4, local, 2.0) for local in (16.0, 32.0, 64.0, 128.0)))
    assert predict(found, 1, 3, 64.0) > 1.8
    assert predict(found, 1, 2, 1000.0) > 1.5


def test_wires_within_a_node_say_nothing_of_those_between() -> None:
    found = learn((1, 4, 64.0, 2.0))
    assert predict(found, 2, 8, 64.0) == 1.0


def test_a_batch_that_is_slow_on_some_devices_is_suspected_on_others() -> None:
    slow = learn((4, 16, 100.0, 1.0), (4, 16, 200.0, 1.1), (8, 32, 100.0, 1.0))
    assert predict(slow, 8, 32, 200.0) > 1.02


def test_measurements_alike_do_not_shout_each_other_down() -> None:
    found = learn(*((4, 16, 100.0 + 0.1 * step, 1.0 + 0.01 * (step % 2)) for step in range(40)))
    told = [predict(found, 4, 16, local) for local in np.linspace(60.0, 160.0, 50)]
    assert 0.97 < min(told) <= max(told) < 1.04
