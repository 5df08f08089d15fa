"""Layout search: the fastest layout that fits, by hardware config and number of nodes. Pure.

Exhaustive: every layout, micro-batch, recomputation and precision of every hardware config is predicted, in NumPy
columns. On given hardware the fastest is also the cheapest, so one layout of each is enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.planning.predict.correction import correct
from yunlu.planning.predict.memory import peak_memory
from yunlu.planning.predict.query_batch import PRECISIONS, QueryBatch, make_queries
from yunlu.planning.predict.step_time import step_time
from yunlu.planning.search.grid import LAYOUT_COLUMNS, LayoutRules, enumerate_layouts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.hardware.device import Kind
    from yunlu.planning.plan import DatasetSize
    from yunlu.planning.predict.memory import PeakMemory, StateBytes
    from yunlu.planning.predict.query_batch import Column

    Indices = np.ndarray[Any, np.dtype[np.int64]]

USABLE = 0.97
"""Usable share of a device's memory: the driver needs the rest."""
EVALUATED = 1 / 3
"""Cost of an evaluation relative to training on a sample: the forward pass only."""
_AT_ONCE = 1 << 15
_FEW_CONFIGS = 48
_WIDTHS = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 1}
_BLOCK_COLUMNS = (
    *("memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "node_devices"),
    *("network_bytes_per_s", "reachable", "devices", "precision", "peak_flops"),
)
_CONFIG_COLUMNS = (
    *("memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "node_devices"),
    *("network_bytes_per_s", "reachable", "memory_factor"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredThroughput:
    """Measured runs of the same job on one device."""

    precision: str
    batch: float
    micro_batch: float
    recompute: float
    time: bool
    memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """Hardware that is predicted once, for all offers and prices."""

    device: str
    devices: int
    """Devices per node."""
    domain: int
    """Devices joined by the fast link: those of a node, or of a rack."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    peak_flops: Mapping[str, float]
    reachable: float = float("nan")
    """Measured share of its peak in large products."""
    most_nodes: int = 1 << 20
    is_here: bool = False
    """Whether it is this machine."""
    device_kind: Kind = "cuda"
    time_factor: float = 1.0
    """Measured over predicted time of runs on this hardware."""
    memory_factor: float = 1.0
    measured: MeasuredThroughput | None = None
    """Runs that these factors come from."""

    @property
    def node_limit(self) -> int:
        """Most nodes available."""
        return min(self.most_nodes, 1) if self.devices & (self.devices - 1) else self.most_nodes

    @property
    def kind(self) -> tuple[str, int, int, int, bool]:
        """Everything except the network between nodes."""
        return self.device, self.devices, self.domain, self.most_nodes, self.is_here


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWork:
    """Amount of training."""

    samples: float
    """Training samples in all."""
    seq: int
    """Tokens of one sample, as the model sees it."""
    evaluation_share: float = 0.0
    """Evaluation time as a share of training, independent of the batch."""
    evaluate_every: int | None = None
    """Every so many steps, on ``evaluation_samples`` each; in addition to the share."""
    evaluation_samples: float = 0.0
    data: DatasetSize | None = None
    """Samples of each split, where they are known."""
    epochs: float | None = None
    """Passes over the training data, where it is not a number of steps that is asked for."""
    columns: Mapping[str, float]
    """Model columns of a ``QueryBatch``."""
    state: StateBytes | None = None
    stack: int = 0

    @property
    def evaluated(self) -> float:
        """Equivalent training samples per step for evaluation, in addition to the share."""
        if self.evaluate_every is None:
            return 0.0
        return EVALUATED * self.evaluation_samples / self.evaluate_every

    def count_steps(self, batch: Column) -> Column:
        """Steps with each batch, as the planner counts them: every epoch ends with what is left."""
        if self.data is None or self.epochs is None:
            return np.ceil(self.samples / batch)
        return np.maximum(np.round(self.epochs * np.ceil(self.data.train / batch)), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutQuery:
    """What to search: work, hardware, and layout rules by precision."""

    work: TrainingWork
    configs: tuple[HardwareConfig, ...]
    rules: Mapping[str, LayoutRules] = field(default_factory=dict[str, LayoutRules])
    """By precision; precisions not named are not used."""
    most_devices: int
    least_devices: int = 1
    nodes: int | None = None
    """Fixed number of nodes, if given."""
    memory_share: float = USABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSearchResult:
    """The best layout of each hardware config and number of nodes, as columns."""

    points: QueryBatch
    config: Indices
    nodes: Indices
    looked_at: int
    tightest: tuple[int, int, float] | None
    """Where nothing fits: the nearest hardware config and devices, and the ratio to its memory."""

    def __len__(self) -> int:
        return len(self.config)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Ranges of points that share hardware, precision and number of nodes."""

    config: Indices
    nodes: Indices
    start: Indices
    """First row of its layouts in the table of all grids."""
    size: Indices
    columns: dict[str, Column]


def search(question: LayoutQuery) -> LayoutSearchResult:
    """Exhaustive search."""
    blocks, table = _make_blocks(question)
    winners: list[tuple[Indices, Indices, Column]] = []
    tightest: tuple[int, int, float] | None = None
    for first, last in _batches(blocks.size):
        block, row = _expand(blocks, first, last)
        points = _points(question.work, blocks, table, block, row)
        excess = predict_memory(points, question.work).high
        excess /= points.memory_bytes * question.memory_share
        excess *= blocks.columns["memory_factor"][block]
        fitting = excess <= 1.0
        if not fitting.all():
            index = int(np.argmin(excess))
            if tightest is None or excess[index] < tightest[2]:
                devices = int(points.devices[index])
                tightest = (int(blocks.config[block[index]]), devices, float(excess[index]))
        # What fits without recomputation is not recomputed; in a grid, less comes first.
        fitting[1:] &= ~(fitting[:-1] & (np.diff(points.recompute) > 0))
        block, row = block[fitting], row[fitting]
        if len(block):
            winners.append(_fastest(question, blocks, table, block, row))
    looked_at = int(blocks.size.sum())
    if not winners:
        empty = np.empty(0, dtype=np.int64)
        return LayoutSearchResult(points=_points(question.work, blocks, table, empty, empty), config=empty,
                     nodes=empty, looked_at=looked_at, tightest=tightest)  # fmt: skip
    block, row, run_s = (np.concatenate(part) for part in zip(*winners, strict=True))
    retained = _best_precision(blocks, block, run_s)
    block, row = block[retained], row[retained]
    return LayoutSearchResult(
        points=_points(question.work, blocks, table, block, row),
        config=blocks.config[block],
        nodes=blocks.nodes[block],
        looked_at=looked_at,
        tightest=None,
    )


def run_seconds(work: TrainingWork, points: QueryBatch, step_s: Column) -> Column:
    """Duration of all steps, with evaluations."""
    steps = work.count_steps(points.batch)
    return steps * step_s * (1.0 + work.evaluation_share + work.evaluated / points.batch)


def predict_steps(question: LayoutQuery, result: LayoutSearchResult) -> dict[str, Column]:
    """Step time by component, of each result."""
    time = step_time(result.points)
    factor = np.array([config.time_factor for config in question.configs])[result.config]
    is_timed = np.array(
        [config.measured is not None and config.measured.time for config in question.configs]
    )
    factor = factor * np.where(is_timed[result.config], 1.0, correct(result.points, time))
    return {name: part * factor for name, part in time.parts.items()}


def predict_memory(points: QueryBatch, work: TrainingWork) -> PeakMemory:
    """Peak memory of each point."""
    # Replicas of a shard hold the same: dp shards nothing there.
    zero = np.where(points.fsdp > 1, 0.0, points.zero)
    return peak_memory(points.with_columns(zero=zero), state=work.state)


def node_counts(config: HardwareConfig, question: LayoutQuery) -> list[int]:
    """Powers of two, and for little hardware three times those too: 1, 2, 3, 4, 6, ...

    Where the devices are said, the machines that come to just so many.
    """
    most = min(question.most_devices // config.devices, config.node_limit)
    given = question.nodes
    if given is None and question.least_devices == question.most_devices:
        given, rest = divmod(question.most_devices, config.devices)
        given = 0 if rest else given
    if given is not None:
        return [given] if 1 <= given <= most else []
    twos = {1 << power for power in range(most.bit_length())}
    is_fine = len(question.configs) <= _FEW_CONFIGS
    counts = twos | {3 * two for two in twos if 3 * two <= most and is_fine}
    return sorted(count for count in counts if count * config.devices >= question.least_devices)


def _make_blocks(question: LayoutQuery) -> tuple[_Blocks, dict[str, Column]]:
    grids: dict[tuple[int, int, str], tuple[int, int]] = {}
    tables: list[dict[str, Column]] = []
    total = 0
    entries: list[tuple[int, int, int, int, int, float]] = []
    for index, config in enumerate(question.configs):
        for precision in _precisions(question, config):
            for nodes in node_counts(config, question):
                devices = nodes * config.devices
                key = (devices, min(config.domain, devices), precision)
                if key not in grids:
                    grid = enumerate_layouts(devices, key[1], question.rules[precision])
                    grids[key] = (total, len(grid["dp"]))
                    tables.append(grid)
                    total += len(grid["dp"])
                start, size = grids[key]
                if size:
                    code = PRECISIONS.index(precision)
                    entries.append((index, nodes, start, size, code, config.peak_flops[precision]))
    table = {
        name: np.concatenate([grid[name] for grid in tables]) if tables else np.empty(0)
        for name in LAYOUT_COLUMNS
    }
    array = np.array(entries, dtype=np.float64).reshape(-1, 6)
    whole = array[:, :4].astype(np.int64)
    columns = _block_columns(question.configs, whole, array)
    return _Blocks(whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 3], columns), table


def _precisions(question: LayoutQuery, config: HardwareConfig) -> list[str]:
    """Allowed precisions, without any that another dominates in speed, memory and layouts."""
    allowed = [item for item in PRECISIONS if item in question.rules and item in config.peak_flops]
    return [
        item
        for item in allowed
        if not any(_beats(question, config, other, item) for other in allowed)
    ]


def _beats(question: LayoutQuery, config: HardwareConfig, precision: str, other: str) -> bool:
    """At least as fast, as narrow or as safe; and allows every layout of the other."""
    if config.peak_flops[precision] < config.peak_flops[other]:
        return False
    if (precision, other) == ("bf16", "fp16"):  # needs no loss scale, hence excludes less
        return True
    narrower = _WIDTHS[precision] < _WIDTHS[other]
    return narrower and question.rules[precision] == question.rules[other]


def _block_columns(configs: Sequence[HardwareConfig], whole: Any, array: Any) -> dict[str, Column]:
    def of_config(name: str) -> Column:
        source = "domain" if name == "node_devices" else name
        return np.array([getattr(config, source) for config in configs], dtype=np.float64)[
            whole[:, 0]
        ]

    columns = {name: of_config(name) for name in _CONFIG_COLUMNS}
    per_node = np.array([config.devices for config in configs], dtype=np.float64)[whole[:, 0]]
    return {**columns, "devices": per_node * whole[:, 1], "precision": array[:, 4],
            "peak_flops": array[:, 5]}  # fmt: skip


def _batches(sizes: Indices) -> list[tuple[int, int]]:
    """Ranges of blocks with enough points for one call, few enough for the cache."""
    spans: list[tuple[int, int]] = []
    first = count = 0
    for index, size in enumerate(sizes.tolist()):
        count += size
        if count >= _AT_ONCE or index == len(sizes) - 1:
            spans.append((first, index + 1))
            first, count = index + 1, 0
    return spans


def _expand(blocks: _Blocks, first: int, last: int) -> tuple[Indices, Indices]:
    """For every point of some blocks: its block, and its row in the table of layouts."""
    sizes = blocks.size[first:last]
    block = np.repeat(np.arange(first, last), sizes)
    begins = np.cumsum(sizes) - sizes
    row = np.arange(int(sizes.sum())) + np.repeat(blocks.start[first:last] - begins, sizes)
    return block, row


def _points(
    work: TrainingWork, blocks: _Blocks, table: Mapping[str, Column], block: Indices, row: Indices
) -> QueryBatch:
    return make_queries(
        len(block),
        **work.columns,
        **{name: table[name][row] for name in LAYOUT_COLUMNS},
        **{name: blocks.columns[name][block] for name in _BLOCK_COLUMNS},
        seq=float(work.seq),
        cp=1.0,
        ep=1.0,
        stack=float(work.stack),
    )


def _fastest(
    question: LayoutQuery,
    blocks: _Blocks,
    table: Mapping[str, Column],
    block: Indices,
    row: Indices,
) -> tuple[Indices, Indices, Column]:
    """Of each block's points, the one that finishes the work first."""
    points = _points(question.work, blocks, table, block, row)
    run_s = run_seconds(question.work, points, step_time(points).total_s)
    begins = np.flatnonzero(np.diff(block, prepend=-1))
    least = np.minimum.reduceat(run_s, begins)
    lengths = np.diff(begins, append=len(block))
    ties = np.flatnonzero(run_s <= np.repeat(least, lengths))
    _, first = np.unique(block[ties], return_index=True)
    chosen = ties[first]
    return block[chosen], row[chosen], run_s[chosen]


def _best_precision(blocks: _Blocks, block: Indices, run_s: Column) -> Indices:
    """The best precision of each hardware config and number of nodes."""
    order = np.lexsort((run_s, blocks.nodes[block], blocks.config[block]))
    pairs = np.stack([blocks.config[block], blocks.nodes[block]])[:, order]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    return order[is_first]
