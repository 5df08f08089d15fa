"""Recommendation: rating prediction, or ranking of implicit feedback."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from yunlu.core.errors import DataError, ModelError
from yunlu.core.files import write_atomically
from yunlu.training.data.sources import Tables, load_tables
from yunlu.training.data.table import conventional_column, find_column, rows_to_table
from yunlu.training.models.build import build_model
from yunlu.training.models.initial_weights import read_exported
from yunlu.training.models.networks import MatrixFactorization
from yunlu.training.tasks.scoring import RegressionScorer
from yunlu.training.tasks.task import (
    Batch,
    Evaluation,
    ModelPrediction,
    Scorer,
    Splits,
    call,
    logits_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.spec.job import Job
    from yunlu.training.data.table import DataTable

USERS = ("user", "userid", "customer", "customerid", "reviewer", "reviewerid", "visitor")
ITEMS = ("item", "itemid", "film", "filmid", "movie", "movieid", "product", "productid", "book")
RATINGS = ("rating", "ratings", "stars", "score", "target", "label", "y")
TRAIN_NEGATIVES, TEST_NEGATIVES, CUT = 4, 99, 10
"""Negative samples per positive item: in training, and for ranking (hit rate at 10)."""
_NEGATIVE_STREAM = 3


class UserItemPairs(NamedTuple):
    """Interactions ``(samples, candidates)``: one rated item, or a positive and negatives."""

    users: Tensor
    items: Tensor
    targets: Tensor


class UserItemSamples:
    """A split in memory, as tensors."""

    def __init__(self, users: np.ndarray, items: np.ndarray, targets: np.ndarray) -> None:
        self._all = UserItemPairs(*map(torch.from_numpy, (users, items, targets)))

    def __len__(self) -> int:
        return len(self._all.users)

    def __getitem__(self, index: int) -> UserItemPairs:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[UserItemPairs]:
        """Torch's convention for batched fetching; all samples as one ``UserItemPairs``."""
        chosen = torch.tensor(indices)
        return [UserItemPairs(*(tensor[chosen] for tensor in self._all))]


