"""A checkpoint opened for reading: any region of any tensor, independent of the saved layout."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open

from yunlu.core.errors import CheckpointError
from yunlu.core.json_decode import decode_json
from yunlu.training.checkpoint.manifest import STATE, parse_manifest
from yunlu.training.checkpoint.storage import MANIFEST
from yunlu.training.checkpoint.tensor_files import CODES, describe, describe_bytes
from yunlu.training.parallel.tensor_slices import ShardGroupReader, TensorSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from yunlu.training.checkpoint.manifest import StoredShard
    from yunlu.training.checkpoint.storage import CheckpointStorage
    from yunlu.training.parallel.tensor_slices import TensorShard, TensorSpec


class CheckpointReader:
    """Reads regions of tensors; each file is verified before anything in it is used."""

    def __init__(self, storage: CheckpointStorage, directory: str) -> None:
        self._storage, self._name = storage, directory
        self._manifest = parse_manifest(storage.get(directory, MANIFEST), directory)
        self._clear: Callable[[], object] | None = None
        self._open: dict[str, Any] = {}
        self.step = self._manifest.step
        self.metrics = self._manifest.metrics
        self.state: dict[str, Any] = self._read_state()

    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors it holds, named ``<group>/<name>``."""
        return self._manifest.specs

    def group(self, name: str) -> ShardGroupReader:
        """The tensors of one group."""
        return ShardGroupReader(self, name)

    def verify(
        self, targets: Iterable[TensorShard] | None = None, *, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Compare checksums of the files that hold the target shards, or of all files.

        ``share``: (rank, size) of workers that divide the files among them.
        """
        files = sorted(self._manifest.files) if targets is None else self._files_of(targets)
        rank, size = share
        for file in files[rank::size]:
            if file != STATE:
                self._file(file)

    def read(self, name: str, region: TensorSlice) -> Tensor:
        """Read a region of a tensor."""
        spec = self._manifest.specs[name]
        stored_shards = self._find_stored(name, region)
        for stored in stored_shards:
            self._file(stored.file)
        try:
            if len(stored_shards) == 1 and stored_shards[0].region == region:
                return self._file(stored_shards[0].file).get_tensor(name)
            result = torch.empty(region.size, dtype=spec.dtype)
            for stored in stored_shards:
                common = region.intersect(stored.region)
                result[common.within(region)] = self._slice(name, stored, common)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"Checkpoint {self._name} cannot be read: {error}") from error
        return result

    def close(self) -> None:
        """Close the files, and delete downloads."""
        self._open.clear()
        if self._clear is not None:
            self._clear()
            self._clear = None

    def _find_stored(self, name: str, region: TensorSlice) -> list[StoredShard]:
        candidates = self._manifest.stored_shards[name]
        exact = [stored for stored in candidates if stored.region == region]
        if exact:
            return exact[:1]
        return [stored for stored in candidates if not stored.region.intersect(region).is_empty]

    def _slice(self, name: str, stored: StoredShard, common: TensorSlice) -> Tensor:
        file = self._file(stored.file)
        if common == stored.region:  # also the only way to read a scalar
            return file.get_tensor(name)
        return file.get_slice(name)[common.within(stored.region)]

    def _files_of(self, targets: Iterable[TensorShard]) -> list[str]:
        known = self._manifest.stored_shards
        shards = [shard for shard in targets if shard.name in known]
        return sorted(
            {
                stored.file
                for shard in shards
                if not shard.region.is_empty
                for stored in self._find_stored(shard.name, shard.region)
            }
        )

    def _file(self, file: str) -> Any:
        """Open a file after verifying its checksum and its contents."""
        if file in self._open:
            return self._open[file]
        path = self._storage.fetch(self._name, file, self._make_scratch)
        if path is None:
            raise CheckpointError(f"Checkpoint {self._name} is torn: {file} is missing.")
        with path.open("rb") as stream:
            self._compare(file, describe(stream))
        try:
            opened = cast("Any", safe_open(path, framework="pt"))
            self._check_contents(file, opened)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"Checkpoint {self._name} cannot be read: {error}") from error
        self._open[file] = opened
        return opened

    def _make_scratch(self) -> Path:
        if self._clear is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="yunlu-checkpoint-"))
            self._clear = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def _check_contents(self, file: str, opened: Any) -> None:
        names = set(opened.keys())
        for name, stored_shards in self._manifest.stored_shards.items():
            for stored in stored_shards:
                if stored.file != file:
                    continue
                content = opened.get_slice(name) if name in names else None
                code = CODES[self._manifest.specs[name].dtype]
                if (
                    content is None
                    or tuple(content.get_shape()) != stored.region.size
                    or content.get_dtype() != code
                ):
                    raise CheckpointError(
                        f"Checkpoint {self._name} is damaged: {file} does not hold {name} as its manifest says."
                    )

    def _read_state(self) -> dict[str, Any]:
        data = self._storage.get(self._name, STATE)
        if data is None:
            raise CheckpointError(f"Checkpoint {self._name} is torn: {STATE} is missing.")
        self._compare(STATE, describe_bytes(data))
        try:
            return decode_json(data)
        except ValueError as error:
            raise CheckpointError(f"Checkpoint {self._name} cannot be read: {error}") from error

    def _compare(self, file: str, description: dict[str, Any]) -> None:
        if description != self._manifest.files[file]:
            raise CheckpointError(
                f"Checkpoint {self._name} is damaged: {file} does not match its checksum."
            )
