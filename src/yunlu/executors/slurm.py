"""Slurm executor: each lease is one single-node job, submitted with ``sbatch``."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.core.errors import did_you_mean
from yunlu.executors.executor import Capabilities, ExecutorError, LeaseState, Reserve, name_kind
from yunlu.executors.lease_executor import LeasedExecutor, ObservedLeases
from yunlu.executors.lease_runner import AGAIN
from yunlu.executors.registry import read_address
from yunlu.hardware.accelerators import RESOURCES
from yunlu.hardware.fleet import Node
from yunlu.runs.run_store import WORKER_LOG, Area, require_local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from yunlu.executors.lease_executor import Lease, LeaseRecord
    from yunlu.runs.run_store import RunStore

QUEUE_FORMAT = "%i|%j|%T|%r|%N|%k"
"""For ``squeue``: id, name, state, reason, nodes, comment."""

_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
            "RESV_DEL_HOLD"}  # fmt: skip
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "SIGNALING", "RESIZING", "STOPPED"}

_WAITS = {
    "Resources": "it waits for its devices to become free",
    "Priority": "other jobs come first",
    "Dependency": "it waits for the lead of its run",
    "BeginTime": "it is started again in a moment",
    "ReqNodeNotAvail": "its node is not available",
    "NodeDown": "its node is down",
    "JobHeldUser": "it is held by its owner",
    "JobHeldAdmin": "it is held by an administrator",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node is as it asks",
    "None": "it was just asked for",
}
_ENDED = {
    "COMPLETED": "it ended by itself",
    "CANCELLED": "it was cancelled",
    "TIMEOUT": "its time limit is reached",
    "PREEMPTED": "it was preempted",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "it took more memory than it was allowed",
    "FAILED": "its program failed",
    "BOOT_FAIL": "its node could not be started",
    "DEADLINE": "its deadline has passed",
    "REVOKED": "another cluster took it",
}

_NODE_LOST = {"NODE_FAIL", "BOOT_FAIL"}

_ABSENT = {"DOWN", "FAIL", "FAILING", "UNKNOWN", "FUTURE", "ERROR"}
_OFF, _GOING_OFF = "POWERED_DOWN", {"POWERING_DOWN", "POWER_DOWN"}
_WAKING = {"POWERING_UP", "POWER_UP"}
_LEAVING = {"DRAIN", "DRAINED", "DRAINING", "MAINT", "MAINTENANCE", "REBOOT", "REBOOT_REQUESTED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One line of ``squeue``."""

    id: str
    name: str
    state: str
    reason: str
    node: str
    comment: str

    @property
    def lease_state(self) -> LeaseState:
        """The corresponding lease state."""
        if self.state in _WAITING:
            return LeaseState.WAITING
        return LeaseState.RUNNING if self.state in _RUNNING else LeaseState.GONE

    @property
    def has_lost_node(self) -> bool:
        """Whether its node was lost."""
        return self.state in _NODE_LOST

    @property
    def words(self) -> str:
        """Why it waits or is gone: our reason, then Slurm's."""
        match self.lease_state:
            case LeaseState.WAITING if self.state == "CONFIGURING":
                return f"its node is being started (Slurm: {self.state})"
            case LeaseState.WAITING:
                why = self.reason.partition(",")[0].strip("()")
                return f"{_WAITS.get(why, 'Slurm holds it back')} (Slurm: {self.reason})"
            case LeaseState.GONE:
                result = (
                    self.state if self.reason in {"", "None"} else f"{self.state}, {self.reason}"
                )
                return f"{_ENDED.get(self.state, 'it ended')} (Slurm: {result})"
            case _:
                return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """One line of ``scontrol --details --oneliner show node``."""

    name: str
    state: str
    flags: frozenset[str] = field(default_factory=frozenset)
    partitions: frozenset[str] = field(default_factory=frozenset)
    cpus: int = 0
    used_cpus: int = 0
    gpus: int = 0
    used_gpus: int = 0
    gpu_type: str = ""
    gres: str = "gpu"
    """What Slurm calls its accelerators."""
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_spot(self) -> bool:
        """Whether the administrator marked it with this feature."""
        return "spot" in self.features

    @property
    def is_absent(self) -> bool:
        """Whether nothing can be placed there."""
        return self.state in _ABSENT or ("NOT_RESPONDING" in self.flags and not self.is_waking)

    @property
    def is_asleep(self) -> bool:
        """Whether it is powered down, or powering down; a job placed there boots it."""
        return bool(self.flags & _GOING_OFF) or (_OFF in self.flags and not self.flags & _WAKING)

    @property
    def is_waking(self) -> bool:
        """Whether it is booting; it may not answer until then."""
        return bool(self.flags & _WAKING) and not self.is_asleep

    @property
    def is_leaving(self) -> bool:
        """Whether it accepts no new jobs."""
        return bool(({self.state} | self.flags) & _LEAVING)

    @property
    def can_sleep(self) -> bool:
        """Whether it can be powered up and down."""
        return "CLOUD" in self.flags or self.is_asleep


