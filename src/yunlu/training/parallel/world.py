"""The workers of one generation: process groups, and this worker's coordinates."""

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

from yunlu.core.errors import TrainingError
from yunlu.planning.layouts import AXES
from yunlu.training.communication.allreduce import doubling_allreduce
from yunlu.training.communication.transport import connect
from yunlu.training.device import (
    abort_groups,
    backend_of,
    bound_device,
    group_backends,
    is_accelerator,
    use_device,
)
from yunlu.training.parallel.gloo_tunnel import secure_gloo
from yunlu.training.parallel.p2p_groups import form_p2p_groups
from yunlu.training.parallel.redistribute import gather_json, gather_specs, redistribute
from yunlu.training.parallel.sockets import Socket, close_listeners, open_sockets, shut
from yunlu.training.single_worker import SingleWorld
from yunlu.training.tensor_slices import shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from yunlu.planning.layouts import Layout
    from yunlu.training.communication.transport import Transport
    from yunlu.training.parallel.gloo_tunnel import GlooTunnel
    from yunlu.training.parallel.p2p_groups import P2PGroups

NEVER_S = 24 * 3600.0
"""The watchdog detects hangs much earlier; torch's timeout would only blame the wrong worker."""
_POLL_S = 0.25
_KEEP_GROUPS_S = 60.0
_MEET_S = 600.0
"""Building a large model takes minutes; lost workers are disconnected earlier."""


