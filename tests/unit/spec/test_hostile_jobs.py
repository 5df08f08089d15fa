"""A job file that somebody sent is a job, or refused in our words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given

from tests.hostile import hostile_bytes
from yunlu.core.errors import JobError, YunluError
from yunlu.spec.load import load_job

if TYPE_CHECKING:
    from pathlib import Path

JOB = b"task: tabular-classification\nmodel: mlp\ndata: x.csv\n"
KEYS = (
    *(JOB, b"model: {name: mlp, args: {a: ", b"train:\n  ", b"search:\n  space:\n    ", b"data: "),
    *(
        b"task: ",
        b"!!python/object/apply:os.system ['id']",
        b"&a [*a]",
        b"<<: *a\n",
        b"? ",
        b"|\n ",
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@given(hostile_bytes(*KEYS))
@example(b"[" * 3_000)
@example(b"{a: " * 300)
@example(JOB + b"x: " + b"[" * 150 + b"]" * 150)
@example(JOB + b'name: "\\ud800"')
@example(JOB + b"devices: 0x" + b"f" * 5000)
@example(JOB + b"devices: " + b"9" * 5000)
@example(JOB + b"train: {optimizer: {lr: .nan}}")
@example(JOB + b"train: {steps: 1e999}")
@example(b"\xff\xfe")
@example(b"<<: &a {<<: *a}")
def test_bytes_are_a_job_or_an_error_of_ours(folder: Path, data: bytes) -> None:
    for name in ("job.yaml", "job.json"):
        path = folder / name
        path.write_bytes(data)
        try:
            load_job(path).model_dump_json()
        except YunluError as error:
            str(error).encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 101 + "]" * 101, "nested too deeply: more than 100 levels"),
        ("{a: " * 101 + "1" + "}" * 101, "nested too deeply: more than 100 levels"),
        ("[" * 2000, "nested too deeply"),
        (json.dumps({"a": "x" * (1 << 20)}), "larger than 1,048,576 bytes"),
        ("#" * ((1 << 20) + 1), "larger than 1,048,576 bytes"),
        ("a: 0x" + "f" * 401, "not a number that can be read"),
        ("a: &a [x]\nb: [*a, *a]\n" + "c: &c {<<: *c}", "refers to itself"),
    ],
)
def test_what_is_too_deep_or_too_long_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError, match=words):
        load_job(path)


def test_a_long_job_can_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(JOB + b"#" * 2_000)
    monkeypatch.setenv("YUNLU_LIMITS", "job=1000")
    with pytest.raises(JobError, match="larger than 1,000 bytes") as raised:
        load_job(path)
    assert "YUNLU_LIMITS=job=" in str(raised.value)
    monkeypatch.setenv("YUNLU_LIMITS", "job=3000")
    assert load_job(path).task == "tabular-classification"
