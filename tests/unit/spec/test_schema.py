"""The JSON Schema that editors read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from yunlu.spec.job import SHORTHANDS, Job
from yunlu.spec.schema import home_of, job_schema, keys_of, schema_at

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


def forms(path: tuple[str, ...]) -> list[dict[str, Any]]:
    schema = schema_at(path)
    assert schema is not None
    return schema["anyOf"]


def test_it_is_json_and_lists_the_installed_tasks_and_own_code():
    schema = json.loads(json.dumps(job_schema()))
    named, own = schema["properties"]["task"]["anyOf"]
    assert {"language-modeling", "tabular-regression"} <= set(named["enum"])
    assert "pattern" in own
    assert schema["title"] == "Yunlu job"
    assert schema["required"] == ["task", "model", "data"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", SHORTHANDS)
def test_shorthands_show_both_their_forms(path):
    found = forms(path)
    assert any("$ref" in form for form in found)
    assert any(form.get("type") in {"string", "number", "integer"} for form in found)


def test_every_key_is_described():
    schema = job_schema()
    sections = [schema, *schema["$defs"].values()]
    bare = [
        key
        for section in sections
        for key, part in section.get("properties", {}).items()
        if not part.get("description")
    ]
    assert bare == []


def test_a_schema_made_for_editors_does_not_change_the_one_that_words_errors():
    job_schema()
    assert keys_of(schema_at(()) or {}) == list(Job.model_fields)


def test_sections_know_where_they_stand():
    assert home_of("Job") == ()
    assert home_of("OptimizerSpec") == ("train", "optimizer")
    assert home_of("Unheard") is None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_uses_only_keys_the_schema_has(path):
    def check(value: Any, at: tuple[str, ...]) -> None:
        schema = schema_at(at)
        assert schema is not None, f"{at} is not in the schema"
        if isinstance(value, dict) and at[:2] != ("model", "args"):
            for key, part in value.items():
                check(part, (*at, key))

    check(yaml.safe_load(path.read_text()), ())
