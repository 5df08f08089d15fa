"""Engines that exchange in every way: as one process does where that is promised, alike in any case."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.parity import NoScore, make_plan
from tests.distributed.ranks import run_ranks, run_world
from tests.even_links import make_even
from tests.training_device import device_of
from yunlu.core.errors import JobError
from yunlu.planning.communication.timing import WireFigures
from yunlu.planning.layouts import Layout
from yunlu.runs.events import CommunicationChosen
from yunlu.spec.job import Job
from yunlu.training import loop
from yunlu.training.checkpoint.store import CheckpointStore, SaveGroup
from yunlu.training.communication.error_feedback import redistribute_residuals
from yunlu.training.communication.method_selector import MethodSelector
from yunlu.training.engine import Engine
from yunlu.training.models.networks import allow_single_samples
from yunlu.training.parallel.sockets import is_connection_error
from yunlu.training.parallel.world import World, form_world
from yunlu.training.tasks.task import Batch, Splits, TrainingInputs, call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from yunlu.training.single_worker import StepRequest

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
SAMPLES, BATCH, STEPS, WIDTH = 53, 10, 20, 32
"""The last step of an epoch has three samples: fewer than four workers."""
EXACT = (
    "all-reduce",
    "ring",
    "tree",
    "double-tree",
    "doubling",
    "direct",
    "server",
    "hierarchical",
)


class Branching(nn.Module):
    """One weight that nobody uses, and one that only few samples do; large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.idle = nn.Linear(3, 3)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        self.has_norm = False

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values).relu()
        if self.has_norm:
            hidden = self.norm(hidden)
        if (values[:, 0] > 0).any():
            hidden = hidden + self.rare(hidden) * (values[:, :1] > 0)
        return self.layers(hidden)


