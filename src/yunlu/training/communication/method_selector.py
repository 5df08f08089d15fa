"""Choice of the communication method, repeated when the links change.

Where predicted costs are close, two methods are timed and the faster is kept.
"""

from __future__ import annotations

import time
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from yunlu.core.errors import JobError
from yunlu.planning.communication.method_choice import (
    LinkMonitor,
    MethodQuery,
    Pinned,
    choose,
    find_faster_method,
    find_stragglers_to_exclude,
    renew,
    should_switch,
)
from yunlu.planning.communication.methods import BEFORE_ONE_BIT, METHODS, PACKINGS, keeps
from yunlu.planning.communication.step_forecast import MethodSetting
from yunlu.planning.communication.timing import CodecCost, SharedWork
from yunlu.runs.events import CommunicationChosen, MeasuredLinks
from yunlu.training.communication.codecs.codec import make_codec
from yunlu.training.communication.communicator import SyncCommunicator
from yunlu.training.communication.factory import open_communicator, start_step_of
from yunlu.training.communication.links import measure_links
from yunlu.training.communication.local_updates import METHODS as LOCAL_RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from yunlu.planning.communication.method_choice import MethodDecision
    from yunlu.planning.communication.step_forecast import StepForecast
    from yunlu.planning.communication.timing import WireFigures
    from yunlu.planning.plan import Plan
    from yunlu.spec.communication import CommunicationSpec
    from yunlu.spec.job import Job
    from yunlu.training.communication.codecs.codec import Codec
    from yunlu.training.communication.communicator import Communicator, ExpectedStep
    from yunlu.training.communication.engine_communication import ComputePace
    from yunlu.training.parallel.world import World


_WARMUP_STEPS = 4
"""Steps after a switch that are not timed: connections and caches are cold."""
_TIMED_STEPS = 8
STEPS_PER_METHOD = _WARMUP_STEPS + _TIMED_STEPS
"""Steps with each of the two."""


class TimedComparison:
    """Each worker times its own steps; all compare after the same step and decide alike.

    Args:
        first: The method in use.
        second: The method that may be as fast.
        step: Completed steps at the start.
    """

    def __init__(self, first: StepForecast, second: StepForecast, *, step: int) -> None:
        self.first, self.second = first, second
        self._began_step = step
        self._step_ends: list[float] = []
        self._medians: list[float] = []
        self.step_s: tuple[float, float] | None = None
        """Step time with each of them, averaged over the workers; None until the end."""

    def advance(self, world: World, step: int) -> Literal["continue", "switch", "done"]:
        """Called by all workers before each step; what to do before it."""
        self._step_ends.append(perf_counter())
        if step < self._began_step + STEPS_PER_METHOD:
            return "continue"
        spans = [
            late - early for early, late in zip(self._step_ends, self._step_ends[1:], strict=False)
        ]
        self._medians.append(median(spans[-_TIMED_STEPS:]))
        self._step_ends, self._began_step = [], step
        if len(self._medians) == 1:
            return "switch"
        sums = world.sum_over_all(torch.tensor(self._medians, dtype=torch.float64))
        first_s, second_s = (sums / world.layout.world).tolist()
        self.step_s = first_s, second_s
        return "done"

    @property
    def winner(self) -> StepForecast:
        """The method with the faster steps."""
        assert self.step_s is not None
        return self.first if self.step_s[0] <= self.step_s[1] else self.second

    def describe(self) -> str:
        """Result as text."""
        assert self.step_s is not None
        times = zip((self.first, self.second), self.step_s, strict=True)
        times_text = " and ".join(
            f"{forecast.setting.name} {s * 1e3:.4g} ms" for forecast, s in times
        )
        return f"{self.winner.setting.name}: timed, {times_text} a step"


_BACKWARD_SHARE = 0.6
_SLOW_BYTES_PER_S = 60e6
_MIN_INTERVAL_S = 30.0
"""Minimum time between two measurements while training; doubled when nothing changed."""


