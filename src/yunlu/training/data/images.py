"""Images as tensors of one shape: from arrays or files, cached in memory if they fit."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from yunlu.core.errors import DataError, missing_part
from yunlu.core.limits import over_limit, read_limits
from yunlu.training.data.table import Column, FileRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

    from yunlu.core.errors import YunluError

# Shapes: N images, C channels (1 grey, 3 colour), H height, W width.

MEMORY_LIMIT_BYTES = 512 * 2**20
"""Decoded images of one split are cached up to this size; larger sets are decoded on demand."""
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Formats that are decoded. Pillow knows forty more: rarely used decoders, and EPS starts Ghostscript."""
_STATISTICS_SAMPLES = 2000
_GREY_MODES = {"1", "L", "LA", "La", "I", "F"}
# Errors of Pillow's decoders on malformed files.
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError)
_BROKEN_BYTES = (struct.error, zlib.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShape:
    """Common shape of all images of a data set."""

    channels: int
    height: int
    width: int


class ImageArrays:
    """Images ``(C, H, W)`` held in one tensor, as bytes or as the floats they came as."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        """One image, as stored."""
        return self.images[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Several images by one gather."""
        return list(self.images[torch.as_tensor(indices)].unbind())


class ImageFiles:
    """Images decoded on demand."""

    def __init__(self, refs: Sequence[FileRef], shape: ImageShape) -> None:
        self._refs, self._shape = refs, shape

    def __len__(self) -> int:
        return len(self._refs)

    def __getitem__(self, index: int) -> Tensor:
        """One image, as bytes."""
        return read_image(self._refs[index], self._shape)


def infer_image_shape(
    column: Column, *, edges: tuple[int, int] | None = None, channels: int | None = None
) -> ImageShape:
    """The shape of the first image, unless ``edges`` (height, width) or ``channels`` are given."""
    if _is_array(column):
        array = _as_nchw(column)
        first_shape = ImageShape(
            channels=array.shape[1], height=array.shape[2], width=array.shape[3]
        )
    else:
        first = _decode(_as_ref(column[0], 0))
        grey = first.mode in _GREY_MODES or first.mode.startswith("I;16")
        first_shape = ImageShape(channels=1 if grey else 3, height=first.height, width=first.width)
    height, width = edges or (first_shape.height, first_shape.width)
    return ImageShape(channels=channels or first_shape.channels, height=height, width=width)


def load_images(column: Column, shape: ImageShape) -> ImageArrays | ImageFiles:
    """Load a column of arrays or image files in this shape; errors name the file."""
    if _is_array(column):
        return ImageArrays(_fit(_as_nchw(column), shape))
    refs = [_as_ref(item, row) for row, item in enumerate(column)]
    if len(refs) * shape.channels * shape.height * shape.width > MEMORY_LIMIT_BYTES:
        return ImageFiles(refs, shape)
    images = torch.empty((len(refs), shape.channels, shape.height, shape.width), dtype=torch.uint8)
    for row, ref in enumerate(refs):
        images[row] = read_image(ref, shape)
    return ImageArrays(images)


def read_image(ref: FileRef, shape: ImageShape) -> Tensor:
    """Decode one file to bytes ``(C, H, W)``, with EXIF rotation, conversion and resizing."""
    from PIL import Image  # noqa: PLC0415 - only image files need it

    try:
        image = _flatten(_decode(ref)).convert("L" if shape.channels == 1 else "RGB")
        if (image.width, image.height) != (shape.width, shape.height):
            image = image.resize((shape.width, shape.height), Image.Resampling.BILINEAR)
        pixels = np.array(image, dtype=np.uint8).reshape(shape.height, shape.width, -1)
    except (*_BROKEN, *_BROKEN_BYTES) as error:
        raise _broken(ref, error) from error
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def infer_scale(images: ImageArrays | ImageFiles) -> float:
    """Scale of pixels to 0..1: 1/255 for bytes (and floats in that range), else 1."""
    if not isinstance(images, ImageArrays) or images.images.dtype == torch.uint8:
        return 1 / 255
    low, high = (float(bound) for bound in images.images.aminmax())
    return 1 / 255 if low >= 0 and 1 < high <= 255 else 1.0


def measure(images: ImageArrays | ImageFiles, scale: float) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, over an even sample of the scaled images."""
    count = len(images)
    rows = np.unique(np.linspace(0, count - 1, min(count, _STATISTICS_SAMPLES)).astype(int))
    pixels = total = squared = 0
    for row in rows.tolist():
        image = images[row].double().flatten(1) * scale
        pixels += image.shape[1]
        total = total + image.sum(dim=1)
        squared = squared + image.square().sum(dim=1)
    mean = torch.as_tensor(total) / pixels
    variance = (torch.as_tensor(squared) / pixels - mean.square()).clamp(min=0)
    # A constant channel is centred, not scaled.
    deviation = torch.where(variance > 1e-10, variance.sqrt(), torch.ones_like(variance))
    return mean.tolist(), deviation.tolist()


def _is_array(column: Column) -> bool:
    if isinstance(column, np.ndarray):
        return column.dtype != object
    return len(column) > 0 and isinstance(column[0], np.ndarray)


def _as_nchw(column: Column) -> np.ndarray:
    """``(N, H, W)``, ``(N, H, W, C)`` or ``(N, C, H, W)`` to the last of these, 1 or 3 channels."""
    if not isinstance(column, np.ndarray):
        shapes = {np.shape(item) for item in column}
        if len(shapes) > 1:
            raise DataError(f"the image arrays differ in shape: {sorted(shapes)[:3]}")
        column = np.stack(column)
    if column.ndim == 3:
        return column[:, None]
    if column.ndim == 4 and column.shape[3] in {1, 3}:
        return column.transpose(0, 3, 1, 2)
    if column.ndim == 4 and column.shape[1] in {1, 3}:
        return column
    raise DataError(
        f"images come as an array of shape {column.shape}",
        hint="expected (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels",
    )


def _fit(array: np.ndarray, shape: ImageShape) -> Tensor:
    pixels = _pixels(array)
    # Arrow's memory is read-only, which torch does not support.
    images = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())
    if images.shape[2:] != (shape.height, shape.width):
        resized = functional.interpolate(
            images.float(), (shape.height, shape.width), mode="bilinear", antialias=True
        )
        as_bytes = images.dtype == torch.uint8
        images = resized.round().clamp(0, 255).to(torch.uint8) if as_bytes else resized
    if images.shape[1] == shape.channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, shape.channels, -1, -1)
    # Luma of ITU-R BT.601, as Pillow converts colour to grey.
    weights = torch.tensor([0.299, 0.587, 0.114])[None, :, None, None]
    return (images.float() * weights).sum(dim=1, keepdim=True).to(images.dtype)


def _pixels(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.bool_:
        return array.astype(np.float32)
    if array.dtype.kind in "iu":
        if array.size and (array.min() < 0 or array.max() > 255):
            return np.ascontiguousarray(array, dtype=np.float32)
        return np.ascontiguousarray(array, dtype=np.uint8)
    if array.dtype.kind != "f":
        raise DataError(f"images come as an array of {array.dtype}; numbers were expected")
    pixels = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(pixels).all():
        row = int(np.argwhere(~np.isfinite(pixels))[0][0])
        raise DataError(f"image {row} holds a value that is not a finite number")
    return pixels


def _as_ref(item: Any, row: int) -> FileRef:
    if isinstance(item, FileRef):
        return item
    if isinstance(item, str):
        return FileRef(item)
    raise DataError(
        f"row {row}: an image file was expected, not {type(item).__name__}",
        hint="name the column of images with data.input",
    )


def _decode(ref: FileRef) -> Image:
    """Decode an image with EXIF rotation; refuses too many pixels before decoding."""
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415 - only image files need it
    except ImportError as error:
        raise missing_part("pillow", "train", "Reading images") from error
    data = ref.read()
    try:
        with warnings.catch_warnings():
            # Our own limit names the file; Pillow also warns of odd metadata.
            warnings.simplefilter("ignore")
            if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own limit: twice this many
                Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, read_limits().pixels)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > read_limits().pixels:
                size = f"{image.width} × {image.height} pixels"
                raise _too_large(ref, size, image.width * image.height)
            image.load()
            return ImageOps.exif_transpose(image)
    except Image.DecompressionBombError as error:
        raise _too_large(ref, "more pixels than Pillow opens") from error
    except (*_BROKEN, *_BROKEN_BYTES) as error:
        raise _broken(ref, error) from error


def _flatten(image: Image) -> Image:
    """Composite transparent images on white, and scale 16-bit grey to 8 bits."""
    from PIL import Image as Pillow  # noqa: PLC0415 - only image files need it

    if image.mode in {"RGBA", "LA", "PA"} or "transparency" in image.info:
        layered = image.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", image.size, "white"), layered)
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        return Pillow.fromarray((values >> 8 if values.max() > 255 else values).astype(np.uint8))
    return image


def _too_large(ref: FileRef, size: str, pixels: int | None = None) -> YunluError:
    most = read_limits().pixels
    return over_limit(f"{ref} claims {size}; at most {most:,} are read", "pixels", pixels)


def _broken(ref: FileRef, error: Exception) -> DataError:
    reason = str(error)
    if isinstance(error, OSError):
        reason = f"not an image, cut short, or none of {', '.join(FORMATS)}"
    return DataError(
        f"{ref} cannot be decoded as an image: {reason}",
        hint="replace the file, or remove it from the data",
    )
