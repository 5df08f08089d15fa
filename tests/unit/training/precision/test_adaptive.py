"""Who is moved, who is not, and when it is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from tests.training_device import DEVICE
from yunlu.training.precision import Precision, PrecisionChange
from yunlu.training.precision.adaptive import LONGEST_WAIT, SpikeDetector
from yunlu.training.precision.ranges import FiniteProbe, RangeProbe, find_candidates


class Run:
    """Steps of a model under the policy, with a loss given by the test."""

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module], Tensor], *, name: str = "fp16"
    ) -> None:
        self.model, self.loss = model, loss
        self.precision = Precision(name, DEVICE, adapt=True)
        self.precision.attach(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        self.steps, self.looks = 0, list[int]()

    def take(self, steps: int) -> list[PrecisionChange]:
        moves: list[PrecisionChange] = []
        for _ in range(steps):
            self.steps += 1
            assert self.precision._adaptive is not None
            if self.precision._adaptive.is_due:
                self.looks.append(self.steps)
            with self.precision.forward():
                loss = self.loss(self.model)
            self.precision.backward(loss)
            self.precision.unscale(self.optimizer)
            norm = nn.utils.get_total_norm(
                [weight.grad for weight in self.model.parameters() if weight.grad is not None]
            )
            self.precision.note_norm(float(norm))
            self.precision.step(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
            moves += self.precision.observe(step=self.steps, loss=loss.item())
        return moves


def line(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def test_probes_become_rare_while_nothing_happens_and_leave_no_hooks() -> None:
    inputs = torch.randn(4, 3)
    run = Run(line(3, 3), lambda model: model(inputs).float().square().mean())
    assert run.take(400) == []
    assert run.looks == [1, 3, 7, 15, 31, 63, 127, 255, 383]
    assert run.looks[-1] - run.looks[-2] == LONGEST_WAIT
    for module in run.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(not weight._backward_hooks for weight in run.model.parameters())
    assert run.precision.low_share == 1


def test_a_scale_that_backs_off_moves_no_one() -> None:
    """Gradients near 2**10 overflow at the first scale and at no lower one."""
    inputs = torch.full((8, 4), 16.0)
    run = Run(line(4, 4), lambda model: model(inputs).float().sum() * 64)
    assert run.precision._adaptive is not None
    run.precision._adaptive._next = "none"  # unexpected: it must be handled
    run.precision._adaptive._next_at = 1000
    assert run.take(30) == []
    assert run.precision.skips >= 1
    assert run.precision.scale is not None
    assert run.precision.scale < 65536
    assert run.precision.low_share == 1


class Sparse(nn.Module):
    """Zeros by right: unused rows, dead units, features that are always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)
        nn.init.constant_(self.up.bias, -1.0)  # most units are off

    def forward(self, ids: Tensor) -> Tensor:
        features = torch.cat([self.embed(ids), torch.zeros(len(ids), 8)], dim=-1)
        return self.down(self.up(features).relu())


def test_gradients_that_are_rightly_zero_move_no_one() -> None:
    ids = torch.tensor([1, 2, 3])
    run = Run(Sparse(), lambda model: model(ids).float().square().mean())
    assert run.take(10) == []


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.mask: Tensor | None = nn.Transformer.generate_square_subsequent_mask(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, src_mask=self.mask)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_data_and_masks_are_nobodys_fault(bad: float) -> None:
    model = Masked()
    inputs = torch.randn(2, 3, 8)
    inputs[0, 0, 0] = bad
    probe = FiniteProbe(model, find_candidates(model))
    with probe.hooks(), Precision("fp16", DEVICE).forward():
        model(inputs)
    assert probe.read_culprits() == []
    healthy = FiniteProbe(model, find_candidates(model))
    with healthy.hooks(), Precision("fp16", DEVICE).forward():
        model(torch.randn(2, 3, 8))
    assert healthy.read_culprits() == []


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_overflow_is_put_down_to_where_it_starts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Squared()), line(2, 2))
    with torch.no_grad():
        model[1][0].weight.fill_(0).fill_diagonal_(1e3)
    probe = FiniteProbe(model, find_candidates(model))
    with probe.hooks(), Precision("fp16", DEVICE).forward():
        model(torch.ones(1, 2) * 50)
    assert probe.read_culprits() == ["1.1"]  # not the layer before, the ones around, or after


