"""Where the public workloads lie, and what others published about them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from yunlu.lab.simulation.profiles import Profiles, Workload, load_profiles, load_workload

DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "evidence" / "sched"
WORKLOADS = (1, 2, 4, 6, 8)
TUNED_ON = 6
"""The one workload that our settings were chosen on; the others were held out."""
CLUSTER = "16x4"


@lru_cache(maxsize=2)
def read_profiles(folder: Path) -> Profiles:
    """Of the applications in Pollux's workloads."""
    return load_profiles(folder / "pollux" / "profiles")


def read_workload(folder: Path, number: int, load: float = 1.0) -> Workload:
    """One of Pollux's, at a load."""
    where = "workloads" if load == 1.0 else f"workloads-{load}"
    return load_workload(folder / "pollux" / where / f"workload-{number}.csv")


def read_published(folder: Path, policy: str, number: int, load: float = 1.0) -> dict[str, float]:
    """Completion time of each job, as the authors of Pollux published it."""
    path = folder / "pollux" / "published" / f"results-jobload-{policy}-{load}.json"
    found = json.loads(path.read_text(encoding="utf-8"))["jcts"][f"workload-{number}"]
    return {str(name): float(jct_s) for name, jct_s in found.items()}
