"""Every built-in optimiser keeps the contract, and so does the one of the documentation."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.optimizer_package import use_lion
from yunlu.spec.optimizers import traits_of
from yunlu.testing.optimizers import OptimizerContract


class TestSGD(OptimizerContract):
    name = "sgd"


class TestMomentum(OptimizerContract):
    name = "momentum"


class TestAdam(OptimizerContract):
    name = "adam"


class TestAdamW(OptimizerContract):
    name = "adamw"


class TestLamb(OptimizerContract):
    name = "lamb"

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("pytorch_optimizer")


class TestLars(OptimizerContract):
    name = "lars"

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("pytorch_optimizer")


class TestLion(OptimizerContract):
    name = "lion"

    @pytest.fixture(autouse=True)
    def _package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use_lion(tmp_path, monkeypatch)


def test_every_built_in_optimiser_is_here() -> None:
    points = entry_points(group="yunlu.optimizers")
    ours = {point.name for point in points if point.value.startswith("yunlu.")}
    assert ours == {contract.name for contract in OptimizerContract.__subclasses__()} - {"lion"}


@pytest.mark.parametrize(
    ("contract", "lie", "behaviour"),
    [
        (TestAdamW, {"state_bytes": 4}, "its_state_takes_the_declared_bytes"),
        (TestAdamW, {"decays_by": "l2"}, "it_decays_by_the_declared_key_alone"),
        (TestLamb, {"needs_whole_weights": False}, "a_cut_weight_is_updated_as_the_whole"),
        (TestMomentum, {"can_freeze": True}, "the_second_moment_can_be_frozen_where_declared"),
        (TestMomentum, {"lr": 1e3}, "its_usual_rate_lowers_a_simple_loss"),
        (TestSGD, {"hyperparameters": {"dampening": 0.5}}, "every_declared_hyperparameter_matters"),
    ],
)
def test_false_traits_are_found_out(
    contract: type[OptimizerContract],
    lie: dict[str, Any],
    behaviour: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    false = replace(traits_of(contract.name), **lie)
    monkeypatch.setattr("yunlu.spec.train.traits_of", lambda name: false)
    monkeypatch.setattr("yunlu.testing.optimizers.traits_of", lambda name: false)
    with pytest.raises(AssertionError):
        getattr(contract(), f"test_{behaviour}")()
