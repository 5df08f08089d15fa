"""Timing of settings on the real model and the first samples of the run."""

from __future__ import annotations

from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from yunlu.core.errors import ModelError, YunluError
from yunlu.planning.planner import count_steps
from yunlu.training.autotune.budget import MeasuredFigures, MeasuringBudget
from yunlu.training.compiler import compile_model, compiled_call, set_compiled_call
from yunlu.training.data.batches import fetch, lengths_of, longest_samples, micro_indices
from yunlu.training.data.sample_order import make_order, sort_length
from yunlu.training.device import synchronize
from yunlu.training.memory.out_of_memory import is_out_of_memory
from yunlu.training.optim.build import build_optimizer
from yunlu.training.precision import Precision
from yunlu.training.tasks.task import collate_for

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from yunlu.planning.plan import StepSettings
    from yunlu.spec.job import Job
    from yunlu.spec.optimizers import Kernel
    from yunlu.training.tasks.task import Batch, TrainingInputs

_TIMED_S = 1.0
_PASSES = 5
_LONG_PASS_S = 0.3
"""A pass this long is timed once: it averages out noise by itself."""
_LONG_FIRST_S = 1.5
"""In a first pass this long the warm-up hardly counts."""
_FIRST_SHARE = 0.03
"""Of the samples of a run, for its first pass: without it nothing is known."""
_UPDATE_BYTES, _UPDATE_BYTES_PER_S = 28, 4e9
"""What a weight's update by Adam moves in FP32, and at which pace at least."""
_VERY_SLOW = 3.0
"""A first pass this many times slower than the current settings is not timed again."""
_VARYING_MICROS = 4
"""Number of micro-batches timed where samples vary in length."""


