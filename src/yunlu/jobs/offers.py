"""Offers a job may run on: the catalog within its goal, and this machine once probed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from yunlu.hardware.catalog import Catalog, CatalogError
from yunlu.hardware.offer import HERE
from yunlu.jobs.calibration import read_calibration, this_machine
from yunlu.planning.analytic_estimate import name_work
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
    from yunlu.hardware.offer import Offer
    from yunlu.planning.calibration import Quantity
    from yunlu.planning.predict.query_batch import QueryBatch
    from yunlu.spec.goal import GoalSpec
    from yunlu.spec.job import Job

_TRAINABLE_KINDS = {"cuda", "rocm", "cpu", "mps"}
"""Other devices are only compared, where somebody names them."""
_TOO_OLD = {"K80"}
"""No CUDA that torch is built with knows them."""
_OLD = {"P4", "P100", "V100-16GB", "V100-32GB"}
"""Older than Turing: since torch 2.11 only its legacy build, with CUDA 12.6, has kernels for them."""

_BUSY = 1.2
"""What ran while others slowed the machine down by more says little of what it does alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchingOffers:
    """Hardware to choose from, what it costs, and what to know about it."""

    configs: tuple[HardwareConfig, ...]
    prices: tuple[Price, ...]
    notes: tuple[str, ...]


def find_offers(job: Job, catalog: Catalog) -> MatchingOffers:
    """All that the job's goal allows."""
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
    """Whether our engine runs on such a device; this machine's own is none of the catalog's."""
    if not catalog.has_device(device):
        return True
    return catalog.device(device).kind in _TRAINABLE_KINDS and device not in _TOO_OLD


def calibrate_here(question: LayoutQuery, job: Job, *, batch: int) -> LayoutQuery:
    """The question with this machine as earlier runs of the same job measured it.

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
    # Without the learned correction: what was measured here takes its place.
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
    """The run on one device of a hardware config, as it would be predicted; None where it could not be."""
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
    """This machine is a cloud of its own; what it is called as a device, its probe tells."""
    for key, names in (("gpu", goal.gpu), ("region", goal.region)):
        if names is not None and HERE in names:
            raise PlanError(f"goal.{key}: here names a cloud.", hint="say --cloud here")


def _offers(goal: GoalSpec, catalog: Catalog, notes: list[str]) -> list[Offer]:
    """Those with a device, a cloud and a region that were asked for."""
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
    """What we train on; where there is none of it, what an older torch does; else what can be compared."""
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