@dataclass(kw_only=True)
class World(SingleWorld):
    """All workers that take part in a step."""

    mesh: DeviceMesh | None = None
    """Mesh over the axes of size above 1, in the order of ``AXES``."""
    sockets: frozenset[Socket] = frozenset()
    """Connections to other workers; ``disconnect`` closes them."""
    p2p_groups: P2PGroups | None = None
    """Of the pipeline, between devices."""
    is_disconnected: bool = False
    host: str = "127.0.0.1"
    """Address at which other workers reach this one."""
    async_obstacle: str = "no process here can start servers"
    """Why its workers cannot switch to asynchronous training; empty if they can."""
    can_exclude_workers: bool = False
    """Whether stragglers can be excluded while the others continue."""
    secret: bytes = b""
    """Known to its workers only: they prove it to each other."""
    _tunnel: GlooTunnel | None = None
    _store: Any = None
    _wires: list[Transport] = field(default_factory=list[Any])
    _quick: Transport | None = None
    _sums: int = 0
    _joint: dict[tuple[str, ...], Any] = field(default_factory=dict[tuple[str, ...], Any])

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host of each worker, by address."""
        return (self.host,) * self.layout.world if self._quick is None else self._quick.hosts

    def axis(self, *names: str) -> DeviceMesh | None:
        """The mesh of these axes, in the order of ``AXES``; None if all have size 1."""
        axes = tuple(name for name in AXES if name in names and self.layout.size_of(name) > 1)
        return None if self.mesh is None or not axes else self.mesh[axes]

    def group(self, *names: str) -> Any:
        """The process group of these axes; None if it has only this worker."""
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
        """Sum over all workers, in place."""
        if self._quick is not None and not is_accelerator(numbers.device):
            self._sums = (self._sums + 1) % (1 << 32)
            doubling_allreduce(self._quick, numbers.view(-1), tag=self._sums)
        elif not self.layout.is_single:
            work = dist.all_reduce(numbers, async_op=True)
            assert work is not None
            self.wait_for(work, on_device=is_accelerator(numbers.device))
        return numbers

    def adding(self, *names: str) -> Callable[[Tensor], object]:
        """A function that sums a short tensor over these axes, in place."""
        group = self.group(*names)
        if group is None:
            return lambda numbers: numbers  # no other workers
        if group.size() == self.layout.world:
            return self.sum_over_all
        return partial(dist.all_reduce, group=group)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average these tensors over all workers, in place; integer tensors get the leader's values."""
        real = [tensor for tensor in tensors if tensor.is_floating_point()]
        integers = [tensor for tensor in tensors if not tensor.is_floating_point()]
        shares = ((real, torch.float32, 1.0 / self.layout.world), (integers, torch.int64, 1))
        for group, kind, factor in shares:
            if not group:
                continue
            total = torch.cat([tensor.detach().reshape(-1).to("cpu", kind) for tensor in group])
            if group is integers and not self.is_leader:
                total.zero_()
            self.sum_over_all(total)
            parts = total.mul_(factor).split([tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def gather(self, value: Any) -> list[Any]:
        """JSON values of all workers, by rank."""
        return [value] if self.layout.is_single else gather_json(value)

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        """Broadcast the tensors of one worker."""
        local = tensors if self.rank == source else {}
        held = [shard_of(name, tensor) for name, tensor in local.items()]
        received = {
            name: torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in gather_specs(held).items()
        }
        redistribute(held, [shard_of(name, tensor) for name, tensor in received.items()])
        return received

    def wait_for(self, work: dist.Work, *, on_device: bool | None = None) -> None:
        """Wait for a collective; raise once the world is disconnected.

        ``on_device``: whether its tensors are on an accelerator; those of most are where the worker is.

        gloo (torch 2.13) drops a message whose receiver announced itself and was gone when it was
        written: the collective then blocks for ever, although its connection is closed.
        """
        if is_accelerator(self.device) if on_device is None else on_device:
            work.wait()  # of the stream, not of this thread; ``disconnect`` aborts it
            return
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=_POLL_S))
            except RuntimeError:  # timeout, or an error that the final wait raises
                self.check_connected()
        work.wait()

    def open_transport(
        self, *, among: Sequence[int] | None = None, check: Callable[[], object] | None = None
    ) -> Transport:
        """Open separate connections for one thread; all workers call this at the same point.

        Args:
            among: Only these workers, we among them; on the wire each has its place here as rank. Others
                may at the same time open one among themselves.
            check: May raise to abort the wait for other workers.
        """
        ranks = range(self.layout.world) if among is None else among
        transport = connect(
            self._store,
            ranks.index(self.rank),
            len(ranks),
            self.host,
            name=f"wire-{len(self._wires)}-{ranks[0]}",
            secret=self.secret,
            within_s=_MEET_S,
            patience_s=NEVER_S,
            check=check or self.check_connected,
        )
        self._wires.append(transport)
        if self.is_disconnected:
            transport.abort()
        return transport

    def check_connected(self) -> None:
        """Raise once the world is disconnected: what a device computed since then means nothing."""
        if self.is_disconnected:
            raise dist.DistNetworkError("The connections were cut.")

    def disconnect(self, *, keep: Collection[int] = ()) -> None:
        """Close the connections to other workers: pending waits fail immediately.

        Called by another thread. gloo cannot abort a collective that waits for a stopped or
        unreachable worker; closing its sockets does. ``keep``: descriptors of connections that do not
        belong to the groups, opened by that thread meanwhile.
        """
        self.is_disconnected = True
        for transport in list(self._wires):
            transport.abort()
        for connection in self.sockets:
            if connection.descriptor not in keep:
                shut(connection)
        if dist.is_initialized():
            abort_groups(self.device, list(dist.distributed_c10d._world.pg_map))  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        """Destroy the process groups."""
        if self._quick is not None:
            self._quick.close()
        self._quick = None
        if dist.is_initialized():
            if self.is_disconnected:
                _keep_groups(list(dist.distributed_c10d._world.pg_map))  # pyright: ignore[reportPrivateUsage]
            dist.destroy_process_group()
        if self._tunnel is not None:
            self._tunnel.close()
        self._tunnel = self.mesh = self.p2p_groups = None
        self._joint.clear()


