"""Main module of one server: ``python -m yunlu.training.communication.servers.shard DIRECTORY INDEX``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

import torch

from yunlu.core.addresses import bind_address
from yunlu.core.private_process import make_process_private
from yunlu.training.communication.servers.server import ShardServer
from yunlu.training.communication.servers.store import Shard, shard_directory


def serve(directory: Path, index: int, host: str, *, with_parent: bool = False) -> None:
    """Serve one shard of a directory made by ``prepare``, until SIGTERM or SIGINT.

    Args:
        directory: Of all servers.
        index: Index of this server.
        host: Address to listen on.
        with_parent: End with the parent process.
    """
    parent = os.getppid()
    server = ShardServer(
        Shard(shard_directory(directory, index)),
        host,
        is_needed=lambda: not with_parent or os.getppid() == parent,
    )

    def end(*_: object) -> None:
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    server.run()


def main() -> int:
    """Parse arguments and serve."""
    parser = argparse.ArgumentParser(description="Serve a part of a model's weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("index", type=int)
    parser.add_argument("--host", default=bind_address())
    parser.add_argument("--with-parent", action="store_true")
    given = parser.parse_args()
    make_process_private()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)  # it shares a machine with workers; updates are bound by memory
    serve(given.directory, given.index, given.host, with_parent=given.with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
