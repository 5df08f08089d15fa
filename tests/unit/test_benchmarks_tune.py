"""The arithmetic of the comparison of tuners."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.tune_parts.contenders import CONTENDERS
from benchmarks.tune_parts.curves import make_figures
from benchmarks.tune_parts.evidence import Taskset, list_tasks, load_task
from benchmarks.tune_parts.figures import Figure
from benchmarks.tune_parts.runs import Case, Run, list_cases, run_cases
from benchmarks.tune_parts.sampling import sample
from benchmarks.tune_parts.scoring import find_best, find_speedup, make_scales, score

from yunlu.lab.tuning_replay import ReplayTrace, replay
from yunlu.tuning.values import Dimension

TASK = "taskset/patch32_GRU128_bs128"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made curves in the format of TaskSet: the best rate is 1e-3, and the others stay far above."""
    folder = tmp_path_factory.mktemp("evidence")
    settings = sample(Taskset(folder=folder, name="").dimensions, 200, seed=0)
    hp = np.array([[float(value or 0) for value in params.values()] for params in settings])
    hp[:, 1:3] = 1 - hp[:, 1:3]  # the table has the betas themselves
    floor = 0.5 + 0.4 * np.abs(np.log10(hp[:, 0]) + 3)
    valid = floor[:, None] + 2 / np.arange(1, 52)
    np.savez(
        folder / "taskset_adam8p_12x1000x51.npz",
        **{"hp": hp, "imdb_patch32_GRU128_bs128/valid": valid},
    )
    (folder / "yahpo_lcbench").mkdir()
    codes = {"#na#": 0, "167083": 1, "7593": 2, "126026": 3}
    encoding = folder / "yahpo_lcbench" / "encoding.json"
    encoding.write_text(json.dumps({"OpenML_task_id": codes}), encoding="utf-8")
    return folder


def make_run(contender: str, task: str, seed: int, *improvements: tuple[float, float]) -> Run:
    case = Case(contender=contender, version="1", task=task, seed=seed, workers=4, trainings=100)
    return Run(
        case=case, budget_s=100, improvements=improvements, trials=1, evaluations=1, resumed=0,
        cpu_s=0.0,
    )  # fmt: skip


RUNS = [
    make_run("random", "a", 0, (5, 10.0), (50, 6.0)),
    make_run("random", "a", 1, (5, 12.0), (50, 8.0)),
    make_run("random", "a", 2, (5, 14.0), (50, 9.0)),
    make_run("yunlu", "a", 0, (5, 11.0), (10, 4.0), (80, 2.0)),
    make_run("yunlu", "a", 1, (5, 11.0), (20, 8.0), (80, 4.0)),
    make_run("yunlu", "a", 2, (5, 11.0), (20, 9.0), (80, 8.5)),
]


def test_random_early_on_has_regret_1_and_the_best_of_all_has_0() -> None:
    scale = make_scales(RUNS)["a"]
    assert (scale.one, scale.zero, scale.goal) == (12.0, 2.0, 8.0)
    assert scale.rate(12.0) == 1.0
    assert scale.rate(2.0) == 0.0
    assert scale.rate(7.0) == 0.5


def test_regret_and_speedup_are_those_of_the_median_over_seeds() -> None:
    random, own = score(RUNS, make_scales(RUNS))
    assert random.regrets[0.1] == 1.0
    assert random.regrets[1.0] == pytest.approx(0.6)
    assert own.regrets[0.1] == pytest.approx(0.9)
    assert own.regrets[1.0] == pytest.approx(0.2)
    assert own.speedup == pytest.approx(5)
    assert random.speedup == pytest.approx(2)


def test_tasks_count_alike() -> None:
    other = [replace(run, case=replace(run.case, task="b")) for run in RUNS[:3]]
    perfect = make_run("yunlu", "b", 0, (1, 0.0))
    own = score([*RUNS, *other, perfect], make_scales([*RUNS, *other, perfect]))[1]
    assert own.final_by_task == {"a": pytest.approx(0.2), "b": 0.0}
    assert own.regrets[1.0] == pytest.approx(0.1)
    assert own.speedup == pytest.approx((5 * 100) ** 0.5)


