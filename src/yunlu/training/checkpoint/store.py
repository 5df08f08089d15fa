"""Checkpoints of one run: saved in the background, pruned by the retention policy, restored.

Exchanges between workers are imported where they are used: a single worker imports none of them.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from yunlu.core.errors import CheckpointError, TrainingError, is_disk_full
from yunlu.training.checkpoint import files
from yunlu.training.checkpoint.files import CheckpointReader
from yunlu.training.checkpoint.host_copy import HostBuffer, HostCopy, must_copy_now
from yunlu.training.checkpoint.storage import open_storage, step_of
from yunlu.training.device import message_device
from yunlu.training.tensor_slices import TensorShard, TensorSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from yunlu.training.checkpoint.files import CheckpointEntry, Snapshot
    from yunlu.training.checkpoint.storage import CheckpointStorage


def open_background(name: str) -> ThreadPoolExecutor:
    """An executor with one thread that uses no OpenMP threads; called by the training thread.

    OpenMP gives every thread with a large enough operation a pool of its own, one thread per core, and
    keeps it. The process then has more threads than cores, and the training thread's pool no longer
    spins while waiting: on two cores, the steps of a small model take twice as long from the first
    checkpoint on.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    count = torch.get_num_threads()
    if count > 1:
        pool.submit(_use_one_thread).result()
        torch.set_num_threads(count)  # part of the setting is global to all threads
    return pool


def _use_one_thread() -> None:
    torch.get_num_threads()  # a thread inherits the global number at the first call
    torch.set_num_threads(1)


def _own_token() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveGroup:
    """All workers of a generation, seen by one; a single worker by default."""

    rank: int = 0
    size: int = 1
    token: str = field(default_factory=_own_token)
    """The same on all workers, and unique: e.g. the attempt and the generation."""
    group: Any = None
    """Process group; None for all workers."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker publishes the checkpoint."""
        return self.rank == 0

    def broadcast_from_leader(self, value: Any) -> Any:
        """The leader's value, as JSON, on all workers."""
        if self.size == 1:
            return value
        from yunlu.training.parallel.redistribute import broadcast_json  # noqa: PLC0415 - see above

        return broadcast_json(value, source=0, group=self.group)

    def all_good(self, *, is_good: bool) -> bool:
        """Whether ``is_good`` holds on all workers."""
        if self.size == 1:
            return is_good
        flag = torch.tensor(int(is_good), device=_device(self.group))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())


class WriterAssignment:
    """Assigns shards to writers, so that replicas share the writing.

    Workers exchange their shards once. After that, one flag checks that nothing has changed.
    """

    def __init__(self, group: SaveGroup) -> None:
        self._group = group
        self._described: list[Any] | None = None
        self._names: frozenset[str] = frozenset()

    def of(self, shards: Sequence[TensorShard]) -> frozenset[str]:
        """Names of the shards to write; every worker of the group calls this at the same step."""
        group = self._group
        if group.size == 1:
            return frozenset(shard.name for shard in shards)
        described = [
            [shard.name, list(shard.region.offset), list(shard.region.size), shard.nbytes]
            for shard in shards
        ]
        if not group.all_good(is_good=described == self._described):
            from yunlu.training.parallel.redistribute import gather_json  # noqa: PLC0415 - see above

            everyone = [
                [
                    (name, TensorSlice(tuple(offset), tuple(size)), nbytes)
                    for name, offset, size, nbytes in described_shards
                ]
                for described_shards in gather_json(described, group=group.group)
            ]
            self._described, self._names = described, assign_writers(everyone)[group.rank]
        return self._names


def assign_writers(
    everyone: Sequence[Sequence[tuple[str, TensorSlice, int]]],
) -> list[frozenset[str]]:
    """Assign each region to one of its holders: the largest first, to the least loaded."""
    holders: dict[tuple[str, TensorSlice], list[int]] = {}
    sizes: dict[tuple[str, TensorSlice], int] = {}
    for rank, held in enumerate(everyone):
        for name, region, nbytes in held:
            holders.setdefault((name, region), []).append(rank)
            sizes[name, region] = nbytes
    loads = [0] * len(everyone)
    names: list[set[str]] = [set() for _ in everyone]
    order = sorted(holders, key=lambda key: (-sizes[key], key[0], key[1].offset, key[1].size))
    for key in order:
        # An empty region is written too if the tensor is empty: its name and type count.
        writer = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[writer] += sizes[key]
        names[writer].add(key[0])
    return [frozenset(described_shards) for described_shards in names]


def _device(group: Any) -> torch.device:
    return message_device(group)


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
        copy = HostCopy(views, tensors, moving=moving)
        copy.run(
            [
                name
                for name, tensor in tensors.items()
                if not defer or (name in moving and must_copy_now(tensor))
            ]
        )
        shards |= {name: replace(shards[name], tensor=view) for name, view in views.items()}
        metadata = replace(snapshot, tensors={}, shards={})
        self._saves += 1
        self._is_copied.clear()
        self._pending = self._pool.submit(
            self._copy_and_write,
            metadata,
            shards,
            snapshot.groups,
            copy,
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

    def open_best(self, warn: Callable[[str], None]) -> CheckpointReader | None:
        """The checkpoint with the best metric that verifies on all workers."""
        ranked: list[str] = []
        if self._group.is_leader:
            ranked = [entry.path.name for entry in self._ranked(files.entries(self._storage))]
        return self._first_good(
            self._group.broadcast_from_leader(ranked),
            None,
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
        copy: HostCopy,
        token: str,
    ) -> None:
        try:
            copy.run()
        finally:
            copy.clear()
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


def _report_failure(
    storage: CheckpointStorage, directory: str, group: SaveGroup, error: BaseException
) -> None:
    # On a full disk even this may fail: then the leader's timeout ends the save.
    with suppress(Exception):
        files.report_failure(storage, directory, group, f"{type(error).__name__}: {error}")


def _or_worst(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss
