"""Communication of an engine: its communicator, across generations and changes of the links."""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from yunlu.planning.communication.timing import WorkerSpeed, is_doubtful, steps_of
from yunlu.training.communication.communicator import ExpectedStep, SyncCommunicator
from yunlu.training.data.sample_order import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.batch_schedule import BatchSchedule
    from yunlu.training.communication.communicator import Communicator
    from yunlu.training.communication.method_selector import MethodSelector
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest, StepTotals
    from yunlu.training.tasks.task import Batch


_BURST_S = 0.2
"""Long enough for CPU time slices, and for quotas per tenth of a second."""
_TRIES = 3
_REMEMBERED = 9
_SIDE, _VALUES = 192, 1 << 16


class ComputePace:
    """Compute speed of this worker, across changes of its peers."""

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=_REMEMBERED)
        """Time of the complete step of all replicas on this worker."""

    def record(self, seconds: float, replicas: int) -> None:
        """Record the forward and backward time of this worker's share of a step."""
        self._spans.append(seconds * replicas)

    def gather_step_times(self, world: World, *, planned_s: float) -> tuple[float, ...]:
        """Step time of each worker without communication; called by all workers, with equal results.

        Args:
            world: The workers.
            planned_s: Planned step time of the leader, used before the first step.
        """
        replicas = world.layout.replicas
        step_s = median(self._spans) / replicas if len(self._spans) == _REMEMBERED else None
        spans: list[float | None] = world.gather(step_s)
        if all(spans):
            return tuple(speed for speed in spans if speed is not None)
        best = 0.0
        speeds: list[WorkerSpeed] = []
        for _ in range(_TRIES):
            world.sum_over_all(torch.zeros(1))  # all compute at the same time, as in a step
            best = max(best, measure_turns())
            gathered = world.gather(WorkerSpeed(turns_per_s=best, step_s=step_s).model_dump())
            speeds = [WorkerSpeed.model_validate(speed) for speed in gathered]
            # Disturbances slow a worker down for a while: measure again.
            if not is_doubtful(speeds):
                break
        return steps_of(speeds, planned_s=planned_s)


