"""Every client keeps the contract: the one of this machine, and one behind JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from yunlu.client.local import LocalClient
from yunlu.core.value import Value
from yunlu.spec.job import Job
from yunlu.testing.clients import ClientContract

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yunlu.client.protocol import Client
    from yunlu.testing.clients import Ending

FAKE_WORKER = (sys.executable, str(Path(__file__).parents[1] / "unit" / "jobs" / "fake_worker.py"))


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without torch."""
    monkeypatch.setattr("yunlu.executors.worker_process.WORKER", FAKE_WORKER)


class Jobs(ClientContract):
    """Jobs for the fake worker."""

    def make_job(self, ending: Ending) -> Job:
        model = {"name": "mlp", "args": {"fate": ending}}
        parts = {"name": "digits", "task": "tabular-classification", "data": "synthetic:x"}
        return Job.model_validate({**parts, "model": model})

    def make_plan_job(self) -> Job:
        return Job.model_validate(
            {
                "task": "language-modeling",
                "model": "hf:meta-llama/Llama-3.2-1B",
                "data": {"train": "corpus.txt", "tokens": 100_000_000, "max_length": 1024},
                "train": {"batch": 64, "epochs": 1},
                "goal": {
                    "gpu": ["A100-80GB", "L4"],
                    "cloud": ["aws", "gcp", "lambda"],
                    "max_devices": 8,
                },
            }
        )


class TestLocalClient(Jobs):
    def make_client(self) -> Client:
        return LocalClient()


class JsonClient:
    """Passes every value through JSON between the caller and the client of this machine.

    An HTTP server could do the same: nothing but JSON crosses.
    """

    def __init__(self, inner: Client) -> None:
        self._inner = inner

    def __getattr__(self, verb: str) -> Any:
        call = getattr(self._inner, verb)
        if verb == "follow":
            return lambda *args, **kwargs: self._stream(call(*args, **kwargs))
        return lambda *args, **kwargs: pass_on(call(*args, **kwargs))

    def _stream(self, updates: Iterator[Any]) -> Iterator[Any]:
        for update in updates:
            yield pass_on(update)


def pass_on(answer: Any) -> Any:
    """The answer after a trip through JSON; refuses what is neither a value nor plain."""
    if isinstance(answer, Value):
        return type(answer).model_validate_json(answer.model_dump_json())
    if isinstance(answer, tuple):
        return tuple(pass_on(item) for item in answer)
    assert answer is None or isinstance(answer, int | str), type(answer)
    return answer


class TestClientBehindJson(Jobs):
    def make_client(self) -> Client:
        return JsonClient(LocalClient())