class MethodSelector:
    """Method selection on one worker: all workers measure, and decide alike.

    Args:
        job: The job.
        plan: The plan, with the predicted step time.
        emit: Receives events.
        pacer: Measures how fast this worker computes.
    """

    def __init__(self, job: Job, plan: Plan, emit: Callable[..., Any], pacer: ComputePace) -> None:
        self._job, self._plan, self._emit, self._pacer = job, plan, emit, pacer
        self._decision: MethodDecision | None = None
        self._measurements: WireFigures | None = None
        self._monitor: LinkMonitor | None = None
        self._interval_s = _MIN_INTERVAL_S
        self._measured_at = 0.0
        self._pending_event: dict[str, Any] | None = None
        """Decision not yet reported."""
        self._reported_setting: MethodSetting | None = None
        self.switch_at: int | None = None
        """Step after which the communicator is opened again."""
        self.excluded: tuple[int, ...] = ()
        """Ranks of stragglers to exclude at the next opportunity."""
        self._exclusion_reason = ""
        self._comparison: TimedComparison | None = None
        self._is_comparing = False
        """Whether the communicator is reopened by a comparison, not because workers came or went."""

    @property
    def setting(self) -> MethodSetting | None:
        """The current setting."""
        return None if self._decision is None else self._decision.setting

    @property
    def switches_to_async(self) -> bool:
        """Whether asynchronous training was chosen: these workers are replaced by others."""
        is_chosen = self.setting is not None and self.setting.method == "asynchronous"
        return is_chosen and self._job.communication.method == "auto"

    def open(
        self,
        world: World,
        model: nn.Module,
        expected: Callable[[int], ExpectedStep],
        *,
        steps_done: int,
    ) -> Communicator:
        """Open the communicator of a world; called by all workers."""
        spec = self._job.communication
        if not self._is_comparing:
            self._comparison = None  # new workers may have missed a part of it
        self._is_comparing = False
        if self._measurements is None or self._measurements.hosts != world.hosts:
            self.excluded, self._exclusion_reason = (), ""  # ranks of the previous world
        if world.layout.is_single:
            return SyncCommunicator(world)
        reason = _fixed_method_reason(world, model)
        if reason is not None:
            _check_auto(spec, reason)
            self._report_unmeasured(MethodSetting(method="all-reduce"), reason)
            return SyncCommunicator(world)
        setting = self._choose(world, model, steps_done=steps_done)
        if self.switches_to_async:
            return SyncCommunicator(world)  # not used for any step
        if setting.method not in _available(world):
            raise JobError(
                f"communication: {setting.method} cannot be used with layout {world.layout}"
                + (" and zero1." if world.layout.zero1 else "."),
                hint="Workers that step on their own need the complete optimizer state: remove zero1.",
            )
        setting = self._starting_setting(setting, steps_done)
        return open_communicator(
            setting,
            spec,
            world,
            model,
            expected,
            is_slow=self._has_slow_links(world),
            clip_norm=_clip_norm(self._job, self._plan),
        )

    def _starting_setting(self, setting: MethodSetting, steps_done: int) -> MethodSetting:
        """Setting to start with, if the method begins later."""
        start = start_step_of(
            setting,
            self._job.communication,
            steps=self._plan.steps,
            memory_steps=_memory_steps(self._job),
        )
        self.switch_at = start if steps_done < start else None
        if self.switch_at is None:
            return setting
        if setting.codec == "onebit":
            return setting.model_copy(update={"codec": BEFORE_ONE_BIT})
        return MethodSetting(method="all-reduce", bucket_bytes=setting.bucket_bytes)

    def record(self, exchange_s: float) -> bool:
        """Record the time of an exchange; whether to measure the links again."""
        if self._monitor is None:
            return False
        self._monitor = self._monitor.note(exchange_s)
        waited_s = time.monotonic() - self._measured_at
        return self._monitor.has_changed and waited_s > self._interval_s

    def reconsider(self, world: World, *, steps_done: int) -> bool:
        """Measure again; returns whether another method was chosen. Called by all workers in the same step."""
        previous = self._decision
        assert previous is not None
        measurements = self._measure(world)
        switched = should_switch(previous, measurements, steps_left=self._plan.steps - steps_done)
        self._interval_s *= 2
        decision = switched or renew(previous, measurements)
        self._find_stragglers(world, decision, measurements, steps_done=steps_done)
        if switched is None and not self.excluded:
            self._begin_monitor(previous)
            return False
        self._adopt(decision, measurements)
        if switched is None:
            return False
        self._begin_comparison(switched, steps_done=steps_done)
        self._is_comparing = True
        return True

    def advance_comparison(self, world: World, step: int) -> bool:
        """Called by all workers before every step; whether to use another method from now on."""
        comparison = self._comparison
        if comparison is None or self._decision is None:
            return False
        action = comparison.advance(world, step)
        if action == "continue":
            return False
        previous = self._decision
        if action == "switch":
            switched = comparison.second
            reason = f"{switched.setting.name}: timed against {comparison.first.setting.name}, whose predicted time is close"
        else:
            self._comparison = None
            switched, reason = comparison.winner, comparison.describe()
        assert self._measurements is not None
        decision = previous.model_copy(update={"chosen": switched, "reason": reason})
        self._adopt(decision, self._measurements)
        self._is_comparing = decision.setting != previous.setting
        return self._is_comparing

    def _begin_comparison(self, decision: MethodDecision, *, steps_done: int) -> None:
        self._comparison = None
        rival = find_faster_method(decision, steps_left=self._plan.steps - steps_done)
        if rival is not None:
            self._comparison = TimedComparison(decision.chosen, rival, step=steps_done)

    def _choose(self, world: World, model: nn.Module, *, steps_done: int) -> MethodSetting:
        spec = self._job.communication
        if len(set(world.hosts)) == 1 and (setting := _without_measuring(spec)) is not None:
            is_auto = spec.method == "auto"
            reason = "all workers are on one machine" if is_auto else "set by the job"
            self._report_unmeasured(setting, reason)
            return setting
        last = self._measurements
        if self._decision is not None and last is not None and last.hosts == world.hosts:
            return self._decision.setting
        measurements = self._measure(world)
        query = MethodQuery(
            work=_work_of(self._job, self._plan, model, self._plan.steps - steps_done),
            guarantee=spec.kept,
            pinned=_pinned(spec),
            available=_available(world),
            hindrances={"asynchronous": world.async_obstacle},
        )
        decision = choose(measurements, query)
        self._find_stragglers(world, decision, measurements, steps_done=steps_done)
        self._adopt(decision, measurements)
        self._begin_comparison(decision, steps_done=steps_done)
        return decision.setting

    def _find_stragglers(
        self, world: World, decision: MethodDecision, measurements: WireFigures, *, steps_done: int
    ) -> None:
        """Find stragglers to exclude, unless the job fixes the method."""
        self.excluded, self._exclusion_reason = (), ""
        is_auto = self._job.communication.method == "auto"
        if not (world.can_exclude_workers and is_auto) or decision.setting.method == "asynchronous":
            return
        switched = find_stragglers_to_exclude(
            decision, measurements, steps_left=self._plan.steps - steps_done
        )
        if switched is not None:
            self.excluded, self._exclusion_reason = switched.ranks, switched.reason

    def _has_slow_links(self, world: World) -> bool:
        measurements = self._measurements
        if measurements is None or measurements.hosts != world.hosts:
            return False
        return (
            min(*measurements.send_bytes_per_s, *measurements.receive_bytes_per_s)
            < _SLOW_BYTES_PER_S
        )

    def _measure(self, world: World) -> WireFigures:
        spec = self._job.communication
        names = [
            name
            for name in PACKINGS
            if name not in {"none", "powersgd"} and keeps(spec.kept, "all-reduce", name)
        ]
        if spec.codec not in {"auto", *PACKINGS}:
            names.append(spec.codec)  # from elsewhere: used only where it is named
        costs = list(measure_codecs(names, make_codec))
        if keeps(spec.kept, "all-reduce", "powersgd"):
            costs.append(measure_low_rank(spec.rank))
        spans = self._pacer.gather_step_times(world, planned_s=self._plan.prediction.step_s)
        transport = world.open_transport()
        try:
            return measure_links(
                transport,
                compute_s=spans[world.rank],
                all_reduce=_allreduce_bytes,
                codecs=costs,
                add_bytes_per_s=measure_adding(),
            )
        finally:
            transport.close()

    def announce(self, step: int) -> None:
        """Report the decision once its step is known; called on one worker."""
        if self._pending_event is not None:
            self._emit(CommunicationChosen(step=step, **self._pending_event))
        self._pending_event = None

    def _adopt(self, decision: MethodDecision, measurements: WireFigures) -> None:
        self._decision, self._measurements = decision, measurements
        self._begin_monitor(decision)
        self._pending_event = {
            "chosen": decision.setting.name,
            "setting": decision.setting.model_dump(),
            "guarantee": decision.question.guarantee,
            "reason": "; ".join(filter(None, (decision.reason, self._exclusion_reason))),
            "predicted": decision.chosen.model_dump(exclude={"setting"}),
            "candidates": [
                {
                    "name": candidate.setting.name,
                    "step_s": candidate.step_s,
                    "cost_s": candidate.cost_s,
                }
                for candidate in decision.candidates
            ],
            "refused": [candidate.model_dump() for candidate in decision.refused],
            "links": measurements.model_dump(include=set(MeasuredLinks.model_fields)),
            "excluded": self.excluded,
        }

    def _report_unmeasured(self, setting: MethodSetting, reason: str) -> None:
        if self._reported_setting == setting:
            return
        self._reported_setting = setting
        self._pending_event = {
            "chosen": setting.name,
            "setting": setting.model_dump(),
            "guarantee": self._job.communication.kept,
            "reason": reason,
        }

    def _begin_monitor(self, decision: MethodDecision) -> None:
        self._measured_at = time.monotonic()
        self._monitor = LinkMonitor(decision.chosen.one_exchange_s)


