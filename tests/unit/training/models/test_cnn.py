import pytest
import torch

from yunlu.core.errors import ModelError
from yunlu.training.models.networks import ConvNet


@pytest.mark.parametrize("edges", [(1, 1), (8, 8), (7, 5), (40, 130)])
def test_any_size_of_image_gets_one_score_per_class(edges: tuple[int, int]) -> None:
    model = ConvNet(3, 10, channels=[8, 16, 16]).eval()

    assert model(torch.randn(2, 3, *edges)).shape == (2, 10)


def test_a_stride_makes_large_images_cheaper_without_changing_the_weights() -> None:
    seen: list[int] = []

    def count(_module: torch.nn.Module, _inputs: object, outputs: torch.Tensor) -> None:
        seen.append(outputs[0, 0].numel())

    shapes: list[list[torch.Size]] = []
    for stride in (1, 2):
        model = ConvNet(1, 2, channels=[4], stride=stride).eval()
        model.features[0].register_forward_hook(count)
        model(torch.randn(1, 1, 32, 32))
        shapes.append([weight.shape for weight in model.parameters()])

    assert seen == [32 * 32, 16 * 16]
    assert shapes[0] == shapes[1]


def test_it_sees_where_things_are_relative_to_each_other() -> None:
    """Averaging at the end must not make it blind to order: mirrored images score differently."""
    torch.manual_seed(0)
    model = ConvNet(1, 4, channels=[8, 16]).eval()
    image = torch.zeros(1, 1, 8, 8)
    image[..., 2:6, 2] = 1.0
    image[..., 5, 2:6] = 1.0

    assert not torch.allclose(model(image), model(image.flip(3)), atol=1e-5)


@pytest.mark.parametrize("arguments", [{"channels": []}, {"channels": [0]}, {"stride": 0}])
def test_sizes_that_make_no_sense_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="cnn"):
        ConvNet(1, 2, **arguments)  # pyright: ignore[reportArgumentType]
