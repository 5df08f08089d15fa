"""Contract test of tasks, to inherit.

In your own test suite::

    class TestMyTask(TaskContract):
        def make_task(self):
            return MyTask()

        def make_job(self):
            return Job.model_validate({"task": "my_module:MyTask", ...})

pytest finds the methods by their names; ``tmp_path`` is its own fixture. Keep the job's data small.
"""

from __future__ import annotations

import copy
import math
import random
import zipfile
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from yunlu.training.data.batches import lengths_of
from yunlu.training.tasks.task import Batch, Predicts, SavesArtifacts, SupportsPacking, Task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from yunlu.spec.job import Job
    from yunlu.training.tasks.task import Evaluation, ModelPrediction, Samples, Splits


class TaskContract:
    """Behaviour that the engine relies on. Override ``make_task`` and ``make_job``."""

    untrained: frozenset[str] = frozenset()
    """Names of trainable parameters without a gradient from a small batch."""
    tolerance: float = 1e-4
    """Relative tolerance for rounding."""
    _loaded: ClassVar[dict[type, tuple[Task, Splits]]] = {}

    def make_task(self) -> Task:
        """A fresh task, as the engine would make one."""
        raise NotImplementedError

    def make_job(self) -> Job:
        """A job with little data and a small model."""
        raise NotImplementedError

    def make_inputs(self) -> list[Any]:
        """Some inputs as a user would pass them to ``predict``, where the task can predict."""
        return []

    def test_it_has_the_methods_of_a_task(self) -> None:
        """The engine checks the same before training."""
        assert isinstance(self.make_task(), Task)

    def test_loading_again_gives_the_same_data(self) -> None:
        """A resumed run loads again and must continue on the same samples."""
        (task, splits), (again, others) = self._load(), self._load_again()
        assert splits.fingerprint == others.fingerprint
        assert _lengths(splits) == _lengths(others)
        assert len(splits.train) > 0
        _assert_equal(_batch(task, splits.train, 4), _batch(again, others.train, 4))

    def test_the_same_seed_builds_the_same_model(self) -> None:
        """Runs are comparable only if they start from the same weights."""
        task, _ = self._load()
        first, second = self._build(task).state_dict(), self._build(task).state_dict()
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.equal(value, second[name]), name

    def test_collating_draws_no_random_numbers_and_repeats(self) -> None:
        """Otherwise the number of data-loading processes would change the run."""
        task, splits = self._load()
        samples = [splits.train[index] for index in range(min(4, len(splits.train)))]
        before = _random_states()
        batch = task.collate(samples)
        for state, same in zip(before, _random_states(), strict=True):
            assert state == same
        _assert_equal(batch, task.collate(samples))

    def test_the_loss_is_a_sum_and_items_add_up(self) -> None:
        """The engine divides by the true count: a mean here would weigh samples unevenly."""
        task, splits = self._load()
        model = self._build(task).eval()
        batch = _batch(task, splits.train, 5)
        singles = [task.collate([splits.train[index]]) for index in range(batch.samples)]
        assert batch.samples == sum(single.samples for single in singles)
        assert batch.items == sum(single.items for single in singles)
        with torch.no_grad():
            total = float(task.loss(model, batch)[0])
            parts = [float(task.loss(model, single)[0]) for single in singles]
        assert math.isfinite(total)
        assert math.isclose(total, sum(parts), rel_tol=self.tolerance, abs_tol=1e-5), (
            f"the loss of {batch.samples} samples is {total}, of each alone {parts}"
        )

    def test_the_gradient_reaches_every_trainable_parameter(self) -> None:
        """A parameter without a gradient is silently never trained."""
        task, splits = self._load()
        model = self._build(task).train()
        batch = _batch(task, splits.train, 8)
        loss, _ = task.loss(model, batch)
        assert loss.shape == ()
        loss.backward()
        without: set[str] = set()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                without.add(name)
            else:
                assert bool(parameter.grad.isfinite().all()), f"{name}: gradient not finite"
        assert without == self.untrained

    def test_the_loss_leaves_the_batch_as_it_was(self) -> None:
        """The engine may reuse a batch, for instance to measure."""
        task, splits = self._load()
        model = self._build(task)
        batch = _batch(task, splits.train, 4)
        original = copy.deepcopy(batch)
        task.loss(model, batch)[0].backward()
        _assert_equal(batch, original)

    def test_lengths_predict_the_size_of_a_batch(self) -> None:
        """Bucketing, and the reported share of padding, depend on them."""
        task, splits = self._load()
        lengths = lengths_of(splits.train)
        batch = _batch(task, splits.train, 6)
        if lengths is None:
            assert batch.padding == 0
            return
        sides = lengths[:6].reshape(batch.samples, -1)
        assert batch.tokens == batch.samples * sides.max(axis=0).sum()
        assert batch.padding == batch.tokens - sides.sum()

    def test_packing_changes_neither_loss_nor_gradient(self) -> None:
        """Packed samples must not affect each other."""
        task, splits = self._load()
        model = self._build(task).eval()
        if not isinstance(task, SupportsPacking) or not task.can_pack(model):
            return
        samples = [splits.train[index] for index in range(min(6, len(splits.train)))]
        padded, packed = task.collate(samples), task.pack(samples)
        assert (packed.samples, packed.items) == (padded.samples, padded.items)
        assert (packed.tokens, packed.padding) == (padded.tokens - padded.padding, 0)
        losses: list[float] = []
        gradients: list[list[Tensor]] = []
        for batch in (padded, packed):
            model.zero_grad(set_to_none=True)
            loss = task.loss(model, batch)[0]
            (loss / batch.items).backward()
            losses.append(float(loss.detach()))
            available = [weight.grad for weight in model.parameters() if weight.grad is not None]
            gradients.append([gradient.clone() for gradient in available])
        assert math.isclose(*losses, rel_tol=1e-5)
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    def test_a_scorer_gives_finite_metrics_and_the_headline_metric(self) -> None:
        """Also as JSON, for the report."""
        task, splits = self._load()
        evaluation = self._score(task, splits, size=4)
        assert evaluation.metrics or task.metric == "loss"
        for name, value in evaluation.metrics.items():
            assert math.isfinite(value), name
        assert task.metric == "loss" or task.metric in evaluation.metrics
        assert evaluation.model_dump_json()

    def test_metrics_do_not_depend_on_how_samples_are_batched(self) -> None:
        """A mean of means would favour the samples of a small last batch."""
        task, splits = self._load()
        one, other = (self._score(task, splits, size=size) for size in (4, 7))
        assert one.metrics.keys() == other.metrics.keys()
        for name, value in one.metrics.items():
            same = math.isclose(value, other.metrics[name], rel_tol=1e-3, abs_tol=1e-6)
            assert same, f"{name}: {value} in fours, {other.metrics[name]} in sevens"

    def test_exported_parts_hold_no_pickle(self, tmp_path: Path) -> None:
        """Opening an exported model must not run code."""
        task, _ = self._load()
        self._build(task)
        if not isinstance(task, SavesArtifacts):
            return
        task.save_artifacts(tmp_path)
        for file in (path for path in tmp_path.rglob("*") if path.is_file()):
            assert not file.read_bytes().startswith(b"\x80"), f"{file.name} is a pickle"
            if zipfile.is_zipfile(file):
                inside = zipfile.ZipFile(file).namelist()
                assert not any(name.endswith(".pkl") for name in inside), f"{file.name} holds one"

    def test_an_exported_model_predicts_as_the_trained_one(self, tmp_path: Path) -> None:
        """Alone or together with others, by a task that has only seen the exported artifacts."""
        task, _ = self._load()
        model = self._build(task).eval()
        if not isinstance(task, Predicts):
            return
        inputs = self.make_inputs()
        assert inputs, "override make_inputs: the task can predict"
        with torch.no_grad():
            before = task.predict(model, inputs)
            assert len(before) == len(inputs)
            task.save_artifacts(tmp_path)
            restored = self.make_task()
            assert isinstance(restored, Predicts)
            restored.restore(self.make_job(), tmp_path)
            again = restored.build(self.make_job()).eval()
            again.load_state_dict(model.state_dict())
            _assert_alike(restored.predict(again, inputs), before)
            _assert_alike([restored.predict(again, [one])[0] for one in inputs], before)

    def _load(self) -> tuple[Task, Splits]:
        """Once per class: loading may take seconds."""
        if type(self) not in self._loaded:
            self._loaded[type(self)] = self._load_again()
        return self._loaded[type(self)]

    def _load_again(self) -> tuple[Task, Splits]:
        task = self.make_task()
        return task, task.load(self.make_job())

    def _build(self, task: Task) -> nn.Module:
        torch.manual_seed(0)
        return task.build(self.make_job())

    def _score(self, task: Task, splits: Splits, *, size: int) -> Evaluation:
        model = self._build(task).eval()
        parts = (splits.validation, splits.test, splits.train)
        samples = next(part for part in parts if part is not None)
        chosen = range(min(16, len(samples)))
        scorer = task.scorer()
        with torch.no_grad():
            for start in chosen[::size]:
                batch = task.collate([samples[i] for i in chosen[start : start + size]])
                _, outputs = task.loss(model, batch)
                scorer.add(outputs, batch)
        return scorer.result()