def read_queue(text: str) -> Iterator[QueuedJob]:
    """Parse the output of ``squeue``."""
    for line in text.splitlines():
        parts = line.strip().split("|", 5)
        if len(parts) == 6:
            number, name, state, reason, node, comment = parts
            yield QueuedJob(
                id=number, name=name, state=state, reason=reason, node=node, comment=comment
            )


def read_nodes(text: str) -> Iterator[SlurmNode]:
    """Parse the output of ``scontrol``."""
    for line in text.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if "NodeName" not in facts:
            continue
        state, *flags = facts.get("State", "UNKNOWN").split("+")
        if state.endswith("*"):
            flags.append("NOT_RESPONDING")
        gpus, gpu_type, gres = _count_accelerators(facts.get("Gres", ""))
        yield SlurmNode(
            name=facts["NodeName"],
            state=state.rstrip("*~#!%$@^-"),
            flags=frozenset(flag.rstrip("*") for flag in flags),
            partitions=frozenset(facts.get("Partitions", "").split(",")),
            cpus=int(facts.get("CPUTot", "0")),
            used_cpus=int(facts.get("CPUAlloc", "0")),
            gpus=gpus,
            used_gpus=_count_accelerators(facts.get("GresUsed", ""))[0],
            gpu_type=gpu_type,
            gres=gres,
            features=frozenset(facts.get("AvailableFeatures", "").lower().split(",")),
        )


_GRES = re.compile(rf"(?:^|,)({'|'.join(RESOURCES)})(?::([A-Za-z_][\w.-]*|\(null\)))?:(\d+)")


def _count_accelerators(gres: str) -> tuple[int, str, str]:
    """How many, which type, and Slurm's name: of ``gpu:a100:4(S:0-1),shard:8`` 4, ``a100``, ``gpu``."""
    result: list[tuple[str, str, str]] = _GRES.findall(gres)
    name = next((name for name, _, count in result if int(count)), RESOURCES[0])
    same = [(kind, int(count)) for other, kind, count in result if other == name]
    kinds = [kind for kind, _ in same if kind and kind != "(null)"]
    return sum(count for _, count in same), kinds[0] if kinds else "", name


_ANSWER_S = 20.0
_FRESH_S = 1.0
"""Cache time of the queue: many runs share one query."""
_OURS = "yunlu"
_CHANGES = {"sbatch", "scancel"}
_NOTICE_S = 60
# A step of its own: Slurm signals steps, not the batch script. And it requeues a job only
# if it had to kill it: one that left when it was signalled has to ask for it.
_SCRIPT = """#!/bin/sh
{step}
code=$?
[ $code -eq {again} ] && exec scontrol requeue $SLURM_JOB_ID
exit $code
"""


