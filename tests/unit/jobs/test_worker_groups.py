"""Several workers in one run: what its files tell of layouts, faults, lost time and each worker."""

from __future__ import annotations

import io
import random
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.sample_events import sample
from yunlu.core.files import append_lines
from yunlu.jobs.logged_steps import RunLog
from yunlu.jobs.report_builder import build_report
from yunlu.jobs.report_model import Report
from yunlu.jobs.run_view import newest_worker_group
from yunlu.jobs.worker_groups import read_samples, read_worker_groups
from yunlu.planning.layouts import Layout, parse_layout
from yunlu.render.format import show_finding
from yunlu.render.run_figures import layout_figure
from yunlu.render.run_report import render_page, write_report
from yunlu.render.terminal.report_summary import print_summary
from yunlu.runs.events import (
    ErrorRaised,
    Event,
    ModelBuilt,
    PlanMade,
    StateChanged,
    StragglerSeen,
    WorkerGroupFormed,
    WorkerLost,
)
from yunlu.runs.fold import fold
from yunlu.runs.run_store import Document, Log, RunStore
from yunlu.runs.states import RunState
from yunlu.runs.step_batches import to_batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from yunlu.runs.step_batches import StepBatch

RUNS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("test_report_builder.py")))
SCRIPT: str = RUNS["SCRIPT"]
HOSTS = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b", 4: "node-b"}


class GroupWriter:
    """Writes what several workers and their supervisor write, on a clock of their own."""

    def __init__(self, path: Path, *, steps: int = 420) -> None:
        self.writer = RUNS["Writer"](path, RUNS["job_of"]("text-classification"))
        self.run: RunStore = self.writer.run
        self.generation = 0
        self.members: Sequence[int] = ()
        self.layout = Layout()
        self._noise = random.Random(3)
        self.writer.begin()
        self.emit(ModelBuilt(name="transformer", parameters=10_400_000, trainable=10_400_000))
        self.emit(sample(PlanMade, **RUNS["plan_of"](steps=steps, best_metric="accuracy")))

    def emit(self, event: Event, *, after: float = 0.0) -> None:
        self.writer.emit(event, after=after)

    def form(
        self,
        layout: str,
        members: Sequence[int],
        *,
        reason: str,
        from_step: int,
        took_s: float = 0.0,
        redone: int = 0,
        **more: Any,
    ) -> None:
        parsed = parse_layout(layout)
        assert parsed is not None
        assert parsed.world == len(members)
        self.generation += 1
        self.members, self.layout = members, parsed
        ranks = [
            {
                "rank": rank,
                "worker": str(member),
                "host": HOSTS.get(member, "node-c"),
                "pid": 4200 + member,
                **parsed.place_of(rank)._asdict(),
            }
            for rank, member in enumerate(members)
        ]
        self.emit(
            sample(
                WorkerGroupFormed,
                generation=self.generation,
                layout=layout,
                reason=reason,
                from_step=from_step,
                redone_steps=redone,
                ranks=ranks,
                lost_s=took_s,
                **more,
            ),
            after=took_s,
        )

    def train(
        self,
        first: int,
        last: int,
        *,
        slow: int | None = None,
        waiting: float = 0.2,
        attempt: int = 1,
    ) -> None:
        """Steps of 0.25 s; one worker may be slow, and then the others wait for it."""
        records: list[dict[str, Any]] = []
        samples: list[dict[str, Any]] = []
        for step in range(first, last + 1):
            own = {
                member: 0.25 * (1 - waiting) * (1 + 0.06 * self._noise.random())
                * (1.8 if member == slow else 1.0)
                for member in self.members
            }  # fmt: skip
            step_s = max(own.values()) + 0.25 * waiting * 0.5
            self.writer.now += step_s
            wait_s = step_s - own[self.members[0]]
            records.append(
                {
                    "step": step,
                    "epoch": step / 45,
                    "loss": RUNS["falling_loss"](step),
                    "lr": 1e-3,
                    "samples": 32 * step,
                    "items": 32,
                    "at": self.writer.now,
                    "attempt": attempt,
                    "generation": self.generation,
                    "data_s": 0.0,
                    "compute_s": step_s - wait_s,
                    "communication_s": wait_s,
                    "memory_bytes": 900 * 2**20,
                }
            )
            if step % 4 == 0:
                ranks = [
                    {
                        "rank": rank,
                        "worker": str(member),
                        "step_s": step_s,
                        "wait_s": step_s - own[member],
                        "memory_bytes": (700 + 40 * rank + step / 10) * 2**20,
                        "phase": "step",
                    }
                    for rank, member in enumerate(self.members)
                ]
                samples.append(
                    {
                        "at": self.writer.now,
                        "generation": self.generation,
                        "step": step,
                        "ranks": ranks,
                    }
                )
        append_lines(self.run.path / Log.METRICS, records)
        append_lines(self.run.path / Log.RANK_METRICS, samples)

    def lose(self, member: int, *, what: str, step: int, detail: str | None = None) -> None:
        self.emit(
            WorkerLost(
                cause=what,
                worker=str(member),
                rank=self.members.index(member),
                host=HOSTS.get(member, "node-c"),
                pid=4200 + member,
                step=step,
                detail=detail,
            )
        )


