"""Computing activations again changes memory and time, and not one bit of the training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from yunlu.core.errors import ModelError
from yunlu.planning.planner import RecomputeMode
from yunlu.training.memory.peak import LiveBytes, peak_bytes
from yunlu.training.memory.recompute import apply_recompute, recompute_savings
from yunlu.training.models.networks import MLP, ConvNet, MatrixFactorization, allow_single_samples
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)

IDS = torch.arange(2 * 12).reshape(2, 12) * 7 % 40
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[0, 5:] = 0
IMAGES = torch.linspace(-1, 1, 3 * 64).reshape(3, 1, 8, 8)
ROWS = torch.linspace(-2, 2, 40).reshape(5, 8)
SIZES: dict[str, Any] = {"vocabulary": 40, "max_length": 16, "width": 16, "heads": 2}

Loss = Callable[[nn.Module], Tensor]
Case = tuple[Callable[[], nn.Module], Loss, list[str]]


class AttentionWithDropout(nn.Module):
    """Draws inside attention and after it: both draws must be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(2, (2, 8)).transpose(1, 2)
        found = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)
        return x + nn.functional.dropout(found.transpose(1, 2).flatten(2), 0.3)


class ShallowInPlace(nn.Module):
    """An activation writes into the result of a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(8, 8), nn.ELU(inplace=True), nn.Linear(8, 8))
                for _ in range(3)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def attention_stack() -> nn.Module:
    return nn.Sequential(nn.Embedding(40, 16), AttentionWithDropout(), AttentionWithDropout())


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # The cache lays keys out differently in memory, so that sums round differently without it.
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, bos_token_id=1, eos_token_id=2, **sizes))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    marks = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=40, use_cache=False, **sizes, **marks))


CASES: dict[str, Case] = {
    "language model": (
        lambda: CausalTransformer(**SIZES, layers=3, dropout=0.2),
        lambda model: model(IDS).float().logsumexp(-1).sum(),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "classifier": (
        lambda: TransformerClassifier(**SIZES, classes=3, layers=2, dropout=0.2),
        lambda model: model(IDS, MASK).float().logsumexp(-1).sum(),
        ["layers.0", "layers.1"],
    ),
    "seq2seq": (
        lambda: Seq2SeqTransformer(**SIZES, layers=2, dropout=0.2),
        lambda model: model(IDS, MASK, IDS).float().logsumexp(-1).sum(),
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1"],
    ),
    "convolutions": (
        lambda: ConvNet(1, 4, channels=[4, 8], dropout=0.2),
        lambda model: model(IMAGES).float().logsumexp(-1).sum(),
        ["features[0:7]", "features[7:13]"],
    ),
    "perceptron": (
        lambda: MLP(inputs=8, outputs=3, hidden=[16] * 3, dropout=0.2, batch_norm=True),
        lambda model: model(ROWS).float().logsumexp(-1).sum(),
        ["layers[0:8]", "layers[8:13]"],
    ),
    "attention with dropout": (
        attention_stack,
        lambda model: model(IDS).float().logsumexp(-1).sum(),
        ["1", "2"],
    ),
    "layers in place": (
        ShallowInPlace,
        lambda model: model(ROWS).float().logsumexp(-1).sum(),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "gpt2": (
        gpt2,
        lambda model: model(input_ids=IDS, labels=IDS).loss,
        ["transformer.h.0", "transformer.h.1", "transformer.h.2"],
    ),
    "t5": (
        t5,
        lambda model: model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss,
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
}


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def run_pass(
    model: nn.Module,
    loss_of: Loss,
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Everything that a pass leaves behind."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    with around():
        loss = loss_of(model)
    loss.backward()
    gradients = {
        f"grad {name}": weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"loss": loss.detach(), "random": torch.get_rng_state(), **gradients, **state}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(
    ("case", "around"),
    [*((case, nullcontext) for case in CASES), ("seq2seq", bf16), ("convolutions", bf16)],
)
def test_losses_gradients_buffers_and_draws_are_the_same_bits(
    case: str, mode: RecomputeMode, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    build, loss_of, blocks = CASES[case]
    model = build().train()
    allow_single_samples(model)
    for share, names in ((1.0, blocks), (0.5, blocks[: (len(blocks) + 1) // 2])):
        plain, changed = copy.deepcopy(model), copy.deepcopy(model)
        assert apply_recompute(changed, mode, share=share) == names
        # Two passes: running averages move on, and a spent pass leaves nothing behind.
        for _ in range(2):
            expected = run_pass(plain, loss_of, around=around)
            assert_same_bits(run_pass(changed, loss_of, around=around), expected)


@pytest.mark.parametrize("case", ["language model", "convolutions", "gpt2"])
def test_what_a_pass_holds_shrinks_with_each_mode(case: str) -> None:
    build, loss_of, _ = CASES[case]
    model = build().train()
    before = set(vars(model))
    found = recompute_savings(model, lambda: loss_of(model).backward())
    assert found["full"] <= found["selective"] < found["none"]
    assert found["full"] < 0.8 * found["none"]
    assert set(vars(model)) == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_part_of_the_blocks_saves_a_part_of_the_memory() -> None:
    build, loss_of, _ = CASES["language model"]
    model = build().train()
    loss_of(model).backward()
    held: list[int] = []
    for share in (0.0, 0.34, 0.67, 1.0):
        apply_recompute(model, "full", share=share)
        held.append(peak_bytes(lambda: loss_of(model).backward()))
    # The last block is computed again at once, while all the others are still kept or dropped.
    assert held[0] > held[1] > held[2] >= held[3]


class CountingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x).tanh()


def runs(model: nn.Sequential) -> list[int]:
    return [block.runs for block in model if isinstance(block, CountingBlock)]


def test_only_training_computes_again() -> None:
    model = nn.Sequential(CountingBlock(), CountingBlock())
    apply_recompute(model, "full")
    model.train()(torch.ones(2, 4)).sum().backward()
    assert runs(model) == [2, 2]
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert runs(model) == [3, 3]
    model.eval()(torch.ones(2, 4)).sum().backward()
    assert runs(model) == [4, 4]
    apply_recompute(model.train(), "none")
    model(torch.ones(2, 4)).sum().backward()
    assert runs(model) == [5, 5]


def test_a_copy_computes_itself_again_and_not_its_original() -> None:
    model = nn.Sequential(CountingBlock(), CountingBlock()).train()
    apply_recompute(model, "full")
    average = AveragedModel(model)
    average.module.train()(torch.ones(2, 4)).sum().backward()
    assert runs(average.module) == [2, 2]
    assert runs(model) == [0, 0]
    assert model[0].inner.weight.grad is None
    assert list(average.module.state_dict()) == list(model.state_dict())


def test_blocks_that_share_weights_agree_under_autocast() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))
    model = nn.Sequential(block, block, block).train()
    expected = run_pass(copy.deepcopy(model), lambda net: net(ROWS).float().sum(), around=bf16)
    assert apply_recompute(model, "full") == ["0"]
    found = run_pass(model, lambda net: net(ROWS).float().sum(), around=bf16)
    assert_same_bits(found, expected)
    apply_recompute(model, "selective")
    found = run_pass(model, lambda net: net(ROWS).float().sum(), around=bf16)
    assert torch.equal(found["loss"], expected["loss"])
    # Each use casts the weight by itself, so that gradients are added in fp32 rather than bf16.
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_compiler_takes_a_model_that_is_computed_again(mode: RecomputeMode) -> None:
    model = ConvNet(1, 4, channels=[4, 8], dropout=0.0).train()
    expected = run_pass(copy.deepcopy(model), lambda net: net(IMAGES).logsumexp(-1).sum())
    apply_recompute(model, mode)
    model.compile(backend="aot_eager")
    found = run_pass(model, lambda net: net(IMAGES).logsumexp(-1).sum())
    for name in set(expected) - {"random"}:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize(
    "model",
    [nn.Linear(3, 3), MatrixFactorization(users=3, items=3, dim=4)],
    ids=["linear", "factors"],
)
def test_a_model_without_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="no repeated blocks") as caught:
        apply_recompute(model, "full")
    assert "train.recompute" in str(caught.value.hint)
    assert apply_recompute(model, "none") == []


def test_live_bytes_are_counted_once_and_only_while_they_live() -> None:
    given = torch.ones(1000)
    with LiveBytes() as live:
        made = given * 2
        views = made.view(10, 100), made.detach(), made.add_(1)
        assert live.now == 4000
        del made, views
        assert live.now == 0
        given.view(10, 100).sum(dim=1)
    assert live.peak == 4000
