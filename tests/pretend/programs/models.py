"""The device's kernels: those that exist for the CPU only, or for devices only; equal to the CPU's to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tests.pretend.programs.checks import run_checks

DEVICES = ("cpu", "npu")


def is_equal(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> bool:
    """Compare the result and all gradients with the CPU's, bit by bit."""
    found = []
    for device in DEVICES:
        leaves = [
            x.detach().clone().to(device).requires_grad_(x.is_floating_point()) for x in inputs
        ]
        result = function(*leaves)
        slope = torch.arange(result.numel(), dtype=result.dtype).sin().view(result.shape)
        result.backward(slope.to(device))
        found.append([result, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    return all(torch.equal(here, there.cpu()) for here, there in zip(*found, strict=True))


def check_kernels_are_the_cpus_own() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 33, 64), torch.randn(64)
    image, query = torch.randn(2, 8, 9, 9), torch.randn(4, 4, 33, 16)
    logits = torch.randn(12, 3, 8).log_softmax(-1)
    words = torch.randint(50, (4, 3))
    equal = {
        "rms norm": is_equal(lambda x, w: functional.rms_norm(x, (64,), w), x, w),
        "layer norm": is_equal(lambda x, w: functional.layer_norm(x, (64,), w), x, w),
        "group norm": is_equal(lambda x, w: functional.group_norm(x.transpose(1, 2), 8, w), x, w),
        "batch norm": is_equal(
            lambda x, w: functional.batch_norm(x, None, None, w, None, True), image, w[:8]
        ),
        "linear": is_equal(functional.linear, x, torch.randn(128, 64), torch.randn(128)),
        "convolution": is_equal(
            lambda x, w, b: functional.conv2d(x, w, b, padding=1),
            *(image, torch.randn(4, 8, 3, 3), torch.randn(4)),
        ),
        "transposed convolution": is_equal(
            lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2),
            *(image, torch.randn(8, 4, 3, 3), torch.randn(4)),
        ),
        "pooling": is_equal(lambda x: functional.max_pool2d(x, 2), image),
        "interpolation": is_equal(
            lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), image
        ),
        "silu": is_equal(functional.silu, x),
        "attention": is_equal(
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            *(query, query + 1, query - 1),
        ),
        "embedding": is_equal(lambda w, i: functional.embedding(i, w), torch.randn(50, 6), words),
        "embedding bag": is_equal(
            lambda w, i: functional.embedding_bag(i, w, mode="mean"), torch.randn(50, 6), words
        ),
        "cross entropy": is_equal(
            lambda x: functional.cross_entropy(x, torch.arange(12, device=x.device) % 8),
            logits[:, 0],
        ),
        "ctc": is_equal(
            lambda p, t: functional.ctc_loss(p, t, torch.full((3,), 12), torch.full((3,), 4)),
            *(logits, torch.randint(1, 8, (3, 4))),
        ),
        "ctc, lengths on the device": is_equal(
            lambda p, t, n: functional.ctc_loss(p, t, n * 3, n),
            *(logits, torch.randint(1, 8, (3, 4)), torch.full((3,), 4)),
        ),
    }
    assert all(equal.values()), [name for name, is_same in equal.items() if not is_same]


def check_the_kernel_of_attention_is_the_cpus() -> None:
    query = torch.randn(2, 2, 8, 4, requires_grad=True)
    there = query.detach().to("npu").requires_grad_()
    names = [
        type(functional.scaled_dot_product_attention(q, q, q).grad_fn).__name__
        for q in (query, there)
    ]
    assert names[0] == names[1]
    assert "Flash" in names[0]


def check_recurrent_cells() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(1)
        net, x, found = kind(6, 5, 2, bidirectional=True), torch.randn(7, 3, 6), []
        for device in DEVICES:
            model = copy.deepcopy(net).to(device)
            result, _ = model(x.to(device))
            result.sin().sum().backward()
            found.append([result, *(p.grad for p in model.parameters())])
        for here, there in zip(*found, strict=True):
            torch.testing.assert_close(here, there.cpu(), rtol=1e-5, atol=5e-6)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 6).to("npu"), [5, 3])
    nn.utils.rnn.pad_packed_sequence(nn.GRU(6, 4).to("npu")(packed)[0])


def train(kind: torch.dtype | None, **options: bool) -> list[list[float]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    net = nn.Sequential(nn.Embedding(50, 32), layer, nn.LayerNorm(32), nn.Linear(32, 50))
    words, losses = torch.randint(50, (4, 17)), []
    for device in DEVICES:
        model, x = copy.deepcopy(net).to(device), words.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        scaler = torch.amp.GradScaler(device, enabled=kind is torch.float16, init_scale=1024.0)
        losses.append([])
        for _ in range(3):
            with torch.autocast(device, dtype=kind or torch.bfloat16, enabled=kind is not None):
                loss = functional.cross_entropy(model(x[:, :-1]).mT.float(), x[:, 1:])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return losses


def check_training_equals_the_cpus() -> None:
    for options in ({"foreach": True}, {"fused": True}):
        cpu, npu = train(None, **options)
        assert cpu == npu


def check_autocast_and_scaler() -> None:
    for kind in (torch.bfloat16, torch.float16):
        cpu, npu = train(kind, foreach=True)
        torch.testing.assert_close(cpu, npu, rtol=2e-3, atol=2e-3)
    a = torch.ones(3, 3, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
        assert (a @ a).exp().dtype is torch.float32
        assert (a @ a).sum().dtype is torch.float32
        assert torch.stack([a, (a @ a)]).dtype is torch.float32
    scaler = torch.amp.GradScaler("npu", init_scale=1024.0)
    weight = torch.ones(2, device="npu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert weight.tolist() == [1, 1]  # the step was left out


def check_shared_weights_stay_shared() -> None:
    from yunlu.training.device import move_model

    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    torn = build().to("npu")
    assert torn[1].weight is not torn[0].weight  # as torch moves models
    model = move_model(build(), torch.device("npu"))
    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 2
    model(torch.ones(2, 4, device="npu")).sum().backward()
    assert model[0].weight.grad is model[1].weight.grad


def check_recomputation_draws_the_same() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(64, device="npu", requires_grad=True)
    kept = checkpoint(lambda x: functional.dropout(x * x, 0.5), x, use_reentrant=False)
    kept.sum().backward()
    assert torch.equal(kept.detach() * 2, x.grad)


if __name__ == "__main__":
    run_checks(dict(globals()))
