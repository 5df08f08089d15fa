"""One file of tensors in the safetensors format, written in one pass with its checksum.

The library writes to local paths only, and its file would have to be read again for the checksum.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO

    from torch import Tensor

BLOCK_BYTES = 1 << 22

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Type names of the format."""

DTYPES = {code: dtype for dtype, code in CODES.items()}


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names sorted by element size, widest first: aligns every tensor without gaps."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def write_tensors(
    stream: BinaryIO, tensors: Mapping[str, Tensor], between: Callable[[], None]
) -> dict[str, Any]:
    """Write contiguous CPU tensors; returns size and checksum of the file.

    ``between`` is called between blocks and may raise, to abandon the write.
    """
    digest = xxhash.xxh3_128()
    count = 0
    for block in _blocks(tensors):
        between()
        digest.update(block)
        stream.write(block)
        count += len(block)
    return {"bytes": count, "xxh3_128": digest.hexdigest()}


def describe(stream: BinaryIO) -> dict[str, Any]:
    """Size and checksum of a file."""
    digest = xxhash.xxh3_128()
    count = 0
    while block := stream.read(BLOCK_BYTES):
        digest.update(block)
        count += len(block)
    return {"bytes": count, "xxh3_128": digest.hexdigest()}


def describe_bytes(data: bytes) -> dict[str, Any]:
    """Size and checksum of a small file."""
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    names = in_file_order(tensors)
    yield _header(tensors, names)
    for name in names:
        flat = tensors[name].detach().reshape(-1)
        if flat.numel():
            data = memoryview(cast("Any", flat.view(torch.uint8).numpy()))
            for start in range(0, len(data), BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]


def _header(tensors: Mapping[str, Tensor], names: list[str]) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        code = CODES[tensors[name].dtype]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
