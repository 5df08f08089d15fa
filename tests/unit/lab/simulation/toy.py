"""Applications small enough to know what must come out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from yunlu.lab.simulation.profiles import Profiles, Submission, Workload, load_profiles

BASE = 32
EPOCHS = 6
EPOCH_STEPS = 500.0


def step_s(nodes: int, devices: int, local: int) -> tuple[float, float]:
    """A step of the toy and its exchange: linear, so that interpolation is exact."""
    sync_s = 0.0 if devices == 1 else 0.01 * devices + 0.02 * nodes
    return 0.02 + 0.005 * local + sync_s, sync_s


def write_application(directory: Path, *, seconds: float = 1.0, nodes: int = 4) -> Path:
    """Measurements of the toy on nodes of four devices, slower by a factor."""
    directory.mkdir(parents=True)
    rows = ["placement,local_bsz,step_time,sync_time"]
    shapes = [(count,) for count in range(1, 5)]
    shapes += [shape for shape in itertools.product(range(1, 5), repeat=2) if shape[0] <= shape[1]]
    for shape in shapes:
        for local in (4, 16, 64):
            step, sync = step_s(len(shape), sum(shape), local)
            text = "".join(map(str, shape))
            rows.append(f"{text},{local},{step * seconds!r},{sync * seconds!r}")
    (directory / "placements.csv").write_text("\n".join(rows) + "\n")
    rows = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    for count in range(3, nodes + 1):
        for devices, local in itertools.product((count, 4 * count), (4, 16, 64)):
            step, sync = step_s(count, devices, local)
            rows.append(f"{count},{devices},{local},{step * seconds!r},{sync * seconds!r}")
    (directory / "scalability.csv").write_text("\n".join(rows) + "\n")
    for batch in (BASE, 64, 128, 256):
        rows = ["progress,iteration,metric,grad_sqr,grad_var"]
        for epoch in range(1, EPOCHS + 1):
            # A larger batch comes a little further in an epoch: the least counts.
            progress = EPOCH_STEPS * epoch + 0.01 * (batch - BASE)
            rows.append(
                f"{progress!r},{EPOCH_STEPS * epoch * BASE / batch!r},0.5,1.0,{4.0 * epoch}"
            )
        (directory / f"validation-{batch}.csv").write_text("\n".join(rows) + "\n")
    return directory


def make_profiles(directory: Path) -> Profiles:
    """Two applications: a light and a heavy one."""
    write_application(directory / "light")
    write_application(directory / "heavy", seconds=5.0)
    return load_profiles(directory)


def make_workload(jobs: Sequence[tuple[float, str, int, int]], name: str = "toy") -> Workload:
    """Jobs as (submitted at, application, devices, batch)."""
    return Workload(
        name,
        tuple(
            Submission(
                name=f"{application}-{place}",
                submitted_at=at,
                application=application,
                asked_devices=devices,
                asked_batch=batch,
            )
            for place, (at, application, devices, batch) in enumerate(jobs)
        ),
    )
