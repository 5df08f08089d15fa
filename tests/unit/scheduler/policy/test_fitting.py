"""A job's model is learnt from its steps, and from those of jobs like it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from yunlu.scheduler.policy import fitting
from yunlu.scheduler.policy.fitting import Fitter, fit_throughput
from yunlu.scheduler.policy.goodput import (
    BatchLimits,
    GradientNoise,
    NoisePoint,
    Observations,
    StepTiming,
    Throughput,
)

TRUE = Throughput(0.06, 0.0015, 0.25, 0.004, 0.03, 0.006, 1.8)
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 8), (4, 16))
LIMITS = BatchLimits(base=128, most=4096, local_least=16, local_most=512)


def observe(nodes: int, devices: int, local: int, *, factor: float = 1.0) -> StepTiming:
    whole = np.array([nodes]), np.array([devices]), np.array([float(local)]), np.array([0.0])
    step_s = float(TRUE.predict_step_s(*whole)[0])
    gradient_s = float(TRUE.predict_gradient_s(whole[2])[0])
    return StepTiming("t4", nodes, devices, local, gradient_s * factor, step_s * factor)


ALL = tuple(observe(*shape, local) for shape in SHAPES for local in (32, 64, 128, 256))


def test_unseen_shapes_are_told_from_seen_ones() -> None:
    fitted = fit_throughput(ALL)
    for nodes, devices, local in ((3, 12, 100), (8, 32, 48), (1, 3, 200)):
        whole = np.array([nodes]), np.array([devices]), np.array([float(local)]), np.array([0.0])
        assert fitted.predict_step_s(*whole)[0] == pytest.approx(
            TRUE.predict_step_s(*whole)[0], rel=0.1
        )


def test_noise_of_a_tenth_is_averaged_out() -> None:
    dice = np.random.default_rng(1)
    noisy = [
        observe(*shape, local, factor=float(np.exp(0.1 * dice.standard_normal())))
        for shape in SHAPES
        for local in (32, 48, 64, 96, 128, 256)
    ]
    fitted = fit_throughput(noisy)
    whole = np.array([3]), np.array([12]), np.array([100.0]), np.array([0.0])
    assert fitted.predict_step_s(*whole)[0] == pytest.approx(
        TRUE.predict_step_s(*whole)[0], rel=0.15
    )


def test_the_slope_of_the_loss_is_right() -> None:
    points = fitting._Points.of(ALL)  # pyright: ignore[reportPrivateUsage]
    start, _, _ = fitting._bound(points)  # pyright: ignore[reportPrivateUsage]
    start = start + 0.02
    _, slope = fitting._compute_loss(start, points)  # pyright: ignore[reportPrivateUsage]
    for which in range(7):
        nudge = np.zeros(7)
        nudge[which] = 1e-6
        above, _ = fitting._compute_loss(start + nudge, points)  # pyright: ignore[reportPrivateUsage]
        below, _ = fitting._compute_loss(start - nudge, points)  # pyright: ignore[reportPrivateUsage]
        assert slope[which] == pytest.approx((above - below) / 2e-6, abs=1e-6)


def test_what_was_never_seen_is_tried() -> None:
    alone = [observe(1, 1, local) for local in (32, 64)]
    fitted = fit_throughput(alone)
    assert fitted.link_s < 1e-6  # summing within a node is taken to be free
    two = fit_throughput([*alone, observe(1, 2, 64)])
    assert two.network_s >= 1.1 * two.link_s > 0


def test_a_job_may_try_four_times_what_was_seen() -> None:
    fit = Fitter()
    unknown = fit(Observations(signature="a", limits=LIMITS), None)
    assert unknown.max_devices == 4
    seen = Observations(signature="a", limits=LIMITS, timings=(observe(1, 4, 64),))
    assert fit(seen, unknown).max_devices == 16


def test_timings_of_the_same_program_spare_the_ramp() -> None:
    shared = Observations(
        signature="a",
        limits=LIMITS,
        shared_timings=ALL,
        shared_noise=(
            NoisePoint(900.0, 128, GradientNoise(1.0, 50.0)),
            NoisePoint(0.0, 128, GradientNoise(1.0, 2.0)),
        ),
    )
    model = Fitter()(shared, None)
    assert model.max_devices == 64
    assert model.noise == GradientNoise(1.0, 2.0)
    assert model.throughputs["t4"] == fit_throughput(ALL)


def test_nothing_is_fitted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fitter()
    seen = Observations(signature="a", limits=LIMITS, timings=ALL, noise=GradientNoise(1.0, 3.0))
    first = fit(seen, None)

    def refuse(_: object) -> Throughput:
        raise AssertionError

    monkeypatch.setattr(fitting, "fit_throughput", refuse)
    later = fit(replace(seen, noise=GradientNoise(1.0, 9.0)), first)
    assert later.throughputs is first.throughputs
    assert later.noise == GradientNoise(1.0, 9.0)
    # A new timing that the model tells well is no reason, either.
    told = first.throughputs["t4"].predict_step_s(
        np.array([1]), np.array([4]), np.array([90.0]), np.array([0.0])
    )
    more = (*ALL, StepTiming("t4", 1, 4, 90, 0.1, float(told[0])))
    again = fit(replace(seen, timings=more), later).throughputs["t4"]
    assert replace(again, measured=None) == replace(first.throughputs["t4"], measured=None)
    with pytest.raises(AssertionError):
        fit(replace(seen, timings=(*more, observe(8, 32, 64))), later)


def test_what_is_too_little_to_fit_again_is_learnt_all_the_same() -> None:
    fit = Fitter()
    seen = Observations(signature="a", limits=LIMITS, timings=ALL, noise=GradientNoise(1.0, 3.0))
    first = fit(seen, None)
    slow = observe(1, 4, 512, factor=1.025)
    again = fit(replace(seen, timings=(*ALL, slow)), first)
    at = np.array([1]), np.array([4]), np.array([512.0]), np.array([0.0])
    assert first.throughputs["t4"].predict_step_s(*at)[0] < 0.985 * slow.step_s
    assert again.throughputs["t4"].predict_step_s(*at)[0] == pytest.approx(slow.step_s, rel=0.005)
    assert again.throughputs["t4"].overlap == first.throughputs["t4"].overlap


def test_each_type_of_device_has_its_own_model() -> None:
    faster = tuple(
        timing._replace(
            device_type="a100", step_s=timing.step_s / 3, accumulate_s=timing.accumulate_s / 3
        )
        for timing in ALL
    )
    model = Fitter()(Observations(signature="a", limits=LIMITS, timings=ALL + faster), None)
    shape = np.array([1]), np.array([4])
    ratio = model.goodput("a100", *shape) / model.goodput("t4", *shape)
    assert ratio[0] == pytest.approx(3.0, rel=0.02)
