from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import Job
from yunlu.training.data.batches import sequential_batches
from yunlu.training.tasks.tabular import TabularClassification, TabularRegression
from yunlu.training.tasks.task import Evaluation, SavesArtifacts, Task


def job(data: Any, *, args: dict[str, Any] | None = None, **train: Any) -> Job:
    data = {"train": str(data)} if isinstance(data, (str, Path)) else data
    model = {"name": "mlp", "args": args or {}}
    return Job.model_validate({"task": "tabular", "model": model, "data": data, "train": train})


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def learn(task: Task, asked: Job, *, epochs: int) -> Evaluation:
    """The smallest loop that trains a task, then its test score."""
    torch.manual_seed(0)
    splits, model = task.load(asked), task.build(asked)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in sequential_batches(splits.train, task.collate, micro_batch=32, workers=0):
            optimizer.zero_grad()
            (task.loss(model, batch)[0] / batch.items).backward()
            optimizer.step()
    model.eval()
    scorer = task.scorer()
    assert splits.test is not None
    with torch.no_grad():
        for batch in sequential_batches(splits.test, task.collate, micro_batch=50, workers=0):
            scorer.add(task.loss(model, batch)[1], batch)
    return scorer.result()


@pytest.mark.parametrize("task", [TabularClassification(), TabularRegression()])
def test_the_tasks_open_the_door(task: object) -> None:
    assert isinstance(task, Task)
    assert isinstance(task, SavesArtifacts)


def test_classification_learns_far_above_the_majority() -> None:
    found = learn(TabularClassification(), job("sklearn:breast_cancer"), epochs=5)
    assert found.metrics["accuracy"] > 0.9
    assert found.confusion is not None
    assert found.confusion.labels == ["benign", "malignant"]


def test_regression_learns_far_above_the_mean_and_scores_in_original_units() -> None:
    data = {"train": "sklearn:diabetes", "split": {"test": 0.25}}
    found = learn(TabularRegression(), job(data, args={"hidden": [32], "dropout": 0.1}), epochs=8)
    assert found.metrics["r2"] > 0.25
    assert 30 < found.metrics["rmse"] < 70


def test_one_fetch_of_many_rows_equals_rows_fetched_one_by_one() -> None:
    task = TabularClassification()
    samples: Any = task.load(job("sklearn:iris")).train
    at_once = task.collate(samples.__getitems__([5, 2, 9]))
    singly = task.collate([samples[5], samples[2], samples[9]])
    assert at_once.samples == at_once.items == singly.samples == 3
    torch.testing.assert_close(at_once.inputs, singly.inputs)
    torch.testing.assert_close(at_once.targets, singly.targets)


def test_the_loss_is_a_sum_so_that_batches_add_up() -> None:
    task = TabularRegression()
    asked = job("sklearn:diabetes")
    samples: Any = task.load(asked).train
    model = task.build(asked).eval()
    whole = task.loss(model, task.collate(samples.__getitems__([0, 1, 2])))[0]
    parts = [task.loss(model, task.collate([samples[index]]))[0] for index in range(3)]
    torch.testing.assert_close(whole, torch.stack(parts).sum())


def test_loading_again_gives_the_same_tensors() -> None:
    first, again = (TabularClassification().load(job("sklearn:wine")) for _ in range(2))
    assert first.fingerprint == again.fingerprint
    torch.testing.assert_close(first.train[7], again.train[7])


def test_words_and_missing_cells_become_features(tmp_path: Path) -> None:
    rows = "".join(f"{n % 7},{'' if n % 5 else n},c{n % 3},{n % 2}\n" for n in range(60))
    asked = job(write(tmp_path / "a.csv", "a,b,colour,label\n" + rows))
    splits = TabularClassification().load(asked)
    assert splits.about["features"] == 1 + 2 + 3
    assert splits.about["labels"] == ["0", "1"]


def test_many_words_reach_an_embedding_that_learns(tmp_path: Path) -> None:
    rows = "".join(f"w{n % 60},{(n % 60) % 2}\n" for n in range(1200))
    task, asked = TabularClassification(), job(write(tmp_path / "a.csv", "word,label\n" + rows))
    assert learn(task, asked, epochs=8).metrics["accuracy"] > 0.95


def test_an_unknown_label_names_itself_and_its_row(tmp_path: Path) -> None:
    train = write(tmp_path / "a.csv", "x,label\n1,cat\n2,dog\n3,cat\n4,dog\n")
    test = write(tmp_path / "b.csv", "x,label\n1,cat\n2,dgo\n")
    data = {"train": str(train), "test": str(test), "split": {"validation": 0}}
    with pytest.raises(DataError, match="row 2 of the test data has the label 'dgo'") as raised:
        TabularClassification().load(job(data))
    assert "did you mean 'dog'?" in str(raised.value)


