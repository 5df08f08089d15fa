"""Workers that do something together, as threads of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tests.unit.training.communication.connected import in_threads, make_wires

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.training.communication.transport import Transport

Found = TypeVar("Found")


def run_workers(function: Callable[[Transport], Found], size: int) -> list[Found]:
    """``function(wire)`` in a thread for each worker; what each returned."""
    transports = make_wires(["127.0.0.1"] * size)

    def work(rank: int) -> Found:
        try:
            return function(transports[rank])
        finally:
            transports[rank].close()  # at once: where one has failed, the others are not to wait

    return in_threads(work, size)
