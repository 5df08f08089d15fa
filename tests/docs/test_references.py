"""The pages that list things list all of them, as the code has them."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import tomllib
import typing
from collections.abc import Iterator
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_core import PydanticUndefined

from tests.docs.pages import ROOT, code_words, name_of, table_rows
from yunlu.cli.main import VERBS
from yunlu.core.imports import import_object
from yunlu.core.limits import FileLimits
from yunlu.core.value import Value
from yunlu.runs.states import LEGAL_MOVES, RunState
from yunlu.spec.counterparts.table import by_name
from yunlu.spec.job import Job
from yunlu.spec.optimizers import OptimizerTraits, traits_of

DOCS = ROOT / "docs"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXPECTS = re.compile(r"^# expects: test/(\w+) (>=|<=) ([\d.]+)$", re.MULTILINE)
_MODELS = "yunlu.training.models"
BUILDERS = [
    ("text-classification", "transformer", f"{_MODELS}.transformer:TransformerClassifier"),
    ("language-modeling", "transformer", f"{_MODELS}.transformer:CausalTransformer"),
    ("seq2seq", "transformer", f"{_MODELS}.transformer:Seq2SeqTransformer"),
    ("image-classification", "cnn", f"{_MODELS}.networks:ConvNet"),
    (
        "keyword-spotting",
        "cnn",
        "yunlu.training.tasks.keyword_spotting:build_spectrogram_cnn",
    ),
    ("speech-to-text", "conv-gru", f"{_MODELS}.networks:ConvGRU"),
    ("recommendation", "factors", f"{_MODELS}.networks:MatrixFactorization"),
    ("tabular-classification", "mlp", f"{_MODELS}.networks:MLP"),
]
SIGNS = {">=": "≥", "<=": "≤"}


@pytest.mark.parametrize("page", [DOCS / "job-file.md", DOCS / "job-file.zh-CN.md"], ids=name_of)
def test_the_job_file_page_lists_every_key_with_its_default(page: Path) -> None:
    rows = [row for row in table_rows(page) if len(row) == 3 and row[0].startswith("`")]
    told = {row[0].strip("`"): row[1] for row in rows}
    known = dict(_keys(Job))
    assert told.keys() == known.keys()
    for key, default in known.items():
        assert _default_said(told[key], default), f"{key}: {told[key]} is not {default!r}"


@pytest.mark.parametrize("page", ["optimizers.md", "optimizers.zh-CN.md"])
def test_the_page_on_optimisers_shows_the_traits_of_every_built_in_one(page: str) -> None:
    rows = [row for row in table_rows(DOCS / page) if row[0].startswith("`")]
    shown = {row[0].strip("`"): row[1:] for row in rows if len(row) == 7}
    assert shown.keys() == PROJECT["project"]["entry-points"]["yunlu.optimizers"].keys()
    for name, (lr, tuned_lr, decay, scaling, hyperparameters, state) in shown.items():
        traits = traits_of(name)
        assert float(lr) == traits.lr
        assert float(tuned_lr) == (traits.fine_tuning_lr or traits.lr)
        assert decay.endswith(f"{traits.decays_by}`")
        assert float((re.match(r"[\d.]+", decay) or "0")[0]) == traits.weight_decay
        assert scaling.strip("`") == traits.scaling
        assert re.findall(r"`(\w+)`", hyperparameters) == list(traits.hyperparameters)
        assert float(state.split()[0]) == traits.state_bytes
    explained = [row[0].strip("`") for row in rows if len(row) == 2]
    assert explained == [field.name for field in dataclasses.fields(OptimizerTraits)]


def test_the_glossary_names_what_stands_in_the_code() -> None:
    rows = [row for row in table_rows(DOCS / "glossary.md") if len(row) == 4][1:]
    assert len(rows) > 50
    assert len({row[0] for row in rows}) == len(rows), "a term is explained twice"
    for term, chinese, code, meaning in rows:
        assert chinese, f"{term} has no Chinese word"
        assert meaning, f"{term} has no meaning"
        if code != "–":
            assert _stands_in_code(code.strip("`")), f"{term}: {code} is not in src/yunlu"


def test_the_dependencies_page_lists_every_package_that_the_project_names() -> None:
    project = PROJECT["project"]
    named = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        named += extra
    packages = {re.split(r"[\[<>=~! ;]", line, maxsplit=1)[0] for line in named} - {project["name"]}
    told = {row[0].strip("`") for row in table_rows(DOCS / "dependencies.md")} - {"package"}
    assert told == packages


@pytest.mark.parametrize("page", ["data-limits.md", "data-limits.zh-CN.md"])
def test_the_page_on_limits_lists_every_limit_with_its_default(page: str) -> None:
    told = {row[0].strip("`"): row[1] for row in table_rows(DOCS / page) if row[0].startswith("`")}
    known = {field.name: field.default for field in dataclasses.fields(FileLimits)}
    assert told.keys() == known.keys()
    for name, default in known.items():
        if name == "memory":
            continue
        shown = f"{default >> 20} MiB" if told[name].endswith("MiB") else f"{default:,.0f}"
        assert told[name] == shown


@pytest.mark.parametrize("page", ["coming-from.md", "coming-from.zh-CN.md"])
def test_the_page_for_newcomers_agrees_with_the_table_of_words(page: str) -> None:
    rows = [row for row in table_rows(DOCS / page) if len(row) == 3 and row[0].startswith("`")]
    assert len(rows) > 20
    for name, tool, ours in rows:
        keys = by_name(tool)[name.strip("`")].keys
        assert (re.findall(r"`([a-z_]+\.[\w.]+)`", ours) or ["?"])[0] in keys, name


def test_each_table_of_the_tasks_page_lists_every_task_behind_the_door() -> None:
    told = [row[0].strip("`") for row in table_rows(DOCS / "tasks.md") if row[0].startswith("`")]
    known = {entry.name for entry in entry_points(group="yunlu.tasks")}
    assert {task: told.count(task) for task in told} == dict.fromkeys(known, 3)


@pytest.mark.parametrize(("task", "model", "builder"), BUILDERS, ids=lambda part: str(part)[:40])
def test_the_tasks_page_gives_each_models_arguments(task: str, model: str, builder: str) -> None:
    cells = [row[1] for row in table_rows(DOCS / "tasks.md") if row[0] == f"`{task}`"]
    told = next(cell for cell in cells if cell.startswith(f"`{model}`"))
    named = dict(re.findall(r"`(\w+)` (\[[^]]*\]|[\w.]+)", told))
    parameters = signature(import_object(builder)).parameters.values()
    known = {each.name: each.default for each in parameters if each.default is not each.empty}
    known.pop("categories", None)  # follows from the data
    assert named.keys() == known.keys()
    for name, default in known.items():
        # An argument without a value of its own is said in words, or as what stands in for it.
        assert default is None or yaml.safe_load(named[name]) == default, name


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_lists_every_command(page: str) -> None:
    told = {words.split()[1] for words in code_words(ROOT / page) if words.startswith("yunlu ")}
    assert {verb for verbs in VERBS.values() for verb in verbs} <= told


def test_the_architecture_names_every_room_in_its_order() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "rooms")
    rows = [row for row in table_rows(DOCS / "architecture.md") if len(row) == 2]
    assert [row[0].strip("`") for row in rows if row[0].startswith("`")] == layers


def test_the_architecture_shows_the_table_of_legal_moves() -> None:
    rows = [row for row in table_rows(DOCS / "architecture.md") if len(row) == 3]
    told = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows[1:]}
    assert told == {state.value: {move.value for move in LEGAL_MOVES[state]} for state in RunState}


def test_the_examples_page_lists_every_example_with_its_figure() -> None:
    folder = ROOT / "examples"
    told = {row[0]: row for row in table_rows(folder / "README.md")}
    for example in folder.glob("*.yaml"):
        row = told[f"[{example.name}]({example.name})"]
        text = example.read_text(encoding="utf-8")
        assert yaml.safe_load(text)["task"] in row[1]
        expected = EXPECTS.search(text)
        assert expected, f"{example.name} does not say what to expect"
        metric, sign, figure = expected.groups()
        assert f"{metric} {SIGNS[sign]} {figure}" in row[3]


def test_contributing_lists_every_door_with_its_contract() -> None:
    rows = [row for row in table_rows(ROOT / "CONTRIBUTING.md") if len(row) == 5][1:]
    doors = {row[1].strip("`"): [cell.strip("`") for cell in row[2:]] for row in rows}
    registered = PROJECT["project"]["entry-points"]
    assert doors.keys() - {"–"} == registered.keys()
    named = {name for row in rows for name in (row[2].strip("`"), row[3].strip("`"))} - {"–"}
    for name in named:
        assert _stands_in_code(name), f"{name} is not in src/yunlu"
    contracts = {
        f"testing.{path.stem}:{node.name}"
        for path in (ROOT / "src" / "yunlu" / "testing").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Contract")
    }
    assert contracts == {name for name in named if name.startswith("testing.")}
    for group, points in registered.items():
        home = "yunlu." + doors[group][2].removesuffix(".py").strip("/").replace("/", ".")
        for point in points.values():
            assert point.startswith(home), f"{point} is not in {doors[group][2]}"


def _keys(spec: type[Value], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a job that holds a value, with its default; sections stand for their keys."""
    for name, field in spec.model_fields.items():
        sections = list(_sections(field.annotation))
        for section in sections:
            yield from _keys(section, f"{above}{name}.")
        if not sections:
            yield f"{above}{name}", field.get_default(call_default_factory=True)


def _sections(annotation: Any) -> Iterator[type[Value]]:
    if isinstance(annotation, type) and issubclass(annotation, Value):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _sections(part)


def _default_said(cell: str, default: Any) -> bool:
    if default is PydanticUndefined:
        return "`" not in cell  # "required", in the page's language
    plain = json.loads(json.dumps(default))  # tuples as YAML writes them
    said = re.fullmatch(r"`(.*)`", cell)
    return said is not None and yaml.safe_load(said[1]) == plain


def _stands_in_code(name: str) -> bool:
    """Whether a module, or ``module:Name``, exists below ``src/yunlu``; nothing is imported."""
    module, _, symbol = name.partition(":")
    path = ROOT / "src" / "yunlu" / module.replace(".", "/")
    if path.is_dir():
        return not symbol
    path = path.with_suffix(".py")
    if not path.is_file():
        return False
    names = {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    return not symbol or symbol in names