def write_group_run(path: Path) -> RunStore:
    """Four workers; one is killed, three go on, a new one joins, one is slow."""
    group = GroupWriter(path)
    group.form("dp2 x tp2", [0, 1, 2, 3], reason="start", from_step=0)
    group.train(1, 120)
    group.lose(3, what="killed", step=120, detail=f"signal 9 {SCRIPT}")
    group.form("dp3", [0, 1, 2], reason="a worker was lost", from_step=120, took_s=0.4)
    group.train(121, 260)
    group.form("fsdp2 x tp2", [0, 1, 2, 4], reason="a worker joined", from_step=260, took_s=0.2)
    group.train(261, 330)
    group.train(331, 420, slow=2)
    group.emit(StragglerSeen(rank=2, worker="2", host="node-b", ratio=1.8, step=340))
    group.emit(
        StragglerSeen(rank=1, worker="1", host="node-a", ratio=1.1, step=350, recovered=True)
    )
    group.writer.evaluate("validation", 420, 0.2, metrics={"accuracy": 0.91})
    group.emit(StateChanged(state=RunState.FINISHED))
    return group.run


def write_staged(path: Path) -> RunStore:
    """Eight workers in a pipeline; steps are done again after a fault, and then one fails."""
    group = GroupWriter(path, steps=100)
    stages = ["embedding, layers 1–3", "layers 4–6, head"]
    group.form("dp2 x tp2 x pp2", range(8), reason="start", from_step=0, stages=stages)
    group.train(1, 40, waiting=0.6)
    group.lose(5, what="hung", step=40)
    group.form(
        "fsdp3 x pp2", [0, 1, 2, 3, 4, 6], reason="a worker was lost", from_step=30, redone=10,
        took_s=6.0, stages=stages,
    )  # fmt: skip
    group.train(31, 60, waiting=0.6)
    traceback = "Traceback (most recent call last):\n  File loop.py\nValueError: no such label"
    group.lose(2, what="failed", step=60, detail=traceback)
    group.lose(4, what="failed", step=60, detail="Traceback\nRuntimeError: connection closed")
    who: dict[str, Any] = {"rank": 2, "worker": "2", "host": "node-b", "pid": 4202}
    error = {"code": "training", "message": "no such label", "traceback": traceback}
    group.emit(ErrorRaised(**error, **who))
    group.emit(StateChanged(state=RunState.FAILED))
    return group.run


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    return write_group_run(tmp_path / "group-1")