def test_a_missing_label_names_its_row_in_the_file(tmp_path: Path) -> None:
    rows = "".join(f"{n},{'' if n == 17 else 'ab'[n % 2]}\n" for n in range(40))
    path = write(tmp_path / "a.csv", "x,label\n" + rows)
    with pytest.raises(DataError, match=r"row 18 of the \w+ data has no label"):
        TabularClassification().load(job(path))


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        (TabularClassification, "x,label\n1,a\n2,a\n3,a\n4,a\n", "one label only, 'a'"),
        (TabularClassification, "x,y\n1,.5\n2,.7\n3,.1\n4,.2\n", "tabular-regression"),
        (TabularRegression, "x,y\n1,a\n2,b\n3,c\n4,d\n", "tabular-classification"),
        (TabularRegression, "x,y\n1,1\n2,\n3,2\n4,3\n", "row 2 of the training data has no number"),
        (TabularRegression, "x,height\n1,1\n2,2\n3,3\n", "set data.target"),
        (TabularRegression, "y\n1\n2\n3\n4\n", "no column to learn from"),
        (TabularClassification, "x,y\n1,1\n2,1.5\n3,1\n4,2\n", "such as 1.5"),
        (TabularRegression, "x,y\n1,1\n2,many\n3,2\n4,3\n", "row 2 has 'many'"),
        (TabularClassification, "x,z,y\n,nan,a\n,nan,b\n", "no row has a value in x, z"),
    ],
)
def test_a_target_that_does_not_fit_is_explained(
    task: type[Task], text: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", text)
    data = {"train": str(path), "split": {"validation": 0, "test": 0}}
    with pytest.raises(DataError) as raised:
        task().load(job(data))
    assert message in str(raised.value)


def test_whole_numbers_are_labels_in_their_own_order(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n % 11}\n" for n in range(220))
    splits = TabularClassification().load(job(write(tmp_path / "a.csv", "x,label\n" + rows)))
    assert splits.about["labels"] == [str(n) for n in range(11)]


def test_the_inputs_of_a_job_are_the_only_features() -> None:
    data = {"train": "sklearn:iris", "input": ["petal length (cm)"]}
    assert TabularClassification().load(job(data)).about["features"] == 1


def test_a_target_among_the_inputs_is_refused() -> None:
    data = {"train": "sklearn:iris", "input": ["label"]}
    with pytest.raises(DataError, match="both input and target"):
        TabularClassification().load(job(data))


def test_a_model_with_other_outputs_than_labels_is_a_model_error() -> None:
    task = TabularClassification()
    samples: Any = task.load(job("sklearn:iris")).train
    with pytest.raises(ModelError, match=r"expected \(2, 3\)"):
        task.loss(nn.Linear(4, 7), task.collate(samples.__getitems__([0, 1])))


def test_label_smoothing_of_the_job_reaches_the_loss() -> None:
    plain, smooth = TabularClassification(), TabularClassification()
    asked = job("sklearn:iris")
    samples: Any = plain.load(asked).train
    smooth.load(job("sklearn:iris", label_smoothing=0.5))
    model, batch = plain.build(asked).eval(), plain.collate(samples.__getitems__([0, 1]))
    assert plain.loss(model, batch)[0] != smooth.loss(model, batch)[0]


def test_saved_parts_hold_what_inference_needs(tmp_path: Path) -> None:
    classification, regression = TabularClassification(), TabularRegression()
    classification.load(job("sklearn:iris"))
    classification.save_artifacts(tmp_path)
    saved = json.loads((tmp_path / "tabular.json").read_text())
    assert saved["labels"] == ["setosa", "versicolor", "virginica"]
    assert len(saved["features"]["numeric"]) == 4
    regression.load(job("sklearn:diabetes"))
    regression.save_artifacts(tmp_path)
    assert json.loads((tmp_path / "tabular.json").read_text())["std"] > 50


def test_a_label_that_falls_wholly_into_the_held_out_share_is_known(tmp_path: Path) -> None:
    rows = "".join(f"{i},kind-{i % 25}\n" for i in range(50))  # each label occurs twice
    splits = TabularClassification().load(job(write(tmp_path / "a.csv", "a,label\n" + rows)))
    assert len(splits.about["labels"]) == 25


@pytest.mark.parametrize("task", [TabularClassification, TabularRegression])
def test_a_missing_target_is_named_with_a_way_out(task: Any, tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2}\n" for i in range(20))
    table = write(tmp_path / "t.csv", f"x,y\n{rows}20,nan\n")
    with pytest.raises(DataError, match="row 21 of the training data") as caught:
        task().load(job({"train": str(table), "split": {"validation": 0.0, "test": 0.0}}))
    assert "leave such rows out" in (caught.value.hint or "")
