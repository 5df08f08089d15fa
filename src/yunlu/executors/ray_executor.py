"""Ray executor: each lease is an actor in its own placement group, seen through a bridge process."""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from pydantic import Field

from yunlu import __version__
from yunlu.core.errors import missing_part
from yunlu.core.limits import decode_json
from yunlu.core.processes import start_process, stop_process
from yunlu.core.settings import ray_authentication, worker_environment
from yunlu.core.value import Value
from yunlu.executors.executor import SPOT, Capabilities, ExecutorError, LeaseState, Reserve
from yunlu.executors.lease_executor import LeasedExecutor, ObservedLeases, read_lease_events
from yunlu.executors.ray_watchdog import RAYLET_GONE
from yunlu.executors.registry import read_address
from yunlu.hardware.accelerators import RESOURCES, is_shared_variable
from yunlu.hardware.fleet import Node
from yunlu.runs.run_store import WORKER_LOG, Area

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from yunlu.executors.lease_executor import Lease, LeaseRecord
    from yunlu.runs.run_store import RunStore

_SENT_ALONG = ("YUNLU_", "OMP_NUM_THREADS", "GLOO_")


class RayExecutor(LeasedExecutor):
    """``ray://HOST:10001`` (from anywhere), ``ray`` or ``ray?head=HOST:6379`` (on a node of it).

    Options: ``device`` (gpu, npu, cpu; without a word accelerators where a node has any), ``env`` (names of
    variables that are sent along to the nodes) and ``grow``, what its autoscaler can start.
    """

    name = "ray"

    def __init__(self, address: str = "ray") -> None:
        index, options = read_address(address, ("head", "device", "env", "grow"))
        self.address = address
        self._device = options.get("device", "auto")
        if self._device not in {"auto", "cpu", *RESOURCES}:
            known = " nor ".join(("cpu", *RESOURCES))
            raise ExecutorError(f"{address}: device is {self._device!r}, neither {known}")
        self._sent = tuple(name for name in options.get("env", "").split(",") if name)
        self._link = find_link(f"ray://{index}" if index else options.get("head", "auto"))
        self._growth = read_growth(options.get("grow", ""))
        self._wanted_nodes: dict[str, int] = {}

    def close(self) -> None:
        """Disconnect; what runs on the cluster continues."""
        self._link.close()

    def capabilities(self) -> Capabilities:
        """As ``Executor.capabilities``."""
        return Capabilities(
            queues=True,
            scales=True,
            limits="GPUs by their visibility; processors by count only",
        )

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are alive, each with the devices that no other program holds."""
        return read_nodes(self.survey(), device=self._device)

    def reserves(self) -> tuple[Reserve, ...]:
        """Nodes that the autoscaler can start, according to the address."""
        return count_awake(self.survey(), self._growth)

    def scale(self, kind: str, nodes: int) -> None:
        """Make the autoscaler keep so many nodes of a type; nodes in use are kept in any case."""
        if kind not in {item.kind for item in self._growth}:
            raise ExecutorError(
                f"{self.address} does not say that nodes of {kind} can be started",
                hint=f"add it to the address: grow={kind}:DEVICESxNODES",
            )
        self._wanted_nodes[kind] = nodes
        self._link.call(
            "request",
            bundles=size_bundles(self._growth, self._wanted_nodes),
            selectors=size_selectors(self._growth, self._wanted_nodes),
        )

    def submit(self, run: RunStore, lease: Lease, *, directory: Path, lead: str | None) -> str:
        """As ``LeasedExecutor.submit``."""
        from yunlu.executors.ray_actor import LeaseOrder  # noqa: PLC0415

        del lead  # joining leases wait for it themselves
        survey = self.survey()
        ids = {name: node for node, name in name_nodes(survey).items()}
        node = next(
            (one_node for one_node in survey.nodes if one_node.id == ids.get(lease.node)), None
        )
        if node is None:
            raise ExecutorError(
                f"{self.address} has no node {lease.node}",
                hint=f"there are {', '.join(sorted(ids)) or 'none'}",
            )
        log = WORKER_LOG if lease.is_lead else f"{Area.LOGS}/lease-{lease.name}.log"
        order = LeaseOrder(
            run=run.address,
            lease=lease.name,
            log=run.location(log),
            directory=str(directory),
            environment=self._environment(),
            version=__version__,
        )
        name = lease_name(run.id, lease.name)
        resources = {resource_of(node.resources, self._device): lease.devices}
        self._link.call(
            "submit", name=name, node=node.id, resources=resources, order=order.model_dump_json()
        )
        return name

    def observe_leases(self, run: RunStore, record: LeaseRecord) -> dict[str, ObservedLeases]:
        """As ``LeasedExecutor.observe``."""
        ended = {
            result.lease: result.reason
            for result, _ in read_lease_events(run)
            if result.what == "ended"
        }
        return read_leases(self.survey(), run=run.id, record=record, ended=ended)

    def cancel(self, handles: Sequence[str]) -> None:
        """As ``LeasedExecutor.cancel``."""
        self._link.call("end", names=list(handles))

    def notify(self, handles: Sequence[str]) -> None:
        """As ``LeasedExecutor.notify``."""
        self._link.call("leave", names=list(handles))

    def survey(self) -> ClusterSurvey:
        """Current state of the cluster."""
        return ClusterSurvey.model_validate(self._link.call("survey"))

    def _environment(self) -> dict[str, str]:
        return {
            name: value
            for name, value in worker_environment().items()
            if name in self._sent or name.startswith(_SENT_ALONG) or is_shared_variable(name)
        }


_BRIDGE = (sys.executable, "-m", "yunlu.executors.ray_bridge")
_KNOCK_S, _CONNECT_S, _ANSWER_S = 10.0, 120.0, 60.0
_LEAVE_S = 5.0
_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


_links: dict[str, RayLink] = {}
"""One per cluster: connecting takes seconds, and executors are opened for every query."""


def find_link(address: str) -> RayLink:
    """The link of this process to a cluster; errors appear at the first call."""
    return _links.setdefault(address, RayLink(address))


class RayLink:
    """One connection at a time; reconnects when it is lost."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._bridge: _Bridge | None = None

    def call(self, name: str, /, **arguments: Any) -> Any:
        """Send a request; ``ExecutorError`` with the cluster's message where it refuses or is absent."""
        with self._lock:
            if self._bridge is None or not self._bridge.is_alive():
                self._hang_up()
                self._bridge = self._connect()
            try:
                return self._bridge.ask({"call": name, "with": arguments}, _ANSWER_S)
            except _SilentError as error:
                text = self._bridge.last_words()
                self._hang_up()
                raise ExecutorError(
                    f"the Ray cluster at {self.address} {error}{text}",
                    hint="what runs there continues; try again in a moment",
                ) from error

    def close(self) -> None:
        """Disconnect; what runs on the cluster continues."""
        with self._lock:
            self._hang_up()

    def _connect(self) -> _Bridge:
        if find_spec("ray") is None:
            raise missing_part("ray", "ray", f"Running on the Ray cluster {self.address}")
        self._knock()
        bridge = _Bridge(self.address)
        try:
            bridge.read(_CONNECT_S)
        except (_SilentError, ExecutorError) as error:
            given = f"it {error}{bridge.last_words()}" if isinstance(error, _SilentError) else error
            bridge.end()
            if isinstance(error, _TokenError):
                raise self._no_token(str(given)) from error
            raise self._no_connection(str(given)) from error
        return bridge

    def _knock(self) -> None:
        """Check the port first: Ray itself retries for minutes."""
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not port.isdigit():  # "auto": Ray finds it on this machine
            return
        try:
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
        except OSError as error:
            raise self._no_connection(str(error)) from error

    def _no_connection(self, cause: str) -> ExecutorError:
        return ExecutorError(
            f"there is no connection to the Ray cluster at {self.address}: {cause}",
            hint="ray status, run there, says whether it is up",
        )

    def _no_token(self, message: str) -> ExecutorError:
        return ExecutorError(
            f"the Ray cluster at {self.address} wants a token and did not get the right one: {message}",
            hint="`ray get-auth-token`, run on its head node, prints it; set RAY_AUTH_TOKEN to it here "
            "(or RAY_AUTH_TOKEN_PATH to a file with it, or RAY_AUTH_MODE=token to use ~/.ray/auth_token)",
        )

    def _hang_up(self) -> None:
        if self._bridge is not None:
            self._bridge.end()
            self._bridge = None


