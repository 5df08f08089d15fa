"""The engine: a model, its optimiser and its batches, ready to step.

Built from a plan; everything optional (precision, averaging, penalties, clipping) is composed in
here, so that the loop stays the five lines it is about.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from yunlu.core.errors import DataError
from yunlu.runs.events import MemoryExhausted
from yunlu.training.attempt import StopRequestedError
from yunlu.training.batch_schedule import BatchSchedule, Plateau
from yunlu.training.clipping import Clipper, measure_norm, measure_square
from yunlu.training.compiler import (
    compile_model,
    compiled_call,
    run_xla_steps,
    set_compiled_call,
    xla_device,
)
from yunlu.training.data.batches import BatchShard, lengths_of, step_batches
from yunlu.training.determinism import hold_host_random, return_host_random, seed_step
from yunlu.training.device import move_model, sum_type
from yunlu.training.device_feed import DeviceFeed
from yunlu.training.engine_state import EngineState
from yunlu.training.gradient_noise import NoiseScale
from yunlu.training.guard import Guard, StepVerdict
from yunlu.training.memory.gradient_release import ReleasingOptimizer, release_gradients
from yunlu.training.memory.out_of_memory import (
    StepRestorePoint,
    free_memory,
    is_out_of_memory,
    release_references,
    smaller,
)
from yunlu.training.memory.recompute import apply_recompute
from yunlu.training.optim.build import build_optimizer
from yunlu.training.optim.fused_adam import hold_moments
from yunlu.training.precision import Precision
from yunlu.training.single_worker import SingleCommunication, SingleModel, SingleWorld
from yunlu.training.step_clock import DeviceClock, make_step_clock
from yunlu.training.tasks.task import collate_for
from yunlu.training.tensor_slices import find_aliases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.communication.communicator import Communicator
    from yunlu.training.communication.engine_communication import EngineCommunication
    from yunlu.training.data.sample_order import RunOrder
    from yunlu.training.determinism import HostRandom
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest, StepTotals, WrappedModel
    from yunlu.training.tasks.task import Batch, TrainingInputs


def wrap_model(
    model: nn.Module, world: SingleWorld, communicator: Communicator | SingleCommunication
) -> WrappedModel:
    """Distribute a model over the workers; a single worker imports no parallel code."""
    if communicator.is_local_update and communicator.allreducer is not None:
        from yunlu.training.parallel.gradient_allreduce import SiteReplicas  # noqa: PLC0415 - as below

        return SiteReplicas(model, communicator.allreducer, bucket_bytes=communicator.bucket_bytes)
    if world.layout.is_single or communicator.is_local_update:
        return SingleModel(model)
    from yunlu.training.parallel.parallel_model import ParallelModel  # noqa: PLC0415 - slow to import
    from yunlu.training.parallel.world import World  # noqa: PLC0415 - as above

    assert isinstance(world, World)
    return ParallelModel(
        model, world, communicator.allreducer, bucket_bytes=communicator.bucket_bytes
    )


def average_buffers(world: SingleWorld, model: nn.Module, average: AveragedModel | None) -> None:
    """Average buffers and the moving average over all workers: each updates its own copy."""
    averaged = [] if average is None else average.module.state_dict().values()
    world.average([*model.buffers(), *averaged])


def make_optimizer(
    job: Job, plan: Plan, model: nn.Module, weights: Sequence[Tensor]
) -> tuple[Any, ReleasingOptimizer | None]:
    """The optimiser over the weights this worker updates; also as gradient release, if enabled."""
    train = job.train

    def build(trained: nn.Module | Sequence[Tensor]) -> Any:
        return build_optimizer(
            trained,
            train.optimizer,
            lr=plan.lr,
            weight_decay=plan.weight_decay,
            l2=train.l2,
            kernel=plan.kernel,
            freezable=job.communication.kept != "exact",
        )

    if not train.gradient_release:
        optimizer = build(weights)
        if plan.compile == "xla":
            run_xla_steps(optimizer)
        return optimizer, None
    release = release_gradients(model, build, l1=train.l1, clip_value=train.clip.value)
    return release, release


class WeightAverage(AveragedModel):
    """A moving average of a model's weights and buffers.

    torch's own update brings its count to the device and back in every step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take in the weights of a step."""
        updates = int(self.n_averaged)  # a tensor of the host
        # Early on the average follows closely, so that short runs do not end near the start.
        weight = 1 - min(self._decay, (1 + updates) / (10 + updates)) if updates else 1.0
        averages = chain(self.module.parameters(), self.module.buffers())
        for average, value in zip(
            averages, chain(model.parameters(), model.buffers()), strict=True
        ):
            if updates and average.is_floating_point():
                average.lerp_(value.to(average.dtype), weight)
            else:
                average.copy_(value)
        self.n_averaged += 1