def _fixed_method_reason(world: World, model: nn.Module) -> str | None:
    """Why only torch's all-reduce can be used; None if there is a choice."""
    layout = world.layout
    if layout.dp != layout.world:
        return f"the layout {layout} has other axes than dp"
    if world.device.type != "cpu":
        return f"gradients lie on a {world.device.type} device"
    if any(weight.requires_grad and weight.dtype != torch.float32 for weight in model.parameters()):
        return "the weights are not in fp32"
    return None


def _available(world: World) -> tuple[str, ...]:
    return tuple(
        name
        for name, method in METHODS.items()
        if method.kind == "synchronous"
        or (method.kind == "local" and not world.layout.zero1)
        or (method.kind == "asynchronous" and not world.async_obstacle)
    )


def _check_auto(spec: CommunicationSpec, reason: str) -> None:
    if spec.method not in {"auto", "all-reduce"} or spec.codec not in {"auto", "none"}:
        raise JobError(
            f"communication: {spec} cannot be used: {reason}.",
            hint="Set communication to auto, or layout to replicas such as dp2, on a CPU.",
        )


def _clip_norm(job: Job, plan: Plan) -> float | None:
    norm = job.train.clip.norm
    # The fp16 loss scale is not known here; an adaptive norm is known only after the all-reduce.
    return None if norm == "adaptive" or plan.precision == "fp16" else norm