class ModelTimer:
    """Runs passes under given settings; the caller restores weights and random numbers."""

    def __init__(
        self,
        job: Job,
        inputs: TrainingInputs,
        device: torch.device,
        *,
        batch: int,
        budget: MeasuringBudget | None = None,
        measured_figures: MeasuredFigures | None = None,
    ) -> None:
        """``measured_figures``: what an attempt has measured that was stopped meanwhile."""
        self._job, self._inputs, self.batch = job, inputs, batch
        self.device = device
        self.budget = budget or MeasuringBudget(job.train.trial_share)
        self.measured_figures = measured_figures or MeasuredFigures()
        self._lengths = lengths_of(inputs.splits.train)
        self._micros: dict[tuple[str, int], list[Batch]] = {}
        self._sample_s: dict[str, float] = {}
        self._compiled: Any = None
        self._first_pass_s: float | None = None
        self.first = 0.0, 0.0, 0.0
        """Seconds, samples and input values of the first pass."""
        self._value_s = 0.0
        self.load_s_per_sample = 0.0

    @property
    def model(self) -> nn.Module:
        """What is timed."""
        return self._inputs.model

    def micros(self, settings: StepSettings) -> list[Batch]:
        """The first micro-batches of the run under these settings."""
        key = settings.padding, settings.micro_batch
        if key not in self._micros:
            samples, seed = self._inputs.splits.train, self._job.train.seed
            order = make_order(
                samples=len(samples),
                batch=self.batch,
                seed=seed,
                lengths=self._lengths,
                padding=settings.padding,
            )
            count = 1 if self._lengths is None else _VARYING_MICROS
            lengths = None if settings.padding == "pack" else self._lengths
            lists = micro_indices(order, settings.micro_batch, 0, count, lengths=lengths)
            collate = collate_for(self._inputs.task, settings.padding)
            self._micros[key] = [self._fetch(some, collate) for some in islice(lists, count)]
        return self._micros[key]

    def longest(self, settings: StepSettings) -> Batch:
        """The largest possible micro-batch: it has to fit into memory."""
        if self._lengths is None:
            return self.micros(settings)[0]
        indices = longest_samples(self._lengths, settings.micro_batch)
        return self._fetch(indices, collate_for(self._inputs.task, settings.padding))

    def compare(self, before: StepSettings, after: StepSettings) -> tuple[float, float] | None:
        """Seconds per sample with each, interleaved: other load affects both."""
        name = f"{_key(before)} {_key(after)}"
        if (known := self.measured_figures.find(name)) is not None:
            before_s, after_s = known
            self._sample_s |= {_key(before): before_s, _key(after): after_s}
            return before_s, after_s
        outcome = self._compare(before, after)
        if outcome is not None:
            self.measured_figures.keep(name, *outcome)
        return outcome

    def _compare(self, before: StepSettings, after: StepSettings) -> tuple[float, float] | None:
        try:
            first_s = self._first_pass(after)
        except YunluError:  # no compiler, or one that cannot take this model
            self.switch(before)
            return None
        except Exception as error:
            if is_out_of_memory(error):
                return None
            raise
        if first_s > _VERY_SLOW * self.sample_s(before) or self.budget.left_s <= 0:
            return self.sample_s(before), first_s
        self._first_pass(before)
        spans: list[tuple[StepSettings, list[float]]] = [(before, []), (after, [])]
        began_at = perf_counter()
        for _ in range(_PASSES):
            for settings, seconds in spans:
                seconds.append(self._timed_pass(settings))
            if perf_counter() - began_at > 2 * _TIMED_S or self.budget.left_s <= 0:
                break
        for settings, seconds in spans:
            self._sample_s[_key(settings)] = sorted(seconds)[len(seconds) // 2]
        return self.sample_s(before), self.sample_s(after)

    def comparison_s(self, settings: StepSettings) -> float:
        """Estimated seconds: a warm-up pass and a few timed passes, for both settings."""
        pass_s = self.sample_s(settings) * sum(micro.samples for micro in self.micros(settings))
        return 2 * (pass_s + max(min(_PASSES * pass_s, _TIMED_S), pass_s))

    def sample_s(self, settings: StepSettings) -> float:
        """Seconds per sample of forward and backward: median of a few passes."""
        key = _key(settings)
        if self._first_pass_s is not None and not self._sample_s and self._lengths is None:
            self._sample_s[key] = self._first_pass_s
        if key not in self._sample_s and (known := self.measured_figures.find(key)) is not None:
            (self._sample_s[key],) = known
        if key not in self._sample_s:
            self._sample_s[key] = self._time_samples(settings)
        return self._sample_s[key]

    def _time_samples(self, settings: StepSettings) -> float:
        micros = self.micros(settings)
        pass_s = self._value_s * sum(micro.num_values for micro in micros)
        if not self.budget.allows(2 * pass_s, "a whole micro-batch"):
            return pass_s / sum(micro.samples for micro in micros)
        self._first_pass(settings)
        sample_s = self._timed_pass(settings)
        if sample_s * settings.micro_batch < _LONG_PASS_S:
            sample_s = self._median(lambda: self._timed_pass(settings))
        self.measured_figures.keep(_key(settings), sample_s)
        return sample_s

    def update_s(self, kernel: Kernel) -> float:
        """Seconds of one optimiser step that changes nothing: zero gradient, rate and decay."""
        if (known := self.measured_figures.find(f"update {kernel}")) is not None:
            return known[0]
        weights = (weight for weight in self._inputs.model.parameters() if weight.requires_grad)
        estimated_s = (
            _UPDATE_BYTES * sum(weight.numel() for weight in weights) / _UPDATE_BYTES_PER_S
        )
        if not self.budget.allows(2 * estimated_s, "an update by the optimiser"):
            return estimated_s
        return self.measured_figures.keep(f"update {kernel}", self._time_update(kernel))[0]

    def _time_update(self, kernel: Kernel) -> float:
        for weight in self._inputs.model.parameters():
            if weight.grad is not None:
                weight.grad.zero_()
        optimizer = build_optimizer(
            self._inputs.model,
            self._job.train.optimizer,
            lr=0.0,
            weight_decay=0.0,
            l2=0.0,
            kernel=kernel,
        )
        optimizer.step()
        return self._median(lambda: self._timed(optimizer.step))

    def switch(self, settings: StepSettings) -> None:
        """Apply these settings to torch and the model."""
        torch.set_num_threads(settings.threads)
        if settings.compile == "inductor":
            if self._compiled is None:
                compile_model(self._inputs.model, settings.compile, self.device)
                self._compiled = compiled_call(self._inputs.model)
            set_compiled_call(self._inputs.model, self._compiled)
        elif self._compiled is not None:
            set_compiled_call(self._inputs.model, None)

    def run_first(self, settings: StepSettings, batch: Batch) -> None:
        """Run a first pass; a long one is timed, so that it need not be repeated."""
        seconds = self._timed(lambda: self.backward(settings, batch))
        self.note_first(seconds, batch.samples, batch.num_values)

    def note_first(self, seconds: float, samples: float, values: float) -> None:
        """Take in how long the first pass took."""
        self.first = seconds, samples, values
        sample_s, self._value_s = seconds / samples, seconds / max(values, 1)
        if seconds > _LONG_FIRST_S:
            self._first_pass_s = sample_s
        samples = len(self._inputs.splits.train)
        steps = count_steps(self._job, samples=samples, batch=self.batch)
        self.budget.predict_run(steps * self.batch * sample_s * self._usual_share)

    @property
    def _usual_share(self) -> float:
        """Length of a usual sample over that of the longest, which the first pass takes."""
        if self._lengths is None:
            return 1.0
        lengths = sort_length(self._lengths)
        return float(lengths.mean() / max(lengths.max(), 1))

    def first_samples(self, most: int) -> int:
        """Samples of the first pass: a few, and of a short run no more than its share."""
        samples = len(self._inputs.splits.train)
        steps = count_steps(self._job, samples=samples, batch=self.batch)
        share = max(self._job.train.trial_share, _FIRST_SHARE) * self._usual_share
        return max(1, min(most, int(share * steps * self.batch)))

    def backward(self, settings: StepSettings, batch: Batch) -> None:
        """One forward and backward pass."""
        with Precision(settings.precision, self.device).forward():
            loss, _ = self._inputs.task.loss(self._inputs.model, batch)
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

    def _fetch(self, indices: NDArray[np.int64], collate: Callable[..., Batch]) -> Batch:
        started_at = perf_counter()
        batch = collate(fetch(self._inputs.splits.train, indices))
        self.load_s_per_sample = (perf_counter() - started_at) / len(indices)
        return batch.to(self.device)

    def _first_pass(self, settings: StepSettings) -> float:
        """Warm up: compile, allocate, fill caches. The time of a compilation is not returned."""
        first_s = self._timed_pass(settings)
        return first_s if settings.compile == "none" else self._timed_pass(settings)

    def _timed_pass(self, settings: StepSettings) -> float:
        """Seconds per sample of one pass over the micro-batches."""
        self.switch(settings)
        micros = self.micros(settings)

        done = 0

        def run() -> None:
            nonlocal done
            for micro in micros:
                self.backward(settings, micro)
                done += micro.samples
                if self.budget.left_s <= 0:
                    break

        return self._timed(run) / done

    def _median(self, once: Callable[[], float]) -> float:
        spans: list[float] = []
        began_at = perf_counter()
        for _ in range(_PASSES):
            spans.append(once())
            if perf_counter() - began_at > _TIMED_S or self.budget.left_s <= 0:
                break
        return sorted(spans)[len(spans) // 2]

    def _timed(self, run: Callable[[], Any]) -> float:
        synchronize(self.device)  # what was asked for before is no part of it
        started_at = perf_counter()
        run()
        synchronize(self.device)
        return perf_counter() - started_at


def _key(settings: StepSettings) -> str:
    return settings.model_dump_json()
