from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from yunlu.core.errors import DataError, ModelError
from yunlu.spec.job import DataSpec
from yunlu.training.data.table import ImageRef
from yunlu.training.tasks.media import LabelledSamples, Labels, classification_loss, sole_input


def test_labels_are_ordered_by_value_or_by_spelling() -> None:
    assert Labels.learn(np.array([10, 9, 2, 10])).names == ["2", "9", "10"]
    assert Labels.learn(np.array([1.0, 0.0])).names == ["0", "1"]
    assert Labels.learn(["no", "yes", "maybe"]).names == ["maybe", "no", "yes"]


def test_labels_become_indices() -> None:
    labels = Labels.learn(["cat", "ant", "bee"])

    assert labels.encode(["bee", "cat"], ["x", "y"], part="test").tolist() == [1, 2]


def test_a_label_that_training_has_not_seen_is_named_with_its_row_and_file() -> None:
    labels = Labels.learn(["cat", "dog"])
    files = [ImageRef("a.png"), ImageRef("far/b.png")]

    with pytest.raises(DataError, match=r"test data.*'cow'.*row 2 \(far/b\.png\)") as found:
        labels.encode(["cat", "cow"], files, part="test")

    assert found.value.hint == "known labels: cat, dog"


@pytest.mark.parametrize("missing", [None, "", float("nan")])
def test_a_missing_label_is_refused(missing: object) -> None:
    with pytest.raises(DataError, match="row 2 of the training data has no label"):
        Labels.learn(["a", missing, "b"])


def test_a_single_label_is_nothing_to_learn() -> None:
    with pytest.raises(DataError, match="single label 'a'"):
        Labels.learn(["a", "a"])


def test_pairs_are_the_same_one_by_one_and_many_at_once() -> None:
    class Plain:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index, index])

    pairs = LabelledSamples(Plain(), torch.tensor([5, 6, 7]))

    assert [target for _, target in pairs.__getitems__([2, 0])] == [7, 5]
    assert torch.equal(pairs.__getitems__([2])[0][0], pairs[2][0])


def test_the_loss_is_summed_and_shares_are_read_as_such() -> None:
    scores, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = functional.cross_entropy(scores, targets, reduction="sum")

    for outputs, are_probabilities in ((scores, False), (scores.softmax(dim=1), True)):
        loss, _ = classification_loss(
            outputs, targets, classes=3, label_smoothing=0.0, are_probabilities=are_probabilities
        )
        torch.testing.assert_close(loss, expected)


def test_a_model_with_too_few_outputs_is_refused() -> None:
    with pytest.raises(ModelError, match=r"\(2, 3\).*\(2, 4\) was expected"):
        classification_loss(
            torch.zeros(2, 3),
            torch.tensor([0, 1]),
            classes=4,
            label_smoothing=0,
            are_probabilities=False,
        )


def test_one_input_column_may_stand_in_a_list(tmp_path: Path) -> None:
    assert sole_input(DataSpec(train="x", input=["picture"])) == "picture"
    assert sole_input(DataSpec(train="x")) is None
    with pytest.raises(DataError, match="2 columns"):
        sole_input(DataSpec(train="x", input=["a", "b"]))
