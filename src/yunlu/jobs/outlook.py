"""What a job could run on and what that would take: gathers what ``planning`` decides from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from yunlu.core.errors import DataError
from yunlu.core.units import show_duration
from yunlu.jobs.amounts import Amounts, block_length, count_amounts
from yunlu.jobs.catalog_store import open_catalog
from yunlu.jobs.shapes import find_shape
from yunlu.jobs.supply import correct_here, find_supply
from yunlu.planning.choice.choosing import Ask, choose_options, list_candidates, weigh
from yunlu.planning.choice.grid import Rules
from yunlu.planning.choice.limits import Limits
from yunlu.planning.choice.options import Options, PlanError
from yunlu.planning.choice.search import Question, Work
from yunlu.planning.conflicts import find_clashes
from yunlu.planning.foretell.constants import STACKS
from yunlu.planning.foretell.memory import StateBytes
from yunlu.planning.foretell.points import RECOMPUTE
from yunlu.planning.models.arithmetic import columns_of, stages, tensor_ways
from yunlu.planning.planner import DEFAULT_BATCH, DEFAULT_EPOCHS, choose_batch
from yunlu.planning.splitting import optimizer_state_bytes
from yunlu.spec.goal import read_span_s

if TYPE_CHECKING:
    from yunlu.catalog.catalog import Catalog
    from yunlu.jobs.shapes import FoundShape
    from yunlu.planning.large_batch import Rule
    from yunlu.planning.models.shape import ModelShape
    from yunlu.spec.job import Job

USUAL_DEVICES = 64
MANY_DEVICES = 512
_AUTO_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_EVALUATED = 1 / 3
"""Only the forward pass, of three that training takes."""
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("sgd", "momentum", "lars"), "linear"),
    **dict.fromkeys(("adam", "adamw", "lamb"), "sqrt"),
}
_TEXT_TASKS = {"language-modeling", "text-classification", "seq2seq"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A job's options, and every candidate with a price: hours, dollars, hardware."""

    options: Options
    candidates: tuple[tuple[float, float, str], ...] = ()


def foresee(job: Job, *, top: int = 3, catalog: Catalog | None = None) -> Options:
    """The best few ways to run a job, within its goal; where there are none, the nearest."""
    return look_ahead(job, top=top, catalog=catalog).options


def look_ahead(
    job: Job, *, top: int = 3, catalog: Catalog | None = None, everything: bool = False
) -> Outlook:
    """As ``foresee``; with ``everything``, also all candidates, for a picture."""
    if top < 1:
        raise PlanError(f"top: expected a whole number above 0, got {top}")
    catalog = catalog or open_catalog()
    ask, notes = make_ask(job, catalog)
    weighed = weigh(ask)
    if not len(weighed.found) and (wider := _widen(ask, job)) is not None:
        ask, weighed = wider, weigh(wider)
        notes.append(
            f"{USUAL_DEVICES} devices cannot hold the model: up to {MANY_DEVICES} were tried"
        )
    options = choose_options(ask, weighed, top=top)
    if options.problems:
        advice = _advise(job, catalog, options)
        options = options.model_copy(update={"problems": (*options.problems, *advice)})
    notes += _price_notes(options)
    options = options.model_copy(update={"notes": tuple(notes)})
    candidates = list_candidates(ask, weighed) if everything else []
    return Outlook(options=options, candidates=tuple(candidates))


def make_ask(job: Job, catalog: Catalog) -> tuple[Ask, list[str]]:
    """All that the options of a job follow from, and what was assumed."""
    described = find_shape(job)
    shape, seq = described.shape, _sequence_length(job, described)
    work, batches, notes = _work(job, described, seq)
    notes += [described.note] if described.note else []
    supply = find_supply(job, catalog)
    least, most_devices = _devices(job)
    precision = job.train.precision
    precisions = _AUTO_PRECISIONS if precision == "auto" else (precision,)
    question = Question(
        work=work,
        rigs=supply.rigs,
        rules={each: _rules(job, shape, each, batches) for each in precisions},
        least_devices=least,
        most_devices=most_devices,
    )
    goal, optimizer = job.goal, job.train.optimizer
    deadline = goal.deadline
    ask = Ask(
        question=correct_here(question, job),
        prices=supply.prices,
        objective=goal.objective,
        limits=Limits(
            budget=goal.budget, deadline_s=None if deadline is None else read_span_s(deadline)
        ),
        counts_tokens=job.task in _TEXT_TASKS,
        lr_scaling=_RULES[optimizer.name] if len(batches) > 1 else optimizer.scaling,
        base_batch=optimizer.base_batch,
    )
    return ask, [*notes, *supply.notes]


def _sequence_length(job: Job, found: FoundShape) -> int:
    if found.seq is not None:
        return found.seq
    if job.task not in _TEXT_TASKS:
        return 1
    wanted = block_length(job)
    return min(wanted, found.shape.positions) if found.shape.positions else wanted


def _work(job: Job, found: FoundShape, seq: int) -> tuple[Work, tuple[int, ...], list[str]]:
    """How much there is to do, and the batches it may be done in."""
    train, notes = job.train, list[str]()
    amounts: Amounts | None = None
    try:
        amounts = count_amounts(job, seq=seq)
    except DataError:
        if found.train_samples is not None:
            amounts = Amounts(train=found.train_samples, validation=0, test=0)
        elif train.steps is None:
            raise
        else:
            notes.append("data of unknown size: evaluation is not in the time (say data.samples)")
    columns = columns_of(found.shape, seq)
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
    share = 0.0 if amounts is None else _evaluation_share(job, amounts, samples, max(batches))
    work = Work(
        samples=samples,
        seq=seq,
        evaluation_share=share,
        columns=columns,
        state=StateBytes(optimizer=optimizer_state_bytes(job, 1)),
        stack=STACKS.index("yunlu"),
    )
    _check_micro_batch(job, batches)
    return work, batches, notes


