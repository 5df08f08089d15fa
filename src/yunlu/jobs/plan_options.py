"""Plan options of a job: gathers model, data and the offers within its goal, and calls the search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from yunlu.core.errors import DataError
from yunlu.core.units import estimate_dollars, estimate_time, supported_digit
from yunlu.core.value import Value
from yunlu.hardware.catalog import HERE, Catalog, CatalogError
from yunlu.hardware.skypilot import ASSUMED_NETWORK, SPOT_FLOOR
from yunlu.jobs.calibration import read_calibration, this_machine, usual_start_s
from yunlu.jobs.catalog_store import open_catalog
from yunlu.jobs.dataset_size import block_length, measure_dataset
from yunlu.jobs.model_profile import find_shape
from yunlu.planning.analytic_estimate import name_work
from yunlu.planning.layouts import find_conflicts, layout_from, refuse_conflicts
from yunlu.planning.models.shape import columns_of, stages, tensor_ways
from yunlu.planning.plan import DatasetSize
from yunlu.planning.planner import DEFAULT_BATCH, DEFAULT_EPOCHS, choose_batch
from yunlu.planning.predict.constants import STACKS
from yunlu.planning.predict.memory import StateBytes
from yunlu.planning.predict.query_batch import RECOMPUTE
from yunlu.planning.predict.step_time import step_time
from yunlu.planning.search.layout_search import (
    EVALUATED,
    HardwareConfig,
    LayoutQuery,
    LayoutRules,
    MeasuredThroughput,
    Price,
    TrainingWork,
    group_offers,
    predict_memory,
    search,
)
from yunlu.planning.search.options import PlanError, PlanOptions, give_reasons
from yunlu.planning.search.priced_plan import START_HERE_S, GoalLimits, OptionQuery
from yunlu.planning.search.ranking import (
    choose_options,
    list_candidates,
    price_all,
    rank_candidates,
)
from yunlu.planning.splitting import optimizer_state_bytes
from yunlu.spec.fields import read_span_s
from yunlu.spec.task_traits import traits_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from yunlu.hardware.catalog import Offer
    from yunlu.jobs.model_profile import JobShape
    from yunlu.planning.calibration import Quantity
    from yunlu.planning.large_batch import Rule
    from yunlu.planning.models.shape import ModelShape
    from yunlu.planning.plan import Plan
    from yunlu.planning.predict.query_batch import QueryBatch
    from yunlu.planning.search.ranking import RankedCandidates
    from yunlu.spec.job import GoalSpec, Job

USUAL_DEVICES = 64
MANY_DEVICES = 512
_AUTO_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


class PlanOutcome(Value):
    """A job's options, and every candidate with a price: hours, dollars, hardware."""

    options: PlanOptions
    candidates: tuple[tuple[float, float, str], ...] = ()
    computed_s: float = 0.0
    """CPU seconds of the search."""


def plan_options(
    job: Job, *, top: int = 3, catalog: Catalog | None = None, described: JobShape | None = None
) -> PlanOptions:
    """The best options for a job within its goal; where there are none, the nearest."""
    return search_options(job, top=top, catalog=catalog, described=described).options


def search_options(
    job: Job,
    *,
    top: int = 3,
    catalog: Catalog | None = None,
    everything: bool = False,
    described: JobShape | None = None,
) -> PlanOutcome:
    """As ``plan_options``; with ``everything``, also all candidates, for a plot."""
    began = time.process_time()
    if top < 1:
        raise PlanError(f"top: expected a whole number above 0, got {top}")
    catalog = catalog or open_catalog()
    ask, notes = make_query(job, catalog, described)
    weighed = rank_candidates(ask)
    if not len(weighed.layouts) and (wider := _widen(ask, job)) is not None:
        ask, weighed = wider, rank_candidates(wider)
        notes.append(
            f"{USUAL_DEVICES} devices cannot hold the model: up to {MANY_DEVICES} were tried"
        )
    options = _choose(ask, weighed, catalog, top=top)
    if options.problems:
        advice = _advise(ask, job, catalog, options)
        options = options.model_copy(update={"problems": (*options.problems, *advice)})
    notes += [*note_prices(options), *note_terms(options, ask.prices)]
    notes += dict.fromkeys(text for option in options for text in option.warnings)
    options = options.model_copy(update={"notes": tuple(notes)})
    candidates = list_candidates(ask, weighed) if everything else []
    return PlanOutcome(
        options=options,
        candidates=tuple(candidates),
        computed_s=time.process_time() - began,
    )


def make_query(
    job: Job, catalog: Catalog, described: JobShape | None = None
) -> tuple[OptionQuery, list[str]]:
    """Query of a job's options, and the assumptions made; its model is described, or looked up."""
    described = described or find_shape(job)
    shape, seq = described.shape, _sequence_length(job, described)
    _refuse_layout(job, shape)
    work, batches, notes = _work(job, described, seq)
    notes += [described.note] if described.note else []
    supply = find_offers(job, catalog)
    least, most_devices = _devices(job)
    precision = job.train.precision
    precisions = _AUTO_PRECISIONS if precision == "auto" else (precision,)
    question = LayoutQuery(
        work=work,
        configs=supply.configs,
        rules={
            one_precision: _rules(job, shape, one_precision, batches)
            for one_precision in precisions
        },
        least_devices=least,
        most_devices=most_devices,
    )
    goal, deadline = job.goal, job.goal.deadline
    ask = OptionQuery(
        job=job,
        question=calibrate_here(question, job, batch=batches[0]),
        prices=supply.prices,
        objective=goal.objective,
        limits=GoalLimits(
            budget=goal.budget, deadline_s=None if deadline is None else read_span_s(deadline)
        ),
        counts_tokens=traits_of(job.task).counts_tokens,
        start_here_s=usual_start_s() or START_HERE_S,
        lr_scaling=_scaling(job, batches),
    )
    return ask, [*notes, *note_lone(job), *supply.notes]


def _sequence_length(job: Job, profile: JobShape) -> int:
    if profile.seq is not None:
        return profile.seq
    if not traits_of(job.task).counts_tokens:
        return 1
    wanted = block_length(job)
    return min(wanted, profile.shape.longest) if profile.shape.longest else wanted


def _scaling(job: Job, batches: tuple[int, ...]) -> Rule:
    """How the learning rate scales with the batch: as the job says, else as suits its optimiser."""
    optimizer = job.train.optimizer
    if "scaling" in optimizer.model_fields_set or len(batches) == 1:
        return optimizer.scaling
    return optimizer.traits.scaling


def _work(job: Job, profile: JobShape, seq: int) -> tuple[TrainingWork, tuple[int, ...], list[str]]:
    """Amount of training, and the candidate batches."""
    train, notes = job.train, list[str]()
    amounts: DatasetSize | None = None
    try:
        amounts = measure_dataset(job, seq=seq)
    except DataError:
        if profile.train_samples is not None:
            amounts = DatasetSize(train=profile.train_samples, validation=0, test=0)
        elif train.steps is None:
            raise
        else:
            notes.append("data of unknown size: evaluation is not in the time (say data.samples)")
    columns = columns_of(profile.shape, seq)
    if train.steps is not None:
        batch = train.batch if train.batch != "auto" else DEFAULT_BATCH
        batches: tuple[int, ...] = (batch,)
        samples = float(train.steps * batch)
    else:
        assert amounts is not None
        epochs = train.epochs or DEFAULT_EPOCHS
        samples = epochs * amounts.train
        batches = _batches(job, amounts.train, flops=columns["flops_per_token"], seq=seq)
        if len(batches) > 1:
            notes.append(
                f"train.batch is auto: {batches[0]} to {batches[-1]} samples were considered"
            )
    work = TrainingWork(
        samples=samples,
        seq=seq,
        **({} if amounts is None else _evaluations(job, amounts, samples)),
        data=amounts,
        epochs=None if train.steps is not None else train.epochs or DEFAULT_EPOCHS,
        columns=columns,
        state=StateBytes(optimizer=optimizer_state_bytes(job, 1)),
        stack=STACKS.index("yunlu"),
    )
    _check_micro_batch(job, batches)
    return work, batches, notes