def summary_text(report: Report) -> str:
    console = Console(file=io.StringIO(), width=140, highlight=False)
    print_summary(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_generations_of_the_worker_group_are_in_order(run: RunStore) -> None:
    group = build_report(run).worker_group

    assert group is not None
    assert [(each.layout, each.from_step, len(each.ranks)) for each in group.changes] == [
        ("dp2 x tp2", 0, 4),
        ("dp3", 120, 3),
        ("fsdp2 x tp2", 260, 4),
    ]
    (fault,) = group.faults
    assert (fault.cause, fault.worker, fault.rank, fault.struck) == ("killed", "3", 3, (1, 1))
    assert [(each.worker, each.ratio) for each in group.stragglers] == [("2", 1.8)]


def test_lost_time_is_what_lay_between_the_steps_of_two_layouts(run: RunStore) -> None:
    group = build_report(run).worker_group

    assert group is not None
    assert [each.lost_s for each in group.changes[1:]] == pytest.approx([0.4, 0.2])
    assert group.lost_s == pytest.approx(0.6)
    assert group.effective == pytest.approx(1 - 0.6 / group.wall_s)
    assert group.elapsed_s[-1] == pytest.approx(group.wall_s, abs=0.01)


def test_steps_done_again_are_lost_time_and_undo_what_they_replace(tmp_path: Path) -> None:
    group = GroupWriter(tmp_path / "r")
    group.form("fsdp2", [0, 1], reason="start", from_step=0)
    group.train(1, 20)
    before_s = group.writer.now
    group.train(21, 30)
    group.writer.evaluate("validation", 30, 0.5, metrics={"accuracy": 0.5})
    redone_s = group.writer.now - before_s
    group.lose(1, what="hung", step=30)
    group.form("single", [0], reason="a worker was lost", from_step=20, redone=10, took_s=2.0)

    # Nothing has been done since: the report already stands at the step the worker group went back to.
    halfway = build_report(group.run)
    assert (halfway.step, halfway.evaluations) == (20, ())

    group.train(21, 40)
    report = build_report(group.run)
    assert report.worker_group is not None
    assert report.worker_group.lost_s == pytest.approx(2.0 + redone_s)
    assert report.worker_group.redone_steps == 10
    assert {finding.key for finding in report.findings} == {"effective", "redone"}
    assert list(report.worker_group.done_steps) == sorted(report.worker_group.done_steps)


class Given:
    """Steps without a run, a few at a time."""

    def __init__(self, records: list[dict[str, float]]) -> None:
        self.records = records

    def batches(self) -> Iterator[StepBatch]:
        for first in range(0, len(self.records), 3):
            yield to_batch(self.records[first : first + 3])


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(1, 9)), min_size=1, max_size=6),
    st.floats(0.01, 2.0),
)
def test_used_and_lost_time_add_up(changes: list[tuple[float, int]], step_s: float) -> None:
    events: list[Event] = []
    records: list[dict[str, float]] = []
    now, step = 1000.0, 0
    for generation, (pause_s, steps) in enumerate(changes, 1):
        now += pause_s if generation > 1 else 0.0
        data = {"generation": generation, "layout": "dp2", "from_step": step}
        events.append(sample(WorkerGroupFormed, at=now, **data))
        for _ in range(steps):
            now, step = now + step_s, step + 1
            records.append({"step": step, "at": now, "compute_s": step_s, "generation": generation})
    group = read_worker_groups(RunLog(view=fold(events), steps=Given(records), attempts=[]))

    assert group is not None
    lost = sum(pause_s for pause_s, _ in changes[1:])
    assert group.lost_s == pytest.approx(lost, abs=1e-6)
    assert group.wall_s == pytest.approx(lost + step * step_s)
    assert group.effective is not None
    assert -1e-9 <= group.effective <= 1


def test_time_between_two_attempts_is_not_counted(tmp_path: Path) -> None:
    group = GroupWriter(tmp_path / "r")
    group.form("dp2", [0, 1], reason="start", from_step=0)
    group.train(1, 20)
    group.emit(StateChanged(state=RunState.STOPPED))
    group.writer.now += 86_400
    group.writer.begin(number=2, resumed_from=20)
    group.form("dp2", [0, 1], reason="resumed", from_step=20)
    group.train(21, 40, attempt=2)

    found = build_report(group.run).worker_group
    assert found is not None
    assert found.wall_s < 60
    assert 0 < found.lost_s < 10
    assert found.elapsed_s[-1] < 60


def test_evaluations_of_a_new_group_before_its_event_count(tmp_path: Path) -> None:
    """A generation is told of once its first step is done; that step may have been evaluated."""
    group = GroupWriter(tmp_path / "r")
    group.form("dp2", [0, 1], reason="start", from_step=0)
    group.train(1, 30)
    for step in (20, 25):
        group.writer.evaluate("validation", step, 0.5, metrics={"accuracy": 0.5})
    group.lose(1, what="killed", step=30)
    group.writer.evaluate("validation", 21, 0.4, metrics={"accuracy": 0.6})
    group.form("single", [0], reason="a worker was lost", from_step=20, redone=10)
    group.writer.evaluate("validation", 22, 0.4, metrics={"accuracy": 0.6})

    assert [row.step for row in build_report(group.run).evaluations] == [20, 21, 22]


def test_each_worker_has_its_figures_in_the_last_layout_it_was_part_of(run: RunStore) -> None:
    group = build_report(run).worker_group

    assert group is not None
    members = {each.worker: each for each in group.workers}
    assert [each.rank for each in group.workers] == [0, 1, 2, 3, None]
    assert (members["3"].lost, members["4"].lost) == ("killed", None)
    slow, quick = members["2"], members["0"]
    assert slow.step_s == pytest.approx(quick.step_s)  # all take as long: they wait for each other
    assert slow.wait_share is not None
    assert quick.wait_share is not None
    assert slow.wait_share < 0.5 * quick.wait_share
    assert members["4"].memory_bytes == pytest.approx((700 + 120 + 42) * 2**20)
    assert slow.compute_s[-1] > 1.5 * slow.compute_s[0]


def test_the_report_survives_the_trip_through_json(run: RunStore) -> None:
    write_report(run)

    assert Report.model_validate_json((run.path / Document.REPORT).read_bytes()) == build_report(
        run
    )


