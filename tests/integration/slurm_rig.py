"""A real Slurm on one machine, in a folder of its own: several nodes with pretended GPUs, a partition
that can be preempted, and nodes that are powered up on demand."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
_SBIN = "/usr/sbin"

_CONFIG = """
ClusterName=yunlu
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket,cred_expire=120
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={place}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.%n.pid
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdLogFile={place}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,default_queue_depth=100
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
KillWait=30
MinJobAge=300
SlurmdParameters=config_overrides
GresTypes=gpu
PrivateData=cloud
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{n_first}-{n_last}] CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=c1 NodeHostname={host} NodeAddr=127.0.0.1 Port={c_first} CPUs=4 RealMemory=4000 Gres=gpu:2 Feature={feature} State=CLOUD
NodeName=c2 NodeHostname={host} NodeAddr=127.0.0.1 Port={c_last} CPUs=4 RealMemory=4000 Gres=gpu:2 State=CLOUD
ResumeProgram={place}/resume.sh
SuspendProgram={place}/suspend.sh
SuspendTime={suspend_s}
SuspendTimeout=2
ResumeTimeout=120
SuspendExcNodes=n[1-{nodes}]
TreeWidth=65533
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF State=UP MaxTime=INFINITE
PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} State=UP MaxTime=INFINITE
"""
# What Slurm starts has signals blocked: a slurmd that inherits that cannot be ended. Slurm counts in whole
# seconds: a node that has booted before a job was placed on it is taken for one that never did.
_RESUME = """#!/bin/sh
for node in $(scontrol show hostnames "$1"); do
  echo "resume $node" >> {place}/log/power.log
  {python} -c 'import os,signal,sys,time;time.sleep(2);signal.pthread_sigmask(signal.SIG_SETMASK,[]);os.execvp(sys.argv[1],sys.argv[1:])' \
    setsid {slurmd} -b -D -f {place}/slurm.conf -N $node </dev/null >>{place}/log/resume.err 2>&1 &
done
"""
_SUSPEND = """#!/bin/sh
for node in $(scontrol show hostnames "$1"); do
  echo "suspend $node" >> {place}/log/power.log
  kill -9 $(cat {place}/slurmd.$node.pid)
