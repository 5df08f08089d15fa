"""Parse the output of Slurm's commands. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yunlu.executors.executor import LeaseState

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        gpus, gpu_type = _count_gpus(facts.get("Gres", ""))
        yield SlurmNode(
            name=facts["NodeName"],
            state=state.rstrip("*~#!%$@^-"),
            flags=frozenset(flag.rstrip("*") for flag in flags),
            partitions=frozenset(facts.get("Partitions", "").split(",")),
            cpus=int(facts.get("CPUTot", "0")),
            used_cpus=int(facts.get("CPUAlloc", "0")),
            gpus=gpus,
            used_gpus=_count_gpus(facts.get("GresUsed", ""))[0],
            gpu_type=gpu_type,
            features=frozenset(facts.get("AvailableFeatures", "").lower().split(",")),
        )


def _count_gpus(gres: str) -> tuple[int, str]:
    """How many, and of which type: of ``gpu:a100:4(S:0-1),shard:8`` 4 and ``a100``."""
    result = re.findall(r"(?:^|,)gpu(?::([A-Za-z_][\w.-]*|\(null\)))?:(\d+)", gres)
    kinds = [kind for kind, _ in result if kind and kind != "(null)"]
    return sum(int(count) for _, count in result), kinds[0] if kinds else ""
