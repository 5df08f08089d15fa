"""Layout-dependent part of a plan: made for the first time, and again after a resize."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from yunlu.core.errors import JobError, ModelError
from yunlu.hardware.fleet import LOOPBACK, PCIE
from yunlu.planning.collectives import OWN_MESSAGES, list_exchanges
from yunlu.planning.layouts import (
    NOT_EXAMINED,
    Layout,
    SplitConstraints,
    WorkerShare,
    choose_layout,
    count_devices,
    fits,
    layout_from,
    refuse_conflicts,
    replan,
    replan_with_reason,
    restrict,
    worker_bytes,
    worker_share,
)
from yunlu.planning.predict.local import STEP_PARTS, StepTime, compose_step

if TYPE_CHECKING:
    from yunlu.hardware.fleet import Machine
    from yunlu.planning.plan import Plan, Profile, StepSettings
    from yunlu.spec.job import Job

MEMORY_SHARE = 0.6
"""Share of the free memory that a plan may use: activations vary from batch to batch."""
_MICROS_PER_STAGE = 4
"""Micro-batches per pipeline stage: the bubble is then at most a fifth of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A layout with everything that depends on it."""

    batch: int
    """Global batch, in samples."""
    layout: Layout
    reason: str
    devices: int
    """Requested devices."""
    facts: SplitConstraints
    share: WorkerShare
    settings: StepSettings
    reasons: dict[str, str]
    """Why settings differ from those of one worker; of a searched layout, why each is as it is."""
    room_bytes: float
    """Memory that all workers of a CPU, or the one worker of a GPU, may use."""
    process_bytes: float
    """Memory of a worker besides weights, gradients, state and activations."""


def optimizer_state_bytes(job: Job, trainable: int) -> float:
    """Optimiser state of so many weights."""
    state = float(job.train.optimizer.traits.state_bytes * trainable)
    if job.train.optimizer.state == "8bit":
        state *= 0.26  # a byte each, and a scale for every block of 256
    return state


def constraints_of(job: Job, profile: Profile) -> SplitConstraints:
    """Constraints of the model, without the axes that the job excludes."""
    facts = profile.facts or SplitConstraints(
        parameters=profile.parameters,
        trainable=profile.trainable,
        state_bytes=optimizer_state_bytes(job, profile.trainable),
        activation_bytes_per_sample=profile.activation_bytes_per_sample,
        why_not={"tp": NOT_EXAMINED, "pp": NOT_EXAMINED},
    )
    return restrict(facts, job)


def split_work(job: Job, machine: Machine, profile: Profile, *, batch: int) -> Split:
    """Choose a layout, or check the requested one, and adapt the measured settings to it."""
    gpus = machine.gpus
    devices = count_devices(job, gpus=gpus)
    if devices > 1:
        refuse_conflicts(job, Layout(dp=devices, zero1=job.layout.zero1))
    if 0 < gpus < devices:
        raise JobError(
            f"{devices} devices are asked for, and this machine has {gpus} GPUs.",
            hint=f"say devices: {gpus}; others can join from other machines with `yunlu join`",
        )
    refuse_conflicts(job, layout_from(job.layout, job.layout.sizes))
    device, limit = machine.best_device, job.train.memory_gb
    facts = constraints_of(job, profile).model_copy(update={"on_cpu": device.kind == "cpu"})
    room = device.memory_bytes * MEMORY_SHARE if limit == "auto" else limit * 1e9
    process = max(profile.resident_bytes - facts.weight_bytes, 0.0)
    worker_room = room_of_worker(room, process, devices, is_shared=device.kind == "cpu")
    if devices == 1:  # whether it fits is found by measuring
        worker_room = math.inf
    layout, reason = choose_layout(
        devices, facts, batch=batch, room_bytes=worker_room, wanted=job.layout
    )
    refuse_conflicts(job, layout)
    settings, reasons = suit_settings(
        profile.settings, job, layout, facts, cores=machine.cores, batch=batch,
        room_bytes=worker_room,
    )  # fmt: skip
    if (
        settings.precision == "fp16"
    ):  # measured to be fast: no resize may lead to a layout where it is impossible
        train = job.train.model_copy(update={"precision": "fp16"})
        facts = restrict(facts, job.model_copy(update={"train": train}))
    return Split(
        batch=batch,
        layout=layout,
        reason=reason,
        devices=devices,
        facts=facts,
        share=worker_share(layout, batch=batch, micro_batch=settings.micro_batch),
        settings=settings,
        reasons=reasons,
        room_bytes=room,
        process_bytes=process,
    )


def resplit(plan: Plan, job: Job, *, devices: int, cores: int, nodes: int = 1) -> tuple[Plan, str]:
    """The same plan on another number of devices, and the reason of its layout.

    What is computed stays the same: batch, steps and rates. The prediction stays the first one.
    ``cores`` are those of all nodes together.
    """
    layout, reason = _relayout(plan, job, devices=devices, nodes=nodes)
    fitted = fit_plan(plan, job, layout, cores=cores, nodes=nodes)
    return fitted.model_copy(update={"devices": devices}), reason


def layouts_by_count(plan: Plan, job: Job, *, most: int) -> dict[int, Layout]:
    """For each number of devices up to ``most``, the layout after a resize from the plan's."""
    counts = range(1, most + 1)
    return {count: _relayout(plan, job, devices=count, nodes=1)[0] for count in counts}


