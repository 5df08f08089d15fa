"""Writer of a run's metrics: appends to the tail, and seals older lines of it on a thread of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import YunluError
from yunlu.runs.events import is_step
from yunlu.runs.items import Area, Claim, Log
from yunlu.runs.metric_log import decode_line, make_tail, read_tail
from yunlu.runs.metric_segments import SegmentName, encode_segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.runs.run_store import RunStore

SEGMENT_ROWS = 4096
RECENT_LINES = 64
"""Stay in the tail when the others are sealed: who looks at the newest steps needs no segment."""
_FEWEST = 512
"""At the end of an attempt, fewer lines are not worth a segment."""


class MetricWriter:
    """Appends records; nothing but the append itself takes time of the caller."""

    def __init__(self, run: RunStore) -> None:
        self._run = run
        self._appended = 0
        self._is_writer = False
        self._sealing: threading.Thread | None = None
        self._failed = False

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Append records: on return they survive the death of the process."""
        if not records:
            return
        with self._run.claim(Claim.METRICS, wait=True):
            self._run.append(Log.METRICS, records)
        self._appended += len(records)
        self._is_writer = True
        is_sealing = self._sealing is not None and self._sealing.is_alive()
        if self._appended >= SEGMENT_ROWS and not is_sealing and not self._failed:
            self._appended = 0
            self._sealing = threading.Thread(
                target=self._seal, args=(SEGMENT_ROWS,), name="metric segments", daemon=True
            )
            self._sealing.start()

    def close(self) -> None:
        """Seal what is left, if it is worth it. More may be appended later."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        if self._is_writer and not self._failed:  # of several workers, one writes
            self._seal(_FEWEST)

    def _seal(self, fewest: int) -> None:
        try:
            seal_metrics(self._run, fewest=fewest)
        except (OSError, ValueError, YunluError) as error:  # all is in the tail as before
            self._failed = True
            self._run.warn(f"The metrics stay JSON lines, which take more room: {error}")


def seal_metrics(run: RunStore, *, fewest: int = 1) -> int:
    """Move all but the newest lines of the tail into segments, if they are not too few; returns how many."""
    tail = read_tail(run)
    lines = list(tail.whole_lines())
    older = lines[: max(len(lines) - RECENT_LINES, 0)]
    if fewest >= SEGMENT_ROWS:  # while the run goes on: whole segments, the rest next time
        older = older[: len(older) // SEGMENT_ROWS * SEGMENT_ROWS]
    if len(older) < max(fewest, 1):
        return 0
    for first in range(0, len(older), SEGMENT_ROWS):
        rows = [_as_step(line) for line in older[first : first + SEGMENT_ROWS]]
        start = tail.start + first
        name = SegmentName(start=start, end=start + len(rows))
        run.write(f"{Area.METRICS}/{name}", encode_segment(rows))
    with run.claim(Claim.METRICS, wait=True):
        now = read_tail(run)
        if now.start != tail.start:  # another process sealed the same lines meanwhile
            return 0
        rest = now.lines[sum(map(len, older)) :]
        run.write(Log.METRICS, make_tail(tail.start + len(older), rest), durable=False)
    return len(older)


def _as_step(line: bytes) -> dict[str, Any] | None:
    record = decode_line(line)
    return dict(record) if is_step(record) else None
