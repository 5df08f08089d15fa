"""Offers a job may run on, within its goal, and notes on their terms, prices and limitations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from yunlu.hardware.catalog import Catalog, CatalogError
from yunlu.hardware.offer import HERE
from yunlu.hardware.skypilot import ASSUMED_NETWORK, SPOT_FLOOR
from yunlu.jobs.calibration import read_calibration, this_machine
from yunlu.planning.analytic_estimate import name_work
from yunlu.planning.conflicts import find_conflicts
from yunlu.planning.predict.step_time import step_time
from yunlu.planning.search.hardware_configs import Price, group_offers
from yunlu.planning.search.layout_search import (
    HardwareConfig,
    LayoutQuery,
    MeasuredThroughput,
    predict_memory,
    search,
)
from yunlu.planning.search.options import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from yunlu.hardware.offer import Offer
    from yunlu.planning.calibration import Quantity
    from yunlu.planning.predict.query_batch import QueryBatch
    from yunlu.planning.search.options import PlanOptions
    from yunlu.spec.goal import GoalSpec
    from yunlu.spec.job import Job

_TRAINABLE_KINDS = {"cuda", "rocm", "cpu", "mps"}
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
