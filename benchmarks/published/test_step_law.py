"""Rate and batch from small runs, on the recorded trainings of Step Law."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.tune_parts.evidence import DEFAULT_FOLDER
from benchmarks.tune_parts.steplaw import FILES, measure
from yunlu.planning.hyperparameter_transfer import STEP_LAW, TransferScale


def test_every_figure_is_reached() -> None:
    lines: list[str] = []
    figures = measure(DEFAULT_FOLDER, lines.append, quick=True)
    assert [figure.name for figure in figures if not figure.is_met] == []
    assert len(lines) == len(FILES)


def test_the_rule_has_the_exponents_of_its_published_fits() -> None:
    path = DEFAULT_FOLDER / "steplaw" / "1004_fitted_lr_bs_scaling_model_parameters.csv"
    table = np.loadtxt(path, delimiter=",", skiprows=1)
    lr_start, lr_size, lr_tokens, batch_start, batch_tokens = table.mean(axis=0)
    parameters, tokens = 1e9, 5e10
    rule = STEP_LAW.at(TransferScale(parameters=parameters, tokens=tokens))
    lr = lr_start + lr_size * math.log(parameters) + lr_tokens * math.log(tokens)
    assert math.log(rule.lr) == pytest.approx(lr, abs=0.02)
    batch = batch_start + batch_tokens * math.log(tokens)
    assert math.log(rule.batch_tokens) == pytest.approx(batch, abs=0.02)