def _assert_alike(some: Sequence[ModelPrediction], others: Sequence[ModelPrediction]) -> None:
    """The same answers, up to the rounding of batches of another size."""
    for one, other in zip(some, others, strict=True):
        if isinstance(other.value, float):
            assert isinstance(one.value, float)
            assert math.isclose(one.value, other.value, rel_tol=1e-4, abs_tol=1e-5)
        else:
            assert one.value == other.value
        for label, score in (other.scores or {}).items():
            assert math.isclose((one.scores or {})[label], score, rel_tol=1e-4, abs_tol=1e-5)


def _batch(task: Task, samples: Samples, count: int) -> Batch:
    return task.collate([samples[index] for index in range(min(count, len(samples)))])


def _lengths(splits: Splits) -> list[int | None]:
    parts = (splits.train, splits.validation, splits.test)
    return [None if part is None else len(part) for part in parts]


def _random_states() -> Sequence[Any]:
    legacy = np.random.get_state(legacy=False)
    return [torch.get_rng_state().tolist(), random.getstate(), repr(legacy)]


def _assert_equal(one: Any, other: Any) -> None:
    """The same structure with the same numbers."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, Batch):
        for name in ("samples", "items", "tokens", "padding"):
            assert getattr(one, name) == getattr(other, name), name
        _assert_equal(one.inputs, other.inputs)
        _assert_equal(one.targets, other.targets)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            _assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            _assert_equal(left, right)
    else:
        assert one == other
