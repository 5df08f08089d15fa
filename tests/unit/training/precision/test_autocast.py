"""The step in each precision: what is refused, what stays FP32, and what a scaled step does."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training_device import DEVICE
from yunlu.core.errors import JobError
from yunlu.training.precision import Precision, check_precision
from yunlu.training.precision.adaptive import LARGEST, SMALLEST, LossScale
from yunlu.training.precision.autocast import tf32_products
from yunlu.training.tasks.scoring import loss_sum

LOW = [("bf16", torch.bfloat16), ("fp16", torch.float16)]


class Recorder(TorchDispatchMode):
    """The type of the first input of every operator that really ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.seen.setdefault(func.overloadpacket.__name__, set()).add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=made), torch.randint(0, 3, (4,), generator=made))
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_processor_has_these_precisions(name: str) -> None:
    check_precision(name, DEVICE)


@pytest.mark.parametrize("name", ["tf32", "fp8"])
def test_a_precision_the_device_lacks_is_refused_with_what_it_needs(name: str) -> None:
    with pytest.raises(JobError, match=rf"{name} needs .* GPU.*this device is a cpu") as error:
        Precision(name, torch.device("cpu"))
    assert "auto" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("capability", "able"),
    [((7, 5), set[str]()), ((8, 0), {"tf32"}), ((8, 9), {"tf32", "fp8"})],
)
def test_graphics_cards_are_judged_by_their_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some card")
    for name in ("tf32", "fp8"):
        if name in able:
            check_precision(name, torch.device("cuda"))
        else:
            with pytest.raises(JobError, match="some card"):
                check_precision(name, torch.device("cuda"))


def test_tf32_is_allowed_inside_only() -> None:
    before = torch.get_float32_matmul_precision()
    with tf32_products():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ZeroDivisionError), tf32_products():
        _ = 1 / 0
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(("name", "dtype"), LOW)
def test_norms_softmax_and_losses_compute_in_fp32(name: str, dtype: torch.dtype) -> None:
    """Their inputs are products in low precision, as in a model."""
    product = nn.Linear(8, 8)
    inputs, targets = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    works = {
        "native_layer_norm": nn.LayerNorm(8),
        "native_group_norm": nn.GroupNorm(2, 8),
        "rsqrt": nn.RMSNorm(8),  # made of parts on the CPU
        "_softmax": nn.Softmax(dim=-1),
        "_log_softmax": lambda x: functional.nll_loss(x.log_softmax(-1), targets),
        "logsumexp": lambda x: x.logsumexp(-1),
        "exp": torch.exp,
        "pow": lambda x: x**2,
        "nll_loss_forward": lambda x: functional.cross_entropy(x, targets),
        "mse_loss": lambda x: functional.mse_loss(x, inputs),
    }
    for operator, work in works.items():
        with Recorder() as recorder, Precision(name, DEVICE).forward():
            low = product(inputs)
            result = work(low)
        assert low.dtype is dtype
        assert recorder.seen["addmm"] == {dtype}
        assert recorder.seen[operator] == {torch.float32}, operator
        assert result.dtype is torch.float32, operator


