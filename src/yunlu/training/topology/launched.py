"""Workers of an external launcher (torchrun, srun, mpirun): no supervisor, no forks.

The process of rank 0 is given the run's directory, all others ``-``: rank 0 shares the run with them,
and each prints it as its first line. If one fails, all end; the launcher may start them again, and they
resume from the newest checkpoint. Only excluded stragglers are continued without.

Rank 0 hosts the store of their rendezvous; workers prove the group's secret to it. torchrun's own store,
which anybody can write, only says where: whoever answers at a false address cannot prove the secret.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from yunlu.core.errors import JobError, StoreError, TrainingError
from yunlu.core.limits import decode_json
from yunlu.core.secure_link import derive_secret, routed_address
from yunlu.core.settings import launch_variables, read_settings
from yunlu.planning.layouts import Layout
from yunlu.planning.splitting import fit_plan, resplit
from yunlu.runs.events import ErrorRaised, WorkerGroupFormed, WorkerLost, WorkerRank
from yunlu.runs.fold import read_view
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Area, Document, read_job, require_local, require_plan
from yunlu.runs.states import RunState
from yunlu.runs.worker_group import read_group_secret
from yunlu.training.attempt import (
    RunBusyError,
    as_user_error,
    begin_attempt,
    change_state,
    run_lock,
    signals_as_stop,
)
from yunlu.training.device import open_device
from yunlu.training.elastic.exec_module import ASYNC_NODE, ASYNC_SUPERVISOR, exec_module
from yunlu.training.parallel.group_store import GroupStore, StoreServer
from yunlu.training.parallel.parallel_model import template_of
from yunlu.training.parallel.sockets import is_connection_error
from yunlu.training.parallel.world import form_world
from yunlu.training.prepare import load_or_make_plan
from yunlu.training.runner import Runner
from yunlu.training.topology.asynchronous import find_async_obstacle
from yunlu.training.topology.worker_group import GroupTopology

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from yunlu.core.launch import LaunchInfo
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import HeldClaim, RunStore
    from yunlu.training.attempt import StopRequest
    from yunlu.training.parallel.world import World
    from yunlu.training.single_worker import StepRequest
    from yunlu.training.tasks.task import TrainingInputs
    from yunlu.training.topology.worker_group import WorkerGroupCallbacks

_RENDEZVOUS_S = 600.0
"""Importing torch from a network drive on many machines takes minutes."""
_POLL_S = 0.05
_FAILURE_POLL_S = 1.0
_CAUSE_S = 3.0
"""A worker that failed reports the cause within moments; a killed one never does."""
_LEAVE_S = 3.0
"""A worker still in a collective this long after a failure will not return from it."""


class PeerFailedError(Exception):
    """Another worker reported a failure."""


class Rendezvous:
    """All workers of a launch, seen from one of them."""

    def __init__(
        self, launch: LaunchInfo, name: str, secret: bytes, connect: Callable[[], GroupStore]
    ) -> None:
        self.launch, self._name, self._connected = launch, name, connect()
        self.secret = secret
        """Known to these workers only."""
        self.store = PrefixStore(name, self._connected)
        self.hosts: list[str] = []
        """By rank."""
        self.pids: list[int] = []
        self._cpus: list[list[int]] = []
        self._is_leaving = threading.Event()
        self._report_lock = threading.Lock()

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.launch.rank == 0

    @property
    def address(self) -> str | None:
        """Address on which peers reach this worker, if known."""
        return _address_towards(self.launch.host, self.launch.port)

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return len(set(self.hosts))

    @property
    def first_here(self) -> int:
        """First rank on this machine."""
        return self.hosts.index(self.hosts[self.launch.rank])

    @property
    def workers_here(self) -> int:
        """Number of workers on this machine."""
        return self.hosts.count(self.hosts[self.launch.rank])

    def count_cores(self, own_cores: int) -> int:
        """Cores of all machines; a launcher may pin each worker to ``own_cores`` of its own, or to none."""
        cpus = {(h, c) for h, info in zip(self.hosts, self._cpus, strict=True) for c in info}
        return max(1, round(own_cores * len(cpus) / len(self._cpus[self.launch.rank])))

    def exchange_info(self) -> None:
        """Exchange host, pid and CPU affinity with all workers."""
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        who = {"host": socket.gethostname(), "pid": os.getpid(), "cpus": cpus}
        self._set(f"who-{self.launch.rank}", who)
        infos = [self.receive(f"who-{rank}") for rank in range(self.launch.size)]
        self.hosts = [info["host"] for info in infos]
        self.pids = [info["pid"] for info in infos]
        self._cpus = [info["cpus"] for info in infos]

    def share(self, key: str, value: Any = None) -> Any:
        """Broadcast the leader's value (JSON)."""
        if self.is_leader:
            self._set(key, value)
            return value
        return self.receive(key)

    def receive(self, key: str) -> Any:
        """Wait for a value; raises if a worker fails meanwhile."""
        self.wait([key])
        return _decode(self.store.get(key))

    def receive_unless(self, key: str, is_over: Callable[[], bool]) -> Any:
        """Wait for a value, or return None once ``is_over``."""
        while not self.store.check([key]):
            if is_over():
                return None
            self._poll()
        return self.receive(key)

    def barrier(self, name: str) -> None:
        """Wait until all workers have arrived."""
        self.arrive(name)
        self.wait([f"{name}-{rank}" for rank in range(self.launch.size)])

    def arrive(self, name: str) -> None:
        """Record that this worker has arrived."""
        self._set(f"{name}-{self.launch.rank}", 1)

    def wait(self, keys: list[str]) -> None:
        """Wait until all keys are set."""
        while not self.store.check(keys):
            self._poll()

    def wait_for(self, name: str, ranks: Sequence[int], *, within_s: float) -> None:
        """Wait until these ranks have arrived, or the time is over."""
        deadline = time.monotonic() + within_s
        keys = [f"{name}-{rank}" for rank in ranks]
        while keys and not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _poll(self) -> None:
        if self.store.check(["failure"]):
            raise PeerFailedError("another worker failed")
        time.sleep(_POLL_S)

    def explain(self, error: Exception) -> dict[str, Any]:
        """The failure that ended this worker, as event data; all workers agree on the first."""
        own = describe_failure(error, self.launch.rank)
        try:
            if not isinstance(error, PeerFailedError) and not is_connection_error(error):
                return _decode(self.store.compare_set("failure", "", json.dumps(own)))
            self.arrive("broken")
            return self._find_cause() or own
        except Exception:  # noqa: BLE001 (without a store there is no more to learn)
            return own

    def watch_for_failure(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Exit, after ``report``, if another worker failed and this one hangs in a collective.

        Not every kind of collective ends with the connection.
        """
        connected = self._connected.clone()  # one connection per thread
        store = PrefixStore(self._name, connected)

        def poll_failure() -> None:
            with suppress(Exception), closing(connected):
                while not store.check(["failure"]):
                    if self._is_leaving.wait(_FAILURE_POLL_S):
                        return
                if not self._is_leaving.wait(_LEAVE_S) and self._report_lock.acquire(
                    blocking=False
                ):
                    report(_decode(store.get("failure")))
                    os._exit(1)

        threading.Thread(target=poll_failure, name="failure", daemon=True).start()

    def leave(self) -> None:
        """Exit by itself: this worker reports its own failure."""
        self._is_leaving.set()
        self._report_lock.acquire()  # blocks forever if the failure is already being reported

    def _find_cause(self) -> dict[str, Any] | None:
        deadline = time.monotonic() + _CAUSE_S
        others = set(range(self.launch.size)) - {self.launch.rank}
        silent = others
        while time.monotonic() < deadline:
            if self.store.check(["failure"]):
                return _decode(self.store.get("failure"))
            silent = {rank for rank in others if not self.store.check([f"broken-{rank}"])}
            if not silent:
                return None
            time.sleep(_POLL_S)
        rank = min(silent)
        return {
            "code": TrainingError.code,
            "message": f"Worker {rank} on {self.hosts[rank]} ended without an error message.",
            "hint": f"logs/worker-{rank}.log may show the cause; it may have been killed for lack of memory.",
            "rank": rank,
            "worker": str(rank),
            "host": self.hosts[rank],
            "pid": self.pids[rank],
        }

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))


def describe_failure(error: Exception, rank: int) -> dict[str, Any]:
    """An error of this worker, as event data."""
    shown = as_user_error(error)
    return {
        "code": shown.code,
        "message": shown.message,
        "hint": shown.hint,
        "traceback": "".join(traceback.format_exception(error))[-100_000:],
        "rank": rank,
        "worker": str(rank),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def join_rendezvous(launch: LaunchInfo, *, run_index: int) -> Rendezvous:
    """Join the rendezvous; ``run_index`` counts the runs that this launch trains one after another."""
    # The name keeps apart launches that use the same port by mistake.
    name = f"yunlu-{launch.id}-{launch.restarts}-{run_index}"
    secret = derive_secret(read_group_secret(read_settings().home), "launch", name)
    joined = Rendezvous(launch, name, secret, lambda: _open(launch, name, secret, run_index))
    joined.exchange_info()
    return joined


def _open(launch: LaunchInfo, name: str, secret: bytes, run_index: int) -> GroupStore:
    timeout = timedelta(seconds=_RENDEZVOUS_S)
    try:
        if launch_variables().get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address = _exchange_address(launch, name, secret, timeout)
        else:
            address = (launch.host, launch.port + run_index)
            if launch.rank == 0:
                _host_store(launch, secret, port=address[1])
        return GroupStore(address, secret, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(
            f"The {launch.size} workers did not meet at {launch.host}:{launch.port}: {reason}",
            hint="Check that all of them were started, and that the port is free and reachable. "
            "MASTER_ADDR and MASTER_PORT set another address. If their machines do not share "
            "YUNLU_HOME, set YUNLU_SECRET to the same value on each.",
        ) from error


def _exchange_address(
    launch: LaunchInfo, name: str, secret: bytes, timeout: timedelta
) -> tuple[str, int]:
    """Address of rank 0's store, told through torchrun's."""
    stores: Any = next(iter(rendezvous("env://", timeout=timeout)))
    store: Store = stores[0]
    if launch.rank == 0:
        server = _host_store(launch, secret, port=0)
        store.set(name, f"{server.port} {server.host}")
    port, _, host = bytes(store.get(name)).decode().partition(" ")
    return host, int(port)


def _host_store(launch: LaunchInfo, secret: bytes, *, port: int) -> StoreServer:
    host = _address_towards(launch.host, launch.port) or "127.0.0.1"
    outside = routed_address()
    # A host's own name is often a loopback address to itself, and to no other host.
    is_named = host.startswith("127.") and launch.host not in {host, "localhost"}
    others = [outside] if is_named and outside != host else []
    return StoreServer(
        others[0] if others else host, secret, port=port, other_hosts=others and [host]
    )


def _address_towards(host: str, port: int) -> str | None:
    """Local address on the route to rank 0, on which peers reach this worker."""
    with suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    return None


def _decode(data: bytes) -> Any:
    """A value of the store; a failure may quote a file name that is no text."""
    return decode_json(data, replace_lone=True)


_FAREWELL_S = 5.0
"""Time for excluded workers to read the final state; they poll for it."""


def run_launched(path: Path | None, launch: LaunchInfo, *, run_index: int = 0) -> RunState:
    """Run one attempt together with the other ranks; rank 0 is given the path and reports how it ends."""
    rendezvous: Rendezvous | None = None
    with signals_as_stop() as stop:
        try:
            rendezvous = join_rendezvous(launch, run_index=run_index)
            return _lead(open_run(path), rendezvous, stop) if path else _follow(rendezvous, stop)
        except Exception as error:  # noqa: BLE001 (reported as an event)
            traceback.print_exc()
            if rendezvous is None:
                failure = describe_failure(error, launch.rank)
            else:
                rendezvous.leave()
                failure = rendezvous.explain(error)
            if path and not isinstance(error, RunBusyError):  # the run belongs to another process
                _report_failure(open_run(path), failure)
            return RunState.FAILED


def _lead(run: RunStore, rendezvous: Rendezvous, stop: StopRequest) -> RunState:
    with run_lock(run) as lock:
        job = read_job(run)
        # Set by the job, or chosen in an earlier attempt.
        is_served = job.communication.method == "asynchronous" or run.has(Area.SERVERS)
        is_over = read_view(run).state is RunState.FINISHED
        info = {"path": run.address, "directory": str(Path.cwd()), "is_over": is_over}
        rendezvous.share("run", info | {"is_served": is_served})
        if is_over:  # restarted after the run had finished
            rendezvous.barrier("end")
            return RunState.FINISHED
        if is_served:
            _switch_to_async(run, rendezvous, lock, is_new=True)
        rendezvous.watch_for_failure(lambda failure: _report_failure(run, failure))
        attempt, began_at = begin_attempt(run)
        rendezvous.share("attempt", attempt)
        change_state(run, RunState.PLANNING)
        runner = Runner(run, job, LaunchedTopology(rendezvous, stop), attempt=attempt)
        state = runner.run_attempt(started_at=began_at)
        if state is RunState.RUNNING:
            _switch_to_async(run, rendezvous, lock)
        return state


def _follow(rendezvous: Rendezvous, stop: StopRequest) -> RunState:
    info = rendezvous.share("run")
    print(info["path"], flush=True)  # noqa: T201 (to the parent: see above)
    run = open_run(Path(info["path"]))
    run.is_quiet = True
    if not run.has(Document.JOB):
        raise StoreError(
            f"{run.address} does not exist on this machine.",
            hint="All machines must see the same files: put YUNLU_HOME on a shared drive.",
        )
    if info["is_over"]:
        rendezvous.arrive("end")
        return RunState.FINISHED
    with suppress(OSError):
        os.chdir(info["directory"])
    _print_to(run, f"{Area.LOGS}/worker-{rendezvous.launch.rank}.log")
    if info["is_served"]:
        _switch_to_async(run, rendezvous)
    rendezvous.watch_for_failure(lambda _: None)
    attempt = rendezvous.share("attempt")
    runner = Runner(run, read_job(run), LaunchedTopology(rendezvous, stop), attempt=attempt)
    state = runner.run_attempt(started_at=0.0)
    if state is RunState.RUNNING:
        _switch_to_async(run, rendezvous)
    return state


class LaunchedTopology(GroupTopology):
    """All workers of a launch, or those that are not excluded, seen from one of them."""

    def __init__(self, rendezvous: Rendezvous, stop: StopRequest) -> None:
        super().__init__()
        self._rendezvous, self._stop = rendezvous, stop
        self._ranks = list(range(rendezvous.launch.size))
        """Launcher ranks of the workers that train."""
        self._generation = 1
        self._is_excluded = False

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self._rendezvous.is_leader

    def load(self, runner: Runner) -> TrainingInputs:
        """The first worker of a machine loads first; the others reuse what it downloads or caches."""
        rendezvous = self._rendezvous
        if rendezvous.launch.rank != rendezvous.first_here:
            rendezvous.wait([f"loaded-{rendezvous.first_here}"])
        inputs = super().load(runner)
        rendezvous.arrive("loaded")
        runner.template = template_of(inputs.model)
        return inputs

    def make_plan(self, runner: Runner, *, started_at: float) -> Plan:
        """Rank 0 plans; all share its layout."""
        rendezvous, layout = self._rendezvous, None
        cores = rendezvous.count_cores(runner.machine.cores)
        if rendezvous.is_leader:
            layout = self._plan_layout(runner, cores=cores, started_at=started_at)
        shared = rendezvous.share("layout", layout and layout.model_dump(mode="json"))
        layout = Layout.model_validate(shared)
        plan = require_plan(runner.run)
        return fit_plan(plan, runner.job, layout, cores=cores, nodes=rendezvous.nodes)

    def _plan_layout(self, runner: Runner, *, cores: int, started_at: float) -> Layout:
        """Layout for all launched workers; the plan of an earlier attempt may be for another number."""
        rendezvous, job = self._rendezvous, runner.job
        size = rendezvous.launch.size
        rendezvous.barrier("loaded")  # loading would disturb the measurements
        machine = runner.machine
        if machine.gpus:  # one per worker, on any machine
            machine = machine.model_copy(update={"devices": (machine.best_device,) * size})
        sized_job = job.model_copy(update={"devices": size})
        plan = load_or_make_plan(
            runner.run, sized_job, runner.inputs, machine, started_at=started_at
        )
        if plan.layout.world == size:
            return plan.layout
        plan, reason = resplit(plan, job, devices=size, cores=cores, nodes=rendezvous.nodes)
        count = plan.layout.world
        if count != size:
            raise JobError(
                f"{rendezvous.launch.launcher} started {size} workers, too many: {reason.partition(';')[0]}.",
                hint=f"Start {count}, or change the job so that {size} can share it.",
            )
        return plan.layout

    @contextmanager
    def join_world(self, runner: Runner) -> Generator[World]:
        """Meet all workers of the launch."""
        rendezvous, layout = self._rendezvous, runner.plan.layout
        device = _device(runner.plan, rendezvous.launch)
        rendezvous.barrier("forming")
        self._world = world = form_world(
            layout,
            rendezvous.launch.rank,
            PrefixStore("world", rendezvous.store),
            device=device,
            secret=derive_secret(rendezvous.secret, "world", self._generation),
            trusts_network=runner.job.communication.trust == "network",
            host=rendezvous.address or "127.0.0.1",
        )
        world.async_obstacle = find_async_obstacle(runner.run, runner.job, workers=layout.world)
        # Otherwise each holds a shard of the optimizer state.
        world.can_exclude_workers = not layout.zero1
        try:
            yield world
        finally:
            with suppress(Exception):  # a broken group need not close cleanly
                self._world.close()

    def open_callbacks(self, runner: Runner) -> WorkerGroupCallbacks:
        """Callbacks of this generation; only signals stop the workers."""
        return self.open_group_callbacks(
            runner, control=Unsupervised(self._stop), generation=self._generation
        )

    def begin(self, runner: Runner) -> None:
        """Resume from the newest checkpoint, if there is one."""
        resumed_from = runner.callbacks.resume()
        runner.trackers.start(runner.run, runner.job, resumed=resumed_from is not None)
        launch = self._rendezvous.launch
        self._begin_generation(runner, f"{launch.launcher} started {launch.size} workers")
        change_state(runner.run, RunState.RUNNING, resumed_from_step=resumed_from)

    def workers_here(self) -> int:
        """Number of workers on this machine."""
        return self._rendezvous.workers_here

    def run_steps(self, runner: Runner) -> StepRequest:
        """Train; after an exclusion, the workers that stay go on."""
        request = super().run_steps(runner)
        while request == "pause" and not runner.engine.communication.is_excluded:
            runner.callbacks.log.flush()
            self._continue_without(runner, runner.engine.communication.excluded)
            request = super().run_steps(runner)
        return request

    def leave(self, runner: Runner, request: StepRequest) -> RunState | None:
        """Save before a stop; wait if excluded; hand over to asynchronous workers."""
        callbacks = self.callbacks_of(runner)
        if request == "pause":
            return self._wait_excluded(runner)
        if request == "serve":  # all workers chose asynchronous training
            if runner.engine.steps_done:
                callbacks.save_and_wait()
            callbacks.checkpoints.wait()
            self.barrier()  # the leader's store is no longer needed
            return RunState.RUNNING
        if request == "finish":
            callbacks.end_on_request(request)
        if request == "stop":
            is_to_be_saved = callbacks.is_to_be_saved()
            if callbacks.decision is None:
                reason = callbacks.hooks.reason or "asked to stop"
                change_state(runner.run, RunState.STOPPING, reason=reason)
            if is_to_be_saved:
                callbacks.save_and_wait()
        return None

    def end(self, runner: Runner, state: RunState) -> RunState:
        """Report the end to the run, and to excluded workers."""
        if state is not RunState.RUNNING and not self._is_excluded:
            change_state(runner.run, state)
            # Only after all ranks are through: whoever watches the run may kill the leader as soon as
            # the state is final.
            with suppress(RuntimeError):
                self.barrier()
            if self.is_leader:
                self._rendezvous.share("over", state.value)
                every = range(self._rendezvous.launch.size)
                excluded = [rank for rank in every if rank not in self._ranks]
                self._rendezvous.wait_for("over", excluded, within_s=_FAREWELL_S)
        return state

    def _begin_generation(self, runner: Runner, reason: str) -> None:
        """Begin a generation: all workers hold the same state."""
        self.callbacks_of(runner).begin(self._generation)
        layout, rendezvous = runner.engine.world.layout, self._rendezvous
        runner.run.emit(
            WorkerGroupFormed(
                generation=self._generation,
                layout=str(layout),
                reason=reason,
                from_step=runner.engine.steps_done,
                redone_steps=0,
                ranks=tuple(
                    WorkerRank(
                        rank=rank,
                        worker=str(agent),
                        host=rendezvous.hosts[agent],
                        pid=rendezvous.pids[agent],
                        **layout.place_of(rank)._asdict(),
                    )
                    for rank, agent in enumerate(self._ranks)
                ),
            )
        )

    def _continue_without(self, runner: Runner, excluded: Sequence[int]) -> None:
        """Form a new group without the excluded workers, before the same step; each holds the complete state."""
        left = [agent for rank, agent in enumerate(self._ranks) if rank in excluded]
        self._ranks = [agent for agent in self._ranks if agent not in left]
        self._generation += 1
        engine, rendezvous = runner.engine, self._rendezvous
        before, state = self._world, runner.callbacks.state()
        runner.callbacks.checkpoints.wait()
        before.close()
        layout = before.layout.model_copy(update={"dp": len(self._ranks)})
        self._world = world = form_world(
            layout,
            self._ranks.index(rendezvous.launch.rank),
            PrefixStore(f"world-{self._generation}", rendezvous.store),
            device=before.device,
            secret=derive_secret(rendezvous.secret, "world", self._generation),
            trusts_network=runner.job.communication.trust == "network",
            host=before.host,
        )
        # Asynchronous training needs all launched workers, and excluded ones would not be told.
        world.async_obstacle = "a worker is excluded"
        world.can_exclude_workers = before.can_exclude_workers
        nodes = len({rendezvous.hosts[agent] for agent in self._ranks})
        cores = engine.plan.threads * len(self._ranks)
        plan = fit_plan(engine.plan, engine.job, layout, cores=cores, nodes=nodes)
        engine.rejoin(world, micro_batch=plan.micro_batch)
        runner.callbacks = self.open_callbacks(runner)
        runner.callbacks.restore(state)
        names = ", ".join(str(agent) for agent in left)
        is_or_are = "is" if len(left) == 1 else "are"
        self._begin_generation(runner, f"worker {names} {is_or_are} excluded as a straggler")

    def _wait_excluded(self, runner: Runner) -> RunState:
        """Excluded as a straggler: wait for the final state of the run, or for a stop signal."""
        self._is_excluded = True
        runner.callbacks.checkpoints.wait()
        self._world.close()
        state = self._rendezvous.receive_unless("over", lambda: self._stop.is_set)
        self._rendezvous.arrive("over")
        return RunState.STOPPED if state is None else RunState(state)


class Unsupervised:
    """Control interface without a supervisor: only signals stop the worker."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self.wants_pause = False

    @property
    def wants_stop(self) -> bool:
        """Whether a stop signal was received."""
        return self._stop.is_set

    def check(self) -> None:
        """Never halted."""

    def request_exclusion(self) -> None:
        """Pause all workers before the same step; those that stay form a new group."""
        self.wants_pause = True

    def report_progress(self, **_: Any) -> None:
        """Discarded: there is no supervisor."""


def _switch_to_async(
    run: RunStore, rendezvous: Rendezvous, claim: HeldClaim | None = None, *, is_new: bool = False
) -> NoReturn:
    """Exec the asynchronous modules: rank 0 runs servers and a worker, the others one worker each.

    ``claim`` is the leader's claim on the run. ``is_new``: this is a new attempt of the run.
    """
    if rendezvous.is_leader:
        rendezvous.barrier("switch to async")  # the store ends with this process
    else:
        rendezvous.arrive("switch to async")
    here = ("--devices", "1", "--workers-here", str(rendezvous.workers_here))
    if not rendezvous.is_leader:
        arguments = (run.address, "--node", f"rank-{rendezvous.launch.rank}", *here)
        exec_module(ASYNC_NODE, *arguments)
    arguments = (run.address, *here, "--shares", str(rendezvous.launch.size))
    if not is_new:
        assert claim is not None
        arguments += ("--claim", claim.pass_on())
    exec_module(ASYNC_SUPERVISOR, *arguments, bind=rendezvous.address)


def _device(plan: Plan, launch: LaunchInfo) -> torch.device:
    return open_device(plan.device, launch.local_rank)


def _report_failure(run: RunStore, failure: dict[str, Any]) -> None:
    who: dict[str, Any] = {name: failure.get(name) for name in ("rank", "worker", "host", "pid")}
    what = "failed" if failure.get("traceback") else "killed"
    try:
        run.emit(WorkerLost(cause=what, detail=failure["message"], **who))
        run.emit(ErrorRaised(**failure))
        change_state(run, RunState.FAILED)
    except OSError:
        sys.stderr.write(f"{failure}\n")  # not even the event log can be written


def _print_to(run: RunStore, log: str) -> None:
    """Redirect this process's output to its own log."""
    with require_local(run).open_text_log(log) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
