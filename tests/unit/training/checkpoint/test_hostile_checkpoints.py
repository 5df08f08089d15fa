"""Manifests and weights that somebody sent are read, or refused in our words."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.hostile import hostile_bytes
from yunlu.core.errors import CheckpointError, ModelError
from yunlu.training.checkpoint.files import VERSION, pack_manifest, parse_manifest
from yunlu.training.models.initial_weights import _read_weights

if TYPE_CHECKING:
    from pathlib import Path

SHARD = ["rank-00000.safetensors", [0], [4]]
BODY: dict[str, Any] = {
    "version": VERSION,
    "step": 3,
    "metrics": {},
    "groups": ["model"],
    "files": {"state.json": {"bytes": 2}, "rank-00000.safetensors": {"bytes": 16}},
    "tensors": {"model/w": {"shape": [4], "dtype": "F32", "shards": [SHARD]}},
}
VALUES = st.sampled_from(
    (
        *(None, True, -1, 1 << 62, 1 << 70, 10**400, 0.5, float("nan"), "", "../x", "\ud800"),
        *([], {}, [[]], [-1], [1 << 61] * 40, {"a": []}, {"bytes": 10**400}, [SHARD] * 3, "BOOL"),
    )
)


@given(hostile_bytes(b'{"version": 2, "checksum": ', b'"tensors": {', b'"files": {'))
@example(b"[" * 100_000)
@example(b'{"version": 2, "checksum": "\\ud800"}')
@example(b'{"version": NaN, "checksum": ""}')
def test_bytes_are_a_manifest_or_torn(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_manifest(data, "step-3")


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    deeper = [(key, item) for key, item in inner]
    found = [(*path, key) for key, _ in deeper]
    for key, item in deeper:
        if isinstance(item, dict | list):
            found += _paths(item, (*path, key))
    return found


@given(st.sampled_from(_paths(BODY)), VALUES)
@example(("tensors", "model/w", "shape"), [1 << 61] * 40)
@example(("files", "state.json", "bytes"), 10**400)
def test_a_manifest_with_a_right_checksum_and_a_wrong_value_is_refused(
    path: tuple[Any, ...], value: Any
) -> None:
    body = json.loads(json.dumps(BODY))
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        parse_manifest(pack_manifest(body), "step-3")
    except CheckpointError as error:
        str(error).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


HEADER = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
ALIASES = b'{"__metadata__": {"aliases": "%s"}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'


@given(hostile_bytes(HEADER, b'"data_offsets": [0, 4]', b'"shape": [1]', b'"__metadata__": {'))
@example(b"[" * 100_000)
@example(ALIASES % b"[")
@example(ALIASES % (b"[" * 5000))
@example(ALIASES % rb"{\"a\": \"missing\"}")
@example(ALIASES % rb"{\"a\": [1]}")
@example(ALIASES % b"7")
@example(HEADER.replace(b"[1]", b"[4611686018427387904, 4]"))
@example(HEADER.replace(b"[0, 4]", b"[0, 18446744073709551615]"))
def test_a_header_of_weights_is_read_or_refused(folder: Path, header: bytes) -> None:
    for length in (len(header), 1 << 63, 200 << 20):
        data = struct.pack("<Q", length) + header + bytes(4)
        (folder / "model.safetensors").write_bytes(data)
        try:
            _read_weights(folder)
        except ModelError as error:
            str(error).encode()
