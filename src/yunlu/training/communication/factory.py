"""Factory of communicators for a setting."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from yunlu.core.settings import read_site
from yunlu.planning.communication.methods import one_bit_from
from yunlu.planning.communication.step_forecast import MethodSetting
from yunlu.training.communication.allreduce import ALGORITHMS, group_ranks, server_allreduce
from yunlu.training.communication.allreducer import (
    ThreadedAllReducer,
    TorchAllReducer,
    split_buckets,
    starts_of,
)
from yunlu.training.communication.codecs.codec import make_codec
from yunlu.training.communication.communicator import LocalUpdateCommunicator, SyncCommunicator
from yunlu.training.communication.compressed import make_compressed_allreducer
from yunlu.training.communication.local_updates import (
    METHODS,
    LocalRules,
    Site,
    SiteFollower,
    WeightAveraging,
)
from yunlu.training.communication.powersgd import MatrixSlice, as_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from yunlu.spec.communication import CommunicationSpec
    from yunlu.training.communication.allreduce import AllReduceFunction
    from yunlu.training.communication.allreducer import AllReducer
    from yunlu.training.communication.communicator import Communicator, ExpectedStep
    from yunlu.training.communication.transport import Transport
    from yunlu.training.parallel.world import World


def open_communicator(
    setting: MethodSetting,
    spec: CommunicationSpec,
    world: World,
    model: nn.Module,
    expected: Callable[[int], ExpectedStep],
    *,
    is_slow: bool = False,
    clip_norm: float | None = None,
) -> Communicator:
    """Connect the workers of a world; called by all of them at the same point.

    Args:
        setting: The chosen method.
        spec: Further options of the job.
        world: The workers.
        model: Its weights or gradients are communicated.
        expected: Samples of a step, counted from 0.
        is_slow: Whether few connections saturate the links.
        clip_norm: Gradient clipping norm; outliers are also clipped before compression.
    """

    def open_transport(among: Sequence[int] | None = None) -> Transport:
        transport = world.open_transport(among=among)
        if is_slow:
            # BBR, the default of many systems, leaves a slow link idle between short messages.
            transport.control_congestion("reno")
        return transport

    if setting.method in METHODS:
        sites = _find_sites(spec, world)
        if len(sites) > 1:
            return _open_local(
                setting, spec, open_transport, model, expected, rank=world.rank, sites=sites
            )
        setting = MethodSetting(method="direct", bucket_bytes=setting.bucket_bytes)
    allreducer = (
        TorchAllReducer(world.group("dp"), world.wait_for)
        if (setting.method, setting.codec) == ("all-reduce", "none")
        else _open_summation(setting, spec, open_transport, model, clip_norm)
    )
    return SyncCommunicator(
        world,
        allreducer,
        bucket_bytes=setting.bucket_bytes,
        holds_moments=setting.codec == "onebit",
    )


def _find_sites(spec: CommunicationSpec, world: World) -> list[list[int]]:
    """Workers that step together: sites if the job asks for them, else each worker alone."""
    if spec.together == "worker":
        return [[rank] for rank in range(world.layout.world)]
    return group_ranks(world.gather(read_site() or world.host))


def _open_local(
    setting: MethodSetting,
    spec: CommunicationSpec,
    open_transport: Callable[..., Transport],
    model: nn.Module,
    expected: Callable[[int], ExpectedStep],
    *,
    rank: int,
    sites: list[list[int]],
) -> Communicator:
    codec = None if setting.codec == "none" else make_codec(setting.codec, share=spec.keep)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    rules = local_rules_of(setting, spec)
    site_ranks = next(ranks for ranks in sites if rank in ranks)
    note_sums = ThreadedAllReducer(open_transport(), _without_key(ALGORITHMS["doubling"]))
    if len(site_ranks) == 1 and all(len(ranks) == 1 for ranks in sites):
        return LocalUpdateCommunicator(
            WeightAveraging(weights, open_transport(), rules, codec=codec), note_sums, expected
        )
    site = Site(
        ThreadedAllReducer(open_transport(site_ranks), _without_key(ALGORITHMS["direct"])),
        ThreadedAllReducer(open_transport(site_ranks), _without_key(ALGORITHMS["doubling"])),
    )
    site_transport = open_transport(site_ranks)
    if rank == site_ranks[0]:
        leader_transport = open_transport([ranks[0] for ranks in sites])
        averaging = WeightAveraging(
            weights, leader_transport, rules, codec=codec, site_transport=site_transport
        )
    else:
        averaging = SiteFollower(weights, site_transport, rules)
    return LocalUpdateCommunicator(averaging, note_sums, expected, site)


def local_rules_of(setting: MethodSetting, spec: CommunicationSpec) -> LocalRules:
    """Schedule of local updates."""
    defaults = METHODS[setting.method]
    start = defaults.from_step if spec.start == "auto" else spec.start
    return LocalRules(
        every=setting.every,
        from_step=start if setting.method == "post-local" else 0,
        delay=min(setting.delay_steps, setting.every),
        parts=min(spec.parts, setting.every),
        outer_lr=defaults.outer_lr if spec.outer_lr == "auto" else spec.outer_lr,
        outer_momentum=(
            defaults.outer_momentum if spec.outer_momentum == "auto" else spec.outer_momentum
        ),
    )


def start_step_of(
    setting: MethodSetting, spec: CommunicationSpec, *, steps: int, memory_steps: int
) -> int:
    """Step from which the setting applies; before it, workers are synchronous or send more bits."""
    if setting.method == "post-local":
        return local_rules_of(setting, spec).from_step
    if setting.codec != "onebit" or setting.method in METHODS:
        return 0
    return one_bit_from(steps, memory_steps=memory_steps) if spec.start == "auto" else spec.start


def _open_summation(
    setting: MethodSetting,
    spec: CommunicationSpec,
    open_transport: Callable[[], Transport],
    model: nn.Module,
    clip_norm: float | None,
) -> AllReducer:
    if setting.codec == "powersgd":
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        return make_compressed_allreducer(
            open_transport(),
            "powersgd",
            rank=setting.rank,
            matrices=matrices_of(weights, setting.bucket_bytes),
            clip_norm=clip_norm,
        )
    if setting.codec != "none":
        return make_compressed_allreducer(
            open_transport(), setting.codec, share=spec.keep, clip_norm=clip_norm
        )
    return ThreadedAllReducer(open_transport(), _without_key(_allreduce_of(setting, spec)))


def _allreduce_of(setting: MethodSetting, spec: CommunicationSpec) -> AllReduceFunction:
    if setting.method == "server" and spec.servers != "auto":
        return partial(server_allreduce, servers=spec.servers)
    return ALGORITHMS[setting.method]


def _without_key(allreduce: AllReduceFunction) -> Callable[[Transport, Tensor, int, int], None]:
    def run(transport: Transport, flat: Tensor, _key: int, tag: int) -> None:
        allreduce(transport, flat, tag=tag)

    return run


def matrices_of(weights: Sequence[nn.Parameter], bucket_bytes: int) -> dict[int, list[MatrixSlice]]:
    """Matrices in the buckets of these weights."""
    matrices: dict[int, list[MatrixSlice]] = {}
    for number, group in enumerate(split_buckets(weights, bucket_bytes)):
        starts, _ = starts_of(group)
        candidates = [as_matrix(start, weight) for weight, start in zip(group, starts, strict=True)]
        matrices[number] = [matrix for matrix in candidates if matrix is not None]
    return matrices