done
"""


def why_no_slurm() -> str | None:
    """Why a Slurm cannot be started here, if it cannot."""
    if os.geteuid() != 0:
        return "starting a Slurm of our own needs root"
    missing = [name for name in PROGRAMS if _program(name) is None]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm munge)" if missing else None


class SlurmRig:
    """Up while the block runs; afterwards nothing of it is left."""

    def __init__(
        self,
        place: Path,
        *,
        nodes: int = 2,
        grace_s: int = 120,
        slurmd_timeout_s: int = 30,
        suspend_s: int = 3,
        feature: str = "cloud",
    ) -> None:
        """``feature`` is of the first node that is powered up on demand."""
        self.place = place
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self._options = {
            "grace_s": grace_s,
            "slurmd_timeout_s": slurmd_timeout_s,
            "suspend_s": suspend_s,
            "feature": feature,
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # Slurm's sockets lie there, and the name of a socket may not be long.
        self._spool = Path(tempfile.mkdtemp(prefix="slurm-"))

    @property
    def environment(self) -> Mapping[str, str]:
        """What makes Slurm's commands find this Slurm."""
        return {"SLURM_CONF": str(self.place / "slurm.conf")}

    def __enter__(self) -> Self:
        try:
            self._configure()
            munge = self.place / "munge"
            self._start("munged", "--foreground", "--force", f"--key-file={munge}/key",
                        f"--socket={munge}/socket", f"--pid-file={munge}/pid",
                        f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
            wait_until((munge / "socket").exists, "munged listens")
            self._start("slurmctld", "-D", "-f", self._conf)
            for name in self.names:
                self.start_node(name)
            wait_until(
                lambda: self._idle() >= set(self.names),
                "all nodes are idle",
                explain=self.describe_logs,
            )
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def call(self, *words: str) -> str:
        """What a command of Slurm printed."""
        return subprocess.run(
            words,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-f", self._conf, "-N", name, called=name)

    def kill_node(self, name: str) -> None:
        """As if its power were cut: nobody on it says a last word."""
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait()
        else:  # Slurm itself has started it
            os.kill(int((self.place / f"slurmd.{name}.pid").read_text()), signal.SIGKILL)
        for process in self._processes():
            with suppress(psutil.Error):
                is_step = _log_of_step(process).endswith(f"/slurmd.{name}.log")
                if is_step or process.environ().get("SLURMD_NODENAME") == name:
                    process.kill()

    def power_log(self) -> list[str]:
        path = self.place / "log" / "power.log"
        return path.read_text().splitlines() if path.exists() else []

    def describe_logs(self) -> str:
        """The last words of its daemons, for whoever must find out what went wrong."""
        logs = sorted((self.place / "log").glob("*"))
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs
        )

    def end(self) -> None:
        """End every process of this Slurm, its jobs included."""
        with suppress(subprocess.SubprocessError, OSError):
            self.call("scancel", "--signal=KILL", "--full", "--me")
            self.call("scancel", "--me")
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        wait_until(lambda: not self._processes(), "its processes end", meanwhile=self._kill)
        shutil.rmtree(self._spool, ignore_errors=True)

    def _kill(self) -> None:
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()

    @property
    def _conf(self) -> str:
        return str(self.place / "slurm.conf")

    def _start(self, program: str, *words: str, called: str | None = None) -> None:
        with (self.place / "log" / f"{called or program}.out").open("ab") as log:
            self._daemons[called or program] = subprocess.Popen(
                [_program(program) or program, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def _configure(self) -> None:
        for folder in ("state", "log", "munge"):
            (self.place / folder).mkdir(parents=True)
        for folder in (self.place, self.place / "munge"):
            folder.chmod(0o755)
        key = self.place / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        count = len(self.names)
        port, *ports = _free_ports(count + 3)
        first = ports[0]
        facts = {"host": socket.gethostname().partition(".")[0], "place": self.place, "port": port,
                 "spool": self._spool, "nodes": count, "n_first": first, "n_last": first + count - 1,
                 "c_first": first + count, "c_last": first + count + 1, **self._options}  # fmt: skip
        (self.place / "slurm.conf").write_text(_CONFIG.format(**facts))
        for number in (0, 1):  # stand in for GPUs: nobody opens them
            os.mknod(self.place / f"gpu{number}", 0o20666, os.makedev(1, 3))
        (self.place / "gres.conf").write_text(f"Name=gpu File={self.place}/gpu[0-1]\n")
        (self.place / "cgroup.conf").write_text("CgroupAutomount=no\n")
        for name, text in (("resume", _RESUME), ("suspend", _SUSPEND)):
            script = self.place / f"{name}.sh"
            head, _, body = text.partition("\n")
            path = f"export PATH={_SBIN}:/usr/bin:/bin SLURM_CONF={self._conf}"
            body = body.format(place=self.place, python=sys.executable, slurmd=_program("slurmd"))
            script.write_text(f"{head}\n{path}\n{body}")
            script.chmod(0o755)

    def _idle(self) -> set[str]:
        with suppress(subprocess.CalledProcessError):
            lines = self.call("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
            return {line.split()[0] for line in lines if line.split()[1] == "idle"}
        return set()

    def _processes(self) -> list[psutil.Process]:
        """Everyone who was started by this Slurm."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    mine = process.environ().get("SLURM_CONF") == self._conf
                    mine = mine or _log_of_step(process).startswith(str(self.place))
                    if mine or any(str(self.place) in word for word in process.cmdline()):
                        found.append(process)
        return found


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def _log_of_step(process: psutil.Process) -> str:
    """Where a slurmstepd writes: it has wiped out what it was started with, and has no parent."""
    if not process.name().startswith("slurmstepd"):
        return ""
    return next((file.path for file in process.open_files() if "/log/slurmd." in file.path), "")


def _free_ports(count: int) -> list[int]:
    """So many in a row that nobody listens at."""
    for first in range(16000 + os.getpid() % 8000, 60000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return [*range(first, first + count)]
    raise RuntimeError("no free ports")
