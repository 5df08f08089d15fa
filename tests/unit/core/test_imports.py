from __future__ import annotations

import random
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

from yunlu.core.errors import JobError
from yunlu.core.imports import import_object, make_object, names_object

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_dotted_module_and_attribute_are_found() -> None:
    assert import_object("collections:OrderedDict.fromkeys") == OrderedDict.fromkeys


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "my_nets_of_the_cwd.py", "answer = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert import_object("my_nets_of_the_cwd:answer") == 42


def test_a_file_is_found_by_its_path_and_may_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "a" / "neighbour_of_net.py", "width = 7\n")
    file = write(tmp_path / "a" / "net_in_file.py", "from neighbour_of_net import width\n")
    assert import_object(f"{file}:width") == 7


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    one = write(tmp_path / "one" / "same_name.py", "value = 1\n")
    two = write(tmp_path / "two" / "same_name.py", "value = 2\n")
    assert [import_object(f"{file}:value") for file in (one, two, one)] == [1, 2, 1]


def test_a_file_named_like_a_library_does_not_replace_it(tmp_path: Path) -> None:
    file = write(tmp_path / "random.py", "value = 4\n")
    assert import_object(f"{file}:value") == 4
    assert import_object("random:Random") is random.Random


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("no_such_module:Net", "no module 'no_such_module'"),
        ("collections:OrderedDct", "did you mean 'OrderedDict'"),
        ("no/such/file.py:Net", "no file"),
        ("plainword", "module:Class"),
        (":Net", "module:Class"),
        ("collections:", "module:Class"),
    ],
)
def test_a_wrong_reference_is_named(reference: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        import_object(reference)


@pytest.mark.parametrize("failure", ["RuntimeError('no licence')", "SystemExit('no licence')"])
def test_a_module_that_fails_on_import_says_why(tmp_path: Path, failure: str) -> None:
    broken = write(tmp_path / "broken_on_import.py", f"raise {failure}\n")
    with pytest.raises(JobError, match="no licence"):
        import_object(f"{broken}:Net")


def test_a_missing_dependency_of_the_users_module_is_not_taken_for_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "needs_more.py", "import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(JobError, match=r"cannot be imported.*no_such_dependency"):
        import_object("needs_more:Net")


@pytest.mark.parametrize("text", ["hf:gpt2", "C:thing", "a.b:C.d", "dir/file.py:make"])
def test_references_are_told_by_their_form(text: str) -> None:
    assert names_object(text)


@pytest.mark.parametrize("text", ["mlp", "hf:org/name", "s3://bucket/x", "a-b:C", "model.keras"])
def test_other_names_are_no_references(text: str) -> None:
    assert not names_object(text)


@pytest.mark.parametrize(
    ("reference", "said"),
    [("os:path", "not a class, but of module"), ("fractions:Fraction.limit_denominator", "'self'")],
)
def test_what_cannot_be_made_is_refused_in_words(reference: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        make_object(reference)


def test_a_long_list_of_names_is_cut() -> None:
    with pytest.raises(JobError, match="has no 'nope'") as caught:
        import_object("os:nope")
    assert len(str(caught.value.hint)) < 700
