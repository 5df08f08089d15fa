import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from yunlu.core.errors import DataError
from yunlu.training.data import images
from yunlu.training.data.images import (
    ImageArrays,
    ImageFiles,
    ImageShape,
    infer_image_shape,
    infer_scale,
    load_images,
    measure,
    read_image,
)
from yunlu.training.data.table import ImageRef


def save(path: Path, image: Image.Image, **options: object) -> ImageRef:
    image.save(path, **options)
    return ImageRef(str(path))


def colours(height: int = 6, width: int = 8) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_the_first_image_decides_size_and_colour(tmp_path: Path) -> None:
    colour = save(tmp_path / "colour.png", colours())
    grey = save(tmp_path / "grey.png", colours(4, 4).convert("L"))

    assert infer_image_shape([colour, grey]) == ImageShape(channels=3, height=6, width=8)
    assert infer_image_shape([grey, colour]) == ImageShape(channels=1, height=4, width=4)
    assert infer_image_shape([grey], edges=(2, 3), channels=3) == ImageShape(
        channels=3, height=2, width=3
    )


def test_a_png_is_read_pixel_by_pixel(tmp_path: Path) -> None:
    image = colours()
    ref = save(tmp_path / "a.png", image)

    read = read_image(ref, infer_image_shape([ref]))

    assert read.dtype == torch.uint8
    np.testing.assert_array_equal(read.numpy(), np.asarray(image).transpose(2, 0, 1))


def test_images_are_brought_to_one_size_and_one_number_of_channels(tmp_path: Path) -> None:
    flat = Image.new("RGB", (20, 10), (200, 100, 50))
    refs = [save(tmp_path / "a.png", flat), save(tmp_path / "b.png", flat.convert("L"))]

    read = load_images(refs, ImageShape(channels=3, height=4, width=4))

    assert isinstance(read, ImageArrays)
    assert read.images.shape == (2, 3, 4, 4)
    assert read[0].flatten(1)[:, 0].tolist() == [200, 100, 50]
    assert len(set(read[1].flatten().tolist())) == 1


def test_a_photograph_held_sideways_is_turned_upright(tmp_path: Path) -> None:
    upright = np.zeros((4, 8), dtype=np.uint8)
    upright[0] = 255  # bright above
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees to the right
    ref = save(tmp_path / "turned.png", Image.fromarray(np.rot90(upright)), exif=exif)

    shape = infer_image_shape([ref])

    assert (shape.height, shape.width) == (4, 8)
    np.testing.assert_array_equal(read_image(ref, shape)[0].numpy(), upright)


def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path: Path) -> None:
    deep = Image.fromarray(np.array([[0, 256, 32_768, 65_535]], dtype=np.uint16))
    ref = save(tmp_path / "deep.png", deep)

    shape = infer_image_shape([ref])

    assert shape.channels == 1
    assert read_image(ref, shape).flatten().tolist() == [0, 1, 128, 255]


def test_transparent_drawings_lie_on_white(tmp_path: Path) -> None:
    drawing = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    drawing.putpixel((1, 0), (10, 20, 30, 255))
    ref = save(tmp_path / "drawing.png", drawing)

    assert read_image(ref, infer_image_shape([ref]))[:, 0].T.tolist() == [
        [255, 255, 255],
        [10, 20, 30],
    ]


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(content)

    with pytest.raises(DataError, match=r"broken\.png cannot be decoded"):
        load_images([ImageRef(str(path))], ImageShape(channels=1, height=2, width=2))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    ref = save(tmp_path / "cut.png", colours(64, 64))
    path = Path(ref.path)
    path.write_bytes(path.read_bytes()[:3000])

    with pytest.raises(DataError, match=r"cut\.png cannot be decoded"):
        read_image(ref, ImageShape(channels=3, height=64, width=64))


