"""Every task behind the door keeps the contract, on a little of the data its example uses."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from yunlu.spec.job import Job
from yunlu.testing.tasks import TaskContract
from yunlu.training.tasks.task import Batch, Evaluation, Splits, call, open_task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.training.tasks.task import Task

TONES = [np.sin(np.arange(16_000) / pitch).astype(np.float32) for pitch in (5, 20)]
SMALL = {"width": 32, "layers": 1, "heads": 2}

needs_voice = pytest.mark.skipif(
    shutil.which("espeak-ng") is None, reason="espeak-ng makes the speech"
)


class BuiltIn(TaskContract):
    """A task of the package, found by its name."""

    task: ClassVar[str]
    model: ClassVar[dict[str, Any]]
    data: ClassVar[dict[str, Any]]
    inputs: ClassVar[Sequence[Any]]

    def make_task(self) -> Task:
        return open_task(self.task)

    def make_job(self) -> Job:
        data = {"limit": 60, **self.data}
        return Job.model_validate({"task": self.task, "model": self.model, "data": data})

    def make_inputs(self) -> list[Any]:
        return list(self.inputs)


class TestTextClassification(BuiltIn):
    task = "text-classification"
    model: ClassVar = {"name": "transformer", "args": SMALL}
    data: ClassVar = {"train": "synthetic:reviews"}
    inputs: ClassVar = ["a fine film", "dull", "I would see it again and again"]


class TestLanguageModeling(BuiltIn):
    task = "language-modeling"
    model: ClassVar = {"name": "transformer", "args": SMALL}
    data: ClassVar = {"train": "synthetic:python-docs", "max_length": 32}
    inputs: ClassVar = ["def f(", "The", "import " * 20]


class TestSeq2Seq(BuiltIn):
    task = "seq2seq"
    model: ClassVar = {"name": "transformer", "args": SMALL}
    data: ClassVar = {"train": "synthetic:dates"}
    inputs: ClassVar = ["3 May 2021", "the first of April, 1999"]


class TestImageClassification(BuiltIn):
    task = "image-classification"
    model: ClassVar = {"name": "cnn"}
    data: ClassVar = {"train": "sklearn:digits"}
    inputs: ClassVar = [np.eye(8) * 16, np.ones((8, 8)) * 3]


class TestTabularClassification(BuiltIn):
    task = "tabular-classification"
    model: ClassVar = {"name": "mlp", "args": {"hidden": [16]}}
    data: ClassVar = {"train": "sklearn:breast_cancer"}
    inputs: ClassVar = [[float(i + k) for i in range(30)] for k in range(3)]


class TestTabularRegression(BuiltIn):
    task = "tabular-regression"
    model: ClassVar = {"name": "mlp", "args": {"hidden": [16]}}
    data: ClassVar = {"train": "sklearn:diabetes"}
    inputs: ClassVar = [[0.01 * i * k for i in range(10)] for k in range(3)]


class TestRecommendation(BuiltIn):
    task = "recommendation"
    model: ClassVar = {"name": "factors", "args": {"dim": 4}}
    data: ClassVar = {"train": "synthetic:films"}
    inputs: ClassVar = [("u1", "f1"), ("nobody", "f2")]


@needs_voice
@pytest.mark.speech
@pytest.mark.slow
class TestKeywordSpotting(BuiltIn):
    task = "keyword-spotting"
    model: ClassVar = {"name": "cnn"}
    data: ClassVar = {"train": "synthetic:spoken-words"}
    inputs: ClassVar = TONES


@needs_voice
@pytest.mark.speech
@pytest.mark.slow
class TestSpeechToText(BuiltIn):
    task = "speech-to-text"
    model: ClassVar = {"name": "conv-gru", "args": {"hidden": 16}}
    data: ClassVar = {"train": "synthetic:spoken-digits"}
    inputs: ClassVar = TONES


def test_no_task_of_the_package_is_without_its_contract() -> None:
    ours = {point.name for point in entry_points(group="yunlu.tasks") if "yunlu." in point.value}
    assert {kind.task for kind in BuiltIn.__subclasses__()} == ours


class Line:
    """A sound task of the user's own: fit a line through points."""

    metric = "mae"

    def load(self, job: Job) -> Splits:
        points = [(torch.tensor([x / 10]), torch.tensor([x / 5 + 1])) for x in range(20)]
        return Splits(train=points, validation=points[:9], test=None, fingerprint="line")

    def build(self, job: Job) -> nn.Module:
        return nn.Linear(1, 1)

    def collate(self, samples: Sequence[Any]) -> Batch:
        x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
        return Batch(inputs=(x,), targets=y, samples=len(samples), items=len(samples))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        outputs = call(model, batch)
        return (outputs - batch.targets).square().sum(), outputs

    def scorer(self) -> Any:
        return Distance()


class Distance:
    def __init__(self) -> None:
        self.errors: list[float] = []

    def add(self, outputs: Tensor, batch: Batch) -> None:
        self.errors += (outputs - batch.targets).abs().flatten().tolist()

    def result(self) -> Evaluation:
        return Evaluation(metrics={"mae": sum(self.errors) / len(self.errors)})


class TestLine(TaskContract):
    def make_task(self) -> Line:
        return Line()

    def make_job(self) -> Job:
        return Job.model_validate({"task": "a:Line", "model": "line", "data": "points"})


class Forgetful(Line):
    def load(self, job: Job) -> Splits:
        return replace(super().load(job), fingerprint=secrets.token_hex(8))


class Averaging(Line):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        total, outputs = super().loss(model, batch)
        return total / batch.samples, outputs


class Dicing(Line):
    def collate(self, samples: Sequence[Any]) -> Batch:
        torch.rand(1)
        return super().collate(samples)


class Scribbling(Line):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        batch.targets.add_(1)
        return super().loss(model, batch)


class Detached(Line):
    def build(self, job: Job) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_parameter("idle", nn.Parameter(torch.zeros(1)))
        return model


class MeanOfMeans(Line):
    class Scorer(Distance):
        def add(self, outputs: Tensor, batch: Batch) -> None:
            self.errors.append(float((outputs - batch.targets).abs().mean()))

    def scorer(self) -> Any:
        return self.Scorer()


class Pickling(Line):
    def save_artifacts(self, directory: Path) -> None:
        torch.save({"a": 1}, directory / "parts.pt")


@pytest.mark.parametrize(
    ("flawed", "caught_by"),
    [
        (Forgetful, "test_loading_again_gives_the_same_data"),
        (Averaging, "test_the_loss_is_a_sum_and_items_add_up"),
        (Dicing, "test_collating_draws_no_random_numbers_and_repeats"),
        (Scribbling, "test_the_loss_leaves_the_batch_as_it_was"),
        (Detached, "test_the_gradient_reaches_every_trainable_parameter"),
        (MeanOfMeans, "test_metrics_do_not_depend_on_how_samples_are_batched"),
        (Pickling, "test_exported_parts_hold_no_pickle"),
    ],
)
def test_the_contract_catches_the_flaw(flawed: type[Line], caught_by: str, tmp_path: Path) -> None:
    contract = type("Flawed", (TestLine,), {"make_task": lambda _: flawed()})()
    arguments = [tmp_path] if caught_by == "test_exported_parts_hold_no_pickle" else []
    with pytest.raises(AssertionError):
        getattr(contract, caught_by)(*arguments)
