from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from yunlu.training.noise import NUMBERS, NoiseScale

FEATURES = 200
NOISE = 1.0


class Regression:
    """Least squares on normal data, where the gradient and its covariance are known."""

    def __init__(self, *, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        spread = torch.linspace(0.1, 2, FEATURES) ** 2
        self.variances = spread / spread.mean()
        self.truth = torch.randn(FEATURES, generator=self.generator)
        start = self.truth + 3 * torch.randn(FEATURES, generator=self.generator) / FEATURES**0.5
        self.weight = nn.Parameter(start)

    def backward(self, batch: int) -> None:
        inputs = torch.randn(batch, FEATURES, generator=self.generator) * self.variances.sqrt()
        noise = NOISE * torch.randn(batch, generator=self.generator)
        residual = inputs @ (self.weight - self.truth).detach() - noise
        self.weight.grad = inputs.T @ residual / batch

    def noise_and_signal(self) -> tuple[float, float]:
        """The trace of one sample's covariance, and the square of the true gradient."""
        error = (self.weight - self.truth).detach()
        signal = float((self.variances * error).square().sum())
        fit = float((self.variances * error.square()).sum()) + NOISE**2
        return fit * float(self.variances.sum()) + signal, signal


def measure(optimizer: str, *, lr: float, steps: int, batches: tuple[int, ...] = (64,)) -> float:
    """What is measured, as a multiple of what is true, averaged over the same steps."""
    problem = Regression()
    update = {
        "sgd": lambda: torch.optim.SGD([problem.weight], lr=lr),
        "momentum": lambda: torch.optim.SGD([problem.weight], lr=lr, momentum=0.9),
        "adam": lambda: torch.optim.Adam([problem.weight], lr=lr),
    }[optimizer]()
    noise = NoiseScale([problem.weight], every=2)
    true_noise = true_signal = 0.0
    for step in range(steps):
        batch = batches[step % len(batches)]
        problem.backward(batch)
        now = problem.noise_and_signal()
        if step % 2:
            true_noise += 0.03 * (now[0] - true_noise)
            true_signal += 0.03 * (now[1] - true_signal)
        noise.observe(step, batch)
        update.step()
    assert noise.value is not None
    return noise.value / (true_noise / true_signal)


@pytest.mark.parametrize(
    ("optimizer", "lr", "steps", "factor"),
    [
        ("sgd", 0.01, 200, 1.35),
        ("momentum", 0.005, 200, 1.35),
        ("adam", 1e-3, 400, 1.35),
        ("adam", 3e-3, 400, 1.35),
        # down in the noise, at 20 times the batch, and with only 200 numbers to tell it from:
        ("momentum", 0.005, 1000, 3.5),
        ("adam", 1e-2, 1000, 3.5),
    ],
)
def test_the_noise_of_a_known_problem_is_measured_within_a_factor(
    optimizer: str, lr: float, steps: int, factor: float
) -> None:
    assert 1 / factor < measure(optimizer, lr=lr, steps=steps) < factor


def test_batches_of_different_size_give_the_same_answer() -> None:
    assert 1 / 1.5 < measure("adam", lr=1e-3, steps=600, batches=(16, 128)) < 1.5


def test_a_few_places_tell_of_the_whole_gradient() -> None:
    size, batch = 5 * NUMBERS, 10
    weights = [torch.zeros(size, requires_grad=True), torch.zeros(3, 7, requires_grad=True)]
    signals = [torch.linspace(-1, 1, size), torch.ones(3, 7)]
    noise = NoiseScale(weights, every=2)
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        for weight, signal in zip(weights, signals, strict=True):
            spread = torch.randn(signal.shape, generator=generator) * batch**-0.5
            weight.grad = signal + 3 * spread
        noise.observe(step, batch)
    total = sum(signal.numel() for signal in signals)
    truth = 9 * total / sum(float(signal.square().sum()) for signal in signals)
    assert noise.value == pytest.approx(truth, rel=0.05)
    tensors, _ = noise.state()
    assert sum(tensor.numel() for tensor in tensors.values()) < 1.1 * NUMBERS


def test_nothing_is_said_before_enough_is_known_or_where_there_is_no_signal() -> None:
    weight = torch.zeros(100, requires_grad=True)
    noise = NoiseScale([weight], every=2)
    assert noise.value is None
    for step in range(40):
        weight.grad = torch.full((100,), 1.0 if step % 2 else -1.0)
        noise.observe(step, 8)
    assert noise.value is None


def observe(noise: NoiseScale, weight: Tensor, steps: range, bad: int = -1) -> list[float | None]:
    values: list[float | None] = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        weight.grad = 0.5 + torch.randn(weight.shape, generator=generator)
        if step == bad:
            weight.grad[3] = math.nan
        noise.observe(step, 4 + step % 3)
        values.append(noise.value)
    return values


def make() -> tuple[NoiseScale, Tensor]:
    weight = torch.zeros(50, requires_grad=True)
    return NoiseScale([weight], every=5), weight


@pytest.mark.parametrize("at", [0, 1, 50, 51, 52])
def test_a_resumed_measurement_goes_on_exactly(at: int) -> None:
    whole = observe(*make(), range(100))
    first, weight = make()
    observe(first, weight, range(at))
    tensors, numbers = first.state()
    resumed, weight = make()
    resumed.restore(tensors, json.loads(json.dumps(numbers)))
    assert observe(resumed, weight, range(at, 100)) == whole[at:]
    assert whole[-1] is not None


@pytest.mark.parametrize("bad", [60, 61])
def test_a_gradient_that_is_not_finite_spoils_nothing(bad: int) -> None:
    noise, weight = make()
    values = observe(noise, weight, range(100), bad=bad)
    assert values[bad] == values[bad - 1] is not None
    assert values[-1] is not None
    assert math.isfinite(values[-1])


def test_two_steps_that_do_not_follow_each_other_are_not_compared() -> None:
    noise, weight = make()
    observe(noise, weight, range(50, 51))
    observe(noise, weight, range(56, 57))
    assert noise.state()[1]["pairs"] == 0


def test_weights_without_a_gradient_take_no_part() -> None:
    used, unused = torch.zeros(50, requires_grad=True), torch.zeros(9, requires_grad=True)
    alone, with_other = NoiseScale([used], every=5), NoiseScale([used, unused], every=5)
    assert observe(alone, used, range(100))[-1] == pytest.approx(
        observe(with_other, used, range(100))[-1]
    )


def test_measuring_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    observe(*make(), range(0))
    weights: list[Any] = [torch.zeros(10 * NUMBERS, requires_grad=True)]
    NoiseScale(weights)
    assert torch.equal(before, torch.get_rng_state())
