"""Measured step times, and interpolation between them."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import missing_part
from yunlu.lab.simulation.tables import SimulationError, read_count, read_number, read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

Shape = tuple[int, ...]
"""Devices on each node of a placement."""
Times = tuple[float, float]
"""Seconds of a step, and the part of it for the exchange of gradients."""

_PLACEMENT_COLUMNS = ("placement", "local_bsz", "step_time", "sync_time")
_SCALE_COLUMNS = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")


class StepTimes:
    """Step times of one application on one device type, for any shape and local batch.

    A shape that was measured is linear in the batch between its measurements. Any other is linear
    in (nodes, devices, batch) between the means over shapes and the measurements at larger scale.
    """

    def __init__(self, name: str, curves: dict[Shape, list[tuple[int, Times]]],
                 scale: list[tuple[int, int, int, Times]]) -> None:  # fmt: skip
        self.name = name
        self._curves = {shape: _Curve(points) for shape, points in curves.items()}
        self._points, self._values = _join(curves, scale)
        self._between: Any = None
        self._known: dict[tuple[Shape, int], Times | None] = {}
        locals_seen = [local for points in curves.values() for local, _ in points]
        self.local_least, self.local_most = min(locals_seen), max(locals_seen)
        self.most_by_shape = {
            shape: max(local for local, _ in points) for shape, points in curves.items()
        }
        """The largest local batch that was measured in each shape."""
        self.max_nodes = int(self._points[:, 0].max())
        self.max_devices = int(self._points[:, 1].max())

    def find(self, shape: Shape, local: int) -> Times | None:
        """Times in that shape; None outside the measured range."""
        key = (shape, local)
        if key not in self._known:
            self._known[key] = self._find(normalise(shape), local)
        return self._known[key]

    def _find(self, shape: Shape, local: int) -> Times | None:
        curve = self._curves.get(shape)
        if curve is not None:
            return curve.at(local)
        index = (min(len(shape), self.max_nodes), sum(shape), local)
        step_s, sync_s = (float(value) for value in self._interpolate(np.array([index]))[0])
        return (step_s, sync_s) if step_s == step_s else None  # noqa: PLR0124 (NaN: outside)

    def prepare(self) -> None:
        """Triangulate the points now, so that no decision is charged with it."""
        if self._between is not None:
            return
        try:
            from scipy.interpolate import LinearNDInterpolator  # noqa: PLC0415 (slow to import)
            from scipy.spatial import QhullError  # noqa: PLC0415
        except ImportError as error:
            raise missing_part("scipy", "train", "Replaying a workload") from error
        try:
            self._between = LinearNDInterpolator(self._points, self._values)
        except (QhullError, ValueError):
            # All in one plane, as with a single node: no interpolation.
            self._between = _return_nan

    def _interpolate(self, places: NDArray[Any]) -> NDArray[np.float64]:
        self.prepare()
        return np.asarray(self._between(places), dtype=np.float64)


def _return_nan(places: NDArray[Any]) -> NDArray[np.float64]:
    return np.full((len(places), 2), np.nan)


class _Curve:
    def __init__(self, points: list[tuple[int, Times]]) -> None:
        points = sorted(points)
        self._locals = [local for local, _ in points]
        self._times = [times for _, times in points]

    def at(self, local: int) -> Times:
        """Linear; constant beyond the ends."""
        if len(self._locals) == 1 or local <= self._locals[0]:
            return self._times[0]
        if local >= self._locals[-1]:
            return self._times[-1]
        high = bisect_right(self._locals, local)
        start, span = self._locals[high - 1], self._locals[high] - self._locals[high - 1]
        low_times, high_times = self._times[high - 1], self._times[high]
        step_s, sync_s = (
            (above - below) / span * (local - start) + below
            for below, above in zip(low_times, high_times, strict=True)
        )
        return step_s, sync_s


def normalise(shape: Shape) -> Shape:
    """Its smallest rotation: a ring has no first node."""
    if len(shape) < 2:
        return shape
    return min(shape[turn:] + shape[:turn] for turn in range(len(shape)))


def load_step_times(directory: Path, suffix: str = "") -> StepTimes:
    """Read ``placements`` and, where it exists, ``scalability``, of one type of devices."""
    path = directory / f"placements{suffix}.csv"
    curves: dict[Shape, list[tuple[int, Times]]] = {}
    for line, row in enumerate(read_rows(path, _PLACEMENT_COLUMNS)):
        text = row["placement"].strip()
        if not text.isdigit() or "0" in text:
            raise SimulationError(
                f"{path}, line {line + 2}: placement is {text!r}.",
                hint="write the devices on each node as digits: 44 is two nodes with four each",
            )
        local = read_count(path, line, row, "local_bsz")
        shape = normalise(tuple(int(digit) for digit in text))
        curves.setdefault(shape, []).append((local, _read_times(path, line, row)))
    return StepTimes(directory.name, curves, _load_scale(directory / f"scalability{suffix}.csv"))


def _load_scale(path: Path) -> list[tuple[int, int, int, Times]]:
    if not path.exists():
        return []
    rows: list[tuple[int, int, int, Times]] = []
    for line, row in enumerate(read_rows(path, _SCALE_COLUMNS)):
        nodes, devices, local = (read_count(path, line, row, name) for name in _SCALE_COLUMNS[:3])
        rows.append((nodes, devices, local, _read_times(path, line, row)))
    return rows


def _read_times(path: Path, line: int, row: dict[str, str]) -> Times:
    step_s, sync_s = (read_number(path, line, row, name) for name in ("step_time", "sync_time"))
    if not 0 <= sync_s <= step_s or step_s == 0:
        raise SimulationError(
            f"{path}, line {line + 2}: sync_time {sync_s:g} is not within step_time {step_s:g}."
        )
    return step_s, sync_s


def _join(
    curves: dict[Shape, list[tuple[int, Times]]], scale: list[tuple[int, int, int, Times]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All known points (nodes, devices, batch), averaged over shapes, in a fixed order."""
    grouped: dict[tuple[int, int, int], list[Times]] = {}
    for shape, points in curves.items():
        for local, times in points:
            grouped.setdefault((len(shape), sum(shape), local), []).append(times)
    places = [*sorted(grouped), *((nodes, devices, local) for nodes, devices, local, _ in scale)]
    means = [np.mean(np.array(grouped[index]), axis=0) for index in sorted(grouped)]
    values = [*means, *(np.array(times) for *_, times in scale)]
    return np.array(places, dtype=np.float64), np.array(values, dtype=np.float64)
