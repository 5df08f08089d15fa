"""Layout search: the fastest layout that fits, by hardware config and number of nodes. Pure.

Exhaustive: every layout, micro-batch, recomputation and precision of every hardware config is predicted, in NumPy
columns. On given hardware the fastest is also the cheapest, so one layout of each is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from yunlu.hardware.catalog import HERE
from yunlu.planning.predict.intervals import correct
from yunlu.planning.predict.memory import peak_memory
from yunlu.planning.predict.query_batch import PRECISIONS, QueryBatch, make_queries
from yunlu.planning.predict.step_time import step_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from yunlu.hardware.catalog import Catalog, Offer
    from yunlu.planning.plan import DatasetSize
    from yunlu.planning.predict.memory import PeakMemory, StateBytes
    from yunlu.planning.predict.query_batch import Column

    Indices = np.ndarray[Any, np.dtype[np.int64]]

LAYOUT_COLUMNS = (
    *("dp", "fsdp", "tp", "sequence", "pp", "virtual", "zero"),
    *("batch", "micro_batch", "recompute"),
)
"""Columns of a ``QueryBatch`` that a grid provides."""

_UNEVEN = 1.05
"""Where even splits exist, splits that compute so much more are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """Constraints on a layout, of the model and of the job."""

    batches: tuple[int, ...]
    tensor_ways: tuple[int, ...] = (1,)
    stages: int = 1
    """Most pipeline stages."""
    barred: frozenset[str] = frozenset()
    """Axes that stay 1; ``zero1`` where replicas cannot shard the optimiser state."""
    pinned: Mapping[str, int] = field(default_factory=dict[str, int])
    """Axes of fixed size."""
    zero1: tuple[bool, ...] = (False, True)
    """Values of zero1 to try; never used where it is barred."""
    stages_per_rank: tuple[int, ...] = (1, 2)
    sequence: bool = True
    """Sequence parallelism together with tensor parallelism."""
    micro_batch: int | None = None
    recompute: tuple[int, ...] = (0, 1, 2)

    def allows(self, axis: str, size: int) -> bool:
        """Whether an axis may have this size."""
        is_said = size == self.pinned.get(axis, size)
        return is_said and (size == 1 or axis not in self.barred)


def enumerate_layouts(devices: int, domain: int, rules: LayoutRules) -> dict[str, Column]:
    """All layouts of so many devices, of which each ``domain`` are joined by fast links."""
    splits = np.array(list(_splits(devices, domain, rules)), dtype=np.float64).reshape(-1, 6)
    parts = [_with_micro_batches(splits, batch, rules) for batch in rules.batches if len(splits)]
    if not parts:
        return {name: np.empty(0) for name in LAYOUT_COLUMNS}
    return {name: np.concatenate([part[name] for part in parts]) for name in LAYOUT_COLUMNS}


