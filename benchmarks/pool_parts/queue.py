"""The queue of the live proof: small jobs of a few kinds, some of them long, that come one by one."""

from __future__ import annotations

from dataclasses import dataclass

from yunlu.spec.job import Job

BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Jobs that are alike."""

    name: str
    hidden: tuple[int, ...]
    steps: int
    asked: int
    """Devices where sizes are fixed."""
    least: int = 1
    most: int = 4


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="short", hidden=(1024, 1024), steps=60, asked=1),
        Kind(name="middle", hidden=(1024, 1024), steps=180, asked=2),
        Kind(name="wide", hidden=(2048, 1024), steps=90, asked=4),
        Kind(name="long", hidden=(1536, 1024), steps=240, asked=2),
    )
}
QUEUE = (
    *("long", "short", "middle", "short", "wide", "middle"),
    *("short", "long", "middle", "short", "wide", "middle"),
)
EVERY_S = 10.0
"""A job comes this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One job of the queue."""

    name: str
    at_s: float
    kind: Kind


def make_queue(*, every_s: float = EVERY_S, scale: float = 1.0) -> list[Arrival]:
    """All jobs, in the order in which they come; ``scale`` makes them longer or shorter."""
    queue: list[Arrival] = []
    for number, name in enumerate(QUEUE):
        kind = KINDS[name]
        steps = max(10, round(kind.steps * scale))
        sized = Kind(name=name, hidden=kind.hidden, steps=steps, asked=kind.asked,
                     least=kind.least, most=kind.most)  # fmt: skip
        queue.append(Arrival(name=f"{name}-{number}", at_s=number * every_s, kind=sized))
    return queue


def make_job(arrival: Arrival) -> Job:
    """What is submitted: elastic between its bounds, and of a fixed size for who wants that."""
    kind = arrival.kind
    return Job.model_validate(
        {
            "name": arrival.name,
            "task": "tabular-classification",
            "model": {"name": "mlp", "args": {"hidden": list(kind.hidden)}},
            "data": {"train": "sklearn:digits"},
            "train": {
                "steps": kind.steps,
                "batch": BATCH,
                "micro_batch": BATCH // 4,
                "precision": "fp32",
                "evaluate": "never",
                "checkpoint": {"every": 10_000, "keep_best": 0},
            },
            "devices": kind.asked,
            "spares": 0,
        }
    )