def _without_measuring(spec: CommunicationSpec) -> MethodSetting | None:
    """Setting within one machine; None if measuring may help."""
    if spec.method == "auto" and spec.codec == "auto" and spec.kept == "exact":
        return MethodSetting(method="all-reduce")
    if spec.method == "auto":
        return None
    codec = "none" if spec.codec == "auto" else spec.codec
    every = spec.every
    if every == "auto":
        every = LOCAL_RULES[spec.method].every if spec.method in LOCAL_RULES else 1
    return MethodSetting(method=spec.method, codec=codec, every=every, rank=spec.rank)


def _pinned(spec: CommunicationSpec) -> Pinned:
    codec = spec.codec
    if codec == "auto" and spec.method != "auto":
        codec = "none"
    return Pinned(
        method=None if spec.method == "auto" else spec.method,
        codec=None if codec == "auto" else codec,
        every=None if spec.every == "auto" else spec.every,
        rank=spec.rank,
    )


def _work_of(job: Job, plan: Plan, model: nn.Module, steps_left: int) -> SharedWork:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    step_s = plan.prediction.step_s
    return SharedWork(
        gradient_bytes=tuple(weight.nbytes for weight in reversed(weights)),
        compute_s=step_s,
        backward_s=_BACKWARD_SHARE * step_s / max(plan.accumulation, 1),
        matrices=tuple(
            (weight.shape[0], weight.numel() // weight.shape[0])
            for weight in weights
            if weight.ndim > 1
        ),
        can_freeze=job.train.optimizer.traits.can_freeze,
        memory_steps=_memory_steps(job),
        steps=steps_left,
    )


def _memory_steps(job: Job) -> int:
    return round(1 / max(1 - job.train.optimizer.betas[1], 1e-6))


def _allreduce_bytes(count: int) -> None:
    dist.all_reduce(torch.zeros(max(count // 4, 1)))


_FEW, _MANY = 1 << 10, 1 << 18
_TRIALS = 3


def measure_codecs(
    names: Iterable[str], make_codec: Callable[[str], Codec]
) -> tuple[CodecCost, ...]:
    """Seconds per value of each codec, the best of a few trials."""
    return tuple(_measure(name, make_codec(name)) for name in names)


def measure_adding() -> float:
    """Bytes per second of adding one array to another."""
    total, share = (np.ones(_MANY, dtype=np.float32) for _ in range(2))
    return total.nbytes / _best(lambda: np.add(total, share, out=total))


def measure_low_rank(rank: int = 4) -> CodecCost:
    """Cost of PowerSGD per matrix element: two products, and the reconstruction."""
    side = 512
    matrix = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    thin = torch.linalg.qr(matrix[:, :rank])[0]

    def pack() -> Tensor:
        first, _ = torch.linalg.qr(matrix @ thin)
        return matrix.T @ first

    def restore() -> Tensor:
        return thin @ thin.T

    return CodecCost(
        name="powersgd",
        bytes_per_value=8 * rank / side,
        encode_s_per_value=_best(pack) / side**2,
        decode_s_per_value=_best(restore) / side**2,
    )


def _measure(name: str, codec: Codec) -> CodecCost:
    spans = {count: _time(codec, count) for count in (_FEW, _MANY)}
    (few_packed, few_unpacked), (packed, unpacked) = spans[_FEW], spans[_MANY]
    more = _MANY - _FEW
    return CodecCost(
        name=name,
        bytes_per_value=codec.size_bytes(_MANY) / _MANY,
        encode_s_per_value=max(packed - few_packed, 0.0) / more,
        decode_s_per_value=max(unpacked - few_unpacked, 0.0) / more,
        call_s=(few_packed + few_unpacked) / 2,
    )


def _time(codec: Codec, count: int) -> tuple[float, float]:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    data = torch.zeros(codec.size_bytes(count), dtype=torch.uint8)
    total = torch.zeros(count)
    packed = _best(lambda: codec.encode(values, data, seed=1))
    return packed, _best(lambda: codec.decode(data, total, add=True))


def _best(run: Callable[[], object]) -> float:
    run()  # warm up memory and threads
    spans: list[float] = []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        run()
        spans.append(time.perf_counter() - began)
    return min(spans)