def _batches(job: Job, samples: int, *, flops: float, seq: int) -> tuple[int, ...]:
    """The job's batch, or a few up to the largest without loss of sample efficiency."""
    least = choose_batch(job, samples)
    if job.train.batch != "auto":
        return (least,)
    most = job.goal.max_batch
    if most is None and traits_of(job.task).transformer == "causal":
        epochs = job.train.epochs or DEFAULT_EPOCHS
        # The best batch for a compute budget, in tokens (DeepSeek-AI 2024, equation 1).
        most = round(0.2920 * (flops * seq * samples * epochs) ** 0.3271 / seq)
    most = min(least if most is None else most, samples)
    if most <= least:
        return (least,)
    doublings = int(math.log2(most / least))
    return tuple(sorted({least << power for power in {0, doublings // 2, doublings}}))


def _evaluations(job: Job, amounts: DatasetSize, samples: float) -> dict[str, Any]:
    """Evaluation work as in ``TrainingWork``: after epochs a share, after steps by the batch."""
    every = job.train.evaluate
    times = samples / amounts.train if every == "epoch" else 0.0
    share = EVALUATED * (times * amounts.validation + amounts.test) / samples
    if every in {"never", "epoch"}:
        return {"evaluation_share": share}
    return {
        "evaluation_share": share,
        "evaluate_every": every,
        "evaluation_samples": float(amounts.validation),
    }


def _refuse_layout(job: Job, shape: ModelShape) -> None:
    """Raise where our engine would refuse the job's layout."""
    layout = job.layout
    refuse_conflicts(job, layout_from(layout, layout.sizes))
    ways, most = tensor_ways(shape), stages(shape)
    tp, pp = layout.sizes.get("tp", 1), layout.sizes.get("pp", 1)
    if tp not in ways:
        why = shape.why_not_cut or "its heads and widths do not divide by it"
        valid = ", ".join(str(way) for way in ways)
        raise PlanError(
            f"layout.tp: {job.model.name} cannot be cut {tp} ways: {why}.",
            hint=f"tp may be {valid}",
        )
    if pp > most:
        why = shape.why_not_parted or f"it has {most} blocks in a row that may be parted"
        raise PlanError(
            f"layout.pp: {job.model.name} cannot be parted into {pp} stages: {why}.",
            hint=f"pp may be {most} at most" if most > 1 else "choose a layout without pp",
        )
    if layout.sequence and not _cuts_sequence(job):
        raise PlanError(
            f"layout.sequence: the sequence is not cut in {job.model.name}, only in our "
            "transformers.",
            hint="remove sequence",
        )


def _cuts_sequence(job: Job) -> bool:
    return job.model.name == "transformer"


def _check_micro_batch(job: Job, batches: tuple[int, ...]) -> None:
    micro = job.train.micro_batch
    if micro == "auto" or any(batch % micro == 0 for batch in batches):
        return
    valid = [str(size) for size in range(1, batches[-1] + 1) if batches[-1] % size == 0]
    raise PlanError(
        f"train.micro_batch: {micro} does not divide train.batch {batches[-1]}.",
        hint=f"it may be {', '.join(valid)}, or auto",
    )


def _rules(job: Job, shape: ModelShape, precision: str, batches: tuple[int, ...]) -> LayoutRules:
    """Layout rules: what the model allows and the job says, at a compute precision."""
    train, layout = job.train, job.layout
    tried = job.model_copy(update={"train": train.model_copy(update={"precision": precision})})
    clashes = list(find_conflicts(tried))
    barred = {axis for clash in clashes for axis in clash.axes}
    barred |= {"zero1"} if any(clash.zero1 for clash in clashes) else set[str]()
    zero1 = (layout.zero1,) if layout.zero1 or layout.is_whole else (False, True)
    per_rank = layout.stages_per_rank
    if layout.schedule in {"gpipe", "1f1b"}:
        per_rank = 1
    elif layout.schedule == "interleaved" and per_rank == "auto":
        per_rank = 2
    is_measured = shape.kind == "measured"
    recompute = RECOMPUTE if train.recompute == "auto" else (train.recompute,)
    if is_measured and train.recompute == "auto":
        recompute = ("none",)
    return LayoutRules(
        batches=batches,
        tensor_ways=tensor_ways(shape),
        stages=1 if is_measured else stages(shape),
        barred=frozenset(barred),
        pinned=layout.sizes,
        zero1=(False,) if "zero1" in barred else zero1,
        stages_per_rank=(1, 2) if per_rank == "auto" else (per_rank,),
        sequence=layout.sequence if "tp" in layout.sizes else _cuts_sequence(job),
        micro_batch=None if train.micro_batch == "auto" else train.micro_batch,
        recompute=tuple(RECOMPUTE.index(item) for item in recompute),
    )


def _devices(job: Job) -> tuple[int, int]:
    """Fewest and most devices."""
    given = job.layout.said_workers if job.layout.is_whole else job.devices
    if given != "auto":
        return given, given
    return 1, job.goal.max_devices or USUAL_DEVICES


def _widen(ask: OptionQuery, job: Job) -> OptionQuery | None:
    """With many more devices, where no limit was set."""
    is_open = job.goal.max_devices is None and job.devices == "auto" and not job.layout.is_whole
    if not is_open:
        return None
    return replace(ask, question=replace(ask.question, most_devices=MANY_DEVICES))


def _choose(
    ask: OptionQuery, weighed: RankedCandidates, catalog: Catalog, *, top: int
) -> PlanOptions:
    """The best few; devices we cannot train on come last, for comparison."""
    trained = [can_train(catalog, price.offer.device) for price in ask.prices]
    if all(trained) or not any(trained) or not len(weighed.layouts):
        return choose_options(ask, weighed, top=top)
    parts: list[PlanOptions] = []
    for kind in (True, False):
        prices = tuple(p for p, item in zip(ask.prices, trained, strict=True) if item is kind)
        only = replace(ask, prices=prices)
        priced = replace(weighed, candidates=price_all(only, weighed.layouts, weighed.steps))
        if len(priced.candidates):
            parts.append(choose_options(only, priced, top=top))
    first, *others = parts
    compared = [option for part in others for option in part]
    kinds = {option.hardware.device for option in compared}
    retained = list(first)[: top - min(len(kinds), top // 2)]
    options = [*retained, *compared][:top]
    result = give_reasons(
        options, ask.objective, ask.limits, is_met=not first.problems,
        compared=len(options) - len(retained),
    )  # fmt: skip
    return first.model_copy(update={"options": tuple(result)})


def _advise(ask: OptionQuery, job: Job, catalog: Catalog, options: PlanOptions) -> list[str]:
    """What would help: spot nodes, more devices, other hardware; else, what helps most."""
    text: dict[str, float] = {}
    for what, tried in _relax(ask, job, catalog):
        weighed = rank_candidates(tried)
        if not len(weighed.layouts):
            continue
        best = _choose(tried, weighed, catalog, top=1).best
        cost = "" if best.dollars is None else f"{estimate_dollars(*best.dollars.edges)[0]}, "
        time = estimate_time(*best.total_s.edges)[0]
        result = f"{what}: {cost}{time} on {best.hardware}"
        text[result] = _excess(ask, best)
    enough = [item for item, excess in text.items() if excess <= 1.0]
    if not enough:
        nearest = min(text, key=lambda item: text[item], default=None)
        if nearest is not None and text[nearest] < _excess(ask, options.best):
            enough.append(f"{nearest}, which comes nearer")
        enough.append(_raise_limits(job, options))
    return [f"To change: {item}" for item in enough]


def _relax(ask: OptionQuery, job: Job, catalog: Catalog) -> Iterator[tuple[str, OptionQuery]]:
    """The same query with one constraint less, each."""
    goal, most = job.goal, ask.question.most_devices
    if not goal.spot:
        yield "allow spot machines (--spot)", _supplied(ask, job, catalog, spot=True)
    if ask.question.least_devices < most:
        wider = replace(ask, question=replace(ask.question, most_devices=8 * most))
        yield f"allow more devices (--max-devices {8 * most})", wider
    if goal.gpu or goal.cloud or goal.region:
        any_place = _supplied(ask, job, catalog, gpu=None, cloud=None, region=None)
        yield "allow any GPU, cloud and region", any_place


def _supplied(ask: OptionQuery, job: Job, catalog: Catalog, **goal: Any) -> OptionQuery:
    """With the hardware of another goal."""
    tried = job.model_copy(update={"goal": job.goal.model_copy(update=goal)})
    supply = find_offers(tried, catalog)
    question = replace(ask.question, configs=supply.configs)
    batches = next(iter(question.rules.values())).batches
    corrected = calibrate_here(question, job, batch=batches[0])
    return replace(ask, question=corrected, prices=supply.prices)


def _excess(ask: OptionQuery, option: Plan) -> float:
    dollars = math.nan if option.dollars is None else option.dollars.value
    return float(ask.limits.excess(np.array([option.total_s.value]), np.array([dollars]))[0])


def _raise_limits(job: Job, options: PlanOptions) -> str:
    best, parts = options.best, list[str]()
    if job.goal.budget is not None and best.dollars is not None:
        digit = max(0.01, supported_digit(*best.dollars.edges))
        dollars = max(math.ceil(best.dollars.value / digit) * digit, job.goal.budget)
        parts.append(f"a budget of ${dollars:,.2f}")
    if job.goal.deadline is not None:
        parts.append(f"a deadline of {math.ceil(best.total_s.value / 3600)}h")
    limits = f"{' and '.join(parts)} would do; or " if parts else ""
    return f"{limits}train less (epochs, steps), or a smaller model"


_TRAINABLE_KINDS = {"cuda", "rocm", "npu", "xpu", "cpu", "mps", "other"}
"""Other devices are only compared, where the user names them."""
_TOO_OLD = {"K80"}
"""Not supported by any CUDA version that torch is built with."""
_OLD = {"P4", "P100", "V100-16GB", "V100-32GB"}
"""Older than Turing: since torch 2.11 only its legacy build, with CUDA 12.6, has kernels for them."""

_BUSY = 1.2
"""Runs slowed down by other load by more than this are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingOffers:
    """Hardware to choose from, its prices, and notes."""

    configs: tuple[HardwareConfig, ...]
    prices: tuple[Price, ...]
    notes: tuple[str, ...]


def find_offers(job: Job, catalog: Catalog) -> MatchingOffers:
    """All offers that the job's goal allows."""
    goal, notes = job.goal, list[str]()
    _refuse_here(goal)
    may_be_here = goal.cloud is None or HERE in goal.cloud
    machine = this_machine() if may_be_here else None
    if machine is not None:
        device, offer = machine
        catalog = Catalog(
            devices=(*catalog.devices, device), every_offer=(*catalog.every_offer, offer)
        )
    elif may_be_here and (goal.cloud or not (goal.gpu or goal.region)):
        notes.append("this machine is not among the options yet: yunlu probe adds it")
    offers = _offers(goal, catalog, notes)
    if not offers:
        raise _nothing(goal, is_probed=machine is not None)
    configs, prices = group_offers(catalog, offers, spot=goal.spot)
    limit = job.train.memory_gb
    if limit != "auto":
        configs = tuple(
            replace(config, memory_bytes=min(config.memory_bytes, limit * 1e9))
            for config in configs
        )
    return MatchingOffers(configs=configs, prices=prices, notes=tuple(notes))


def can_train(catalog: Catalog, device: str) -> bool:
    """Whether our engine supports such a device."""
    if not catalog.has_device(device):
        return True
    return catalog.device(device).kind in _TRAINABLE_KINDS and device not in _TOO_OLD


def calibrate_here(question: LayoutQuery, job: Job, *, batch: int) -> LayoutQuery:
    """The query with this machine calibrated by earlier runs of the same job.

    ``batch`` is the one that such a run had. Only runs on one device teach: their layout, precision
    and batch are predicted, and the ratio is taken to hold for the others too, though less surely.
    """
    index = next((index for index, config in enumerate(question.configs) if config.is_here), None)
    if index is None:
        return question
    config, work = question.configs[index], name_work(job)
    figures = [figure for figure in read_calibration().figures
               if figure.work == work and figure.device == config.device
               and figure.busy <= _BUSY]  # fmt: skip
    if not figures:
        return question
    precision = max(figures, key=lambda item: item.at).precision
    point = _predict_run(question, config, precision, batch)
    if point is None:
        return question

    def measured(quantity: Quantity) -> float | None:
        result = [figure.measured for figure in figures
                 if figure.quantity == quantity and figure.precision == precision]  # fmt: skip
        return median(result) if result else None

    step_s, held = measured("step_s"), measured("memory_bytes")
    # Without the learned correction: measurements of this machine replace it.
    predicted_s = float(step_time(point).total_s[0])
    predicted_bytes = float(predict_memory(point, question.work).total[0])
    corrected = replace(
        config,
        time_factor=1.0 if step_s is None else step_s / predicted_s,
        memory_factor=1.0 if held is None else held / predicted_bytes,
        measured=MeasuredThroughput(
            precision=precision,
            batch=float(batch),
            micro_batch=float(point.micro_batch[0]),
            recompute=float(point.recompute[0]),
            time=step_s is not None,
            memory=held is not None,
        ),
    )
    configs = (*question.configs[:index], corrected, *question.configs[index + 1 :])
    return replace(question, configs=configs)


def _predict_run(
    question: LayoutQuery, config: HardwareConfig, precision: str, batch: int
) -> QueryBatch | None:
    """Prediction of a run on one device of a hardware config; None where there is none."""
    rules = question.rules.get(precision)
    if rules is None or precision not in config.peak_flops:
        return None
    one = replace(config, devices=1, domain=1)
    single = replace(rules, batches=(batch,), pinned=dict.fromkeys(("dp", "fsdp", "tp", "pp"), 1))
    result = search(
        replace(
            question, configs=(one,), rules={precision: single}, nodes=1, least_devices=1,
            most_devices=1,
        )
    )  # fmt: skip
    return result.points if len(result) else None


def _refuse_here(goal: GoalSpec) -> None:
    """This machine counts as a cloud of its own; its device name comes from the probe."""
    for key, names in (("gpu", goal.gpu), ("region", goal.region)):
        if names is not None and HERE in names:
            raise PlanError(f"goal.{key}: here names a cloud.", hint="say --cloud here")


def _offers(goal: GoalSpec, catalog: Catalog, notes: list[str]) -> list[Offer]:
    """Offers with the requested devices, clouds and regions."""
    clouds = goal.cloud
    if clouds is not None and HERE not in catalog.clouds:
        clouds = [cloud for cloud in clouds if cloud != HERE]
        if not clouds:
            return []
    result = catalog.offers(gpu=goal.gpu, cloud=clouds)
    if goal.region is not None:
        result = _in_regions(goal, catalog, clouds, notes)
    if goal.gpu is None:
        result = _usable(result, catalog)
    devices = sorted({offer.device for offer in result})
    if strange := [device for device in devices if not can_train(catalog, device)]:
        notes.append(f"Yunlu does not train on {', '.join(strange)} yet: only a comparison")
    if old := [device for device in devices if device in _OLD]:
        notes.append(
            f"{', '.join(old)}: torch's usual build has no kernels; its CUDA 12.6 build does"
        )
    return result


def _in_regions(
    goal: GoalSpec, catalog: Catalog, clouds: list[str] | None, notes: list[str]
) -> list[Offer]:
    offers: list[Offer] = []
    missed: list[CatalogError] = []
    for region in goal.region or ():
        try:
            offers += catalog.offers(gpu=goal.gpu, cloud=clouds, region=region)
        except CatalogError as error:
            missed.append(error)
    if missed and not offers:
        raise missed[0]
    notes += [error.message for error in missed]
    return offers


def _usable(offers: list[Offer], catalog: Catalog) -> list[Offer]:
    """Devices we train on; else those an older torch supports; else those that can be compared."""
    trained = [offer for offer in offers if can_train(catalog, offer.device)]
    return [offer for offer in trained if offer.device not in _OLD] or trained or offers


def _nothing(goal: GoalSpec, *, is_probed: bool) -> PlanError:
    requested = {"gpu": goal.gpu, "cloud": goal.cloud, "region": goal.region}
    if goal.cloud == [HERE] and not is_probed:
        return PlanError("This machine has not been probed yet.", hint="yunlu probe measures it")
    text = ", ".join(
        f"{name} {' or '.join(names)}" for name, names in requested.items() if names is not None
    )
    return PlanError(
        f"goal: the catalog has nothing with {text}." if text else "The catalog is empty.",
        hint="yunlu catalog lists what there is; yunlu catalog add FILE adds to it",
    )


def note_lone(job: Job) -> list[str]:
    """Why the job must run on one device, on any hardware."""
    return [
        f"one device only, for {clash.key}: {clash.why}"
        for clash in find_conflicts(job)
        if {"dp", "fsdp", "tp", "pp"} <= set(clash.axes)
    ]


def note_terms(options: PlanOptions, prices: Iterable[Price]) -> list[str]:
    """Caveats of the hardware shown."""
    terms = {
        (price.offer.cloud, price.offer.instance, price.offer.region): price.offer.terms
        for price in prices
    }
    assumed, floor = list[str](), list[str]()
    for option in options:
        item = option.hardware
        given = terms.get((item.cloud, item.instance, item.region), "")
        if item.nodes > 1 and ASSUMED_NETWORK in given:
            assumed.append(f"{item.cloud}:{item.instance}")
        if item.spot and SPOT_FLOOR in given:
            floor.append(f"{item.cloud}:{item.instance}")
    notes: list[str] = []
    if assumed:
        names = ", ".join(dict.fromkeys(assumed))
        notes.append(f"the network between nodes of {names} is assumed, not published")
    if floor:
        names = ", ".join(dict.fromkeys(floor))
        notes.append(f"the spot price of {names} is the cloud's minimum: it may not be available")
    return notes


def note_prices(options: PlanOptions) -> list[str]:
    """Offers without a known price, and how to set it."""
    unknown = [option.hardware for option in options if option.hardware.dollars_per_hour is None]
    if not unknown:
        return []
    names = ", ".join(sorted({f"{item.cloud}:{item.instance}" for item in unknown}))
    return [f"no price is known of {names}; set one with: yunlu catalog add FILE"]
