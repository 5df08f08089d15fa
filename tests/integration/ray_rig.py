"""A real Ray cluster on this machine: a raylet and a loopback address for each of its nodes.

The cluster belongs to a process of its own (this file, run as a program), which is told what to do
by lines of JSON. Ray is never imported by the tests, and when they end, however they end, so does it.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
_ANSWER_S = 120.0
_STORE_BYTES = 80 << 20
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl
_SPARING = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_prestart_worker_first_driver": "false",
    "RAY_enable_worker_prestart": "false",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}


def why_no_ray() -> str | None:
    """Why no cluster can be made here."""
    return None if find_spec("ray") else "ray is not installed: pip install 'yunlu[ray]'"


class RayRig:
    """``with RayRig(2, 1) as rig``: nodes 127.0.0.2 and 127.0.0.3 with two processors and one."""

    def __init__(
        self, *devices: int, client: bool = False, grows: tuple[int, int] = (0, 0)
    ) -> None:
        """A node for each of ``devices``.

        Args:
            devices: Processors of each node.
            client: Whether it is to be reached as ``ray://``.
            grows: Processors and greatest number of nodes that an autoscaler may add.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="yrig")  # sockets have short names
        self._noise = Path(self._directory.name) / "noise.txt"
        with self._noise.open("wb") as noise:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.ray_rig"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                env=os.environ | _SPARING | {"RAY_TMPDIR": self._directory.name},
                cwd=ROOT,
                text=True,
                start_new_session=True,
            )
        self.raylets: dict[str, int] = {}
        """Their processes, by the names of the nodes."""
        try:
            self._port = _free_port() if client else None
            self.head: str = self._ask("head", client_port=self._port, grows=grows)
            for count in devices:
                self.add(count)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Of the executor."""
        return f"ray?head={self.head}" if self._port is None else f"ray://127.0.0.1:{self._port}"

    def add(self, devices: int) -> str:
        """One more node; its name."""
        name, raylet = self._ask("add", devices=devices)
        self.raylets[name] = raylet
        return name

    def kill(self, node: str) -> None:
        """A node's raylet is gone, without a word."""
        del self.raylets[node]
        self._ask("kill", node=node)

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to the cluster, what was started on it included."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def close(self) -> None:
        """End the cluster and everything on it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            left = self.processes()
            for process in [psutil.Process(self._process.pid), *left]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, call: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([call, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the rig is gone: {self._noise.read_text()[-3000:]}")
        return json.loads(answer)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


class _Keeper:
    """In the rig's own process: the cluster."""

    def __init__(self) -> None:
        self._utils: Any = import_module("ray.cluster_utils")
        self._cluster: Any = None
        self._nodes: dict[str, Any] = {}

    def head(self, client_port: int | None, grows: tuple[int, int]) -> str:
        arguments: dict[str, Any] = {
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
        }
        if client_port is not None:
            arguments["ray_client_server_port"] = client_port
        if any(grows):
            arguments |= _autoscale(*grows)
        self._cluster = self._utils.Cluster(initialize_head=True, head_node_args=arguments)
        return self._cluster.address

    def add(self, devices: int) -> tuple[str, int]:
        address = f"127.0.0.{len(self._nodes) + 2}"
        node = self._cluster.add_node(
            num_cpus=devices, node_ip_address=address, object_store_memory=_STORE_BYTES
        )
        self._nodes[address] = node
        return address, node.all_processes["raylet"][0].process.pid

    def kill(self, node: str) -> None:
        self._cluster.remove_node(self._nodes[node], allow_graceful=False)

    def end(self) -> None:
        me = psutil.Process()
        with suppress(Exception):
            self._cluster.shutdown()
        deadline = time.monotonic() + 60
        while (left := me.children(recursive=True)) and time.monotonic() < deadline:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.02)


def _autoscale(devices: int, most: int) -> dict[str, Any]:
    """Ray's own autoscaler, which starts raylets on this machine instead of buying machines."""
    port, services = _free_port(), import_module("ray._private.services")
    provider = {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "gcs_address": f"{services.get_node_ip_address()}:{port}",
    }
    small = {"CPU": devices, "object_store_memory": _STORE_BYTES}
    config = {
        "cluster_name": "rig",
        "max_workers": most,
        "idle_timeout_minutes": 0.02,
        "upscaling_speed": 10.0,
        "provider": provider
        | {"head_node_id": "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"},
        "available_node_types": {
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
            "small": {"resources": small, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
    }
    for name in ("initialization", "setup", "head_setup", "worker_setup"):
        config[f"{name}_commands"] = []
    for name in ("head_start_ray", "worker_start_ray"):
        config[f"{name}_commands"] = []
    path = Path(os.environ["RAY_TMPDIR"]) / "autoscaler.json"
    path.write_text(json.dumps(config))
    return {"autoscaling_config": str(path), "gcs_server_port": port}


def _main() -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # whoever is orphaned here ends here
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints is no answer
    keeper = _Keeper()
    try:
        for line in sys.stdin:
            call, arguments = json.loads(line)
            answers.write(json.dumps(getattr(keeper, call)(**arguments)) + "\n")
            answers.flush()
    finally:
        keeper.end()


if __name__ == "__main__":
    _main()