def test_the_page_pictures_every_layout(tmp_path: Path) -> None:
    page = render_page(build_report(write_staged(tmp_path / "r")))
    section = page[page.index('<section id="workers">') : page.index('<section id="time">')]
    large, small = section.split('<div class="earlier">')

    assert large.count('class="tile ') == 6
    assert small[: small.index('id="chart-progress"')].count('class="tile ') == 8
    assert large.count(' lost" title') == 2  # two failed
    assert "embedding, layers 1–3" in large
    assert small.count('class="band ') == 2
    assert "ValueError: no such label" in section


@given(
    st.builds(Layout, dp=st.integers(1, 3), fsdp=st.integers(1, 3), tp=st.integers(1, 3),
              pp=st.integers(1, 3))
)  # fmt: skip
def test_the_same_colour_means_the_same_part_of_the_weights(layout: Layout) -> None:
    ranks = [layout.place_of(rank)._asdict() for rank in range(layout.world)]
    event = sample(WorkerGroupFormed, layout=str(layout), ranks=ranks)
    group = read_worker_groups(RunLog(view=fold([event]), steps=Given([]), attempts=[]))
    assert group is not None
    figure = layout_figure(group, group.newest)

    tiles = [tile for row in figure.cells for cell in row for tile in cell]
    assert sorted(tile.rank for tile in tiles if tile) == list(range(layout.world))
    first, *others = figure.cells
    colours = [[tile.colour for tile in cell if tile] for cell in first]
    for row in others:
        assert [[tile.colour for tile in cell if tile] for cell in row] == colours
    distinct = {colour for cell in colours for colour in cell}
    assert len(distinct) == min(sum(map(len, colours)), 8)


def test_hostile_text_of_a_worker_is_only_text(run: RunStore) -> None:
    assert SCRIPT not in render_page(build_report(run))


def test_the_terminal_tells_it_on_one_screen(run: RunStore) -> None:
    text = summary_text(build_report(run))

    for words in (
        "4 as fsdp2 x tp2",
        "effective training time 99.5%",
        "worker 3 (rank 3 on node-b) was killed",
        "dp2 x tp2 → dp3, 3 workers: a worker was lost",
        "2  1.8 × slower",
        "0@node-a 1@node-a",
    ):
        assert words in text


def test_the_first_failure_is_on_top_with_worker_and_traceback(tmp_path: Path) -> None:
    report = build_report(write_staged(tmp_path / "r"))

    assert report.failure is not None
    assert report.failure.worker == "worker 2 (rank 2 on node-b)"
    assert report.failure.traceback is not None
    assert report.failure.traceback.endswith("ValueError: no such label")
    assert "worker 2 (rank 2 on node-b): no such label" in summary_text(report)


def test_advice_names_what_holds_the_run_up(tmp_path: Path) -> None:
    report = build_report(write_staged(tmp_path / "r"))

    said = {finding.key: show_finding(finding).en for finding in report.findings}
    assert list(said) == ["effective", "redone", "communication"]
    assert "dp2 x tp2 x pp2 → fsdp3 x pp2" in said["effective"]
    assert "10." in said["redone"]


def test_one_plain_worker_has_nothing_of_it(tmp_path: Path) -> None:
    run = RUNS["write_classification"](tmp_path / "digits-1")
    report = build_report(run)
    page = render_page(report)

    assert report.worker_group is None
    assert newest_worker_group(run) is None
    assert 'id="workers"' not in page
    assert "Workers" not in page
    assert "effective" not in summary_text(report)


def test_events_of_another_version_do_not_hide_the_run(run: RunStore) -> None:
    before = build_report(run).worker_group
    lines = (
        {"kind": "worker_group", "generation": "x"},
        {"kind": "worker_group", "generation": 9, "layout": "dp2", "ranks": "gone"},
        {"kind": "fault"},
        {"kind": "fault", "cause": "abducted", "rank": "NaN"},
        {"kind": "straggler", "rank": 1},
    )
    run.append(Log.EVENTS, [{"v": 1, "at": 1.0, **line} for line in lines])
    append_lines(
        run.path / Log.RANK_METRICS, [[1], {"ranks": [4, {"worker": "1", "step_s": "NaN"}]}, {}]
    )
    after = build_report(run).worker_group

    assert before is not None
    assert after is not None
    assert (after.changes, after.faults) == (before.changes, before.faults)


def test_a_worker_group_without_figures_has_a_report_too(tmp_path: Path) -> None:
    group = GroupWriter(tmp_path / "r")
    group.form("dp2", [0, 1], reason="start", from_step=0)
    report = write_report(group.run)

    assert report.worker_group is not None
    assert (report.worker_group.effective, report.worker_group.communication_share) == (None, None)
    assert list(read_samples(group.run)) == []
    assert "2 as dp2" in summary_text(report)