@pytest.mark.parametrize(("name", "dtype"), LOW)
def test_batch_norm_rounds_its_result_but_sums_in_fp32(name: str, dtype: torch.dtype) -> None:
    norm = nn.BatchNorm1d(4)
    inputs = (1000 + torch.randn(256, 4)).to(dtype)
    with Precision(name, DEVICE).forward():
        found = norm(inputs)
    assert norm.running_mean is not None
    assert norm.running_mean.dtype is torch.float32
    exact = nn.BatchNorm1d(4)(inputs.float())
    torch.testing.assert_close(found.float(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize(("name", "dtype"), LOW)
def test_the_tasks_loss_is_fp32_on_low_scores(name: str, dtype: torch.dtype) -> None:
    scores, targets = (torch.randn(4, 8) * 30).to(dtype), torch.tensor([0, 1, 2, 3])
    with Precision(name, DEVICE).forward():
        found = loss_sum(scores, targets)
    assert found.dtype is torch.float32
    exact = functional.cross_entropy(scores.double(), targets, reduction="sum")
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_an_lstm_trains_where_the_processor_has_no_low_one(name: str) -> None:
    model = nn.LSTM(4, 4)
    with Precision(name, DEVICE).forward():
        outputs, _ = model(torch.randn(3, 2, 4))
    outputs.float().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_master_weights_and_gradients_are_fp32(name: str) -> None:
    model, precision = small_model(), Precision(name, DEVICE)
    inputs, targets = batches(1)[0]
    with precision.forward():
        loss = loss_sum(model(inputs), targets)
    precision.backward(loss)
    for weight in model.parameters():
        assert weight.dtype is torch.float32
        assert weight.grad is not None
        assert weight.grad.dtype is torch.float32


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    micros: list[tuple[Tensor, Tensor]],
) -> tuple[bool, float]:
    """A step with accumulation and clipping, as the engine takes it; applied, and the norm."""
    items = sum(len(targets) for _, targets in micros)
    for inputs, targets in micros:
        with precision.forward():
            loss = loss_sum(model(inputs), targets)
        precision.backward(loss / items)
    precision.unscale(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    precision.note_norm(float(norm))
    applied = precision.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return applied, float(norm)


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 2e-2), ("fp16", 3e-3)])
def test_a_step_with_accumulation_and_clipping_is_that_of_fp32(name: str, tolerance: float) -> None:
    results: dict[str, tuple[Tensor, float]] = {}
    for each in ("fp32", name):
        model = small_model()
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        applied, norm = take_step(model, optimizer, Precision(each, DEVICE), batches(3))
        assert applied
        assert norm > 0.1  # clipped: the bound must meet the true size, not the scaled one
        results[each] = nn.utils.parameters_to_vector(model.parameters()).detach() - start, norm
    (exact, exact_norm), (found, found_norm) = results["fp32"], results[name]
    assert found_norm == pytest.approx(exact_norm, rel=tolerance)
    assert float((found - exact).norm() / exact.norm()) < tolerance
    assert float(found.norm()) == pytest.approx(0.1, rel=tolerance)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_one_micro_batch_leaves_everything_as_it_was(fused: bool) -> None:
    model, precision = small_model(), Precision("fp16", DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    average = AveragedModel(model)
    good = batches(3)
    assert take_step(model, optimizer, precision, good)[0]
    average.update_parameters(model)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), average.state_dict()))
    scale = precision.scale
    assert scale is not None

    bad = [good[0], (torch.full((4, 6), 1e6), good[1][1]), good[2]]  # beyond FP16's range
    if take_step(model, optimizer, precision, bad)[0]:
        average.update_parameters(model)
    now = (model.state_dict(), optimizer.state_dict(), average.state_dict())
    for before, after in zip(kept, now, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert precision.skips == 1
    assert precision.scale == scale / 2

    assert take_step(model, optimizer, precision, good)[0]
    assert precision.skips == 1


def test_a_step_that_is_left_out_lets_the_next_one_go_on() -> None:
    model, precision = small_model(), Precision("fp16", DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(1):
        with precision.forward():
            loss = loss_sum(model(inputs), targets)
        precision.backward(loss)
    precision.unscale(optimizer)
    scale = precision.scale
    precision.skip()
    optimizer.zero_grad(set_to_none=True)
    assert precision.scale == scale
    assert take_step(model, optimizer, precision, batches(2))[0]


def scaled_steps(scale: LossScale, gradients: list[float]) -> list[bool]:
    weight = nn.Parameter(torch.zeros(()))
    optimizer, applied = torch.optim.SGD([weight], lr=0.0), list[bool]()
    for gradient in gradients:
        scale.scale(weight * gradient).backward()
        applied.append(scale.step(optimizer))
        optimizer.zero_grad()
    return applied


def test_the_scale_grows_halves_and_stays_in_bounds() -> None:
    scale = LossScale(DEVICE)
    start = scale.value
    scale.restore(scale.state() | {"_growth_tracker": 1995})
    scaled_steps(scale, [1.0] * 5)
    assert scale.value == 2 * start
    assert scaled_steps(scale, [float("inf"), 1.0]) == [False, True]
    assert scale.value == start
    # Without a bound it would be zero after 170 halvings, and never come back.
    assert not any(scaled_steps(scale, [float("nan")] * 200))
    assert scale.value == SMALLEST
    assert scale.skips == 201
    assert scaled_steps(scale, [1.0]) == [True]
    scale.set(1e30)
    assert scale.value == LARGEST


def test_the_scale_continues_exactly_from_json() -> None:
    one = LossScale(DEVICE)
    scaled_steps(one, [1.0, float("inf")])
    one.restore(one.state() | {"_growth_tracker": 1990})
    other = LossScale(DEVICE)
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    for scale in (one, other):
        scaled_steps(scale, [1.0] * 10)
    assert other.state() == one.state()
    assert one.value == 65536.0  # halved once, and grown after 2000 good steps in a row


def test_full_precision_has_no_scale_and_nothing_to_keep() -> None:
    precision = Precision("fp32", DEVICE, adapt=True)
    precision.attach(small_model())
    assert (precision.scale, precision.skips, precision.low_share) == (None, 0, None)
    assert precision.state() == {}
    assert not precision.skips_overflow
    assert precision.observe(step=1, loss=float("nan")) == []
