"""Runs, studies and worker groups of another user: read as data, never acted on."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.security.hostile import make_hostile_run, queue_entry
from yunlu.cli.main import main
from yunlu.core.errors import StoreError, YunluError
from yunlu.core.files import name_if_foreign, require_private
from yunlu.executors import worker_process
from yunlu.jobs import lifecycle
from yunlu.jobs.lifecycle import resize
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Document
from yunlu.runs.worker_group import WorkerGroup, write_worker_group
from yunlu.scheduler import queue
from yunlu.training.elastic.exec_module import ASYNC_NODE
from yunlu.training.elastic.supervisor import NODE_MODULE
from yunlu.tuning.study_dir import StudyDir

RUN = "evil-000000"
NOBODY = 65534
READING = {
    "ps": ["ps"],
    "show": ["show", RUN],
    "logs": ["logs", RUN],
    "report": ["report", RUN],
    "report json": ["report", RUN, "--json"],
    "pool": ["pool"],
}
ACTING = {
    "stop": ["stop", RUN],
    "stop now": ["stop", RUN, "--now"],
    "resume": ["resume", RUN],
    "resize": ["resize", RUN, "--devices", "2"],
    "pause": ["pause", RUN],
    "priority": ["priority", RUN, "5"],
    "pool change": ["pool", "change", RUN, "--priority", "5"],
}
PROGRAMS = [
    "accelerate.commands.launch",
    "http.server",
    "this",
    "",
    "-c",
    "--help",
    "/tmp/evil.py",
    "../evil",
    "yunlu",
    "yunlu.cli.main",
    "yunlu.training.topology.elastic\n",
    "yunlu.training.topology.elastic evil",
    "Yunlu.training.topology.elastic",
    "yunlu.training.asynchronous.node.evil",
]


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let a file or directory be another user's: really where we may, else by being another one."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        else:
            uid = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: uid)

    return give


def snapshot(path: Path) -> dict[str, tuple[int, bytes]]:
    files = (item for item in path.rglob("*") if item.is_file())
    return {str(item): (item.stat().st_mtime_ns, item.read_bytes()) for item in files}


@pytest.mark.parametrize("ends", ["failed", "finished", ""])
@pytest.mark.parametrize("verb", READING)
def test_reading_changes_nothing_and_names_the_owner(
    verb: str,
    ends: str,
    own_home: Path,
    give_away: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_hostile_run(own_home, "fine", ends=ends)
    give_away(path)
    before = snapshot(path)
    assert main(READING[verb]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert snapshot(path) == before
    if verb in {"ps", "show"}:
        assert f"belongs to {open_run(path).foreign_owner}" in text


@pytest.mark.parametrize("ends", ["failed", ""])
@pytest.mark.parametrize("verb", ACTING)
def test_acting_is_refused_and_changes_nothing(
    verb: str,
    ends: str,
    own_home: Path,
    give_away: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_hostile_run(own_home, "fine", ends=ends)
    (path / Document.QUEUE_ENTRY).write_text(json.dumps(queue_entry("")))
    give_away(path)
    before = snapshot(path)
    assert main(ACTING[verb]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert f"belongs to {open_run(path).foreign_owner}: it can be read, not changed" in text
    assert "YUNLU_TRUSTED_USERS" in text
    assert snapshot(path) == before


def test_python_is_refused_as_well(own_home: Path, give_away: Callable[[Path], None]) -> None:
    path = make_hostile_run(own_home, "fine")
    give_away(path)
    run = open_run(path)
    for act in (
        lambda: lifecycle.start(run),
        lambda: lifecycle.resume(run),
        lambda: lifecycle.reopen(run),
        lambda: lifecycle.request_stop(run),
        lambda: lifecycle.stop(run),
        lambda: lifecycle.change_placement(run, None),
        lambda: resize(run, devices=2),
        lambda: queue.requeue(run),
        lambda: queue.withdraw(run),
        lambda: queue.change_entry(run, priority=1),
    ):
        with pytest.raises(YunluError, match="belongs to"):
            act()
    assert list(queue.scan(own_home)) == []


def test_users_that_the_settings_name_are_trusted(
    own_home: Path, give_away: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_hostile_run(own_home, "fine")
    give_away(path)
    owner, uid = open_run(path).foreign_owner, path.stat().st_uid
    assert owner is not None
    for named in (owner, str(uid), f"somebody,{uid}"):
        monkeypatch.setenv("YUNLU_TRUSTED_USERS", named)
        assert open_run(path).foreign_owner is None
    monkeypatch.setenv("YUNLU_TRUSTED_USERS", "somebody")
    assert open_run(path).foreign_owner == owner
    assert name_if_foreign(0) is None


def test_the_page_of_another_users_run_is_made_anew(
    own_home: Path,
    tmp_path: Path,
    give_away: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_hostile_run(own_home, "fine", ends="finished")
    (path / Document.REPORT_PAGE).write_text("<script>evil()</script>")
    give_away(path)
    assert main(["report", RUN, "--html", str(tmp_path / "page.html")]) == 0
    assert "evil()" not in (tmp_path / "page.html").read_text()
    assert main(["report", RUN, "--open"]) == 1
    assert "--html FILE" in capsys.readouterr().err


def test_a_study_of_another_user_is_not_run(
    tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    (tmp_path / "study").mkdir()
    give_away(tmp_path / "study")
    study = StudyDir(tmp_path / "study")
    with pytest.raises(YunluError, match="belongs to"):
        study.request_stop()
    with pytest.raises(YunluError, match="belongs to"), study.locked_by_runner():
        pass
    assert list((tmp_path / "study").iterdir()) == []


# Joining a run.


def make_group(path: Path, **fields: Any) -> WorkerGroup:
    group = WorkerGroup.model_validate(
        {
            "host": "127.0.0.1",
            "port": 1,
            "token": "t",
            "pid": 1,
            "process_started_at": 0,
            "node_module": NODE_MODULE,
            "target": 1,
        }
        | fields
    )
    write_worker_group(open_run(path), group)
    return group


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """A supervisor that says where its run lies; no program may be started."""

    def answer(text: object) -> None:
        monkeypatch.setattr(worker_process, "send_request", lambda *_, **__: {"text": text})

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    return answer


def join(capsys: pytest.CaptureFixture[str]) -> str:
    with tempfile.NamedTemporaryFile("w") as token:
        token.write("t")
        token.flush()
        assert main(["join", "127.0.0.1:1", "--token-file", token.name]) == 1
    return " ".join(capsys.readouterr().err.split())


def test_the_programs_that_join_are_our_own_two() -> None:
    assert set(worker_process.NODE_MODULES) == {NODE_MODULE, ASYNC_NODE}


@pytest.mark.parametrize("module", PROGRAMS)
def test_only_a_node_of_ours_is_started(
    module: str,
    tmp_path: Path,
    supervisor: Callable[[object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_hostile_run(tmp_path, "fine")
    group = make_group(path, node_module=module)
    supervisor(str(path))
    assert "it was not started" in join(capsys)
    with pytest.raises(StoreError, match="it was not started"):
        worker_process.run_node(open_run(path), name="n", devices=1)
    with pytest.raises(StoreError, match="it was not started"):
        worker_process.node_command(open_run(path), group)


@pytest.mark.parametrize("item", ["", Document.WORKER_GROUP])
@pytest.mark.parametrize("mode", [0o666, 0o662, 0o620, 0o602, 0o777])
def test_a_group_that_others_can_write_is_not_joined(
    item: str,
    mode: int,
    tmp_path: Path,
    supervisor: Callable[[object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_hostile_run(tmp_path, "fine")
    make_group(path)
    (path / item).chmod(mode | (stat.S_IRWXU if not item else 0))
    supervisor(str(path))
    text = join(capsys)
    assert "others can write" in text
    assert "chmod go-w" in text
    path.chmod(0o700)


@pytest.mark.parametrize("item", ["", Document.WORKER_GROUP])
def test_a_group_of_another_user_is_not_joined(
    item: str,
    tmp_path: Path,
    supervisor: Callable[[object], None],
    give_away: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_hostile_run(tmp_path, "fine")
    path.chmod(0o755)
    make_group(path)
    give_away(path / item)
    supervisor(str(path))
    text = join(capsys)
    assert "belongs to" in text
    assert "is not followed" in text


@pytest.mark.parametrize(
    "answer", ["", "relative", "../..", "/nowhere/run", "/etc/passwd", None, 5, "~"]
)
def test_a_run_that_is_no_directory_here_is_not_joined(
    answer: object, supervisor: Callable[[object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor(answer)
    assert "is no directory of this machine" in join(capsys)


def test_a_record_that_is_a_link_is_not_followed(
    tmp_path: Path, supervisor: Callable[[object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_hostile_run(tmp_path, "fine")
    path.chmod(0o700)
    make_group(path)
    (path / Document.WORKER_GROUP).rename(tmp_path / "group.json")
    (path / Document.WORKER_GROUP).symlink_to(tmp_path / "group.json")
    supervisor(str(path))
    assert "symbolic link" in join(capsys)


def test_what_is_ours_alone_is_private(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o600)
    require_private(file)
    file.chmod(0o644)
    require_private(file)
