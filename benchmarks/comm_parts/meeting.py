"""How the workers of a run find each other: words of their command line, a store, a group on gloo."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_WITHIN = timedelta(seconds=300)


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """What every worker is told."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True, help="address:port of the first worker")
    parser.add_argument("--address", required=True, help="of this worker's host")
    parser.add_argument("--directory", type=Path, required=True, help="for what it writes down")
    return parser


def meet(asked: argparse.Namespace) -> Any:
    """A store for methods; torch's default group is there afterwards."""
    torch.set_num_threads(1)
    host, port = asked.store.split(":")
    store = TCPStore(host, int(port), asked.size, asked.rank == 0, timeout=_WITHIN)
    dist.init_process_group(
        "gloo", store=PrefixStore("torch", store), rank=asked.rank, world_size=asked.size,
        timeout=_WITHIN,
    )  # fmt: skip
    return PrefixStore("method", store)
