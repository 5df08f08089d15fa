"""Each contender as a contender that can be started, watched, hurt and enlarged."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.faults_parts.journal import Journal
from benchmarks.faults_parts.processes import Processes, is_alive
from benchmarks.faults_parts.workload import Workload, make_text

if TYPE_CHECKING:
    from benchmarks.faults_parts.journal import Step
    from benchmarks.netrig import Rig

HANG_TIMEOUT_S = 20.0
"""torchrun's processes wait this long for each other; torch's own default is half an hour."""
REPLICA_TIMEOUT_S = 5.0
"""As in torchft's example."""
HEARTBEAT_MS = 2000
"""After which torchft's lighthouse gives a replica up; its default is 5000."""


class ContenderError(Exception):
    """A worker group that cannot do what the trial asks of it."""


@dataclass(kw_only=True)
class Contender(ABC):
    """Two workers that train, on one machine or on a host each."""

    directory: Path
    workload: Workload
    hosts: Rig | None = None
    """Where each worker stands on a host of its own."""
    nodes: bool = False
    """Whether each worker is started apart, as on a node of its own."""
    restarts_itself: bool = field(default=True, init=False)
    """Whether a killed worker comes back without being asked for."""
    ready_at: float = field(default=0.0, init=False)
    """From when on its steps are those of the group that is asked for."""
    processes: Processes = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        make_text(self.directory / "text.txt", self.workload)
        (self.directory / "workload.json").write_text(json.dumps(self.workload.describe()))
        self.processes = Processes(
            log=self.directory / "contender.log",
            environment={
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0" if self.hosts else "lo",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )
        self.journal = Journal([self.directory / f"journal-{rank}.jsonl" for rank in range(2)])

    @abstractmethod
    def start(self) -> None:
        """Start both workers."""

    @abstractmethod
    def start_alone(self) -> None:
        """Start one worker, which another can join."""

    @abstractmethod
    def enlarge(self) -> float:
        """Add the other; the instant."""

    @abstractmethod
    def start_node(self, node: int) -> None:
        """Start the worker of one node (again)."""

    def pid_of(self, rank: int) -> int:
        """The process that trains as this rank now."""
        self.journal.refresh()
        for worker in reversed(self.journal.workers):
            if worker.rank == rank and is_alive(worker.pid):
                return worker.pid
        raise ContenderError(f"no living worker is rank {rank}")

    def kill(self, rank: int) -> float:
        """Kill one worker without a word; the instant."""
        pid = self.pid_of(rank)
        now = time.time()
        os.kill(pid, signal.SIGKILL)
        return now

    def stop(self, rank: int) -> float:
        """Make one worker hang; the instant."""
        pid = self.pid_of(rank)
        now = time.time()
        os.kill(pid, signal.SIGSTOP)
        return now

    def kill_node(self, node: int) -> float:
        """Every process of a node at once; the instant."""
        pids = self.processes.on_node(node)
        now = time.time()
        self.processes.kill(pids)
        return now

    def cut_node(self, node: int) -> float:
        """Its cable; the instant."""
        assert self.hosts is not None
        now = time.time()
        self.hosts.cut(node)
        return now

    def mend_node(self, node: int) -> float:
        """Its cable is put back, and whatever still runs there goes on; the instant."""
        assert self.hosts is not None
        self.hosts.mend(node)
        return time.time()

    def return_node(self, node: int) -> float:
        """A node that was lost comes back, empty-handed; the instant."""
        self.processes.kill(self.processes.on_node(node))
        if self.hosts is not None:
            self.hosts.mend(node)
        now = time.time()
        self.start_node(node)
        return now

    def restore(self, rank: int) -> float:
        """Put a killed worker back, where nobody else does; the instant."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave nothing behind."""
        self.processes.end()

    def committed(self) -> list[Step]:
        """The steps as they are to be accounted for."""
        self.journal.refresh()
        return self.journal.steps

    def samples_of(self, step: int) -> list[int]:
        """What a step is to be trained on."""
        return self.workload.samples_of(step)

    def on_host(self, node: int, command: list[str]) -> list[str]:
        """The command as it is started on a node."""
        return command if self.hosts is None else self.hosts.on(node, command)

    def address(self, node: int) -> str:
        """Of a node."""
        return "127.0.0.1" if self.hosts is None else self.hosts.address(node)


class Torchrun(Contender):
    """Elastic restarts: all workers die and come back whenever one does, or when a node comes or goes."""

    shared_store = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._port = free_port()
        if self.shared_store:
            self.processes.environment = {
                **self.processes.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
            }  # fmt: skip

    def start(self) -> None:
        """One agent with two workers, or an agent on each node."""
        for node in range(2 if self.nodes else 1):
            self.start_node(node)

    def start_alone(self) -> None:
        """An agent with one worker, on the first of two nodes."""
        self.nodes = True
        self.start_node(0)

    def enlarge(self) -> float:
        """An agent on the other node."""
        now = time.time()
        self.start_node(1)
        return now

    def start_node(self, node: int) -> None:
        """An agent; with nodes, one or two of them make a contender."""
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "1:2" if self.nodes else "1",
            "--nproc-per-node", "1" if self.nodes else "2",
            "--max-restarts", "1000",
            "--rdzv-backend", "c10d",
            "--rdzv-id", "bench",
            "--rdzv-endpoint", f"{self.address(0)}:{self._port}",
            # Else the survivors wait half a minute for others before they go on.
            "--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=1",
            "--local-addr", self.address(node),
            "-m", "benchmarks.faults_parts.peers.torchrun",
            str(self.directory), "--timeout", str(HANG_TIMEOUT_S),
        ]  # fmt: skip
        self.processes.start(self.on_host(node, command), node=node)


class TorchrunDefault(Torchrun):
    """The same with the store that torchrun shares between restarts unless told not to."""

    shared_store = True


class Torchft(Contender):
    """A quorum at each step; the survivors of a fault go on without a restart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.restarts_itself = False
        self._lighthouse = free_port()

    def start(self) -> None:
        """The lighthouse, and a replica group for each worker."""
        self.start_alone()
        self.start_node(1)

    def start_alone(self) -> None:
        """The lighthouse and one replica group."""
        command = [
            "torchft_lighthouse",
            "--bind", f"[::]:{self._lighthouse}",
            "--min_replicas", "1",
            "--quorum_tick_ms", "100",
            "--join_timeout_ms", "10000",
            "--heartbeat_timeout_ms", str(HEARTBEAT_MS),
        ]  # fmt: skip
        command[0] = str(lighthouse())
        self.processes.start(self.on_host(0, command), RUST_LOG="warn")
        self.start_node(0)

    def enlarge(self) -> float:
        """Another replica group."""
        now = time.time()
        self.start_node(1)
        return now

    def start_node(self, node: int) -> None:
        """One replica group."""
        command = [
            sys.executable, "-m", "benchmarks.faults_parts.peers.torchft",
            str(self.directory),
            "--replica", str(node),
            "--replicas", "2",
            "--lighthouse", f"http://{self.address(0)}:{self._lighthouse}",
            "--address", self.address(node),
            "--timeout", str(REPLICA_TIMEOUT_S),
        ]  # fmt: skip
        self.processes.start(self.on_host(node, command), node=node)

    def restore(self, rank: int) -> float:
        """As whoever schedules replica groups would, at once."""
        now = time.time()
        self.start_node(rank)
        return now


def why_torchft_is_absent() -> str | None:
    """None where it can take part."""
    if find_spec("torchft") is None:
        return "torchft is not installed here; make bench-faults installs it"
    found = lighthouse()
    return "torchft came without its lighthouse" if found is None else None


def lighthouse() -> Path | None:
    """Torchft's server, where torchft is installed."""
    found = Path(sys.executable).with_name("torchft_lighthouse")
    return found if found.exists() else None


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
