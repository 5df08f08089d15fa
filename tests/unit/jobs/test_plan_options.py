"""From a job to its options: what is counted, what is assumed, what is refused."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sample_events import sample
from yunlu.core.errors import DataError, JobError
from yunlu.core.files import append_lines
from yunlu.core.settings import read_settings
from yunlu.hardware.catalog import CatalogError
from yunlu.jobs.catalog_store import add, open_catalog
from yunlu.jobs.dataset_size import block_length, measure_dataset
from yunlu.jobs.job_input import build_job
from yunlu.jobs.model_profile import JobShape, find_shape
from yunlu.jobs.plan_options import make_query, plan_options, search_options
from yunlu.planning.analytic_estimate import name_work
from yunlu.planning.calibration import Calibration, RunMeasurement
from yunlu.planning.machine_profile import FOLDER, KernelTiming, MachineProfile, dump_profiles
from yunlu.planning.plan import Interval, Plan
from yunlu.planning.search.options import PlanError
from yunlu.planning.search.priced_plan import START_HERE_S
from yunlu.render.plots import write_plan_plot
from yunlu.render.run_figures import find_front
from yunlu.runs.events import AttemptStarted
from yunlu.runs.home import open_run
from yunlu.runs.run_store import Log
from yunlu.spec.job import Job
from yunlu.spec.load import load_job


def make_job(**parts: Any) -> Job:
    plain = {
        "task": "language-modeling",
        "model": "hf:meta-llama/Llama-3.2-1B",
        "data": {"train": "nowhere.txt", "tokens": 100_000_000, "max_length": 1024},
        "train": {"batch": 64, "epochs": 1},
        "goal": {"gpu": ["A100-80GB", "L4"], "cloud": ["aws", "gcp", "lambda"], "max_devices": 8},
    }
    return Job.model_validate({**plain, **parts})


def tabular(source: str, **data: Any) -> Job:
    told = {"task": "tabular-classification", "model": "mlp", "data": {"train": source, **data}}
    return Job.model_validate(told)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A machine that was probed: slow, but here."""
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "cache"))
    pace = KernelTiming(
        kind="product", threads=2, sizes=(1e6, 1e9), seconds=(1e-4, 1e-2), spread=0.0
    )
    figures = MachineProfile(
        at=time.time(),
        took_s=1.0,
        is_quick=True,
        host=socket.gethostname(),
        kind="cpu",
        device="Old Faithful",
        cores=2,
        memory_bytes=8 * 2**30,
        threads=2,
        torch="2.13.0",
        paces=(pace,),
        memory_bytes_per_s=1e10,
        call_s=1e-5,
    )
    path = read_settings().cache / FOLDER / f"{socket.gethostname()}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(dump_profiles([figures]))
    return figures.name


def test_options_are_within_what_the_goal_allows() -> None:
    options = plan_options(make_job(), top=5)
    assert len(options) >= 2
    for option in options:
        hardware = option.hardware
        assert hardware.device in {"A100-80GB", "L4"}
        assert hardware.cloud in {"aws", "gcp", "lambda"}
        assert hardware.devices <= 8
        assert not hardware.spot
        assert option.layout.world == hardware.devices
        assert option.batch == 64
        assert option.steps == round(100_000_000 / 1024 / 64)
        assert option.tokens_per_s is not None
    assert not options.problems


def test_spot_machines_come_only_where_they_are_allowed() -> None:
    goal = {"gpu": ["A100-80GB"], "spot": True, "objective": "cost", "max_devices": 8}
    assert plan_options(make_job(goal=goal)).best.hardware.spot


def test_evaluation_and_start_up_are_in_the_time() -> None:
    never = plan_options(make_job(train={"batch": 64, "epochs": 1, "evaluate": "never"})).best
    often = plan_options(make_job()).best
    assert (
        often.prediction.total_parts["evaluation"] > never.prediction.total_parts["evaluation"] > 0
    )
    assert often.prediction.total_parts["start_up"] > 0


