"""Whole trainings on texts of different length: the way they are laid out changes the cost alone."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.integration.conftest import ROOT, Yunlu
from tests.unit.training.tiny_hf import save_bert
from yunlu.spec.job import Job
from yunlu.training.data.batches import expected_padding, lengths_of, step_batches
from yunlu.training.data.sample_order import make_order
from yunlu.training.tasks.task import collate_for, open_task, padding_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from yunlu.training.tasks.task import Batch, Padding, Splits, Task

BATCH, STEPS = 16, 14
OWN: dict[str, Any] = {
    "name": "transformer",
    "args": {"width": 16, "layers": 2, "heads": 2, "dropout": 0.0},
}
QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def load(task: str, model: dict[str, Any], data: str) -> tuple[Task, Splits, nn.Module]:
    job = Job.model_validate(
        {"task": task, "model": model, "data": {"train": data, "limit": 200, "max_length": 48}}
    )
    opened = open_task(task)
    splits = opened.load(job)
    torch.manual_seed(0)
    # The rate below makes mistakes grow a hundredfold in a step: in float32, rounding among them.
    return opened, splits, opened.build(job).double()


def batches(
    task: Task, splits: Splits, padding: Padding, *, first: int = 0, micro: int = BATCH
) -> Iterator[list[Batch]]:
    lengths = lengths_of(splits.train)
    order = make_order(len(splits.train), BATCH, 7, lengths=lengths, padding=padding)
    return step_batches(
        splits.train,
        collate_for(task, padding),
        order,
        micro_batch=micro,
        first_step=first,
        steps=STEPS,
        workers=0,
        lengths=None if padding == "pack" else lengths,
    )


def train(task: Task, model: nn.Module, steps: Iterator[list[Batch]]) -> list[float]:
    """Plain steps with a rate that makes mistakes grow; the loss of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for micros in steps:
        items, total = sum(micro.items for micro in micros), 0.0
        for micro in micros:
            loss = task.loss(model, micro)[0] / items
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def ids_of(micros: list[Batch]) -> list[Any]:
    inputs = [micro.inputs for micro in micros]
    return [given[0].tolist() for given in inputs if isinstance(given, tuple)]


CASES = [("text-classification", "synthetic:reviews"), ("seq2seq", "synthetic:dates")]


@pytest.mark.parametrize(("name", "data"), CASES)
def test_packing_and_sorted_accumulation_train_as_padding_does(name: str, data: str) -> None:
    curves: list[list[float]] = []
    ways: list[tuple[Padding, int]] = [("pad", BATCH), ("pack", BATCH), ("pack", 5), ("pad", 5)]
    for padding, micro in ways:
        task, splits, model = load(name, OWN, data)
        assert padding in padding_options(task, model, splits)
        curves.append(train(task, model, batches(task, splits, padding, micro=micro)))
    assert curves[0][-1] < curves[0][0]
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=1e-5)


def test_an_encoder_of_hugging_face_trains_packed_as_padded(tmp_path: Path) -> None:
    model = {"name": str(save_bert(tmp_path / "bert", **QUIET))}
    curves: list[list[float]] = []
    ways: list[Padding] = ["pad", "pack"]
    for padding in ways:
        task, splits, built = load("text-classification", model, "synthetic:reviews")
        assert padding in padding_options(task, built, splits)
        curves.append(train(task, built.train(), batches(task, splits, padding)))
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


def test_batches_by_length_go_on_after_a_stop_and_pad_less() -> None:
    task, splits, model = load("text-classification", OWN, "synthetic:reviews")
    whole = train(task, model, batches(task, splits, "bucket"))
    _, _, again = load("text-classification", OWN, "synthetic:reviews")
    steps = batches(task, splits, "bucket")
    half = train(task, again, islice(steps, STEPS // 2))
    assert half == whole[: STEPS // 2]
    late = batches(task, splits, "bucket", first=STEPS // 2)
    assert [ids_of(micros) for micros in late] == [ids_of(micros) for micros in steps]

    def share(padding: Padding) -> float:
        found = [micro for micros in batches(task, splits, padding) for micro in micros]
        return sum(micro.padding for micro in found) / sum(micro.tokens for micro in found)

    assert share("pack") == 0
    assert share("bucket") < share("pad")


def test_the_predicted_padding_is_the_measured_one() -> None:
    task, splits, _ = load("seq2seq", OWN, "synthetic:dates")
    lengths = lengths_of(splits.train)
    assert lengths is not None
    order = make_order(len(splits.train), BATCH, 7, lengths=lengths, padding="bucket")
    epoch = islice(batches(task, splits, "bucket", micro=5), order.steps_per_epoch)
    found = [micro for micros in epoch for micro in micros]
    share = sum(micro.padding for micro in found) / sum(micro.tokens for micro in found)
    assert expected_padding(lengths, order, micro_batch=5) == pytest.approx(share)


@pytest.mark.parametrize(("example", "padding"), [("reviews", "bucket"), ("dates", "pack")])
def test_a_job_runs_with_either_way_and_counts_its_padding(
    yunlu: Yunlu, example: str, padding: str
) -> None:
    done = yunlu(
        "train", ROOT / "examples" / f"{example}.yaml", "--json", "--set", "train.epochs=1",
        "--set", "data.limit=96", "--set", "train.batch=16", "--set", f"train.padding={padding}",
    )  # fmt: skip
    assert done.code == 0, done.err
    steps = [record for record in done.records if "tokens" in record]
    assert steps
    assert all(record["tokens"] > record["padding"] >= 0 for record in steps)
    assert (sum(record["padding"] for record in steps) == 0) == (padding == "pack")