def test_a_task_on_which_random_did_not_run_is_not_scored() -> None:
    assert make_scales([make_run("yunlu", "a", 0, (1, 1.0))]) == {}


def test_what_comes_on_the_instant_counts_and_before_the_first_nothing_is_known() -> None:
    run = make_run("yunlu", "a", 0, (10, 3.0), (40, 1.0))
    assert find_best(run, 0.05) == math.inf
    assert find_best(run, 0.1) == 3.0
    assert find_best(run, 0.4) == 1.0
    assert find_speedup([run], 1.0) == 2.5
    assert find_speedup([run], 0.5) == pytest.approx(1 / 1.5)


def test_figures_are_judged_by_their_bounds() -> None:
    assert Figure(name="", value=1).is_met is None
    assert Figure(name="", value=1, at_most=1).is_met
    assert not Figure(name="", value=math.nan, at_most=1).is_met
    assert not Figure(name="", value=5.9, at_least=6).is_met
    regret, speedup = make_figures(score(RUNS, make_scales(RUNS)))
    assert regret.is_met
    assert not speedup.is_met


def test_random_settings_keep_to_their_ranges_and_reach_the_ends_of_whole_numbers() -> None:
    dimensions = (
        Dimension(name="layers", low=1, high=3, is_int=True),
        Dimension(name="rate", low=1e-4, high=1e-1, log=True),
        Dimension(name="kind", choices=("a", "b")),
    )
    drawn = sample(dimensions, 300, seed=1)
    layers = [params["layers"] for params in drawn]
    assert {layer: 75 < layers.count(layer) < 125 for layer in (1, 2, 3)} == dict.fromkeys(
        (1, 2, 3), True
    )
    rates = [float(params["rate"] or 0) for params in drawn]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert 120 < sum(rate < 10**-2.5 for rate in rates) < 180
    assert {params["kind"] for params in drawn} == {"a", "b"}
    assert drawn == sample(dimensions, 300, seed=1)


def test_versions_follow_what_the_code_does() -> None:
    version = CONTENDERS["random"].find_version()
    assert version == CONTENDERS["random"].find_version()
    assert version != CONTENDERS["tpe"].find_version()


def test_runs_are_kept_and_not_done_again(tmp_path: Path, folder: Path) -> None:
    contenders = {"random": CONTENDERS["random"]}
    cases = list_cases(
        list(contenders.values()), [TASK], [0, 1], workers=4, trainings=5, resume_steps=0
    )
    kept = tmp_path / "runs.jsonl"
    first = [run for _, run in run_cases(cases, contenders, folder, kept)]
    kept.write_text(kept.read_text(encoding="utf-8") + '{"case": {"torn', encoding="utf-8")
    again = [run for _, run in run_cases(cases, {}, folder, kept)]
    assert again == first
    assert all(isinstance(run, Run) and run.evaluations > 100 for run in first)


def test_tasks_are_listed_those_of_lcbench_first(folder: Path) -> None:
    assert list_tasks(folder) == ["lcbench/7593", "lcbench/126026", TASK]


@pytest.mark.parametrize("name", ["tpe", "hyperband", "halving"])
def test_optunas_methods_run_and_only_those_with_a_pruner_prune(folder: Path, name: str) -> None:
    curves = load_task(folder, TASK)

    def search() -> ReplayTrace:
        method = CONTENDERS[name].make(curves.dimensions, curves.rungs, 0)
        return replay(method, curves, workers=4, budget_s=51 * 3)

    trace = search()
    assert trace == search()
    pruned = sum(trial.state == "pruned" for trial in trace.trials)
    assert (pruned > 0) == (name != "tpe")
    assert trace.resumed == 0


@pytest.mark.slow
def test_ray_tunes_scheduler_stops_at_its_own_milestones(folder: Path) -> None:
    curves = load_task(folder, TASK)
    method = CONTENDERS["asha"].make(curves.dimensions, curves.rungs, 0)
    trace = replay(method, curves, workers=4, budget_s=51 * 6)
    stopped = [trial.rung for trial in trace.trials if trial.state == "pruned"]
    assert set(stopped) == {1, 4, 16}
    assert stopped.count(1) > len(trace.trials) / 2
