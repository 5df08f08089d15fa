"""A process is replaced only by main modules of ours, whoever names them."""

from __future__ import annotations

import signal

import pytest

from yunlu.training.elastic import exec_module as module
from yunlu.training.elastic.exec_module import ASYNC_NODE, ASYNC_SUPERVISOR, exec_module


@pytest.mark.parametrize("name", ["http.server", "yunlu.cli.main", "", f"{ASYNC_NODE} "])
def test_another_module_is_refused_before_anything_changes(name: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(ValueError, match="no main module of an asynchronous run"):
        exec_module(name, "run")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("name", [ASYNC_NODE, ASYNC_SUPERVISOR])
def test_a_module_of_ours_replaces_the_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(module.os, "execve", lambda _, command, __: commands.append(command))
    monkeypatch.setattr(module.signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(module.signal, "set_wakeup_fd", lambda _: -1)
    exec_module(name, "run")
    assert commands[0][1:] == ["-m", name, "run"]
