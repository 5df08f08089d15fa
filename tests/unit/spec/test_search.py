"""The search section: its readable forms, and what is said where it does not fit the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from yunlu.spec.job import Job
from yunlu.spec.load import InvalidJobError, field_value, job_from_mapping, lay_fields, load_job
from yunlu.spec.schema import job_schema, schema_at
from yunlu.spec.search import SearchSpec, direction_of, spell_range

if TYPE_CHECKING:
    from pathlib import Path

JOB = """\
task: tabular-classification
model: {name: mlp, args: {hidden: [64]}}
data: sklearn:digits
train: {batch: 32, optimizer: {name: adamw, weight_decay: 0.1}}
"""


def make(search: dict[str, Any], **parts: Any) -> Job:
    data = {"task": "tabular-classification", "model": "mlp", "data": "sklearn:digits"}
    return job_from_mapping({**data, "search": search, **parts})


def space(**fields: Any) -> dict[str, Any]:
    return {"space": {name.replace("__", "."): value for name, value in fields.items()}}


def problems_of(search: dict[str, Any], **parts: Any) -> list[str]:
    with pytest.raises(InvalidJobError) as caught:
        make(search, **parts)
    return [str(problem) for problem in caught.value.problems]


def test_the_readable_forms_mean_the_full_one() -> None:
    job = make(
        space(
            train__optimizer__lr="1e-4 .. 1e-1 log",
            train__batch="16..512 log",
            train__l2="0.0 .. 1.0 step 0.25",
            train__optimizer__name=["sgd", "adam"],
        )
    )
    assert job.search
    found = job.search.space
    assert found == {
        name: SearchSpec.model_validate({"space": {name: full}}).space[name]
        for name, full in {
            "train.optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
            "train.batch": {"low": 16, "high": 512, "log": True},
            "train.l2": {"low": 0.0, "high": 1.0, "step": 0.25},
            "train.optimizer.name": {"choice": ["sgd", "adam"]},
        }.items()
    }
    assert [found[name].is_int for name in found] == [False, True, False, False]


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("1 .. 4", 1, 4),
        ("-.5..+2e3", -0.5, 2000.0),
        ("1.0 .. 4", 1.0, 4),
        (" 0.1 ..0.2 ", 0.1, 0.2),
    ],
)
def test_ranges_are_read_as_written(text: str, low: float, high: float) -> None:
    spelt = spell_range(text)
    assert spelt is not None
    assert spelt == {"low": low, "high": high}
    assert [type(spelt[key]) for key in ("low", "high")] == [type(low), type(high)]


@pytest.mark.parametrize("text", ["", "1", "1 - 4", "1 .. ", "a .. b", "1 .. 4 lg", "1 .. 4 .. 9"])
def test_what_is_no_range_is_none(text: str) -> None:
    assert spell_range(text) is None


def test_a_search_survives_json_with_whole_numbers_whole() -> None:
    job = make(space(train__batch="16 .. 512 log", train__l2="0.0 .. 2.0"))
    again = Job.model_validate_json(job.model_dump_json())
    assert again == job
    assert again.search
    assert [spec.is_int for spec in again.search.space.values()] == [True, False]


def test_beliefs_are_in_the_ranges_own_unit() -> None:
    job = make(
        space(
            train__optimizer__lr={"low": 1e-4, "high": 1.0, "log": True, "likely": 1e-3},
            train__l2={"low": 0.0, "high": 2.0, "likely": {"at": 0.5, "within": 0.25}},
            train__batch={"low": 1, "high": 1024, "log": True, "likely": {"at": 10, "within": 10}},
        )
    )
    assert job.search
    beliefs = [spec.belief for spec in job.search.space.values()]
    assert beliefs == [pytest.approx((-3, 1)), pytest.approx((0.5, 0.25)), pytest.approx((1, 1))]


FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["search: missing required key 'space'"]),
    (
        {"space": {}},
        ["search.space: is empty: name at least one field, such as train.optimizer.lr"],
    ),
    (
        space(train__optimiser__lr=[1]),
        ["search.space.train.optimiser.lr: unknown field; did you mean 'train.optimizer.lr'?"],
    ),
    (space(lr=[1]), ["search.space.lr: unknown field; did you mean 'train.optimizer.lr'?"]),
    (
        space(colour=[1]),
        [
            (
                "search.space.colour: unknown field; expected one such as train.optimizer.lr, "
                "or model.args.NAME for the model's arguments"
            )
        ],
    ),
    (
        space(train__optimizer__betas__2=[0.9]),
        [
            (
                "search.space.train.optimizer.betas.2: unknown field; "
                "did you mean 'train.optimizer.betas'?"
            )
        ],
    ),
    (space(search__seed=[1, 2]), ["search.space.search.seed: a search cannot vary itself"]),
    (
        space(train__l2="1e-1 .. 1e-4"),
        ["search.space.train.l2.high: 0.0001 is below low 0.1"],
    ),
    (
        space(train__l2="0 .. 4 log"),
        ["search.space.train.l2.low: is 0, but a log range begins above 0"],
    ),
    (
        space(model__args__dropout="0 .. 1"),
        [
            (
                "search.space.model.args.dropout.high: whole numbers from 0 to 1: "
                "write [0, 1], or 0.0 .. 1.0 for all between"
            )
        ],
    ),
    (
        space(train__l2="some"),
        [
            (
                "search.space.train.l2: expected a list of plain data (text, numbers, lists or "
                "mappings), a range such as '1e-4 .. 1e-1 log' or '1 .. 4' or a mapping, got 'some'"
            )
        ],
    ),
    (
        space(train__batch=[]),
        ["search.space.train.batch.choice: is empty: name at least one value"],
    ),
    (space(train__batch=[8, 16, 8]), ["search.space.train.batch.choice: has 8 twice"]),
    (space(train__batch=[1, True]), ["search.space.train.batch.choice: has true twice"]),
    (
        space(model__args__hidden=[[64], "[64]"]),
        ["search.space.model.args.hidden.choice: has '[64]' as a text and as a value"],
    ),
    (
        space(train__l2={"choice": [1], "low": 0}),
        [
            (
                "search.space.train.l2.low: is of a range, but choice lists the values; "
                "remove one of them"
            )
        ],
    ),
    (space(train__l2={"low": 1}), ["search.space.train.l2.high: a range needs low and high"]),
    (
        space(train__l2={"low": 1.0, "high": 2.0, "likely": 3}),
        ["search.space.train.l2.likely: 3 lies outside of the range"],
    ),
    (
        space(train__batch={"low": 1, "high": 8, "step": 0.5}),
        ["search.space.train.batch.step: 0.5 is not whole, but low and high are"],
    ),
    (
        space(train__l2={"lo": 1, "high": 2}),
        [
            (
                "search.space.train.l2.lo: unknown key; did you mean 'low'? "
                "(known: choice, count, high, likely, log, low, step, when)"
            )
        ],
    ),
    (
        space(train__optimizer__lr="-1.0 .. 4.0"),
        ["search.space.train.optimizer.lr.low: expected a number above 0 or 'auto', got -1.0"],
    ),
    (
        space(train__optimizer__name=["sgd", "adamm"]),
        [
            (
                "search.space.train.optimizer.name.choice[1]: expected one of 'adam', 'adamw', "
                "'lamb', 'lars', 'momentum' or 'sgd', got 'adamm'; did you mean 'adam' or 'adamw'?"
            )
        ],
    ),
    (
        {"space": {"name": ["a", "b"]}},
        ["search.space.name: trials are named after their study"],
    ),
    (
        space(train__optimizer__momentum={"low": 0.1, "high": 0.9, "when": {"train.l2": 1}}),
        [
            (
                "search.space.train.optimizer.momentum.when.train.l2: depends on train.l2, "
                "which does not vary; add it to the space, or leave this out"
            )
        ],
    ),
    (
        space(
            train__optimizer__name=["sgd", "adam"],
            train__l2={"low": 0.0, "high": 0.5, "when": {"train.optimizer.name": "lars"}},
        ),
        [
            (
                "search.space.train.l2.when.train.optimizer.name: 'lars' is no value that "
                "train.optimizer.name takes in this search"
            )
        ],
    ),
    (
        space(
            train__l2="0.0 .. 0.5",
            train__l1={"low": 0.0, "high": 0.5, "when": {"train.l2": 0.1}},
        ),
        [
            (
                "search.space.train.l1.when.train.l2: depends on train.l2, which may be any number; "
                "give that a list or a step"
            )
        ],
    ),
    (
        space(train__batch=[8, 16])
        | {"first": [{"train.batch": 16}], "constraints": "train.batch < 9"},
        ["search.first[0]: does not fulfil 'train.batch < 9'"],
    ),
    (
        space(
            train__batch={"choice": [1, 2], "when": {"data.max_length": 4}},
            data__max_length={"choice": [4, 5], "when": {"train.batch": 1}},
        ),
        [
            "search.space.train.batch.when.data.max_length: depends on itself in the end",
            "search.space.data.max_length.when.train.batch: depends on itself in the end",
        ],
    ),
    (
        space(train__batch=[8, 16]) | {"constraints": "train.bach < 9"},
        [
            (
                "search.constraints[0]: 'train.bach < 9' names train.bach, which is no field; "
                "did you mean 'train.batch'?"
            )
        ],
    ),
    (
        space(train__batch=[8, 16]) | {"constraints": ["data.limit < train.batch", "1 < 2"]},
        [
            (
                "search.constraints[0]: 'data.limit < train.batch' names data.limit, of which the job "
                "says nothing; set it, or let it vary"
            ),
            "search.constraints[1]: '1 < 2' names no field of the job",
        ],
    ),
    (
        space(train__batch=[8, 16]) | {"first": [{"train.batch": 9}, {"model.args.x": 1}]},
        [
            "search.first[0].train.batch: 9 lies outside of search.space.train.batch",
            (
                "search.first[1].model.args.x: model.args.x does not vary in this search; "
                "known: train.batch"
            ),
        ],
    ),
    (
        space(train__batch=[8]) | {"metod": "tpe"},
        [
            (
                "search.metod: unknown key; did you mean 'method'? (known: budget, constraints, "
                "deadline, devices, direction, first, method, metric, objectives, parallel, proxy, "
                "seed, space, stop, trials, warm_start)"
            )
        ],
    ),
    (
        space(train__batch=[8]) | {"stop": "ahsa"},
        [
            (
                "search.stop: expected one of 'none', 'median', 'asha', 'hyperband', 'patience', "
                "'pbt' or 'auto', got 'ahsa'; did you mean 'asha'?"
            )
        ],
    ),
    (
        space(train__batch=[8]) | {"stop": {"name": "median", "eta": 4}},
        ["search.stop.eta: is only for asha and hyperband; ask for that, or leave it out"],
    ),
    (
        space(train__batch=[8]) | {"stop": "asha", "method": "frontier"},
        ["search.stop: frontier judges itself how far each trial is trained: leave it out"],
    ),
    (
        space(train__batch=[8]) | {"stop": "pbt", "method": "tpe"},
        ["search.method: pbt finds settings itself, not with tpe; take random"],
    ),
    (
        space(train__batch=[8]) | {"warm_start": ["earlier"], "method": "sobol"},
        ["search.warm_start: method sobol learns from no trials; take frontier or tpe"],
    ),
    (
        space(train__batch=[8]) | {"warm_start": ["earlier"], "stop": "asha"},
        [
            "search.warm_start: with stop asha the method learns from no trials; take frontier or tpe"
        ],
    ),
    (
        space(train__batch=[8]) | {"objectives": ["loss", "cost"], "method": "cmaes"},
        [
            (
                "search.method: cmaes has one objective; several go with grid, random, sobol, tpe, "
                "gp, nsga2"
            )
        ],
    ),
    (
        space(train__batch=[8]) | {"objectives": ["loss", "val_loss"]},
        ["search.objectives: names one twice"],
    ),
    (
        space(train__batch=[8]) | {"objectives": ["loss", "cost"], "metric": "accuracy"},
        ["search.metric: objectives names what to make good; remove one of them"],
    ),
    (
        space(train__batch=[8]) | {"trials": 0, "deadline": "soon"},
        [
            "search.trials: expected a whole number above 0, got 0",
            "search.deadline: expected a time such as '90min', '36h' or '1d 12h', got 'soon'",
        ],
    ),
]


@pytest.mark.parametrize(("search", "said"), FAULTS, ids=lambda part: str(part)[:60])
def test_faults_are_said_in_words_that_name_the_field(search: dict[str, Any], said: Any) -> None:
    assert problems_of(search) == said


def test_faults_stand_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        JOB
        + "search:\n  space:\n    train.optimiser.lr: 1e-4 .. 1e-1 log\n    train.l2: 2 .. 1\n"
        + "  stop: ahsa\n"
    )
    with pytest.raises(InvalidJobError) as caught:
        load_job(path)
    assert [str(problem).split(": ")[0] for problem in caught.value.problems] == [
        "line 8, column 15",
        "line 9, column 9",
    ]
    path.write_text(
        JOB
        + "search:\n  constraints: [train.bach < 8]\n  space:\n"
        + "    train.optimiser.lr: 1e-4 .. 1e-1 log\n"
    )
    with pytest.raises(InvalidJobError) as caught:
        load_job(path)
    assert [str(problem).split(": ")[0] for problem in caught.value.problems] == [
        "line 6, column 17",
        "line 8, column 5",
    ]


def test_overrides_reach_into_the_space_by_dotted_names(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "search: {space: {train.optimizer.lr: 1e-4 .. 1e-1 log}, stop: asha}\n")
    job = load_job(
        path,
        overrides=[
            "search.space.train.batch=[16, 32]",
            "search.space.train.optimizer.lr.high=0.5",
            "search.space.train.batch.likely=null",
            "search.stop.eta=4",
        ],
    )
    assert job.search
    assert list(job.search.space) == ["train.optimizer.lr", "train.batch"]
    assert job.search.space["train.optimizer.lr"].high == 0.5
    assert job.search.space["train.batch"].choice == [16, 32]
    assert (job.search.stop.name, job.search.stop.eta) == ("asha", 4)
    with pytest.raises(InvalidJobError) as caught:
        load_job(path, overrides=["search.space.train.bach=[16]"])
    assert [str(problem) for problem in caught.value.problems] == [
        "--set search.space.train.bach: unknown field; did you mean 'train.batch'?"
    ]


def test_fields_are_laid_over_the_job_and_the_rest_stays() -> None:
    job = make(
        space(train__batch=[8]),
        train={"batch": 32, "optimizer": {"name": "adamw", "weight_decay": 0.1}},
        model={"name": "mlp", "args": {"hidden": [64], "dropout": 0.5}},
    )
    laid = lay_fields(
        job,
        {
            "train.optimizer": "adam",
            "train.optimizer.lr": 0.5,
            "train.optimizer.betas.1": 0.95,
            "model.args.hidden": [8, 8],
            "train.checkpoint": 7,
        },
    )
    assert laid.search is None
    assert laid.train.optimizer.model_dump(exclude_unset=True) == {
        "name": "adam",
        "weight_decay": 0.1,
        "lr": 0.5,
        "betas": (0.9, 0.95),
    }
    assert laid.model.args == {"hidden": [8, 8], "dropout": 0.5}
    assert laid.train.checkpoint.every == 7
    assert laid.train.batch == 32


def test_a_field_of_the_job_is_found_by_its_dotted_name() -> None:
    job = make(space(train__batch=[8]), model={"name": "mlp", "args": {"hidden": [64, 32]}})
    assert field_value(job, "train.optimizer.betas.0") == 0.9
    assert field_value(job, "model.args.hidden.1") == 32
    for name in ("model.args.other", "train.optimiser", "train.batch.x", "model.adapter.rank"):
        with pytest.raises(KeyError):
            field_value(job, name)


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("loss", "minimize"), ("accuracy", "maximize"), ("cost", "minimize"), ("seconds", "minimize")],
)
def test_the_direction_follows_from_the_metrics_name(metric: str, direction: str) -> None:
    assert direction_of(metric) == direction
    assert direction_of(metric, "maximize") == "maximize"


def test_the_validation_loss_has_one_name() -> None:
    for name in ("loss", "val_loss", "validation_loss", "validation/loss"):
        search = SearchSpec.model_validate(space(train__batch=[8]) | {"metric": name})
        assert search.aims == ("loss",)


def test_editors_learn_all_forms_of_a_dimension() -> None:
    schema = schema_at(("search", "space", "train.optimizer.lr"))
    assert schema is not None
    kinds = [form.get("type", "reference") for form in schema["anyOf"]]
    assert kinds == ["array", "string", "reference"]
    assert "search" in job_schema()["properties"]
