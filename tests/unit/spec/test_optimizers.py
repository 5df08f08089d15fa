"""Optimisers by entry point: found, described, and refused where their traits say so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.optimizer_package import MODULE, use_lion
from yunlu.core.errors import JobError
from yunlu.planning.layouts import find_conflicts
from yunlu.spec.job import Job
from yunlu.spec.load import InvalidJobError, job_from_mapping, lay_fields
from yunlu.spec.optimizers import HYPERPARAMETERS, traits_of
from yunlu.spec.train import OptimizerSpec

JOB: dict[str, Any] = {"task": "image-classification", "model": "cnn", "data": "sklearn:digits"}


@pytest.fixture
def lion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_lion(tmp_path, monkeypatch)
    return tmp_path


def job(**train: Any) -> Job:
    return job_from_mapping({**JOB, "train": train})


def test_hyperparameters_of_traits_are_fields_of_the_job() -> None:
    assert set(HYPERPARAMETERS) <= OptimizerSpec.model_fields.keys()


def test_the_traits_of_every_built_in_optimiser_are_read_without_torch() -> None:
    code = (
        "import sys\n"
        "from yunlu.core.imports import OPTIMIZERS, known_names\n"
        "from yunlu.spec.optimizers import traits_of\n"
        "assert [traits_of(name) for name in known_names(OPTIMIZERS)]\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_suggests_the_nearest(lion: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"'lars', 'lion', .*'lionn'; did you mean 'lion'"):
        job(optimizer="lionn")
    with pytest.raises(JobError, match="There is no optimiser 'lionn'"):
        traits_of("lionn")


def test_an_optimiser_brings_its_own_defaults(lion: Path) -> None:
    plain = job(optimizer="lion").train.optimizer
    assert plain.hyperparameters == {"betas": (0.9, 0.99)}
    chosen = job(optimizer={"name": "lion", "betas": [0.8, 0.9]}).train.optimizer
    assert chosen.hyperparameters == {"betas": (0.8, 0.9)}
    # A run keeps its job with every field; a trial starts from what the job sets.
    stored = OptimizerSpec.model_validate_json(plain.model_dump_json())
    assert stored.hyperparameters == plain.hyperparameters
    other = lay_fields(job(optimizer="lion"), {"train.optimizer.name": "adamw"})
    assert other.train.optimizer.betas == (0.9, 0.999)


def test_what_the_traits_exclude_is_refused(lion: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": {"name": "lion", "state": "8bit"}}, "lion has no state: 8bit"),
        ({"optimizer": "lion", "l2": 0.1}, "no clear meaning under lion"),
        ({"optimizer": {"name": "lion", "args": {"rho": 1}}}, "lion has no argument 'rho'"),
        ({"optimizer": {"args": {"rho": 1}}}, "adamw has no argument 'rho'"),
        ({"optimizer": "lars", "l2": 0.1}, "no clear meaning under lars"),
    ]
    for train, message in refused:
        with pytest.raises(InvalidJobError, match=message):
            job(**train)
    assert not list(find_conflicts(job(optimizer="lion")))
    assert [clash.axes for clash in find_conflicts(job(optimizer="lamb"))] == [("fsdp", "tp")]


def test_arguments_of_its_own_reach_the_optimiser(
    lion: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(traits_of("lion"), hyperparameters={"betas": (0.9, 0.99), "rho": 0.5})
    monkeypatch.setattr("yunlu.spec.train.traits_of", lambda name: own)
    assert OptimizerSpec(name="lion").hyperparameters["rho"] == 0.5
    assert OptimizerSpec(name="lion", args={"rho": 0.7}).hyperparameters["rho"] == 0.7


def test_an_entry_point_that_holds_no_traits_is_named(lion: Path) -> None:
    points = lion / f"{MODULE}-1.0.dist-info" / "entry_points.txt"
    points.write_text(
        f"[yunlu.optimizers]\nlost = no_such_module:LOST\nplain = {MODULE}:build_lion\n"
    )
    with pytest.raises(JobError, match="'lost' cannot be loaded"):
        traits_of("lost")
    with pytest.raises(JobError, match="'plain' cannot be used"):
        traits_of("plain")


def test_traits_with_which_nothing_can_be_planned_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"lr": 0.0}, {"state_bytes": -1}, {"kernels": ("fused",)}]
    for values in wrong:
        with pytest.raises(ValueError, match="must"):
            replace(traits_of("sgd"), **values)
