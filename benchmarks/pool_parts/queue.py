"""The queue of the live proof: small jobs of a few kinds, some of them long, that come one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from yunlu.spec.job import Job

BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Jobs that are alike."""

    name: str
    task: str
    model: str
    args: dict[str, list[int]]
    steps: int
    asked: int
    """Devices where sizes are fixed."""
    least: int = 1
    most: int = 4


def _convolutions(name: str, channels: tuple[int, int], *, steps: int, asked: int) -> Kind:
    args = {"channels": [*channels]}
    return Kind(
        name=name, task="image-classification", model="cnn", args=args, steps=steps, asked=asked
    )


KINDS = {
    kind.name: kind
    for kind in (
        # Much to compute and little to exchange: more devices help.
        _convolutions("short", (64, 128), steps=40, asked=1),
        _convolutions("middle", (64, 128), steps=120, asked=2),
        _convolutions("long", (64, 96), steps=300, asked=2),
        # The other way round: they hardly do, whatever the owner thinks.
        Kind(name="wide", task="tabular-classification", model="mlp",
             args={"hidden": [2048, 1024]}, steps=300, asked=4),
    )
}  # fmt: skip
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
        sized = replace(kind, steps=max(10, round(kind.steps * scale)))
        queue.append(Arrival(name=f"{name}-{number}", at_s=number * every_s, kind=sized))
    return queue


def make_job(arrival: Arrival) -> Job:
    """What is submitted: elastic between its bounds, and of a fixed size for who wants that."""
    kind = arrival.kind
    return Job.model_validate(
        {
            "name": arrival.name,
            "task": kind.task,
            "model": {"name": kind.model, "args": kind.args},
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