class _TokenError(ExecutorError):
    """The cluster refused the token, or got none."""


class _SilentError(Exception):
    """No answer came."""


class _Bridge:
    def __init__(self, address: str) -> None:
        self._noise: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = start_process(
            [*_BRIDGE, address],
            is_piped=True,
            errors=self._noise,
            directory="/",  # Ray lets workers import modules from the directory where a driver was started
            environment=worker_environment() | _QUIET | ray_authentication(),
            own_session=True,
        )
        self._pending = b""
        self.end = weakref.finalize(self, _end, self._process, self._noise)
        """Finalizer that ends the process, at the latest with this program."""

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], span_s: float) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise _SilentError("was lost") from error
        return self.read(span_s)

    def read(self, span_s: float) -> Any:
        """One answer."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + span_s
        while b"\n" not in self._pending:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise _SilentError(f"has not answered for {span_s:.0f} s")
            data = self._process.stdout.read1(1 << 16)  # pyright: ignore[reportAttributeAccessIssue] (a buffered reader)
            if not data:
                raise _SilentError("was lost")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        answer = decode_json(line)
        if answer.get("wants_token"):
            raise _TokenError(f"Ray: {answer['error']}")
        if "error" in answer:
            raise ExecutorError(f"Ray: {answer['error']}")
        return answer["answer"]

    def last_words(self) -> str:
        """End of Ray's output, for error messages."""
        self._noise.seek(0)
        lines = self._noise.read()[-4000:].decode(errors="replace").strip().splitlines()
        return f"; its last words: {lines[-1]}" if lines else ""