def fit_plan(plan: Plan, job: Job, layout: Layout, *, cores: int, nodes: int = 1) -> Plan:
    """The plan under a layout, with the settings for each of its workers.

    What one worker alone may have (a compiled model, precision that adapts) goes where there are
    several, and does not come into a run that was planned without it.
    """
    facts, room = _known_facts(plan, layout.world), _room_of(plan, layout.world, nodes)
    adapts = job.train.adapt_batch
    # Shares that may grow are not split into pieces as small as the first ones.
    batch = plan.batch if adapts is None else max(plan.batch, adapts.max)
    settings, _ = suit_settings(
        plan.alone or plan, job, layout, facts, cores=cores, batch=batch, room_bytes=room
    )
    share = worker_share(layout, batch=plan.batch, micro_batch=settings.micro_batch)
    changes = {
        "layout": layout,
        "accumulation": share.micros,
        "micro_batch": settings.micro_batch,
        "threads": settings.threads,
        "precision": settings.precision if plan.precision == "fp16" else plan.precision,
        "compile": plan.compile if layout.is_single else "none",
        "adapt_precision": plan.adapt_precision and layout.is_single,
    }
    return plan.model_copy(update=changes)


def _relayout(plan: Plan, job: Job, *, devices: int, nodes: int) -> tuple[Layout, str]:
    return replan_with_reason(
        plan.layout, devices, _known_facts(plan, devices), batch=plan.batch,
        room_bytes=_room_of(plan, devices, nodes), pinned=job.layout, nodes=nodes,
    )  # fmt: skip


def _known_facts(plan: Plan, devices: int) -> SplitConstraints:
    if plan.facts is None:
        raise ModelError(
            "This run was planned for one worker, and how its model can be split was not examined.",
            hint=f"start a new run with --devices {devices}",
        )
    return plan.facts


def _room_of(plan: Plan, devices: int, nodes: int) -> float:
    if devices == 1:
        return math.inf
    return room_of_worker(
        plan.room_bytes, plan.process_bytes, devices, nodes=nodes, is_shared=plan.device == "cpu"
    )


def room_of_worker(
    room_bytes: float, process_bytes: float, devices: int, *, nodes: int = 1, is_shared: bool
) -> float:
    """Memory that one of so many workers may use for its part of the model and activations.

    Those of a CPU share its memory; they are forks of one process, so what that one had loaded is
    there once on each node.
    """
    left = max(room_bytes - process_bytes, 0.0)
    return left * nodes / devices if is_shared else left


