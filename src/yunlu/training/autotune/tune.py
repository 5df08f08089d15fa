"""Settle how the steps are computed: from memory, or by trying within the budget."""

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
"""What torch's own optimisers load at their first use: a compiler."""
# Said where there was nothing to try.
_PLAIN_REASONS = {
    "threads": "all that there are",
    "precision": "nothing is faster than fp32 on this device",
    "compile": "packed batches would be compiled again and again",
    "kernel": "the only one for this optimiser",
}


def tune(
    job: Job,
    parts: TrainingInputs,
    machine: Machine,
    meter: ModelTimer,
    start: StepSettings,
    *,
    shape: Sequence[Any],
) -> tuple[TunedSettings, float]:
    """The settings to train with, and the seconds it took to find them."""
    samples = len(parts.splits.train)
    steps = count_steps(job, samples=samples, batch=shape[-1])
    key = [
        *(machine.hostname, torch.get_num_threads(), torch.__version__),
        *(job.task, job.model.model_dump(mode="json"), start.model_dump(), job.train.trial_share),
        *(job.train.optimizer.model_dump(mode="json"), steps, samples, *shape),
        # What is asked, too: a value that is set must not be taken for one that was tried.
        job.train.model_dump(mode="json", include={*StepSettings.model_fields}),
    ]
    found = load_cached(key)
    if found is not None:
        return found, 0.0
    began_at = perf_counter()

    def budget_s(settings: StepSettings) -> float:
        return job.train.trial_share * steps * shape[-1] * meter.sample_s(settings)

    found, spent_s = search(meter, start, list_knobs(job, parts, machine, meter), budget_s)
    if job.train.optimizer.kernel == "auto":
        left_s = budget_s(found.settings) - spent_s
        found = _try_kernels(job, parts, meter, found, budget_s=left_s)
    found = found.model_copy(update={"reasons": {**_PLAIN_REASONS, **found.reasons}})
    return save_cached(key, found), perf_counter() - began_at


def _try_kernels(
    job: Job, parts: TrainingInputs, meter: ModelTimer, found: TunedSettings, *, budget_s: float
) -> TunedSettings:
    """The optimiser's kernel, by the update alone: it does not depend on the passes."""
    first, *others = kernels_for(parts.model, job.train.optimizer)
    if not others:
        return found
    first_s = meter.update_s(first)
    load_s = 0.0 if "torch._dynamo" in sys.modules else _TORCH_OPTIMIZERS_S
    if load_s + 6 * len(others) * first_s > budget_s:
        return _with_kernel(found, first, "usually the fastest", [])
    seconds = {kernel: meter.update_s(kernel) for kernel in others}
    best = min(seconds, key=lambda kernel: seconds[kernel])
    kept = first_s / seconds[best] >= 1.05
    trials = [
        AutotuneTrial(
            name="kernel",
            value=kernel,
            sample_s=span,
            speedup=first_s / span,
            kept=kept and kernel == best,
        )
        for kernel, span in seconds.items()
    ]
    ratio = first_s / seconds[best]
    if kept:
        return _with_kernel(found, best, f"{ratio:.3g} × as fast as {first} here", trials)
    return _with_kernel(found, first, f"{best} is {ratio:.3g} × as fast", trials)


def _with_kernel(
    found: TunedSettings, kernel: Any, reason: str, trials: list[AutotuneTrial]
) -> TunedSettings:
    return found.model_copy(
        update={
            "settings": found.settings.model_copy(update={"kernel": kernel}),
            "reasons": found.reasons | {"kernel": reason},
            "trials": (*found.trials, *trials),
        }
    )
