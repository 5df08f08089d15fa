"""Models cut across workers compute what the whole model computes: losses, gradients, scores."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.ranks import run_world
from yunlu.planning.layouts import Layout
from yunlu.training.device import is_accelerator, move_model
from yunlu.training.models.networks import MLP
from yunlu.training.models.transformer import (
    CausalTransformer,
    Seq2SeqTransformer,
    TransformerClassifier,
)
from yunlu.training.parallel.fsdp import find_blocks, set_sync, shard
from yunlu.training.parallel.tensor_parallel import apply_tensor_parallel, sharded_loss
from yunlu.training.tasks.scoring import IGNORED, loss_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.training.parallel.world import World

pytestmark = pytest.mark.distributed

STEPS = 20
SIZES = {"max_length": 12, "width": 16, "layers": 2, "heads": 4}

Given = tuple[Any, Tensor]
"""What the model is called with, and the targets."""


def language(vocabulary: int = 24, **changes: Any) -> nn.Module:
    return CausalTransformer(vocabulary=vocabulary, **{**SIZES, **changes})


def texts(step: int, *, lengths: Sequence[int] = (7, 5), vocabulary: int = 24) -> Given:
    """Padded rows; of the last positions, and of one in the middle, nothing is to be learned."""
    draw = torch.Generator().manual_seed(step)
    shape = len(lengths), max(lengths)
    ids = torch.randint(vocabulary, shape, generator=draw)
    targets = torch.randint(vocabulary, shape, generator=draw)
    for row, length in enumerate(lengths):
        targets[row, length:] = IGNORED
    targets[0, step % lengths[0]] = IGNORED
    return (ids,), targets


def packed(step: int) -> Given:
    (ids,), targets = texts(step, lengths=(11,))
    return (ids[0], torch.tensor([6, 5])), targets[0]


def labelled(step: int) -> Given:
    (ids,), _ = texts(step)
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    return (ids, mask), torch.tensor([step % 3, IGNORED if step % 2 else 1])


def labelled_packed(step: int) -> Given:
    (ids, lengths), _ = packed(step)
    return (ids, lengths), torch.tensor([step % 3, 1])


def pairs(step: int) -> Given:
    (source,), _ = texts(step, lengths=(9, 4))
    (target,), wanted = texts(step + 100)
    return (source, torch.arange(9) < torch.tensor([[9], [4]]), target), wanted


def packed_pairs(step: int) -> Given:
    (source, lengths), _ = packed(step)
    (target,), wanted = texts(step + 100, lengths=(7,))
    return (source, lengths, target[0], torch.tensor([3, 4])), wanted[0]


def rows(step: int) -> Given:
    draw = torch.Generator().manual_seed(step)
    return (torch.randn(5, 6, generator=draw),), torch.tensor([0, 1, 2, IGNORED, 1])


def classifier() -> nn.Module:
    return TransformerClassifier(vocabulary=25, classes=3, dropout=0.0, **SIZES)


Case = tuple["Callable[[], nn.Module]", "Callable[[int], Given]", int]
"""A model, its batches, and the number of steps."""

CASES: dict[str, Case] = {
    "tied": (language, texts, STEPS),
    "untied, learned": (partial(language, tied=False, positions="learned"), texts, 2),
    "odd vocabulary": (partial(language, 23), partial(texts, vocabulary=23), 2),
    "packed": (partial(language, positions="learned"), packed, 2),
    "one token": (language, partial(texts, lengths=(1, 1, 1)), 2),
    "classifier": (classifier, labelled, 2),
    "packed classifier": (classifier, labelled_packed, 2),
    "pairs": (partial(Seq2SeqTransformer, vocabulary=24, **SIZES), pairs, 2),
    "packed pairs": (partial(Seq2SeqTransformer, vocabulary=24, **SIZES), packed_pairs, 2),
    "dropout": (partial(language, dropout=0.3), texts, 2),
}
DRAWING = ("dropout", "mlp")
"""Those that drop at random: on a device, the dropout of whole tensors is a kernel that draws otherwise."""
FEW = ("tied", "odd vocabulary", "one token", "packed")
MLPS: dict[str, Case] = {
    "mlp": (partial(MLP, inputs=6, outputs=3, hidden=[8, 12, 8], dropout=0.2), rows, STEPS),
    "mlp, partly": (partial(MLP, inputs=6, outputs=3, hidden=[5, 12]), rows, 2),
}


def _llama(**changes: Any) -> nn.Module:
    import transformers

    return _hf(transformers.LlamaConfig, **changes)


def _qwen2(**changes: Any) -> nn.Module:
    import transformers

    return _hf(transformers.Qwen2Config, **changes)


def _qwen3(**changes: Any) -> nn.Module:
    import transformers

    return _hf(transformers.Qwen3Config, head_dim=4, **changes)


def _phi3(**changes: Any) -> nn.Module:
    import transformers

    return _hf(transformers.Phi3Config, **changes)


def _mistral(**changes: Any) -> nn.Module:
    import transformers

    return _hf(transformers.MistralConfig, **changes)


def _hf(kind: Any, **changes: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    return transformers.AutoModelForCausalLM.from_config(kind(**{**sizes, **changes}))


def named(step: int) -> Given:
    (ids,), targets = texts(step)
    return {"input_ids": ids, "attention_mask": (targets != IGNORED).long()}, targets


HF: dict[str, Case] = {
    "llama": (_llama, named, 2),
    "llama, tied": (partial(_llama, tie_word_embeddings=True), named, 2),
    "llama, padding": (partial(_llama, pad_token_id=13), named, 2),
    "qwen2": (_qwen2, named, 2),
    "qwen3": (_qwen3, named, 2),
    "mistral": (_mistral, named, 2),
    "phi3": (_phi3, named, 2),
}


def loss_of(model: nn.Module, given: Given, smoothing: float) -> Tensor:
    inputs, targets = given
    outputs: Any = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    logits = getattr(outputs, "logits", outputs)
    return loss_sum(logits, targets, label_smoothing=smoothing)


def leaf_of(weight: Tensor) -> Tensor:
    return weight.to_local().detach() if isinstance(weight, DTensor) else weight.detach()


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().to("cpu", copy=True)


class Trained:
    """The losses of some steps, and the gradients of the first and the last."""

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[int], Given],
        *,
        smoothing: float = 0.0,
        steps: int,
        world: World | None = None,
    ) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        weights = dict(model.named_parameters())
        leaves = {name: leaf_of(weight) for name, weight in weights.items()}
        optimizer = torch.optim.AdamW(leaves.values(), lr=0.01, eps=1e-4)
        for step in range(steps):
            torch.manual_seed(step)
            given = _moved(batches(step), next(iter(weights.values())).device)
            items = (given[1] != IGNORED).sum()
            with sharded_loss(model):
                loss = loss_of(model, _share(given, world), smoothing) / items
            loss.backward()
            self.losses.append(_sum_over_replicas(model, loss.detach(), world))
            if step in (0, steps - 1):
                self.gradients.append({name: whole(w.grad) for name, w in weights.items()})
            for name, weight in weights.items():
                assert weight.grad is not None
                if isinstance(weight, DTensor):
                    assert isinstance(weight.grad, DTensor)
                    assert weight.grad.placements == weight.placements
                leaves[name].grad = leaf_of(weight.grad)
                weight.grad = None
            optimizer.step()

    def assert_equal(self, other: Trained, label: str) -> None:
        found, wanted = torch.tensor(self.losses), torch.tensor(other.losses)
        torch.testing.assert_close(
            found, wanted, rtol=1e-5, atol=1e-6, msg=lambda m: f"{label}: {m}"
        )
        # By the last step, roundings of the steps before have grown.
        for mine, theirs, allowed in zip(
            self.gradients, other.gradients, (1e-6, 1e-4), strict=True
        ):
            assert mine.keys() == theirs.keys()
            for name, gradient in mine.items():
                torch.testing.assert_close(
                    gradient,
                    theirs[name],
                    rtol=10 * allowed,
                    atol=allowed,
                    msg=lambda m, name=name: f"{label}, {name}: {m}",
                )


def _moved(given: Given, device: torch.device) -> Given:
    inputs, targets = given
    if isinstance(inputs, dict):
        return {name: value.to(device) for name, value in inputs.items()}, targets.to(device)
    return tuple(value.to(device) for value in inputs), targets.to(device)


def _share(given: Given, world: World | None) -> Given:
    """This replica's rows of padded texts."""
    if world is None:
        return given
    (ids,), targets = given
    rows = slice(world.replica, None, world.layout.replicas)
    return (ids[rows],), targets[rows]


