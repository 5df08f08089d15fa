"""A run may say anything about its executor: only addresses that the user has named are contacted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.security.hostile import make_hostile_run
from yunlu.cli.main import main
from yunlu.core.errors import StoreError
from yunlu.executors.executor import ExecutorError
from yunlu.executors.lease_executor import LeaseRecord, write_record
from yunlu.executors.registry import (
    executor_of,
    is_held,
    is_known,
    remember_address,
    require_known,
    unknown_executor,
)
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Log
from yunlu.scheduler.pool_store import PoolSettings, PoolStore

RUN = "evil-000000"
ADDRESSES = [
    "ray://127.0.0.1:9",
    "ray://evil.example:10001",
    "ray://[::1]:9",
    "ray",
    "ray?head=127.0.0.1:9",
    "ray://127.0.0.1:9?env=AWS_SECRET_ACCESS_KEY",
    "slurm",
    "slurm://main?account=x",
    "evil://127.0.0.1",
    "yunlu.cli.main:main",
    "file:///etc/passwd",
    "",
]
READING = {
    "ps": ["ps"],
    "ps json": ["ps", "--json"],
    "show": ["show", RUN],
    "logs": ["logs", RUN],
    "report": ["report", RUN],
    "pool": ["pool"],
    "pool why": ["pool", "why", RUN],
}
ACTING = {
    "stop": ["stop", RUN],
    "stop now": ["stop", RUN, "--now"],
    "pause": ["pause", RUN],
}
_ACTS = {"socket.connect", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.system"}
_heard: list[str] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _heard is not None and (event in _ACTS or (event == "import" and arguments[0] == "ray")):
        _heard.append(f"{event} {arguments}")


sys.addaudithook(_hear)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Connections, programs and imports of Ray, as Python itself reports them."""
    global _heard  # noqa: PLW0603 (an audit hook cannot be taken away again)
    _heard = []
    try:
        yield _heard
    finally:
        _heard = None


def make_run(home: Path, address: str, *, ends: str = "") -> Path:
    path = make_hostile_run(home, "fine", ends=ends)
    record, _ = LeaseRecord(address=address).grant("node", 1, is_lead=True)
    write_record(open_run(path), record)
    return path


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("verb", READING)
def test_reading_contacts_nobody(
    address: str,
    verb: str,
    own_home: Path,
    heard: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_run(own_home, address)
    before = (path / Log.EVENTS).read_bytes()
    assert main(READING[verb]) in {0, 1}
    text = "".join(capsys.readouterr())
    assert heard == []
    assert "ray" not in sys.modules
    assert (path / Log.EVENTS).read_bytes() == before
    if verb in {"ps", "show"}:
        assert "not one of yours" in " ".join(text.split())
        assert "running" in text  # as its files say


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("verb", ACTING)
def test_acting_is_refused_with_what_to_set(
    address: str,
    verb: str,
    own_home: Path,
    heard: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(own_home, address)
    assert main(ACTING[verb]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "is not one of yours" in text
    assert "YUNLU_EXECUTORS" in text
    assert heard == []


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_resume_goes_to_no_cluster_that_the_run_names(
    address: str, own_home: Path, heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(own_home, address, ends="failed")
    assert main(["resume", RUN]) == 1
    assert "is not one of yours" in " ".join(capsys.readouterr().err.split())
    assert heard == []


@pytest.mark.parametrize("address", [*ADDRESSES[:-1], "ray://evil.example:1?grow=a:1x1"])
def test_a_pool_is_not_brought_up_where_only_the_home_says(
    address: str, own_home: Path, heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own_home.mkdir()
    PoolStore(own_home).write_settings(PoolSettings(executor=address, round_s=7.0))
    assert main(["pool", "up"]) == 1
    assert "is not one of yours" in " ".join(capsys.readouterr().err.split())
    assert heard == []


def test_an_address_that_the_user_names_is_asked(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(make_run(own_home, "slurm://main"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("YUNLU_EXECUTORS", "ray://head:10001 slurm://main")
    assert main(["stop", RUN]) == 1
    assert "Slurm is not on this machine" in capsys.readouterr().err
    assert unknown_executor(run) is None
    monkeypatch.setenv("YUNLU_EXECUTORS", "slurm://mai slurm://main?account=x slurm")
    assert unknown_executor(run) == "slurm://main"
    with pytest.raises(ExecutorError, match="not one of yours"):
        executor_of(run)
    assert is_held(run)


def test_what_the_user_starts_something_on_is_remembered(tmp_path: Path) -> None:
    assert not is_known("ray://head:10001")
    for _ in range(2):
        remember_address("ray://head:10001")
    remember_address("slurm")
    assert is_known("ray://head:10001")
    assert is_known("slurm")
    assert not is_known("ray://head:1000")
    assert not is_known("ray://head:10001?device=cpu")
    file = tmp_path / "config" / "executors"
    assert file.read_text() == "ray://head:10001\nslurm\n"
    assert file.stat().st_mode & 0o777 == 0o600
    require_known("ray://head:10001", named_by="a run")


@pytest.mark.parametrize("address", ["ray://a\nray://b", "ray://a ", "\x1b[2J"])
def test_no_address_smuggles_another_one_into_the_list(address: str) -> None:
    remember_address(address)
    assert not is_known("ray://b")
    assert not is_known(address)


def test_a_list_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    remember_address("slurm")
    file = tmp_path / "config" / "executors"
    file.chmod(0o622)
    with pytest.raises(StoreError, match="others can write"):
        is_known("slurm")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StoreError, match="FIFO"):
        is_known("slurm")


@pytest.mark.parametrize("address", ["local", "local://?devices=4&node=here"])
def test_this_machine_needs_no_name(address: str) -> None:
    assert is_known(address)
