"""What the report says about the steps of a run, from one pass over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from yunlu.jobs.curve_buckets import CurveBuckets
from yunlu.jobs.run_log import IN_STEP
from yunlu.runs.value_sample import ValueSample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.runs.step_batches import StepBatch

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

PARTS = ("data", "compute", "communication", "checkpoint", "evaluation", "other")
"""Where time goes; ``other`` is start-up, the final scoring and whatever no part claims."""
_AFTER_STEP = ("checkpoint_s", "evaluate_s")
_CLAIMED = (*IN_STEP, *_AFTER_STEP)
_STRETCHES = 60
_MOST_SHARES = 1920

_DRAWN = (
    *("loss", "lr", "grad_norm", "memory_bytes", "low_share", "loss_scale"),
    *("exchange_s", "sent_bytes", "compression_error"),
)


@dataclass(slots=True, kw_only=True)
class StepSummary:
    """Curves, sums and typical values of the steps of a run."""

    steps: int = 0
    newest: dict[str, float] = field(default_factory=dict[str, float])
    """The last record."""
    curves: dict[str, CurveBuckets] = field(default_factory=dict[str, CurveBuckets])
    """By name; without those that no step has a value of."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """By part, without ``other``."""
    shares: tuple[list[int], dict[str, list[float]]] = field(default_factory=lambda: ([], {}))
    """Last steps of up to 60 stretches, and the share of each part in them."""
    step_s: float | None = None
    """Median; None where no step took time."""
    busy_s: float = 0.0
    samples: float = 0.0
    memory_bytes: float | None = None
    tokens: float = 0.0
    padding: float = 0.0
    late_noise: FloatArray = field(default_factory=lambda: np.empty(0))
    """Positive noise scales of the last quarter."""
    late_batches: FloatArray = field(default_factory=lambda: np.empty(0))
    """Samples of steps of the last quarter."""


def step_seconds(batch: StepBatch) -> FloatArray:
    """The seconds of each step itself."""
    return _sum_columns(batch, IN_STEP)


def held_up_seconds(batch: StepBatch) -> FloatArray:
    """The seconds that each step held up the next one: its evaluation, its checkpoint."""
    return _sum_columns(batch, _AFTER_STEP)


def _sum_columns(batch: StepBatch, names: Iterable[str]) -> FloatArray:
    total = np.zeros(batch.size)
    for name in names:
        total = total + batch.get(name)
    return total


def summarise_steps(batches: Iterable[StepBatch]) -> StepSummary:
    """Read the steps once; memory does not grow with them."""
    reducer = _Reducer()
    with np.errstate(all="ignore"):  # damaged records have any numbers
        for batch in batches:
            reducer.add(batch)
        return reducer.finish()


class _Reducer:
    def __init__(self) -> None:
        self.summary = StepSummary()
        self._curves: dict[str, CurveBuckets] = {}
        self._seconds = np.zeros(len(_CLAIMED))
        self._shares = _ShareBuckets()
        self._busy, self._noise, self._sizes = ValueSample(), ValueSample(), ValueSample()
        self._before = _Carry()
        self._widest = _WidestOfThree(self._curve("batch"))
        self._items_repeat_samples = True

    def add(self, batch: StepBatch) -> None:
        summary = self.summary
        summary.steps += batch.size
        summary.newest = {
            name: float(values[-1]) for name, values in batch.columns.items() if batch.has(name)[-1]
        }
        for name in _DRAWN:
            self._draw(name, batch, batch.has(name), batch.get(name))
        self._add_time(batch)
        self._add_rates(batch)
        self._add_noise(batch)
        memory = batch.get("memory_bytes", -np.inf)[batch.has("memory_bytes")]
        if len(memory):
            summary.memory_bytes = max(summary.memory_bytes or -np.inf, float(memory.max()))

    def finish(self) -> StepSummary:
        summary = self.summary
        self._widest.finish()
        if not len(self._noise.values):
            self._curves.pop("batch", None)
        if summary.tokens or self._items_repeat_samples:
            # Where each sample is one item, or an item a token, the curve would repeat another.
            self._curves.pop("items_per_s", None)
        summary.curves = {name: curve for name, curve in self._curves.items() if curve.count}
        summary.seconds = dict(zip(PARTS, self._seconds.tolist(), strict=False))
        summary.shares = self._shares.stretches()
        busy = np.sort(self._busy.values)
        summary.step_s = float(busy[len(busy) // 2]) if summary.busy_s else None
        late = self._noise.latest_quarter()
        summary.late_noise = late[np.isfinite(late)]
        summary.late_batches = self._sizes.latest_quarter()
        return summary

    def _curve(self, name: str) -> CurveBuckets:
        return self._curves.setdefault(name, CurveBuckets())

    def _draw(self, name: str, batch: StepBatch, mask: BoolArray, values: FloatArray) -> None:
        if mask.any():
            self._curve(name).add(batch.step[mask], values[mask])

    def _add_time(self, batch: StepBatch) -> None:
        claimed = np.column_stack([batch.get(name) for name in _CLAIMED])
        self._seconds += claimed.sum(axis=0)
        self._shares.add(batch.step, np.column_stack((claimed, self._find_unclaimed(batch))))
        busy = step_seconds(batch)
        self._busy.add(busy)
        self.summary.busy_s += float(busy.sum())

    def _find_unclaimed(self, batch: StepBatch) -> FloatArray:
        """Seconds since the step before that no part claims; the first step of an attempt has none."""
        since = self._before.shift("at", batch.get("at", np.nan))
        attempts = self._before.shift("attempt", batch.get("attempt", -1.0))
        held_up = self._before.shift("held_up", held_up_seconds(batch))
        # A record is stamped when its step ends; what came after that step lies before this one.
        rest = batch.get("at", np.nan) - since - held_up - step_seconds(batch)
        is_same = attempts == batch.get("attempt", -1.0)
        return np.where(is_same & (rest > 0), rest, 0.0)

    def _add_rates(self, batch: StepBatch) -> None:
        summary, busy = self.summary, step_seconds(batch)
        has = batch.has("samples")
        counted, counts = batch.step[has], batch.get("samples")[has]
        sizes = np.zeros(batch.size)
        if len(counted):
            steps_before = self._before.shift("counted", counted, first=0.0)
            counts_before = self._before.shift("samples", counts, first=0.0)
            gaps = counted - steps_before
            sizes[has] = np.divide(
                counts - counts_before, gaps, out=np.zeros(len(gaps)), where=gaps != 0
            )
        is_timed = busy > 0
        rate = np.where(is_timed, 1.0, 0.0) / np.where(is_timed, busy, 1.0)
        self._draw("samples_per_s", batch, has & is_timed, sizes * rate)
        self._sizes.add(sizes[has])
        self._widest.add(batch.step[has], sizes[has])
        summary.samples += float(sizes.sum())
        items, has_items = batch.get("items"), batch.has("items")
        if (has_items != has).any() or (items[has_items] != sizes[has_items]).any():
            self._items_repeat_samples = False
        self._draw("items_per_s", batch, has_items & is_timed, items * rate)
        tokens, has_tokens = batch.get("tokens"), batch.has("tokens")
        padding = np.where(has_tokens, batch.get("padding"), 0.0)
        summary.tokens += float(tokens.sum())
        summary.padding += float(batch.get("padding").sum())
        self._draw("tokens_per_s", batch, has_tokens & is_timed, (tokens - padding) * rate)
        is_any = has_tokens & (tokens != 0)
        self._draw("padding_share", batch, is_any, padding / np.where(is_any, tokens, 1.0))

    def _add_noise(self, batch: StepBatch) -> None:
        has, scale = batch.has("noise_scale"), batch.get("noise_scale")
        self._noise.add(scale[has & (scale > 0)])
        # An estimate can be so far off that it is not a size.
        self._draw("noise_scale", batch, has & (scale > 0) & (scale < np.inf), scale)


class _Carry:
    """Values of the record before each: the last one of a batch is carried to the next."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def shift(self, name: str, values: FloatArray, *, first: float = np.nan) -> FloatArray:
        shifted = np.concatenate(([self._last.get(name, first)], values[:-1]))
        self._last[name] = float(values[-1])
        return shifted


class _WidestOfThree:
    """The batch over the steps: the short last batch of an epoch is not a change."""

    def __init__(self, curve: CurveBuckets) -> None:
        self._curve = curve
        self._steps = self._sizes = np.empty(0)
        self._drawn = 0
        """Of those that are carried over: so many are drawn, and only neighbours."""

    def add(self, steps: FloatArray, sizes: FloatArray) -> None:
        self._steps = np.concatenate((self._steps, steps))
        self._sizes = np.concatenate((self._sizes, sizes))
        self._draw(until=len(self._sizes) - 1)

    def finish(self) -> None:
        self._draw(until=len(self._sizes))

    def _draw(self, *, until: int) -> None:
        if until <= self._drawn:
            return
        sizes = np.concatenate(([-np.inf], self._sizes, [-np.inf]))
        widest = np.maximum(np.maximum(sizes[:-2], sizes[1:-1]), sizes[2:])
        self._curve.add(self._steps[self._drawn : until], widest[self._drawn : until])
        start = max(until - 1, 0)
        self._steps, self._sizes = self._steps[start:], self._sizes[start:]
        self._drawn = until - start


class _ShareBuckets:
    """Seconds by part in a bounded number of stretches of equally many steps."""

    def __init__(self) -> None:
        self._width = 1
        self._sums = np.empty((0, len(PARTS)))
        self._steps = np.empty(0)
        self._rest = np.empty((0, len(PARTS)))
        self._rest_steps = np.empty(0)

    def add(self, steps: FloatArray, seconds: FloatArray) -> None:
        self._rest = np.concatenate((self._rest, seconds))
        self._rest_steps = np.concatenate((self._rest_steps, steps))
        while len(self._rest) >= self._width:
            full = min(len(self._rest) // self._width, _MOST_SHARES - len(self._sums))
            cut = full * self._width
            sums = self._rest[:cut].reshape(full, self._width, len(PARTS)).sum(axis=1)
            ends = self._rest_steps[self._width - 1 : cut : self._width]
            self._sums = np.concatenate((self._sums, sums))
            self._steps = np.concatenate((self._steps, ends))
            self._rest, self._rest_steps = self._rest[cut:], self._rest_steps[cut:]
            if len(self._sums) == _MOST_SHARES:
                self._sums = self._sums.reshape(-1, 2, len(PARTS)).sum(axis=1)
                self._steps, self._width = self._steps[1::2], self._width * 2

    def stretches(self) -> tuple[list[int], dict[str, list[float]]]:
        """Shares of the parts in up to 60 stretches of steps, with the last step of each."""
        sums, ends = self._sums, self._steps
        if len(self._rest):
            sums = np.concatenate((sums, self._rest.sum(axis=0, keepdims=True)))
            ends = np.append(ends, self._rest_steps[-1])
        steps: list[int] = []
        shares: dict[str, list[float]] = {part: [] for part in PARTS}
        stretches = min(_STRETCHES, len(sums))
        if not stretches:
            return steps, shares
        edges = [round(i * len(sums) / stretches) for i in range(stretches + 1)]
        for start, end in pairwise(edges):
            spent = sums[start:end].sum(axis=0)
            if (whole := float(spent.sum())) > 0:
                steps.append(int(ends[end - 1]))
                for part, seconds in zip(PARTS, spent.tolist(), strict=True):
                    shares[part].append(seconds / whole)
        return steps, shares