def _sum_over_replicas(model: nn.Module, loss: Tensor, world: World | None) -> float:
    """The loss of all replicas; and of plain data parallelism, the gradients."""
    group = None if world is None else world.group("dp", "fsdp")
    if group is None or world is None:
        return loss.item()
    dist.all_reduce(loss, group=group)
    for weight in model.parameters() if world.layout.dp > 1 else ():
        assert weight.grad is not None
        dist.all_reduce(leaf_of(weight.grad), group=group)
    return loss.item()


def _assert_equal_everywhere(model: nn.Module) -> None:
    """What is not cut must not drift apart."""
    for name, weight in model.named_parameters():
        is_cut = isinstance(weight, DTensor) and not weight.placements[0].is_replicate()
        if not is_cut:
            mine = leaf_of(weight).clone()
            dist.broadcast(mine, 0)
            assert torch.equal(mine, leaf_of(weight)), name


def _compare(
    world: World, cases: dict[str, Case], options: dict[str, bool], smoothing: float
) -> None:
    mesh = world.axis("tp")
    assert mesh is not None
    for label, (build, batches, steps) in cases.items():
        if label in DRAWING and is_accelerator(world.device):
            continue
        torch.manual_seed(1)
        alone = build()
        cut = move_model(copy.deepcopy(alone), world.device)
        apply_tensor_parallel(cut, mesh, **options)
        if not isinstance(batches(0)[0], dict):
            with torch.no_grad():
                alone.eval(), cut.eval()
                scores = cut(*_moved(batches(3), world.device)[0])
                assert type(scores) is Tensor, label
                torch.testing.assert_close(scores.cpu(), alone(*batches(3)[0]))
                alone.train(), cut.train()
        before = Trained(alone, batches, steps=steps, smoothing=smoothing)
        after = Trained(cut, batches, steps=steps, smoothing=smoothing)
        after.assert_equal(before, f"{label} {options}")
        _assert_equal_everywhere(cut)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"sequence": True}, marks=pytest.mark.long),
        {"sequence": True, "vocabulary": True},
    ],
    ids=["plain", "sequence", "sequence and vocabulary"],
)
def test_our_transformers_train_as_if_they_were_whole(options: dict[str, bool]) -> None:
    run_world(_compare, Layout(tp=2), CASES, options, 0.0)


