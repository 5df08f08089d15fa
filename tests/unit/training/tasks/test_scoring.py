from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, r2_score
from torch.nn import functional

from yunlu.training.tasks.scoring import IGNORED, ClassScorer, RegressionScorer, loss_sum
from yunlu.training.tasks.task import Batch


def batch_of(targets: torch.Tensor) -> Batch:
    return Batch(inputs=(), targets=targets, samples=len(targets), items=len(targets))


@given(st.integers(2, 7), st.integers(1, 60), st.integers(0, 2**31))
def test_class_metrics_agree_with_scikit_learn_however_batches_fall(
    classes: int, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator)
    targets = torch.randint(classes, (count,), generator=generator)
    scorer = ClassScorer([str(n) for n in range(classes)])
    for part in torch.arange(count).split(7):
        scorer.add(logits[part], batch_of(targets[part]))
    found, guess = scorer.result(), logits.argmax(1)
    assert found.metrics["accuracy"] == pytest.approx(accuracy_score(targets, guess))
    assert found.metrics["macro_f1"] == pytest.approx(f1_score(targets, guess, average="macro"))
    assert found.confusion is not None
    expected = confusion_matrix(targets, guess, labels=range(classes))
    assert found.confusion.counts == expected.tolist()


def test_top_accuracy_counts_a_target_among_the_best() -> None:
    scorer = ClassScorer("abcdefg", top=2)
    logits = torch.eye(7)[:1] * 2 + torch.eye(7)[1:2]
    scorer.add(logits.repeat(3, 1), torch.tensor([0, 1, 2]))
    assert scorer.result().metrics["top2_accuracy"] == pytest.approx(2 / 3)


def test_ignored_targets_count_nowhere() -> None:
    scorer = ClassScorer("ab")
    scorer.add(torch.tensor([[[1.0, 0], [0, 1]]]), torch.tensor([[0, IGNORED]]))
    found = scorer.result()
    assert found.metrics["accuracy"] == 1
    assert found.confusion is not None
    assert sum(map(sum, found.confusion.counts)) == 1


def test_many_classes_have_no_confusion_matrix() -> None:
    scorer = ClassScorer([str(n) for n in range(101)])
    scorer.add(torch.eye(101), torch.arange(101))
    assert scorer.result().confusion is None
    assert scorer.result().metrics["accuracy"] == 1


def test_a_scorer_that_saw_nothing_says_nan() -> None:
    assert math.isnan(ClassScorer("ab").result().metrics["accuracy"])


def test_the_loss_is_a_sum_in_float32_that_skips_ignored_targets() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    targets = torch.tensor([[0, 1, IGNORED], [2, IGNORED, 4]])
    kept = targets != IGNORED
    expected = functional.cross_entropy(logits[kept].float(), targets[kept], reduction="sum")
    assert loss_sum(logits, targets).dtype == torch.float32
    torch.testing.assert_close(loss_sum(logits, targets), expected)


def test_smoothing_reaches_the_loss() -> None:
    logits, targets = torch.tensor([[9.0, -9.0]]), torch.tensor([0])
    assert loss_sum(logits, targets, label_smoothing=0.2) > loss_sum(logits, targets) + 1


def test_regression_metrics_are_in_the_targets_own_units() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(1e6, 50, 200)
    guess = truth + rng.normal(0, 10, 200)
    scorer = RegressionScorer(scale=50)
    for part in np.array_split(np.arange(200), 9):
        targets = torch.from_numpy((truth[part] - 1e6) / 50)
        scorer.add(torch.from_numpy((guess[part] - 1e6) / 50)[:, None], batch_of(targets))
    metrics = scorer.result().metrics
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.mean((guess - truth) ** 2)))
    assert metrics["mse"] == pytest.approx(metrics["rmse"] ** 2)
    assert metrics["mae"] == pytest.approx(np.abs(guess - truth).mean())
    assert metrics["r2"] == pytest.approx(r2_score(truth, guess))


def test_r2_of_constant_targets_is_nan() -> None:
    scorer = RegressionScorer()
    scorer.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    assert math.isnan(scorer.result().metrics["r2"])
