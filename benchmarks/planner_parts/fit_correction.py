"""Learns what the formulas leave: boosted trees (scikit-learn), kept as plain arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.ensemble import GradientBoostingRegressor

from yunlu.planning.predict.intervals import Correction, Forest, feature_table, is_wide
from yunlu.planning.predict.step_time import step_time

if TYPE_CHECKING:
    from benchmarks.planner_parts.evidence import Evidence
    from yunlu.planning.predict.constants import Constants

ENOUGH_ROWS = 90
"""Below it a stack keeps the formulas alone."""
DEPTH = 4
TREES = 220
HANDS = 4
TRUST = (0.0, 0.5, 1.0)
OUTSIDERS = 0.6
"""Weight of rows of the stack's largest source beside its smaller ones."""


def learn(evidence: Evidence, rows: np.ndarray, constants: Constants) -> Correction:
    """Trees for every stack with enough chosen rows, as far as they help on models they did not see."""
    found: Correction = {}
    for stack in sorted(set(evidence.points.stack[rows].astype(int))):
        mine = np.flatnonzero(rows & (evidence.points.stack == stack))
        if len(mine) < ENOUGH_ROWS:
            continue
        points = evidence.points.take(mine)
        time = step_time(points, constants)
        measured_s = (
            points.batch
            * points.seq
            / (points.devices * evidence.measured[mine] / evidence.cores[mine])
        )
        left = np.log(measured_s / time.total_s)
        table, weight = feature_table(points, time), _weight(evidence, mine)
        near, wide = _trust(table, left, weight, evidence.model[mine], is_wide(points))
        if near or wide:
            found[stack] = _as_heaps(_grow(table, left, weight, TREES), near, wide)
    return found


def _grow(
    table: np.ndarray, left: np.ndarray, weight: np.ndarray, trees: int
) -> GradientBoostingRegressor:
    model = GradientBoostingRegressor(
        n_estimators=trees,
        learning_rate=0.1,
        max_depth=DEPTH,
        min_samples_leaf=4,
        subsample=0.7,
        loss="huber",
        random_state=0,
    )
    return model.fit(table, left, sample_weight=weight)


def _trust(
    table: np.ndarray, left: np.ndarray, weight: np.ndarray, model: np.ndarray, wide: np.ndarray
) -> tuple[float, float]:
    """How much of the correction to apply in a node and beyond: what is best on unseen models."""
    names = sorted(set(model))
    hand = np.array([names.index(name) % HANDS for name in model])
    told = np.zeros(len(left))
    for place in range(HANDS):
        test = hand == place
        if test.any() and not test.all():
            forest = _grow(table[~test], left[~test], weight[~test], TREES // 2)
            told[test] = forest.predict(table[test])
    return _best(left[~wide], told[~wide]), _best(left[wide], told[wide])


def _best(left: np.ndarray, told: np.ndarray) -> float:
    if len(left) < ENOUGH_ROWS // 3:
        return 0.0
    return min(TRUST, key=lambda trust: float(np.abs(left - trust * told).mean()))


def _weight(evidence: Evidence, mine: np.ndarray) -> np.ndarray:
    """Each source of the stack the same, but never a row more than it is."""
    source = evidence.source[mine]
    counts = {name: int((source == name).sum()) for name in set(source)}
    least = min(counts.values())
    return np.array([max(least / counts[name], OUTSIDERS) for name in source])


def _as_heaps(model: GradientBoostingRegressor, near: float, wide: float) -> Forest:
    inner, leaves = 2**DEPTH - 1, 2**DEPTH
    feature = np.zeros((TREES, inner), dtype=np.int64)
    threshold = np.full((TREES, inner), np.inf)
    leaf = np.zeros((TREES, leaves))
    for place, (estimator,) in enumerate(model.estimators_):
        _fill(estimator.tree_, (feature[place], threshold[place], leaf[place]), node=0, place=0)
    leaf *= model.learning_rate
    # JSON has no infinity; no feature is as large.
    threshold[np.isinf(threshold)] = 1e9
    return Forest(float(model.init_.constant_.ravel()[0]), feature, threshold, leaf, near, wide)


def _fill(
    tree: Any, heap: tuple[np.ndarray, np.ndarray, np.ndarray], *, node: int, place: int
) -> None:
    feature, threshold, leaf = heap
    inner = len(feature)
    if place >= inner:
        leaf[place - inner] = tree.value[node].ravel()[0]
        return
    if tree.children_left[node] < 0:
        # A leaf higher up: all its places below hold its value.
        for child in (2 * place + 1, 2 * place + 2):
            _fill(tree, heap, node=node, place=child)
        return
    feature[place], threshold[place] = tree.feature[node], tree.threshold[node]
    _fill(tree, heap, node=tree.children_left[node], place=2 * place + 1)
    _fill(tree, heap, node=tree.children_right[node], place=2 * place + 2)
