"""Spaces written for Hyperopt: with Hyperopt itself, and its graphs made by hand."""

from __future__ import annotations

import math
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from yunlu.core.errors import JobError
from yunlu.spec.search import DimensionSpec, SearchSpec
from yunlu.tuning.hyperopt_space import from_hyperopt
from yunlu.tuning.space import make_dimensions


def node(name: str, *parts: Any, **named: Any) -> Any:
    """A vertex of an expression as Hyperopt builds it."""
    inner = [part if hasattr(part, "pos_args") else literal(part) for part in parts]
    return SimpleNamespace(name=name, pos_args=inner, named_args=list(named.items()))


def literal(value: Any) -> Any:
    if isinstance(value, dict):
        named = [(key, v if hasattr(v, "pos_args") else literal(v)) for key, v in value.items()]
        return SimpleNamespace(name="dict", pos_args=[], named_args=named)
    if isinstance(value, list):
        return node("pos_args", *value)
    return SimpleNamespace(name="literal", obj=value, pos_args=[], named_args=[])


def by_hand() -> Any:
    def param(kind: str) -> Any:
        def make(label: str, *numbers: float) -> Any:
            return node("float", node("hyperopt_param", label, node(kind, *numbers)))

        return make

    def choice(label: str, options: list[Any]) -> Any:
        return node(
            "switch", node("hyperopt_param", label, node("randint", len(options))), *options
        )

    def whole(label: str, *numbers: float) -> Any:
        return node("int", node("hyperopt_param", label, node("randint", *numbers)))

    def uniformint(label: str, low: float, high: float) -> Any:
        drawn = node("quniform", low, high, q=literal(1.0))
        return node("int", node("float", node("hyperopt_param", label, drawn)))

    def pchoice(label: str, options: list[tuple[float, Any]]) -> Any:
        chances = literal([chance for chance, _ in options])
        drawn = node("hyperopt_param", label, node("categorical", chances))
        return node("switch", drawn, *(option for _, option in options))

    kinds = ("uniform", "loguniform", "quniform", "qloguniform", "normal", "lognormal", "qnormal")
    made = {kind: param(kind) for kind in kinds}
    return SimpleNamespace(
        **made, choice=choice, randint=whole, uniformint=uniformint, pchoice=pchoice
    )


@pytest.fixture(params=["by hand", "hyperopt"])
def hp(request: pytest.FixtureRequest) -> Any:
    if request.param == "by hand":
        return by_hand()
    return import_module("hyperopt").hp


def spec(**form: Any) -> DimensionSpec:
    return DimensionSpec.model_validate(form)


def test_every_kind_of_number_is_read(hp: Any) -> None:
    found = from_hyperopt(
        {
            "train.l2": hp.uniform("a", 0, 1),
            "train": {"optimizer": {"lr": hp.loguniform("b", math.log(1e-4), math.log(1e-1))}},
            "train.l1": hp.quniform("c", 0, 1, 0.25),
            "train.batch": hp.qloguniform("d", math.log(8), math.log(512), 1),
            "model.args.layers": hp.randint("e", 5),
            "model.args.heads": hp.uniformint("f", 1, 8),
            "model.args.flag": hp.randint("g", 2),
            "model.args.bias": hp.normal("h", 1.0, 0.5),
            "train.optimizer.eps": hp.lognormal("i", 0.0, math.log(10)),
            "model.args.units": hp.quniform("j", 16, 128, 16),
            "model.args.fixed": 3,
        }
    )
    assert found == {
        "train.l2": spec(low=0.0, high=1.0),
        "train.optimizer.lr": spec(low=1e-4, high=0.1, log=True),
        "train.l1": spec(low=0.0, high=1.0, step=0.25),
        "train.batch": spec(low=8, high=512, log=True),
        "model.args.layers": spec(low=0, high=4),
        "model.args.heads": spec(low=1, high=8, step=1),
        "model.args.flag": spec(choice=[0, 1]),
        "model.args.bias": spec(low=-0.5, high=2.5, likely={"at": 1.0, "within": 0.5}),
        "train.optimizer.eps": spec(
            low=0.001, high=1000.0, log=True, likely={"at": 1.0, "within": 10.0}
        ),
        "model.args.units": spec(low=16, high=128, step=16),
        "model.args.fixed": spec(choice=[3]),
    }
    make_dimensions(SearchSpec(space=found))


def test_choices_of_values_and_of_mappings(hp: Any) -> None:
    momentum = hp.uniform("m", 0.1, 0.9)
    found = from_hyperopt(
        {
            "model.args.hidden": hp.choice("h", [[64], [128, 64]]),
            "train.schedule.name": hp.pchoice("s", [(0.2, "cosine"), (0.8, "wsd")]),
            "train.optimizer": hp.choice(
                "o",
                [
                    {"name": "momentum", "momentum": momentum, "nesterov": True},
                    {"name": "lars", "momentum": momentum},
                    {"name": "adam"},
                ],
            ),
        }
    )
    name = "train.optimizer.name"
    assert found == {
        "model.args.hidden": spec(choice=[[64], [128, 64]]),
        "train.schedule.name": spec(choice=["cosine", "wsd"]),
        name: spec(choice=["momentum", "lars", "adam"]),
        "train.optimizer.momentum": spec(low=0.1, high=0.9, when={name: ["momentum", "lars"]}),
        "train.optimizer.nesterov": spec(choice=[True], when={name: ["momentum"]}),
    }
    whole = hp.choice("top", [{"task": "a", "train.l2": hp.uniform("x", 0, 2)}, {"task": "b"}])
    assert from_hyperopt(whole) == {
        "task": spec(choice=["a", "b"]),
        "train.l2": spec(low=0.0, high=2.0, when={"task": ["a"]}),
    }


def test_what_cannot_be_said_is_refused_by_name(hp: Any) -> None:
    def refusal(space: Any) -> str:
        with pytest.raises(JobError) as caught:
            from_hyperopt(space)
        return caught.value.message

    x, y = hp.uniform("x", 0, 1), hp.uniform("y", 0, 2)
    assert refusal({}) == "The Hyperopt space is empty."
    assert refusal({"a": hp.choice("c", [1, x])}) == (
        "The Hyperopt space at a: an hp.choice with hp expressions in it must be between mappings."
    )
    assert refusal({"a": hp.choice("c", [{"p": x}, {"q": y}])}) == (
        "The Hyperopt space at a: the mappings of an hp.choice need a key whose value is another "
        "in each."
    )
    assert refusal({"a": hp.choice("c", [{"n": 1, "p": x}, {"n": 2, "p": y}])}) == (
        "The Hyperopt space at a.p: it has other values in another option; give it the same in all."
    )
    assert refusal({"a": hp.quniform("z", 0, 1, 3)}) == (
        "The Hyperopt space at a: step: 3.0 is wider than the range."
    )
