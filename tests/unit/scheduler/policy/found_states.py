"""Pool states on which a random search once found a fault; each stays an explicit example."""

from __future__ import annotations

from tests.unit.scheduler.policy.states import PowerSpeed, on
from yunlu.hardware.fleet import Node
from yunlu.scheduler.policy.values import Demand, PoolState


def _job(name: str, speed: PowerSpeed, **given: object) -> Demand:
    plain: dict[str, object] = {"submitted_at": 0.0, "is_preemptible": False, "max_devices": 1}
    return Demand(id=name, speed=speed, **(plain | given))  # pyright: ignore[reportArgumentType]


_EVEN = PowerSpeed(1.5668895507502354, 0.7103598472695686)
_NEWER = PowerSpeed(4.476875593853875, 0.22418659542348157)
_SLOW = PowerSpeed(0.1, 0.1)

TWINS_ONE_ON_A_LEAVING_NODE = PoolState(
    now=10_000.0,
    nodes=(
        Node(name="n0", devices=1, is_leaving=True),
        Node(name="n1", devices=1),
        Node(name="n2", devices=4),
    ),
    jobs=(
        _job("j0", _EVEN, done=43633.68074647559, max_devices=2, held=on(("n0", 1)),
             held_since=0.0, is_preemptible=True),
        _job("j1", PowerSpeed(4.140955942312486, 0.7701156525694907)),
        _job("j2", PowerSpeed(4.30933187640449, 0.1664885038348418), held=on(("n1", 1)),
             held_since=0.0, is_preemptible=True),
        _job("j3", _NEWER, submitted_at=9672.94307760807),
        _job("j4", _NEWER, submitted_at=9672.94307760807),
        _job("j5", PowerSpeed(7.785951248302606, 0.7864969803507201), min_devices=2, max_devices=2),
        _job("j6", _EVEN, done=43633.68074647559, held=on(("n2", 1)), held_since=0.0,
             is_preemptible=True),
        _job("j7", _SLOW),
        _job("j8", _SLOW, min_devices=2, max_devices=2),
    ),
)  # fmt: skip
"""Two jobs of equal speed and progress compete for one device: the one that lost was then taken back."""
