"""A real IPython kernel: cells are run as a notebook runs them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jupyter_client.manager import start_new_kernel

from tests.waiting import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jupyter_client.blocking import BlockingKernelClient
    from jupyter_client.manager import KernelManager


@dataclass
class Cell:
    """What a cell produced."""

    out: str = ""
    err: str = ""
    displays: dict[str, dict[str, str]] = field(default_factory=dict)
    """Blocks by their id, as they stand at the end."""
    updates: list[dict[str, str]] = field(default_factory=list)
    """Every state of every block."""
    result: dict[str, str] = field(default_factory=dict)
    error: str = ""


class Kernel:
    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager, self._client = manager, client

    def run(self, code: str, *, watch: Callable[[Cell], bool] = lambda _: False) -> Cell:
        """Run a cell to its end; it is interrupted once, when ``watch`` says so."""
        cell, request, is_watched = Cell(), self._client.execute(code), True
        while True:
            message = self._client.get_iopub_msg(timeout=LIMIT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            if _take(cell, message["msg_type"], message["content"]):
                return cell
            if is_watched and watch(cell):
                is_watched = False
                self._manager.interrupt_kernel()


def _take(cell: Cell, kind: str, content: dict[str, Any]) -> bool:
    """Take in a message; true once the cell has ended."""
    if kind == "stream":
        name = "out" if content["name"] == "stdout" else "err"
        setattr(cell, name, getattr(cell, name) + content["text"])
    elif kind in {"display_data", "update_display_data"}:
        cell.updates.append(content["data"])
        cell.displays[content["transient"].get("display_id", "")] = content["data"]
    elif kind == "execute_result":
        cell.result = content["data"]
    elif kind == "error":
        cell.error = f"{content['ename']}: {content['evalue']}"
    return kind == "status" and content["execution_state"] == "idle"


@contextmanager
def kernel(directory: Path, **environment: str) -> Iterator[Kernel]:
    """A kernel that keeps its own files in a directory."""
    env = os.environ | {
        "IPYTHONDIR": str(directory / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(directory / "runtime"),
        **environment,
    }
    manager, client = start_new_kernel(
        kernel_name="python3", env=env, cwd=str(directory), startup_timeout=LIMIT_S
    )
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
