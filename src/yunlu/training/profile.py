"""Profile a model on this machine before planning: time, memory and data per step.

The first samples of the run are used; weights, buffers and random numbers are restored, so
that profiling does not change the training that follows.
"""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psutil
import torch

from yunlu.core.errors import TrainingError
from yunlu.planning.layouts import count_devices
from yunlu.planning.plan import Profile
from yunlu.planning.planner import (
    cap_bytes,
    choose_batch,
    fixed_bytes,
    memory_room_bytes,
)
from yunlu.planning.splitting import optimizer_state_bytes
from yunlu.training.autotune.timer import ModelTimer
from yunlu.training.autotune.tune import fit_memory, start_settings, tune
from yunlu.training.determinism import copy_random, restore_random
from yunlu.training.device import move_model, synchronize
from yunlu.training.memory.out_of_memory import is_out_of_memory, memory_capped
from yunlu.training.memory.peak import peak_resident_bytes
from yunlu.training.precision import Precision
from yunlu.training.tasks.own_metrics import open_scorer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from yunlu.hardware.fleet import Machine
    from yunlu.planning.layouts import SplitConstraints
    from yunlu.planning.plan import StepSettings
    from yunlu.planning.predict.local import OperatorWork
    from yunlu.spec.job import Job
    from yunlu.training.autotune.budget import MeasuredFigures, MeasuringBudget
    from yunlu.training.tasks.task import Batch, TrainingInputs

_TIMED_S = 0.3
_TIMED_PASSES = 5


def measure(
    job: Job,
    inputs: TrainingInputs,
    machine: Machine,
    *,
    started_at: float,
    budget: MeasuringBudget | None = None,
    measured_figures: MeasuredFigures | None = None,
) -> tuple[Profile, OperatorWork | None]:
    """The profile for the planner, and a step's operators; ``started_at``: start of this attempt.

    One pass is always made; what else does not fit in the budget is estimated from it.
    """
    task, model, splits = inputs.task, inputs.model, inputs.splits
    device = torch.device(machine.best_device.kind)
    weights = list(model.parameters())
    parameters = sum(weight.numel() for weight in weights)
    trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
    resident = psutil.Process().memory_info().rss if device.type == "cpu" else _weight_bytes(model)
    fixed = fixed_bytes(job, resident_bytes=resident, parameters=parameters, trainable=trainable)
    room = memory_room_bytes(job, machine.best_device.memory_bytes, fixed)
    batch = choose_batch(job, len(splits.train))
    move_model(model, device)
    timer = ModelTimer(
        job, inputs, device, batch=batch, budget=budget, measured_figures=measured_figures
    )
    budget = timer.budget
    with _restored(model):
        model.train()
        threads = torch.get_num_threads()  # honours OMP_NUM_THREADS
        first = start_settings(job, inputs, threads=threads, micro_batch=1)
        with memory_capped(cap_bytes(job, machine)):
            fitting = fit_memory(job, model, timer, first, batch=batch, room_bytes=room)
            tuned, trial_s = tune(
                job,
                inputs,
                machine,
                timer,
                fitting.settings,
                shape=[parameters, fitting.bytes_per_sample, batch],
            )
        settings = tuned.settings
        timer.switch(settings)
        probe = timer.micros(settings)[0]
        sample_s = timer.sample_s(settings)
        peak_bytes = peak_resident_bytes()
        update_s = timer.update_s(settings.kernel)
        work = _count(job, inputs, timer, settings, sample_s=sample_s)
        if job.train.optimizer.state == "8bit":
            peak_bytes = peak_resident_bytes()  # the library of the 8-bit states takes memory, too
        # Evaluation always pads.
        padded = timer.micros(settings.model_copy(update={"padding": "pad"}))[0]
        metrics, evaluate_s = _score_within(job, inputs, timer, settings, sample_s=sample_s)
    profile = Profile(
        parameters=parameters,
        trainable=trainable,
        activation_bytes_per_sample=fitting.bytes_per_sample,
        probe_samples=probe.samples,
        probe_s=sample_s * probe.samples,
        update_s=update_s,
        load_s_per_sample=timer.load_s_per_sample,
        evaluate_s_per_sample=evaluate_s,
        train_samples=len(splits.train),
        validation_samples=len(splits.validation) if splits.validation is not None else 0,
        test_samples=len(splits.test) if splits.test is not None else 0,
        startup_s=time.time() - started_at,
        resident_bytes=resident,
        peak_bytes=peak_bytes if device.type == "cpu" else None,
        settings=settings,
        reasons=tuned.reasons | fitting.reasons,
        trials=tuned.trials,
        trial_s=trial_s,
        measuring=budget.summary(),
        task_metric=task.metric,
        metrics=tuple(sorted(metrics)),
        facts=_find_split_constraints(job, model, padded, machine, fitting.bytes_per_sample),
    )
    return profile, work


