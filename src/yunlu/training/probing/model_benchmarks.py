"""Benchmarks of small models: call overhead, and the slowdown of operators inside a model."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from yunlu.planning.predict.local import operators_s
from yunlu.training.probing.operator_counts import count_operators

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.planning.machine_profile import MachineProfile
    from yunlu.training.probing.microbenchmarks import Bench

_MOST_MIXED = 4.0
"""Larger ratios are measurement errors."""


def measure_call(bench: Bench) -> float:
    """Call overhead in seconds: mean time per operator of a tiny model."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)]
    run = _training_pass(
        nn.Sequential(*layers).to(bench.device), torch.randn(4, 8, device=bench.device)
    )
    operators = sum(operator.calls for operator in count_operators(run))
    best_s, spread = bench.time(run)
    # The median, not the best: disturbances occur in runs too.
    return best_s * (1 + spread) / operators


def measure_mixed(profile: MachineProfile, bench: Bench, *, trials: int = 15) -> MachineProfile:
    """The profile with the slowdown of operators inside a model: shared caches, fresh memory."""
    for make, field in ((_perceptron, "mixed"), (_convolutional, "mixed_convolutions")):
        run = make(bench)
        counted = count_operators(run)
        # Time outside the factor: calls, and in the second model all but convolutions.
        rest_s = operators_s(
            counted, profile.model_copy(update={field: 0.0}), threads=bench.threads
        )
        alone_s = operators_s(
            counted, profile.model_copy(update={field: 1.0}), threads=bench.threads
        )
        spans: list[float] = []
        for _ in range(trials):
            started_at = bench.clock()
            run()
            bench.synchronize()
            spans.append(bench.clock() - started_at)
        ratio = (median(spans) - rest_s) / max(alone_s - rest_s, 1e-9)
        profile = profile.model_copy(update={field: min(max(ratio, 1.0), _MOST_MIXED)})
    return profile


def _perceptron(bench: Bench) -> Callable[[], None]:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.LayerNorm(96), nn.Linear(96, 384), nn.GELU(), nn.Dropout(0.1)]
        layers += [nn.Linear(384, 96)]
    inputs = torch.randn(768, 96, device=bench.device)
    return _training_pass(nn.Sequential(*layers).to(bench.device), inputs)


def _convolutional(bench: Bench) -> Callable[[], None]:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    inputs = torch.randn(32, 1, 8, 8, device=bench.device)
    return _training_pass(nn.Sequential(*layers).to(bench.device), inputs)


def _training_pass(model: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(inputs).sum().backward()

    return run
