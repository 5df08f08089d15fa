"""Redistribution of state between live workers, in large messages.

All workers exchange descriptions of held and target shards as JSON; each computes the same list of
transfers; then the bytes are sent directly. No pickle is involved, so no received data can run code.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from yunlu.core.errors import CheckpointError
from yunlu.core.limits import decode_json
from yunlu.training.device import message_device
from yunlu.training.tensor_slices import TensorShard, TensorSlice, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CHUNK_BYTES = 64 << 20
_ALIGN_BYTES = 16
_SMALLEST_BYTES = 1 << 20


class UncoveredError(CheckpointError):
    """No worker holds some part of the state."""

    def __init__(self, names: Sequence[str]) -> None:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        super().__init__(
            f"No worker holds all of {len(names)} tensors: {shown}.",
            hint="The state has to come from a checkpoint.",
        )
        self.names = tuple(names)


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """Description of a shard, without its tensor."""

    name: str
    shape: tuple[int, ...]
    region: TensorSlice
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of one region between two workers."""

    source: int
    destination: int
    name: str
    region: TensorSlice
    """Region within the source's shard."""
    stored: int
    """Index of the source's shard."""
    target: int
    """Index of the destination's shard."""
    dtype: torch.dtype
    """Type at the source."""

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return self.region.volume * self.dtype.itemsize


