"""What a job may run on: offers of the catalog within its goal, and this machine once it is probed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from yunlu.catalog.catalog import Catalog
from yunlu.jobs.calibration import read_calibration, this_machine
from yunlu.planning.choice.options import PlanError
from yunlu.planning.choice.rigs import HERE, Price, gather_rigs
from yunlu.planning.choice.search import Question, Rig, foretell_steps, hold, search
from yunlu.planning.guess import name_work

if TYPE_CHECKING:
    from yunlu.catalog.offer import Offer
    from yunlu.planning.calibration import Quantity
    from yunlu.spec.goal import GoalSpec
    from yunlu.spec.job import Job

_TRAINABLE_KINDS = {"cuda", "rocm", "cpu", "mps"}
"""Other devices are only compared, where somebody names them."""
_TOO_OLD = {"K80"}
"""No CUDA that torch is built with knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Hardware to choose from, what it costs, and what to know about it."""

    rigs: tuple[Rig, ...]
    prices: tuple[Price, ...]
    notes: tuple[str, ...]


def find_supply(job: Job, catalog: Catalog) -> Supply:
    """All that the job's goal allows."""
    goal = job.goal
    offers, notes = _clouds_offers(goal, catalog)
    if _may_be_here(goal):
        machine = this_machine()
        if machine is None:
            notes.append("this machine is not among the options yet: yunlu probe adds it")
        else:
            device, offer = machine
            catalog = Catalog(
                devices=(*catalog.devices, device), every_offer=(*catalog.every_offer, offer)
            )
            offers.append(offer)
    if not offers:
        raise _nothing(goal)
    rigs, prices = gather_rigs(catalog, offers, spot=goal.spot)
    limit = job.train.memory_gb
    if limit != "auto":
        rigs = tuple(replace(rig, memory_bytes=min(rig.memory_bytes, limit * 1e9)) for rig in rigs)
    return Supply(rigs=rigs, prices=prices, notes=tuple(notes))


def correct_here(question: Question, job: Job) -> Question:
    """The question with this machine as earlier runs of the same job measured it."""
    place = next((place for place, rig in enumerate(question.rigs) if rig.most_nodes == 1), None)
    figures = [each for each in read_calibration().figures if each.work == name_work(job)]
    if place is None or not figures:
        return question
    rig = question.rigs[place]

    def measured(quantity: Quantity) -> float | None:
        found = [each.measured for each in figures
                 if each.quantity == quantity and each.device == rig.device]  # fmt: skip
        return median(found) if found else None

    alone = replace(question, rigs=(rig,), nodes=1, least_devices=1)
    found = search(alone)
    if not len(found):
        return question
    step_s, held = measured("step_s"), measured("memory_bytes")
    foretold_s = float(sum(column[0] for column in foretell_steps(alone, found).values()))
    foretold_bytes = float(hold(found.points, question.work).total[0])
    corrected = replace(
        rig,
        time_factor=1.0 if step_s is None else step_s / foretold_s,
        memory_factor=1.0 if held is None else held / foretold_bytes,
    )
    rigs = (*question.rigs[:place], corrected, *question.rigs[place + 1 :])
    return replace(question, rigs=rigs)


def _clouds_offers(goal: GoalSpec, catalog: Catalog) -> tuple[list[Offer], list[str]]:
    clouds = None if goal.cloud is None else [each for each in goal.cloud if each != HERE]
    gpus = None if goal.gpu is None else [each for each in goal.gpu if each != HERE]
    if clouds == [] or gpus == []:
        return [], []
    offers: list[Offer] = []
    for region in goal.region or [None]:
        offers += catalog.offers(gpu=gpus, cloud=clouds, region=region)
    kinds = {name: catalog.device(name).kind for name in {offer.device for offer in offers}}
    if gpus is None and clouds is None:
        usable = {name for name, kind in kinds.items() if kind in _TRAINABLE_KINDS} - _TOO_OLD
        return [offer for offer in offers if offer.device in usable], []
    strange = sorted(name for name, kind in kinds.items() if kind not in _TRAINABLE_KINDS)
    if not strange:
        return offers, []
    return offers, [f"Yunlu does not train on {', '.join(strange)} yet: only a comparison"]


def _may_be_here(goal: GoalSpec) -> bool:
    asked = (goal.cloud, goal.gpu, goal.region)
    if all(names is None for names in asked):
        return True
    return any(names is not None and HERE in names for names in asked)


def _nothing(goal: GoalSpec) -> PlanError:
    asked = {"gpu": goal.gpu, "cloud": goal.cloud, "region": goal.region}
    if any(names is not None and HERE in names for names in asked.values()):
        return PlanError("This machine has not been probed yet.", hint="yunlu probe measures it")
    words = ", ".join(
        f"{name} {' or '.join(names)}" for name, names in asked.items() if names is not None
    )
    return PlanError(
        f"goal: the catalog has nothing with {words}." if words else "The catalog is empty.",
        hint="yunlu catalog lists what there is; yunlu catalog add FILE adds to it",
    )
