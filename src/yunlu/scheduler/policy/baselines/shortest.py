"""Shortest first: whoever has least left to do at the size it asks for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from yunlu.scheduler.policy.baselines.packing import (
    device_types,
    nodes_by_devices,
    serve,
    usable_types,
)

if TYPE_CHECKING:
    from yunlu.scheduler.policy.values import Decision, Demand, PoolState


class Shortest:
    """Shortest remaining time first, with interruption; without lengths, least served first."""

    name = "shortest"

    def decide(self, state: PoolState) -> Decision:
        """Run jobs in the order of what is left of them, as many as fit."""
        left = {job.id: seconds_left(state, job) for job in state.jobs}

        def rank(job: Demand) -> tuple[bool, int, float, float]:
            stays = bool(job.held) and (job.is_pinned or not job.is_preemptible)
            return (not stays, -job.priority, left[job.id], job.served_device_s)

        order = sorted(state.jobs, key=rank)
        return serve(state, order)


def seconds_left(state: PoolState, job: Demand) -> float:
    """Until its end with the devices it asks for; infinite where nobody knows."""
    if job.remaining is None:
        return math.inf
    devices = job.held.devices or job.asked_devices
    best = 0.0
    for kind in usable_types(job, device_types(state)):
        nodes = nodes_by_devices(state, kind)
        if devices >= len(nodes):
            continue
        rate = job.speed.goodput(kind, np.array([nodes[devices]]), np.array([devices]))
        best = max(best, float(rate[0]))
    return job.remaining / best if best > 0 else math.inf