def test_any_flipped_byte_gives_an_image_or_a_named_error(tmp_path: Path) -> None:
    """Whatever Pillow raises on broken bytes, a user sees which file it was."""
    ref = save(tmp_path / "flipped.gif", colours(16, 16))
    path = Path(ref.path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read_image(ref, ImageShape(channels=3, height=16, width=16))
        except DataError as error:
            assert "flipped.gif" in error.message  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("edge", [9_500, 60_000])
def test_a_small_file_that_claims_a_huge_picture_is_refused(tmp_path: Path, edge: int) -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + name + data + check

    header = edge.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    path = tmp_path / "bomb.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)

    with pytest.raises(DataError, match=r"bomb\.png claims"):
        infer_image_shape([ImageRef(str(path))])


def test_large_data_is_decoded_when_asked_for_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [save(tmp_path / f"{row}.png", colours(8 + row, 8)) for row in range(3)]
    shape = infer_image_shape(refs)
    kept = load_images(refs, shape)
    monkeypatch.setattr(images, "MEMORY_LIMIT_BYTES", 100)

    lazy = load_images(refs, shape)

    assert isinstance(lazy, ImageFiles)
    assert all(torch.equal(lazy[row], kept[row]) for row in range(3))
    assert measure(lazy, 1 / 255) == measure(kept, 1 / 255)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((5, 8, 6), 1), ((5, 8, 6, 1), 1), ((5, 8, 6, 3), 3), ((5, 3, 8, 6), 3), ((5, 1, 8, 6), 1)],
)
def test_arrays_come_with_channels_first_last_or_not_at_all(
    shape: tuple[int, ...], channels: int
) -> None:
    array = np.random.default_rng(0).random(shape, dtype=np.float32)

    found = infer_image_shape(array)
    read = load_images(array, found)

    assert found == ImageShape(channels=channels, height=8, width=6)
    assert read[4].shape == (channels, 8, 6)
    assert float(read[4].sum()) == pytest.approx(float(array[4].sum()), rel=1e-4)


def test_read_only_arrays_are_copied() -> None:
    array = np.zeros((2, 4, 4), dtype=np.float32)
    array.flags.writeable = False

    read = load_images(array, infer_image_shape(array))
    read[0][:] = 1

    assert array.sum() == 0


def test_arrays_are_resized_and_grey_ones_coloured() -> None:
    array = np.full((2, 8, 8), 7, dtype=np.uint8)

    read = load_images(array, ImageShape(channels=3, height=16, width=16))

    assert read[1].dtype == torch.uint8
    assert read[1].shape == (3, 16, 16)
    assert set(read[1].flatten().tolist()) == {7}


@pytest.mark.parametrize("shape", [(5, 64), (5, 8, 8, 7), (5,)])
def test_an_array_that_holds_no_images_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="array of shape"):
        infer_image_shape(np.zeros(shape, dtype=np.float32))


def test_a_value_that_is_not_finite_is_found() -> None:
    array = np.zeros((3, 4, 4), dtype=np.float32)
    array[2, 1, 1] = np.nan

    with pytest.raises(DataError, match="image 2 holds"):
        load_images(array, infer_image_shape(array))


@pytest.mark.parametrize(
    ("array", "scale"),
    [
        (np.full((1, 2, 2), 255, dtype=np.uint8), 1 / 255),
        (np.full((1, 2, 2), 255.0, dtype=np.float32), 1 / 255),
        (np.full((1, 2, 2), 1.0, dtype=np.float32), 1.0),
        (np.full((1, 2, 2), -3.0, dtype=np.float32), 1.0),
        (np.full((1, 2, 2), 4000, dtype=np.int32), 1.0),
    ],
)
def test_pixels_are_brought_to_one_where_they_count_to_255(array: np.ndarray, scale: float) -> None:
    assert infer_scale(load_images(array, infer_image_shape(array))) == scale


def test_statistics_are_those_of_each_channel() -> None:
    array = np.random.default_rng(0).integers(0, 256, (20, 5, 5, 3), dtype=np.uint8)
    array[..., 2] = 9

    mean, deviation = measure(load_images(array, infer_image_shape(array)), 1 / 255)

    scaled = array / 255
    np.testing.assert_allclose(mean, scaled.mean(axis=(0, 1, 2)))
    np.testing.assert_allclose(deviation[:2], scaled.std(axis=(0, 1, 2))[:2])
    assert deviation[2] == 1.0


def test_several_images_at_once_are_those_one_by_one() -> None:
    read = ImageArrays(torch.arange(24).reshape(6, 1, 2, 2))

    assert all(
        torch.equal(image, read[row])
        for image, row in zip(read.__getitems__([5, 0, 5]), [5, 0, 5], strict=True)
    )