def make_average(model: nn.Module, decay: float) -> AveragedModel:
    """A moving average of a model's weights."""
    with torch.no_grad():
        return WeightAverage(model, decay)


_LONG_STEP_S = 0.005
"""A stop ends such a step halfway, which costs each of them some 10 microseconds."""
_ADAPTING_STEPS = 20
"""Overflowing losses in a row that are tolerated while modules move to full precision."""


class Engine:
    """Holds all state that changes while training, and the phases of one step."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        inputs: TrainingInputs,
        emit: Callable[..., Any],
        *,
        world: World | None = None,
        optimizer_of: Callable[..., tuple[Any, Any]] = make_optimizer,
    ) -> None:
        """``emit`` receives events that occur inside a step; ``world`` is given in a worker group."""
        self.emit = emit
        self.job, self.plan, self.task, self.splits = job, plan, inputs.task, inputs.splits
        self.metrics = inputs.metrics
        self.device = torch.device(plan.device) if plan.compile != "xla" else xla_device()
        self.world: SingleWorld = world or SingleWorld(device=self.device)
        # Of a model that is cut, only a worker's part is moved to its device: the whole may not fit.
        is_whole = self.world.layout.is_replicated
        self.model = move_model(inputs.model, self.device) if is_whole else inputs.model
        self.micro_batch = plan.micro_batch
        train = job.train
        apply_recompute(self.model, plan.recompute, share=plan.recompute_share)
        aliases = find_aliases(self.model)
        self.steps_done = self._overflows = self._items = 0
        # Packed samples have no padding, whatever their order.
        self.lengths = None if plan.padding == "pack" else lengths_of(inputs.splits.train)
        samples, replicas = len(inputs.splits.train), self.world.layout.replicas
        self.batch_schedule = BatchSchedule(
            job, plan, self.lengths, samples=samples, replicas=replicas
        )
        self.communication = self._open_communication(world)
        self._set_clock()
        self.wrapped = wrap_model(self.model, self.world, self.communication.communicator)
        self.weights = self.wrapped.leaves
        self._start = StepRestorePoint(*self.wrapped.parts)
        self.optimizer, self.release = optimizer_of(job, plan, self.model, self.wrapped.optimized)
        self.average = make_average(self.model, train.ema) if train.ema else None
        self.precision = Precision(
            plan.precision,
            self.device,
            adapt=plan.adapt_precision,
            keeps_lowered_weights=self.world.layout.fsdp == 1,
        )
        self.precision.attach(self.model, *([self.average.module] if self.average else []))
        self.clipper = Clipper(train.clip)
        self.noise = NoiseScale(self.weights, is_mixed=self.lengths is None)
        # Gradient release changes the weights before a step can be judged: only a rollback helps.
        released = {"spikes": None, "skips": 0} if train.gradient_release else {}
        self.guard = Guard(train.guard.model_copy(update=released))
        self.plateau = Plateau(factor=train.schedule.factor, patience=train.schedule.patience)
        self.state = EngineState(self, aliases)
        self._in_step = self.keeps_ledger = False
        self._feed: DeviceFeed | None = None
        self.is_inconsistent = False
        """Whether weights and optimiser state belong to different steps."""
        self.before_change: Callable[[], None] = _nothing
        """Called before weights change: a checkpoint may still be copying them."""
        self.note_waiting: Callable[..., None] = _nothing
        """Called before this worker waits for other workers, and after (``is_over``)."""
        self.requested_batch: Callable[[], int | None] = _nothing
        """Batch size requested while the run goes on."""
        self.interruptible: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context of a pass that a stop request may end; see ``StopRequest.interrupting``."""
        self._has_stepped = False
        self._random_before: HostRandom | None = None
        """The host's random state before the current step was fetched, where a stop may undo it."""
        if plan.compile == "none":
            set_compiled_call(self.model, None)
        elif compiled_call(self.model) is None:
            compile_model(self.model, plan.compile, self.device)

    def _open_communication(self, world: World | None) -> SingleCommunication | EngineCommunication:
        if world is None:
            return SingleCommunication(self.batch_schedule)
        # A single worker imports no code of worker groups.
        from yunlu.training.communication.engine_communication import EngineCommunication  # noqa: PLC0415

        group = EngineCommunication(self.job, self.plan, self.model, self.batch_schedule, self.emit)
        group.join(world, self.steps_done)
        return group

    def batches(self) -> Iterator[list[Batch]]:
        """Micro-batches of the remaining steps; resumes where the last attempt stopped."""
        steps = step_batches(
            self.splits.train,
            collate_for(self.task, self.plan.padding),
            self.order,
            micro_batch=self.micro_batch,
            first_step=self.steps_done,
            steps=self.batch_schedule.steps,
            workers=self.plan.workers,
            lengths=self.lengths,
            share=BatchShard(self.world.replica, self.world.layout.replicas),
            digests=self.keeps_ledger,
        )
        if not isinstance(self.clock, DeviceClock):
            return self._noting_random(steps)
        if self._feed is not None:
            self._feed.drop()
        self._feed = DeviceFeed(steps, self.device)
        return self._noting_random(self._feed)

    def _noting_random(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Fetching may draw random numbers, too: a step that is undone is fetched again."""
        while True:
            held = self.random_before_fetch or hold_host_random() if self._is_undoable else None
            self._random_before = held
            micros = next(steps, None)
            if micros is None:
                return
            yield micros

    @property
    def _is_undoable(self) -> bool:
        """Whether a stop may end the next step halfway. Short steps are made: undoing costs each a little."""
        is_long = not self._has_stepped or self.plan.prediction.step_s > _LONG_STEP_S
        return is_long and self.interruptible is not nullcontext and self.release is None

    def _set_clock(self) -> None:
        self.clock = make_step_clock(self.device, is_single=self.world.layout.is_single)
        """Splits the time of a step; None for one worker on the CPU, which only computes."""
        self.begin_compute: Callable[[], float] = perf_counter
        self.end_compute: Callable[[float], None] = self.communication.end_compute
        """Called around forward and backward, the second with what the first returned."""
        if isinstance(self.clock, DeviceClock):
            self.begin_compute, self.end_compute = self.clock.begin, self.clock.end_compute

    @property
    def random_before_fetch(self) -> HostRandom | None:
        """The host's random state before the step that was fetched ahead, if one was."""
        return None if self._feed is None else self._feed.random_before

    def sync_step(self, micros: Sequence[Batch], request: StepRequest = "") -> StepTotals:
        """Totals of the step over all workers, and whether one of them requests a stop."""
        self.note_waiting()
        totals, is_new = self.communication.sync_step(micros, request, self.steps_done)
        if is_new:
            self._wrap_again()
        self.note_waiting(is_over=True)
        return totals

    def synchronize(self) -> None:
        """Synchronise the weights before evaluating, saving or leaving; by all workers after the same step."""
        self.note_waiting()
        if self.communication.communicator.synchronize():
            average_buffers(self.world, self.model, self.average)
        self.note_waiting(is_over=True)

    def begin(self) -> None:
        """Start communication; called once all state is in place."""
        self.communication.begin(self.steps_done)
        if self.communication.has_own_moments:
            # Workers have different optimiser state: from now on their updates must be equal.
            self.optimizer.state.clear()
            self.communication.has_own_moments = False
        # On one worker too: a checkpoint of a worker group may have held them.
        hold_moments(self.optimizer, held=self.communication.communicator.holds_moments)

    def _wrap_again(self) -> None:
        self.wrapped.close()
        self.wrapped = wrap_model(self.model, self.world, self.communication.communicator)
        hold_moments(self.optimizer, held=self.communication.communicator.holds_moments)

    def accumulate(self, micros: Sequence[Batch], items: int) -> Tensor | None:
        """Forward and backward over the micro-batches; the mean loss over all items of the step.

        None if memory ran out: the step is undone, and the micro-batch is halved.
        """
        if items == 0 and self.communication.communicator.is_local_update:
            items = 1  # fewer samples than workers: this one has none
        if items == 0:
            raise DataError(
                f"Step {self.steps_done + 1} has no targets: every target is ignored.",
                hint="Raise train.batch, or clean the data of empty samples.",
            )
        self._items = items
        self._set_rate()
        if not self.world.layout.is_single:
            # Seeded by step: random numbers do not depend on the number of workers or on resuming.
            seed, replica = self.job.train.seed, self.world.replica
            seed_step(seed, self.steps_done, replica, self.device)
        self._start.mark()
        self._in_step = True
        interruptible = self.interruptible if self._random_before is not None else nullcontext
        try:
            with interruptible(), self.wrapped.step_context():
                accumulated = self.wrapped.accumulate(
                    micros,
                    self._loss_of,
                    self._backward_with_noise(micros),
                    forward=self.precision.forward,
                )
            self._has_stepped = True
            return accumulated
        except StopRequestedError:
            self._undo_step()
            raise
        except Exception as error:
            if not self._shrink(error):
                raise
            return None

    def _loss_of(self, model: nn.Module, micro: Batch) -> Tensor:
        loss, _ = self.task.loss(model, micro.to(self.device))
        # Divided by the items of the global batch, never by those of the micro-batch.
        return loss / self._items if micro.counts else loss * 0.0

    def _backward_with_noise(self, micros: Sequence[Batch]) -> Callable[[Tensor], None]:
        self.wrapped.is_watched = self.noise.is_due(self.steps_done)
        alone = micros if self.communication.is_stepping_alone else ()
        return self.noise.begin(self.steps_done, alone, self.precision)

    def norm(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce the gradient and add penalties; returns loss and gradient norm over all workers."""
        if self.release is not None:
            return loss, self.release.norm
        self.note_waiting()
        self.wrapped.finish()
        self.precision.unscale(self.optimizer)
        if self.job.train.l1:
            for weight in self.weights:
                if weight.grad is not None:
                    weight.grad.add_(weight.detach().sign(), alpha=self.job.train.l1)
        if self.communication.is_stepping_alone:
            loss, norm = self.communication.sum_loss(loss), measure_norm(self._gradients())
            self.note_waiting(is_over=True)
            return loss, norm
        share = loss.to(sum_type(loss.device)) / self.world.layout.tp
        local = (
            share,
            measure_square(self.weights, self.wrapped.copies),
            *self.wrapped.gradient_squares(),
        )
        if self.clock is not None:
            self.clock.exchanged()
        sums = self.world.sum_over_all(torch.stack(local))
        self.noise.hold(sums[2:], replicas=self.world.layout.replicas)
        self.communication.record_exchange(self.wrapped.exchange_s)
        self.note_waiting(is_over=True)
        return sums[0].float(), sums[1].sqrt().float()

    def _measure_norm(self) -> Tensor:
        if self.communication.is_stepping_alone:
            return measure_norm(self._gradients())
        local_square = measure_square(self.weights, self.wrapped.copies)
        return self.world.sum_over_all(local_square).sqrt().float()

    def judge(self, loss: Tensor, norm: Tensor) -> tuple[float, float, StepVerdict]:
        """Loss and norm as numbers, and the guard's verdict on the step."""
        if self.device.type == "cpu":
            loss_value, norm_value = float(loss), float(norm)
        else:
            loss_value, norm_value = self._read_from_device(loss, norm)
        if self._is_being_adapted(loss_value):
            return loss_value, norm_value, StepVerdict("skip", "overflow")
        verdict = self.guard.judge(
            self.steps_done, loss_value, norm_value, allow_overflow=self.precision.skips_overflow
        )
        if verdict.action == "rollback" and self.communication.communicator.is_local_update:
            verdict = StepVerdict("skip", verdict.reason)  # only all workers together can roll back
        return loss_value, norm_value, verdict

    def _read_from_device(self, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        """The only wait for the device in a step; what takes the host time comes before it."""
        clock = self.clock if isinstance(self.clock, DeviceClock) else None
        if self._feed is not None and clock is not None:
            self._feed.prepare()
            clock.fetched()
        parts, unread = [torch.stack((loss, norm))], self.noise.unread
        if unread is not None:
            parts.append(unread)
        loss_value, norm_value, *sums = torch.cat(parts).tolist()
        self.world.check_connected()  # the results of a sum that was ended are anything
        if unread is not None:
            self.noise.read(sums)
        if clock is not None:
            self.communication.record_compute(clock.compute_s)
        self.precision.note_norm(norm_value)
        return loss_value, norm_value

    def _is_being_adapted(self, loss: float) -> bool:
        """Whether the adaptive precision is still handling an overflow."""
        if math.isfinite(loss) or self.precision.low_share is None:
            self._overflows = 0
            return False
        self._overflows += 1
        return self._overflows <= _ADAPTING_STEPS

    def update(self, norm: Tensor) -> bool:
        """Clip the gradient and update the weights; false if an overflow prevented it."""
        if self.release is None:
            self.noise.observe(self.steps_done, self.communication.batch_of(self.steps_done))
            self.clipper.clip(self._gradients(), norm, self._measure_norm)
        self.before_change()
        self.is_inconsistent = self.world.layout.zero1
        is_applied = self.precision.step(self.optimizer)
        self.wrapped.publish()
        self.is_inconsistent = False
        if not is_applied:
            self._start.restore_buffers()
        elif self.average is not None:
            self.average.update_parameters(self.model)
        self._end_update(self.communication.after_update)
        self._end_step()
        return is_applied

    def discard_step(self) -> bool:
        """End a bad step without an update; restores the buffers."""
        self.precision.skip()
        self._start.restore_buffers()
        self._end_update(self.communication.after_discarded)
        if self.release is not None:
            self.release.step()  # its weights have changed; a rollback follows
        self._end_step()
        return False

    def close(self) -> None:
        """Remove all hooks from the model: it may belong to the user."""
        if self.release is not None:
            self.release.close()
        self.precision.detach()
        self.wrapped.close()
        self.communication.close()
        apply_recompute(self.model, "none")
        set_compiled_call(self.model, None)

    def abandon_step(self) -> None:
        """Undo the current step after losing other workers."""
        if self._in_step:
            self._start.restore_buffers()
            self.precision.skip()
        self._in_step = False
        self.optimizer.zero_grad(set_to_none=True)
        self.wrapped.drop_gradients()
        last_step = self.communication.communicator.abandon()
        self.steps_done = self.steps_done if last_step is None else last_step

    def rejoin(self, world: World, *, micro_batch: int) -> None:
        """Continue in another world with the state held here; only if each worker holds all of it.

        ``micro_batch``: of the plan; used under another layout, where more may fit.
        """
        if world.layout != self.world.layout:
            self.micro_batch = micro_batch
        self.world = world
        self._set_clock()
        assert not isinstance(self.communication, SingleCommunication)
        self.communication.join_next(world, self.steps_done)
        self._wrap_again()

    def _end_update(self, end_step: Callable[[int], None]) -> None:
        is_local_update = self.communication.communicator.is_local_update  # weights may be averaged
        if is_local_update:
            self.note_waiting()
        end_step(self.steps_done + 1)
        if is_local_update:
            self.note_waiting(is_over=True)

    def skip_step(self) -> None:
        """End a step that was bad before a rollback, without computing it."""
        self._set_rate()
        self._end_step()

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def _end_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.wrapped.drop_gradients()
        self._in_step = False
        self.steps_done += 1

    @property
    def order(self) -> RunOrder:
        """Which samples each step takes."""
        return self.batch_schedule.order

    @property
    def best_view(self) -> nn.Module:
        """The weights to evaluate and export: the moving average where there is one."""
        return self.wrapped.view if self.average is None else self.average.module

    def health(self) -> dict[str, float]:
        """Figures of the step just done that only some runs have, by their names in the log."""
        values = {
            **self.noise.figures(),
            "loss_scale": self.precision.scale,
            "low_share": self.precision.low_share,
            "exchange_s": self.wrapped.exchange_s or None,
            **self.communication.metrics(),
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def lr(self) -> float:
        """Learning rate of the current or the last step."""
        return self.optimizer.param_groups[0]["lr"]

    def _set_rate(self) -> None:
        lr = self.plan.lr * self.batch_schedule.rate_at(self.steps_done) * self.plateau.scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _undo_step(self) -> None:
        """Return to the state before the step was fetched: a stop request ended it halfway."""
        assert self._random_before is not None
        self._start.restore()
        return_host_random(self._random_before)
        self._in_step = False

    def _shrink(self, error: Exception) -> bool:
        """Halve the micro-batch after running out of memory; false if that cannot help."""
        if not self.world.layout.is_single:  # all workers would have to agree on another size
            return False
        size = smaller(self.micro_batch)
        # Gradient release needs the whole batch in one pass.
        if size is None or self.release is not None or not is_out_of_memory(error):
            return False
        message = str(error).partition("\n")[0][:200]
        release_references(error)
        self._start.restore()
        free_memory()
        self.micro_batch = size
        self.emit(
            MemoryExhausted(
                step=self.steps_done + 1,
                micro_batch=self.micro_batch,
                message=message,
            )
        )
        return True


def _nothing(*, is_over: bool = False) -> None:
    del is_over
