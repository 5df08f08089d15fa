"""True speed of a job with the batch that its owner asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.observations import split_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from yunlu.lab.simulation.profiles import Application
    from yunlu.lab.simulation.step_times import Shape
    from yunlu.scheduler.policy.observations import BatchSplit


class FixedBatchSpeed:
    """Speed for policies that do not learn: the measured tables, in the current epoch."""

    def __init__(
        self, application: Application, batch: int, devices_per_node: Mapping[str, int]
    ) -> None:
        self.epoch = 0
        self._application, self._batch = application, batch
        self._devices_per_node = devices_per_node
        self._steps: dict[tuple[str, int, int], float | None] = {}
        self._batches: dict[tuple[str, Shape], BatchSplit | None] = {}

    @property
    def steps_left(self) -> float:
        """Steps of the epochs after this one, at least one: as Optimus counts them."""
        last = self._application.epochs - 1
        if last <= self.epoch:
            return 1.0
        steps = self._application.steps
        return steps(self._batch, last) - steps(self._batch, self.epoch)

    def step_s(self, device_type: str, nodes: int, devices: int) -> float | None:
        """Step time of devices packed onto nodes; None where it cannot run."""
        key = (device_type, nodes, devices)
        if key not in self._steps:
            self._steps[key] = self._find(*key)
        return self._steps[key]

    def goodput(
        self, device_type: str, nodes: NDArray[np.int64], devices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Useful samples per second of devices packed onto nodes."""
        both = np.broadcast(nodes, devices)
        rates = [self._rate(device_type, int(node), int(count)) for node, count in both]
        return np.array(rates, dtype=np.float64).reshape(both.shape)

    def split(self, device_type: str, shape: Shape) -> BatchSplit | None:
        """Split of the batch there; None where nothing was measured."""
        key = (device_type, shape)
        if key not in self._batches:
            self._batches[key] = self._split(*key)
        return self._batches[key]

    def _rate(self, device_type: str, nodes: int, devices: int) -> float:
        step_s = self.step_s(device_type, nodes, devices)
        if step_s is None:
            return 0.0
        batch = self.split(device_type, self._shape(device_type, nodes, devices))
        assert batch is not None
        limits = self._application.limits
        total = batch.total(devices)
        noise = self._application.noise(total, self.epoch)
        gain = (noise.var + noise.sqr) / (noise.var / (total / limits.base) + noise.sqr)
        return gain * limits.base / step_s

    def _find(self, device_type: str, nodes: int, devices: int) -> float | None:
        if not 0 < nodes <= devices:
            return None
        shape = self._shape(device_type, nodes, devices)
        batch = self.split(device_type, shape)
        if batch is None:
            return None
        result = self._application.times[device_type].find(shape, batch.local)
        assert result is not None
        step_s, sync_s = result
        return step_s + (step_s - sync_s) * batch.accumulation

    def _split(self, device_type: str, shape: Shape) -> BatchSplit | None:
        times = self._application.times.get(device_type)
        if times is None:
            return None
        limits, devices = self._application.limits, sum(shape)
        limits = replace(limits, local_most=min(limits.local_most, times.local_most))
        batch = split_batch(limits, self._batch, devices)
        # A device with less memory was measured with smaller batches only: more passes.
        while batch.local >= 1 and times.find(shape, batch.local) is None:
            if batch.local <= times.local_least:
                return None
            limits = replace(limits, local_most=batch.local - 1)
            batch = split_batch(limits, self._batch, devices)
        return batch if batch.local >= 1 else None

    def _shape(self, device_type: str, nodes: int, devices: int) -> Shape:
        """Full nodes first; as even as possible where more nodes are used than needed."""
        size = self._devices_per_node.get(device_type, devices)
        full, rest = divmod(devices, size)
        if full + (rest > 0) == nodes:
            return (size,) * full + ((rest,) if rest else ())
        item, more = divmod(devices, nodes)
        return (item + 1,) * more + (item,) * (nodes - more)
