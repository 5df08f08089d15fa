"""The estimators keep scikit-learn's conventions, and train by runs."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import check_estimator

import yunlu
from yunlu.core.errors import JobError, ModelError
from yunlu.spec.job import Job

Classifier: Any = yunlu.YunluClassifier
Regressor: Any = yunlu.YunluRegressor

QUICK: dict[str, Any] = {
    "hidden": (16,),
    "epochs": 8,
    "batch": 16,
    "lr": 0.02,
    "keep_run": False,
}


def digits(samples: int = 300) -> tuple[np.ndarray, np.ndarray]:
    found: Any = load_digits()
    return found.data[:samples], found.target[:samples]


@pytest.mark.long
@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_scikit_learns_own_checks_pass(kind: Any) -> None:
    # Skipped of itself: array API input, which SCIPY_ARRAY_API switches on.
    check_estimator(kind(**QUICK), expected_failed_checks={}, on_skip=None)


def test_keras_names_for_batch_and_rate_are_aliases() -> None:
    x, y = digits(60)
    options = {**QUICK, "batch": "auto", "lr": "auto", "epochs": 1}
    ours = Classifier(**{**options, "batch": 8, "lr": 0.01}).fit(x, y)
    theirs = Classifier(**options, batch_size=8, learning_rate=0.01)
    assert clone(theirs).get_params()["batch_size"] == 8
    assert np.array_equal(theirs.fit(x, y).predict_proba(x), ours.predict_proba(x))
    with pytest.raises(JobError, match="batch is 16, but its alias batch_size is 8"):
        Regressor(**{**QUICK, "batch": 16}, batch_size=8).fit(x, y)


def test_a_grid_over_a_pipeline_finds_the_better_setting() -> None:
    x, y = digits()
    pipeline = make_pipeline(MinMaxScaler(), Classifier(**QUICK))
    grid = GridSearchCV(
        pipeline,
        {"yunluclassifier__lr": np.array([1e-6, 0.02]), "yunluclassifier__batch": np.array([16])},
        cv=2,
    )
    grid.fit(x, y)
    assert grid.best_params_["yunluclassifier__lr"] == 0.02
    assert grid.best_score_ > 0.8
    shares = grid.predict_proba(x[:5])
    assert shares.shape == (5, 10)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)


def test_a_regressor_is_cross_validated() -> None:
    found: Any = load_diabetes()
    scores = cross_val_score(Regressor(**QUICK), found.data, found.target, cv=2)
    assert scores.mean() > 0.2


def test_a_fit_is_a_run_of_the_store_unless_told_otherwise(own_home: Path) -> None:
    x, y = digits(60)
    kept = Classifier(**{**QUICK, "keep_run": True, "job": {"train.clip": 0.5}}).fit(x, y)
    [run] = yunlu.list_runs()
    assert kept.run_dir_ is not None
    assert run.id == kept.run_dir_.name
    asked = Job.model_validate_json((kept.run_dir_ / "job.json").read_bytes())
    assert asked.model.args["hidden"] == [16]
    assert asked.train.clip.norm == 0.5
    assert (run.plan.steps if run.plan else 0) == 32  # 8 epochs of 4

    again: Any = clone(kept)
    passing = again.set_params(keep_run=False).fit(x, y)
    assert passing.run_dir_ is None
    assert len(yunlu.list_runs()) == 1
    # The same seed and the same job train the same network.
    np.testing.assert_allclose(kept.predict_proba(x), passing.predict_proba(x), atol=1e-4)


def test_held_out_samples_choose_the_weights() -> None:
    x, y = digits(100)
    model = Classifier(
        **{**QUICK, "keep_run": True}, validation=0.2, job={"train.early_stopping": 2}
    ).fit(x, y)
    assert model.run_dir_ is not None
    [run] = yunlu.list_runs()
    assert {event.split for event in run.events() if event.kind == "evaluation"} == {"validation"}


def test_small_data_gets_enough_steps_by_default() -> None:
    assert Classifier()._make_job(40).train.epochs == 150
    assert Classifier()._make_job(100_000).train.epochs == 10
    assert Classifier(epochs=3)._make_job(40).train.epochs == 3


def test_random_numbers_of_the_process_go_on_as_if_nothing_had_been() -> None:
    x, y = digits(40)

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = draw()
    seed()
    Classifier(**QUICK).fit(x, y)
    assert draw() == expected


class Linear(torch.nn.Module):
    """A network of somebody's own."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.float()) * self.scale


def test_a_network_of_ones_own_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_networks", sys.modules[__name__])
    x, y = digits(200)
    model = Classifier(
        "own_networks:Linear", **QUICK, job={"model.args.scale": np.float64(2.0)}
    ).fit(x, y)
    assert model.module_.scale == 2.0
    assert model.score(x, y) > 0.9


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"job": {"train.epoch": 3}}, JobError, "train.epoch"),
        ({"job": {"task": "seq2seq"}}, JobError, "set by the estimator"),
        ({"job": {"devices": 4}}, JobError, "set by the estimator"),
        ({"dropout": "much"}, ModelError, "dropout"),
        ({"optimizer": "adman"}, JobError, "optimizer"),
        ({"model": "mlpp"}, ModelError, "mlpp"),
        ({"epochs": -1}, JobError, "epochs"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    x, y = digits(40)
    with pytest.raises(error, match=named):
        Classifier(**{**QUICK, **changes}).fit(x, y)


class Broken(Linear):
    """Fails while it is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise RuntimeError("no such luck")
        return super().forward(x)


def test_a_run_that_fails_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_networks", sys.modules[__name__])
    x, y = digits(40)
    with pytest.raises(yunlu.YunluError, match="no such luck"):
        Classifier("own_networks:Broken", **QUICK).fit(x, y)


def test_the_module_is_imported_without_torch() -> None:
    code = "import sys, yunlu; yunlu.YunluClassifier; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