def test_the_layout_of_the_job_is_kept() -> None:
    options = plan_options(make_job(layout="dp2 x tp2"))
    assert {str(option.layout) for option in options} == {"dp2 x tp2"}
    pinned = plan_options(make_job(train={"batch": 64, "steps": 10, "recompute": "full",
                                     "precision": "bf16", "micro_batch": 2}))  # fmt: skip
    for option in pinned:
        assert (option.recompute, option.precision, option.micro_batch) == ("full", "bf16", 2)


def test_an_option_can_be_pinned_in_its_job(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(make_job().model_dump_json())
    for option in plan_options(make_job(), top=4):
        changed = option.replace(tp=2) if option.hardware.devices_per_node > 1 else option
        job = load_job(path, overrides=changed.overrides)
        assert job.devices == changed.layout.world
        again = plan_options(job, top=1).best
        assert again.layout.world == changed.layout.world
        assert (again.layout.tp, again.layout.sequence) == (changed.layout.tp, False)
        assert again.micro_batch == changed.micro_batch


def test_what_yunlu_cannot_split_is_not_split() -> None:
    lora = make_job(model={"name": "hf:meta-llama/Llama-3.2-1B", "adapter": "lora"})
    for option in plan_options(lora, top=5):
        assert (option.layout.tp, option.layout.pp) == (1, 1)
    released = {"batch": 8, "steps": 10, "gradient_release": True, "clip": None}
    for option in plan_options(make_job(train=released), top=5):
        assert option.layout.is_single


@pytest.mark.parametrize(
    ("model", "task", "layout", "said"),
    [
        ("hf:gpt2", "language-modeling", {"tp": 2}, r"layout\.tp: .* has no tensor-parallel plan"),
        ("hf:mixtral-8x7b", "language-modeling", {"tp": 4}, r"layout\.tp: .* weights of experts"),
        ("hf:t5-11b", "seq2seq", {"pp": 2}, r"layout\.pp: .* several stacks of layers"),
        ("hf:meta-llama/Llama-3.2-1B", "language-modeling", {"tp": 3}, r"layout\.tp: .* 3 ways"),
        ("hf:meta-llama/Llama-3.2-1B", "language-modeling", {"pp": 17}, "16 blocks in a row"),
        ("hf:meta-llama/Llama-3.2-1B", "language-modeling", {"tp": 2, "sequence": True},
         r"layout\.sequence: "),
    ],
)  # fmt: skip
def test_a_layout_that_our_engine_refuses_is_refused_with_its_reason(
    model: str, task: str, layout: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        plan_options(make_job(model=model, task=task, layout=layout))


def test_a_layout_that_goes_with_nothing_else_of_the_job_is_refused() -> None:
    lora = {"name": "hf:meta-llama/Llama-3.2-1B", "adapter": "lora"}
    with pytest.raises(JobError, match=r"model\.adapter does not go with the layout tp2"):
        plan_options(make_job(model=lora, layout={"tp": 2}))


def test_only_layouts_our_engine_can_train_are_options() -> None:
    goal = {"gpu": ["A100-80GB"], "cloud": ["aws", "gcp"], "max_devices": 32}
    experts = plan_options(make_job(model="hf:mixtral-8x7b", goal=goal), top=5)
    assert {option.layout.tp for option in experts} == {1}
    assert any(option.layout.pp > 1 or option.layout.fsdp > 1 for option in experts)
    paired = plan_options(make_job(model="hf:t5-11b", task="seq2seq", goal=goal), top=5)
    assert {(option.layout.tp, option.layout.pp) for option in paired} == {(1, 1)}
    with pytest.raises(PlanError, match="tp"):
        experts.best.replace(tp=2)


def test_the_sequence_is_cut_only_in_our_own_transformers() -> None:
    own = make_job(
        data={"train": "x.txt", "samples": 1000, "max_length": 64, "tokenizer": "bytes"},
        model={"name": "transformer", "args": {"width": 64, "layers": 2}},
        goal={"gpu": "A100-80GB", "cloud": "gcp", "max_devices": 8},
        devices=8,
    )
    best = plan_options(own, top=1).best
    assert best.replace(tp=2).layout.sequence
    theirs = plan_options(
        make_job(devices=8, goal={"gpu": "A100-80GB", "cloud": "gcp"}), top=1
    ).best
    assert not theirs.replace(tp=2).layout.sequence


def test_an_open_batch_grows_up_to_what_still_teaches_and_the_rate_follows() -> None:
    options = plan_options(make_job(train={"epochs": 1}))
    assert options.best.batch > 32
    assert options.best.lr_scaling == "sqrt"
    assert options.best.lr_factor == pytest.approx((options.best.batch / 32) ** 0.5)
    goal = {"gpu": ["A100-80GB"], "max_batch": 64, "max_devices": 8}
    assert plan_options(make_job(train={"epochs": 1}, goal=goal)).best.batch <= 64
    sgd = make_job(train={"epochs": 1, "optimizer": "sgd"})
    assert plan_options(sgd).best.lr_scaling == "linear"
    assert plan_options(make_job()).best.lr_factor == 1.0


@pytest.mark.parametrize("rule", ["none", "linear"])
def test_a_rule_of_the_job_is_not_overruled(rule: str) -> None:
    optimizer = {"name": "adamw", "scaling": rule}
    best = plan_options(make_job(train={"epochs": 1, "optimizer": optimizer})).best
    assert best.batch > 32
    assert best.lr_scaling == rule


def test_the_rule_goes_with_the_batch_that_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    asked = make_job(train={"epochs": 1, "optimizer": "sgd"})
    path.write_text(asked.model_dump_json(exclude_unset=True))
    best = plan_options(asked).best
    again = plan_options(load_job(path, overrides=best.overrides), top=1).best
    assert (again.lr_scaling, again.lr_factor) == ("linear", best.lr_factor)
    assert best.lr_factor > 1


def test_a_job_with_more_said_besides_keeps_what_it_leaves_open() -> None:
    asked = build_job(make_job(train={"epochs": 1}), (), {"epochs": 2})
    assert "scaling" not in asked.train.optimizer.model_fields_set


def test_evaluating_after_steps_costs_less_in_larger_batches() -> None:
    every = {"epochs": 1, "batch": 64, "evaluate": 10}
    best = plan_options(make_job(train=every)).best
    larger = best.replace(batch=256)

    def share(option: Plan) -> float:
        parts = option.prediction.total_parts
        return parts["evaluation"] / parts["steps"]

    validated = 100_000_000 / 1024 / 8
    assert share(best) - share(larger) == pytest.approx(
        validated / 30 * (1 / 64 - 1 / 256), rel=0.01
    )


def test_steps_need_no_count_of_samples() -> None:
    job = make_job(data={"train": "nowhere.txt", "max_length": 1024},
                   train={"steps": 100, "batch": 64})  # fmt: skip
    options = plan_options(job)
    assert options.best.steps == 100
    assert any("data.samples" in note for note in options.notes)
    with pytest.raises(DataError, match=r"data\.train") as caught:
        plan_options(make_job(data={"train": "nowhere.txt", "max_length": 1024}))
    assert "data.samples or data.tokens" in (caught.value.hint or "")


def test_a_budget_nothing_meets_comes_with_advice() -> None:
    goal = {"gpu": ["A100-80GB"], "cloud": ["aws"], "budget": 0.05, "max_devices": 8}
    options = plan_options(make_job(goal=goal))
    assert options.problems[0].startswith("goal.budget: nothing fits $0.05")
    assert any(problem.startswith("To change: ") for problem in options.problems[1:])
    assert options.best.dollars is not None
    assert options.best.dollars.value > 0.05


def test_a_limit_that_is_advised_can_be_kept() -> None:
    goal = {"gpu": ["A100-80GB"], "cloud": ["aws"], "budget": 0.01, "max_devices": 8}
    problems = plan_options(make_job(goal=goal)).problems
    raised = next(re.search(r"a budget of \$([\d.,]+) would do", problem) for problem in problems[1:]
                  if "a budget of" in problem)  # fmt: skip
    assert raised is not None
    assert "only" not in raised.string
    again = goal | {"budget": float(raised[1].replace(",", ""))}
    assert not plan_options(make_job(goal=again)).problems


def test_what_comes_nearest_is_advised_where_nothing_is_enough() -> None:
    goal = {"gpu": ["A100-80GB"], "cloud": ["aws"], "budget": 0.01, "max_devices": 8}
    problems = plan_options(make_job(goal=goal)).problems
    assert any(problem.endswith("which comes nearer") for problem in problems)


def test_advice_asks_for_the_shape_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []

    def find(job: Job) -> JobShape:
        asked.append(job)
        return find_shape(job)

    monkeypatch.setattr("yunlu.jobs.plan_options.find_shape", find)
    goal = {"gpu": ["A100-80GB"], "cloud": ["aws"], "budget": 0.05, "max_devices": 8}
    assert plan_options(make_job(goal=goal)).problems
    assert len(asked) == 1


def test_a_deadline_may_be_met_with_more_devices() -> None:
    goal = {"gpu": ["A100-80GB"], "cloud": ["aws"], "max_devices": 8}
    slow = plan_options(make_job(goal=goal | {"objective": "time"})).best.total_s.value
    deadline = f"{round(slow * 0.8)}s"
    options = plan_options(make_job(goal=goal | {"deadline": deadline}))
    assert options.problems[0].startswith("goal.deadline: ")
    assert any("--max-devices 64" in problem for problem in options.problems)


@pytest.mark.parametrize(
    ("goal", "error", "said"),
    [
        ({"gpu": ["H1000"]}, CatalogError, "there is no device 'H1000'"),
        ({"cloud": ["awss"]}, CatalogError, "did you mean 'aws'"),
        ({"gpu": ["A100-80GB"], "cloud": ["aws"], "region": ["moon"]}, CatalogError, "'moon'"),
        ({"cloud": ["here"]}, PlanError, "not been probed"),
    ],
)
def test_hardware_that_does_not_exist_is_named_with_the_choices(
    goal: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "empty"))
    with pytest.raises(error) as caught:
        plan_options(make_job(goal=goal))
    assert said in str(caught.value)


def test_a_micro_batch_that_cannot_divide_is_refused_with_those_that_can() -> None:
    with pytest.raises(PlanError, match=r"train\.micro_batch: 3 does not divide") as caught:
        plan_options(make_job(train={"batch": 16, "steps": 5, "micro_batch": 3}))
    assert "1, 2, 4, 8, 16" in (caught.value.hint or "")


def test_a_model_too_large_for_what_is_allowed_says_what_would_help() -> None:
    goal = {"gpu": ["L4"], "max_devices": 2}
    with pytest.raises(PlanError, match="times its memory") as caught:
        plan_options(make_job(model="hf:meta-llama/Llama-3.1-70B", goal=goal))
    assert "model.adapter: lora" in (caught.value.hint or "")


def test_what_needs_more_devices_than_usual_gets_them() -> None:
    goal = {"gpu": ["L4"], "cloud": ["gcp"]}
    options = plan_options(make_job(model="hf:meta-llama/Llama-3.1-70B", goal=goal), top=1)
    assert options.best.hardware.devices > 64
    assert any("cannot hold the model" in note for note in options.notes)


@pytest.mark.parametrize("cloud", ["gcp", "aws", "azure"])
def test_a_cloud_alone_names_no_device_that_we_cannot_train_on(cloud: str) -> None:
    goal = {"cloud": cloud, "objective": "cost", "max_devices": 8}
    for option in plan_options(make_job(goal=goal), top=12):
        device = option.hardware.device
        assert not device.startswith(("TPU", "Trainium", "K80", "P4", "P100", "V100")), device


def test_a_device_we_cannot_train_on_comes_last_however_cheap() -> None:
    goal = {"gpu": ["TPU-v5e", "T4"], "objective": "cost", "max_devices": 8}
    options = plan_options(make_job(goal=goal), top=8)
    kinds = [option.hardware.device for option in options]
    assert kinds == sorted(kinds)
    assert set(kinds) == {"T4", "TPU-v5e"}
    costs = [option.dollars.value for option in options if option.dollars is not None]
    assert min(costs) < costs[0]
    assert "TPU-v5e" in str(options.notes)
    cheapest = [option for option in options if "cheapest" in option.reason]
    assert [option.hardware.device for option in cheapest] == ["T4"]
    assert "only compared" in options[len(options) - 1].reason
    assert plan_options(make_job(goal=goal), top=1).best.hardware.device == "T4"


def test_an_old_device_that_is_named_comes_with_a_note() -> None:
    options = plan_options(make_job(goal={"gpu": ["V100-32GB", "A100-80GB"], "max_devices": 8}))
    assert any("V100-32GB" in note and "CUDA 12.6" in note for note in options.notes)
    assert not any("CUDA 12.6" in note for note in plan_options(make_job()).notes)


def test_one_of_several_regions_may_have_nothing() -> None:
    goal = {"gpu": ["A100-80GB"], "cloud": ["aws"], "region": ["moon", "us-"], "max_devices": 8}
    options = plan_options(make_job(goal=goal))
    assert {option.hardware.cloud for option in options} == {"aws"}
    assert any("'moon'" in note for note in options.notes)


def test_here_is_a_cloud_and_filters_meet(probed: str) -> None:
    for key in ("gpu", "region"):
        with pytest.raises(PlanError, match=rf"goal\.{key}: here names a cloud"):
            plan_options(make_job(goal={key: ["here"], "cloud": ["aws"]}))
    with pytest.raises(PlanError, match="nothing with gpu H100, cloud here"):
        plan_options(make_job(goal={"gpu": ["H100"], "cloud": ["here"]}))
    both = {"gpu": ["A100-80GB", probed], "cloud": ["here", "aws"]}
    configs = make_query(make_job(goal=both), open_catalog())[0].question.configs
    assert {config.device for config in configs} == {"A100-80GB", probed}
    with pytest.raises(CatalogError, match="us-"):
        plan_options(make_job(goal={"cloud": ["here"], "region": ["us-"]}))


def test_huawei_has_no_price_and_the_user_is_told_how_to_set_one() -> None:
    options = plan_options(make_job(goal={"cloud": ["huawei"], "max_devices": 8}))
    assert all(option.dollars is None for option in options)
    assert "price unknown" in options.best.reason
    assert any("yunlu catalog add" in note for note in options.notes)


def test_this_machine_is_an_option_once_it_is_probed(probed: str, own_home: Path) -> None:
    small = {
        "data": {"train": "nowhere.txt", "samples": 100, "max_length": 16},
        "model": {"name": "transformer", "args": {"width": 32, "layers": 1}},
        "train": {"epochs": 1, "batch": 16},
    }
    small["data"]["tokenizer"] = "bytes"  # type: ignore[index]
    best = plan_options(make_job(**small, goal={})).best
    assert (best.hardware.cloud, best.hardware.device) == ("here", probed)
    assert best.dollars is not None
    assert best.dollars.value == 0
    assert "here" not in {each.hardware.cloud for each in plan_options(make_job(**small))}
    here = plan_options(make_job(**small, goal={"cloud": "here"}))
    assert len(here) == 1
    assert not here.notes
    assert here.best.prediction.total_parts["start_up"] == START_HERE_S
    run = open_run(own_home / "earlier")
    run.path.mkdir(parents=True)
    run.emit(sample(AttemptStarted, began_at=1000.0, process_started_at=1000.0))
    append_lines(run.path / Log.METRICS, [{"step": 1, "at": 1007.0}])
    again = plan_options(make_job(**small, goal={"cloud": "here"})).best
    assert again.prediction.total_parts["start_up"] == 7.0
    assert again.total_s.value == pytest.approx(here.best.total_s.value + 7.0 - START_HERE_S)


def test_an_own_machine_is_planned_once_and_is_not_this_one(
    probed: str, own_home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    machine = {"name": "lab", "device": "A100-80GB", "devices": 8, "dollars_per_hour": 9.0}
    file.write_text(json.dumps({"machines": [machine]}))
    add(file)
    teach(make_job(), probed, step_s=1e-6)
    asked = make_job(goal={"cloud": ["own", "aws"], "gpu": ["A100-80GB"]})
    ask, _ = make_query(asked, open_catalog())
    assert {config.most_nodes for config in ask.question.configs} == {1, 1 << 20}
    assert all(config.measured is None for config in ask.question.configs)
    options = plan_options(make_job(goal={"cloud": ["own"]}), top=9)
    assert {option.hardware.nodes for option in options} == {1}
    with pytest.raises(PlanError, match="nodes: 2 does not go"):
        options.replace(nodes=2)


def test_what_is_assumed_of_shown_hardware_is_noted() -> None:
    many = make_job(goal={"cloud": ["lambda"], "gpu": ["B200"], "objective": "time"})
    assert plan_options(many).best.hardware.nodes > 1
    assert any("network between nodes of lambda:" in note for note in plan_options(many).notes)
    one = make_job(goal={"cloud": ["lambda"], "gpu": ["B200"], "max_devices": 8})
    assert not any("network" in note for note in plan_options(one).notes)
    alone = make_job(train={"batch": 64, "epochs": 1, "precision": "fp8"}, goal={"gpu": ["H100"]})
    options = plan_options(alone)
    assert {option.layout.world for option in options} == {1}
    assert any(note.startswith("one device only, for train.precision") for note in options.notes)


def small_job(**train: Any) -> Job:
    return make_job(
        data={"train": "nowhere.txt", "samples": 100, "max_length": 16, "tokenizer": "bytes"},
        model={"name": "transformer", "args": {"width": 32, "layers": 1}},
        train={"epochs": 1, "batch": 16, **train},
        goal={"cloud": "here"},
    )


def teach(job: Job, device: str, *, busy: float = 1.0, **measured: float) -> None:
    figures = [
        RunMeasurement(
            run="a-run",
            at=1.0,
            quantity=quantity,  # pyright: ignore[reportArgumentType]
            device=device,
            stack="yunlu",
            precision="fp32",
            work=name_work(job),
            predicted=1.0,
            measured=value,
            busy=busy if quantity == "step_s" else 1.0,
        )
        for quantity, value in measured.items()
    ]
    path = read_settings().cache / "calibration.json"
    path.write_text(Calibration(figures=tuple(figures)).model_dump_json())


def width(interval: Interval) -> float:
    return interval.high / interval.low


def test_a_run_of_the_same_job_is_believed_before_arithmetic(probed: str) -> None:
    before = plan_options(small_job()).best
    teach(small_job(), probed, step_s=0.5, memory_bytes=3e8)
    after = plan_options(small_job()).best
    assert before.step_s.value != pytest.approx(0.5)
    assert after.step_s.value == pytest.approx(0.5)
    assert after.memory_bytes.value == pytest.approx(3e8)
    assert width(after.step_s) < width(before.step_s)


def test_a_run_on_a_busy_machine_tells_its_memory_alone(probed: str) -> None:
    before = plan_options(small_job()).best
    teach(small_job(), probed, busy=1.5, step_s=0.5, memory_bytes=3e8)
    after = plan_options(small_job()).best
    assert after.step_s == before.step_s
    assert after.memory_bytes.value == pytest.approx(3e8)
    teach(small_job(), probed, busy=1.1, step_s=0.5)
    assert plan_options(small_job()).best.step_s.value == pytest.approx(0.5)


def test_only_what_was_measured_is_narrower(probed: str) -> None:
    before = plan_options(small_job()).best
    teach(small_job(), probed, memory_bytes=3e8)
    after = plan_options(small_job()).best
    assert after.memory_bytes.value == pytest.approx(3e8)
    assert width(after.memory_bytes) < width(before.memory_bytes)
    assert after.step_s == before.step_s


def test_what_differs_from_the_run_is_no_surer_than_before(probed: str) -> None:
    before = plan_options(small_job()).best.replace(micro_batch=2)
    teach(small_job(), probed, step_s=0.5, memory_bytes=3e8)
    after = plan_options(small_job()).best.replace(micro_batch=2)
    assert after.step_s.value != pytest.approx(before.step_s.value)
    assert width(after.step_s) == pytest.approx(width(before.step_s))
    assert width(after.memory_bytes) == pytest.approx(width(before.memory_bytes))


def test_a_run_had_the_usual_batch_however_far_an_open_one_may_grow(probed: str) -> None:
    asked = make_job(
        data={"train": "nowhere.txt", "samples": 1 << 20, "max_length": 16, "tokenizer": "bytes"},
        model={"name": "transformer", "args": {"width": 32, "layers": 1}},
        train={"epochs": 1},
        goal={"cloud": "here", "max_batch": 1024},
    )
    before = plan_options(asked).best
    assert before.batch > 32
    teach(asked, probed, step_s=0.5)
    after = plan_options(asked).best
    assert after.replace(batch=32).step_s.value == pytest.approx(0.5, rel=0.05)
    assert width(after.step_s) == pytest.approx(width(before.step_s))


def test_another_way_to_compute_is_another_work() -> None:
    usual = name_work(small_job())
    for changed in ({"micro_batch": 4}, {"recompute": "full"}, {"optimizer": "sgd"}):
        assert name_work(small_job(**changed)) != usual
    assert name_work(small_job(optimizer={"lr": 0.5})) == usual
    assert name_work(small_job(epochs=7)) == usual


def test_samples_are_counted_at_a_glance(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,b\n" + "1,2\n" * 100)
    amounts = measure_dataset(tabular(str(table)), seq=1)
    assert (amounts.train, amounts.validation, amounts.test) == (80, 10, 10)
    assert measure_dataset(tabular(str(table), limit=7), seq=1).train == 7
    lines = tmp_path / "t.jsonl"
    lines.write_text("\n".join(json.dumps({"a": i}) for i in range(50)))
    split = {"validation": 0, "test": 0}
    assert measure_dataset(tabular(str(lines), split=split), seq=1).train == 50
    held = tmp_path / "v.jsonl"
    held.write_text("{}\n" * 5)
    both = measure_dataset(tabular(str(lines), validation=str(held), test=str(held)), seq=1)
    assert (both.train, both.validation, both.test) == (50, 5, 5)
    np.save(tmp_path / "x.npy", np.zeros((30, 4)))
    assert measure_dataset(tabular(str(tmp_path / "x.npy"), split=split), seq=1).train == 30
    folder = tmp_path / "images"
    (folder / "cat").mkdir(parents=True)
    for number in range(6):
        (folder / "cat" / f"{number}.png").write_bytes(b"")
    (folder / "README").write_text("pictures of a cat")
    assert measure_dataset(tabular(str(folder), split=split), seq=1).train == 6
    assert measure_dataset(tabular("sklearn:iris"), seq=1).train == 120
    assert measure_dataset(tabular("synthetic:spoken-words"), seq=1).train == 448


def test_a_text_is_counted_in_blocks_of_tokens(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("x" * 10_000)
    job = make_job(data={"train": str(text), "tokenizer": "bytes", "split": {"test": 0}})
    assert block_length(job) == 128
    assert measure_dataset(job, seq=128).train == 78 - 8
    hinted = make_job(data={"train": "s3://bucket/x", "tokens": 1_000_000})
    assert measure_dataset(hinted, seq=1000).train == 1000
    with pytest.raises(DataError, match="cannot be counted"):
        measure_dataset(make_job(data="s3://bucket/x"), seq=128)


def test_the_front_is_what_nothing_beats() -> None:
    dots = [(1.0, 9.0), (2.0, 5.0), (2.5, 6.0), (4.0, 1.0), (5.0, 1.0)]
    assert find_front(dots) == [(1.0, 9.0), (2.0, 5.0), (4.0, 1.0)]


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_a_picture_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seen = search_options(make_job(), top=2, everything=True)
    path = tmp_path / f"out.{suffix}"
    write_plan_plot(seen, path, title="a <job>")
    content = path.read_bytes()
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[suffix]
    assert content.startswith(begins)
    if suffix == "html":
        assert b"a &lt;job&gt;" in content
        assert str(seen.options.best.hardware).encode() in content
