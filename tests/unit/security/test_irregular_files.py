"""FIFOs, links, sockets and directories in place of files of a run or home."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.security.hostile import make_hostile_run
from yunlu.cli.main import main
from yunlu.core.files import (
    IrregularFileError,
    append_lines,
    check_directory,
    check_regular,
    open_regular,
    read_lines,
    read_regular,
    write_atomically,
)
from yunlu.jobs import lifecycle
from yunlu.runs.home import open_run
from yunlu.runs.run_store import WORKER_LOG, Area, Claim, Document, Log

SECRET = '{"kind": "warning", "at": 1.0, "message": "the secret of another file"}\n'


def make_fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "secret")


def make_dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nothing")


def make_link_to_fifo(path: Path, outside: Path) -> None:
    os.mkfifo(outside / "fifo")
    path.symlink_to(outside / "fifo")


def make_link_to_device(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def make_directory(path: Path, outside: Path) -> None:
    path.mkdir()


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "a FIFO": make_fifo,
    "a link": make_link,
    "a dangling link": make_dangling_link,
    "a link to a FIFO": make_link_to_fifo,
    "a link to a device": make_link_to_device,
    "a socket": make_socket,
    "a directory": make_directory,
}
READERS: dict[str, Callable[[Path], object]] = {
    "read": read_regular,
    "lines": lambda path: list(read_lines(path)),
    "append": lambda path: append_lines(path, [{"a": 1}]),
    "lock": lambda path: os.close(open_regular(path, os.O_RDWR | os.O_CREAT)),
    "check": check_regular,
}
IN_A_RUN = [Document.JOB, Log.EVENTS, Log.METRICS, Document.LEASES, Document.WORKER]
IN_A_HOME = ["index.sqlite", "index.sqlite-wal", "index.sqlite-shm", ".index.lock"]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret").write_text(SECRET)
    return place


def replace(path: Path, kind: str, outside: Path) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path, outside)


def check_outside(outside: Path) -> None:
    assert (outside / "secret").read_text() == SECRET
    assert not (outside / "nothing").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_only_regular_files_are_opened(
    kind: str, reader: str, tmp_path: Path, outside: Path
) -> None:
    path = tmp_path / "file"
    KINDS[kind](path, outside)
    with pytest.raises(IrregularFileError, match="not a regular file") as refused:
        READERS[reader](path)
    assert str(path) in refused.value.message
    assert refused.value.hint
    check_outside(outside)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a directory"])
def test_what_is_written_replaces_a_link_and_never_follows_it(
    kind: str, tmp_path: Path, outside: Path
) -> None:
    path = tmp_path / "file"
    KINDS[kind](path, outside)
    KINDS[kind](tmp_path / f".file.{os.getpid()}.part", tmp_path) if kind == "a link" else None
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert not path.is_symlink()
    check_outside(outside)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("item", IN_A_RUN)
def test_one_bad_run_is_named_and_the_others_are_listed(
    kind: str, item: str, own_home: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile_run(own_home, "fine", name="good-000000")
    bad = make_hostile_run(own_home, "fine", name="bad-000000", ends="")
    replace(bad / item, kind, outside)
    assert main(["ps"]) == 0
    text = capsys.readouterr().out
    assert "good-000000" in text
    assert "bad-000000 cannot be read" in text
    assert str(bad / item) in text.replace("\n", "")
    assert "another file" not in text
    assert main(["ps", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "good-000000" in out
    assert "bad-000000 cannot be read" in err
    assert main(["show", "bad-000000"]) == 1
    assert item in capsys.readouterr().err
    check_outside(outside)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["logs", "report", "show"])
def test_a_run_given_by_its_directory_is_refused_with_the_file(
    kind: str, verb: str, tmp_path: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = make_hostile_run(tmp_path / "elsewhere", "fine")
    replace(bad / Log.EVENTS, kind, outside)
    assert main([verb, str(bad)]) == 1
    text = capsys.readouterr().err
    assert Log.EVENTS in text
    assert "not a regular file" in text
    check_outside(outside)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("item", [WORKER_LOG, "logs/worker-0.log"])
def test_logs_are_regular_files(
    kind: str, item: str, own_home: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_hostile_run(own_home, "fine")
    replace(run / item, kind, outside)
    words = ["--worker", "0"] if "/" in item else []
    assert main(["logs", run.name, *words]) == 1
    assert "not a regular file" in capsys.readouterr().err


def test_an_area_that_is_a_link_is_not_entered(
    own_home: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_hostile_run(own_home, "fine")
    (run / "logs" / "worker-0.log").rename(outside / "worker-0.log")
    (run / "logs").rmdir()
    (run / "logs").symlink_to(outside)
    assert main(["logs", run.name, "--worker", "0"]) == 1
    assert "is a symbolic link, not a directory" in capsys.readouterr().err
    store = open_run(run)
    for act in (
        lambda: store.names(Area.LOGS),
        lambda: store.read("logs/worker-0.log"),
        lambda: store.write("logs/new", "x"),
        lambda: list(store.read_log("logs/worker-0.log")),
        lambda: check_directory(run / "logs"),
    ):
        with pytest.raises(IrregularFileError, match="symbolic link"):
            act()
    assert not (outside / "new").exists()
    store.remove(Area.LOGS)
    assert (outside / "worker-0.log").exists()


@pytest.mark.parametrize("name", ["../other/job.json", "/etc/passwd", "logs/../../x"])
def test_no_name_leads_out_of_a_run(name: str, tmp_path: Path) -> None:
    store = open_run(make_hostile_run(tmp_path, "fine"))
    with pytest.raises(IrregularFileError, match="leads out of"):
        store.read(name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("claim", Claim)
def test_claims_are_regular_files(kind: str, claim: Claim, tmp_path: Path, outside: Path) -> None:
    run = make_hostile_run(tmp_path, "fine")
    replace(run / claim, kind, outside)
    with (
        pytest.raises(IrregularFileError, match="not a regular file"),
        open_run(run).claim(claim, wait=False),
    ):
        pass
    check_outside(outside)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("item", IN_A_HOME)
def test_the_index_is_a_regular_file(
    kind: str, item: str, own_home: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile_run(own_home, "fine")
    replace(own_home / item, kind, outside)
    assert main(["ps"]) == 1
    text = capsys.readouterr().err
    assert item in text
    assert "not a regular file" in text
    check_outside(outside)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a dangling link"])
@pytest.mark.parametrize("item", ["service.lock", "view.json"])
def test_files_of_the_pool_are_regular(
    kind: str, item: str, own_home: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile_run(own_home, "fine")
    replace(own_home / ".pool" / item, kind, outside)
    assert main(["pool"]) == 1
    assert "not a regular file" in capsys.readouterr().err
    check_outside(outside)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a dangling link"])
@pytest.mark.parametrize("item", ["study.json", "state.json", "study.sqlite3"])
def test_files_of_a_study_are_regular(
    kind: str, item: str, own_home: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = own_home / "studies" / "evil"
    study.mkdir(parents=True)
    request = (
        '{"id": "a", "name": "evil", "metrics": ["x"], "directions": ["minimize"], "created_at": 1}'
    )
    (study / "study.json").write_text(request)
    replace(study / item, kind, outside)
    assert main(["study", "show", "evil"]) == 1
    assert "not a regular file" in capsys.readouterr().err
    assert main(["study", "list"]) == 0
    assert "not a regular file" in capsys.readouterr().out
    check_outside(outside)


def test_a_link_to_a_run_elsewhere_is_named_and_not_read(
    own_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hostile_run(own_home, "fine", name="good-000000")
    other = make_hostile_run(tmp_path / "elsewhere", "fine", name="other-000000")
    (own_home / "linked-000000").symlink_to(other)
    assert main(["ps"]) == 0
    text = capsys.readouterr().out
    assert "good-000000" in text
    assert "linked-000000 is a symbolic link" in text.replace("\n", "")
    assert [record.id for record in lifecycle.list_runs()] == ["good-000000"]
    assert main(["show", str(own_home / "linked-000000")]) == 0  # named by the user: meant


@pytest.mark.parametrize(
    "line", ["[" * 5000, '{"a":' * 5000, "1" * 5000, "\x00" * 100, "null", '{"v": 1}', "{"]
)
def test_a_line_that_is_no_event_hides_nothing(
    line: str, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_hostile_run(own_home, "fine")
    for log in (Log.EVENTS, Log.METRICS):
        with (run / log).open("a") as file:
            file.write(f"{line}\n")
    make_hostile_run(own_home, "fine", name="good-000000")
    for words in (["ps"], ["show", run.name], ["logs", run.name], ["report", run.name]):
        assert main(words) == 0, words
    text = capsys.readouterr().out
    assert "good-000000" in text
    assert run.name in text
