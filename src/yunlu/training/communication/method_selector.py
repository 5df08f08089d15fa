"""Chooses how workers communicate, and chooses again when the links are no longer what they were."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from yunlu.core.errors import JobError
from yunlu.planning.communication.measurements import SharedWork
from yunlu.planning.communication.method_choice import MethodQuery, Pinned, choose
from yunlu.planning.communication.methods import BEFORE_ONE_BIT, METHODS, PACKINGS, keeps
from yunlu.planning.communication.step_forecast import MethodSetting
from yunlu.planning.communication.straggler_exclusion import find_stragglers_to_exclude
from yunlu.planning.communication.switching import (
    LinkMonitor,
    find_faster_method,
    renew,
    should_switch,
)
from yunlu.runs.events import CommunicationChosen, MeasuredLinks
from yunlu.training.communication.codecs.make import make_codec
from yunlu.training.communication.communicator import SyncCommunicator
from yunlu.training.communication.costs import measure_adding, measure_codecs, measure_low_rank
from yunlu.training.communication.factory import open_communicator, start_of
from yunlu.training.communication.links import measure_links
from yunlu.training.communication.local.rules import METHODS as LOCAL_RULES
from yunlu.training.communication.timed_comparison import TimedComparison

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from yunlu.planning.communication.measurements import WireFigures
    from yunlu.planning.communication.method_choice import MethodDecision
    from yunlu.planning.plan import Plan
    from yunlu.spec.communication import CommunicationSpec
    from yunlu.spec.job import Job
    from yunlu.training.communication.communicator import Communicator, ExpectedStep
    from yunlu.training.communication.pace import Pacer
    from yunlu.training.parallel.world import World

_BACKWARD_SHARE = 0.6
_SLOW_BYTES_PER_S = 60e6
_LEAST_S = 30.0
"""Between two measurements while training; longer each time that nothing came of it."""


class MethodSelector:
    """One worker's side of the choice: every worker measures, and all come to the same.

    Args:
        job: What is asked.
        plan: How long a step should take.
        tell: Takes what was decided: the run's log of events.
        pacer: Knows how fast this worker computes.
    """

    def __init__(self, job: Job, plan: Plan, emit: Callable[..., Any], pacer: Pacer) -> None:
        self._job, self._plan, self._emit, self._pacer = job, plan, emit, pacer
        self._decision: MethodDecision | None = None
        self._figures: WireFigures | None = None
        self._watch: LinkMonitor | None = None
        self._patience_s = _LEAST_S
        self._measured_at = 0.0
        self._news: dict[str, Any] | None = None
        """What was decided and not told yet."""
        self._told: MethodSetting | None = None
        self.switch_at: int | None = None
        """After how many steps the communicator is to be opened anew."""
        self.excluded: tuple[int, ...] = ()
        """Ranks for whom the others had better not wait: they are to leave at the next chance."""
        self._aside_words = ""
        self._comparison: TimedComparison | None = None
        self._is_trying = False
        """Whether the communicator is opened anew by ``try_out``, and not because workers came or went."""

    @property
    def setting(self) -> MethodSetting | None:
        """What was chosen last."""
        return None if self._decision is None else self._decision.setting

    @property
    def is_to_be_served(self) -> bool:
        """Whether asynchronous workers were chosen: others than these, which are to make room."""
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
        """How the workers of a world communicate from now on; everyone calls this."""
        spec = self._job.communication
        if not self._is_trying:
            self._comparison = None  # not all who are here now need have seen the same of it
        self._is_trying = False
        if self._figures is None or self._figures.hosts != world.hosts:
            self.excluded, self._aside_words = (), ""  # ranks of another world
        if world.layout.is_single:
            return SyncCommunicator(world)
        reason = _against_choosing(world, model)
        if reason is not None:
            _check_unpinned(spec, reason)
            self._note_unmeasured(MethodSetting(method="all-reduce"), reason)
            return SyncCommunicator(world)
        setting = self._choose(world, model, steps_done=steps_done)
        if self.is_to_be_served:
            return SyncCommunicator(world)  # no step is made with it
        if setting.method not in _available(world):
            raise JobError(
                f"communication: {setting.method} cannot be used with layout {world.layout}"
                + (" and zero1." if world.layout.zero1 else "."),
                hint="Workers on their own each need all of the optimiser's state: remove zero1.",
            )
        setting = self._begin_phase(setting, steps_done)
        return open_communicator(
            setting,
            spec,
            world,
            model,
            expected,
            is_slow=self._has_slow_links(world),
            clip_norm=_clip_norm(self._job, self._plan),
        )

    def _begin_phase(self, setting: MethodSetting, steps_done: int) -> MethodSetting:
        """What to do now of a setting that is something else at first."""
        start = start_of(
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

    def note(self, exchange_s: float) -> bool:
        """Take in what an exchange took; true where the links should be measured again."""
        if self._watch is None:
            return False
        self._watch = self._watch.note(exchange_s)
        waited_s = time.monotonic() - self._measured_at
        return self._watch.has_changed and waited_s > self._patience_s

    def rethink(self, world: World, *, steps_done: int) -> bool:
        """Measure again; true where another way is chosen. Everyone calls this in the same step."""
        before = self._decision
        assert before is not None
        figures = self._measure(world)
        found = should_switch(before, figures, steps_left=self._plan.steps - steps_done)
        self._patience_s *= 2
        decision = found or renew(before, figures)
        self._find_aside(world, decision, figures, steps_done=steps_done)
        if found is None and not self.excluded:
            self._begin_watch(before)
            return False
        self._adopt(decision, figures)
        if found is None:
            return False
        self._begin_comparison(found, steps_done=steps_done)
        self._is_trying = True
        return True

    def try_out(self, world: World, step: int) -> bool:
        """Called before every step by all: true where another way is to be used from it on."""
        comparison = self._comparison
        if comparison is None or self._decision is None:
            return False
        heard = comparison.listen(world, step)
        if heard == "go on":
            return False
        before = self._decision
        if heard == "change":
            found, words = comparison.second, f"tried beside {comparison.first.setting.name}"
            words = f"{found.setting.name}: {words}, which is predicted to be about as fast"
        else:
            self._comparison = None
            found, words = comparison.winner, comparison.explain()
        assert self._figures is not None
        decision = before.model_copy(update={"chosen": found, "reason": words})
        self._adopt(decision, self._figures)
        self._is_trying = decision.setting != before.setting
        return self._is_trying

    def _begin_comparison(self, decision: MethodDecision, *, steps_done: int) -> None:
        self._comparison = None
        rival = find_faster_method(decision, steps_left=self._plan.steps - steps_done)
        if rival is not None:
            self._comparison = TimedComparison(decision.chosen, rival, step=steps_done)

    def _choose(self, world: World, model: nn.Module, *, steps_done: int) -> MethodSetting:
        spec = self._job.communication
        if len(set(world.hosts)) == 1 and (setting := _without_measuring(spec)) is not None:
            is_free = spec.method == "auto"
            reason = "all workers are on one machine" if is_free else "the job names it"
            self._note_unmeasured(setting, reason)
            return setting
        known = self._figures
        if self._decision is not None and known is not None and known.hosts == world.hosts:
            return self._decision.setting
        figures = self._measure(world)
        question = MethodQuery(
            work=_work_of(self._job, self._plan, model, self._plan.steps - steps_done),
            guarantee=spec.kept,
            pinned=_pinned(spec),
            available=_available(world),
            hindrances={"asynchronous": world.async_obstacle},
        )
        decision = choose(figures, question)
        self._find_aside(world, decision, figures, steps_done=steps_done)
        self._adopt(decision, figures)
        self._begin_comparison(decision, steps_done=steps_done)
        return decision.setting

    def _find_aside(
        self, world: World, decision: MethodDecision, figures: WireFigures, *, steps_done: int
    ) -> None:
        """Look for those who had better leave; where the job names the way, everybody takes it."""
        self.excluded, self._aside_words = (), ""
        is_free = self._job.communication.method == "auto"
        if not (world.can_exclude_workers and is_free) or decision.setting.method == "asynchronous":
            return
        found = find_stragglers_to_exclude(
            decision, figures, steps_left=self._plan.steps - steps_done
        )
        if found is not None:
            self.excluded, self._aside_words = found.ranks, found.reason

    def _has_slow_links(self, world: World) -> bool:
        figures = self._figures
        if figures is None or figures.hosts != world.hosts:
            return False
        return min(*figures.send_bytes_per_s, *figures.receive_bytes_per_s) < _SLOW_BYTES_PER_S

    def _measure(self, world: World) -> WireFigures:
        spec = self._job.communication
        names = [
            name
            for name in PACKINGS
            if name not in {"none", "powersgd"} and keeps(spec.kept, "all-reduce", name)
        ]
        costs = list(measure_codecs(names, make_codec))
        if keeps(spec.kept, "all-reduce", "powersgd"):
            costs.append(measure_low_rank(spec.rank))
        spans = self._pacer.compare(world, planned_s=self._plan.prediction.step_s)
        transport = world.open_transport()
        try:
            return measure_links(
                transport,
                compute_s=spans[world.rank],
                all_reduce=_sum_bytes,
                codecs=costs,
                add_bytes_per_s=measure_adding(),
            )
        finally:
            transport.close()

    def announce(self, step: int) -> None:
        """Tell what was decided, now that it is known after which step; one worker speaks for all."""
        if self._news is not None:
            self._emit(CommunicationChosen(step=step, **self._news))
        self._news = None

    def _adopt(self, decision: MethodDecision, figures: WireFigures) -> None:
        self._decision, self._figures = decision, figures
        self._begin_watch(decision)
        self._news = {
            "chosen": decision.setting.name,
            "setting": decision.setting.model_dump(),
            "guarantee": decision.question.guarantee,
            "reason": "; ".join(filter(None, (decision.reason, self._aside_words))),
            "predicted": decision.chosen.model_dump(exclude={"setting"}),
            "candidates": [
                {"name": each.setting.name, "step_s": each.step_s, "cost_s": each.cost_s}
                for each in decision.candidates
            ],
            "refused": [each.model_dump() for each in decision.refused],
            "links": figures.model_dump(include=set(MeasuredLinks.model_fields)),
            "excluded": self.excluded,
        }

    def _note_unmeasured(self, setting: MethodSetting, reason: str) -> None:
        if self._told == setting:
            return
        self._told = setting
        self._news = {
            "chosen": setting.name,
            "setting": setting.model_dump(),
            "guarantee": self._job.communication.kept,
            "reason": reason,
        }

    def _begin_watch(self, decision: MethodDecision) -> None:
        self._measured_at = time.monotonic()
        self._watch = LinkMonitor(decision.chosen.one_exchange_s)


def _against_choosing(world: World, model: nn.Module) -> str | None:
    """Why only torch's own sums can be used; none where there is a choice."""
    layout = world.layout
    if layout.dp != layout.world:
        return f"the layout {layout} is not one of replicas only"
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


def _check_unpinned(spec: CommunicationSpec, reason: str) -> None:
    if spec.method not in {"auto", "all-reduce"} or spec.codec not in {"auto", "none"}:
        raise JobError(
            f"communication: {spec} cannot be used: {reason}.",
            hint="Set communication to auto, or layout to replicas such as dp2, on a CPU.",
        )


def _clip_norm(job: Job, plan: Plan) -> float | None:
    norm = job.train.clip.norm
    # What fp16 scales by is not known here; a norm that adapts is known after the sum only.
    return None if norm == "adaptive" or plan.precision == "fp16" else norm


def _without_measuring(spec: CommunicationSpec) -> MethodSetting | None:
    """What to do within one machine; none where there is something to gain by measuring."""
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
        optimizer=job.train.optimizer.name,
        memory_steps=_memory_steps(job),
        steps=steps_left,
    )


def _memory_steps(job: Job) -> int:
    return round(1 / max(1 - job.train.optimizer.betas[1], 1e-6))


def _sum_bytes(count: int) -> None:
    dist.all_reduce(torch.zeros(max(count // 4, 1)))
