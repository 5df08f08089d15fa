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

from yunlu.planning.layouts import count_devices
from yunlu.planning.plan import Profile
from yunlu.planning.planner import (
    cap_bytes,
    choose_batch,
    fixed_bytes,
    memory_room_bytes,
)
from yunlu.planning.splitting import optimizer_state_bytes
from yunlu.training.autotune.knobs import start_settings
from yunlu.training.autotune.memory_fit import fit_memory
from yunlu.training.autotune.timer import ModelTimer
from yunlu.training.autotune.tune import tune
from yunlu.training.checkpoint.state import copy_random, restore_random
from yunlu.training.memory.out_of_memory import is_out_of_memory, memory_capped
from yunlu.training.memory.resident import peak_resident_bytes
from yunlu.training.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from yunlu.hardware.machine import Machine
    from yunlu.planning.plan import StepSettings
    from yunlu.planning.predict.local import OperatorWork
    from yunlu.planning.split_constraints import SplitConstraints
    from yunlu.spec.job import Job
    from yunlu.training.tasks.task import Batch, Task
    from yunlu.training.training_inputs import TrainingInputs

_TIMED_S = 0.3
_TIMED_PASSES = 5


def measure(
    job: Job, parts: TrainingInputs, machine: Machine, *, started_at: float
) -> tuple[Profile, OperatorWork | None]:
    """What the planner needs to know, and a step counted; ``started_at`` is when this life began."""
    task, model, splits = parts.task, parts.model, parts.splits
    device = torch.device(machine.best_device.kind)
    weights = list(model.parameters())
    parameters = sum(weight.numel() for weight in weights)
    trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
    resident = psutil.Process().memory_info().rss if device.type == "cpu" else _weight_bytes(model)
    fixed = fixed_bytes(job, resident_bytes=resident, parameters=parameters, trainable=trainable)
    room = memory_room_bytes(job, machine.best_device, fixed)
    batch = choose_batch(job, len(splits.train))
    model.to(device)
    meter = ModelTimer(job, parts, device, batch=batch)
    with _undone(model):
        model.train()
        threads = torch.get_num_threads()  # honours OMP_NUM_THREADS
        first = start_settings(job, parts, threads=threads, micro_batch=1)
        with memory_capped(cap_bytes(job, machine)):
            fitting = fit_memory(job, model, meter, first, batch=batch, room_bytes=room)
            found, trial_s = tune(
                job,
                parts,
                machine,
                meter,
                fitting.settings,
                shape=[parameters, fitting.bytes_per_sample, batch],
            )
        settings = found.settings
        meter.switch(settings)
        probe = meter.micros(settings)[0]
        sample_s = meter.sample_s(settings)
        peak_bytes = peak_resident_bytes()
        update_s = meter.update_s(settings.kernel)
        work = _count(job, parts, meter, settings, sample_s=sample_s)
        if job.train.optimizer.state == "8bit":
            peak_bytes = peak_resident_bytes()  # the library that keeps them takes memory, too
        precision = Precision(settings.precision, device)
        # Evaluation always pads.
        padded = meter.micros(settings.model_copy(update={"padding": "pad"}))[0]
        metrics, evaluate_s = _score(task, model, padded, precision)
    profile = Profile(
        parameters=parameters,
        trainable=trainable,
        activation_bytes_per_sample=fitting.bytes_per_sample,
        probe_samples=probe.samples,
        probe_s=sample_s * probe.samples,
        update_s=update_s,
        load_s_per_sample=meter.load_s_per_sample,
        evaluate_s_per_sample=evaluate_s / padded.samples,
        train_samples=len(splits.train),
        validation_samples=len(splits.validation) if splits.validation is not None else 0,
        test_samples=len(splits.test) if splits.test is not None else 0,
        startup_s=time.time() - started_at,
        resident_bytes=resident,
        peak_bytes=peak_bytes if device.type == "cpu" else None,
        settings=settings,
        reasons=found.reasons | fitting.reasons,
        trials=found.trials,
        trial_s=trial_s,
        task_metric=task.metric,
        metrics=tuple(sorted(metrics)),
        facts=_find_facts(job, model, padded, machine, fitting.bytes_per_sample),
    )
    return profile, work


def _count(
    job: Job, parts: TrainingInputs, meter: ModelTimer, settings: StepSettings, *, sample_s: float
) -> OperatorWork | None:
    """The operators of a step, on as few samples as tell those of all."""
    from yunlu.training.probing.operator_counts import count_step  # noqa: PLC0415 - only for a new plan

    plain = settings.model_copy(update={"compile": "none"})
    meter.switch(plain)
    try:
        return count_step(job, parts, meter, plain, sample_s=sample_s)
    except Exception as error:  # counting only informs: nothing that a model does then ends a run
        if is_out_of_memory(error):
            raise
        return None
    finally:
        meter.switch(settings)


def _find_facts(
    job: Job, model: nn.Module, probe: Batch, machine: Machine, bytes_per_sample: float
) -> SplitConstraints | None:
    """How the model can be split; nobody asks for one worker, and the looking costs seconds."""
    if count_devices(job, gpus=machine.gpus) == 1:
        return None
    from yunlu.training.parallel.split_constraints import find_split_constraints  # noqa: PLC0415 - slow to import

    trainable = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return find_split_constraints(
        model,
        probe,
        state_bytes=optimizer_state_bytes(job, trainable),
        activation_bytes_per_sample=bytes_per_sample,
    )


@contextmanager
def _undone(model: nn.Module) -> Generator[None]:
    """Put buffers, mode, gradients and random numbers back; weights are never changed meanwhile."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    mode, random = model.training, copy_random()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        model.train(mode)
        model.zero_grad(set_to_none=True)
        restore_random(*random)


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
    """The median of a few passes after one to warm up; a long one is not repeated."""
    spans: list[float] = []
    for _ in range(1 + _TIMED_PASSES):
        started_at = perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spans.append(perf_counter() - started_at)
        if sum(spans) > _TIMED_S:
            break
    timed = spans[1:] or spans
    return sorted(timed)[len(timed) // 2]


def _weight_bytes(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())
