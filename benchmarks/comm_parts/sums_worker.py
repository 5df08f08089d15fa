"""One worker on one host that adds up tensors with its peers in every way, in turn.

Each figure is the time of several sums on end, divided by their number: between two there is no pause
in which messages of the one before could still be on their way, unpaid.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.comm_parts.meeting import make_parser, meet
from yunlu.training.communication.allreduce import ALGORITHMS
from yunlu.training.communication.transport import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_REPEATED_BYTES = 1 << 16
"""Smaller ones are done many times."""


def main() -> None:
    """Meet, check that all ways give the sum, measure them in turn."""
    parser = make_parser(__doc__)
    parser.add_argument("--ways", required=True, help="by name, with commas between")
    parser.add_argument("--bytes", required=True, help="sizes, with commas between")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument(
        "--slow", action="store_true", help="as the engine does where links are slow"
    )
    asked = parser.parse_args()
    transport = connect(meet(asked), asked.rank, asked.size, asked.address, secret=b"benchmark")
    if asked.slow:
        transport.control_congestion("reno")
    ways = {name: _make_way(name, transport) for name in asked.ways.split(",")}
    for add in ways.values():
        _check(add, asked.rank, asked.size)
    records: list[dict[str, Any]] = []
    for number in range(asked.rounds):
        for size in map(int, asked.bytes.split(",")):
            for name, add in ways.items():
                took_s = _measure(add, torch.zeros(size // 4), 10 if size < _REPEATED_BYTES else 2)
                records.append({"way": name, "bytes": size, "round": number, "s": took_s})
    (asked.directory / f"worker-{asked.rank}.json").write_text(json.dumps(records))
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


def _make_way(name: str, transport: Any) -> Callable[[Tensor], object]:
    if name == "gloo":
        return dist.all_reduce
    add, tag = ALGORITHMS[name], 0

    def run(flat: Tensor) -> None:
        nonlocal tag
        tag += 1
        add(transport, flat, tag=tag)

    return run


def _check(add: Callable[[Tensor], object], rank: int, size: int) -> None:
    flat = torch.arange(1000, dtype=torch.float32) + rank
    wanted = size * torch.arange(1000, dtype=torch.float32) + sum(range(size))
    add(flat)
    if not torch.equal(flat, wanted):
        raise SystemExit("a sum is wrong")


def _measure(add: Callable[[Tensor], object], flat: Tensor, repeats: int) -> float:
    add(flat)  # all are there, and connections are warm
    began_at = time.perf_counter()
    for _ in range(repeats):
        add(flat)
    return (time.perf_counter() - began_at) / repeats


if __name__ == "__main__":
    main()
