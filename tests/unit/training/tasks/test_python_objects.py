"""Live objects: the user's module, data and loss, without a job file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import yunlu
from yunlu.core.errors import DataError, JobError, YunluError
from yunlu.spec.job import Job
from yunlu.training.tasks.python_objects import ObjectTask

JOB = Job.model_validate({"task": "t", "model": "m", "data": "d"})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def classes() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(dim=1)


def mean_by_user(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.sum(dim=1) - targets).square().mean()


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), torch.arange(40) % 3),
        (nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1), torch.arange(40) % 3),
        (functional.cross_entropy, torch.arange(40) % 3),
        (nn.MSELoss(), torch.randn(40, 3)),
        (functional.l1_loss, torch.randn(40, 3)),
        (nn.BCEWithLogitsLoss(), torch.rand(40, 3)),
        (mean_by_user, torch.randn(40)),
    ],
    ids=["ce", "ce-ignore", "f-ce", "mse", "f-l1", "bce", "own"],
)
def test_the_sum_over_the_count_is_the_users_own_mean(
    loss: Callable[..., Any], targets: Tensor
) -> None:
    inputs, model = classes()[0], net()
    task = ObjectTask(model=model, data={"train": (inputs, targets)}, loss=loss)
    whole = {"train": "d", "split": {"validation": 0, "test": 0}}
    splits = task.load(Job.model_validate({"task": "t", "model": "m", "data": whole}))
    batch = task.collate([splits.train[i] for i in range(len(splits.train))])
    assert batch.samples == 40
    total, _ = task.loss(model, batch)
    torch.testing.assert_close(total / batch.items, loss(model(inputs), targets))


def test_a_class_weighted_loss_is_refused_rather_than_averaged_wrongly() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(JobError, match="class-weighted"):
        ObjectTask(model=net(), data=classes(), loss=loss).load(JOB)


def test_parts_are_held_out_without_overlap() -> None:
    inputs = torch.arange(50.0).unsqueeze(1)
    splits = ObjectTask(model=nn.Linear(1, 1), data=(inputs, inputs)).load(JOB)
    assert splits.validation is not None
    assert splits.test is not None
    parts = [splits.train, splits.validation, splits.test]
    seen = [float(part[i][0]) for part in parts for i in range(len(part))]
    assert sorted(seen) == inputs.flatten().tolist()
    assert [len(part) for part in parts] == [40, 5, 5]


def test_a_torch_data_set_of_dictionaries_works() -> None:
    class Pairs(Dataset[Any]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            return {"left": torch.ones(2) * index, "right": torch.ones(2)}, float(index)

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return ((left + right) * self.scale).sum(dim=1).double()

    task = ObjectTask(model=Adds(), data=Pairs())
    splits = task.load(JOB)
    batch = task.collate([splits.train[i] for i in range(4)])
    loss, _ = task.loss(Adds(), batch)
    assert loss.requires_grad


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((np.zeros((3, 2)), np.zeros(4)), "3 inputs but 4 targets"),
        ({"trian": (np.zeros((3, 2)), np.zeros(3))}, "no part 'trian'"),
        ((np.zeros((0, 2)), np.zeros(0)), "empty"),
        (iter([]), "not a map-style data set"),
        ([1, 2, 3], "pair"),
    ],
)
def test_data_that_cannot_be_used_is_refused_in_words(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ObjectTask(model=net(), data=data).load(JOB)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": nn.Linear}, "the class Linear"),
        ({"data": "rows.csv"}, "samples in memory"),
        ({"loss": "mse"}, "a function of"),
    ],
)
def test_objects_of_the_wrong_kind_are_refused_before_a_run_is_made(
    parts: dict[str, Any], words: str
) -> None:
    with pytest.raises(YunluError, match=words):
        yunlu.train(**{"model": net(), "data": classes(), **parts}, steps=1)
    assert not yunlu.list_runs()


def test_train_takes_live_objects_and_returns_the_run() -> None:
    run = yunlu.train(
        model=net(),
        data=classes(),
        loss=nn.CrossEntropyLoss(),
        epochs=40,
        batch=8,
        lr=0.05,
        metrics={"sureness": lambda scores, _: scores.softmax(-1).amax(-1).mean()},
    )
    assert 1 / 3 < run.metrics["sureness"] < 1
    assert run.state == "finished"
    assert run.metrics["accuracy"] >= 0.5
    assert len(run.history()) == 40 * 4


def test_a_key_that_means_nothing_to_the_task_is_warned_of() -> None:
    run = yunlu.train(model=net(), data=classes(), steps=2, label_smoothing=0.1)
    said = [event.message for event in run.events() if event.kind == "warning"]
    assert said == ["train.label_smoothing is set, but the task python:objects does not use it."]


def test_a_keras_model_that_ends_in_a_softmax_is_not_given_another() -> None:
    from yunlu.core.settings import use_keras_on_torch

    use_keras_on_torch()
    keras = pytest.importorskip("keras")
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])
    task = ObjectTask(model=model, data=classes())
    splits = task.load(JOB)
    module = task.build(JOB)
    batch = task.collate([splits.train[index] for index in range(8)])
    loss, _ = task.loss(module, batch)
    chances = module(*batch.inputs)
    expected = nn.functional.nll_loss(chances.log(), batch.targets, reduction="sum")
    assert torch.allclose(loss, expected)


def test_a_live_keras_model_trains_and_follows_evaluation() -> None:
    from yunlu.core.settings import use_keras_on_torch

    use_keras_on_torch()
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(16, "relu"), layers.Dropout(0.2), layers.Dense(3)]
    )
    before = [variable.value.detach().clone() for variable in model.variables]
    run = yunlu.train(model=model, data=classes(), loss=nn.CrossEntropyLoss(), epochs=40, lr=0.02)
    assert run.metrics["accuracy"] >= 0.5
    assert any(
        not torch.equal(old, variable.value)
        for old, variable in zip(before, model.variables, strict=True)
    )


def test_a_target_that_is_nan_is_named_unless_the_loss_is_the_users_own() -> None:
    targets = torch.randn(20)
    targets[[4, 9]] = torch.nan
    data = {
        "train": (torch.randn(20, 3), targets),
        "validation": (torch.randn(5, 3), torch.ones(5)),
    }
    asked = Job.model_validate({"task": "python:objects", "model": "net", "data": "python:objects"})
    with pytest.raises(DataError, match="target of sample 4 of the train data is NaN") as caught:
        ObjectTask(model=nn.Linear(3, 1), data=data).load(asked)
    assert "1 more" in caught.value.message
    assert "fill them in" in (caught.value.hint or "")

    def own(outputs: Tensor, wanted: Tensor) -> Tensor:
        return (outputs.squeeze(-1) - wanted.nan_to_num()).square().mean()

    ObjectTask(model=nn.Linear(3, 1), data=data, loss=own).load(asked)
    with pytest.raises(DataError, match="is NaN"):  # held out of the training data, too
        ObjectTask(model=nn.Linear(3, 1), data=data["train"]).load(asked)
