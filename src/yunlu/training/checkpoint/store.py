"""The checkpoints of one run: saved beside the training, thinned, and found again."""

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
"""How long the leader waits for the others to have written their parts."""


class CheckpointStore:
    """Writes in one background thread; at most one save is under way.

    Where several workers save together, each has its own store with its view of the crew, and all
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
        self._place = open_storage(root, options)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._metric = metric
        self._sign = 1.0 if lower_is_better else -1.0
        self._saved = saved
        self._group = group or SaveGroup()
        self._patience_s = patience_s
        self._shares = WriterAssignment(self._group)
        self._buffer = HostBuffer()
        self._saves = 0
        self._is_abandoned = threading.Event()
        self._is_copied = threading.Event()
        self._is_copied.set()
        self._pool = open_background("checkpoint")
        self._pending: Future[None] | None = None

    def reserve(self, nbytes: int) -> None:
        """Get memory for the first copy in the background, before it is needed."""
        self.wait()
        self._pending = self._pool.submit(self._buffer.reserve, nbytes)

    def save(
        self, snapshot: Snapshot, *, defer: bool = False, moving: Collection[str] = ()
    ) -> None:
        """Hand a snapshot over; an earlier save that failed is raised here.

        With ``defer`` the live pieces are copied in the background too, but for those named in
        ``moving`` (``<group>/<name>``: what forward passes change). The caller then calls
        ``finish_copy`` before the optimiser changes anything.
        """
        self.wait()
        shards = snapshot.all_shards()
        mine = self._shares.of(list(shards.values()))
        shards = {name: shard for name, shard in shards.items() if name in mine}
        live = {f"{group}/{name}" for group, held in snapshot.shards.items() for name in held}
        tensors = {name: shard.tensor for name, shard in shards.items() if name in live}
        places = self._buffer.lay_out(tensors)
        now = [name for name in tensors if not defer or name in moving]
        copy_into(places, tensors, now)
        later = tensors.keys() - now
        shards |= {name: replace(shards[name], tensor=place) for name, place in places.items()}
        kept = replace(snapshot, tensors={}, shards={})
        self._saves += 1
        self._is_copied.clear()
        self._pending = self._pool.submit(
            self._copy_and_write,
            kept,
            shards,
            snapshot.groups,
            _Late(places, {name: tensors[name] for name in later}),
            f"{self._group.token}-{self._saves}",
        )

    def finish_copy(self) -> None:
        """Until the state may be changed again."""
        self._is_copied.wait()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Until nothing is under way; raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish the save under way and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def abandon(self) -> None:
        """Give up the save under way, without waiting: its crew is no more."""
        self._is_abandoned.set()
        self._pending = None
        self._pool.shutdown(wait=False)

    def open_newest(
        self,
        warn: Callable[[str], None],
        *,
        not_after: int | None = None,
        wanted: Callable[[CheckpointReader], Iterable[TensorShard]] | None = None,
    ) -> CheckpointReader | None:
        """The newest checkpoint that verifies on all workers; says which ones were passed over.

        Args:
            warn: Told why one was passed over; on each worker that saw the reason.
            not_after: Leaves out those from later steps.
            wanted: What this worker will read, named ``<group>/<name>``; without it the workers
                verify all files between them. Either way a file is verified before it is read.
        """
        if self._group.is_leader:
            self._place.sweep()
        names = self._place.published() if self._group.is_leader else []
        known = [
            name
            for name in self._group.share_of_leader(names)
            if not_after is None or step_of(name) <= not_after
        ]
        return self._first_good(known, wanted, lambda error: warn(f"{error} It is passed over."))

    def open_best(
        self,
        warn: Callable[[str], None],
        *,
        wanted: Callable[[CheckpointReader], Iterable[TensorShard]] | None = None,
    ) -> CheckpointReader | None:
        """The checkpoint with the best metric that verifies on all workers."""
        ranked: list[str] = []
        if self._group.is_leader:
            ranked = [entry.path.name for entry in self._ranked(files.entries(self._place))]
        return self._first_good(
            self._group.share_of_leader(ranked),
            wanted,
            lambda error: warn(f"{error} It was among the best; the next best is taken."),
        )

    def forget_after(self, step: int) -> None:
        """Discard the checkpoints of later steps: the run has gone back behind them."""
        self.wait()
        for name in self._place.published() if self._group.is_leader else ():
            if step_of(name) > step:
                self._place.discard(name)

    def _first_good(
        self,
        names: list[str],
        wanted: Callable[[CheckpointReader], Iterable[TensorShard]] | None,
        tell: Callable[[str], None],
    ) -> CheckpointReader | None:
        crew = self._group
        for name in names:
            reader = None
            try:
                reader = CheckpointReader(self._place, name)
                if wanted is None:
                    reader.verify(share=(crew.rank, crew.size))
                else:
                    reader.verify(wanted(reader))
                is_good = True
            except (CheckpointError, OSError) as error:
                tell(error.message if isinstance(error, CheckpointError) else str(error))
                is_good = False
            if crew.agree(is_good=is_good):
                return reader
            if reader is not None:
                reader.close()
        return None

    def _ranked(self, entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
        # A score that is not a number ranks nowhere: it would also upset the order of the others.
        scored = [
            entry for entry in entries if math.isfinite(entry.metrics.get(self._metric, math.nan))
        ]
        # Metrics such as accuracy tie often: then the lower loss is the better model.
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
        late: _Late,
        token: str,
    ) -> None:
        try:
            copy_into(late.places, late.tensors, late.tensors.keys())
        finally:
            late.tensors.clear()
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
            self._thin(entry.step)

    def _write(
        self, snapshot: Snapshot, shards: dict[str, TensorShard], groups: list[str], token: str
    ) -> CheckpointEntry | None:
        """This worker's part; on the leader, the published checkpoint."""
        place, crew = self._place, self._group
        directory = place.begin(snapshot.step, token)
        try:
            files.write_part(place, directory, crew, shards, groups=groups, between=self._go_on)
            if not crew.is_leader:
                return None
            return files.publish(
                place,
                directory,
                crew,
                snapshot,
                patience_s=self._patience_s,
                between=self._go_on,
            )
        except BaseException as error:
            if crew.is_leader:
                place.discard(directory)
            elif not self._is_abandoned.is_set():
                _tell_leader(place, directory, crew, error)
            raise

    def _go_on(self) -> None:
        if self._is_abandoned.is_set():
            raise files.SaveAbandonedError

    def _thin(self, newest: int) -> None:
        # Later steps are those of a life that was passed over as damaged: they count for nothing.
        every = [entry for entry in files.entries(self._place) if entry.step <= newest]
        kept = {entry.path for entry in every[-self._keep_last :]}
        kept |= {entry.path for entry in self._ranked(every)[: self._keep_best]}
        for entry in every:
            if entry.path not in kept:
                self._place.discard(entry.path.name)


class _Late:
    """What is still to be copied."""

    def __init__(self, places: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        self.places, self.tensors = places, tensors


def _tell_leader(
    place: CheckpointStorage, directory: str, crew: SaveGroup, error: BaseException
) -> None:
    # On a full disk even this may fail: then the leader's patience ends the save.
    with suppress(Exception):
        files.report_failure(place, directory, crew, f"{type(error).__name__}: {error}")


def _or_worst(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss
