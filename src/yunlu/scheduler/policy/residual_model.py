"""Residuals of the step-time formula, learnt from measured steps.

A formula with seven parameters is a few per cent off: kernels like some batches better than others,
and the sum of gradients hides behind the backward pass from some batch on. That is as much as
choosing between two batches is about. So the residual (the logarithm of measured over predicted time) is
modelled as a Gaussian process over shapes and samples per device (kriging): a measurement is trusted
where it was made, partly in its neighbourhood, and elsewhere the formula holds, corrected by the mean
residual of the shape or the nearest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_SHAPE_SPREAD = 0.15
"""Standard deviation of the mean residual of a shape."""
_SHAPE_REACH = 4.0
"""How far that holds for other numbers of devices, as a logarithm: very far, since a shape is not
better for never having been tried."""
_BATCH_SPREAD = 0.06
"""Standard deviation of one batch of a shape around that."""
_BATCH_REACH = 0.2
"""Length scale over other batches, as a logarithm."""
_BATCH_SHAPE_REACH = 1.0
"""Length scale over other numbers of devices."""
_DOUBT = 0.01
"""Standard deviation of a measurement."""


@dataclass(frozen=True, slots=True)
class ResidualModel:
    """Measured points and their kriging weights."""

    nodes: tuple[int, ...]
    devices: tuple[int, ...]
    local: tuple[float, ...]
    """Samples of one device in one pass."""
    weights: tuple[float, ...]

    def __hash__(self) -> int:
        """Of the weights alone: models are looked up by their value, over and over."""
        return hash(self.weights)

    def predict_factor(self, nodes: Ints, devices: Ints, local: Floats) -> Floats:
        """Ratio of the real time of a step to that of the formula."""
        known = np.array(self.nodes), np.array(self.devices), np.array(self.local)
        return np.exp(_covariance((nodes, devices, local), known) @ np.array(self.weights))


def fit_residuals(nodes: Ints, devices: Ints, local: Floats, off: Floats) -> ResidualModel:
    """Fit to measurements, each with the logarithm of measured over predicted time."""
    at = nodes, devices, local
    doubt = _DOUBT**2 * np.eye(len(off))
    weights = np.linalg.solve(_covariance(at, at) + doubt, off)
    return ResidualModel(
        nodes=tuple(nodes.tolist()),
        devices=tuple(devices.tolist()),
        local=tuple(local.tolist()),
        weights=tuple(weights.tolist()),
    )


def _covariance(at: tuple[Ints, Ints, Floats], known: tuple[Ints, Ints, Floats]) -> Floats:
    """Covariance of each point (leading axes) with each known point (the last axis)."""
    nodes, devices, local = (item[..., None] for item in at)
    # Within a node and between nodes, gradients are summed over different wires.
    is_alike = (nodes > 1) == (known[0] > 1)
    devices_away = np.abs(np.log(devices / known[1]))
    batch_away = np.log(local / known[2]) / _BATCH_REACH
    shape = _SHAPE_SPREAD**2 * np.exp(-devices_away / _SHAPE_REACH)
    batch = _BATCH_SPREAD**2 * np.exp(-devices_away / _BATCH_SHAPE_REACH - 0.5 * batch_away**2)
    return is_alike * (shape + batch)