class Points:
    """Three classes of points, two of which few have."""

    metric = "loss"

    def __init__(self, *, has_norm: bool = False) -> None:
        self._has_norm = has_norm
        self.poison: Callable[[], bool] = bool
        """Whether the gradients of this pass are to be no numbers."""

    def load(self, job: Job) -> Splits:
        source = torch.Generator().manual_seed(3)
        values = torch.randn(SAMPLES, 5, generator=source)
        values[:, 0] = -values[:, 0].abs()
        values[::7, 0] *= -1
        targets = (values[:, 1] > 0).long() + (values[:, 2] > 0.5).long()
        samples = list(zip(values, targets, strict=True))
        return Splits(train=samples, validation=None, test=None, fingerprint="points")

    def build(self, job: Job) -> nn.Module:
        torch.manual_seed(11)
        model = Branching()
        model.has_norm = self._has_norm
        allow_single_samples(model)
        return model

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        values, targets = zip(*samples, strict=True)
        return Batch(
            inputs=(torch.stack(values),),
            targets=torch.stack(targets),
            samples=len(samples),
            items=len(samples),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        scores = call(model, batch)
        if self.poison():
            scores.register_hook(_spoil)
        return functional.cross_entropy(scores, batch.targets, reduction="sum"), scores

    def scorer(self) -> Any:
        return NoScore()


def _spoil(gradient: Tensor) -> Tensor:
    return gradient * torch.nan


class Recorder:
    """Keeps what every step came to, and may end the loop."""

    def __init__(self, engine: Engine, *, until: int = STEPS) -> None:
        self.engine, self.until = engine, until
        self.losses: list[float] = []
        self.digests: list[int] = []
        self.applied: list[bool] = []
        self.ask_at: int | None = None

    def before_first_step(self) -> bool:
        return False

    def after_undone_step(self) -> None:
        raise AssertionError("nobody asks it to stop")

    def before_step(self) -> StepRequest:
        return "" if self.ask_at is None or self.engine.steps_done < self.ask_at else "stop"

    def after_step(self, step: loop.Step) -> bool:
        self.losses.append(step.loss)
        self.applied.append(step.is_applied)
        self.digests.append(digest(self.engine))
        return self.engine.steps_done == self.until


def digest(engine: Engine) -> int:
    """Of all weights, to the bit."""
    return _digest_of(engine.model)


def _digest_of(module: nn.Module) -> int:
    found = xxhash.xxh3_64()
    for each in [*module.parameters(), *module.buffers()]:
        data: Any = each.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        found.update(data)
    return found.intdigest()


def build(
    world: World, communication: Any, *, task: Points | None = None, tell: Any = None, **train: Any
) -> Engine:
    settings = {
        "steps": STEPS,
        "batch": BATCH,
        "optimizer": {"name": "adamw", "lr": 0.01},
        "clip": 0.5,
        **train,
    }
    told = {"task": "t", "model": "m", "data": "d", "train": settings}
    job = Job.model_validate({**told, "communication": communication})
    device = world.device.type
    plan = make_plan(world.layout, job, micro_batch=2, kernel="fused", device=device)
    length = {"steps": STEPS, "steps_per_epoch": -(-SAMPLES // BATCH), "accumulation": 3}
    plan = plan.model_copy(update=length)
    task = task or Points()
    parts = TrainingInputs(task=task, model=task.build(job), splits=task.load(job))
    engine = Engine(job, plan, parts, tell or (lambda *_, **__: None), world=world)
    engine.keeps_ledger = True
    return engine


@cache
def alone() -> list[float]:
    torch.set_num_threads(1)
    engine = build(World(layout=Layout(), rank=0, device=CPU), "auto")
    recorder = Recorder(engine)
    loop.run(engine, recorder)
    return recorder.losses


def run(engine: Engine, *, until: int = STEPS, ask_at: int | None = None) -> Recorder:
    recorder = Recorder(engine, until=until)
    recorder.ask_at = ask_at
    loop.run(engine, recorder)
    return recorder


# What is exact.


def _train_by_all(world: World, ways: Sequence[Any]) -> list[tuple[list[float], list[int], float]]:
    found: list[tuple[list[float], list[int], float]] = []
    for way in ways:
        engine = build(world, way)
        recorder = run(engine)
        found.append(
            (recorder.losses, recorder.digests, engine.communication.metrics()["sent_bytes"] or 0.0)
        )
        engine.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_exact_ways_train_as_one_process_does(size: int) -> None:
    ways = [*EXACT, {"method": "server", "servers": 2}, "auto"]
    everyone = run_world(_train_by_all, Layout(dp=size), ways)
    for number, way in enumerate(ways):
        for losses, digests, sent_bytes in (each[number] for each in everyone):
            assert losses == pytest.approx(alone(), abs=1e-5), way
            assert digests == everyone[0][number][1], way
            assert sent_bytes or way == "auto", way


def test_only_replicas_can_choose_a_way(tmp_path: Path) -> None:
    for layout in (Layout(fsdp=2), Layout(tp=2)):
        for words in run_world(_refuse, layout, ["ring", "direct + int8", "local"]):
            assert all(f"the layout {layout} has other axes than dp" in each for each in words)


def _refuse(world: World, ways: Sequence[str]) -> list[str]:
    found: list[str] = []
    for way in ways:
        with pytest.raises(JobError) as caught:
            build(world, way)
        assert "layout" in (caught.value.hint or "")
        found.append(str(caught.value))
    return found


# What is compressed.


PACKED = (
    "direct + int8",
    {"method": "direct", "codec": "topk", "keep": 0.1},
    {"method": "direct", "codec": "randomk", "keep": 0.1},
    {"codec": "powersgd", "rank": 2, "method": "all-reduce"},
)


def _saver(world: World, directory: str, token: str) -> CheckpointStore:
    return CheckpointStore(
        Path(directory),
        keep_last=9,
        keep_best=0,
        metric="loss",
        lower_is_better=True,
        saved=_ignore,
        group=SaveGroup(rank=world.rank, size=world.layout.world, token=token),
    )


def _ignore(*_: object) -> None:
    """Nobody has to know."""


def save(engine: Engine, directory: str) -> None:
    store = _saver(engine.world, directory, f"{engine.steps_done}")
    store.save(engine.state.snapshot(metrics={}, extra={}))
    store.close()


def load(engine: Engine, directory: str) -> None:
    reader = _saver(engine.world, directory, "reading").open_newest(pytest.fail)
    assert reader is not None
    engine.state.read(reader)
    reader.close()


def _pack(
    world: World, directory: str
) -> list[tuple[list[int], list[int], list[bool], dict[str, Any], bool]]:
    found: list[tuple[list[int], list[int], list[bool], dict[str, Any], bool]] = []
    for number, way in enumerate(PACKED):
        task = Points()
        engine = build(world, way, task=task)
        task.poison = partial(_is_time, engine, world, 7)
        first = run(engine, until=7)
        before = _residuals(engine)
        bad = run(engine, until=8)
        is_kept = _are_same(before, _residuals(engine))
        save(engine, f"{directory}/{number}")
        rest = run(engine)
        digests = [*first.digests, *bad.digests, *rest.digests]
        engine.close()
        # The same again from what was saved.
        resumed = build(world, way)
        load(resumed, f"{directory}/{number}")
        kept = _told(resumed)
        again = run(resumed)
        resumed.close()
        found.append((digests, again.digests, [*first.applied, *bad.applied], kept, is_kept))
    return found


def _told(engine: Engine) -> dict[str, Any]:
    """What is kept, to be told to another process."""
    return {name: value.numpy() for name, value in engine.communication.state().items()}


def _is_time(engine: Engine, world: World, step: int) -> bool:
    return engine.steps_done == step and world.rank == 1


def _residuals(engine: Engine) -> dict[str, Tensor]:
    kept = engine.communication.state()
    return {name: value for name, value in kept.items() if not name.startswith("place/")}


def _are_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return (
        bool(one)
        and one.keys() == other.keys()
        and all(torch.equal(value, other[name]) for name, value in one.items())
    )


def _go_on(world: World, directory: str) -> list[tuple[dict[str, Any], list[int], list[float]]]:
    found: list[tuple[dict[str, Any], list[int], list[float]]] = []
    for number, way in enumerate(PACKED):
        engine = build(world, way)
        load(engine, f"{directory}/{number}")
        kept = _told(engine)
        recorder = run(engine)
        found.append((kept, recorder.digests, recorder.losses))
        engine.close()
    return found


def _total(states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    read = [{name: torch.from_numpy(kept) for name, kept in state.items()} for state in states]
    (whole,) = redistribute_residuals(read, 1)
    return {name: value for name, value in whole.items() if name.startswith("worker/")}


def test_compressed_ways_keep_all_alike_skip_together_and_resume(tmp_path: Path) -> None:
    everyone = run_world(_pack, Layout(dp=2), str(tmp_path))
    more = run_world(_go_on, Layout(dp=3), str(tmp_path))
    for number, way in enumerate(PACKED):
        ours = [each[number] for each in everyone]
        for digests, again, applied, _, is_kept in ours:
            assert len(set(digests)) == STEPS - 1, way  # one step was left out
            assert digests == ours[0][0], way
            assert applied == [True] * 7 + [False], way
            assert is_kept, way
            assert again == digests[8:], way
        total = _total([each[3] for each in ours])
        assert total
        theirs = [each[number] for each in more]
        moved = _total([kept for kept, _, _ in theirs])
        for name, value in total.items():
            assert torch.allclose(moved[name], value, atol=1e-6), (way, name)
        for _, digests, losses in theirs:
            assert digests == theirs[0][1], way
            assert losses[-1] < alone()[0], way


# What brings weights together now and then.


LOCAL = (
    {"method": "local", "every": 4},
    {"method": "local", "codec": "int4", "every": 4},
    {"method": "diloco", "every": 5},
    {"method": "post-local", "start": 5, "every": 3},
    {"method": "diloco", "every": 5, "parts": 2, "codec": "int8"},
)
NORMED = "local", "post-local", "diloco"


def _apart(world: World, directory: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, way in enumerate(LOCAL):
        has_norm = way["method"] in NORMED
        engine = build(world, way, task=Points(has_norm=has_norm), ema=0.9)
        run(engine, until=13)
        loose = digest(engine)
        engine.synchronize()
        settled, shown = digest(engine), _digest_of(engine.best_view)
        save(engine, f"{directory}/{number}")
        rest = run(engine)
        engine.synchronize()
        told: dict[str, Any] = {
            "loose": loose,
            "settled": settled,
            "shown": shown,
            "losses": rest.losses,
        }
        told |= {
            "end": digest(engine),
            "is_apart": engine.communication.communicator.is_local_update,
        }
        engine.close()
        resumed = build(world, way, task=Points(has_norm=has_norm), ema=0.9)
        load(resumed, f"{directory}/{number}")
        told |= {"read": digest(resumed), "read_shown": _digest_of(resumed.best_view)}
        told["momentum"] = [value.tolist() for value in resumed.communication.state().values()]
        again = run(resumed)
        resumed.synchronize()
        told |= {"again": again.losses, "again_end": digest(resumed)}
        told["again_apart"] = resumed.communication.communicator.is_local_update
        resumed.close()
        found.append(told)
    return found


def test_local_ways_agree_when_settled_and_resume(tmp_path: Path) -> None:
    size = 3
    everyone = run_world(_apart, Layout(dp=size), str(tmp_path))
    for number, way in enumerate(LOCAL):
        ours = [each[number] for each in everyone]
        for name in ("settled", "shown", "end", "read", "read_shown", "again_end", "momentum"):
            assert [each[name] for each in ours] == [ours[0][name]] * size, (way, name)
        for each in ours:
            assert each["is_apart"], way
            assert each["again_apart"], way
            assert each["read"] == each["settled"], way
            assert each["read_shown"] == each["shown"], way
            assert bool(each["momentum"]) == (way["method"] == "diloco")
            assert len(each["again"]) == STEPS - 13
        # One with its own steps is not where the others are.
        assert len({each["loose"] for each in ours}) == size, way
        finals = [sum(each["losses"][-5:]) / 5 for each in ours]
        assert sum(finals) / size < 0.8 * alone()[0], way


def _in_sites(world: World) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for sites in ("east east east", "east west east"):
        os.environ["YUNLU_SITE"] = sites.split()[world.rank]
        engine = build(world, {"method": "local", "every": 4, "together": "site"})
        recorder = run(engine)
        engine.synchronize()
        found[sites] = [recorder.losses, [*recorder.digests, digest(engine)]]
        engine.close()
    del os.environ["YUNLU_SITE"]
    return found


def test_workers_of_a_site_step_as_one_and_sites_meet_now_and_then() -> None:
    everyone = run_world(_in_sites, Layout(dp=3))
    for each in everyone:
        assert each["east east east"][0] == pytest.approx(alone(), abs=1e-5)
    (losses, east), (others, west), (same, mate) = (each["east west east"] for each in everyone)
    assert (losses, east) == (same, mate)
    assert losses != others
    met = [
        number for number, pair in enumerate(zip(east, west, strict=True), 1) if len({*pair}) == 1
    ]
    assert met == [*range(4, STEPS + 1, 4), STEPS + 1]


def _stop(world: World) -> list[tuple[int, str, int]]:
    """One asks, in the middle of steps of its own."""
    found: list[tuple[int, str, int]] = []
    for way in LOCAL[:2]:
        engine = build(world, way)
        recorder = Recorder(engine)
        recorder.ask_at = 3 if world.rank == 1 else None
        ask = loop.run(engine, recorder)
        engine.synchronize()
        found.append((engine.steps_done, ask, digest(engine)))
        engine.close()
    return found


def test_all_stop_before_the_same_step_when_one_asks() -> None:
    one, other = run_world(_stop, Layout(dp=2))
    assert one == other
    assert [(steps, ask) for steps, ask, _ in one] == [(16, "stop")] * 2


# What changes on the way.


FAST = {"latency_s": 1e-6, "bytes_per_s": 1e4}
FAR = {"latency_s": 1.0, "bytes_per_s": 1e9}


def _relink(
    rank: int, path: str, size: int
) -> tuple[list[float], list[int], list[bool], list[Any]]:
    """The links become others after five steps; only the last worker notices, in its ninth."""
    world = form_world(
        Layout(dp=size),
        rank,
        dist.FileStore(path, size),
        secret=b"test",
        device=device_of(rank),
        host=f"127.0.0.{rank + 1}",
    )
    told: list[tuple[int, str]] = []

    def tell(event: CommunicationChosen) -> None:
        told.append((event.step, event.setting.method))

    def note(_self: MethodSelector, _exchange_s: float) -> bool:
        return rank == size - 1 and engine.steps_done == 8

    def measure(_self: MethodSelector, world: World) -> WireFigures:
        return make_even(world.hosts, **links)

    links = FAST
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MethodSelector, "_measure", measure)
        engine = build(world, "auto", tell=tell)
        first = _Ways(engine, until=5)
        loop.run(engine, first)
        links = FAR
        patch.setattr(MethodSelector, "record", note)
        rest = _Ways(engine)
        loop.run(engine, rest)
        engine.close()
    world.close()
    ways = first.ways + rest.ways
    return first.losses + rest.losses, rest.digests, [way is ways[0] for way in ways], told


class _Ways(Recorder):
    """By which sums each step was made."""

    def __init__(self, engine: Engine, *, until: int = STEPS) -> None:
        super().__init__(engine, until=until)
        self.ways: list[Any] = []

    def after_step(self, step: loop.Step) -> bool:
        self.ways.append(self.engine.communication.communicator)
        return super().after_step(step)


@pytest.mark.parametrize("size", [2, 3])
def test_all_change_the_way_in_the_same_step_and_train_as_one_process(
    tmp_path: Path, size: int
) -> None:
    everyone = run_ranks(_relink, size, str(tmp_path / "store"), size)
    for losses, digests, as_before, _ in everyone:
        assert losses == pytest.approx(alone(), abs=1e-5)
        assert digests == everyone[0][1]
        assert as_before == [True] * 9 + [False] * (STEPS - 9)
    (one, other) = everyone[0][3]
    assert (one[0], other[0]) == (0, 9)
    assert one[1] != other[1]


class GoneError(Exception):
    """One worker is no more."""


def _lose(
    rank: int, directory: str, way: Any
) -> tuple[int, int, int, list[float], list[int]] | None:
    """Three workers, of which one goes without a word in its ninth step; the others go on as two."""
    world = form_world(
        Layout(dp=3),
        rank,
        dist.FileStore(f"{directory}/3", 3),
        secret=b"test",
        device=device_of(rank),
    )
    task = Points()
    engine = build(world, way, task=task)
    seen = _Seen(engine)
    if rank == 2:
        task.poison = partial(_go, engine)
    with pytest.raises((RuntimeError, GoneError)) as caught:
        loop.run(engine, seen)
    if isinstance(caught.value, GoneError):
        world.disconnect()
        return None
    assert is_connection_error(caught.value), caught.value
    engine.abandon_step()
    back, held = engine.steps_done, digest(engine)
    world.disconnect()
    world.close()
    world = form_world(
        Layout(dp=2),
        rank,
        dist.FileStore(f"{directory}/2", 2),
        secret=b"test",
        device=device_of(rank),
    )
    engine.rejoin(world, micro_batch=2)
    rest = run(engine)
    engine.synchronize()
    agreed = seen.digests[back]
    found = back, held, agreed, rest.losses, [*rest.digests[-1:], digest(engine)]
    engine.close()
    world.close()
    return found


def _go(engine: Engine) -> bool:
    if engine.steps_done == 8:
        raise GoneError
    return False


class _Seen(Recorder):
    """The weights after each step; before the first too."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.digests = [digest(engine)]


@pytest.mark.parametrize("way", ["ring", "direct + int8", LOCAL[0], LOCAL[2]], ids=str)
def test_survivors_go_back_to_what_all_agreed_on_and_on_without_who_is_lost(
    tmp_path: Path, way: Any
) -> None:
    one, other, gone = run_ranks(_lose, 3, str(tmp_path), way)
    assert gone is None
    assert one[0] == other[0]
    is_local = isinstance(way, dict)
    expected = (way["every"] * (8 // way["every"])) if is_local else 8
    assert one[0] == expected
    assert one[1] == other[1] == one[2]
    assert len(one[3]) == STEPS - expected
    assert one[4][-1] == other[4][-1]
    if way == "ring":
        assert one[3] == pytest.approx(alone()[8:], abs=1e-5)