def _splits(devices: int, domain: int, rules: LayoutRules) -> Iterator[tuple[float, ...]]:
    """``dp, fsdp, tp, pp, virtual, zero`` of every factoring that the model and the job allow."""
    for tp in rules.tensor_ways:
        # tp communicates in every layer: its ranks share a node, or a fast-link domain.
        if devices % tp or domain % tp or not rules.allows("tp", tp):
            continue
        for pp in divisors(devices // tp):
            if pp > rules.stages or not rules.allows("pp", pp):
                continue
            replicas = devices // (tp * pp)
            if replicas > max(rules.batches):
                continue
            for fsdp in divisors(replicas):
                dp = replicas // fsdp
                if not (rules.allows("fsdp", fsdp) and rules.allows("dp", dp)):
                    continue
                for virtual in _virtual(pp, rules):
                    for zero in _zero(dp, fsdp, rules):
                        yield dp, fsdp, tp, pp, virtual, zero


def _virtual(pp: int, rules: LayoutRules) -> tuple[float, ...]:
    if pp == 1:
        return (1.0,)
    return tuple(float(item) for item in rules.stages_per_rank if item * pp <= rules.stages)


def _zero(dp: int, fsdp: int, rules: LayoutRules) -> tuple[float, ...]:
    """What replicas shard: everything under fsdp, else the optimiser state or nothing."""
    if fsdp > 1:
        return (3.0,)
    if dp == 1:
        return (0.0,)
    return tuple(float(item) for item in rules.zero1 if not item or "zero1" not in rules.barred)


def _with_micro_batches(splits: Any, batch: int, rules: LayoutRules) -> dict[str, Column]:
    """Each split with every micro-batch up to a replica's share, and every recomputation mode."""
    replicas = splits[:, 0] * splits[:, 1]
    share = np.ceil(batch / replicas)
    sizes = _micro_batches(int(share.max(initial=1.0)), rules)
    fits = (sizes[None, :] <= share[:, None]) & _is_even(batch, replicas)[:, None]
    if rules.micro_batch is not None:  # a given size is used as it is, in every pass
        fits &= batch % (replicas * rules.micro_batch)[:, None] == 0
    rows, columns = np.nonzero(fits)
    micro = sizes[columns]
    if rules.micro_batch is None:
        # Powers of two, and the whole share.
        whole = np.flatnonzero(_is_even(batch, replicas) & (np.log2(share) % 1 != 0))
        rows, micro = np.concatenate([rows, whole]), np.concatenate([micro, share[whole]])
    if 1 in rules.stages_per_rank:
        filled = _fills_pipe(splits[rows], np.ceil(share[rows] / micro))
        rows, micro = rows[filled], micro[filled]
    kinds = np.array(rules.recompute, dtype=np.float64)
    rows, micro = np.repeat(rows, len(kinds)), np.repeat(micro, len(kinds))
    recompute = np.tile(kinds, len(rows) // len(kinds))
    dp, fsdp, tp, pp, virtual, zero = splits[rows].T
    return {
        "dp": dp,
        "fsdp": fsdp,
        "tp": tp,
        "pp": pp,
        "virtual": virtual,
        "zero": zero,
        "sequence": (tp > 1).astype(np.float64) * rules.sequence,
        "batch": np.full(len(rows), float(batch)),
        "micro_batch": micro,
        "recompute": recompute,
    }


def _fills_pipe(splits: Any, passes: Column) -> Any:
    """Whether interleaved stages have enough micro-batches to fill the pipeline."""
    _, _, _, pp, virtual, _ = splits.T
    return (virtual == 1.0) | (passes >= pp)


def _is_even(batch: int, replicas: Column) -> Any:
    """Whether a batch is split evenly: the largest share decides the time."""
    waste = np.ceil(batch / replicas) * replicas / batch
    even = (replicas <= batch) & (waste <= _UNEVEN)
    return even if even.any() else replicas <= batch


def _micro_batches(most: int, rules: LayoutRules) -> Column:
    if rules.micro_batch is not None:
        return np.array([float(rules.micro_batch)])
    return 2.0 ** np.arange(most.bit_length())


def divisors(number: int) -> list[int]:
    """Divisors in order."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


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
    device_kind: str = "cuda"
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


class Price(NamedTuple):
    """One offer of a hardware config, on demand or spot."""

    config: int
    offer: Offer
    spot: bool

    @property
    def dollars_per_hour(self) -> float | None:
        """Of one node."""
        return self.offer.price(spot=self.spot)


def group_offers(
    catalog: Catalog, offers: Iterable[Offer], *, spot: bool
) -> tuple[tuple[HardwareConfig, ...], tuple[Price, ...]]:
    """The distinct hardware configs of some offers, and every price of each; of an instance, the lowest.

    What another hardware config of the same devices beats in network and price both is left out: it cannot win.
    """
    places: dict[tuple[str, int, float | None, int | None, bool], int] = {}
    configs: list[HardwareConfig] = []
    prices: dict[tuple[str, str, int, bool], Price] = {}
    for offer in offers:
        network, most = offer.network_bytes_per_s, offer.most_nodes
        kind = (offer.device, offer.devices, network, most, offer.cloud == HERE)
        if kind not in places:
            places[kind] = len(configs)
            configs.append(_hardware_config(catalog, offer))
        for is_spot in (False, True) if spot and offer.spot_dollars_per_hour else (False,):
            price = Price(places[kind], offer, is_spot)
            key = (offer.cloud, offer.instance, price.config, is_spot)
            if key not in prices or _rank(price) < _rank(prices[key]):
                prices[key] = price
    return _undominated(configs, list(prices.values()))


def _undominated(
    configs: list[HardwareConfig], prices: list[Price]
) -> tuple[tuple[HardwareConfig, ...], tuple[Price, ...]]:
    lowest = [[math.inf, math.inf] for _ in configs]
    for price in prices:
        ranks = lowest[price.config]
        ranks[price.spot] = min(ranks[price.spot], _rank(price))
    order = sorted(range(len(configs)), key=lambda index: -configs[index].network_bytes_per_s)
    best: dict[tuple[str, int, int, int, bool], list[float]] = {}
    retained: list[int] = []
    for index in order:
        config = configs[index]
        rivals = best.get(config.kind)
        if rivals is None or any(a < b for a, b in zip(lowest[index], rivals, strict=True)):
            retained.append(index)
            rivals = rivals or [math.inf, math.inf]
            best[config.kind] = [min(a, b) for a, b in zip(lowest[index], rivals, strict=True)]
    new = {index: count for count, index in enumerate(sorted(retained))}
    return (
        tuple(configs[index] for index in new),
        tuple(price._replace(config=new[price.config]) for price in prices if price.config in new),
    )


def _hardware_config(catalog: Catalog, offer: Offer) -> HardwareConfig:
    device, network = catalog.device(offer.device), catalog.network_bytes_per_s(offer)
    return HardwareConfig(
        device=device.name,
        devices=offer.devices,
        domain=catalog.linked_devices(offer),
        memory_bytes=float(device.memory_bytes),
        memory_bytes_per_s=device.memory_bytes_per_s,
        link_bytes_per_s=device.link_bytes_per_s or network,
        network_bytes_per_s=network,
        peak_flops=device.peak_flops,
        reachable=math.nan if device.reachable is None else device.reachable,
        most_nodes=offer.most_nodes or 1 << 20,
        is_here=offer.cloud == HERE,
        device_kind=device.kind,
    )


def _rank(price: Price) -> float:
    dollars = price.dollars_per_hour
    return float("inf") if dollars is None else dollars
