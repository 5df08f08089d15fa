"""What is said when a Ray cluster does not let us in; without a cluster."""

from __future__ import annotations

import json
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from yunlu.core.settings import ray_authentication
from yunlu.executors import ray_executor
from yunlu.executors.executor import ExecutorError
from yunlu.executors.ray_bridge import find_refusal
from yunlu.executors.ray_executor import RayLink

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"ray://127.0.0.1:{server.getsockname()[1]}"


def _answering(monkeypatch: pytest.MonkeyPatch, **answer: object) -> None:
    program = f"print({json.dumps(answer)!r})"
    monkeypatch.setattr(ray_executor, "_BRIDGE", (sys.executable, "-c", program))
    monkeypatch.setattr(ray_executor, "find_spec", lambda _: object())


def test_a_cluster_that_wants_a_token_says_how_to_give_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "Received when checking init: Invalid or missing authentication token"
    _answering(monkeypatch, error=words, wants_token=True)
    with pytest.raises(
        ExecutorError, match="wants a token and did not get the right one"
    ) as raised:
        RayLink(address).call("survey")
    assert words in raised.value.message
    for way in ("ray get-auth-token", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        assert way in str(raised.value.hint)
    assert "disabled" not in str(raised.value)


def test_another_refusal_is_not_taken_for_a_missing_token(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answering(monkeypatch, error="ray client connection timeout", wants_token=False)
    with pytest.raises(ExecutorError, match="there is no connection") as raised:
        RayLink(address).call("survey")
    assert "RAY_AUTH" not in str(raised.value)


@pytest.mark.parametrize(
    ("message", "heard"),
    [
        ("ray client connection timeout", ["x", "init: Invalid or missing authentication token"]),
        ("Token authentication is enabled but no authentication token was found.\nhelp", []),
        ("a\n  status = StatusCode.UNAUTHENTICATED\nb", []),
        ("ray.exceptions.AuthenticationError: no", []),
    ],
)
def test_rays_words_on_tokens_are_found(message: str, heard: list[str]) -> None:
    found = find_refusal(ConnectionError(message), heard)
    assert found is not None
    assert "\n" not in found


def test_other_words_are_not() -> None:
    assert (
        find_refusal(ConnectionError("ray client connection timeout"), ["retrying in 5s"]) is None
    )


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, {}),
        ({"RAY_AUTH_TOKEN": "t"}, {"RAY_AUTH_MODE": "token"}),
        ({"RAY_AUTH_TOKEN_PATH": "/f"}, {"RAY_AUTH_MODE": "token"}),
        ({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"}, {}),
        ({"RAY_AUTH_MODE": "token"}, {}),
    ],
)
def test_a_token_in_the_environment_is_used(
    environment: dict[str, str], mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ray_authentication() == mode
