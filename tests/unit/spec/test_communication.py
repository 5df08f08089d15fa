"""Communication as a job says it: a word, two words or a mapping, without contradictions."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from yunlu.cli.main import main
from yunlu.planning.communication.methods import METHODS, PACKINGS, keeps
from yunlu.spec.communication import (
    GUARANTEES,
    CodecName,
    CommunicationSpec,
    MethodName,
    spell_communication,
    strictest,
)
from yunlu.spec.job import Job
from yunlu.spec.load import InvalidJobError, job_from_mapping, load_job
from yunlu.spec.schema import job_schema

GOOD = {"task": "seq2seq", "model": "m", "data": "d"}
LOCAL = "is only for local, post-local and diloco; ask for that, or leave it out"


def said(communication: Any) -> CommunicationSpec:
    return job_from_mapping(GOOD | {"communication": communication}).communication


def problem(communication: Any) -> str:
    with pytest.raises(InvalidJobError) as caught:
        said(communication)
    (found,) = caught.value.problems
    return str(found)


def test_nothing_said_is_exact_and_left_to_the_links() -> None:
    spec = job_from_mapping(GOOD).communication
    assert spec == said("auto") == said({}) == CommunicationSpec()
    assert (spec.kept, str(spec)) == ("exact", "auto")


@pytest.mark.parametrize(
    ("text", "method", "codec", "kept"),
    [
        ("exact", "auto", "auto", "exact"),
        ("near", "auto", "auto", "near"),
        (" relaxed ", "auto", "auto", "relaxed"),
        ("ring", "ring", "auto", "exact"),
        ("diloco", "diloco", "auto", "relaxed"),
        ("int8", "auto", "int8", "near"),
        ("topk", "auto", "topk", "relaxed"),
        ("direct + int8", "direct", "int8", "near"),
        ("direct+int4", "direct", "int4", "near"),
        ("local + int4", "local", "int4", "relaxed"),
        ("ring + powersgd", "ring", "powersgd", "relaxed"),
        ("auto + bf16", "auto", "bf16", "near"),
    ],
)
def test_a_text_stands_for_a_mapping(text: str, method: str, codec: str, kept: str) -> None:
    spec = said(text)
    assert (spec.method, spec.codec, spec.kept) == (method, codec, kept)
    assert said(str(spec)).model_copy(update={"guarantee": spec.guarantee}) == spec


def test_what_a_job_may_ask_for_is_what_the_choice_allows() -> None:
    for method, codec in product(get_args(MethodName), get_args(CodecName)):
        allowed = [level for level in GUARANTEES if keeps(level, method, codec)]
        assert allowed[0] == strictest(method, codec), (method, codec)


def test_both_sides_know_the_same_names() -> None:
    assert set(get_args(MethodName)) == set(METHODS)
    assert set(get_args(CodecName)) == set(PACKINGS)


@pytest.mark.parametrize(
    "written",
    ["auto", "near", "direct + int8", {"method": "diloco", "every": 50, "outer_lr": 0.7}],
)
def test_a_job_survives_the_trip_through_its_file(written: Any) -> None:
    before = job_from_mapping(GOOD | {"communication": written})
    assert Job.model_validate_json(before.model_dump_json()) == before
    assert Job.model_validate(before.model_dump(mode="json", exclude_unset=True)) == before


@pytest.mark.parametrize(
    ("communication", "expected"),
    [
        ({"guarantee": "exact", "codec": "int8"}, "guarantee: is exact, but int8 keeps only near; ask for near, or leave"),
        ({"guarantee": "exact", "method": "diloco"}, "guarantee: is exact, but diloco keeps only relaxed"),
        ({"guarantee": "near", "method": "local", "codec": "int4"}, "guarantee: is near, but local + int4 keeps only relaxed"),
        ({"guarantee": "near", "codec": "topk"}, "guarantee: is near, but topk keeps only relaxed"),
        ({"every": 4}, f"every: {LOCAL}"),
        ({"every": 4, "method": "ring"}, f"every: {LOCAL}"),
        ({"outer_lr": 0.7, "method": "local"}, "outer_lr: is only for diloco"),
        ({"outer_momentum": 0.9}, "outer_momentum: is only for diloco"),
        ({"parts": 2, "method": "ring"}, f"parts: {LOCAL}"),
        ({"parts": 5, "method": "diloco", "every": 4}, "parts: 5 parts cannot take turns within 4 steps"),
        ({"start": 3, "method": "diloco"}, "start: is only for post-local and onebit"),
        ({"servers": 2, "method": "ring"}, "servers: is only for server and asynchronous"),
        ({"consistency": "asp"}, "consistency: is only for asynchronous"),
        ({"staleness": 2, "method": "asynchronous", "consistency": "asp"}, "staleness: is only for asynchronous with consistency: ssp"),
        ({"backups": 1, "method": "asynchronous"}, "backups: is only for asynchronous with consistency: bsp"),
        ({"keep": 0.1, "codec": "int8"}, "keep: is only for topk and randomk"),
        ({"rank": 2, "codec": "int8"}, "rank: is only for powersgd"),
        ("ring + int8", "codec: int8 would have to be unpacked and packed again at every worker on the way of ring; take direct or auto"),
        ("all-reduce + fp16", "codec: fp16 would have to be unpacked"),
        ("local + powersgd", "codec: powersgd packs sums of gradients, and local makes none; take another, such as int8"),
        ("asynchronous + powersgd", "codec: powersgd packs sums"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_told_at_its_key(communication: Any, expected: str) -> None:
    assert problem(communication).startswith(f"communication.{expected}")


@pytest.mark.parametrize(
    ("communication", "expected"),
    [
        ("dirct", ".method: there is no method 'dirct'; did you mean 'direct'?"),
        ("direct + in8", ".codec: there is no codec 'in8'; did you mean 'int8'?"),
        ("near + int8", ".method: near is a guarantee, no method; write {guarantee: near, ...}"),
        ("direct + int8 + ring", ": expected 'all-reduce', 'ring'"),
        ("direct +", ": expected 'all-reduce', 'ring'"),
        ("", ": expected 'all-reduce', 'ring'"),
        (3, ": expected 'all-reduce', 'ring'"),
        (["near"], ": expected 'all-reduce', 'ring'"),
        ({"metod": "ring"}, ".metod: unknown key; did you mean 'method'?"),
        ({"method": "int8"}, ".method: expected one of 'all-reduce', 'ring'"),
        ({"codec": "int-8"}, ".codec: unknown codec 'int-8'; did you mean 'int8'?"),
        ({"guarantee": "exactly"}, ".guarantee: expected one of 'exact', 'near', 'relaxed' or 'auto', got 'exactly'; did you mean 'exact'?"),
        ({"every": 0}, ".every: expected a whole number above 0 or 'auto', got 0"),
        ({"every": True}, ".every: expected a whole number above 0 or 'auto', got true"),
        ({"keep": 0}, ".keep: expected a number above 0 and of at most 1, got 0"),
        ({"rank": 0}, ".rank: expected a whole number above 0, got 0"),
        ({"outer_lr": 0}, ".outer_lr: expected a number above 0 or 'auto', got 0"),
        ({"outer_momentum": 1}, ".outer_momentum: expected a number of at least 0 and below 1 or 'auto', got 1"),
        ({"consistency": "bsb"}, ".consistency: expected one of 'bsp', 'ssp' or 'asp', got 'bsb'; did you mean 'bsp'?"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_told_with_what_is(communication: Any, expected: str) -> None:
    assert problem(communication).startswith(f"communication{expected}")


@pytest.mark.parametrize("verb", ["validate", "plan", "train"])
@pytest.mark.parametrize(
    ("written", "place", "expected"),
    [
        ("communication: ring + int8", "line 4, column 1", "communication.codec: int8 would have to"),
        ("communication:\n  method: diloco\n  every: -1", "line 6, column 10", "communication.every: expected a whole number"),
        ("communication:\n  guarantee: near\n  every: 8", "line 6, column 3", f"communication.every: {LOCAL}"),
    ],
)  # fmt: skip
def test_a_command_ends_with_the_place_and_no_traceback(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    verb: str,
    written: str,
    place: str,
    expected: str,
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"task: tabular-classification\nmodel: mlp\ndata: sklearn:digits\n{written}\n")
    assert main([verb, str(path)]) == 1
    shown = capsys.readouterr().err
    told = " ".join(shown.split())
    assert place in told
    assert expected in told
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("written", "overrides", "expected"),
    [
        ("", ["communication=near"], {"guarantee": "near"}),
        ("communication: diloco\n", ["communication.every=50"], {"method": "diloco", "every": 50}),
        ("communication: near\n", ["communication.codec=int8"], {"guarantee": "near", "codec": "int8"}),
        ("communication: {method: ring}\n", ["communication=direct + int4"], {"method": "direct", "codec": "int4"}),
    ],
)  # fmt: skip
def test_overrides_reach_into_either_form(
    tmp_path: Path, written: str, overrides: list[str], expected: dict[str, Any]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"task: seq2seq\nmodel: m\ndata: d\n{written}")
    assert load_job(path, overrides=overrides).communication == CommunicationSpec(**expected)


def test_the_schema_takes_the_texts_that_we_take() -> None:
    forms = job_schema()["properties"]["communication"]["anyOf"]
    pattern = next(form["pattern"] for form in forms if "pattern" in form)
    for text in (
        "near",
        "ring",
        "int8",
        "direct + int8",
        "direct+int8",
        " auto ",
        "dirct",
        "ring +",
    ):
        spelt = spell_communication(text)
        known = {"auto", *get_args(MethodName), *get_args(CodecName), *GUARANTEES}
        assert bool(re.search(pattern, text)) == (
            spelt is not None and set(map(str, spelt.values())) <= known
        )
