"""The workers of one generation: their process groups, and where this one stands."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from yunlu.planning.layout import AXES, Layout, RankCoordinates
from yunlu.training.communication.allreduce.doubling import doubling_allreduce
from yunlu.training.communication.transport import connect
from yunlu.training.parallel.redistribute import gather_json, gather_specs, redistribute
from yunlu.training.parallel.sockets import Socket, open_sockets, shut
from yunlu.training.parallel.tensor_slices import shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from yunlu.training.communication.transport import Transport

NEVER_S = 24 * 3600.0
"""Who hangs is found by the watchdog, long before this; a timeout of torch's would only blame the wrong one."""
_LOOK_S = 0.25
_KEPT_S = 60.0
_MEET_S = 600.0
"""Building a large model takes minutes; whoever is lost meanwhile is cut off before."""


@dataclass(kw_only=True)
class World:
    """Everyone who takes part in a step."""

    layout: Layout
    rank: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """Over the axes that split anything, in the order of ``AXES``."""
    sockets: frozenset[Socket] = frozenset()
    """The connections to the others; ``disconnect`` ends them."""
    is_disconnected: bool = False
    host: str = "127.0.0.1"
    """Where the others reach this worker."""
    async_obstacle: str = "nobody here can start servers"
    """Why its workers cannot become asynchronous ones; empty where they can."""
    can_exclude_workers: bool = False
    """Whether a worker can step aside, and the others go on without it."""
    _store: Any = None
    _wires: list[Transport] = field(default_factory=list[Any])
    _quick: Transport | None = None
    _sums: int = 0
    _joint: dict[tuple[str, ...], Any] = field(default_factory=dict[tuple[str, ...], Any])

    @property
    def place(self) -> RankCoordinates:
        """Where this worker stands."""
        return self.layout.place_of(self.rank)

    @property
    def replica(self) -> int:
        """Which share of a step's samples is ours."""
        return self.layout.replica_of(self.rank)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where each worker is, as far as that matters: who shares an address shares a machine."""
        return (self.host,) * self.layout.world if self._quick is None else self._quick.hosts

    @property
    def is_leader(self) -> bool:
        """Whether this worker speaks for all."""
        return self.rank == 0

    def axis(self, *names: str) -> DeviceMesh | None:
        """The mesh of these axes, in the order of ``AXES``; none where none of them splits anything."""
        wanted = tuple(name for name in AXES if name in names and self.layout.size_of(name) > 1)
        return None if self.mesh is None or not wanted else self.mesh[wanted]

    def group(self, *names: str) -> Any:
        """The process group of these axes together; none where it would hold this worker alone."""
        mesh = self.axis(*names)
        if mesh is None:
            return None
        if mesh.ndim == 1:
            return mesh.get_group()
        key = tuple(mesh.mesh_dim_names or ())
        if key not in self._joint:
            self._joint[key] = mesh._flatten("_".join(key)).get_group()  # pyright: ignore[reportPrivateUsage]
        return self._joint[key]

    def sum_over_all(self, numbers: Tensor) -> Tensor:
        """The sum over every worker, in place."""
        if self._quick is not None:
            self._sums = (self._sums + 1) % (1 << 32)
            doubling_allreduce(self._quick, numbers.view(-1), tag=self._sums)
        elif not self.layout.is_single:
            work = dist.all_reduce(numbers, async_op=True)
            assert work is not None
            self.wait_for(work)
        return numbers

    def adding(self, *names: str) -> Callable[[Tensor], object]:
        """What leaves the sum of a short tensor over these axes in it."""
        group = self.group(*names)
        if group is None:
            return lambda numbers: numbers  # nobody else
        if group.size() == self.layout.world:
            return self.sum_over_all
        return partial(dist.all_reduce, group=group)

    def broadcast_numbers(self, *numbers: float) -> list[float]:
        """The leader's numbers, for all; everyone gives as many."""
        told = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return self.sum_over_all(told if self.is_leader else torch.zeros_like(told)).tolist()

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Leave the mean over all workers in each of these; of whole numbers, what the leader has."""
        real = [each for each in tensors if each.is_floating_point()]
        whole = [each for each in tensors if not each.is_floating_point()]
        shares = ((real, torch.float32, 1.0 / self.layout.world), (whole, torch.int64, 1))
        for group, kind, factor in shares:
            if not group:
                continue
            total = torch.cat([each.detach().reshape(-1).to("cpu", kind) for each in group])
            if group is whole and not self.is_leader:
                total.zero_()
            self.sum_over_all(total)
            parts = total.mul_(factor).split([each.numel() for each in group])
            for each, part in zip(group, parts, strict=True):
                each.copy_(part.view(each.shape))

    def gather(self, value: Any) -> list[Any]:
        """What each worker tells, which is JSON, by rank."""
        return [value] if self.layout.is_single else gather_json(value)

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        """The tensors of one worker, for all."""
        ours = tensors if self.rank == source else {}
        held = [shard_of(name, tensor) for name, tensor in ours.items()]
        found = {
            name: torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in gather_specs(held).items()
        }
        redistribute(held, [shard_of(name, tensor) for name, tensor in found.items()])
        return found

    def wait_for(self, work: dist.Work) -> None:
        """Wait for a collective; raise once the world is cut.

        gloo (torch 2.13) forgets a message whose receiver announced itself and was gone when it was
        written: the collective then waits for ever, although its connection is closed.
        """
        if self.device.type == "cuda":
            work.wait()
            return
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=_LOOK_S))
            except RuntimeError:  # the time is over, or something went wrong: the last wait tells
                self._check_connected()
        work.wait()

    def open_transport(
        self, *, among: Sequence[int] | None = None, check: Callable[[], object] | None = None
    ) -> Transport:
        """Connections of their own for one thread; everyone calls this at the same point.

        Args:
            among: Only these workers, we among them; on the wire each has its place here as rank. Others
                may at the same time open one among themselves.
            check: May end the waiting for the others by raising.
        """
        ranks = range(self.layout.world) if among is None else among
        transport = connect(
            self._store,
            ranks.index(self.rank),
            len(ranks),
            self.host,
            name=f"wire-{len(self._wires)}-{ranks[0]}",
            within_s=_MEET_S,
            patience_s=NEVER_S,
            check=check or self._check_connected,
        )
        self._wires.append(transport)
        if self.is_disconnected:
            transport.abort()
        return transport

    def _check_connected(self) -> None:
        if self.is_disconnected:
            raise dist.DistNetworkError("The connections were cut.")

    def disconnect(self, *, keep: Collection[int] = ()) -> None:
        """End the connections to the others: whoever waits for them gets an error at once.

        Called by another thread. gloo has no way to give up a collective that waits for a stopped
        or unreachable worker; its sockets do. ``keep``: descriptors of connections that are not
        the groups', made by that thread while they were formed.
        """
        self.is_disconnected = True
        for transport in list(self._wires):
            transport.abort()
        for each in self.sockets:
            if each.descriptor not in keep:
                shut(each)

    def close(self) -> None:
        """Leave the groups."""
        if self._quick is not None:
            self._quick.close()
        self._quick = None
        if dist.is_initialized():
            if self.is_disconnected:
                _keep_for_a_while(list(dist.distributed_c10d._world.pg_map))  # pyright: ignore[reportPrivateUsage]
            dist.destroy_process_group()
        self.mesh = None
        self._joint.clear()


def form_world(
    layout: Layout,
    rank: int,
    store: Any,
    *,
    device: torch.device,
    host: str = "127.0.0.1",
    check: Callable[[], object] | None = None,
) -> World:
    """Meet the others at the store; everyone calls this with the same layout.

    ``host`` is the address at which the others reach this worker; ``check`` may end the waiting for
    them by raising.
    """
    if layout.is_single:
        return World(layout=layout, rank=0, device=device)
    assert store is not None
    _forget_meshes()
    before = open_sockets()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=layout.world,
        timeout=timedelta(seconds=NEVER_S),
    )
    names = tuple(axis for axis in AXES if layout.size_of(axis) > 1)
    shape = tuple(layout.size_of(axis) for axis in names)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    world = World(layout=layout, rank=rank, device=device, mesh=mesh, host=host, _store=store)
    world.group("dp", "fsdp")  # made now, by everyone at once
    for axes in [*((name,) for name in names), ("dp", "fsdp")]:
        _wait_for_ever(world.group(*axes))
    if device.type == "cpu":
        # A few numbers take gloo milliseconds over a network, and a wait in it may never end.
        world._quick = world.open_transport(check=check)  # pyright: ignore[reportPrivateUsage]
    world.sockets = frozenset(open_sockets() - before)
    return world


def _keep_for_a_while(groups: list[Any]) -> None:
    """Let another thread be the last to hold these groups.

    Whoever drops a group waits for its collectives, and one of a cut group may never end.
    """
    timer = threading.Timer(_KEPT_S, groups.clear)
    timer.daemon = True
    timer.start()


def _forget_meshes() -> None:
    """Empty what torch remembers of meshes: one of the next generation may look the same.

    To torch two meshes of the same ranks and names are equal, also when the groups of the first are
    gone; cut tensors would then be sent through those.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415 - only if it was used

    forget: Any = debug
    forget._clear_sharding_prop_cache()
    planners: Any = _redistribute
    planners.clear_redistribute_planner_cache()
    planners._gen_transform_infos.cache_clear()


def _wait_for_ever(group: Any) -> None:
    """Groups within the first one do not inherit its patience."""
    if group is None:
        return
    set_timeout: Any = dist.distributed_c10d._set_pg_timeout  # pyright: ignore[reportPrivateUsage]
    set_timeout(timedelta(seconds=NEVER_S), group)