def redistribute(
    held: Iterable[TensorShard], targets: Iterable[TensorShard], *, group: Any = None
) -> None:
    """Fill the target shards from the shards held by all workers; every worker of the group calls this.

    Targets share no memory with held shards. Raises ``UncoveredError`` on all workers alike if no
    worker holds some target region; then no tensor is changed.
    """
    giving, taking = list(held), list(targets)
    gathered = gather_json({"held": _describe(giving), "targets": _describe(taking)}, group=group)
    everyone_held = [_parse_shards(described["held"]) for described in gathered]
    everyone_wants = [_parse_shards(described["targets"]) for described in gathered]
    size, rank = len(gathered), dist.get_rank(group) if len(gathered) > 1 else 0
    limit = max(_SMALLEST_BYTES, CHUNK_BYTES // size)
    transfers = plan_transfers(everyone_held, everyone_wants, limit_bytes=limit)
    with torch.no_grad():
        for transfer in transfers:
            if transfer.source == transfer.destination == rank:
                _copy_local(giving, taking, transfer)
        _send_all(giving, taking, transfers, rank=rank, limit_bytes=limit, group=group)


def gather_specs(held: Iterable[TensorShard]) -> dict[str, TensorSpec]:
    """Specs of all tensors held anywhere; every worker calls this."""
    return {
        part.name: TensorSpec(part.shape, part.dtype)
        for described in gather_json(_describe(held))
        for part in _parse_shards(described)
    }


def plan_transfers(
    held: Sequence[Sequence[ShardMetadata]],
    targets: Sequence[Sequence[ShardMetadata]],
    *,
    limit_bytes: int = CHUNK_BYTES,
) -> list[Transfer]:
    """Plan which worker sends which region to whom: local data first, then balanced over holders.

    Every element of every target region is sent exactly once. Deterministic in the arguments, so
    that all workers compute the same plan.
    """
    holders: dict[str, list[tuple[int, int, ShardMetadata]]] = defaultdict(list)
    for rank, parts in enumerate(held):
        for index, part in enumerate(parts):
            if not part.region.is_empty:
                holders[part.name].append((rank, index, part))
    sent_bytes = [0] * len(held)
    transfers: list[Transfer] = []
    missing: set[str] = set()
    for rank, parts in enumerate(targets):
        for index, part in enumerate(parts):
            _check_shapes(part, holders[part.name])
            left = [] if part.region.is_empty else [part.region]
            candidates = sorted(
                holders[part.name], key=lambda one: (one[0] != rank, sent_bytes[one[0]], one[:2])
            )
            for source, stored, source_shard in candidates:
                taken = [
                    common
                    for region in left
                    if not (common := region.intersect(source_shard.region)).is_empty
                ]
                left = [rest for region in left for rest in region.subtract(source_shard.region)]
                for region in _split(taken, source_shard.dtype.itemsize, limit_bytes):
                    transfer = Transfer(
                        source, rank, part.name, region, stored, index, source_shard.dtype
                    )
                    sent_bytes[source] += transfer.nbytes if source != rank else 0
                    transfers.append(transfer)
                if not left:
                    break
            if left:
                missing.add(part.name)
    if missing:
        raise UncoveredError(sorted(missing))
    return transfers


def minimum_over_workers(number: int) -> int:
    """Minimum over all workers: they synchronise in every micro-batch."""
    if not dist.is_initialized():
        return number
    minimum = torch.tensor(number)
    dist.all_reduce(minimum, op=dist.ReduceOp.MIN)
    return int(minimum)


def gather_json(value: Any, *, group: Any = None) -> list[Any]:
    """Values of all workers of the group, by rank."""
    if not dist.is_initialized():
        return [value]
    device = _transfer_device(group)
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    count = dist.get_world_size(group)
    sizes = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor(data.numel(), device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    received = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(received, padded, group=group)
    return [_parse(answer[:length]) for answer, length in zip(received, lengths, strict=True)]


def broadcast_json(value: Any, *, source: int, group: Any = None) -> Any:
    """The source's value, on every worker of the group; ``source`` counts within the group."""
    if not dist.is_initialized():
        return value
    device = _transfer_device(group)
    is_source = dist.get_rank(group) == source
    encoded = json.dumps(value).encode() if is_source else b""
    length = torch.tensor(len(encoded), device=device)
    dist.broadcast(length, group=group, group_src=source)
    data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if is_source:
        data.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    dist.broadcast(data, group=group, group_src=source)
    return _parse(data)


def _send_all(
    giving: list[TensorShard],
    taking: list[TensorShard],
    transfers: list[Transfer],
    *,
    rank: int,
    limit_bytes: int,
    group: Any,
) -> None:
    out, into = _messages(transfers, rank, limit_bytes)
    device = _transfer_device(group) if transfers and dist.is_initialized() else torch.device("cpu")
    # In rounds: each worker posts its next send and receive for every peer before it waits.
    for number in range(max(map(len, [*out.values(), *into.values()]), default=0)):
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, list[Transfer]]] = []
        for peer in sorted({*out, *into}):
            if number < len(into.get(peer, ())):
                message = into[peer][number]
                buffer = torch.empty(_length(message), dtype=torch.uint8, device=device)
                arriving.append((buffer, message))
                operations.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer))
            if number < len(out.get(peer, ())):
                buffer = _pack(giving, out[peer][number], device)
                operations.append(dist.P2POp(dist.isend, buffer, group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for buffer, message in arriving:
            _unpack(buffer, message, taking)


_Messages = dict[int, list[list[Transfer]]]


def _messages(
    transfers: list[Transfer], rank: int, limit_bytes: int
) -> tuple[_Messages, _Messages]:
    """Outgoing and incoming messages by peer; each is filled up to the limit."""
    out: _Messages = defaultdict(list)
    into: _Messages = defaultdict(list)
    filled: dict[int, int] = {}
    for transfer in transfers:
        if transfer.source == transfer.destination:
            continue
        if transfer.source == rank:
            messages = out[transfer.destination]
        elif transfer.destination == rank:
            messages = into[transfer.source]
        else:
            continue
        length = _aligned(transfer.nbytes)
        if not messages or filled[id(messages)] + length > limit_bytes:
            messages.append([])
            filled[id(messages)] = 0
        messages[-1].append(transfer)
        filled[id(messages)] += length
    return out, into


def _length(message: list[Transfer]) -> int:
    return sum(_aligned(transfer.nbytes) for transfer in message)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _pack(giving: list[TensorShard], message: list[Transfer], device: torch.device) -> Tensor:
    buffer = torch.zeros(_length(message), dtype=torch.uint8, device=device)
    for transfer, view in _views(buffer, message):
        shard = giving[transfer.stored]
        view.copy_(shard.tensor[transfer.region.within(shard.region)])
    return buffer


def _unpack(buffer: Tensor, message: list[Transfer], taking: list[TensorShard]) -> None:
    for transfer, view in _views(buffer, message):
        shard = taking[transfer.target]
        shard.tensor[transfer.region.within(shard.region)].copy_(view)


def _views(buffer: Tensor, message: list[Transfer]) -> Iterable[tuple[Transfer, Tensor]]:
    start = 0
    for transfer in message:
        data = buffer[start : start + transfer.nbytes]
        yield transfer, data.view(transfer.dtype).view(transfer.region.size)
        start += _aligned(transfer.nbytes)


def _copy_local(giving: list[TensorShard], taking: list[TensorShard], transfer: Transfer) -> None:
    source, target = giving[transfer.stored], taking[transfer.target]
    target.tensor[transfer.region.within(target.region)].copy_(
        source.tensor[transfer.region.within(source.region)]
    )


def _split(
    regions: Iterable[TensorSlice], itemsize: int, limit_bytes: int
) -> Iterable[TensorSlice]:
    """Halve regions until each fits a message."""
    for region in regions:
        if region.volume * itemsize <= max(limit_bytes, itemsize):
            yield region
            continue
        # Along the first possible dimension: slices stay contiguous.
        dim = next(dim for dim, length in enumerate(region.size) if length > 1)
        half = region.size[dim] // 2
        first = TensorSlice(region.offset, (*region.size[:dim], half, *region.size[dim + 1 :]))
        yield from _split((first, *region.subtract(first)), itemsize, limit_bytes)


def _check_shapes(part: ShardMetadata, holders: Iterable[tuple[int, int, ShardMetadata]]) -> None:
    for _, _, source_shard in holders:
        if source_shard.shape != part.shape:
            raise CheckpointError(
                f"{part.name} is {list(part.shape)} on one worker and {list(source_shard.shape)} on another.",
                hint="All workers must train the same model.",
            )


def _describe(shards: Iterable[TensorShard]) -> list[Any]:
    return [
        [
            shard.name,
            shard.shape,
            shard.region.offset,
            shard.region.size,
            str(shard.tensor.dtype).removeprefix("torch."),
        ]
        for shard in shards
    ]


def _parse_shards(described: list[Any]) -> list[ShardMetadata]:
    return [
        ShardMetadata(name, tuple(shape), TensorSlice(tuple(offset), tuple(size)), _DTYPES[dtype])
        for name, shape, offset, size, dtype in described
    ]


def _parse(data: Tensor) -> Any:
    return decode_json(data.cpu().numpy().tobytes())


def _transfer_device(group: Any) -> torch.device:
    """Device of the tensors to send."""
    return message_device(group)


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
