"""Ray executor: each lease is an actor in its own placement group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yunlu import __version__
from yunlu.core.settings import worker_environment
from yunlu.executors.executor import Capabilities, ExecutorError, Reserve
from yunlu.executors.lease_executor import LeasedExecutor, ObservedLeases, read_lease_events
from yunlu.executors.ray_link import find_link
from yunlu.executors.ray_parse import (
    ClusterSurvey,
    count_awake,
    lease_name,
    name_nodes,
    read_growth,
    read_leases,
    read_nodes,
    resource_of,
    size_bundles,
    size_selectors,
)
from yunlu.executors.registry import read_address
from yunlu.runs.run_store import WORKER_LOG, Area

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from yunlu.executors.lease_executor import Lease, LeaseRecord
    from yunlu.hardware.fleet import Node
    from yunlu.runs.run_store import RunStore

_SENT_ALONG = ("YUNLU_", "OMP_NUM_THREADS", "GLOO_", "NCCL_")


class RayExecutor(LeasedExecutor):
    """``ray://HOST:10001`` (from anywhere), ``ray`` or ``ray?head=HOST:6379`` (on a node of it).

    Options: ``device`` (gpu, cpu; without a word GPUs where a node has any), ``env`` (names of
    variables that are sent along to the nodes) and ``grow``, what its autoscaler can start.
    """

    name = "ray"

    def __init__(self, address: str = "ray") -> None:
        index, options = read_address(address, ("head", "device", "env", "grow"))
        self.address = address
        self._device = options.get("device", "auto")
        if self._device not in {"auto", "cpu", "gpu"}:
            raise ExecutorError(f"{address}: device is {self._device!r}, neither cpu nor gpu")
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
            limits="GPUs by CUDA_VISIBLE_DEVICES; processors by count only",
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
            if name in self._sent or name.startswith(_SENT_ALONG)
        }
