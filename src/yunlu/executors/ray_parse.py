"""Parse Ray's nodes and placement groups into values. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from yunlu.core.value import Value
from yunlu.executors.executor import SPOT, ExecutorError, LeaseState, Reserve
from yunlu.executors.lease_executor import ObservedLeases
from yunlu.executors.ray_watchdog import RAYLET_GONE
from yunlu.hardware.fleet import Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from yunlu.executors.lease_executor import LeaseRecord

OURS = "yunlu"
"""Namespace of our actors, and prefix of every name."""
GPU, CPU = "GPU", "CPU"
_ACCELERATOR = "accelerator_type:"
_TYPE_LABEL, _MARKET_LABEL = "ray.io/accelerator-type", "ray.io/market-type"
_SPOT_MARKET = "spot"
_ZONE_LABEL, NODE_LABEL = "ray.io/availability-zone", "ray.io/node-id"


class RayNode(Value):
    """A node that is alive."""

    id: str
    name: str
    resources: dict[str, float]
    available: dict[str, float] | None = None
    """Free resources; None where the cluster does not report them."""
    labels: dict[str, str] = Field(default_factory=dict)
    is_draining: bool = False


class PlacementGroupInfo(Value):
    """A placement group of ours."""

    name: str
    state: str
    node: str = ""
    """The id of the node where it is."""
    resources: dict[str, float] = Field(default_factory=dict)


class ClusterSurvey(Value):
    """The cluster at one moment."""

    nodes: tuple[RayNode, ...] = ()
    groups: tuple[PlacementGroupInfo, ...] = ()
    actors: frozenset[str] = frozenset()
    """Names of our actors that are alive or starting."""
    errors: dict[str, str] = Field(default_factory=dict)
    """By name: why an actor could not start."""


def lease_name(run: str, lease: str) -> str:
    """Name of a lease in the cluster."""
    return f"{OURS}/{run}/{lease}"


def name_nodes(survey: ClusterSurvey) -> dict[str, str]:
    """A unique name for every node, by its id: several raylets may share a machine."""
    count = Counter(node.name for node in survey.nodes)
    return {
        node.id: node.name if count[node.name] == 1 else f"{node.name}-{node.id[:6]}"
        for node in survey.nodes
    }


def resource_of(resources: Mapping[str, float], wanted: str = "auto") -> str:
    """Resource that counts as a device: GPU if the node has any, else CPU."""
    if wanted != "auto":
        return wanted.upper()
    return GPU if resources.get(GPU, 0) >= 1 else CPU


def read_nodes(survey: ClusterSurvey, *, device: str = "auto") -> tuple[Node, ...]:
    """Nodes, each with the devices that no other program holds."""
    names = name_nodes(survey)
    result = [
        Node(
            name=names[node.id],
            devices=_devices_for_us(survey, node, resource_of(node.resources, device)),
            type=_type_of(node.resources, node.labels, device),
            domain=node.labels.get(_ZONE_LABEL, ""),
            is_spot=_is_spot(node),
            is_leaving=node.is_draining,
        )
        for node in survey.nodes
        if node.resources.get(resource_of(node.resources, device), 0) >= 1
    ]
    return tuple(sorted(result, key=lambda node: node.name))


def read_growth(text: str) -> tuple[Reserve, ...]:
    """Nodes that the autoscaler may start, from an address: ``A100:8x4,cpu:16x2``.

    That is up to 4 nodes of 8 A100, and up to 2 nodes of 16 processors, those that are always there
    included; ``A100-spot:8x4`` are nodes with the label of spot machines. Ray itself tells nobody.
    """
    matches: list[Reserve] = []
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"(.+):([1-9]\d*)x([1-9]\d*)", word)
        if match is None:
            raise ExecutorError(
                f"grow={word} does not say what the autoscaler may start",
                hint="write TYPE:DEVICESxNODES, such as A100:8x4 or cpu:16x2",
            )
        kind, devices, most = match.groups()
        type_ = kind.removesuffix(SPOT)
        matches.append(
            Reserve(
                type=type_,
                devices=int(devices),
                awake=0,
                most=int(most),
                is_spot=type_ != kind,
            )
        )
    return tuple(matches)


def count_awake(survey: ClusterSurvey, growth: Iterable[Reserve]) -> tuple[Reserve, ...]:
    """Nodes that may be started, with the number that are up."""
    names = name_nodes(survey)
    matches: list[Reserve] = []
    for kind in growth:
        awake = tuple(names[node.id] for node in survey.nodes if _is_of(node, kind))
        matches.append(replace(kind, awake=len(awake), nodes=awake))
    return tuple(matches)


def size_bundles(growth: Iterable[Reserve], wanted: Mapping[str, int]) -> list[dict[str, float]]:
    """Resources to request from the autoscaler for so many nodes of each type."""
    return [_shape(kind) for kind in _wanted(growth, wanted)]


def size_selectors(growth: Iterable[Reserve], wanted: Mapping[str, int]) -> list[dict[str, str]]:
    """Label selectors of these bundles; None where any market will do."""
    growth = [*growth]
    if not any(kind.is_spot for kind in growth):
        return []
    markets = {True: {_MARKET_LABEL: _SPOT_MARKET}, False: {_MARKET_LABEL: f"!{_SPOT_MARKET}"}}
    return [markets[kind.is_spot] for kind in _wanted(growth, wanted)]


def read_leases(
    survey: ClusterSurvey, *, run: str, record: LeaseRecord, ended: Mapping[str, str]
) -> dict[str, ObservedLeases]:
    """Every lease of a run that the cluster knows, by name.

    Args:
        survey: The cluster now.
        run: The run's id.
        record: What the run's own record says.
        ended: By name, why a lease is over, as it said itself: the cluster notices later.
    """
    names = name_nodes(survey)
    beginning = lease_name(run, "")
    result: dict[str, ObservedLeases] = {}
    for group in survey.groups:
        if group.name.startswith(beginning):
            lease = group.name.removeprefix(beginning)
            requested = record.find(lease)
            state, reason = _state_of(group, survey, names, requested.node if requested else "")
            if lease in ended:
                state, reason = LeaseState.GONE, ended[lease]
            node = names.get(group.node, requested.node if requested else "")
            is_lost = reason == RAYLET_GONE or node not in names.values()
            result[lease] = ObservedLeases(
                handle=group.name,
                state=state,
                reason=reason,
                node=node,
                has_lost_node=is_lost and state is LeaseState.GONE,
            )
    for lease in record.leases:
        name = lease_name(run, lease.name)
        reason = ended.get(lease.name) or survey.errors.get(name)
        if reason and lease.name not in result:  # its devices are released already
            result[lease.name] = ObservedLeases(
                handle=name,
                state=LeaseState.GONE,
                reason=reason,
                node=lease.node,
                has_lost_node=reason == RAYLET_GONE,
            )
    return result


def _state_of(
    group: PlacementGroupInfo, survey: ClusterSurvey, names: Mapping[str, str], wanted: str
) -> tuple[LeaseState, str]:
    if group.name not in survey.actors:
        gone = bool(group.node) and group.node not in names
        text = f"Ray has given up node {wanted}" if gone else "its actor has ended"
        return LeaseState.GONE, survey.errors.get(group.name, text)
    if group.state == "CREATED":
        return LeaseState.RUNNING, ""
    if wanted and wanted not in names.values():
        return LeaseState.GONE, f"there is no node {wanted} any more"
    return LeaseState.WAITING, f"the devices on {wanted} are not free yet"


def _devices_for_us(survey: ClusterSurvey, node: RayNode, resource: str) -> int:
    total = node.resources.get(resource, 0)
    if node.available is None:
        return int(total)
    ours = sum(group.resources.get(resource, 0) for group in survey.groups if group.node == node.id)
    return int(min(total, node.available.get(resource, 0) + ours))


def _wanted(growth: Iterable[Reserve], wanted: Mapping[str, int]) -> list[Reserve]:
    return [kind for kind in growth for _ in range(min(wanted.get(kind.kind, 0), kind.most))]


def _is_spot(node: RayNode) -> bool:
    return node.labels.get(_MARKET_LABEL) == _SPOT_MARKET


def _is_of(node: RayNode, kind: Reserve) -> bool:
    if _is_spot(node) != kind.is_spot:
        return False
    device = "cpu" if kind.type == "cpu" else "gpu"
    has = node.resources.get(resource_of(node.resources, device), 0)
    return has == kind.devices and _type_of(node.resources, node.labels, device) == kind.type


def _shape(kind: Reserve) -> dict[str, float]:
    if kind.type == "cpu":
        return {CPU: kind.devices}
    named = {} if kind.type == "gpu" else {f"{_ACCELERATOR}{kind.type}": 0.001}
    return {GPU: kind.devices, **named}


def _type_of(resources: Mapping[str, float], labels: Mapping[str, str], device: str) -> str:
    if resource_of(resources, device) == CPU:
        return "cpu"
    named = [key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR)]
    return labels.get(_TYPE_LABEL) or (named[0] if named else "gpu")
