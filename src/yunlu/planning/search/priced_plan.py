"""The plan of a searched layout on priced hardware: a predicted profile through the planner. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from math import hypot
from typing import TYPE_CHECKING

import numpy as np

from yunlu.core.units import estimate_dollars, estimate_time, show_bytes, show_duration
from yunlu.hardware.catalog import HERE
from yunlu.planning.calibration import NOISE, Z_80
from yunlu.planning.layouts import Layout, SplitConstraints, worker_share
from yunlu.planning.plan import Choice, Hardware, Interval, Prediction, Profile, StepSettings
from yunlu.planning.planner import RunLength, decide
from yunlu.planning.predict.intervals import spread_factors
from yunlu.planning.predict.query_batch import PRECISIONS, RECOMPUTE
from yunlu.planning.search.layout_search import EVALUATED
from yunlu.planning.splitting import Split, optimizer_state_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from yunlu.planning.large_batch import Rule
    from yunlu.planning.plan import Plan
    from yunlu.planning.predict.memory import PeakMemory
    from yunlu.planning.predict.query_batch import Column, QueryBatch
    from yunlu.planning.search.layout_search import HardwareConfig, LayoutQuery, Price
    from yunlu.spec.job import Job, Objective


def time_factors(points: QueryBatch, configs: Sequence[HardwareConfig]) -> tuple[Column, Column]:
    """Of the step time of each point; of a measured point, only the difference between two runs."""
    slow, fast = spread_factors(points)
    noise = math.exp(Z_80 * NOISE["step_s"])
    is_timed = _is_same(
        points,
        configs,
        [config.measured is not None and config.measured.time for config in configs],
    )
    return np.where(is_timed, 1.0 / noise, 1.0 / fast), np.where(is_timed, noise, 1.0 / slow)


def memory_factors(
    points: QueryBatch, memory: PeakMemory, configs: Sequence[HardwareConfig]
) -> tuple[Column, Column]:
    """Of peak memory, likewise."""
    noise = math.exp(Z_80 * NOISE["memory_bytes"])
    is_held = _is_same(
        points,
        configs,
        [config.measured is not None and config.measured.memory for config in configs],
    )
    return (
        np.where(is_held, 1.0 / noise, memory.low_factor),
        np.where(is_held, noise, memory.high_factor),
    )


def _is_same(points: QueryBatch, configs: Sequence[HardwareConfig], is_known: list[bool]) -> Column:
    """Whether a point was measured: on one device, in the same precision and batches."""
    is_same = (points.devices == 1) & np.array(is_known, dtype=bool)
    runs = [config.measured for config in configs]
    code = np.array([-1 if run is None else PRECISIONS.index(run.precision) for run in runs])
    is_same &= points.precision == code
    for name in ("batch", "micro_batch", "recompute"):
        is_same &= getattr(points, name) == np.array([getattr(run, name, -1.0) for run in runs])
    return is_same


RATES_PER_HOUR = {"aws": 0.01, "gcp": 0.01, "azure": 0.01, "runpod": 0.03, "vast": 0.05}
"""Preemptions of one node per hour."""
USUAL_RATE_PER_HOUR = 0.02
RECOVERY_S = 420.0
"""Until another node is there and the last checkpoint is loaded."""
START_S = 300.0
"""From requesting a node in a cloud to the first step: found, booted, set up."""
START_HERE_S = 15.0
RATE_FACTOR = 3.0
"""80 % interval of the rates, as a factor: as much as they differ between regions."""
START_FACTOR = 2.0
"""Likewise of the start: images may be cached, or a node hard to find."""


def lost_share(cloud: str, *, nodes: float, checkpoint_s: float) -> float:
    """Share of each hour lost to interruptions: recovery, and half of a checkpoint interval."""
    rate = RATES_PER_HOUR.get(cloud, USUAL_RATE_PER_HOUR) * nodes
    return rate * (RECOVERY_S + checkpoint_s / 2) / 3600.0


MOST_LOST = 0.9
"""Most of an hour lost to interruptions: beyond, nothing is predicted."""


def start_seconds(price: Price, *, here_s: float = START_HERE_S) -> float:
    """Seconds until the first step; ``here_s`` on this machine."""
    return here_s if price.offer.cloud == HERE else START_S


def sum_up(
    price: Price,
    *,
    nodes: int,
    steps: int,
    step: Interval,
    evaluating: float,
    checkpoint_s: float,
    start_s: float,
) -> tuple[dict[str, float], Interval]:
    """Seconds by component, and in total.

    Step, start and interruptions err independently, so their errors add up as squares do.
    """
    lost = lost_share(price.offer.cloud, nodes=nodes, checkpoint_s=checkpoint_s) * price.spot
    run = step.times(steps * (1.0 + evaluating))
    whole = run.times(_longer(lost))
    start = _around(start_s, START_FACTOR)
    parts = {
        "start_up": start.value,
        "steps": steps * step.value,
        "evaluation": steps * step.value * evaluating,
        "interruptions": whole.value - run.value,
    }
    taken_back = Interval(
        value=whole.value,
        low=run.value * _longer(lost / RATE_FACTOR),
        high=run.value * _longer(lost * RATE_FACTOR),
    )
    return parts, _add(whole.value + start.value, (whole, start, taken_back))


def _add(value: float, parts: tuple[Interval, ...]) -> Interval:
    below = hypot(*(part.value - part.low for part in parts))
    above = hypot(*(part.high - part.value for part in parts))
    return Interval(value=value, low=value - below, high=value + above)


def _around(value: float, factor: float) -> Interval:
    return Interval(value=value, low=value / factor, high=value * factor)


def _longer(lost: float) -> float:
    return 1.0 / (1.0 - min(lost, MOST_LOST))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalLimits:
    """Budget and deadline."""

    budget: float | None = None
    deadline_s: float | None = None

    def excess(self, total_s: Column, dollars: Column) -> Column:
        """Ratio to the tighter limit; at most 1 where both are met."""
        worst = np.zeros(len(total_s))
        if self.budget is not None:  # without a price it is unknown whether it meets the budget
            worst = np.maximum(worst, np.where(np.isnan(dollars), np.inf, dollars / self.budget))
        if self.deadline_s is not None:
            worst = np.maximum(worst, total_s / self.deadline_s)
        return worst


def explain_excess(
    limits: GoalLimits, nearest: Plan, *, total_s: Column, dollars: Column
) -> tuple[str, ...]:
    """Which limit no option meets, or that none meets both, and how near the nearest comes."""
    hardware, cost = nearest.hardware, nearest.dollars
    price = "has no known price" if cost is None else f"costs {estimate_dollars(*cost.edges)[0]}"
    result = (
        f"the nearest, {hardware} ({hardware.devices} x {hardware.device}), {price} "
        f"and takes {estimate_time(*nearest.total_s.edges)[0]}."
    )
    results: list[str] = []
    budget, deadline_s = limits.budget, limits.deadline_s
    if budget is not None and not (dollars <= budget).any():
        results.append(f"goal.budget: nothing fits ${budget:,.2f}; {result}")
    if deadline_s is not None and not (total_s <= deadline_s).any():
        results.append(
            f"goal.deadline: nothing is done within {show_duration(deadline_s)}; {result}"
        )
    if not results and budget is not None and deadline_s is not None:
        both = f"${budget:,.2f} and {show_duration(deadline_s)}"
        results.append(f"goal.budget, goal.deadline: nothing keeps to {both} at once; {result}")
    return tuple(results)


POINT_COLUMNS = (
    *("dp", "fsdp", "tp", "pp", "virtual", "zero", "sequence", "batch", "micro_batch"),
    *("recompute", "precision"),
)
"""Columns of a ``QueryBatch`` that a plan is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionQuery:
    """Everything that options depend on."""

    job: Job
    question: LayoutQuery
    prices: tuple[Price, ...]
    objective: Objective
    limits: GoalLimits = field(default_factory=GoalLimits)
    counts_tokens: bool
    checkpoint_s: float = 60.0
    """Seconds between two checkpoints."""
    start_here_s: float = START_HERE_S
    """Start-up on this machine."""
    lr_scaling: Rule = "none"
    changed: frozenset[str] = frozenset()
    """Fields that were changed by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedLayout:
    """The layout that won on some nodes, and its predicted components."""

    nodes: int
    point: Mapping[str, float]
    memory_parts: dict[str, float]
    step_parts: dict[str, float]
    memory_factors: tuple[float, float]
    """10 % and 90 % quantile relative to the expected value."""
    time_factors: tuple[float, float]

    @property
    def layout(self) -> Layout:
        """As the engine builds it."""
        point, stages = self.point, int(self.point["virtual"])
        return Layout(
            dp=int(point["dp"]),
            fsdp=int(point["fsdp"]),
            tp=int(point["tp"]),
            pp=int(point["pp"]),
            sequence=bool(point["sequence"]),
            zero1=point["zero"] == 1.0,
            schedule="interleaved" if stages > 1 else "1f1b",
            stages_per_rank=stages,
        )


def make_priced_plan(ask: OptionQuery, price: Price, searched: SearchedLayout) -> Plan:
    """Decide the rest of a run as the worker would, from what is predicted of it."""
    hardware = priced_hardware(ask, price, searched.nodes)
    job, config = _with_scaling(ask), ask.question.configs[price.config]
    split = _split(ask, hardware, searched)
    hourly = "price unknown" if hardware.dollars_per_hour is None else (
        f"${hardware.dollars_per_hour:,.2f} an hour"
    )  # fmt: skip
    device = Choice(
        name="device",
        value=f"{config.device_kind} ({config.device})",
        reason=f"{hardware.devices} on {hardware}, {hourly}",
    )

    def predict(_: Profile, length: RunLength) -> Prediction:
        return _predict(ask, price, hardware, searched, length)

    return decide(
        job, _profile(ask, searched, split), split, hardware, device=device,
        kind=config.device_kind, cores=0, predict=predict,
    )  # fmt: skip


def priced_hardware(ask: OptionQuery, price: Price, nodes: int) -> Hardware:
    """So many nodes of an offer."""
    config, offer = ask.question.configs[price.config], price.offer
    dollars = price.dollars_per_hour
    return Hardware(
        cloud=offer.cloud,
        instance=offer.instance,
        region=offer.region,
        nodes=nodes,
        device=config.device,
        devices_per_node=config.devices,
        spot=price.spot,
        dollars_per_hour=None if dollars is None else dollars * nodes,
        memory_bytes=config.memory_bytes,
    )


def _with_scaling(ask: OptionQuery) -> Job:
    train = ask.job.train
    optimizer = train.optimizer.model_copy(update={"scaling": ask.lr_scaling})
    return ask.job.model_copy(update={"train": train.model_copy(update={"optimizer": optimizer})})


def _profile(ask: OptionQuery, searched: SearchedLayout, split: Split) -> Profile:
    """What the search predicts of the model, as a worker would measure it."""
    work, parts, share = ask.question.work, searched.step_parts, split.share
    ways, step_s = split.layout.tp * split.layout.pp, sum(searched.step_parts.values())
    data = work.data
    return Profile(
        basis="analytic",
        parameters=split.facts.parameters,
        trainable=split.facts.trainable,
        activation_bytes_per_sample=split.facts.activation_bytes_per_sample,
        probe_samples=share.micro_batch,
        probe_s=parts["compute"] * ways / share.micros,
        update_s=parts["optimizer"],
        own_s=parts["other"],
        load_s_per_sample=parts["input"] / split.batch,
        evaluate_s_per_sample=EVALUATED * step_s / split.batch,
        train_samples=round(work.samples) if data is None else data.train,
        validation_samples=0 if data is None else data.validation,
        test_samples=0 if data is None else data.test,
        startup_s=0.0,
        resident_bytes=0,
        settings=split.settings,
        reasons={},
        task_metric="",
        metrics=(),
        facts=split.facts,
    )


def _split(ask: OptionQuery, hardware: Hardware, searched: SearchedLayout) -> Split:
    point, layout = searched.point, searched.layout
    precision = PRECISIONS[int(point["precision"])]
    rules, columns = ask.question.rules[precision], ask.question.work.columns
    settings = StepSettings(
        threads=0,
        micro_batch=int(point["micro_batch"]),
        precision=precision,  # pyright: ignore[reportArgumentType]
        recompute=RECOMPUTE[int(point["recompute"])],  # pyright: ignore[reportArgumentType]
    )
    batch, trainable = int(point["batch"]), int(columns["trainable"])
    return Split(
        batch=batch,
        layout=layout,
        reason=_layout_reason(ask, hardware),
        devices=layout.world,
        facts=SplitConstraints(
            parameters=int(columns["parameters"]),
            trainable=trainable,
            state_bytes=optimizer_state_bytes(ask.job, trainable),
            activation_bytes_per_sample=searched.memory_parts["activations"] / point["micro_batch"],
            layers=rules.stages,
            tensor_ways=rules.tensor_ways,
        ),
        share=worker_share(layout, batch=batch, micro_batch=settings.micro_batch),
        settings=settings,
        reasons=_reasons(ask, hardware, searched),
        room_bytes=hardware.memory_bytes * ask.question.memory_share,
        process_bytes=searched.memory_parts["framework"],
    )


def _layout_reason(ask: OptionQuery, hardware: Hardware) -> str:
    if ask.job.layout.is_whole:
        return "as asked"
    if ask.changed & {"dp", "fsdp", "tp", "pp", "zero1"}:
        return "changed by hand"
    return f"the fastest that fits {hardware.devices} x {hardware.device}"


def _reasons(ask: OptionQuery, hardware: Hardware, searched: SearchedLayout) -> dict[str, str]:
    """Why each setting of a step is as it is."""
    held = sum(searched.memory_parts.values()) * searched.memory_factors[1]
    room = f"{show_bytes(held)} of {show_bytes(hardware.memory_bytes)} at most"
    batches = ask.question.rules[PRECISIONS[int(searched.point["precision"])]].batches
    reasons = {
        "micro_batch": f"the fastest that fits: {room}",
        "recompute": f"the least that fits: {room}",
        "precision": f"the fastest of {hardware.device} that the job allows",
    }
    if len(batches) > 1:
        reasons["batch"] = f"of {batches[0]} to {batches[-1]}, it finishes first"
    by_hand = {name: "changed by hand" for name in ask.changed if name in {*reasons, "batch"}}
    return reasons | by_hand


def _predict(
    ask: OptionQuery,
    price: Price,
    hardware: Hardware,
    searched: SearchedLayout,
    length: RunLength,
) -> Prediction:
    """Time and cost of a run of this length, with intervals."""
    work, batch = ask.question.work, length.batch
    step = _interval(sum(searched.step_parts.values()), searched.time_factors)
    pace = Interval(value=batch / step.value, low=batch / step.high, high=batch / step.low)
    tokens = pace.times(work.seq) if ask.counts_tokens else None
    total_parts, total = sum_up(
        price, nodes=searched.nodes, steps=length.steps, step=step, checkpoint_s=ask.checkpoint_s,
        evaluating=work.evaluation_share + work.evaluated / batch,
        start_s=start_seconds(price, here_s=ask.start_here_s),
    )  # fmt: skip
    memory = _interval(sum(searched.memory_parts.values()), searched.memory_factors)
    hourly = hardware.dollars_per_hour
    dollars = None if hourly is None else total.times(hourly / 3600)
    figures = {
        "memory_bytes": memory,
        "step_s": step,
        "samples_per_s": pace,
        "tokens_per_s": tokens,
        "total_s": total,
        "dollars": dollars,
    }
    return Prediction(
        basis="analytic",
        memory_bytes=memory.value,
        step_s=step.value,
        samples_per_s=pace.value,
        tokens_per_s=None if tokens is None else tokens.value,
        total_s=total.value,
        dollars=None if dollars is None else dollars.value,
        intervals={name: (item.low, item.high) for name, item in figures.items() if item},
        memory_parts=searched.memory_parts,
        step_parts=searched.step_parts,
        total_parts=total_parts,
    )


def _interval(value: float, factors: tuple[float, float]) -> Interval:
    return Interval(value=value, low=value * factors[0], high=value * factors[1])
