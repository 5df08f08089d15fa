"""Measure a model on this machine, in seconds, before the plan is made: numbers for the planner.

The very first samples of the run are used; weights, buffers and random numbers are put back, so
that measuring changes nothing in the training that follows.
"""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from yunlu.core.errors import ModelError, YunluError
from yunlu.planning.plan import Profile
from yunlu.planning.planner import MEMORY_SHARE, choose_batch, choose_micro_batch
from yunlu.training.checkpoint.state import (
    copy_random,
    copy_weights,
    restore_random,
    restore_weights,
)
from yunlu.training.data.order import StepOrder
from yunlu.training.optim.build import build_optimizer
from yunlu.training.precision import Precision
from yunlu.training.threads import choose_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from yunlu.catalog.machine import Machine
    from yunlu.spec.job import Job
    from yunlu.training.parts import Parts
    from yunlu.training.tasks.task import Batch, Splits, Task

_LOOK_SAMPLES = 8
_TIMED_S = 1.0
_TIMED_PASSES = 5


def measure(job: Job, parts: Parts, machine: Machine, *, started_at: float) -> Profile:
    """What the planner needs to know; ``started_at`` is when this life of the run began."""
    task, model, splits = parts.task, parts.model, parts.splits
    batch = choose_batch(job, len(splits.train))
    device = torch.device(machine.best_device.kind)
    order = StepOrder(samples=len(splits.train), batch=batch, seed=job.train.seed)
    indices = next(order.steps_from(0)).tolist()
    asked = job.train.precision
    precision = Precision("fp32" if asked == "auto" else asked, device)
    resident = psutil.Process().memory_info().rss if device.type == "cpu" else _weight_bytes(model)
    model.to(device)
    with _undone(model):
        model.train()
        look = _collate(task, splits, indices[:_LOOK_SAMPLES])[0].to(device)
        flops, activation_bytes = _look(task, model, look, precision)
        room = machine.best_device.memory_bytes * MEMORY_SHARE - resident
        micro = choose_micro_batch(
            job, batch=batch, room_bytes=room, bytes_per_sample=activation_bytes / look.samples
        )
        probe, load_s = _collate(task, splits, indices[:micro])
        probe = probe.to(device)

        def time_pass() -> float:
            return _time(lambda: _backward(task, model, probe, precision), device)

        weights = list(model.parameters())
        parameters = sum(weight.numel() for weight in weights)
        shape = (parameters, flops / look.samples, micro)
        threads = choose_threads(job, machine, shape=shape, time_pass=time_pass)
        probe_s = time_pass()
        optimizer = build_optimizer(model, job.train.optimizer, lr=0.0, weight_decay=0.0, l2=0.0)
        update_s = _time(optimizer.step, device)
        optimizer.zero_grad(set_to_none=True)
        metrics, evaluate_s = _score(task, model, probe, precision)
    return Profile(
        parameters=parameters,
        trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
        flops_per_sample=flops / look.samples if flops else None,
        activation_bytes_per_sample=activation_bytes / look.samples,
        probe_samples=probe.samples,
        probe_s=probe_s,
        update_s=update_s,
        load_s_per_sample=load_s / probe.samples,
        evaluate_s_per_sample=evaluate_s / probe.samples,
        train_samples=len(splits.train),
        validation_samples=len(splits.validation) if splits.validation is not None else 0,
        test_samples=len(splits.test) if splits.test is not None else 0,
        startup_s=time.time() - started_at,
        resident_bytes=resident,
        threads=threads.count,
        threads_gain=threads.gain,
        task_metric=task.metric,
        metrics=tuple(sorted(metrics)),
    )


@contextmanager
def _undone(model: nn.Module) -> Generator[None]:
    """Put weights, mode, gradients and random numbers back afterwards."""
    weights, mode, random = copy_weights(model), model.training, copy_random()
    try:
        yield
    finally:
        restore_weights(model, *weights)
        model.train(mode)
        model.zero_grad(set_to_none=True)
        restore_random(*random)


def _collate(task: Task, splits: Splits, indices: list[int]) -> tuple[Batch, float]:
    many: Callable[[list[int]], Any] | None = getattr(splits.train, "__getitems__", None)
    started_at = perf_counter()
    samples = many(indices) if many else [splits.train[index] for index in indices]
    batch = task.collate(samples)
    return batch, perf_counter() - started_at


def _look(task: Task, model: nn.Module, batch: Batch, precision: Precision) -> tuple[float, float]:
    """Arithmetic and activation memory of one pass; the first time the model meets the data."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    counter = FlopCounterMode(display=False)
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor), counter:
            _backward(task, model, batch, precision)
    except YunluError:
        raise
    except Exception as error:
        raise ModelError(
            f"The model failed on its first batch: {type(error).__name__}: {error}",
            hint=f"It was given {_shapes(batch)}. Check that the model fits the task and the data "
            "(`--debug` shows where it failed).",
        ) from error
    return float(counter.get_total_flops()), float(sum(kept.values()))


def _backward(task: Task, model: nn.Module, batch: Batch, precision: Precision) -> None:
    with precision.forward():
        loss, _ = task.loss(model, batch)
    if loss.ndim:
        raise ModelError(
            f"The loss must be one number; got shape {tuple(loss.shape)}.",
            hint="Return the sum over the batch.",
        )
    if not loss.requires_grad:
        raise ModelError(
            "The loss does not depend on any weight that can be trained.",
            hint="The model needs a parameter with requires_grad, and no detach() on the way.",
        )
    (loss / max(batch.items, 1)).backward()


def _score(
    task: Task, model: nn.Module, batch: Batch, precision: Precision
) -> tuple[set[str], float]:
    model.eval()
    scorer = task.scorer()

    def once() -> None:
        with torch.no_grad(), precision.forward():
            _, outputs = task.loss(model, batch)
            scorer.add(outputs, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a handful of samples leaves some metrics undefined
        seconds = _time(once, precision.device)
        return {"loss", *scorer.result().metrics}, seconds


def _time(once: Callable[[], Any], device: torch.device) -> float:
    """The median of a few passes after one to warm up, within about a second."""
    once()
    _wait(device)
    spans: list[float] = []
    began_at = perf_counter()
    for _ in range(_TIMED_PASSES):
        started_at = perf_counter()
        once()
        _wait(device)
        spans.append(perf_counter() - started_at)
        if perf_counter() - began_at > _TIMED_S:
            break
    return sorted(spans)[len(spans) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _weight_bytes(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def _shapes(batch: Batch) -> str:
    inputs = batch.inputs
    named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    return ", ".join(f"{name}: {tuple(value.shape)} {value.dtype}" for name, value in named)