def measure_turns(span_s: float = _BURST_S) -> float:
    """Matrix products and memory passes per second, with the threads of a step."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(_SIDE, _SIDE, generator=generator)
    values, product = torch.zeros(_VALUES), torch.empty(_SIDE, _SIDE)
    turns, began_at = 0, perf_counter()
    while (spent_s := perf_counter() - began_at) < span_s or not turns:
        torch.mm(matrix, matrix, out=product)
        values.add_(1.0)
        turns += 1
    return turns / spent_s


class EngineCommunication:
    """Communicator of an engine; it may be replaced between two steps.

    Args:
        job: The job.
        plan: The plan, with the predicted step time.
        model: Its weights are communicated.
        schedule: Samples of each step.
        emit: Receives events.
    """

    communicator: Communicator

    def __init__(
        self,
        job: Job,
        plan: Plan,
        model: nn.Module,
        schedule: BatchSchedule,
        emit: Callable[..., Any],
    ) -> None:
        self._job, self._plan, self._model = job, plan, model
        self._schedule, self._emit = schedule, emit
        self._selector: MethodSelector | None = None
        self._pacer = ComputePace()
        self._next_indices: tuple[int, Iterator[NDArray[np.int64]]] | None = None
        self._relink_request: StepRequest = ""
        self._samples = 0
        self._sent_before = 0
        self._token = ""
        """Token shared by the workers that chose the method together."""
        self.has_own_moments = False
        """Whether workers with separate optimizer states now step together."""

    @property
    def is_stepping_alone(self) -> bool:
        """Whether this worker computes steps without the others."""
        return self.world.layout.is_single or self.communicator.is_local_update

    @property
    def excluded(self) -> tuple[int, ...]:
        """Ranks of stragglers to exclude."""
        return () if self._selector is None else self._selector.excluded

    @property
    def is_excluded(self) -> bool:
        """Whether this worker is to be excluded."""
        return self.world.rank in self.excluded

    def join(self, world: World, step: int) -> None:
        """Join the workers of a world; called by all of them."""
        self._join(world, step, state={}, was_local_update=False)

    def join_next(self, world: World, step: int) -> None:
        """Join another world, or use another method, and keep the communication state."""
        previous, state = self.communicator, self.communicator.state()
        previous.close()
        self._join(world, step, state=state, was_local_update=previous.is_local_update)

    def _join(
        self, world: World, step: int, *, state: Mapping[str, Tensor], was_local_update: bool
    ) -> None:
        self.world = world
        reports = self._exchange_reports(
            step, has_state=bool(state), was_local_update=was_local_update
        )
        self.communicator = self._open(max(report["step"] for report in reports))
        is_local_update = self.communicator.is_local_update
        self.has_own_moments = not is_local_update and any(
            report["was_local_update"] for report in reports
        )
        if is_local_update:
            # The same state for all workers: that of the most advanced one.
            ranks = range(len(reports))
            holders = [
                rank
                for rank in ranks
                if reports[rank]["was_local_update"] and reports[rank]["has_state"]
            ]
            if holders:
                source = max(holders, key=lambda rank: (reports[rank]["step"], -rank))
                self.communicator.restore([self.world.broadcast_tensors(state, source)])
        elif state and not was_local_update:
            self.communicator.restore([state] * world.layout.world)

    def _exchange_reports(
        self, step: int, *, has_state: bool, was_local_update: bool
    ) -> list[dict[str, Any]]:
        """Exchange reports; if the workers did not choose their method together, all choose again."""
        setting = None if self._selector is None else self._selector.setting
        own = {
            "step": step,
            "has_state": has_state,
            "was_local_update": was_local_update,
            "chosen": [self._token, setting and setting.model_dump_json()],
            "token": secrets.token_hex(8),
        }
        if self.world.layout.is_single:
            return [own]
        reports: list[dict[str, Any]] = self.world.gather(own)
        if any(report["chosen"] != reports[0]["chosen"] for report in reports):
            self._selector = None
        self._token = reports[0]["token"]
        return reports

    def begin(self, step: int) -> None:
        """Begin after ``step`` steps; all workers hold the same weights."""
        self.communicator.begin(step)
        if self._selector is not None and self.world.is_leader:
            self._selector.announce(step)

    def sync_step(
        self, micros: Sequence[Batch], request: StepRequest, step: int
    ) -> tuple[StepTotals, bool]:
        """Totals and request of the step, and whether the communicator was replaced."""
        switch_at = None if self._selector is None else self._selector.switch_at
        is_switched = switch_at is not None and step >= switch_at
        if is_switched:
            self._reopen(step)
        is_switched = self._advance_comparison(step) or is_switched
        totals = self.communicator.sync_step(micros, request or self._relink_request, step)
        self._samples = self.communicator.samples
        self._relink_request = ""
        if totals.request == "relink":
            totals = replace(totals, request="")
            assert self._selector is not None
            if self._selector.reconsider(self.world, steps_done=step):
                self._reopen(step)
                is_switched = True
        if not totals.request and self._selector is not None and self._selector.switches_to_async:
            totals = replace(totals, request="serve")
        return totals, is_switched

    def _advance_comparison(self, step: int) -> bool:
        selector = self._selector
        if selector is None:
            return False
        if selector.advance_comparison(self.world, step):
            self._reopen(step)
            return True
        if self.world.is_leader:
            selector.announce(step)  # the comparison ended with the method in use
        return False

    def sum_loss(self, loss: Tensor) -> Tensor:
        """See ``Communicator``."""
        return self.communicator.sum_loss(loss)

    def record_exchange(self, exchange_s: float) -> None:
        """Record the time of a gradient exchange."""
        if self._selector is not None and self._selector.record(exchange_s):
            self._relink_request = "relink"

    def end_compute(self, begun_at: float) -> None:
        """Forward and backward of a step, begun then, are done: on the CPU."""
        self.record_compute(perf_counter() - begun_at)

    def record_compute(self, seconds: float) -> None:
        """Record the compute time of a step."""
        self._pacer.record(seconds, self.world.layout.replicas)

    def batch_of(self, step: int) -> int:
        """Number of samples in the gradient of this step, counted from 0."""
        return (
            self._samples
            if self.communicator.is_local_update
            else self._schedule.order.size_of(step)
        )

    def after_update(self, step: int) -> None:
        """The weights were updated in this step, counted from 1."""
        self.communicator.after_update(step, self._samples)
        exchange_s = self.communicator.exchange_s()
        if exchange_s is not None:
            self.record_exchange(exchange_s)

    def after_discarded(self, step: int) -> None:
        """The step was discarded."""
        self.communicator.after_discarded()
        if self.communicator.is_local_update:
            self.communicator.after_update(step, 0)

    def metrics(self) -> dict[str, float | None]:
        """Metrics of the exchanges since the last call."""
        return {
            "sent_bytes": self._count_sent(),
            "compression_error": self.communicator.error(),
        }

    def state(self) -> dict[str, Tensor]:
        """See ``Communicator``."""
        return self.communicator.state()

    def close(self) -> None:
        """Close the communicator."""
        self.communicator.close()

    def _open(self, step: int) -> Communicator:
        self._sent_before = 0
        if self.world.layout.is_single and self._selector is None:
            return SyncCommunicator(self.world)
        # Only workers with peers import the method selection; one that is left alone tells it so.
        from yunlu.training.communication.method_selector import MethodSelector  # noqa: PLC0415

        if self._selector is None:
            self._selector = MethodSelector(self._job, self._plan, self._emit, self._pacer)
        return self._selector.open(self.world, self._model, self._expected_step, steps_done=step)

    def _reopen(self, step: int) -> None:
        self.communicator.synchronize()
        self.join_next(self.world, step)
        self.begin(step)

    def _expected_step(self, step: int) -> ExpectedStep:
        if self._next_indices is None or self._next_indices[0] != step:
            self._next_indices = step, self._schedule.order.steps_from(step)
        number, order = self._next_indices
        self._next_indices = number + 1, order
        indices = next(order)
        return ExpectedStep(len(indices), digest_of(indices))

    def _count_sent(self) -> float | None:
        traffic = self.communicator.traffic()
        if traffic is None:
            return None
        previous, self._sent_before = self._sent_before, traffic.sent_bytes
        return float(traffic.sent_bytes - previous)
