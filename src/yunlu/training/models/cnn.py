"""A convolutional classifier for small images and spectrograms."""

from __future__ import annotations

from torch import Tensor, nn

from yunlu.core.errors import ModelError

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
