"""What ``join`` refuses, and in which words."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from yunlu.cli.runs import join
from yunlu.core.errors import StoreError
from yunlu.training.elastic.control_channel import ControlServer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devices": 0}, "none to lend"),
        ({"name": "local"}, "own node"),
        ({"token_file": None}, "token is missing"),
        ({"token_file": Path("/nowhere/token")}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("t")
    with pytest.raises(StoreError, match=words):
        join("127.0.0.1:1", **{"token_file": tmp_path / "token", **given})


def test_a_wrong_token_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("guessed\n")
    links = ControlServer("127.0.0.1", "right")
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            links.poll(0.05, on_message=lambda *_: None, on_lost=lambda *_: None)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(StoreError, match="another token"):
            join(f"127.0.0.1:{links.port}", token_file=tmp_path / "token")
    finally:
        is_over.set()
        thread.join()
        links.close_all()