def test_two_culprits_side_by_side_are_both_found() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.calm = Squared(), Squared(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            low = self.calm(x)
            return self.left(low * 1e3) + self.right(low * 1e3) + low

    model = Fork()
    probe = FiniteProbe(model, find_candidates(model))
    with probe.hooks(), Precision("fp16", DEVICE).forward():
        model(torch.ones(1, 2))
    assert probe.read_culprits() == ["left", "right"]


def test_a_module_comes_back_when_its_numbers_fit_and_waits_longer_the_next_time() -> None:
    inputs, size = torch.ones(2, 4), [1e5]
    run = Run(line(4, 4, 4), lambda model: model(inputs * size[0]).float().mean() / size[0])
    moves = run.take(2)
    assert [(move.module, move.to) for move in moves] == [("0", "full"), ("1", "full")]
    assert run.precision.low_share == 0
    assert "inputs reach 1e+05" in moves[0].reason

    def looks_until_low() -> int:
        before = len(run.looks)
        while not (moves := run.take(1)):
            assert len(run.looks) - before < 20
        assert {(move.module, move.to) for move in moves} == {("0", "low"), ("1", "low")}
        return len(run.looks) - before

    size[0] = 1.0
    assert looks_until_low() == 3
    assert run.precision.low_share == 1
    size[0] = 1e5
    while run.precision.low_share == 1:
        run.take(1)
    run.take(4)
    size[0] = 1.0
    assert looks_until_low() == 6


def test_an_unexpected_overflow_is_handled_within_a_few_steps() -> None:
    inputs, size = torch.ones(2, 4), [1.0]
    run = Run(line(4, 4, 4), lambda model: model(inputs * size[0]).float().mean() / size[0])
    assert run.take(4) == []
    size[0] = 1e6
    moves = run.take(6)
    assert [move.module for move in moves] == ["0", "1"]
    assert run.precision.skips <= 3


def test_an_evaluation_between_two_steps_is_not_probed() -> None:
    inputs = torch.ones(2, 4)
    run = Run(line(4, 4), lambda model: model(inputs).float().mean())
    with torch.no_grad(), run.precision.forward():
        assert run.model(inputs).dtype is torch.float16
    assert run.precision._adaptive is not None
    assert run.precision._adaptive._probe is None
    run.take(1)


def test_a_loss_spike_is_probed_and_a_damaged_module_moved() -> None:
    """In BF16, whose range holds everything, this is what there is to go by."""
    inputs, factor = torch.ones(2, 4), [1.0]
    run = Run(
        line(4, 4, 4), lambda model: model(inputs).float().square().mean() * factor[0], name="bf16"
    )
    assert run.take(40) == []
    factor[0] = 1e6
    moves = run.take(2)
    assert {move.to for move in moves} == {"full"}
    assert all("after a loss spike" in move.reason for move in moves)


def test_losses_that_wander_are_no_spikes() -> None:
    spikes = SpikeDetector()
    assert not any(spikes.add(5.0 - 0.01 * step + 0.5 * (step % 3)) for step in range(200))
    assert spikes.add(60.0)
    assert not spikes.add(math.nan)
    other = SpikeDetector()
    other.restore(spikes.state())
    assert other.state() == spikes.state()
    assert other.add(60.0)


def test_a_probe_does_not_change_what_the_model_computes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(line(8, 8), nn.ReLU(inplace=True), Masked()).eval()
    inputs = torch.randn(2, 3, 8)
    plain = model(inputs)
    plain.square().mean().backward()
    exact = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    probe = RangeProbe(find_candidates(model))
    with probe.hooks():
        seen = model(inputs)
    seen.square().mean().backward()
    assert torch.equal(seen, plain)
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    torch.testing.assert_close(found, exact, rtol=0, atol=0)
    ranges = probe.read_ranges()
    assert list(ranges) == ["0.0", "2.layer.self_attn", "2.layer.linear1", "2.layer.linear2"]
    for name, spans in ranges.items():
        assert {"weights", "inputs", "outputs", "output gradients", "weight gradients"} <= set(
            spans
        ), name
    assert ranges["2.layer.linear2"]["outputs"].top > 0


class Net(nn.Module):
    """Of a class of its own: torch compiles no module whose class is torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = line(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * 1e5) / 1e5


def test_a_compiled_model_is_probed_and_moved() -> None:
    inputs, model = torch.ones(2, 4), Net()
    compiled = CompileCounter()
    model.compile(backend=compiled, fullgraph=True)
    run = Run(model, lambda model: model(inputs).float().mean())
    assert [move.module for move in run.take(5)] == ["layers.0", "layers.1"]
    assert run.precision.skips == 0
    assert run.looks == [1, 2, 4]
    assert compiled.frame_count == 1  # the steps between the looks, with the modules as moved