@pytest.mark.parametrize("options", [{"sequence": True, "vocabulary": True}], ids=str)
def test_four_workers_train_as_one(options: dict[str, bool]) -> None:
    cases = {label: CASES[label] for label in FEW}
    run_world(_compare, Layout(tp=4), cases, options, 0.0)


def test_smoothed_labels_are_right_on_a_cut_vocabulary() -> None:
    run_world(_compare, Layout(tp=2), {"tied": (language, texts, 3)}, {"vocabulary": True}, 0.1)


def test_perceptrons_train_as_if_they_were_whole() -> None:
    run_world(_compare, Layout(tp=2), MLPS, {}, 0.0)


def test_transformers_from_hugging_face_train_as_if_they_were_whole() -> None:
    run_world(_compare_hf, Layout(tp=2))


def _compare_hf(world: World) -> None:
    _compare(world, HF, {}, 0.0)
    tied = {"llama, tied": HF["llama, tied"]}
    _compare(world, tied, {"vocabulary": True}, 0.0)


def _compare_replicas(world: World, options: dict[str, bool]) -> None:
    mesh, batches = world.axis("tp"), partial(texts, lengths=(7, 5, 3, 6))
    assert mesh is not None
    torch.manual_seed(1)
    alone = language(positions="learned")
    cut = move_model(copy.deepcopy(alone), world.device)
    apply_tensor_parallel(cut, mesh, **options)
    fsdp = world.axis("fsdp")
    if fsdp is not None:
        shard(cut, fsdp, blocks=find_blocks(cut))
        set_sync(cut, last=True)
    before = Trained(alone, batches, steps=STEPS)
    Trained(cut, batches, steps=STEPS, world=world).assert_equal(before, str(world.layout))


@pytest.mark.parametrize("axis", ["dp", "fsdp"])
@pytest.mark.parametrize("options", [{"sequence": True, "vocabulary": True}], ids=str)
def test_replicas_of_a_cut_model_train_as_one(axis: str, options: dict[str, bool]) -> None:
    """The gradients of plain local tensors are summed; FSDP2 cuts what is cut once more."""
    run_world(_compare_replicas, Layout(tp=2, **{axis: 2}), options)


def _write(world: World) -> list[int]:
    """A cut model also answers when it is not called itself, as when it writes."""
    mesh = world.axis("tp")
    assert mesh is not None
    torch.manual_seed(1)
    model = Seq2SeqTransformer(vocabulary=24, **SIZES).to(world.device)
    (source, mask, _), _ = _moved(pairs(1), world.device)
    written = model.generate(source, mask, bos=1, eos=2, max_length=4)
    apply_tensor_parallel(model, mesh, sequence=True, vocabulary=True)
    assert torch.equal(model.generate(source, mask, bos=1, eos=2, max_length=4), written)
    return written.flatten().tolist()


def test_a_cut_model_writes_what_the_whole_one_does() -> None:
    first, second = run_world(_write, Layout(tp=2))
    assert first == second


def _fail_inside(model: nn.Module, inputs: Any) -> None:
    with sharded_loss(model):
        assert isinstance(model(*inputs), DTensor)
        raise ZeroDivisionError


def _freeze_and_fail(world: World) -> None:
    mesh = world.axis("tp")
    assert mesh is not None
    model = language().to(world.device)
    for name, weight in model.named_parameters():
        weight.requires_grad_("feed" in name)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    apply_tensor_parallel(model, mesh, sequence=True, vocabulary=True)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == trained
    inputs, _ = _moved(texts(0), world.device)
    with pytest.raises(ZeroDivisionError):
        _fail_inside(model, inputs)
    assert type(model(*inputs)) is Tensor


def test_frozen_weights_stay_frozen_and_a_failed_loss_leaves_nothing_behind() -> None:
    run_world(_freeze_and_fail, Layout(tp=2))