def _batches(job: Job, samples: int, *, flops: float, seq: int) -> tuple[int, ...]:
    """The job's, or a few up to the largest that still teaches as much per sample."""
    if job.train.batch != "auto":
        return (choose_batch(job, samples),)
    least = min(DEFAULT_BATCH, samples)
    most = job.goal.max_batch
    if most is None and job.task == "language-modeling":
        epochs = job.train.epochs or DEFAULT_EPOCHS
        # The batch that was best for a budget of arithmetic, in tokens (DeepSeek-AI 2024, equation 1).
        most = round(0.2920 * (flops * seq * samples * epochs) ** 0.3271 / seq)
    most = min(least if most is None else most, samples)
    if most <= least:
        return (max(most, 1),)
    doublings = int(math.log2(most / least))
    return tuple(sorted({least << power for power in {0, doublings // 2, doublings}}))


def _evaluation_share(job: Job, amounts: Amounts, samples: float, batch: int) -> float:
    every = job.train.evaluate
    if every == "never":
        times = 0.0
    elif every == "epoch":
        times = samples / amounts.train
    else:
        times = samples / (batch * every)
    return _EVALUATED * (times * amounts.validation + amounts.test) / samples


def _check_micro_batch(job: Job, batches: tuple[int, ...]) -> None:
    micro = job.train.micro_batch
    if micro == "auto" or any(batch % micro == 0 for batch in batches):
        return
    valid = [str(size) for size in range(1, batches[-1] + 1) if batches[-1] % size == 0]
    raise PlanError(
        f"train.micro_batch: {micro} does not divide train.batch {batches[-1]}.",
        hint=f"it may be {', '.join(valid)}, or auto",
    )


def _rules(job: Job, shape: ModelShape, precision: str, batches: tuple[int, ...]) -> Rules:
    """What the model allows and the job says, when its passes compute in a precision."""
    train, layout = job.train, job.layout
    tried = job.model_copy(update={"train": train.model_copy(update={"precision": precision})})
    clashes = list(find_clashes(tried))
    has_zero1 = not any(clash.zero1 for clash in clashes)
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
    return Rules(
        batches=batches,
        tensor_ways=tensor_ways(shape),
        stages=1 if is_measured else stages(shape),
        barred=frozenset(axis for clash in clashes for axis in clash.axes),
        pinned=layout.sizes,
        zero1=zero1 if has_zero1 else (False,),
        stages_per_rank=(1, 2) if per_rank == "auto" else (per_rank,),
        sequence=layout.sequence if "tp" in layout.sizes else True,
        micro_batch=None if train.micro_batch == "auto" else train.micro_batch,
        recompute=tuple(RECOMPUTE.index(each) for each in recompute),
    )


def _devices(job: Job) -> tuple[int, int]:
    """The fewest and the most."""
    said = job.layout.said_workers if job.layout.is_whole else job.devices
    if said != "auto":
        return said, said
    return 1, job.goal.max_devices or USUAL_DEVICES


def _widen(ask: Ask, job: Job) -> Ask | None:
    """With many more devices, where nobody set a limit."""
    is_open = job.goal.max_devices is None and job.devices == "auto" and not job.layout.is_whole
    if not is_open:
        return None
    return replace(ask, question=replace(ask.question, most_devices=MANY_DEVICES))


def _advise(job: Job, catalog: Catalog, options: Options) -> list[str]:
    """What would help: spot machines, more devices, other hardware."""
    goal = job.goal
    trials: dict[str, dict[str, object]] = {}
    if not goal.spot:
        trials["allow spot machines (--spot)"] = {"spot": True}
    most = goal.max_devices or USUAL_DEVICES
    trials[f"allow more devices (--max-devices {8 * most})"] = {"max_devices": 8 * most}
    if goal.gpu or goal.cloud or goal.region:
        trials["allow any GPU, cloud and region"] = {"gpu": None, "cloud": None, "region": None}
    words: list[str] = []
    for what, changes in trials.items():
        tried = job.model_copy(update={"goal": goal.model_copy(update=changes)})
        try:
            ask, _ = make_ask(tried, catalog)
            found = choose_options(ask, weigh(ask), top=1)
        except PlanError:
            continue
        if not found.problems:
            best = found.best
            cost = "" if best.dollars is None else f"${best.dollars.value:,.2f}, "
            words.append(f"{what}: {cost}{show_duration(best.total_s.value)} on {best.hardware}")
    if not words:
        words.append(_raise_limits(job, options))
    return [f"To change: {each}" for each in words]


def _raise_limits(job: Job, options: Options) -> str:
    best, parts = options.best, list[str]()
    if job.goal.budget is not None and best.dollars is not None:
        parts.append(f"a budget of ${max(best.dollars.value, job.goal.budget):,.2f}")
    if job.goal.deadline is not None:
        parts.append(f"a deadline of {math.ceil(best.total_s.value / 3600)}h")
    return f"only {' and '.join(parts)} would do; or train less (epochs, steps), or a smaller model"


def _price_notes(options: Options) -> list[str]:
    unknown = [option.hardware for option in options if option.hardware.dollars_per_hour is None]
    if not unknown:
        return []
    names = ", ".join(sorted({f"{each.cloud}:{each.instance}" for each in unknown}))
    return [f"no price is known of {names}; set one with: yunlu catalog add FILE"]
