"""The measuring itself, on sizes that take no time; what it counts is checked, not how fast it is."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.unit.planning.test_machine_profile import pace, probe
from tests.unit.planning.test_planner import profile as planned_profile
from yunlu.planning.machine_profile import parse_profiles
from yunlu.training import prepare, profile
from yunlu.training.autotune.budget import MeasuringBudget
from yunlu.training.prepare import load_or_measure
from yunlu.training.probe import probe_machine
from yunlu.training.probing import links, measure, microbenchmarks, profile_store
from yunlu.training.probing.measure import measure_disk
from yunlu.training.probing.microbenchmarks import (
    Bench,
    attention_size,
    bench_for,
    count_operators,
    measure_attention,
    measure_bandwidth,
    measure_call,
    measure_convolutions,
    measure_mixed,
    measure_moves,
    measure_products,
    with_threads,
)

if TYPE_CHECKING:
    from pathlib import Path


def brief() -> Bench:
    """By a clock that no load can slow down."""
    ticks = itertools.count()
    return Bench(budget_s=1e-9, trials=2, clock=lambda: 1e-6 * next(ticks))


def counted(run: Any) -> dict[tuple[str, float], int]:
    return {(each.kind, each.size): each.calls for each in count_operators(run)}


def test_products_are_counted_by_their_flops_forward_and_backward() -> None:
    layer, inputs = nn.Linear(3, 5, bias=False), torch.randn(7, 3, requires_grad=True)
    found = counted(lambda: layer(inputs).sum().backward())
    assert found["product", 2.0 * 7 * 3 * 5] == 3


def test_views_cost_a_call_sums_what_they_read_and_write() -> None:
    numbers = torch.ones(10, 4)
    assert counted(lambda: numbers.view(40)) == {("stream", 0.0): 1}
    assert counted(lambda: numbers + numbers) == {("stream", 480.0): 1}
    spread = torch.ones(1).expand(1000)
    assert counted(lambda: numbers[0].sum() + spread.sum())["stream", 8.0] >= 1


def test_functions_drawn_numbers_convolutions_and_attention_are_told_apart() -> None:
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    weights = torch.randn(4, 3, 3, 3, requires_grad=True)
    found = counted(lambda: functional.conv2d(images, weights).sum().backward())
    kinds = {kind: size for kind, size in found if size}
    assert kinds["convolution"] == 2.0 * 2 * 4 * 36 * 27
    assert kinds["convolution_back"] == 2 * kinds["convolution"]
    kinds = {kind for kind, _ in counted(lambda: functional.dropout(functional.gelu(images)))}
    assert {"function", "random"} <= kinds
    query = torch.randn(2, 2, 6, 8, requires_grad=True)
    asked = lambda: functional.scaled_dot_product_attention(query, query, query).sum().backward()
    found = counted(asked)
    assert found["attention", attention_size((2, 2, 6, 8), 6, products=2)] == 1
    assert found["attention", attention_size((2, 2, 6, 8), 6, products=5)] == 1


def test_counting_changes_no_result() -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 4)
    model(inputs).sum().backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    count_operators(lambda: model(inputs).sum().backward())
    for weight, before in zip(model.parameters(), expected, strict=True):
        assert torch.equal(weight.grad, before)


def test_the_best_of_the_trials_counts_and_the_spread_is_that_of_the_median() -> None:
    ticks = itertools.accumulate([0, 9, 0, 2, 0, 1, 0, 4, 0, 2, 0, 2])
    bench = Bench(budget_s=100.0, trials=5, clock=lambda: float(next(ticks)))
    best, spread = bench.time(lambda: None)
    assert best == 1.0
    assert spread == 1.0


@pytest.mark.parametrize("stalled", [0, 1, 2, 3])
def test_one_stalled_trial_is_not_what_a_size_takes(stalled: int) -> None:
    spans = [float(9 if i == stalled else 1) for i in range(4)]
    ticks = itertools.accumulate(each for span in spans for each in (0.0, span))
    calls = itertools.count()
    bench = Bench(budget_s=0.5, trials=5, clock=lambda: next(ticks))
    assert bench.time(lambda: next(calls))[0] == 1.0
    assert next(calls) == 4  # to warm up, and three of which one may be disturbed


def test_a_stall_costs_a_curve_none_of_its_sizes_and_only_a_slow_machine_stops_early() -> None:
    def clock_of(spans: dict[int, float], usual: float) -> Any:
        """Trials take the usual time but some."""
        asked, now = itertools.count(), 0.0

        def clock() -> float:
            nonlocal now
            trial, is_end = divmod(next(asked), 2)
            now += spans.get(trial, usual) if is_end else 0.0
            return now

        return clock

    sides = (2, 3, 4, 5, 6, 7)
    bench = Bench(budget_s=1e-9, clock=clock_of({0: 5.0, 5: 5.0, 18: 5.0}, 1e-3))
    assert len(measure_products(bench, "fp32", sides).sizes) == len(sides)
    slow = Bench(budget_s=1e-9, clock=clock_of({}, 5.0))
    assert len(measure_products(slow, "fp32", sides).sizes) == 4


def test_one_thread_is_timed_by_its_own_clock_and_threads_are_put_back() -> None:
    assert bench_for("cpu", 1).clock is not bench_for("cpu", 2).clock
    before = torch.get_num_threads()
    with with_threads(1):
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_products_give_a_pace_that_never_falls(precision: str) -> None:
    found = measure_products(brief(), precision, (2, 4, 8))
    assert found.sizes == (16.0, 128.0, 1024.0)
    assert list(found.seconds) == sorted(found.seconds)
    assert all(each > 0 for each in found.seconds)


def test_every_kind_can_be_measured() -> None:
    for kind in ("stream", "function", "random", "update"):
        found = measure_moves(brief(), kind, (336, 3360))
        assert found.kind == kind
        assert found.sizes[1] == pytest.approx(10 * found.sizes[0])
    forward, backward = measure_convolutions(brief(), ((1, 4, 1), (2, 4, 2)))
    assert [2 * size for size in forward.sizes] == list(backward.sizes)
    assert measure_attention(brief(), ((1, 1, 2, 2),)).sizes == (
        attention_size((1, 1, 2, 2), 2, products=2),
    )
    rate, _ = measure_bandwidth(brief(), 1 << 12)
    assert rate > 0


def test_models_predict_call_costs_and_the_slowdown_by_neighbours() -> None:
    assert measure_call(brief()) > 0
    hopeless = pace(rate=1e18), pace("stream", rate=1e18)
    slow = measure_mixed(probe(paces=hopeless, call_s=1e-12), brief(), trials=1)
    assert slow.mixed > 1
    idle = measure_mixed(probe(call_s=1.0), brief(), trials=1)
    assert (idle.mixed, idle.mixed_convolutions) == (1.0, 1.0)


def test_a_scratch_file_is_written_read_and_gone(tmp_path: Path) -> None:
    found = measure_disk(tmp_path / "new", 1 << 16, trials=1)
    assert found.write_bytes_per_s > 0
    assert found.read_bytes_per_s > 0
    assert list((tmp_path / "new").iterdir()) == []


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YUNLU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def ample() -> MeasuringBudget:
    budget = MeasuringBudget(1.0)
    budget.predict_run(1e6)
    return budget


def test_a_quick_profile_is_measured_once_and_stored(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = probe_machine()
    assert profile_store.load_profile(machine) is None
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)

    def refuse(**_: object) -> None:
        raise AssertionError("measured in the worker, whose memory is measured")

    monkeypatch.setattr(measure, "measure_machine", refuse)
    found = load_or_measure(machine, ample())
    assert found is not None
    assert torch.equal(torch.rand(3), expected)
    assert found.threads == torch.get_num_threads()
    assert found.is_quick
    assert found.link is None
    kinds = {each.kind for each in found.paces}
    assert kinds >= {"product", "convolution", "stream", "function", "random", "update"}
    monkeypatch.setattr(prepare, "_BENCHMARKS", (sys.executable, "-c", "raise SystemExit('no')"))
    assert load_or_measure(machine, ample()) == found
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + "+other")
    assert load_or_measure(machine, ample()) == found
    monkeypatch.setattr(torch, "__version__", "99.0")
    budget = ample()
    assert load_or_measure(machine, budget) is None  # its process failed
    assert budget.summary().left_out == (prepare._MACHINE,)


def test_a_machine_is_measured_within_the_budget_or_not_at_all(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, program = probe_machine(), "import sys; sys.stdin.read()"
    budget = MeasuringBudget(0.03, clock=lambda: 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "piped_process", None)
        assert load_or_measure(machine, budget) is None  # no process is started
    assert budget.summary().left_out == (prepare._MACHINE,)
    monkeypatch.setattr(prepare, "_BENCHMARKS", (sys.executable, "-c", program))
    monkeypatch.setattr(prepare, "_QUICK_S", 0.1)
    assert load_or_measure(machine, MeasuringBudget(0.03)) is None  # ends a process that is late


def test_a_second_worker_that_dies_costs_the_link_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_PROGRAM", (sys.executable, "-c", ""))
    with pytest.raises(links.WorkerGoneError):
        links.measure_start_and_link()
    assert measure._start_and_link() == {}


def test_failed_counting_costs_the_prediction_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Timer:
        budget = MeasuringBudget(0.03)

        def switch(self, _: object) -> None:
            pass

    def fail_with(error: Exception) -> Any:
        def count(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(microbenchmarks, "count_step", count)
        nothing: Any = None
        timer: Any = Timer()
        settings = planned_profile().settings
        return profile._count(nothing, nothing, timer, settings, sample_s=0.1)

    for error in (ValueError("no"), KeyError("k"), AttributeError("a"), AssertionError()):
        assert fail_with(error) is None
    with pytest.raises(MemoryError):
        fail_with(MemoryError())


def test_a_cache_that_cannot_be_written_costs_a_measurement_not_the_run(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    profile_store.save_profile(probe())
    assert profile_store.load_profile(probe_machine()) is None
    assert profile_store.load_calibration().figures == ()


def test_figures_of_one_machine_are_kept_side_by_side_whatever_its_name(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_store.save_profile(probe(torch="1"))
    profile_store.save_profile(probe(torch="2"))
    (file,) = (own_cache / "probe").glob("*.json")
    monkeypatch.setattr("socket.gethostname", lambda: "another-container")
    assert profile_store.profile_files()[0] == file
    kept = parse_profiles(file.read_bytes())
    assert [each.torch for each in kept] == ["1", "2"]


def test_a_gpu_belongs_to_its_run_alone() -> None:
    machine = probe_machine()
    gpu = machine.devices[0].model_copy(update={"kind": "cuda"})
    alone = machine.model_copy(update={"devices": (*machine.devices, gpu)})
    assert profile_store.background_load(alone) == 0.0
    assert profile_store.background_load(machine) >= 0.0
