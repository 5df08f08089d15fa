"""The engine: a model, its optimiser and its batches, ready to step.

Built from a plan; everything optional (precision, averaging, penalties, clipping) is composed in
here, so that the loop stays the five lines it is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import AveragedModel

from yunlu.core.errors import DataError
from yunlu.training.checkpoint import state as states
from yunlu.training.checkpoint.files import Snapshot
from yunlu.training.data.batches import step_batches
from yunlu.training.data.order import StepOrder
from yunlu.training.optim.build import build_optimizer
from yunlu.training.optim.schedule import Plateau, rate
from yunlu.training.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.planning.plan import Plan
    from yunlu.spec.job import Job
    from yunlu.training.parts import Parts
    from yunlu.training.tasks.task import Batch


class Engine:
    """Holds everything that changes while training, and the moves of one step."""

    def __init__(self, job: Job, plan: Plan, parts: Parts) -> None:
        self.job, self.plan, self.task, self.splits = job, plan, parts.task, parts.splits
        self.device = torch.device(plan.device)
        self.model = parts.model.to(self.device)
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        train = job.train
        self.optimizer = build_optimizer(
            self.model, train.optimizer, lr=plan.lr, weight_decay=plan.weight_decay, l2=train.l2
        )
        self.precision = Precision(plan.precision, self.device)
        self.average = _average(self.model, train.ema) if train.ema else None
        self.plateau = Plateau(factor=train.schedule.factor, patience=train.schedule.patience)
        self.order = StepOrder(samples=len(parts.splits.train), batch=plan.batch, seed=train.seed)
        self.steps_done = 0
        if plan.compile != "none":
            self.model.compile()  # in place: the names of the weights stay as they are

    def batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step still to do; resumes where the last life stopped."""
        return step_batches(
            self.splits.train,
            self.task.collate,
            self.order,
            micro_batch=self.plan.micro_batch,
            first_step=self.steps_done,
            steps=self.plan.steps,
            workers=self.plan.workers,
        )

    def accumulate(self, micros: Sequence[Batch]) -> Tensor:
        """Forward and backward over the micro-batches; the mean loss over their true count."""
        items = sum(micro.items for micro in micros)
        if items == 0:
            raise DataError(
                f"Step {self.steps_done + 1} holds nothing to learn from: every target is ignored.",
                hint="Raise train.batch, or clean the data of empty samples.",
            )
        total = torch.zeros((), device=self.device)
        for micro in micros:
            with self.precision.forward():
                loss, _ = self.task.loss(self.model, micro.to(self.device))
            # Divided by the count of the whole global batch, never by the micro-batch's own.
            share = loss / items
            self.precision.backward(share)
            total += share.detach()
        return total

    def clip(self) -> Tensor:
        """Add penalties, measure the gradient's norm, then bound it."""
        train = self.job.train
        self.precision.unscale(self.optimizer)
        if train.l1:
            for weight in self.weights:
                if weight.grad is not None:
                    weight.grad.add_(weight.detach().sign(), alpha=train.l1)
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        norm = get_total_norm(gradients)
        if train.clip.value is not None:
            clip_grad_value_(self.weights, train.clip.value)
        if train.clip.norm is not None:
            clip_grads_with_norm_(self.weights, train.clip.norm, norm)
        return norm

    def step(self) -> float:
        """Update the weights; returns the learning rate used."""
        lr = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.precision.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.steps_done += 1
        return lr

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
        state = {
            "aliases": aliases,
            "optimizer": optimizer_state,
            "random": random_state,
            "precision": self.precision.state(),
            "plateau": self.plateau.state(),
            "fingerprint": self.splits.fingerprint,
            "extra": extra,
        }
        return Snapshot(step=self.steps_done, tensors=tensors, state=state, metrics=metrics)

    def restore(self, snapshot: Snapshot) -> dict[str, Any]:
        """Continue from a snapshot; returns what the watchers had kept in it."""
        state = snapshot.state
        if state["fingerprint"] != self.splits.fingerprint:
            raise DataError(
                "The data has changed since this run began, so it cannot be resumed exactly.",
                hint="Bring the old data back, or start a new run on the new data.",
            )
        self.restore_weights(snapshot)
        states.restore_optimizer(self.optimizer, snapshot.tensors["optimizer"], state["optimizer"])
        self.precision.restore(state["precision"])
        self.plateau.restore(state["plateau"])
        self.steps_done = snapshot.step
        states.restore_random(snapshot.tensors["random"], state["random"])
        return state["extra"]

    def restore_weights(self, snapshot: Snapshot) -> None:
        """Only the weights, and their average."""
        aliases = snapshot.state["aliases"]
        states.restore_weights(self.model, snapshot.tensors["model"], aliases)
        if self.average is not None:
            states.restore_weights(self.average.module, snapshot.tensors["ema"], aliases)
            self.average.n_averaged.copy_(snapshot.tensors["ema_count"]["n"])

    def _learning_rate(self) -> float:
        share = rate(
            self.job.train.schedule,
            self.steps_done,
            steps=self.plan.steps,
            warmup_steps=self.plan.warmup_steps,
        )
        return self.plan.lr * share * self.plateau.scale


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
