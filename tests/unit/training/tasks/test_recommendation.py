from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import Job
from yunlu.training.data.batches import sequential_batches
from yunlu.training.data.synthetic import generate
from yunlu.training.data.table import DataTable
from yunlu.training.models.networks import MatrixFactorization
from yunlu.training.tasks.recommendation import TEST_NEGATIVES, RankingScorer, Recommendation
from yunlu.training.tasks.task import Batch, Samples, SavesArtifacts, Task


def job(data: Any, **args: Any) -> Job:
    data = {"train": str(data)} if isinstance(data, (str, Path)) else data
    model = {"name": "factors", "args": args}
    return Job.model_validate({"task": "recommendation", "model": model, "data": data})


def train(task: Recommendation, asked: Job, *, epochs: int) -> tuple[nn.Module, Samples]:
    """The smallest loop that trains the task."""
    torch.manual_seed(0)
    splits, model = task.load(asked), task.build(asked)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(epochs):
        for batch in sequential_batches(splits.train, task.collate, micro_batch=256, workers=0):
            optimizer.zero_grad()
            (task.loss(model, batch)[0] / batch.items).backward()
            optimizer.step()
    assert splits.test is not None
    return model.eval(), splits.test


def score(task: Recommendation, model: nn.Module, samples: Samples) -> dict[str, float]:
    scorer = task.scorer()
    with torch.no_grad():
        for batch in sequential_batches(samples, task.collate, micro_batch=200, workers=0):
            scorer.add(task.loss(model, batch)[1], batch)
    return scorer.result().metrics


@pytest.fixture
def choices(tmp_path: Path) -> Path:
    """The films people liked, without their ratings."""
    films = generate("films")
    assert isinstance(films, DataTable)
    liked = films.take(np.flatnonzero(np.asarray(films["rating"]) >= 4))
    rows = "".join(f"{u},{i}\n" for u, i in zip(liked["user"], liked["item"], strict=True))
    (tmp_path / "choices.csv").write_text("userId,movie_id\n" + rows)
    return tmp_path / "choices.csv"


def test_the_task_opens_the_door() -> None:
    assert isinstance(Recommendation(), Task)
    assert isinstance(Recommendation(), SavesArtifacts)


def test_ratings_are_learned_far_beyond_what_averages_tell() -> None:
    task = Recommendation()
    asked = job("synthetic:films", dim=8)
    model, test = train(task, asked, epochs=12)
    learned = score(task, model, test)
    with torch.no_grad():  # without its factors the same model knows averages alone
        model.get_parameter("user_factors.weight").zero_()
    averages = score(task, model, test)
    assert task.metric == "rmse"
    assert learned["rmse"] < 0.7
    assert averages["rmse"] > 0.85


def test_a_perceptron_over_the_embeddings_trains_too() -> None:
    task = Recommendation()
    data = {"train": "synthetic:films", "limit": 2000}
    model, test = train(task, job(data, dim=4, hidden=[16]), epochs=2)
    assert score(task, model, test)["rmse"] < 1.2
    assert any("interaction" in name for name, _ in model.named_parameters())


def test_choices_without_ratings_are_ranked_above_others(choices: Path) -> None:
    task = Recommendation()
    model, test = train(task, job(choices, dim=8), epochs=12)
    found = score(task, model, test)
    assert task.metric == "auc"
    assert found["auc"] > 0.62
    assert found["hit_rate_at_10"] > 0.18


def test_what_stands_beside_a_choice_was_never_chosen_and_is_always_the_same(
    choices: Path,
) -> None:
    first, again = (Recommendation().load(job(choices)) for _ in range(2))
    known: set[tuple[int, int]] = set()
    drawn: list[tuple[int, int]] = []
    for samples in (first.train, first.validation, first.test):
        assert samples is not None
        for index in range(len(samples)):
            users, items, _ = samples[index]
            pairs = list(zip(users[0].tolist(), items[0].tolist(), strict=True))
            known.add(pairs[0])
            drawn += pairs[1:]
    assert not known & set(drawn)
    torch.testing.assert_close(first.train[3], again.train[3])
    assert first.test is not None
    assert first.test[0].items.shape == (1, 1 + TEST_NEGATIVES)


def test_a_user_who_chose_everything_leaves_nothing_to_compare(tmp_path: Path) -> None:
    rows = "".join(f"u,{item}\n" for item in range(20))
    (tmp_path / "a.csv").write_text("user,item\n" + rows)
    with pytest.raises(DataError, match="nearly every item"):
        Recommendation().load(job(tmp_path / "a.csv"))


def test_strangers_fall_to_the_unknown_row_that_stays_zero(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item,rating\n1,10,4\n2,20,2\n1,20,5\n2,10,1\n")
    (tmp_path / "b.csv").write_text("user,item,rating\n9,10,4\n1,99,2\n")
    data = {"train": str(tmp_path / "a.csv"), "test": str(tmp_path / "b.csv")}
    asked = job({**data, "split": {"validation": 0}}, dim=3)
    task = Recommendation()
    model, test = train(task, asked, epochs=3)
    users, items = task.collate([test[0], test[1]]).inputs
    assert (users.tolist(), items.tolist()) == ([0, 1], [1, 0])
    for name in ("user_factors", "item_factors", "user_bias", "item_bias"):
        assert (model.get_parameter(f"{name}.weight")[0] == 0).all()


def test_one_fetch_of_many_pairs_equals_pairs_fetched_one_by_one() -> None:
    task = Recommendation()
    samples: Any = task.load(job("synthetic:films")).train
    at_once = task.collate(samples.__getitems__([4, 1]))
    singly = task.collate([samples[4], samples[1]])
    assert at_once.samples == at_once.items == 2
    torch.testing.assert_close(at_once.inputs, singly.inputs)
    torch.testing.assert_close(at_once.targets, singly.targets)


def test_ranks_count_ties_half() -> None:
    scorer = RankingScorer()
    scores = torch.tensor([[1.0, 0.0, 1.0, 2.0, 0.0], [3.0, 0.0, 1.0, 2.0, 0.0]])
    targets = torch.zeros(2, 5)
    scorer.add(scores.reshape(-1), Batch(inputs=(), targets=targets, samples=2, items=10))
    assert scorer.result().metrics["auc"] == pytest.approx((2.5 / 4 + 1) / 2)


def test_a_rating_that_is_no_number_names_its_row(tmp_path: Path) -> None:
    rows = "".join(f"u{n},i{n % 3},{'' if n == 4 else 3}\n" for n in range(20))
    (tmp_path / "a.csv").write_text("user,item,rating\n" + rows)
    with pytest.raises(DataError, match=r"row 5 of the \w+ data has no number in 'rating'"):
        Recommendation().load(job(tmp_path / "a.csv"))


def test_columns_are_named_by_the_job_where_their_names_say_nothing(tmp_path: Path) -> None:
    rows = "".join(f"{n % 5},{n % 3},{n % 4}\n" for n in range(40))
    (tmp_path / "a.csv").write_text("who,what,liked\n" + rows)
    with pytest.raises(DataError, match="who, what, liked"):
        Recommendation().load(job(tmp_path / "a.csv"))
    data = {"train": str(tmp_path / "a.csv"), "input": ["who", "what"], "target": "liked"}
    assert Recommendation().load(job(data)).about["columns"] == ["who", "what", "liked"]
    with pytest.raises(DataError, match=r"expected two columns: \[user, item\]"):
        Recommendation().load(job({**data, "input": "who"}))


def test_a_model_with_other_scores_than_pairs_is_a_model_error() -> None:
    class Wide(nn.Module):
        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            return torch.zeros(len(users), 3) + items[:, None]

    task = Recommendation()
    samples: Any = task.load(job("synthetic:films")).train
    with pytest.raises(ModelError, match="expected one each"):
        task.loss(Wide(), task.collate(samples.__getitems__([0, 1])))


def test_saved_parts_number_users_and_items_as_the_model_does(tmp_path: Path) -> None:
    task, asked = Recommendation(), job("synthetic:films")
    task.load(asked)
    task.save_artifacts(tmp_path)
    saved = json.loads((tmp_path / "recommendation.json").read_text())
    model = task.build(asked)
    assert isinstance(model, MatrixFactorization)
    assert model.user_factors.num_embeddings == len(saved["users"]) + saved["first_number"]
    assert 2 < saved["mean"] < 4


def test_users_and_items_that_cannot_be_told_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,2\n" * 20)
    with pytest.raises(DataError, match=r"data\.input: \[USER_COLUMN, ITEM_COLUMN\]"):
        Recommendation().load(job(path))
