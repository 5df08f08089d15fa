"""All ways to add up a tensor, over one rig at one rate."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.comm_parts.trial import PORT, wait_for
from benchmarks.faults_parts.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.netrig import Rig

WAYS = ("gloo", "ring", "tree", "double-tree", "doubling", "hierarchical", "direct", "server")
SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTime:
    """One way, one size, one round: the slowest worker's time."""

    hosts: int
    rate: str
    way: str
    bytes: int
    round: int
    s: float


def measure_sums(
    rig: Rig,
    *,
    rate: str,
    rounds: int,
    ways: Sequence[str] = WAYS,
    sizes: Sequence[int] = SIZES,
    per_host: int = 1,
    within_s: float = 1200.0,
) -> list[SumTime]:
    """Rounds of every size and way in turn, in the same processes."""
    place = Path(tempfile.mkdtemp(prefix="yunlu-sums-"))
    ranks = range(len(rig.hosts) * per_host)
    try:
        children: list[subprocess.Popen[bytes]] = []
        for rank in ranks:
            host = rank // per_host
            command = [
                sys.executable, "-m", "benchmarks.comm_parts.sums_worker",
                "--rank", str(rank), "--size", str(len(ranks)),
                "--store", f"{rig.address(0)}:{PORT}", "--address", rig.address(host),
                "--directory", str(place), "--rounds", str(rounds),
                "--ways", ",".join(ways), "--bytes", ",".join(map(str, sizes)),
                *["--slow"] * (rate != "none"),
            ]  # fmt: skip
            with (place / f"worker-{rank}.log").open("wb") as log:
                children.append(
                    rig.run(
                        host, command, environment={"OMP_NUM_THREADS": "1"}, cwd=ROOT,
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        wait_for(children, place, within_s)
        records = [json.loads((place / f"worker-{rank}.json").read_text()) for rank in ranks]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return [
        SumTime(
            hosts=len(rig.hosts), rate=rate, way=same[0]["way"], bytes=same[0]["bytes"],
            round=same[0]["round"], s=max(each["s"] for each in same),
        )
        for same in zip(*records, strict=True)
    ]  # fmt: skip
