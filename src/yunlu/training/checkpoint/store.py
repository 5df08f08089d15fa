"""Checkpoints of one run: saved in the background, pruned by the retention policy, restored."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import CheckpointError, TrainingError, is_disk_full
from yunlu.training.background import open_background
from yunlu.training.checkpoint import files
from yunlu.training.checkpoint.host_buffer import HostBuffer, copy_into
from yunlu.training.checkpoint.reader import CheckpointReader
from yunlu.training.checkpoint.save_group import SaveGroup, WriterAssignment
from yunlu.training.checkpoint.storage import open_storage, step_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from yunlu.training.checkpoint.files import CheckpointEntry, Snapshot
    from yunlu.training.checkpoint.storage import CheckpointStorage
    from yunlu.training.parallel.tensor_slices import TensorShard

PATIENCE_S = 600.0
"""How long the leader waits for the other workers' parts."""


class CheckpointStore:
    """Saves checkpoints in one background thread, one at a time.

    Where several workers save together, each has its own store with its view of the group, and all
    of them call ``save``, ``open_newest`` and ``open_best`` at the same step.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep_last: int,
        keep_best: int,
        metric: str,
        lower_is_better: bool,
        saved: Callable[[CheckpointEntry, float], None],
        group: SaveGroup | None = None,
        options: Mapping[str, Any] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``saved`` is called on the leader; ``root`` may be an fsspec URL with ``options``."""
        self._root = root
        self._storage = open_storage(root, options)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._metric = metric
        self._sign = 1.0 if lower_is_better else -1.0
        self._saved = saved
        self._group = group or SaveGroup()
        self._patience_s = patience_s
        self._writers = WriterAssignment(self._group)
        self._buffer = HostBuffer()
        self._saves = 0
        self._is_abandoned = threading.Event()
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._pool = open_background("checkpoint")
        self._pending: Future[None] | None = None

    def reserve(self, nbytes: int) -> None:
        """Allocate the host buffer in the background, before the first save."""
        self.wait()
        self._pending = self._pool.submit(self._buffer.reserve, nbytes)

    def save(
        self, snapshot: Snapshot, *, defer: bool = False, moving: Collection[str] = ()
    ) -> None:
        """Save a snapshot in the background; raises the error of an earlier failed save.

        With ``defer`` live shards are copied in the background too, except those named in ``moving``
        (``<group>/<name>``: changed by forward passes). The caller then calls ``finish_copy`` before
        the optimiser changes anything.
        """
        self.wait()
        shards = snapshot.all_shards()
        assigned = self._writers.of(list(shards.values()))
        shards = {name: shard for name, shard in shards.items() if name in assigned}
        live = {f"{group}/{name}" for group, held in snapshot.shards.items() for name in held}
        tensors = {name: shard.tensor for name, shard in shards.items() if name in live}
        views = self._buffer.lay_out(tensors)
        now = [name for name in tensors if not defer or name in moving]
        copy_into(views, tensors, now)
        later = tensors.keys() - now
        shards |= {name: replace(shards[name], tensor=view) for name, view in views.items()}
        metadata = replace(snapshot, tensors={}, shards={})
        self._saves += 1
        self._is_copied.clear()
        self._pending = self._pool.submit(
            self._copy_and_write,
            metadata,
            shards,
            snapshot.groups,
            _PendingCopy(views, {name: tensors[name] for name in later}),
            f"{self._group.token}-{self._saves}",
        )

    def finish_copy(self) -> None:
        """Wait until the state has been copied and may change."""
        self._is_copied.wait()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for the current save; raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish the current save and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def abandon(self) -> None:
        """Abandon the current save without waiting: its worker group is gone."""
        self._is_abandoned.set()
        self._pending = None
        self._pool.shutdown(wait=False)

    def open_newest(
        self,
        warn: Callable[[str], None],
        *,
        not_after: int | None = None,
        targets: Callable[[CheckpointReader], Iterable[TensorShard]] | None = None,
    ) -> CheckpointReader | None:
        """The newest checkpoint that verifies on all workers; warns of skipped ones.

        Args:
            warn: Receives the reason for each skipped one, on the workers that saw it.
            not_after: Excludes those of later steps.
            targets: Shards this worker will read, named ``<group>/<name>``; without it the workers
                divide all files among them. A file is always verified before it is read.
        """
        if self._group.is_leader:
            self._storage.sweep()
        names = self._storage.published() if self._group.is_leader else []
        known = [
            name
            for name in self._group.broadcast_from_leader(names)
            if not_after is None or step_of(name) <= not_after
        ]
        return self._first_good(known, targets, lambda error: warn(f"{error} It is skipped."))

    def open_best(
        self,
        warn: Callable[[str], None],
        *,
        targets: Callable[[CheckpointReader], Iterable[TensorShard]] | None = None,
    ) -> CheckpointReader | None:
        """The checkpoint with the best metric that verifies on all workers."""
        ranked: list[str] = []
        if self._group.is_leader:
            ranked = [entry.path.name for entry in self._ranked(files.entries(self._storage))]
        return self._first_good(
            self._group.broadcast_from_leader(ranked),
            targets,
            lambda error: warn(f"{error} It was the best; the next best is used."),
        )

    def forget_after(self, step: int) -> None:
        """Discard checkpoints of later steps after a rollback."""
        self.wait()
        for name in self._storage.published() if self._group.is_leader else ():
            if step_of(name) > step:
                self._storage.discard(name)

    def _first_good(
        self,
        names: list[str],
        targets: Callable[[CheckpointReader], Iterable[TensorShard]] | None,
        report: Callable[[str], None],
    ) -> CheckpointReader | None:
        group = self._group
        for name in names:
            reader = None
            try:
                reader = CheckpointReader(self._storage, name)
                if targets is None:
                    reader.verify(share=(group.rank, group.size))
                else:
                    reader.verify(targets(reader))
                is_good = True
            except (CheckpointError, OSError) as error:
                report(error.message if isinstance(error, CheckpointError) else str(error))
                is_good = False
            if group.all_good(is_good=is_good):
                return reader
            if reader is not None:
                reader.close()
        return None

    def _ranked(self, entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
        # NaN scores are excluded: they would break the sort order.
        scored = [
            entry for entry in entries if math.isfinite(entry.metrics.get(self._metric, math.nan))
        ]
        # Metrics such as accuracy tie often: then the lower loss wins.
        return sorted(
            scored,
            key=lambda entry: (
                self._sign * entry.metrics[self._metric],
                _or_worst(entry.metrics.get("loss")),
                entry.step,
            ),
        )

    def _copy_and_write(
        self,
        snapshot: Snapshot,
        shards: dict[str, TensorShard],
        groups: list[str],
        pending: _PendingCopy,
        token: str,
    ) -> None:
        try:
            copy_into(pending.views, pending.tensors, pending.tensors.keys())
        finally:
            pending.tensors.clear()
            self._is_copied.set()
        started_at = time.perf_counter()
        entry = None
        try:
            entry = self._write(snapshot, shards, groups, token)
        except Exception as error:
            if self._is_abandoned.is_set():
                return
            if is_disk_full(error):
                raise TrainingError(
                    f"No space left to save the checkpoint of step {snapshot.step} in {self._root}.",
                    hint="Earlier checkpoints are untouched: free some space, then `yunlu resume`.",
                ) from error
            raise
        if entry is not None:
            self._saved(entry, time.perf_counter() - started_at)
            self._prune(entry.step)

    def _write(
        self, snapshot: Snapshot, shards: dict[str, TensorShard], groups: list[str], token: str
    ) -> CheckpointEntry | None:
        """Write this worker's part; on the leader, publish the checkpoint."""
        storage, group = self._storage, self._group
        directory = storage.begin(snapshot.step, token)
        try:
            files.write_part(
                storage, directory, group, shards, groups=groups, between=self._check_abandoned
            )
            if not group.is_leader:
                return None
            return files.publish(
                storage,
                directory,
                group,
                snapshot,
                patience_s=self._patience_s,
                between=self._check_abandoned,
            )
        except BaseException as error:
            if group.is_leader:
                storage.discard(directory)
            elif not self._is_abandoned.is_set():
                _report_failure(storage, directory, group, error)
            raise

    def _check_abandoned(self) -> None:
        if self._is_abandoned.is_set():
            raise files.SaveAbandonedError

    def _prune(self, newest: int) -> None:
        # Later steps belong to a skipped, damaged attempt: they do not count.
        every = [entry for entry in files.entries(self._storage) if entry.step <= newest]
        retained = {entry.path for entry in every[-self._keep_last :]}
        retained |= {entry.path for entry in self._ranked(every)[: self._keep_best]}
        for entry in every:
            if entry.path not in retained:
                self._storage.discard(entry.path.name)


class _PendingCopy:
    """Tensors still to be copied into the host buffer."""

    def __init__(self, views: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        self.views, self.tensors = views, tensors


def _report_failure(
    storage: CheckpointStorage, directory: str, group: SaveGroup, error: BaseException
) -> None:
    # On a full disk even this may fail: then the leader's timeout ends the save.
    with suppress(Exception):
        files.report_failure(storage, directory, group, f"{type(error).__name__}: {error}")


def _or_worst(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss
