"""Choice of step settings: from the cache, or by trials within the budget."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from yunlu.planning.plan import AutotuneTrial, StepSettings
from yunlu.planning.planner import count_steps
from yunlu.training.autotune.cache import load_cached, save_cached
from yunlu.training.autotune.knobs import list_knobs
from yunlu.training.autotune.search import TunedSettings, search
from yunlu.training.optim.build import kernels_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yunlu.hardware.machine import Machine
    from yunlu.spec.job import Job
    from yunlu.training.autotune.timer import ModelTimer
    from yunlu.training.training_inputs import TrainingInputs

_TORCH_OPTIMIZERS_S = 2.0
"""Import time of torch's own optimisers: they load the compiler."""
# Reasons where there was nothing to try.
_PLAIN_REASONS = {
    "threads": "all available",
    "precision": "nothing is faster than fp32 on this device",
    "compile": "packed batches would recompile again and again",
    "kernel": "the only one for this optimiser",
}


def tune(
    job: Job,
    inputs: TrainingInputs,
    machine: Machine,
    timer: ModelTimer,
    start: StepSettings,
    *,
    shape: Sequence[Any],
) -> tuple[TunedSettings, float]:
    """The settings to train with, and the seconds the search took."""
    samples = len(inputs.splits.train)
    steps = count_steps(job, samples=samples, batch=shape[-1])
    key = [
        *(machine.hostname, torch.get_num_threads(), torch.__version__),
        *(job.task, job.model.model_dump(mode="json"), start.model_dump(), job.train.trial_share),
        *(job.train.optimizer.model_dump(mode="json"), steps, samples, *shape),
        # The job's values too: a pinned value must not be taken for a tuned one.
        job.train.model_dump(mode="json", include={*StepSettings.model_fields}),
    ]
    tuned = load_cached(key)
    if tuned is not None:
        return tuned, 0.0
    began_at = perf_counter()

    def budget_s(settings: StepSettings) -> float:
        return job.train.trial_share * steps * shape[-1] * timer.sample_s(settings)

    tuned, spent_s = search(timer, start, list_knobs(job, inputs, machine, timer), budget_s)
    if job.train.optimizer.kernel == "auto":
        left_s = budget_s(tuned.settings) - spent_s
        tuned = _try_kernels(job, inputs, timer, tuned, budget_s=left_s)
    tuned = tuned.model_copy(update={"reasons": {**_PLAIN_REASONS, **tuned.reasons}})
    return save_cached(key, tuned), perf_counter() - began_at


def _try_kernels(
    job: Job, inputs: TrainingInputs, timer: ModelTimer, tuned: TunedSettings, *, budget_s: float
) -> TunedSettings:
    """Time the optimiser kernels by the update alone: it does not depend on the passes."""
    first, *others = kernels_for(inputs.model, job.train.optimizer)
    if not others:
        return tuned
    first_s = timer.update_s(first)
    load_s = 0.0 if "torch._dynamo" in sys.modules else _TORCH_OPTIMIZERS_S
    if load_s + 6 * len(others) * first_s > budget_s:
        return _with_kernel(tuned, first, "usually the fastest", [])
    seconds = {kernel: timer.update_s(kernel) for kernel in others}
    best = min(seconds, key=lambda kernel: seconds[kernel])
    is_adopted = first_s / seconds[best] >= 1.05
    trials = [
        AutotuneTrial(
            name="kernel",
            value=kernel,
            sample_s=span,
            speedup=first_s / span,
            is_adopted=is_adopted and kernel == best,
        )
        for kernel, span in seconds.items()
    ]
    ratio = first_s / seconds[best]
    if is_adopted:
        return _with_kernel(tuned, best, f"{ratio:.3g} × as fast as {first} here", trials)
    return _with_kernel(tuned, first, f"{best} is {ratio:.3g} × as fast", trials)


def _with_kernel(
    tuned: TunedSettings, kernel: Any, reason: str, trials: list[AutotuneTrial]
) -> TunedSettings:
    return tuned.model_copy(
        update={
            "settings": tuned.settings.model_copy(update={"kernel": kernel}),
            "reasons": tuned.reasons | {"kernel": reason},
            "trials": (*tuned.trials, *trials),
        }
    )
