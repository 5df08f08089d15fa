"""The checkpoints of one run: saved beside the training, thinned, and found again."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from yunlu.core.errors import CheckpointError, TrainingError, is_disk_full
from yunlu.training.checkpoint import files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from yunlu.training.checkpoint.files import Entry, Snapshot


class CheckpointStore:
    """Writes in one background thread; at most one save is under way."""

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        keep_best: int,
        metric: str,
        lower_is_better: bool,
        saved: Callable[[Entry, float], None],
    ) -> None:
        self._root = root
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._metric = metric
        self._sign = 1.0 if lower_is_better else -1.0
        self._saved = saved
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Hand a snapshot over; an earlier save that failed is raised here."""
        self.wait()
        self._pending = self._pool.submit(self._write, snapshot)

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

    def newest_good(
        self, warn: Callable[[str], None], *, not_after: int | None = None
    ) -> Snapshot | None:
        """The newest checkpoint that verifies; says which ones were passed over.

        ``not_after`` leaves out those from later steps.
        """
        files.sweep(self._root)
        for path in files.steps_on_disk(self._root):
            try:
                if not_after is None or files.step_of(path) <= not_after:
                    return files.read(path)
            except CheckpointError as error:
                warn(f"{error.message} It is passed over.")
        return None

    def forget_after(self, step: int) -> None:
        """Discard the checkpoints of later steps: the run has gone back behind them."""
        self.wait()
        for path in files.steps_on_disk(self._root):
            if files.step_of(path) > step:
                files.discard(path)

    def best(self, warn: Callable[[str], None]) -> Snapshot | None:
        """The checkpoint with the best metric that verifies; says which ones were passed over."""
        for entry in self._ranked(files.entries(self._root)):
            try:
                return files.read(entry.path)
            except CheckpointError as error:
                warn(f"{error.message} It was among the best; the next best is taken.")
        return None

    def _ranked(self, entries: list[Entry]) -> list[Entry]:
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

    def _write(self, snapshot: Snapshot) -> None:
        started_at = time.perf_counter()
        try:
            entry = files.write(self._root, snapshot)
        except Exception as error:
            if is_disk_full(error):
                raise TrainingError(
                    f"No space left to save the checkpoint of step {snapshot.step} in {self._root}.",
                    hint="Earlier checkpoints are untouched: free some space, then `yunlu resume`.",
                ) from error
            raise
        self._saved(entry, time.perf_counter() - started_at)
        self._thin(entry.step)

    def _thin(self, newest: int) -> None:
        # Later steps are those of a life that was passed over as damaged: they count for nothing.
        every = [entry for entry in files.entries(self._root) if entry.step <= newest]
        kept = {entry.path for entry in every[-self._keep_last :]}
        kept |= {entry.path for entry in self._ranked(every)[: self._keep_best]}
        for entry in every:
            if entry.path not in kept:
                files.discard(entry.path)


def _or_worst(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss
