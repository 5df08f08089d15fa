"""Contract test of optimisers, to inherit.

In your own test suite, where the package that offers the optimiser is installed::

    class TestLion(OptimizerContract):
        name = "lion"

pytest finds the methods by their names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from yunlu.core.limits import decode_json
from yunlu.spec.optimizers import HYPERPARAMETERS, traits_of
from yunlu.spec.train import OptimizerSpec
from yunlu.training.engine_state import fill_optimizer, optimizer_shards
from yunlu.training.memory.gradient_release import release_gradients
from yunlu.training.optim.build import build_optimizer
from yunlu.training.optim.fused_adam import FreezableMoments
from yunlu.training.tensor_slices import TensorShard, TensorSlice, TensorSpec, full_slice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.spec.optimizers import OptimizerTraits

_SHAPES = {"weight": (32, 48), "bias": (32,)}
_LARGE = (512, 512)
"""Large enough that tables and scales of an 8-bit state do not count."""
_WITHOUT_TORCH = """
import sys
from yunlu.spec.optimizers import traits_of
traits_of(sys.argv[1])
assert "torch" not in sys.modules, "import torch in the builder: plans are made without it"
"""


class OptimizerContract:
    """Behaviour that planner and engine rely on. Override ``name``."""

    name: ClassVar[str]
    """The name of its entry point in the group ``yunlu.optimizers``."""

    @property
    def traits(self) -> OptimizerTraits:
        """Traits of the optimiser, as every room finds them."""
        return traits_of(self.name)

    def test_its_traits_are_read_without_torch(self) -> None:
        """Jobs are checked and planned where no torch is installed."""
        command = [sys.executable, "-c", _WITHOUT_TORCH, self.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_its_usual_rate_lowers_a_simple_loss(self) -> None:
        """What a plan takes where the job says ``lr: auto``."""
        model = _linear()
        optimizer = self._build(list(model.parameters()))
        losses: list[float] = []
        for _ in range(100):
            optimizer.zero_grad(set_to_none=True)
            loss = _loss_of(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]

    def test_its_state_takes_the_declared_bytes(self) -> None:
        """A plan counts on them before anything is built."""
        size = self._state_bytes(state="fp32")
        assert size == pytest.approx(self.traits.state_bytes, rel=0.05, abs=0.05)

    def test_an_8_bit_state_takes_a_quarter(self) -> None:
        """The same for ``state: 8bit``; a job that asks it of others is refused."""
        if not self.traits.has_8bit_state:
            pytest.skip("it has no 8-bit state")
        pytest.importorskip("bitsandbytes")
        size = self._state_bytes(state="8bit")
        assert size == pytest.approx(0.26 * self.traits.state_bytes, rel=0.05)

    def test_a_resumed_run_equals_an_uninterrupted_one(self) -> None:
        """Bit for bit, by what a checkpoint keeps: tensors and numbers by weight, groups as JSON."""
        weights = _weights()
        optimizer = self._build(weights)
        _train(optimizer, weights, range(3))
        saved_state = _keep(optimizer, _whole(weights))
        copies = _copy(weights)
        _train(optimizer, weights, range(3, 6))
        resumed = self._build(copies)
        _restore(resumed, _whole(copies), saved_state)
        _train(resumed, copies, range(3, 6))
        for weight, other in zip(weights, copies, strict=True):
            assert torch.equal(weight, other)

    def test_a_cut_weight_is_updated_as_the_whole(self) -> None:
        """Sharded workers and parameter servers hold parts of weights, and of their state."""
        if self.traits.needs_whole_weights:
            pytest.skip("it needs whole weights")
        weights = _weights()
        optimizer = self._build(weights)
        _train(optimizer, weights, range(3))
        saved_state = _keep(optimizer, _whole(weights))
        halves = [_half(weights, rows) for rows in (range(16), range(16, 32))]
        _train(optimizer, weights, range(3, 6))
        for shards in halves:
            leaves = [nn.Parameter(shard.tensor.clone()) for shard in shards]
            named = {id(leaf): shard for leaf, shard in zip(leaves, shards, strict=True)}
            part = self._build(leaves)
            _restore(part, named, saved_state)
            regions = [shard.region.within(full_slice(shard.shape)) for shard in shards]
            _train(part, leaves, range(3, 6), regions=regions)
            for leaf, weight, region in zip(leaves, weights, regions, strict=True):
                torch.testing.assert_close(leaf, weight[region], rtol=1e-6, atol=1e-7)

    def test_it_follows_the_rate_of_its_groups(self) -> None:
        """Schedules set ``lr`` before each step; at zero nothing moves, nor decays."""
        weights = _weights()
        before = _copy(weights)
        optimizer = self._build(weights, weight_decay=0.5, l2=0.5)
        _train(optimizer, weights, range(3), lr=0.0)
        assert all(map(torch.equal, weights, before))
        _train(optimizer, weights, range(3, 4), lr=self.traits.lr)
        assert not any(map(torch.equal, weights, before))

    def test_a_weight_without_gradient_stays(self) -> None:
        """Layers that a batch does not use, such as experts."""
        weights = _weights()
        before = _copy(weights)
        optimizer = self._build(weights)
        weights[0].grad = torch.ones_like(weights[0])
        optimizer.step()
        assert not torch.equal(weights[0], before[0])
        assert torch.equal(weights[1], before[1])

    def test_it_decays_by_the_declared_key_alone(self) -> None:
        """``l2`` is part of the gradient; ``weight_decay`` is the optimiser's own. Vectors never decay."""
        is_l2 = self.traits.decays_by == "l2"
        plain, other = self._after(), self._after(**{"weight_decay" if is_l2 else "l2": 0.5})
        decayed = self._after(**{"l2" if is_l2 else "weight_decay": 0.5})
        assert all(map(torch.equal, plain, other))
        assert torch.equal(plain[1], decayed[1])
        assert torch.linalg.vector_norm(decayed[0]) < torch.linalg.vector_norm(plain[0])
        if is_l2:
            penalised = self._after(penalty=0.5)
            torch.testing.assert_close(decayed[0], penalised[0])

    def test_every_kernel_gives_the_same_weights(self) -> None:
        """The fastest is taken: it must not matter which."""
        results = {kernel: self._after(kernel=kernel) for kernel in self.traits.kernels}
        for weights in results.values():
            for weight, other in zip(weights, results["single"], strict=True):
                torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)

    def test_every_declared_hyperparameter_matters(self) -> None:
        """What it does not read it must not declare: a job would set it in vain."""
        plain = self._after()
        for key, default in self.traits.hyperparameters.items():
            other = _other_value(default)
            if other is None:
                continue
            details = {key: other} if key in HYPERPARAMETERS else {"args": {key: other}}
            assert not torch.equal(self._after(spec=details)[0], plain[0]), key

    def test_weights_may_be_updated_one_by_one(self) -> None:
        """``train.gradient_release`` updates each as soon as its gradient is there."""
        ordinary, released = _linear(), _linear()
        optimizer = self._build(list(ordinary.parameters()))
        release = release_gradients(released, lambda model: self._build(list(model.parameters())))
        for _ in range(3):
            _loss_of(released).backward()
            release.step()
            optimizer.zero_grad(set_to_none=True)
            _loss_of(ordinary).backward()
            optimizer.step()
        for weight, other in zip(ordinary.parameters(), released.parameters(), strict=True):
            torch.testing.assert_close(weight, other)

    def test_the_second_moment_can_be_frozen_where_declared(self) -> None:
        """Gradients of one bit need it; freezing alone moves no weight."""
        if not self.traits.can_freeze:
            pytest.skip("it cannot freeze a second moment")
        weights = _weights()
        optimizer: Any = self._build(weights, freezable=True)
        assert isinstance(optimizer, FreezableMoments)
        _train(optimizer, weights, range(3))
        before = _copy(weights)
        optimizer.freeze()
        optimizer.freeze()
        optimizer.thaw()
        assert all(map(torch.equal, weights, before))
        optimizer.freeze()
        _train(optimizer, weights, range(3, 6))
        assert all(torch.isfinite(weight).all() for weight in weights)

    def _build(
        self, weights: Sequence[Tensor], *, spec: dict[str, Any] | None = None, **details: Any
    ) -> Any:
        chosen = OptimizerSpec.model_validate({"name": self.name, **(spec or {})})
        settings: dict[str, Any] = {"lr": self.traits.lr, "weight_decay": 0.0, "l2": 0.0, **details}
        return build_optimizer(weights, chosen, **settings)

    def _after(self, *, penalty: float = 0.0, **details: Any) -> list[nn.Parameter]:
        """The weights after three steps."""
        weights = _weights()
        _train(self._build(weights, **details), weights, range(3), penalty=penalty)
        return weights

    def _state_bytes(self, *, state: str) -> float:
        """Bytes of state per weight."""
        weight = nn.Parameter(torch.randn(_LARGE))
        optimizer = self._build([weight], spec={"state": state})
        _train(optimizer, [weight], range(2))
        values = optimizer.state[weight].values() if weight in optimizer.state else ()
        return sum(value.nbytes for value in values if isinstance(value, Tensor)) / weight.numel()


def _linear() -> nn.Linear:
    model = nn.Linear(48, 32)
    with torch.no_grad():
        for weight, values in zip(model.parameters(), _weights(), strict=True):
            weight.copy_(values)
    return model


def _loss_of(model: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 48, generator=draw)
    targets = inputs @ torch.randn(48, 32, generator=draw)
    return (model(inputs) - targets).square().mean()


def _weights() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in _SHAPES.values()]


def _copy(weights: Sequence[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(weight.detach().clone()) for weight in weights]


def _train(
    optimizer: Any,
    weights: Sequence[Tensor],
    steps: range,
    *,
    lr: float | None = None,
    penalty: float = 0.0,
    regions: Sequence[Any] | None = None,
) -> None:
    """Steps with gradients that only the step decides; ``regions`` cuts them as the weights are cut."""
    for group in optimizer.param_groups if lr is not None else ():
        group["lr"] = lr
    for step in steps:
        draw = torch.Generator().manual_seed(100 + step)
        for number, weight in enumerate(weights):
            if regions is None:
                gradient = torch.randn(weight.shape, generator=draw)
            else:
                whole = torch.randn(list(_SHAPES.values())[number], generator=draw)
                gradient = whole[regions[number]].clone()
            weight.grad = gradient + (penalty * weight.detach() if weight.ndim > 1 else 0.0)
        optimizer.step()


class _KeptState:
    """What a checkpoint keeps of an optimiser, in memory."""

    def __init__(self, tensors: dict[str, Tensor], groups: dict[str, Any]) -> None:
        self.tensors, self.groups = tensors, groups

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in self.tensors.items()}

    def read(self, name: str, region: TensorSlice) -> Tensor:
        return self.tensors[name][region.within(full_slice(self.tensors[name].shape))]


def _whole(weights: Sequence[Tensor]) -> dict[int, TensorShard]:
    return {
        id(weight): TensorShard(name, shape, full_slice(shape), weight.detach())
        for weight, (name, shape) in zip(weights, _SHAPES.items(), strict=True)
    }


def _half(weights: Sequence[Tensor], rows: range) -> list[TensorShard]:
    """These rows of all weights."""
    shards: list[TensorShard] = []
    for weight, (name, shape) in zip(weights, _SHAPES.items(), strict=True):
        region = TensorSlice((rows.start, *(0 for _ in shape[1:])), (len(rows), *shape[1:]))
        part = weight.detach()[region.within(full_slice(shape))].clone()
        shards.append(TensorShard(name, shape, region, part))
    return shards


def _keep(optimizer: Any, names: dict[int, TensorShard]) -> _KeptState:
    shards, groups = optimizer_shards(optimizer, names)
    tensors = {name: shard.tensor.clone() for name, shard in shards.items()}
    return _KeptState(tensors, decode_json(json.dumps(groups)))


def _restore(optimizer: Any, names: dict[int, TensorShard], saved_state: _KeptState) -> None:
    fill_optimizer(optimizer, names, saved_state, saved_state.groups)


def _other_value(value: Any) -> Any:
    """Another value of the kind; None where none can be made up."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return (value + 1) / 2
    if isinstance(value, tuple):
        return [_other_value(part) for part in value]
    return None