def suit_settings(
    settings: StepSettings,
    job: Job,
    layout: Layout,
    facts: SplitConstraints,
    *,
    cores: int,
    batch: int,
    room_bytes: float,
) -> tuple[StepSettings, dict[str, str]]:
    """Settings measured on one worker, adapted to several; and why they differ."""
    if layout.is_single:
        return settings, {}
    train, changes, reasons = job.train, dict[str, object](), dict[str, str]()
    if train.threads == "auto":
        changes["threads"] = max(1, min(settings.threads, cores // layout.world))
        reasons["threads"] = f"{cores} cores for {layout.world} workers"
    if train.compile == "auto":
        changes["compile"] = "none"
    is_parted = layout.world > layout.dp or layout.zero1
    if train.precision == "auto" and settings.precision == "fp16" and is_parted:
        changes["precision"] = "fp32"
        reasons["precision"] = f"fp16 does not go with {layout}{' and zero1' * layout.zero1}"
    pinned = train.micro_batch
    micro, reasons["micro_batch"] = _suit_micro_batch(
        settings.micro_batch if pinned == "auto" else pinned, layout, facts, batch=batch,
        room_bytes=room_bytes, is_pinned=pinned != "auto",
    )  # fmt: skip
    return settings.model_copy(update={**changes, "micro_batch": micro}), reasons


def _suit_micro_batch(
    wanted: int,
    layout: Layout,
    facts: SplitConstraints,
    *,
    batch: int,
    room_bytes: float,
    is_pinned: bool,
) -> tuple[int, str]:
    samples = math.ceil(batch / layout.replicas)
    micro, reason = min(wanted, samples), f"{samples} of {batch} samples are each replica's"
    if is_pinned:
        return micro, reason
    if layout.pp > 1:
        smaller = math.ceil(samples / (_MICROS_PER_STAGE * layout.stages))
        micro = min(micro, smaller)
        reason += f"; small, to keep all {layout.stages} stages busy"
    fitted = reason
    while micro > 1:
        share = worker_share(layout, batch=batch, micro_batch=micro)
        if worker_bytes(layout, facts, share) <= room_bytes:
            break
        micro //= 2
        fitted = f"{reason}; no more would fit"
    return micro, fitted


def time_step(split: Split, profile: Profile, *, cores: int, is_cpu: bool) -> StepTime:
    """One step from a profile's passes: share of each replica, communication, update, data loading.

    Workers that share a machine's cores slow each other down as soon as they want more than it has.
    Sending is counted in full, though some of it goes on during the backward pass.
    """
    layout, share, threads = split.layout, split.share, split.settings.threads
    crowding = slower = 1.0
    if is_cpu and not layout.is_single:
        crowding = max(1.0, layout.world * threads / cores)
        slower = crowding * profile.settings.threads / threads
    # Small micro-batches cost more per sample than the probe's share; the planned size is
    # probed, so this only interpolates when the user re-plans.
    micro_s = slower * profile.probe_s * share.micro_batch / profile.probe_samples
    link = profile.link or (LOOPBACK if is_cpu else PCIE)
    talk_s: dict[str, float] = dict.fromkeys(("dp", "fsdp", "tp", "pp"), 0.0)
    for exchange in list_exchanges(layout, split.facts, share):
        talk_s[exchange.axis] += crowding * exchange.seconds(link)
    own_s = micro_s / (layout.tp * layout.pp)
    stage_s = own_s + talk_s["tp"] / share.micros
    messages_s = 0.0 if layout.is_single else OWN_MESSAGES * link.message_s
    samples = math.ceil(split.batch / layout.replicas)
    return compose_step(
        micros=share.micros,
        own_s=own_s,
        stage_s=stage_s,
        slowest_s=stage_s,
        pipe_s=talk_s["pp"] / share.micros,
        waiting=(layout.pp - 1) / layout.stages_per_rank,
        data_s=talk_s["dp"] + talk_s["fsdp"],
        optimizer_s=slower * profile.update_s / _owners(layout),
        input_s=crowding * samples * profile.load_s_per_sample,
        other_s=crowding * (profile.own_s + messages_s),
    )


_TALKS = {"dp": "dp", "fsdp": "dp", "tp": "tp", "pp": "pp"}
"""Axis of an exchange, and the part of a step that it counts to."""


def fewest_devices(plan: Plan) -> int:
    """The fewest devices whose memory holds the model, by the plan; its own number at most."""
    if plan.facts is None:
        return 1
    for devices in _smaller(plan.devices):
        layout = _resized(plan, devices)
        room = room_of_worker(
            plan.room_bytes, plan.process_bytes, devices, is_shared=plan.device == "cpu"
        )
        if layout is not None and layout.world == devices and fits(layout, plan.facts, room):
            return devices
    return plan.devices


def predict_by_count(plan: Plan) -> dict[int, StepTime]:
    """The plan's predicted step on its devices and on fewer, before any was measured.

    Empty where the plan does not tell the parts of a step apart. Parts follow the work and the bytes
    that the layout of each number sends. What a plan of several machines says of exchanges holds
    between machines: sizes that need fewer machines are left out, except a device alone.
    """
    facts, parts = plan.facts, plan.prediction.step_parts
    if facts is None or set(parts) != set(STEP_PARTS):
        return {}
    per_node, result = plan.hardware.devices_per_node, dict[int, StepTime]()
    nodes = math.ceil(plan.devices / per_node)
    for devices in (*_smaller(plan.devices), plan.devices):
        layout = plan.layout if devices == plan.devices else _resized(plan, devices)
        is_known = devices == 1 or math.ceil(devices / per_node) == nodes
        if layout is not None and layout.world == devices and is_known:
            result[devices] = _step_on(plan, facts, layout)
    return result


def _smaller(devices: int) -> list[int]:
    """Powers of two below: enough to see how a run scales."""
    return [1 << power for power in range((devices - 1).bit_length())]


def _resized(plan: Plan, devices: int) -> Layout | None:
    """Its layout on fewer devices; None where there is none."""
    assert plan.facts is not None
    room = _room_of(plan, devices, 1)
    try:
        return replan(plan.layout, devices, plan.facts, batch=plan.batch, room_bytes=room)
    except (JobError, ModelError):
        return None


def _step_on(plan: Plan, facts: SplitConstraints, layout: Layout) -> StepTime:
    """The predicted step, with each part in proportion to what another layout computes and sends."""
    parts, old = plan.prediction.step_parts, plan.layout
    if layout == old:
        return StepTime(**{f"{name}_s": seconds for name, seconds in parts.items()})
    share = worker_share(layout, batch=plan.batch, micro_batch=plan.micro_batch)
    before = WorkerShare(micro_batch=plan.micro_batch, micros=plan.accumulation)
    more = math.ceil(plan.batch / layout.replicas) / math.ceil(plan.batch / old.replicas)
    compute_s = parts["compute"] * more * old.tp * old.pp / (layout.tp * layout.pp)
    talk_s = _scaled_talk(plan, facts, layout, share, before)
    own_s = compute_s / share.micros
    stage_s = own_s + talk_s["tp"] / share.micros
    return compose_step(
        micros=share.micros,
        own_s=own_s,
        stage_s=stage_s,
        slowest_s=stage_s,
        pipe_s=talk_s["pp"] / share.micros,
        waiting=(layout.pp - 1) / layout.stages_per_rank,
        data_s=talk_s["dp"],
        optimizer_s=parts["optimizer"] * _owners(old) / _owners(layout),
        input_s=parts["input"] * more,
        other_s=parts["other"],
    )


def _scaled_talk(
    plan: Plan, facts: SplitConstraints, layout: Layout, share: WorkerShare, before: WorkerShare
) -> dict[str, float]:
    """Seconds of each kind of exchange: as predicted, by bytes; over a usual link where none were."""
    link = LOOPBACK if plan.device == "cpu" else PCIE
    old_bytes: dict[str, float] = dict.fromkeys(("dp", "tp", "pp"), 0.0)
    for exchange in list_exchanges(plan.layout, facts, before):
        old_bytes[_TALKS[exchange.axis]] += exchange.sent_bytes
    result = dict.fromkeys(old_bytes, 0.0)
    for exchange in list_exchanges(layout, facts, share):
        kind = _TALKS[exchange.axis]
        seconds = exchange.seconds(link)
        if kind != "pp" and old_bytes[kind]:  # those of a pipeline were counted with its bubble
            seconds = plan.prediction.step_parts[kind] * exchange.sent_bytes / old_bytes[kind]
        result[kind] += seconds
    return result


def _owners(layout: Layout) -> int:
    """Workers that share out the update of one copy of the weights."""
    return layout.tp * layout.pp * layout.fsdp * (layout.dp if layout.zero1 else 1)
