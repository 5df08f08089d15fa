from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from yunlu.training.gradient_noise import FEWEST, NUMBERS, NoiseScale, estimate_from_replicas
from yunlu.training.precision import Precision
from yunlu.training.tasks.task import Batch

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

    def loss(self, size: int, *, of: int) -> Tensor:
        """Of some samples, as their part of the mean over ``of``."""
        inputs = torch.randn(size, FEATURES, generator=self.generator) * self.variances.sqrt()
        noise = NOISE * torch.randn(size, generator=self.generator)
        return (inputs @ (self.weight - self.truth) - noise).square().sum() / (2 * of)

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


def test_sampled_positions_estimate_the_full_gradient() -> None:
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
    noise.observe(200, batch)
    tensors, _ = noise.pair()
    assert sum(tensor.numel() for tensor in tensors.values()) < 1.1 * NUMBERS
    assert noise.figures()["noise_var"] == pytest.approx(9 * total, rel=0.05)


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
    numbers, (tensors, about) = first.numbers(), first.pair()
    resumed, weight = make()
    resumed.adopt(json.loads(json.dumps(numbers)))
    if about:
        resumed.adopt_pair(tensors["first"], json.loads(json.dumps(about)))
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
    assert noise.numbers()["count"] == 0


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


def assert_unbiased(found: Tensor, truth: tuple[float, float]) -> None:
    """Rows of tr(Sigma) and |G|^2: their means lie within four standard errors, and those are small."""
    errors = found.std(dim=0) / len(found) ** 0.5
    assert (errors / torch.tensor(truth)).max() < 0.05
    assert ((found.mean(dim=0) - torch.tensor(truth)).abs() / errors).max() < 4


@pytest.mark.parametrize("sizes", [(16, 16), (10, 20, 34), (40, 8, 0, 16)])
def test_replicas_of_any_size_tell_noise_and_signal(sizes: tuple[int, ...]) -> None:
    problem, batch = Regression(), sum(sizes)
    found: list[Tensor] = []
    for _ in range(400):
        parts: list[Tensor] = []
        for size in sizes:
            if size:
                problem.backward(size)
                assert problem.weight.grad is not None
                parts.append(problem.weight.grad * (size / batch))
        squares = torch.stack([part.square().sum() for part in parts]).sum()
        square = torch.stack(parts).sum(dim=0).square().sum()
        squared = torch.tensor(float(sum(size**2 for size in sizes)))
        found.append(estimate_from_replicas(torch.stack((squares, square, squared)), batch))
    assert_unbiased(torch.stack(found), problem.noise_and_signal())


def accumulate(noise: NoiseScale, problem: Regression, step: int, sizes: tuple[int, ...]) -> None:
    problem.weight.grad = None
    micros = [Batch(inputs=(), targets=torch.zeros(0), samples=size, items=size) for size in sizes]
    backward = noise.begin(step, micros, Precision("fp32", torch.device("cpu")))
    for size in sizes:
        backward(problem.loss(size, of=sum(sizes)))
    noise.observe(step, sum(sizes))


@pytest.mark.parametrize("sizes", [(32, 32), (8, 24, 16, 40, 8)])
def test_the_halves_of_a_step_tell_noise_and_signal(sizes: tuple[int, ...]) -> None:
    problem, found = Regression(), list[Tensor]()
    for step in range(400):
        noise = NoiseScale([problem.weight])
        accumulate(noise, problem, step * 20, sizes)
        noise_sum, signal_sum, weight = noise.numbers()["sums"]
        found.append(torch.tensor([noise_sum / weight, signal_sum / weight]))
    assert_unbiased(torch.stack(found), problem.noise_and_signal())


def test_the_averages_are_those_of_the_whole_gradient() -> None:
    problem = Regression()
    noise = NoiseScale([problem.weight], every=2)
    for step in range(400):
        accumulate(noise, problem, step, (128, 128))
    figures, (true_noise, true_signal) = noise.figures(), problem.noise_and_signal()
    assert figures["noise_var"] == pytest.approx(true_noise, rel=0.05)
    assert figures["noise_sqr"] == pytest.approx(true_signal, rel=0.1)
    assert figures["noise_scale"] == noise.value == figures["noise_var"] / figures["noise_sqr"]
    assert figures["noise_parts"] == 2


def test_what_two_steps_told_is_forgotten_once_a_step_tells_more() -> None:
    problem = Regression()
    noise = NoiseScale([problem.weight], every=2)
    for step in range(40):
        accumulate(noise, problem, step, (32,))
    assert noise.figures()["noise_parts"] == 1
    accumulate(noise, problem, 40, (32, 32))
    assert noise.numbers()["count"] == 1
    assert noise.value is None
    for step in range(41, 41 + 2 * FEWEST):
        accumulate(noise, problem, step, (32, 32))
    assert noise.figures()["noise_parts"] == 2


def test_a_short_step_now_and_then_does_not_bring_the_bias_back() -> None:
    problem = Regression()
    noise = NoiseScale([problem.weight], every=2)
    for step in range(60):
        accumulate(noise, problem, step, (32,) if step % 10 == 6 else (32, 32))
    assert noise.numbers()["parts"] == 2
    for step in range(60, 80):  # until there are no others
        accumulate(noise, problem, step, (32,))
    assert noise.numbers()["parts"] == 1


def test_samples_sorted_by_length_are_compared_between_steps_only() -> None:
    problem = Regression()
    noise = NoiseScale([problem.weight], every=2, is_mixed=False)
    for step in range(40):
        accumulate(noise, problem, step, (32, 32))
        noise.hold(torch.ones(3), replicas=2)
    assert noise.figures()["noise_parts"] == 1


def test_a_scaled_loss_gives_the_same_answer() -> None:
    answers: list[dict[str, float]] = []
    for scale in (1.0, 1024.0):
        problem = Regression()
        noise = NoiseScale([problem.weight], every=2)
        for step in range(40):
            problem.weight.grad = None
            sizes = (32, 32)
            micros = [
                Batch(inputs=(), targets=torch.zeros(0), samples=size, items=size) for size in sizes
            ]
            backward = noise.begin(step, micros, Scaled(scale))
            for size in sizes:
                backward(problem.loss(size, of=64))
            noise.observe(step, 64)
        answers.append(noise.figures())
    assert answers[0] == pytest.approx(answers[1])


class Scaled(Precision):
    """A loss with a factor on it, as under fp16."""

    def __init__(self, factor: float) -> None:
        super().__init__("fp32", torch.device("cpu"))
        self._factor = factor

    @property
    def scale(self) -> float:
        return self._factor

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self._factor)