_heard: list[tuple[float, list[QueuedJob]]] = []
"""Cached queue and its time on the monotonic clock; dropped when we change the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of a Slurm address: ``slurm://PARTITION?account=a&minutes=60``."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    minutes: str = ""
    """Time limit of a lease; default: that of the partition."""
    device: str = "auto"
    """``gpu`` or ``npu`` (GRES), or ``cpu``; ``auto`` takes accelerators where a node has any."""
    cpus: str = "1"
    """Processors for each device."""
    memory_mb: str = ""
    """Memory per device; default: that of the partition."""
    spot: str = ""
    """``yes``: jobs here may be preempted at any time. Default: nodes with a feature ``spot``."""
    notice_s: str = str(_NOTICE_S)
    """Seconds of notice before the time limit of a lease."""


class SlurmExecutor(LeasedExecutor):
    """``slurm``, ``slurm://PARTITION``, ``slurm://PARTITION?account=NAME&...``."""

    name = "slurm"

    def __init__(self, address: str = "slurm") -> None:
        known = [name for name in SlurmOptions.__dataclass_fields__ if name != "partition"]
        partition, options = read_address(address, known)
        self.address = address
        self.options = SlurmOptions(partition=partition, **options)
        self._check()

    def capabilities(self) -> Capabilities:
        """As ``Executor.capabilities``."""
        return Capabilities(
            queues=True, requeues=True, scales=True, limits="as Slurm is set up (TaskPlugin)"
        )

    # Nodes.

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are up, each with the devices that no other jobs hold."""
        before = _count_ours(self._queue())
        matching_nodes = [
            node for node in self._slurm_nodes() if not node.is_absent and not node.is_asleep
        ]
        # Queried again: changes in between are not somebody else's.
        after = _count_ours(self._queue())
        return tuple(
            self._node(node, max(before.get(node.name, 0), after.get(node.name, 0)))
            for node in matching_nodes
        )

    def reserves(self) -> tuple[Reserve, ...]:
        """Nodes that Slurm powers up and down; sleeping ones only if PrivateData has ``cloud``."""
        kinds: dict[tuple[str, int, bool], list[SlurmNode]] = {}
        for node in self._slurm_nodes():
            if node.can_sleep and not node.is_absent:
                key = (self._type(node), self._count(node), self._is_spot(node))
                kinds.setdefault(key, []).append(node)
        return tuple(
            Reserve(
                type=kind,
                devices=devices,
                awake=sum(not node.is_asleep for node in nodes),
                most=len(nodes),
                nodes=tuple(node.name for node in nodes if not node.is_asleep),
                waking=tuple(node.name for node in nodes if node.is_waking),
                sleeping=tuple(node.name for node in nodes if node.is_asleep),
                is_spot=is_spot,
            )
            for (kind, devices, is_spot), nodes in kinds.items()
        )

    def scale(self, kind: str, nodes: int) -> None:
        """Power idle nodes up or down.

        Slurm lets only its operators do that; leases wake the nodes that they name in any case.
        """
        every = [node for node in self._slurm_nodes() if node.can_sleep and not node.is_absent]
        every = [node for node in every if self._kind(node) == kind]
        awake = [node for node in every if not node.is_asleep]
        idle = [node for node in awake if node.state == "IDLE"]
        if nodes > len(awake):
            chosen = [node for node in every if node.is_asleep][: nodes - len(awake)]
            self._power(chosen, "POWER_UP")
        elif nodes < len(awake):
            self._power(idle[::-1][: len(awake) - nodes], "POWER_DOWN")

    # Leases.

    def submit(self, run: RunStore, lease: Lease, *, directory: Path, lead: str | None) -> str:
        """As ``LeasedExecutor.submit``."""
        log = WORKER_LOG if lease.is_lead else f"{Area.LOGS}/lease-{lease.name}.log"
        require_local(run).open_text_log(log).close()  # Slurm would create it for others to read
        cpus = lease.devices * int(self.options.cpus)
        parts = [
            "sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--requeue", "--open-mode=append",
            f"--nodelist={lease.node}", f"--cpus-per-task={cpus}",
            f"--job-name={_job_name(run, lease.name)}", f"--comment={_OURS} devices={lease.devices}",
            f"--chdir={directory}", f"--output={run.location(log)}",
            f"--signal=TERM@{self.options.notice_s}",
            *self._options(lease),
        ]  # fmt: skip
        if lead is not None and not lease.is_lead:
            parts.append(f"--dependency=after:{lead}")
        program = [
            sys.executable,
            "-m",
            "yunlu.executors.lease_runner",
            run.address,
            lease.name,
        ]
        step = ["srun", "--ntasks=1", f"--cpus-per-task={cpus}", *program]
        script = _SCRIPT.format(step=shlex.join(step), again=AGAIN)
        return _slurm(*parts, script=script).partition(";")[0]

    def observe_leases(self, run: RunStore, record: LeaseRecord) -> dict[str, ObservedLeases]:
        """As ``LeasedExecutor.observe``."""
        result: dict[str, ObservedLeases] = {}
        beginning = _job_name(run, "")
        needed = {
            _job_name(run, lease.name) for lease in record.leases if lease.state != LeaseState.GONE
        }
        jobs = self._recent_queue(needed)
        for job in sorted(
            jobs, key=lambda job: (job.lease_state is not LeaseState.GONE, int(job.id))
        ):
            if job.name.startswith(beginning):
                result[job.name.removeprefix(beginning)] = ObservedLeases(
                    handle=job.id,
                    state=job.lease_state,
                    reason=job.words,
                    node=job.node,
                    has_lost_node=job.has_lost_node,
                )
        return result

    def cancel(self, handles: Sequence[str]) -> None:
        """As ``LeasedExecutor.cancel``."""
        _slurm("scancel", "--signal=KILL", "--full", *handles, is_lenient=True)
        _slurm("scancel", *handles, is_lenient=True)

    def notify(self, handles: Sequence[str]) -> None:
        """As ``LeasedExecutor.notify``."""
        _slurm("scancel", "--signal=TERM", *handles, is_lenient=True)

    # Helpers.

    def _check(self) -> None:
        """Refuse what Slurm, or we, would reject later."""
        options = self.options
        for name in ("cpus", "notice_s", "minutes", "memory_mb"):
            result: str = getattr(options, name)
            may_lack = name in {"minutes", "memory_mb"}
            if not (result.isdigit() and int(result) > 0) and (result or not may_lack):
                raise ExecutorError(f"{self.address}: {name} is not a whole number above 0")
        for name, known in (("device", ("auto", *RESOURCES, "cpu")), ("spot", ("", "yes", "no"))):
            result = getattr(options, name)
            if result not in known:
                text = ", ".join(filter(None, known))
                raise ExecutorError(f"{self.address}: {name} is {result!r}", hint=f"say {text}")

    def _options(self, lease: Lease) -> list[str]:
        options = self.options
        parts = [f"--{name}={value}" for name in ("partition", "account", "qos")
                 if (value := getattr(options, name))]  # fmt: skip
        if options.minutes:
            parts.append(f"--time={options.minutes}")
        if options.memory_mb:
            parts.append(f"--mem={int(options.memory_mb) * lease.devices}M")
        node = next(
            (slurm_node for slurm_node in self._slurm_nodes() if slurm_node.name == lease.node),
            None,
        )
        if node is None:
            where = f"partition {options.partition}" if options.partition else "Slurm"
            raise ExecutorError(
                f"{where} has no node {lease.node}",
                hint="Slurm shows a cloud node that sleeps only with PrivateData=cloud",
            )
        if self._has_gpus(node):
            parts.append(
                f"--gres={node.gres}:{f'{node.gpu_type}:' if node.gpu_type else ''}{lease.devices}"
            )
        return parts

    def _node(self, node: SlurmNode, ours: int) -> Node:
        total, used = self._count(node), node.used_gpus
        if not self._has_gpus(node):
            used = -(-node.used_cpus // int(self.options.cpus))
        return Node(
            name=node.name,
            devices=max(0, total - max(0, used - ours)),
            type=self._type(node),
            is_spot=self._is_spot(node),
            is_leaving=node.is_leaving,
        )

    def _has_gpus(self, node: SlurmNode) -> bool:
        wanted = self.options.device
        return wanted in RESOURCES or (wanted == "auto" and node.gpus > 0)

    def _count(self, node: SlurmNode) -> int:
        if not self._has_gpus(node):
            return node.cpus // int(self.options.cpus)
        return node.gpus if self.options.device in {"auto", node.gres} else 0

    def _type(self, node: SlurmNode) -> str:
        return (node.gpu_type or node.gres) if self._has_gpus(node) else "cpu"

    def _is_spot(self, node: SlurmNode) -> bool:
        return self.options.spot == "yes" or node.is_spot

    def _kind(self, node: SlurmNode) -> str:
        return name_kind(self._type(node), is_spot=self._is_spot(node))

    def _slurm_nodes(self) -> list[SlurmNode]:
        every = read_nodes(_slurm("scontrol", "--details", "--oneliner", "show", "node"))
        partition = self.options.partition or self._default_partition()
        matching_nodes = [node for node in every if partition in node.partitions]
        if not matching_nodes and partition not in (known := [name for name, _ in _partitions()]):
            raise ExecutorError(
                f"this Slurm has no partition {partition!r}", hint=did_you_mean(partition, known)
            )
        return matching_nodes

    def _default_partition(self) -> str:
        marked = [name for name, is_default in _partitions() if is_default]
        if not marked:
            raise ExecutorError(
                "this Slurm has no default partition", hint="name one: slurm://PARTITION"
            )
        return marked[0]

    def _queue(self) -> list[QueuedJob]:
        parts = ("squeue", "--noheader", "--me", "--states=all", f"--format={QUEUE_FORMAT}")
        at = time.monotonic()
        matching_jobs = [job for job in read_queue(_slurm(*parts)) if job.comment.startswith(_OURS)]
        _heard[:] = [(at, matching_jobs)]
        return matching_jobs

    def _recent_queue(self, needed: set[str]) -> list[QueuedJob]:
        """The cached queue, if it has all of these: a job may just have been submitted."""
        for at, jobs in _heard:
            is_fresh = time.monotonic() - at < _FRESH_S
            if is_fresh and needed <= {job.name for job in jobs}:
                return jobs
        return self._queue()

    def _power(self, nodes: Sequence[SlurmNode], state: str) -> None:
        if nodes:
            names = ",".join(node.name for node in nodes)
            _slurm("scontrol", "update", f"NodeName={names}", f"State={state}")


def _slurm(*command: str, script: str | None = None, is_lenient: bool = False) -> str:
    """Output of a Slurm command; its error message where it refuses."""
    if command[0] in _CHANGES:
        _heard.clear()
    program = shutil.which(command[0])
    if program is None:
        raise ExecutorError(
            f"Slurm is not on this machine: there is no {command[0]}",
            hint="run this where sbatch works, such as a login node of the cluster",
        )
    try:
        done = subprocess.run(  # noqa: S603 (Slurm's own program, no shell)
            [program, *command[1:]],
            input=script,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ExecutorError(f"Slurm has not answered {command[0]} for {_ANSWER_S:.0f} s") from error
    if done.returncode and not is_lenient:
        given = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ExecutorError(f"Slurm refused {command[0]}: {given}")
    return done.stdout.strip()


def _partitions() -> list[tuple[str, bool]]:
    """Names of partitions, and whether each is the default."""
    parts = _slurm("sinfo", "--noheader", "--format=%P").split()
    return [(word.rstrip("*"), word.endswith("*")) for word in parts]


def _job_name(run: RunStore, lease: str) -> str:
    return f"{_OURS}:{run.id}:{lease}"


def _count_ours(jobs: Iterable[QueuedJob]) -> dict[str, int]:
    """Devices of each node that our runs hold or are being given."""
    ours: dict[str, int] = {}
    for job in jobs:
        if job.node and job.lease_state is not LeaseState.GONE:
            ours[job.node] = ours.get(job.node, 0) + _devices_of(job)
    return ours


def _devices_of(job: QueuedJob) -> int:
    result = job.comment.partition("devices=")[2]
    return int(result) if result.isdigit() else 0