def form_world(
    layout: Layout,
    rank: int,
    store: Any,
    *,
    device: torch.device,
    secret: bytes,
    trusts_network: bool = False,
    host: str = "127.0.0.1",
    check: Callable[[], object] | None = None,
) -> World:
    """Form a world with the other workers; all call this with the same layout.

    They prove the ``secret`` to each other. ``trusts_network``: process groups between machines may be
    open to anybody there. ``host`` is the address at which the others reach this worker; ``check`` may
    end the waiting for them by raising.
    """
    if layout.is_single:
        return World(layout=layout, rank=0, device=device)
    assert store is not None
    _clear_mesh_caches()
    before = open_sockets()
    gloo_store, tunnel = secure_gloo(
        store, rank, layout.world, host, secret, trusts_network=trusts_network
    )
    try:
        mesh = _form_groups(layout, rank, gloo_store, device, is_tunnelled=tunnel is not None)
        world = World(
            layout=layout,
            rank=rank,
            device=device,
            mesh=mesh,
            host=host,
            secret=secret,
            _tunnel=tunnel,
            _store=store,
        )
        world.group("dp", "fsdp")  # created now, by all workers at once
        close_listeners(before, keep=tunnel.listeners if tunnel is not None else ())
        world.p2p_groups = _form_p2p_groups(world)
        for axes in [*((name,) for name in mesh.mesh_dim_names or ()), ("dp", "fsdp")]:
            _disable_timeout(world.group(*axes))
        # gloo takes milliseconds for a few numbers over a network, and a wait in it may never end.
        # On accelerators too: a few numbers of the host then never wait for the device.
        world._quick = world.open_transport(check=check)  # pyright: ignore[reportPrivateUsage]
    except BaseException:
        if tunnel is not None:
            tunnel.close()
        raise
    world.sockets = frozenset(open_sockets() - before)
    return world


def _form_groups(
    layout: Layout, rank: int, store: Any, device: torch.device, *, is_tunnelled: bool
) -> DeviceMesh:
    """Default process group, and the mesh over the axes of size above 1."""
    if is_tunnelled and is_accelerator(device):
        raise TrainingError(
            f"{backend_of(device)} does not authenticate or encrypt what it sends between machines.",
            hint="On a network that only you can reach, set communication.trust to network.",
        )
    use_device(device)  # a group takes the current one until it has seen a tensor
    dist.init_process_group(
        group_backends(device),
        store=store,
        rank=rank,
        world_size=layout.world,
        timeout=timedelta(seconds=NEVER_S),
        device_id=bound_device(device),
    )
    names = tuple(axis for axis in AXES if layout.size_of(axis) > 1)
    shape = tuple(layout.size_of(axis) for axis in names)
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def _form_p2p_groups(world: World) -> P2PGroups | None:
    if world.layout.pp == 1 or not is_accelerator(world.device):
        return None
    mesh: Any = world.mesh
    pipelines = mesh.mesh.movedim(mesh.mesh_dim_names.index("pp"), -1).reshape(-1, world.layout.pp)
    return form_p2p_groups(
        world.layout,
        world.rank,
        pipelines.tolist(),
        device=world.device,
        timeout=timedelta(seconds=NEVER_S),
    )


def _keep_groups(groups: list[Any]) -> None:
    """Let another thread drop the last reference to these groups.

    Dropping a group waits for its collectives, and those of a disconnected group may never end.
    """
    timer = threading.Timer(_KEEP_GROUPS_S, groups.clear)
    timer.daemon = True
    timer.start()


def _clear_mesh_caches() -> None:
    """Clear torch's mesh caches: a mesh of the next generation may compare equal.

    Torch treats two meshes of the same ranks and names as equal, even if the groups of the first are
    gone; distributed tensors would then use those groups.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug  # noqa: PLC0415 - only if it was used

    forget: Any = debug
    forget._clear_sharding_prop_cache()
    planners: Any = _redistribute
    planners.clear_redistribute_planner_cache()
    planners._gen_transform_infos.cache_clear()


def _disable_timeout(group: Any) -> None:
    """Subgroups do not inherit the timeout of the default group."""
    if group is None:
        return
    set_timeout: Any = dist.distributed_c10d._set_pg_timeout  # pyright: ignore[reportPrivateUsage]
    set_timeout(timedelta(seconds=NEVER_S), group)
