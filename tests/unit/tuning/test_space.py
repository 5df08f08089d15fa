"""From a job's search to dimensions, and from settings back to jobs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.core.errors import JobError
from yunlu.spec.job import Job
from yunlu.spec.load import field_value
from yunlu.spec.source import InvalidJobError
from yunlu.tuning.encoding import Encoder
from yunlu.tuning.space import (
    SettingCheck,
    apply_params,
    count_settings,
    drop_absent,
    find_dimensions,
    key_of,
    list_values,
    make_dimensions,
)
from yunlu.tuning.values import Dimension

if TYPE_CHECKING:
    from yunlu.tuning.values import Params


def make(search: dict[str, Any], **parts: Any) -> Job:
    data: dict[str, Any] = {"task": "seq2seq", "model": "mlp", "data": "d", "search": search}
    return Job.model_validate({**data, **parts})


SEARCH: dict[str, Any] = {
    "space": {
        "train.optimizer.momentum": {
            "low": 0.1,
            "high": 0.9,
            "when": {"train.optimizer.name": ["momentum", "lars"]},
        },
        "train.optimizer.name": ["momentum", "lars", "adam"],
        "train.optimizer.nesterov": {
            "choice": [True, False],
            "when": {"train.optimizer.name": "momentum"},
        },
        "train.optimizer.lr": "1e-4 .. 1e-1 log",
        "train.batch": "8 .. 64 log",
        "train.l1": "0.0 .. 0.3 step 0.1",
        "train.micro_batch": [1, 8, 32, "auto"],
        "model.args.hidden": [[64], [128, 64], {"a": 1}, 3],
        "train.optimizer.betas.0": "0.8 .. 0.95",
        "train.checkpoint.keep_last": {
            "low": 1,
            "high": 3,
            "when": {"train.batch": [8, 9, 10, 11]},
        },
    },
    "constraints": ["train.batch * train.optimizer.lr < 3", "train.optimizer.momentum > 0.2"],
}
JOB = make(SEARCH)


def test_dimensions_come_after_what_they_depend_on_and_say_what_the_file_says() -> None:
    dimensions = find_dimensions(JOB)
    names = [dimension.name for dimension in dimensions]
    assert sorted(names) == sorted(SEARCH["space"])
    for dimension in dimensions:
        assert all(names.index(parent) < names.index(dimension.name) for parent in dimension.when)
    by_name = {dimension.name: dimension for dimension in dimensions}
    assert by_name["train.batch"] == Dimension(
        name="train.batch", low=8.0, high=64.0, log=True, is_int=True
    )
    assert by_name["model.args.hidden"].choices == ("[64]", "[128, 64]", '{"a": 1}', 3)
    assert by_name["train.optimizer.momentum"].when == {
        "train.optimizer.name": ("momentum", "lars")
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_setting_laid_over_the_job_is_found_in_it_again(seed: int) -> None:
    assert JOB.search
    dimensions = make_dimensions(JOB.search)
    (params,) = Encoder(dimensions).sample(np.random.default_rng(seed), 1)
    assert drop_absent(params, dimensions) == params
    if SettingCheck(JOB).refusal(params) is not None:
        assert params["train.micro_batch"] not in {1, "auto"}
        return
    job = apply_params(JOB, params)
    assert job.search is None
    for name, value in params.items():
        found = field_value(job, name)
        if name == "model.args.hidden":
            assert found in ([64], [128, 64], {"a": 1}, 3)
            assert value == (found if found == 3 else str(found).replace("'", '"'))
        else:
            assert found == value
    assert Job.model_validate_json(job.model_dump_json()) == job


def test_what_does_not_exist_beside_the_others_is_dropped_with_all_below_it() -> None:
    dimensions = (
        Dimension(name="a", choices=(1, 2)),
        Dimension(name="b", choices=("x", "y"), when={"a": (2,)}),
        Dimension(name="c", low=0, high=1, when={"b": ("y",)}),
        Dimension(name="d", choices=(True, False), when={"a": (1,)}),
        Dimension(name="e", choices=(0,), when={"d": (True,)}),
    )
    whole: Params = {"a": 2, "b": "y", "c": 0.5, "d": True, "e": 0, "other": 1}
    assert drop_absent(whole, dimensions) == {"a": 2, "b": "y", "c": 0.5, "other": 1}
    assert drop_absent({**whole, "b": "x"}, dimensions) == {"a": 2, "b": "x", "other": 1}
    assert drop_absent({**whole, "a": 1}, dimensions) == {"a": 1, "d": True, "e": 0, "other": 1}
    # 1 is not true
    assert drop_absent({**whole, "a": 1, "d": 1}, dimensions) == {"a": 1, "d": 1, "other": 1}


def test_constraints_look_at_the_setting_then_at_the_job() -> None:
    search = {"space": {"train.batch": [8, 64]}, "constraints": ["train.batch <= data.limit"]}
    allowed = SettingCheck(make(search, data={"train": "d", "limit": 50}))
    assert allowed({"train.batch": 8})
    assert not allowed({"train.batch": 64})
    hidden = {
        "space": {"model.args.hidden": [[1], [1, 2]]},
        "constraints": ["len(model.args.hidden) < 2"],
    }
    assert SettingCheck(make(hidden))({"model.args.hidden": "[1]"})
    assert not SettingCheck(make(hidden))({"model.args.hidden": "[1, 2]"})


def test_settings_that_the_job_refuses_are_not_allowed() -> None:
    search = {"space": {"train.batch": [8, 64], "train.micro_batch": [8, 64]}}
    job = make(search)
    find_dimensions(job)
    allowed = SettingCheck(job)
    assert allowed({"train.batch": 64, "train.micro_batch": 64})
    assert not allowed({"train.batch": 8, "train.micro_batch": 64})
    with pytest.raises(JobError) as caught:
        apply_params(job, {"train.batch": 8, "train.micro_batch": 64})
    assert caught.value.message == (
        "train.batch=8, train.micro_batch=64: train.micro_batch: 64 is above batch 8."
    )


@pytest.mark.parametrize(
    ("search", "parts", "said"),
    [
        (
            {"space": {"train.batch": "8 .. 64"}, "constraints": ["train.batch > 64"]},
            {},
            "search.constraints: no setting fulfils 'train.batch > 64' (2,000 were drawn).",
        ),
        (
            {
                "space": {"train.batch": "8 .. 64"},
                "constraints": ["train.batch > 32", "train.batch <= 32"],
            },
            {},
            "search.constraints: no setting fulfils all of them (2,000 were drawn).",
        ),
        (
            {"space": {"train.steps": [100]}},
            {"train": {"epochs": 3}},
            (
                "search.space: the job refuses every setting, such as train.steps=100: "
                "train.steps: set either epochs or steps, not both."
            ),
        ),
        (
            {"space": {"train.micro_batch": [8, 64]}},
            {"train": {"batch": 32}},
            (
                "search.space.train.micro_batch: the job refuses every setting with 64, such as "
                "train.micro_batch=64: train.micro_batch: 64 is above batch 32."
            ),
        ),
        (
            {
                "space": {"train.optimizer.name": ["sgd"]},
                "constraints": ["train.optimizer.name > 3"],
            },
            {},
            (
                "A constraint of the search cannot be computed: "
                "'>' not supported between instances of 'str' and 'int'."
            ),
        ),
    ],
)
def test_what_can_never_be_is_said_before_anything_runs(
    search: dict[str, Any], parts: dict[str, Any], said: Any
) -> None:
    with pytest.raises(JobError) as caught:
        find_dimensions(make(search, **parts))
    assert caught.value.message == said


def test_a_job_without_a_search_and_one_that_does_not_fit_are_refused() -> None:
    with pytest.raises(JobError, match="no search section"):
        find_dimensions(JOB.model_copy(update={"search": None}))
    with pytest.raises(InvalidJobError, match=r"search\.space\.lr: unknown field"):
        find_dimensions(make({"space": {"lr": [1]}}))


def test_finite_dimensions_list_their_values() -> None:
    whole = Dimension(name="a", low=1, high=7, step=2, is_int=True)
    tenths = Dimension(name="b", low=0.0, high=0.35, step=0.1)
    free = Dimension(name="c", low=1e-4, high=1e-1, log=True)
    assert list_values(whole) == [1, 3, 5, 7]
    assert list_values(tenths) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert list_values(free) == []
    assert list_values(free, points=4) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert list_values(Dimension(name="d", low=1, high=3, is_int=True), points=9) == [1, 2, 3]
    assert count_settings((whole, tenths)) == 16
    assert count_settings((whole, free)) == math.inf


def test_true_is_not_one() -> None:
    assert key_of({"a": True, "b": 2}) == key_of({"b": 2, "a": True})
    assert key_of({"a": True}) != key_of({"a": 1})
