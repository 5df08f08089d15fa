"""A layout as a job says it: text or mapping, whole or in part, without contradictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.layouts import Layout, parse_layout
from yunlu.spec.job import Job, LayoutSpec, read_axes
from yunlu.spec.load import InvalidJobError, job_from_mapping, load_job
from yunlu.spec.schema import job_schema

GOOD = {"task": "seq2seq", "model": "m", "data": "d"}


def job(**parts: Any) -> Job:
    return job_from_mapping(GOOD | parts)


def problem(**parts: Any) -> str:
    with pytest.raises(InvalidJobError) as caught:
        job(**parts)
    (found,) = caught.value.problems
    return str(found)


def test_nothing_said_leaves_everything_to_the_plan() -> None:
    assert (job().layout, job().devices) == (LayoutSpec(), "auto")
    assert job(layout="auto").layout == job(layout={}).layout == LayoutSpec()


@pytest.mark.parametrize(
    "text", ["dp2 x tp2", "tp2 × dp2", "dp2,tp2", "dp2 tp2", "dp2*tp2", "dp=2 x tp=2"]
)
def test_a_text_names_the_whole_layout(text: str) -> None:
    layout = job(layout=text).layout
    assert layout.sizes == {"dp": 2, "fsdp": 1, "tp": 2, "pp": 1}
    assert (layout.is_whole, layout.said_workers, str(layout)) == (True, 4, "dp2 x tp2")


def test_single_is_one_worker() -> None:
    layout = job(layout="single").layout
    assert (layout.said_workers, layout.is_whole, str(layout)) == (1, True, "single")


def test_a_mapping_says_only_what_it_names() -> None:
    layout = job(layout={"tp": 2, "pp": "auto"}, devices=8).layout
    assert (layout.sizes, layout.is_whole, str(layout)) == ({"tp": 2}, False, "tp2")


@pytest.mark.parametrize("written", ["dp2 x tp2", "single", "auto", {"tp": 2, "sequence": True}])
def test_a_job_survives_the_trip_through_its_file(written: Any) -> None:
    before = job(layout=written)
    assert Job.model_validate_json(before.model_dump_json()) == before
    assert Job.model_validate(before.model_dump(mode="json", exclude_unset=True)) == before


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("dpp2", "layout: expected 'auto', 'single', a layout such as 'dp2 x tp2' or a mapping, got 'dpp2'"),
        ("dp0", "layout: expected 'auto', 'single', a layout such as 'dp2 x tp2' or a mapping, got 'dp0'"),
        ("dp2 x dp3", "layout: expected 'auto', 'single', a layout"),
        (3, "layout: expected 'auto', 'single', a layout"),
        ({"dp": 0}, "layout.dp: expected a whole number above 0 or 'auto', got 0"),
        ({"zero": 2}, "layout.zero: unknown key; did you mean 'zero1'?"),
        ({"cp": 2}, "layout.cp: context parallel is not available: torch has no sharding strategy"),
        ("dp2 x cp2", "layout.cp: context parallel is not available"),
        ({"sequence": True}, "layout.sequence: needs tp"),
        ({"sequence": True, "tp": 1}, "layout.sequence: needs tp"),
        ({"vocabulary": True, "dp": 2}, "layout.vocabulary: needs tp"),
        ({"zero1": True, "dp": 1}, "layout.zero1: shares the optimiser's state among replicas"),
        ({"zero1": True, "fsdp": 2}, "layout.zero1: fsdp shards the optimiser's state already"),
        ({"schedule": "gpipe"}, "layout.schedule: needs pp"),
        ({"stages_per_rank": 2}, "layout.stages_per_rank: needs pp"),
        ({"pp": 2, "schedule": "interleaved", "stages_per_rank": 1}, "layout.stages_per_rank: the inter"),
        ({"pp": 2, "schedule": "1f1b", "stages_per_rank": 2}, "layout.stages_per_rank: 2 needs the inter"),
        ({"pp": 2, "schedule": "zb"}, "layout.schedule: expected one of 'auto', 'gpipe'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_at_its_key(layout: Any, expected: str) -> None:
    assert problem(layout=layout).startswith(expected)


@pytest.mark.parametrize(
    ("devices", "layout", "expected"),
    [
        (4, "dp2", "devices: is 4, but the layout dp2 has 2 workers"),
        (4, "single", "devices: is 4, but the layout single has 1 worker"),
        (3, {"tp": 2}, "devices: is 3, which tp2 does not divide"),
        (0, "auto", "devices: expected a whole number above 0 or 'auto', got 0"),
        (True, "auto", "devices: expected a whole number above 0 or 'auto', got true"),
    ],
)
def test_devices_and_layout_must_agree(devices: Any, layout: Any, expected: str) -> None:
    assert problem(devices=devices, layout=layout) == expected


def test_a_contradiction_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("task: seq2seq\nmodel: m\ndata: d\nlayout:\n  tp: 2\n  schedule: gpipe\n")
    with pytest.raises(InvalidJobError, match=r"line 6, column 3: layout.schedule: needs pp"):
        load_job(path)


@pytest.mark.parametrize(
    ("written", "overrides", "expected"),
    [
        ("", ["layout.tp=2"], {"tp": 2}),
        ("layout: auto\n", ["layout.tp=2"], {"tp": 2}),
        ("layout: fsdp2\n", ["layout.tp=2"], {"dp": 1, "fsdp": 2, "tp": 2, "pp": 1}),
        ("layout: fsdp2\n", ["layout=dp3", "devices=3"], {"dp": 3, "fsdp": 1, "tp": 1, "pp": 1}),
        ("layout: {tp: 2}\n", ["layout.dp=2", "devices=4"], {"dp": 2, "tp": 2}),
        ("layout: dp2\ndevices: 2\n", ["layout=auto", "devices=4"], {}),
    ],
)
def test_overrides_reach_into_either_form(
    tmp_path: Path, written: str, overrides: list[str], expected: dict[str, int]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"task: seq2seq\nmodel: m\ndata: d\n{written}")
    assert load_job(path, overrides=overrides).layout.sizes == expected


def test_an_override_that_contradicts_the_file_names_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("task: seq2seq\nmodel: m\ndata: d\nlayout: dp2\n")
    with pytest.raises(InvalidJobError, match="--set devices: is 4, but the layout dp2 has 2"):
        load_job(path, overrides=["devices=4"])


def test_the_schema_shows_both_forms_and_its_pattern_takes_what_we_take() -> None:
    text, mapping = job_schema()["properties"]["layout"]["anyOf"]
    assert mapping["$ref"].endswith("LayoutSpec")
    for good in ("auto", "single", "fsdp4", "dp2 x tp2", "pp2,dp2"):
        assert re.search(text["pattern"], good)
    for bad in ("", "dp", "dp0", "dp2 x", "xdp2", "singles"):
        assert not re.search(text["pattern"], bad)


sizes = st.integers(1, 9)


@given(st.builds(Layout, dp=sizes, fsdp=sizes, tp=sizes, pp=sizes))
def test_what_a_layout_is_called_is_read_back(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout
    assert job(layout=str(layout)).layout.said_workers == layout.world


@given(st.text("dpfst24x, ", max_size=12))
def test_any_text_is_a_layout_or_is_not(text: str) -> None:
    found = read_axes(text)
    assert found is None or all(size >= 1 for size in found.values())