class Recommendation:
    """Rating prediction (RMSE), or ranking of chosen items against negatives (AUC)."""

    metric = "rmse"
    special_keys = frozenset[str]()
    _columns: tuple[str, str, str | None]
    _users: dict[str, int]
    _items: dict[str, int]

    def __init__(self) -> None:
        self._mean, self._std = 0.0, 1.0

    def load(self, job: Job) -> Splits:
        """Read interactions; index users and items of the training split."""
        tables = load_tables(job.data, seed=job.train.seed)
        self._columns = _find_columns(job, tables.train)
        user, item, rating = self._columns
        # 0 means not seen in training.
        self._users = {name: index for index, name in enumerate(_names(tables.train, user), 1)}
        self._items = {name: index for index, name in enumerate(_names(tables.train, item), 1)}
        if rating is None:
            self.metric = "auc"
            parts = self._choices(tables, seed=job.train.seed)
        else:
            values = _ratings(tables.train, rating, "training")
            self._mean, self._std = float(values.mean()), float(values.std()) or 1.0
            parts = {part: self._rated(table, rating, part) for part, table in _parts(tables)}
        return Splits(
            train=parts["training"],
            validation=parts.get("validation"),
            test=parts.get("test"),
            fingerprint=tables.fingerprint,
            about={
                "source": tables.source,
                "columns": [name for name in self._columns if name],
                "users": len(self._users),
                "items": len(self._items),
                "feedback": "choices" if rating is None else "ratings",
            },
        )

    def build(self, job: Job) -> nn.Module:
        """``factors``, or a model of the user's that takes ``(users, items)``."""
        sizes = {"users": len(self._users) + 1, "items": len(self._items) + 1}
        return build_model(job.model, builtins={"factors": MatrixFactorization}, sizes=sizes)

    def collate(self, samples: Sequence[UserItemPairs]) -> Batch:
        """Pairs to one flat batch of users and items."""
        users, items, targets = (
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in zip(*samples, strict=True)
        )
        return Batch(
            inputs=(users.reshape(-1), items.reshape(-1)),
            targets=targets,
            samples=len(targets),
            items=targets.numel(),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Squared error of ratings, or cross-entropy of choices, summed over the pairs."""
        outputs = call(model, batch)
        scores = logits_of(outputs)
        if scores.numel() != batch.items:
            raise ModelError(
                f"the model returned scores of shape {tuple(scores.shape)} for {batch.items} pairs "
                f"of user and item; expected one each"
            )
        scores = scores.reshape(batch.targets.shape).float()
        if self._columns[2] is None:
            loss = functional.binary_cross_entropy_with_logits(
                scores, batch.targets, reduction="sum"
            )
            return loss, outputs
        return (scores - batch.targets).square().sum(), outputs

    def scorer(self) -> Scorer:
        """RMSE, MAE and R² of ratings; AUC and hit rate of choices."""
        if self._columns[2] is None:
            return RankingScorer()
        return RegressionScorer(scale=self._std)

    @property
    def target_scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the ratings; choices have none."""
        return self._mean, self._std

    def save_artifacts(self, directory: Path) -> None:
        """``recommendation.json``: columns, users and items by number, the scale of ratings."""
        parts = {
            "columns": dict(zip(("user", "item", "rating"), self._columns, strict=True)),
            "users": list(self._users),
            "items": list(self._items),
            "first_number": 1,
            "mean": self._mean,
            "std": self._std,
        }
        text = json.dumps(parts, ensure_ascii=False)
        write_atomically(directory / "recommendation.json", text)

    def restore(self, job: Job, directory: Path) -> None:
        """Read ``recommendation.json``."""
        del job
        settings = read_exported(directory)
        columns = settings["columns"]
        self._columns = (columns["user"], columns["item"], columns["rating"])
        self._users = {name: index for index, name in enumerate(settings["users"], 1)}
        self._items = {name: index for index, name in enumerate(settings["items"], 1)}
        self._mean, self._std = settings["mean"], settings["std"]
        self.metric = "auc" if self._columns[2] is None else "rmse"

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[ModelPrediction]:
        """The rating of each pair of user and item, or the probability that the item is chosen."""
        users, items = self._numbers(rows_to_table(inputs, self._columns[:2]))
        samples = UserItemSamples(
            users[:, None], items[:, None], np.zeros((len(users), 1), dtype=np.float32)
        )
        batch = self.collate(samples.__getitems__(list(range(len(users)))))
        scores = logits_of(self.loss(model, batch)[1]).double().reshape(-1)
        is_choice = self._columns[2] is None
        values = scores.sigmoid() if is_choice else scores * self._std + self._mean
        return [ModelPrediction(value=value) for value in values.tolist()]

    def _rated(self, table: DataTable, rating: str, part: str) -> UserItemSamples:
        users, items = self._numbers(table)
        scaled = (_ratings(table, rating, part) - self._mean) / self._std
        return UserItemSamples(users[:, None], items[:, None], scaled.astype(np.float32)[:, None])

    def _choices(self, tables: Tables, *, seed: int) -> dict[str, UserItemSamples]:
        """Positive items with negatives that the user never chose, drawn once for all epochs."""
        numbers = {part: self._numbers(table) for part, table in _parts(tables)}
        chosen = np.unique(
            np.concatenate(
                [users * (len(self._items) + 1) + items for users, items in numbers.values()]
            )
        )
        samples: dict[str, UserItemSamples] = {}
        for number, (part, (users, items)) in enumerate(numbers.items()):
            rng = np.random.default_rng((seed, _NEGATIVE_STREAM, number))
            count = TRAIN_NEGATIVES if part == "training" else TEST_NEGATIVES
            others = _draw_negatives(users, count, chosen, items=len(self._items), rng=rng)
            candidates = np.concatenate([items[:, None], others], axis=1)
            targets = np.zeros(candidates.shape, dtype=np.float32)
            targets[:, 0] = 1.0
            everyone = np.repeat(users[:, None], candidates.shape[1], axis=1)
            samples[part] = UserItemSamples(everyone, candidates, targets)
        return samples

    def _numbers(self, table: DataTable) -> tuple[np.ndarray, np.ndarray]:
        user, item, _ = self._columns
        users = [self._users.get(str(name), 0) for name in table[user]]
        items = [self._items.get(str(name), 0) for name in table[item]]
        return np.array(users, dtype=np.int64), np.array(items, dtype=np.int64)


class RankingScorer:
    """Rank of the positive item, first of its row, among negatives; ties count half."""

    def __init__(self) -> None:
        self._count = 0
        self._above = self._hits = 0.0

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add one score per pair of the batch."""
        scores = logits_of(outputs).detach().reshape(batch.targets.shape).cpu().double()
        choice, others = scores[:, :1], scores[:, 1:]
        worse = (others < choice).sum(dim=1) + 0.5 * (others == choice).sum(dim=1)
        self._count += len(scores)
        self._above += float(worse.sum()) / others.shape[1]
        self._hits += float((others.shape[1] - worse < CUT).sum())

    def result(self) -> Evaluation:
        """``auc`` and ``hit_rate_at_10``."""
        if not self._count:
            return Evaluation(metrics={"auc": math.nan, f"hit_rate_at_{CUT}": math.nan})
        return Evaluation(
            metrics={
                "auc": self._above / self._count,
                f"hit_rate_at_{CUT}": self._hits / self._count,
            }
        )


def _find_columns(job: Job, table: DataTable) -> tuple[str, str, str | None]:
    requested = job.data.input
    if requested is not None and (isinstance(requested, str) or len(requested) != 2):
        raise DataError(f"data.input is {requested!r}; expected two columns: [user, item]")
    if requested is None and not (
        conventional_column(table, USERS) and conventional_column(table, ITEMS)
    ):
        raise DataError(
            f"cannot tell which columns are user and item: the data has {', '.join(table.columns)}",
            hint="name them: data.input: [USER_COLUMN, ITEM_COLUMN]",
        )
    user, item = requested or (None, None)
    rating = job.data.target or conventional_column(table, RATINGS)
    if rating is not None:
        table[rating]  # an unknown name is an error that suggests the nearest
    return (
        find_column(table, user, USERS, key="data.input"),
        find_column(table, item, ITEMS, key="data.input"),
        rating,
    )


def _names(table: DataTable, column: str) -> list[str]:
    """Each name once, in the order of spelling: numbers must not depend on the order of rows."""
    return sorted({str(name) for name in table[column]})


def _ratings(table: DataTable, column: str, part: str) -> np.ndarray:
    values = table[column]
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf" or values.ndim != 1:
        raise DataError(f"column {column!r} of the {part} data does not hold one number per row")
    values = values.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        row = table.source_row(int(bad[0]))
        raise DataError(
            f"row {row} of the {part} data has no number in {column!r}, its target",
            hint="fill it in, or leave such rows out: what is to be predicted cannot be guessed",
        )
    return values


def _parts(tables: Tables) -> list[tuple[str, DataTable]]:
    named = (
        ("training", tables.train),
        ("validation", tables.validation),
        ("test", tables.test),
    )
    return [(part, table) for part, table in named if table is not None]


def _draw_negatives(
    users: np.ndarray, count: int, chosen: np.ndarray, *, items: int, rng: np.random.Generator
) -> np.ndarray:
    """Negative sampling: for each user ``count`` items that the user did not choose."""
    drawn = rng.integers(1, items + 1, size=(len(users), count))
    for _ in range(200):
        wrong = np.isin(users[:, None] * (items + 1) + drawn, chosen)
        if not wrong.any():
            return drawn
        drawn[wrong] = rng.integers(1, items + 1, size=int(wrong.sum()))
    raise DataError(
        "some user has chosen nearly every item, which leaves none to compare with",
        hint="give ratings (data.target), or leave that user out",
    )