def _end(process: subprocess.Popen[bytes], noise: IO[bytes]) -> None:
    stop_process(process, grace_s=_LEAVE_S, number=0)  # it ends with its standard input
    noise.close()


OURS = "yunlu"
"""Namespace of our actors, and prefix of every name."""
CPU = "CPU"
_COUNTED = tuple(name.upper() for name in RESOURCES)
_ACCELERATOR = "accelerator_type:"
_ASCEND = "Ascend"
"""How Ray's names of NPUs begin."""
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
    """Resource that counts as a device: GPU or NPU if the node has any, else CPU."""
    if wanted != "auto":
        return wanted.upper()
    return next((name for name in _COUNTED if resources.get(name, 0) >= 1), CPU)


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
    device = "cpu" if kind.type == "cpu" else "auto"
    has = node.resources.get(resource_of(node.resources, device), 0)
    return has == kind.devices and _type_of(node.resources, node.labels, device) == kind.type


def _shape(kind: Reserve) -> dict[str, float]:
    if kind.type == "cpu":
        return {CPU: kind.devices}
    if kind.type in RESOURCES:
        return {kind.type.upper(): kind.devices}
    counted = _COUNTED[1] if kind.type.startswith(_ASCEND) else _COUNTED[0]
    return {counted: kind.devices, f"{_ACCELERATOR}{kind.type}": 0.001}


def _type_of(resources: Mapping[str, float], labels: Mapping[str, str], device: str) -> str:
    if resource_of(resources, device) == CPU:
        return "cpu"
    named = [key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR)]
    return labels.get(_TYPE_LABEL) or (
        named[0] if named else resource_of(resources, device).lower()
    )
