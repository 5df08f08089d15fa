"""What is left of a job that nobody has measured out."""

from __future__ import annotations

import numpy as np
import pytest

from yunlu.scheduler.policy.value_table import WorkHistory


def test_a_program_takes_what_it_took_before() -> None:
    lengths = WorkHistory()
    lengths.record("cifar", 1000.0, 50.0)
    lengths.record("cifar", 1200.0, 60.0)
    assert lengths.predict_samples_left("cifar", 100.0) == pytest.approx(1000.0)
    assert lengths.predict_samples_left("cifar", 1100.0) == pytest.approx(100.0)
    assert lengths.predict_samples_left("bert", 0.0) is None
    overtime = lengths.predict_samples_left("cifar", 2000.0)
    assert overtime is not None
    assert 0 < overtime < 1000


def test_without_any_past_the_young_are_taken_to_be_short() -> None:
    left = WorkHistory().predict_left_s(np.array([0.0, 1000.0, 50_000.0, 1e7]))
    assert (np.diff(left) > 0).all()
    assert left[-1] == pytest.approx(1e7)


def test_a_job_about_as_old_as_others_were_at_their_end_is_nearly_done() -> None:
    lengths = WorkHistory()
    for _ in range(100):
        lengths.record("", 0.0, 3600.0)
        lengths.record("", 0.0, 100_000.0)
    left = lengths.predict_left_s(np.array([3500.0, 3700.0]))
    assert left[0] < 500
    assert left[1] > 50_000