def _count(
    job: Job, inputs: TrainingInputs, timer: ModelTimer, settings: StepSettings, *, sample_s: float
) -> OperatorWork | None:
    """Operators of a step, counted on a few samples."""
    from yunlu.training.probing.microbenchmarks import count_step  # noqa: PLC0415 - only for a new plan

    plain = settings.model_copy(update={"compile": "none"})
    if not timer.budget.allows(2 * sample_s, "the operators of a step"):
        return None
    timer.switch(plain)
    try:
        return count_step(job, inputs, timer, plain, sample_s=sample_s)
    except Exception as error:  # counting is optional: a failure does not end the run
        if is_out_of_memory(error):
            raise
        return None
    finally:
        timer.switch(settings)


def _find_split_constraints(
    job: Job, model: nn.Module, probe: Batch, machine: Machine, bytes_per_sample: float
) -> SplitConstraints | None:
    """How the model can be split; not needed for one worker, and takes seconds."""
    if count_devices(job, gpus=machine.gpus) == 1:
        return None
    from yunlu.training.parallel.parallelize import find_split_constraints  # noqa: PLC0415 - slow to import

    trainable = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return find_split_constraints(
        model,
        probe,
        state_bytes=optimizer_state_bytes(job, trainable),
        activation_bytes_per_sample=bytes_per_sample,
    )


@contextmanager
def _restored(model: nn.Module) -> Generator[None]:
    """Restore buffers, mode, gradients and random numbers; weights do not change meanwhile."""
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


_EVALUATED = 0.35
"""Time of a sample in an evaluation, over that in training: the backward pass takes twice the forward one."""


def _score_within(
    job: Job, inputs: TrainingInputs, timer: ModelTimer, settings: StepSettings, *, sample_s: float
) -> tuple[set[str], float]:
    """Names of the metrics, and seconds to evaluate a sample: of a micro-batch, or of one sample.

    Evaluation always pads.
    """
    precision = Precision(settings.precision, timer.device)
    padding = settings.model_copy(update={"padding": "pad"})
    batch = timer.micros(padding)[0]
    if timer.budget.allows(_EVALUATED * sample_s * batch.samples, "an evaluation"):
        metrics, seconds = _score(job, inputs, batch, precision)
        return metrics, seconds / batch.samples
    one = timer.micros(padding.model_copy(update={"micro_batch": 1}))[0]
    return _score(job, inputs, one, precision)[0], _EVALUATED * sample_s


def _score(
    job: Job, inputs: TrainingInputs, batch: Batch, precision: Precision
) -> tuple[set[str], float]:
    task, model = inputs.task, inputs.model
    model.eval()
    scorer = task.scorer()

    def once() -> None:
        with torch.no_grad(), precision.forward():
            _, outputs = task.loss(model, batch)
            scorer.add(outputs, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a handful of samples leaves some metrics undefined
        seconds = _time(once, precision.device)
        return {
            "loss",
            *scorer.result().metrics,
            *_own_metrics(job, inputs, batch, precision),
        }, seconds


def _own_metrics(job: Job, inputs: TrainingInputs, batch: Batch, precision: Precision) -> set[str]:
    """Names of the user's metrics, as far as a few samples tell."""
    if not inputs.metrics:
        return set()
    scorer = open_scorer(inputs.task, inputs.metrics)
    with torch.no_grad(), precision.forward():
        scorer.add(inputs.task.loss(inputs.model, batch)[1], batch)
    try:
        return set(scorer.result().metrics)
    except TrainingError:
        # Some cannot be computed of a handful of samples, such as an area under a curve where all are of
        # one class. A real evaluation will show; until then, what the job asks for is believed.
        wanted = {job.train.checkpoint.metric}
        if job.train.early_stopping is not None:
            wanted.add(job.train.early_stopping.metric)
        return {*(metric.name for metric in inputs.metrics), *(wanted - {"auto"})}


def _time(once: Callable[[], Any], device: torch.device) -> float:
    """Median of a few passes after a warm-up; a long pass is not repeated."""
    spans: list[float] = []
    for _ in range(1 + _TIMED_PASSES):
        started_at = perf_counter()
        once()
        synchronize(device)
        spans.append(perf_counter() - started_at)
        if sum(spans) > _TIMED_S:
            break
    timed = spans[1:] or spans
    return sorted(timed)[len(timed) // 2]


def _weight_bytes(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())
