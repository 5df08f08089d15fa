"""Small built-in networks: convolutional, recurrent, multilayer perceptron, matrix factorisation."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from yunlu.core.errors import ModelError

SINGLE_SAMPLE = "_yunlu_alone"


def allow_single_samples(model: nn.Module) -> None:
    """Allow batch normalisation to train on one value per channel, which has no variance.

    It then uses its running statistics; torch would raise an error.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            module.register_forward_pre_hook(_use_running_statistics)
            module.register_forward_hook(_restore_training, always_call=True)


def _use_running_statistics(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    values = inputs[0]
    if module.training and values.ndim > 1 and values.numel() == values.shape[1]:
        module.training = False
        setattr(module, SINGLE_SAMPLE, True)


def _restore_training(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    if module.__dict__.pop(SINGLE_SAMPLE, False):
        module.training = True


# Shapes: B batch, C channels, H height, W width, K scores.


class ConvNet(nn.Module):
    """Stages of two 3×3 convolutions, halving the edges between them, then an average and a linear layer.

    Averaging over whatever edges are left lets one model take any size from 1×1 up.

    Args:
        in_channels: Channels of the input: 1 for grey images and spectrograms, 3 for colour.
        classes: How many scores to give.
        channels: Channels of each stage.
        dropout: Share of averaged features dropped before the last layer.
        stride: Step of the first convolution; 2 or more makes large inputs cheap.
    """

    def __init__(
        self,
        in_channels: int,
        classes: int,
        *,
        channels: list[int] = [32, 64],  # noqa: B006 - never changed; JSON knows lists, not tuples
        dropout: float = 0.1,
        stride: int = 1,
    ) -> None:
        super().__init__()
        if not channels or min(channels) < 1:
            raise ModelError(f"cnn: channels must be positive numbers, not {channels}.")
        if stride < 1:
            raise ModelError(f"cnn: stride must be 1 or more, not {stride}.")
        layers: list[nn.Module] = []
        before = in_channels
        for stage, width in enumerate(channels):
            if stage:
                # ceil_mode: an edge of one pixel stays, so deep stacks do not run out of image.
                layers.append(nn.MaxPool2d(2, ceil_mode=True))
            layers += _convolve(before, width, stride=stride if stage == 0 else 1)
            layers += _convolve(width, width)
            before = width
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, K)`` of images ``(B, C, H, W)``."""
        maps = self.features(images)
        # A plain mean: its gradient is deterministic on every device, adaptive pooling's is not.
        averages = maps.mean(dim=(2, 3))
        return self.classify(self.dropout(averages))


def _convolve(before: int, after: int, *, stride: int = 1) -> list[nn.Module]:
    # No bias: the normalisation that follows has its own.
    return [
        nn.Conv2d(before, after, kernel_size=3, padding=1, stride=stride, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    ]


# Shapes: B batch, T frames, F features per frame, H hidden, K symbols.


class ConvGRU(nn.Module):
    """Two strided convolutions (a quarter of the frames remain), a bidirectional GRU, a linear layer.

    What a sample gets never depends on how far its batch is padded: padding is zeroed between
    layers, the GRU runs on packed sequences, and normalisation is per frame. So the objective is
    the same however a global batch is split.

    Args:
        features: Features per frame of the input.
        symbols: How many scores per frame to give, the blank among them.
        hidden: Width of the convolutions, and of the GRU in each direction.
        layers: GRU layers.
        dropout: Share of features dropped before the GRU, between its layers and after it.
    """

    def __init__(
        self,
        features: int,
        symbols: int,
        *,
        hidden: int = 96,
        layers: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, hidden, kernel_size=5, stride=2, padding=2)
            for width in (features, hidden)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in self.convolutions)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(
            hidden,
            hidden,
            num_layers=layers,
            batch_first=True,
            bidirectional=True,
            dropout=dropout if layers > 1 else 0.0,
        )
        self.score = nn.Linear(2 * hidden, symbols)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``(B, T / 4, K)`` of padded frames ``(B, T, F)``, of which ``lengths`` are real."""
        # Pinned where the batch was: its copy is not waited for.
        lengths, real = lengths.cpu(), lengths.to(frames.device, non_blocking=True)
        hidden = _silence(frames, real)
        for convolve, norm in zip(self.convolutions, self.norms, strict=True):
            lengths, real = _halve(lengths), _halve(real)
            hidden = convolve(hidden.transpose(1, 2)).transpose(1, 2)
            hidden = _silence(torch.relu(norm(hidden)), real)
        # Sorted here: torch would sort on the host, and wait until the device has the order.
        order = real.argsort(descending=True, stable=True)
        packed = pack_padded_sequence(
            self.dropout(hidden)[order], lengths.sort(descending=True).values, batch_first=True
        )
        sorted_hidden, _ = pad_packed_sequence(
            self.gru(packed)[0], batch_first=True, total_length=hidden.shape[1]
        )
        return self.score(self.dropout(sorted_hidden[order.argsort()]))

    @staticmethod
    def output_lengths(lengths: Tensor) -> Tensor:
        """Number of output frames for inputs of these lengths."""
        return _halve(_halve(lengths))


def _halve(lengths: Tensor) -> Tensor:
    return (lengths + 1) // 2


def _silence(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Zero the padding."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    return hidden * (positions < lengths[:, None])[:, :, None]


class MatrixFactorization(nn.Module):
    """Biases and the product of two embeddings, plus an MLP over both if ``hidden`` is set.

    Row 0 of each table is for users or items not seen in training. It stays zero, so that an
    unknown user gets only the item's bias, and vice versa.
    """

    def __init__(
        self,
        *,
        users: int,
        items: int,
        dim: int = 16,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        init_std: float = 0.1,
    ) -> None:
        super().__init__()
        self.user_factors = _table(users, dim, init_std)
        self.item_factors = _table(items, dim, init_std)
        self.user_bias = _table(users, 1, 0.0)
        self.item_bias = _table(items, 1, 0.0)
        self.dropout = nn.Dropout(dropout)
        layers: list[nn.Module] = []
        width = 2 * dim
        for size in hidden or []:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.interaction = nn.Sequential(*layers, nn.Linear(width, 1)) if layers else None

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of pairs of user and item indices ``(samples,)``."""
        user, item = self.dropout(self.user_factors(users)), self.dropout(self.item_factors(items))
        score = (user * item).sum(dim=-1)
        if self.interaction is not None:
            score = score + self.interaction(torch.cat([user, item], dim=-1)).squeeze(-1)
        return score + self.user_bias(users).squeeze(-1) + self.item_bias(items).squeeze(-1)


def _table(rows: int, dim: int, std: float) -> nn.Embedding:
    table = nn.Embedding(rows, dim, padding_idx=0)
    with torch.no_grad():
        table.weight.normal_(0.0, std)
        table.weight[0].zero_()
    return table


ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """Linear layers with an activation between them.

    The last ``len(categories)`` columns of the features are category indices, which are embedded;
    each entry of ``categories`` is the number of indices of that column.
    """

    def __init__(
        self,
        *,
        inputs: int,
        outputs: int,
        categories: list[int] | None = None,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        activation: Literal["relu", "gelu", "silu", "tanh"] = "relu",
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = categories or []
        widths = [min(32, round(2 * size**0.5)) for size in sizes]
        self.embeddings = nn.ModuleList(
            nn.Embedding(size, width) for size, width in zip(sizes, widths, strict=True)
        )
        width = inputs - len(sizes) + sum(widths)
        layers: list[nn.Module] = []
        for size in [128, 64] if hidden is None else hidden:
            layers.append(nn.Linear(width, size))
            if batch_norm:
                layers.append(nn.BatchNorm1d(size))
            layers += [ACTIVATIONS[activation](), nn.Dropout(dropout)]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, features: Tensor) -> Tensor:
        """``(samples, inputs)`` to ``(samples, outputs)``; more axes are flattened first."""
        features = features.flatten(1)
        if self.embeddings:
            numbers = features[:, -len(self.embeddings) :].long()
            embedded = [table(numbers[:, index]) for index, table in enumerate(self.embeddings)]
            features = torch.cat([features[:, : -len(self.embeddings)], *embedded], dim=1)
        return self.layers(features)
