"""Bridge process connected to a Ray cluster, on behalf of an executor.

Ray ends the process of a driver when it loses the cluster, takes over its signals, and connects it
to one cluster for good. So the executor starts this program, asks it by lines of JSON, and starts it
again when it dies. What it has asked the cluster for is detached, and does not end with it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from typing import IO, Any

from yunlu.core.limits import decode_json
from yunlu.executors.ray_actor import LeaseActor
from yunlu.executors.ray_executor import NODE_LABEL, OURS

_LIVING = {"PENDING", "PREPARED", "CREATED", "RESCHEDULING"}
"""States of a placement group that holds devices, or will."""
_TOKEN_WORDS = re.compile(
    r"authentication token|UNAUTHENTICATED|AuthenticationError", re.IGNORECASE
)
_DESERTED_S = 10.0
"""Grace period: whoever creates a placement group starts an actor there at once."""


def main() -> int:
    """Answer requests until stdin is closed."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray's own output is no answer
    refusals = _collect_refusals()
    try:
        cluster = Cluster(sys.argv[1])
    except Exception as error:  # noqa: BLE001 (Ray raises all kinds; the executor tells the user)
        refused = find_refusal(error, refusals)
        _say(answers, error=refused or _words(error), wants_token=refused is not None)
        return 1
    _say(answers, answer="connected")
    for line in sys.stdin:
        requested = decode_json(line)
        try:
            result = getattr(cluster, requested["call"])(**requested["with"])
        except Exception as error:  # noqa: BLE001 (as above)
            traceback.print_exc()
            _say(answers, error=_words(error))
        else:
            _say(answers, answer=result)
    return 0


class Cluster:
    """Requests that the executor may send."""

    def __init__(self, address: str) -> None:
        self._ray: Any = import_module("ray")
        self._is_client = address.startswith("ray://")
        self._ray.init(
            address=address,
            namespace=OURS,
            log_to_driver=False,
            logging_level="ERROR",
        )
        remote = self._ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=4)
        self._actor: Any = remote(LeaseActor)
        self._begun: dict[str, Any] = {}
        self._errors: dict[str, str] = {}
        self._deserted: dict[str, float] = {}
        """Since when a placement group has no actor."""

    def survey(self) -> dict[str, Any]:
        """As ``ray_parse.ClusterSurvey``."""
        self._collect_start_errors()
        inside = self._read_cluster()
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        named = self._ray.util.list_named_actors(all_namespaces=True)
        actors = {item["name"] for item in named if item["namespace"] == OURS}
        groups = self._groups()
        self._reclaim({group["name"] for group in groups} - actors)
        return {
            "nodes": [
                {
                    "id": node["NodeID"],
                    "name": node.get("NodeName") or node["NodeManagerAddress"],
                    "resources": node["Resources"],
                    "available": inside["available"].get(node["NodeID"]),
                    "labels": node.get("Labels") or {},
                    "is_draining": node["NodeID"] in inside["draining"],
                }
                for node in nodes
            ],
            "groups": [_describe(group) for group in groups],
            "actors": sorted(actors),
            "errors": self._errors,
        }

    def submit(self, *, name: str, node: str, resources: dict[str, float], order: str) -> None:
        """Reserve devices on a node and start an actor there; waits for neither."""
        util = self._ray.util
        group = util.placement_group(
            [resources],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[{NODE_LABEL: node}],
        )
        strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0
        )
        actor = self._actor.options(
            name=name,
            namespace=OURS,
            lifetime="detached",
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources={
                name: count for name, count in resources.items() if name not in {"CPU", "GPU"}
            },
            scheduling_strategy=strategy,
        ).remote(order)
        self._begun[name] = actor.state.remote()

    def leave(self, *, names: list[str]) -> None:
        """Ask leases to leave."""
        for name in names:
            with suppress(ValueError):  # gone already
                self._ray.get_actor(name, namespace=OURS).leave.remote()

    def end(self, *, names: list[str]) -> None:
        """Kill leases and release their devices."""
        for name in names:
            with suppress(ValueError):  # gone already
                self._ray.kill(self._ray.get_actor(name, namespace=OURS), no_restart=True)
            with suppress(ValueError):
                group = self._ray.util.get_placement_group(name)
                self._ray.util.remove_placement_group(group)

    def request(self, *, bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> None:
        """Set the resources that the autoscaler is to provide, until the next request."""
        if not self._is_client:
            request_room(bundles, selectors)
        else:
            self._ray.get(self._ray.remote(num_cpus=0)(request_room).remote(bundles, selectors))

    def _reclaim(self, deserted: set[str]) -> None:
        """Release placement groups without an actor: it was killed, its node is lost, or it was never started."""
        now = time.monotonic()
        self._deserted = {name: self._deserted.get(name, now) for name in deserted}
        self.end(names=[name for name, at in self._deserted.items() if now - at > _DESERTED_S])

    def _groups(self) -> list[dict[str, Any]]:
        every = self._ray.util.placement_group_table()
        ours = (group for group in every.values() if group["name"].startswith(f"{OURS}/"))
        return [group for group in ours if group["state"] in _LIVING]

    def _read_cluster(self) -> dict[str, Any]:
        if not self._is_client:
            return read_cluster()
        return self._ray.get(self._ray.remote(num_cpus=0)(read_cluster).remote())

    def _collect_start_errors(self) -> None:
        """Whether the actors that we started could begin; the cluster tells only us."""
        if not self._begun:
            return
        done, _ = self._ray.wait(
            [*self._begun.values()], num_returns=len(self._begun), timeout=0, fetch_local=False
        )
        for name, begun in list(self._begun.items()):
            if begun in done:
                del self._begun[name]
                try:
                    self._ray.get(begun)
                except Exception as error:  # noqa: BLE001 (what a user's cluster says)
                    self._errors[name] = _words(error)


def read_cluster() -> dict[str, Any]:
    """State that only a process inside the cluster can read; otherwise nodes are taken as free."""
    state: Any = import_module("ray._private.state").state
    result: dict[str, Any] = {"available": {}, "draining": []}
    with suppress(AttributeError):  # not a public API of Ray
        result["available"] = state.available_resources_per_node()
    with suppress(AttributeError):
        result["draining"] = [*state.get_draining_nodes()]
    return result


def request_room(bundles: list[dict[str, float]], selectors: list[dict[str, str]]) -> None:
    """Ask the autoscaler, from inside the cluster."""
    more = {"bundle_label_selectors": selectors} if selectors else {}  # absent in older Ray
    import_module("ray.autoscaler.sdk").request_resources(bundles=bundles, **more)


def _describe(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": group["name"],
        "state": group["state"],
        "node": (group.get("bundles_to_node_id") or {}).get(0) or "",
        "resources": group["bundles"].get(0) or {},
    }


def find_refusal(error: BaseException, heard: list[str]) -> str | None:
    """What Ray says of a missing or wrong token: in the error, or on the way to it."""
    for text in (str(error), *heard):
        for line in text.splitlines():
            if _TOKEN_WORDS.search(line):
                return line.strip()
    return None


def _collect_refusals() -> list[str]:
    """Messages of Ray's client: it takes a refused token for a slow server, and reports a timeout."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger = logging.getLogger("ray.util.client.worker")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Listener())
    return heard


def _words(error: BaseException) -> str:
    """The last informative line: Ray wraps its errors in traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _say(answers: IO[str], **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
