from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from yunlu.spec.train import ClipSpec
from yunlu.training.clipping import WARMUP, Clipper, learn_bound, measure_norm


def trained(seed: int, scale: float) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    for weight in model.parameters():
        weight.grad = scale * torch.randn(weight.shape, generator=generator)
    return model


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def clip(model: nn.Module, spec: ClipSpec) -> list[Tensor]:
    gradients = gradients_of(model)
    Clipper(spec).clip(gradients, measure_norm(gradients))
    return gradients


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-9, 1e6), st.floats(1e-8, 1e8))
def test_a_fixed_norm_gives_the_bits_that_torch_gives(
    seed: int, scale: float, bound: float
) -> None:
    model, other = trained(seed, scale), trained(seed, scale)
    ours = clip(model, ClipSpec(norm=bound))
    clip_grad_norm_(other.parameters(), bound)
    assert_same(ours, gradients_of(other))


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(-1e-5, 1e-5))
def test_the_bits_agree_where_the_norm_is_nearly_the_bound(seed: int, nearly: float) -> None:
    model, other = trained(seed, 1.0), trained(seed, 1.0)
    bound = float(measure_norm(gradients_of(model))) * (1 + nearly)
    ours = clip(model, ClipSpec(norm=bound))
    clip_grad_norm_(other.parameters(), bound)
    assert_same(ours, gradients_of(other))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_become_what_torch_makes_of_them(bad: float) -> None:
    model, other = trained(1, 1.0), trained(1, 1.0)
    for broken in (model, other):
        gradients_of(broken)[0][0, 0] = bad
    ours = clip(model, ClipSpec(norm=1.0))
    clip_grad_norm_(other.parameters(), 1.0)
    assert_same(ours, gradients_of(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_has_the_bits_that_torch_gives(dtype: torch.dtype) -> None:
    gradients = [gradient.to(dtype) for gradient in gradients_of(trained(2, 3.0))]
    assert torch.equal(measure_norm(gradients), get_total_norm(gradients))


def test_no_gradients_have_no_norm() -> None:
    assert float(measure_norm([])) == 0.0


def test_values_are_bounded_first_and_then_the_norm_of_what_is_left() -> None:
    model, other = trained(3, 2.0), trained(3, 2.0)
    ours = clip(model, ClipSpec(norm=1.5, value=0.5))
    clip_grad_value_(other.parameters(), 0.5)
    clip_grad_norm_(other.parameters(), 1.5)
    assert_same(ours, gradients_of(other))


def test_values_alone_are_bounded() -> None:
    ours = clip(trained(3, 2.0), ClipSpec(norm=None, value=0.5))
    assert max(float(gradient.abs().max()) for gradient in ours) == 0.5


def test_nothing_is_bounded_where_nothing_is_asked() -> None:
    assert_same(clip(trained(3, 2.0), ClipSpec(norm=None)), gradients_of(trained(3, 2.0)))


def follow(norms: list[float]) -> tuple[Clipper, list[float]]:
    clipper = Clipper(ClipSpec(norm="adaptive"))
    return clipper, [clip_one(clipper, norm) for norm in norms]


def clip_one(clipper: Clipper, norm: float) -> float:
    gradient = torch.tensor([norm])
    clipper.clip([gradient], measure_norm([gradient]))
    return float(gradient)


def usual(count: int) -> list[float]:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return (1 + 0.1 * noise).tolist()


def test_an_adaptive_bound_cuts_a_spike_and_leaves_the_usual_alone() -> None:
    clipper, clipped = follow(usual(400))
    changed = sum(abs(one - other) > 1e-6 for one, other in zip(clipped, usual(400), strict=True))
    assert changed < 10  # 0.6 % of normal noise lies above 2.5 deviations
    assert clip_one(clipper, 100.0) < 1.5
    assert clip_one(clipper, 100.0) < 1.7  # the first spike has hardly widened the bound


def test_an_adaptive_bound_waits_until_it_knows_enough() -> None:
    clipper, clipped = follow([1.0] * (WARMUP - 1))
    assert clipped == [1.0] * (WARMUP - 1)
    assert clip_one(clipper, 50.0) == 50.0
    clipper, _ = follow([1.0] * WARMUP)
    assert clip_one(clipper, 50.0) < 2.0


def test_an_adaptive_bound_follows_norms_that_grow_for_good() -> None:
    _, clipped = follow([1.0] * 100 + [10.0] * 100)
    assert clipped[-1] == pytest.approx(10.0, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 10, 100])
def test_an_overflow_teaches_nothing(bad: float, at: int) -> None:
    norms = usual(150)
    clean, _ = follow(norms)
    disturbed, _ = follow([*norms[:at], bad, *norms[at:]])
    assert disturbed.state() == clean.state()


@pytest.mark.parametrize("at", [0, 5, 60])
def test_a_resumed_bound_goes_on_exactly(at: int) -> None:
    norms = [*usual(100), 9.0, 1.0, 9.0]
    whole, clipped = follow(norms)
    first, _ = follow(norms[:at])
    resumed = Clipper(ClipSpec(norm="adaptive"))
    resumed.restore(json.loads(json.dumps(first.state())))
    assert [clip_one(resumed, norm) for norm in norms[at:]] == clipped[at:]
    assert resumed.state() == whole.state()


def test_tensors_learn_what_numbers_learn() -> None:
    norms = [*usual(60), math.inf, 8.0, math.nan, *usual(20)]
    numbers, tensors = (0.0, 0.0, 0.0), tuple(torch.zeros(3).double().unbind())
    for norm in norms:
        bound, numbers = learn_bound(numbers, norm)
        other, tensors = learn_bound(tensors, torch.tensor(norm).double())
        assert float(other) == pytest.approx(float(bound), rel=1e-6)
    assert [float(n) for n in tensors] == pytest.approx([float(n) for n in numbers], rel=1e-6)
