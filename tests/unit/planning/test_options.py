"""Options: what ranks first, what limits do, and what a change by hand gives."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planning.test_search import A100, T4, question, rules
from yunlu.hardware.catalog import HERE, Offer
from yunlu.planning.plan import Plan
from yunlu.planning.search.layout_search import USABLE, Price, predict_memory, search
from yunlu.planning.search.options import PlanError, PlanOptions, narrow
from yunlu.planning.search.priced_plan import GoalLimits, OptionQuery, lost_share
from yunlu.planning.search.ranking import choose_options, rank_candidates
from yunlu.spec.job import Job

OFFERS = (
    Offer(
        "aws", "p4d", "A100", 4, dollars_per_hour=12.0, spot_dollars_per_hour=5.0, regions=("us",)
    ),
    Offer("lambda", "a100x4", "A100", 4, dollars_per_hour=8.0, regions=("eu",)),
    Offer("aws", "g4dn", "T4", 1, dollars_per_hour=0.5, regions=("us",)),
    Offer("huawei", "t4", "T4", 1),
)
JOB = Job.model_validate(
    {"task": "language-modeling", "model": "x", "data": "y", "train": {"epochs": 1}}
)
HARDWARE = {"A100": 0, "T4": 1}
TIGHTEST = rules(
    pinned={"dp": 1, "fsdp": 4, "tp": 1, "pp": 1}, recompute=(2,), micro_batch=1, zero1=(False,)
)


def make_ask(
    *, spot: bool = False, offers: tuple[Offer, ...] = OFFERS, **changes: object
) -> OptionQuery:
    prices = [Price(HARDWARE[offer.device], offer, spot=False) for offer in offers]
    prices += [
        Price(HARDWARE[offer.device], offer, spot=True)
        for offer in offers
        if spot and offer.spot_dollars_per_hour
    ]
    plain = OptionQuery(
        job=JOB,
        question=question(most_devices=16),
        prices=tuple(prices),
        objective="balanced",
        counts_tokens=True,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def choose(ask: OptionQuery, top: int = 3) -> PlanOptions:
    return choose_options(ask, rank_candidates(ask), top=top)


def price_of(ask: OptionQuery, option: Plan) -> Price:
    cloud, spot = option.hardware.cloud, option.hardware.spot
    return next(each for each in ask.prices if (each.offer.cloud, each.spot) == (cloud, spot))


def dollars(option: Plan) -> float:
    assert option.dollars is not None
    return option.dollars.value


def test_the_objective_decides() -> None:
    cheap = choose(make_ask(objective="cost")).best
    quick = choose(make_ask(objective="time")).best
    between = choose(make_ask(objective="balanced")).best
    assert dollars(cheap) <= dollars(between) <= dollars(quick)
    assert quick.total_s.value <= between.total_s.value <= cheap.total_s.value
    assert dollars(cheap) < dollars(quick)


def test_the_best_few_have_the_cheapest_and_the_fastest_among_them_and_say_so() -> None:
    options = choose(make_ask(), top=4)
    reasons = [option.reason for option in options]
    assert "best balance" in reasons[0]
    assert any("cheapest" in reason for reason in reasons)
    assert any("fastest" in reason for reason in reasons)
    assert len({str(option.hardware) for option in options}) == len(options)
    assert all(option.reason for option in options)


def test_of_the_same_hardware_the_cheaper_offer_is_taken() -> None:
    options = choose(make_ask(objective="time"))
    assert options.best.hardware.cloud == "lambda"


def test_figures_agree_with_each_other() -> None:
    for option in choose(make_ask(spot=True), top=5):
        hardware = option.hardware
        assert option.layout.world == hardware.devices
        assert option.layout.replicas * option.micro_batch * option.accumulation >= option.batch
        assert sum(option.prediction.step_parts.values()) == pytest.approx(option.step_s.value)
        assert sum(option.prediction.memory_parts.values()) == pytest.approx(
            option.memory_bytes.value
        )
        assert sum(option.prediction.total_parts.values()) == pytest.approx(option.total_s.value)
        assert option.memory_bytes.high <= hardware.memory_bytes
        assert option.headroom == pytest.approx(
            1 - option.memory_bytes.high / hardware.memory_bytes
        )
        assert option.samples_per_s.value == pytest.approx(option.batch / option.step_s.value)
        hourly = hardware.dollars_per_hour
        assert hourly is not None
        assert dollars(option) == pytest.approx(hourly * option.total_s.value / 3600)
        for name in (
            "memory_bytes",
            "step_s",
            "samples_per_s",
            "tokens_per_s",
            "total_s",
            "dollars",
        ):
            interval = getattr(option, name)
            assert interval.low <= interval.value <= interval.high, name


@settings(max_examples=20)
@given(st.lists(st.floats(1.0, 200.0), min_size=2, max_size=2))
def test_more_money_is_never_slower(budgets: list[float]) -> None:
    less, more = sorted(budgets)
    ask = make_ask(objective="time")
    weighed = rank_candidates(ask)
    found = [
        choose_options(replace(ask, limits=GoalLimits(budget=budget)), weighed, top=1)
        for budget in (less, more)
    ]
    for options, budget in zip(found, (less, more), strict=True):
        assert bool(options.problems) == (dollars(options.best) > budget)
    if not found[0].problems:
        assert found[1].best.total_s.value <= found[0].best.total_s.value


def test_a_budget_that_nothing_meets_gives_the_nearest_and_says_so() -> None:
    options = choose(make_ask(limits=GoalLimits(budget=0.01)))
    (problem,) = options.problems
    assert problem.startswith("goal.budget: nothing fits $0.01; the nearest")
    assert dollars(options.best) == min(dollars(option) for option in options if option.dollars)
    assert "best balance" not in options.best.reason
    assert options.best.reason.startswith("nearest to the limits")


def test_limits_that_are_met_only_one_by_one_are_said_together() -> None:
    cheapest = choose(make_ask(objective="cost")).best
    quickest = choose(make_ask(objective="time")).best
    budget, deadline_s = dollars(cheapest) * 1.001, quickest.total_s.value * 1.001
    options = choose(make_ask(limits=GoalLimits(budget=budget, deadline_s=deadline_s)))
    (problem,) = options.problems
    assert problem.startswith("goal.budget, goal.deadline: nothing keeps to $")
    (problem,) = choose(make_ask(limits=GoalLimits(budget=0.01, deadline_s=1e9))).problems
    assert problem.startswith("goal.budget: nothing fits")


def test_a_deadline_that_nothing_meets_gives_the_quickest() -> None:
    options = choose(make_ask(limits=GoalLimits(deadline_s=1.0)))
    (problem,) = options.problems
    assert problem.startswith("goal.deadline: nothing is done within 1.0 s")
    quickest = choose(make_ask(objective="time")).best
    assert options.best.total_s.value <= quickest.total_s.value


def test_what_has_no_price_ranks_last_and_is_never_within_a_budget() -> None:
    options = choose(make_ask(), top=20)
    known = [option.dollars is not None for option in options]
    assert known == sorted(known, reverse=True)
    unpriced = make_ask(offers=OFFERS[3:])
    (option,) = choose(unpriced, top=1)
    assert option.dollars is None
    assert "price unknown" in option.reason
    assert choose(replace(unpriced, limits=GoalLimits(budget=1e9))).problems


def test_spot_is_cheaper_by_the_hour_but_takes_longer() -> None:
    spot = choose(make_ask(spot=True, offers=OFFERS[:1], objective="cost")).best
    assert spot.hardware.spot
    firm = spot.replace(spot=False)
    assert firm.total_s.value < spot.total_s.value
    assert dollars(spot) < dollars(firm)
    assert spot.prediction.total_parts["interruptions"] > 0
    assert lost_share("aws", nodes=4, checkpoint_s=60) == pytest.approx(
        4 * lost_share("aws", nodes=1, checkpoint_s=60)
    )


def test_start_up_and_interruptions_are_not_exact() -> None:
    ask = make_ask(spot=True, offers=OFFERS[:1], objective="cost")
    spot = choose(ask).best
    for option in (spot, spot.replace(spot=False)):
        parts, step, total = option.prediction.total_parts, option.step_s, option.total_s
        run_s = total.value - parts["start_up"]
        assert total.high - total.value > run_s * (step.high / step.value - 1)
        assert total.value - total.low > run_s * (1 - step.low / step.value)
        assert 0 < total.low < total.value
        assert option.dollars is not None
        wide = option.dollars.high / option.dollars.value
        assert wide == pytest.approx(total.high / total.value)


def test_a_short_run_in_a_cloud_is_as_uncertain_as_its_start() -> None:
    ask = make_ask(offers=OFFERS[:1])
    short = replace(ask.question, work=replace(ask.question.work, samples=16.0))
    best = choose(replace(ask, question=short)).best
    assert best.prediction.total_parts["start_up"] > 0.9 * best.total_s.value
    assert best.total_s.high > 1.5 * best.total_s.value
    assert best.total_s.low < 0.7 * best.total_s.value


def test_evaluation_between_steps_is_in_the_time_of_each_option() -> None:
    ask = make_ask()
    plain = choose(ask).best
    work = replace(ask.question.work, evaluate_every=5, evaluation_samples=160.0)
    often = choose(replace(ask, question=replace(ask.question, work=work))).best
    assert plain.prediction.total_parts["evaluation"] == 0
    share = 160 / (5 * often.batch) / 3
    assert often.prediction.total_parts["evaluation"] == pytest.approx(
        share * often.prediction.total_parts["steps"]
    )
    assert sum(often.prediction.total_parts.values()) == pytest.approx(often.total_s.value)


def test_this_machine_is_free_and_wins_small_work() -> None:
    here = Offer(HERE, "this machine", "T4", 1, dollars_per_hour=0.0)
    ask = make_ask(offers=(*OFFERS, here))
    small = replace(ask.question, work=replace(ask.question.work, samples=64.0))
    options = choose(replace(ask, question=small))
    assert options.best.hardware.cloud == HERE
    assert dollars(options.best) == 0


def test_what_is_free_and_takes_for_ever_is_not_shown_for_being_cheap() -> None:
    here = Offer(HERE, "this machine", "T4", 1, dollars_per_hour=0.0)
    ask = make_ask(offers=(OFFERS[0], here))
    others = tuple(replace(T4, device=name) for name in ("T5", "T6"))
    configs = (A100, replace(T4, peak_flops={"fp32": 1e9}), *others)
    prices = [
        Price(place, OFFERS[2]._replace(device=config.device), spot=False)
        for place, config in enumerate(others, start=2)
    ]
    slow = replace(
        ask, question=replace(ask.question, configs=configs), prices=(*ask.prices, *prices)
    )
    assert dollars(choose(slow, top=3).best) > 0
    assert HERE not in {option.hardware.cloud for option in choose(slow, top=3)}
    cost = choose(replace(slow, objective="cost"), top=3)
    assert cost.best.hardware.cloud == HERE


def test_a_change_is_predicted_and_checked_again() -> None:
    best = choose(make_ask(objective="time")).best
    halved = best.replace(tp=2)
    assert halved.layout.tp == 2
    assert halved.layout.world == best.layout.world
    assert halved.step_s != best.step_s
    assert halved.hardware == best.hardware
    full = halved.replace(recompute="full", micro_batch=1)
    assert (full.recompute, full.micro_batch, full.layout.tp) == ("full", 1, 2)
    assert full.memory_bytes.value < halved.memory_bytes.value
    assert best.replace() == best.model_copy(update={"reason": ""})
    fewer = best.replace(nodes=1)
    assert fewer.hardware.devices == 4


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4, "tp": 4, "zero1": True},
        {"dp": 2, "tp": 4, "pp": 2, "zero1": True},
        {"dp": 2, "fsdp": 2, "tp": 4, "pp": 1},
        {"fsdp": 4, "tp": 2, "pp": 2},
        {"dp": 16, "tp": 1, "pp": 1, "zero1": False},
    ],
)
def test_a_change_keeps_all_the_rest(layout: dict[str, int | bool]) -> None:
    best = choose(make_ask(objective="time")).best
    assert best.hardware.devices == 16
    made = best.replace(**layout, micro_batch=1)
    assert {name: getattr(made.layout, name) for name in layout} == layout
    for changes in ({"recompute": "full"}, {"precision": "tf32"}, {"batch": 32}):
        after = made.replace(**changes)
        assert after.layout == made.layout, changes
        assert after.micro_batch == made.micro_batch
    parted = made.replace(pp=2, tp=2)
    assert (parted.layout.pp, parted.layout.tp, parted.layout.replicas) == (2, 2, 4)
    assert made.replace(nodes=2).hardware.devices == 8


def test_replicas_share_only_where_the_search_would_let_them() -> None:
    ask = make_ask(objective="time")
    barred = rules(barred=frozenset({"tp", "pp", "zero1"}), zero1=(False,))
    bound = replace(ask, question=replace(ask.question, rules={"tf32": barred, "bf16": rules()}))
    best = choose(bound).best
    assert best.precision == "bf16"
    shared = best.replace(dp=16, tp=1, pp=1, zero1=True, micro_batch=1)
    assert shared.layout.zero1
    with pytest.raises(PlanError, match="zero1: True does not go") as caught:
        shared.replace(precision="tf32", zero1=True)
    assert caught.value.hint == "zero1 may be False"
    assert not shared.replace(precision="tf32").layout.zero1


def test_shards_become_replicas_that_share_and_a_lone_device_has_none() -> None:
    best = choose(make_ask(objective="time")).best
    sharded = best.replace(dp=1, fsdp=16, tp=1, pp=1, micro_batch=1)
    shared = sharded.replace(zero1=True).layout
    assert (shared.dp, shared.fsdp, shared.zero1) == (16, 1, True)
    with pytest.raises(PlanError, match="zero1: True does not go"):
        best.replace(dp=1, tp=4, pp=4, zero1=True)
    with pytest.raises(PlanError, match="does not go"):
        best.replace(fsdp=16, tp=1, pp=1, zero1=True, micro_batch=1)


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_of_a_pipeline_are_kept(stages: int) -> None:
    ask = make_ask(objective="time")
    said = rules(pinned={"pp": 2}, stages_per_rank=(stages,))
    best = choose(replace(ask, question=replace(ask.question, rules={"bf16": said}))).best
    free = replace(ask.question, rules={"bf16": rules()})

    def stages_after(changes: dict[str, object]) -> int:
        question, _ = narrow(free, ask.prices, price_of(ask, best), best, changes)
        return int(search(question).points.virtual[0])

    assert best.layout.stages_per_rank == stages
    assert stages_after({"recompute": "full"}) == stages
    # Six layers cannot be parted into eight stages: there is one in each place again.
    assert stages_after({"pp": 4}) == 1


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({"nodes": 2_000_000}, "nodes: 2000000 does not go", "nodes may be 1 to 1048576"),
        ({"batch": 10**400}, "batch: expected a whole number from 1 to 2147483647", ""),
        ({"batch": 1}, "batch=1: there is no such layout of 16 devices", "a larger batch"),
        ({"batch": 1, "tp": 2}, "batch=1, tp=2: there is no such", "change fewer of them"),
        ({"precision": ["bf16"]}, "precision: ['bf16'] is not possible", "it may be bf16"),
        ({"recompute": None}, "recompute: None is not possible", "it may be full"),
        ({"tp": 3}, "tp: 3 does not go", "tp may be 1, 2 or 4"),
        ({"micro_batch": 3}, "micro_batch: 3 does not go", "micro_batch may be 1"),
        ({"precision": "fp64"}, "precision: 'fp64' is not possible", "it may be bf16"),
        ({"recompute": "some"}, "recompute: 'some'", "it may be full, none or selective"),
        ({"tpp": 2}, "no 'tpp' to replace", "did you mean 'tp'"),
        ({"pp": 0}, "pp: expected a whole number above 0, got 0", ""),
        ({"spot": 1}, "spot: expected True or False", ""),
        ({"spot": True}, "lambda:a100x4 is not offered as spot", "spot may be False"),
    ],
)
def test_an_impossible_change_names_the_field_and_the_choices(
    changes: dict[str, object], said: str, hint: str
) -> None:
    best = choose(make_ask(objective="time")).best
    with pytest.raises(PlanError) as caught:
        best.replace(**changes)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")
    assert len(str(caught.value)) < 500


def test_an_odd_machine_is_had_once() -> None:
    ask = make_ask(offers=(OFFERS[0]._replace(devices=3),), objective="time")
    configs = (replace(A100, devices=3, domain=3), T4)
    best = choose(replace(ask, question=replace(ask.question, configs=configs))).best
    with pytest.raises(PlanError, match="nodes: 2 does not go") as caught:
        best.replace(nodes=2)
    assert caught.value.hint == "nodes may be 1"


def test_a_change_that_does_not_fit_memory_is_refused_by_its_name() -> None:
    tight = replace(A100, memory_bytes=3.2e9)
    ask = make_ask(offers=OFFERS[:2])
    ask = replace(ask, question=replace(ask.question, configs=(tight, T4)))
    options = choose(ask)
    with pytest.raises(PlanError) as caught:
        options.replace(
            dp=options.best.hardware.devices, tp=1, pp=1, recompute="none", micro_batch=1
        )
    message, hint = caught.value.message, caught.value.hint or ""
    assert message.startswith("dp=")
    assert "recompute=none, micro_batch=1: " in message
    assert "97 %" in message
    assert "--max-devices" not in hint
    assert "recompute" in hint
    times = re.search(r"([0-9.]+) times", message)
    assert times is not None
    assert re.fullmatch(r"\d+\.\d\d", times[1])
    assert float(times[1]) > 1


@settings(max_examples=20, deadline=None)
@given(st.floats(1.000001, 1.2))
def test_what_does_not_fit_is_never_said_to_need_just_its_memory(excess: float) -> None:
    ask = make_ask()
    asked = replace(ask.question, configs=(A100,), rules={"bf16": TIGHTEST}, nodes=1)
    high = float(predict_memory(search(asked).points, asked.work).high[0])
    config = replace(A100, memory_bytes=high / USABLE / excess)
    with pytest.raises(PlanError, match="times its memory") as caught:
        choose(replace(ask, question=replace(asked, configs=(config,)), prices=ask.prices[:1]))
    times = re.search(r"([0-9.]+) times", caught.value.message)
    assert times is not None
    assert excess - 1e-6 <= float(times[1]) <= excess + 0.0101
    assert float(times[1]) > 1


def test_nothing_that_fits_is_an_error_that_says_what_to_change() -> None:
    ask = make_ask()
    tiny = tuple(replace(config, memory_bytes=1e6) for config in ask.question.configs)
    with pytest.raises(PlanError, match="fits none of the hardware") as caught:
        choose(replace(ask, question=replace(ask.question, configs=tiny)))
    assert "--max-devices" in (caught.value.hint or "")
    none = replace(ask.question, rules={"bf16": rules(batches=(1,), pinned={"dp": 3})})
    with pytest.raises(PlanError, match="No layout fits what the job says"):
        choose(replace(ask, question=none))


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (6, "devices: 6 devices are no whole number of these machines, which have 4."),
        (2, "devices: 2 devices are no whole number of these machines, which have 4."),
        (4000, "No layout fits what the job says: none of 4000 devices goes"),
    ],
)
def test_devices_that_cannot_be_had_are_named(devices: int, said: str) -> None:
    ask = make_ask(offers=OFFERS[:1])
    few = replace(ask.question, configs=(A100,), most_devices=1)
    with pytest.raises(PlanError, match=r"goal\.max_devices: 1 devices are fewer"):
        choose(replace(ask, question=few))
    asked = replace(ask.question, configs=(A100,), least_devices=devices, most_devices=devices)
    with pytest.raises(PlanError) as caught:
        choose(replace(ask, question=asked))
    assert caught.value.message.startswith(said)
    assert "--max-devices" not in (caught.value.hint or "")


def test_options_survive_json() -> None:
    options = choose(make_ask())
    again = PlanOptions.model_validate_json(options.to_json())
    assert again == options
    assert json.loads(options.to_json())["options"][0]["hardware"]["cloud"]
    assert [option.hardware for option in options] == [option.hardware for option in again.options]
    with pytest.raises(TypeError, match="plan it again"):
        again.best.replace(tp=2)


def test_they_explain_themselves() -> None:
    options = choose(make_ask())
    words = options.explain()
    for part in ("activations", "optimizer", "computing", "a step", "in all", "start up"):
        assert part in words
    assert words.count("memory of a device") == len(options)
