"""The engine: a model, its optimiser and its batches, ready to step.

Built from a plan; everything optional (precision, averaging, penalties, clipping) is composed in
here, so that the loop stays the five lines it is about.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from yunlu.core.errors import DataError
from yunlu.core.rundir import EventKind
from yunlu.planning.large_batch import phases_of
from yunlu.training.checkpoint import state as states
from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.clipping import Clipper, measure_norm
from yunlu.training.compiler import (
    compile_model,
    compiled_call,
    run_xla_steps,
    set_compiled_call,
    xla_device,
)
from yunlu.training.data.batches import step_batches
from yunlu.training.data.growth import GrowingOrder
from yunlu.training.data.lengths import lengths_of
from yunlu.training.data.order import make_order
from yunlu.training.guard import Guard, Verdict
from yunlu.training.memory.recompute import apply_recompute
from yunlu.training.memory.release import ReleasingOptimizer, release_gradients
from yunlu.training.memory.shortage import (
    StepStart,
    free_memory,
    is_out_of_memory,
    let_go,
    smaller,
)
from yunlu.training.noise import NoiseScale
from yunlu.training.optim.build import build_optimizer
from yunlu.training.optim.schedule import Plateau, rate
from yunlu.training.precision import Precision
from yunlu.training.tasks.task import collate_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.parts import Parts
    from yunlu.training.tasks.task import Batch


_ADAPTING_STEPS = 20
"""Losses in a row that may overflow while modules are moved to full precision."""


class Engine:
    """Holds everything that changes while training, and the moves of one step."""

    def __init__(self, job: Job, plan: Plan, parts: Parts, tell: Callable[..., Any]) -> None:
        """``tell`` takes what happens inside a step: the run's log of events."""
        self.tell = tell
        self.job, self.plan, self.task, self.splits = job, plan, parts.task, parts.splits
        self.device = torch.device(plan.device) if plan.compile != "xla" else xla_device()
        self.model = parts.model.to(self.device)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.micro_batch = plan.micro_batch
        self._start = StepStart(self.model)
        train = job.train
        apply_recompute(self.model, plan.recompute, share=plan.recompute_share)
        self.optimizer, self.release = _make_optimizer(job, plan, self.model)
        self.average = _average(self.model, train.ema) if train.ema else None
        self.precision = Precision(plan.precision, self.device, adapt=plan.adapt_precision)
        self.precision.attach(self.model, *([self.average.module] if self.average else []))
        self.clipper = Clipper(train.clip)
        self.noise = NoiseScale(self.weights)
        # Released gradients have changed the weights before a step can be judged: only going back helps.
        released = {"spikes": None, "skips": 0} if train.gradient_release else {}
        self.guard = Guard(train.guard.model_copy(update=released))
        self.plateau = Plateau(factor=train.schedule.factor, patience=train.schedule.patience)
        self.lengths = lengths_of(parts.splits.train)
        self.order = _make_order(job, plan, self.lengths, samples=len(parts.splits.train))
        self.steps_done = 0
        self._overflows = 0
        if plan.compile == "none":
            set_compiled_call(self.model, None)
        elif compiled_call(self.model) is None:
            compile_model(self.model, plan.compile, self.device)

    def batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step still to do; resumes where the last life stopped."""
        return step_batches(
            self.splits.train,
            collate_for(self.task, self.plan.padding),
            self.order,
            micro_batch=self.micro_batch,
            first_step=self.steps_done,
            steps=self.plan.steps,
            workers=self.plan.workers,
            # Packed samples waste nothing, whatever their order.
            lengths=None if self.plan.padding == "pack" else self.lengths,
        )

    def accumulate(self, micros: Sequence[Batch]) -> Tensor | None:
        """Forward and backward over the micro-batches; the mean loss over their true count.

        None where memory ran out: what was done is undone, and micro-batches are smaller now.
        """
        items = sum(micro.items for micro in micros)
        if items == 0:
            raise DataError(
                f"Step {self.steps_done + 1} holds nothing to learn from: every target is ignored.",
                hint="Raise train.batch, or clean the data of empty samples.",
            )
        self._set_rate()
        self._start.mark()
        total: Tensor | None = None
        try:
            for micro in micros:
                with self.precision.forward():
                    loss, _ = self.task.loss(self.model, micro.to(self.device))
                # Divided by the count of the whole global batch, never by the micro-batch's own.
                # (As a gradient to begin with it would cost less, were there not an import with it.)
                share = loss / items
                self.precision.backward(share)
                total = share.detach() if total is None else total + share.detach()
        except Exception as error:
            if not self._shrink(error):
                raise
            return None
        return total

    def norm(self) -> Tensor:
        """Add penalties to the gradient, and measure it."""
        if self.release is not None:
            return self.release.norm
        self.precision.unscale(self.optimizer)
        if self.job.train.l1:
            for weight in self.weights:
                if weight.grad is not None:
                    weight.grad.add_(weight.detach().sign(), alpha=self.job.train.l1)
        return measure_norm(self._gradients())

    def judge(self, loss: Tensor, norm: Tensor) -> tuple[float, float, Verdict]:
        """Loss and norm as numbers, and whether this step may change the weights."""
        if self.device.type == "cpu":
            loss_value, norm_value = float(loss), float(norm)
        else:
            loss_value, norm_value = torch.stack((loss, norm)).tolist()  # one wait for the device
        if self._is_being_adapted(loss_value):
            return loss_value, norm_value, Verdict("skip", "overflow")
        verdict = self.guard.judge(
            self.steps_done, loss_value, norm_value, allow_overflow=self.precision.skips_overflow
        )
        return loss_value, norm_value, verdict

    def _is_being_adapted(self, loss: float) -> bool:
        """Whether a loss that overflowed is still the business of the adaptive precision."""
        if math.isfinite(loss) or self.precision.low_share is None:
            self._overflows = 0
            return False
        self._overflows += 1
        return self._overflows <= _ADAPTING_STEPS

    def update(self, norm: Tensor) -> bool:
        """Bound the gradient and change the weights; whether that was done, or overflow forbade."""
        if self.release is None:
            self.noise.observe(self.steps_done, self.order.size_of(self.steps_done))
            self.clipper.clip(self._gradients(), norm)
        is_applied = self.precision.step(self.optimizer)
        if not is_applied:
            self._start.bring_back_buffers()
        elif self.average is not None:
            self.average.update_parameters(self.model)
        self._end_step()
        return is_applied

    def leave_out(self) -> bool:
        """End a bad step with weights and running averages as they were."""
        self.precision.skip()
        self._start.bring_back_buffers()
        if self.release is not None:
            self.release.step()  # its weights have moved; a rollback follows
        self._end_step()
        return False

    def close(self) -> None:
        """Leave the model as it was given: it may be somebody's own."""
        if self.release is not None:
            self.release.close()
        self.precision.detach()
        apply_recompute(self.model, "none")
        set_compiled_call(self.model, None)

    def pass_over(self) -> None:
        """End a step that was bad before a rollback, without looking at its samples again."""
        self._set_rate()
        self._end_step()

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def _end_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1

    @property
    def best_view(self) -> nn.Module:
        """The weights to evaluate and export: the moving average where there is one."""
        return self.model if self.average is None else self.average.module

    def snapshot(self, *, metrics: dict[str, float], extra: dict[str, Any]) -> Snapshot:
        """A copy of everything, taken between two steps."""
        model, aliases = states.copy_weights(self.model)
        optimizer, optimizer_state = states.copy_optimizer(self.optimizer)
        random, random_state = states.copy_random()
        tensors = {"model": model, "optimizer": optimizer, "random": random}
        if self.average is not None:
            tensors["ema"], _ = states.copy_weights(self.average.module)
            tensors["ema_count"] = {"n": self.average.n_averaged.detach().clone()}
        tensors["noise"], noise_state = self.noise.state()
        state = {
            "aliases": aliases,
            "optimizer": optimizer_state,
            "random": random_state,
            "precision": self.precision.state(),
            "clipping": self.clipper.state(),
            "noise": noise_state,
            "guard": self.guard.state(),
            "plateau": self.plateau.state(),
            "micro_batch": self.micro_batch,
            "fingerprint": self.splits.fingerprint,
            "extra": extra,
        }
        return Snapshot(step=self.steps_done, tensors=tensors, state=state, metrics=metrics)

    def restore(self, snapshot: Snapshot) -> dict[str, Any]:
        """Continue from a snapshot; returns what the watchers had kept in it."""
        state, tensors = snapshot.state, snapshot.tensors
        if state["fingerprint"] != self.splits.fingerprint:
            raise DataError(
                "The data has changed since this run began, so it cannot be resumed exactly.",
                hint="Bring the old data back, or start a new run on the new data.",
            )
        self.restore_weights(snapshot)
        states.restore_optimizer(self.optimizer, tensors["optimizer"], state["optimizer"])
        self.precision.restore(state["precision"])
        self.clipper.restore(state["clipping"])
        self.noise.restore(tensors["noise"], state["noise"])
        self.guard.restore(state["guard"])
        self.plateau.restore(state["plateau"])
        self.micro_batch = state["micro_batch"]
        self.steps_done = snapshot.step
        states.restore_random(tensors["random"], state["random"])
        return state["extra"]

    def restore_weights(self, snapshot: Snapshot) -> None:
        """Only the weights, and their average."""
        aliases = snapshot.state["aliases"]
        states.restore_weights(self.model, snapshot.tensors["model"], aliases)
        if self.average is not None:
            states.restore_weights(self.average.module, snapshot.tensors["ema"], aliases)
            self.average.n_averaged.copy_(snapshot.tensors["ema_count"]["n"])

    def health(self) -> dict[str, float]:
        """Figures of the step just done that only some runs have, by their names in the log."""
        found = {
            "noise_scale": self.noise.value,
            "loss_scale": self.precision.scale,
            "low_share": self.precision.low_share,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def lr(self) -> float:
        """The learning rate of the step under way, or of the one just done."""
        return self.optimizer.param_groups[0]["lr"]

    def _set_rate(self) -> None:
        share = rate(
            self.job.train.schedule,
            self.steps_done,
            steps=self.plan.steps,
            warmup_steps=self.plan.warmup_steps,
        )
        lr = self.plan.lr * share * self.plateau.scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _shrink(self, error: Exception) -> bool:
        """Halve the micro-batch where memory ran out; false where that cannot help."""
        size = smaller(self.micro_batch)
        # Released gradients need the whole batch in one pass.
        if size is None or self.release is not None or not is_out_of_memory(error):
            return False
        message = str(error).partition("\n")[0][:200]
        let_go(error)
        self._start.bring_back()
        free_memory()
        self.micro_batch = size
        self.tell(
            EventKind.OUT_OF_MEMORY,
            step=self.steps_done + 1,
            micro_batch=self.micro_batch,
            message=message,
        )
        return True


def _make_optimizer(
    job: Job, plan: Plan, model: nn.Module
) -> tuple[Any, ReleasingOptimizer | None]:
    train = job.train

    def build(model: nn.Module) -> Any:
        return build_optimizer(
            model,
            train.optimizer,
            lr=plan.lr,
            weight_decay=plan.weight_decay,
            l2=train.l2,
            kernel=plan.kernel,
        )

    if not train.gradient_release:
        optimizer = build(model)
        if plan.compile == "xla":
            run_xla_steps(optimizer)
        return optimizer, None
    release = release_gradients(model, build, l1=train.l1, clip_value=train.clip.value)
    return release, release


def _make_order(job: Job, plan: Plan, lengths: Any, *, samples: int) -> GrowingOrder:
    epochs = plan.steps  # more than enough: no phase is cut off
    phases = phases_of(job.train.grow_batch, plan.batch, samples, epochs)
    return GrowingOrder(
        tuple(
            (
                first,
                make_order(samples, batch, job.train.seed, lengths=lengths, padding=plan.padding),
            )
            for first, batch in phases
        )
    )


def _average(model: nn.Module, decay: float) -> AveragedModel:
    def blend(averages: Any, current: Any, count: Any) -> None:
        # Early on the average follows closely, so that short runs do not end near the start.
        seen = int(count)
        weight = 1 - min(decay, (1 + seen) / (10 + seen))
        for average, value in zip(averages, current, strict=True):
            if average.is_floating_point():
                average.lerp_(value.to(average.dtype), weight)
            else:
                average.copy_(value)

    with torch.no_grad():
        return AveragedModel(model, multi_avg_fn=blend, use_buffers=True)
