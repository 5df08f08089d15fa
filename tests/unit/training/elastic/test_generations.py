"""The next generation, for any worker group, layout and loss."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from yunlu.planning.layouts import Layout, RankCoordinates
from yunlu.training.elastic.membership import WorkerReport, part_at, plan_generation, split_of
from yunlu.training.elastic.messages import HeldState


def by_dp(devices: int) -> Layout:
    return Layout(dp=devices)


def held_state(layout: Layout, rank: int, step: int, generation: int = 1) -> HeldState:
    return HeldState(step=step, generation=generation, coordinates=layout.place_of(rank))


def survivors(layout: Layout, steps: dict[int, int]) -> list[WorkerReport]:
    """Members are numbered like their ranks."""
    return [WorkerReport(worker=r, rank=r, live=held_state(layout, r, s)) for r, s in steps.items()]


def test_a_spare_takes_the_place_of_the_dead_one_and_the_others_keep_theirs() -> None:
    layout = Layout(dp=3)
    worker_reports = [*survivors(layout, {0: 7, 2: 7}), WorkerReport(worker=9)]
    found = plan_generation(worker_reports, layouts={1: layout}, current=1, target=3, replan=by_dp)
    assert found is not None
    assert found.workers == (0, 9, 2)
    assert (found.restore.kind, found.restore.step, found.restore.needs_transfer) == (
        "live",
        7,
        True,
    )
    assert not found.departing


def test_whoever_is_a_step_ahead_gives_to_the_rest() -> None:
    layout = Layout(dp=3)
    worker_reports = [*survivors(layout, {0: 6, 1: 7}), WorkerReport(worker=9)]
    found = plan_generation(worker_reports, layouts={1: layout}, current=1, target=3, replan=by_dp)
    assert found is not None
    assert found.workers == (0, 1, 9)
    assert found.restore.step == 7
    assert [giver.handoff_rank for giver in found.restore.sources] == [1]


def test_nothing_moves_where_everyone_has_its_part() -> None:
    layout = Layout(dp=3)
    worker_reports = survivors(layout, {0: 7, 2: 7})
    found = plan_generation(worker_reports, layouts={1: layout}, current=1, target=3, replan=by_dp)
    assert found is not None
    assert found.layout == Layout(dp=2)
    assert not found.restore.needs_transfer


def test_a_lost_shard_comes_back_from_its_buddy() -> None:
    layout = Layout(fsdp=3)
    worker_reports = survivors(layout, {0: 12, 2: 12})
    replicas = {0: [0, 2], 2: [2, 1]}  # each keeps its own part and that of the one before it
    worker_reports = [
        WorkerReport(
            worker=report.worker,
            rank=report.rank,
            live=report.live,
            replicas=tuple(held_state(layout, rank, 10) for rank in replicas[report.worker]),
        )
        for report in worker_reports
    ]
    found = plan_generation(
        worker_reports, layouts={1: layout}, current=1, target=3, replan=lambda n: Layout(fsdp=n)
    )
    assert found is not None
    assert (found.restore.kind, found.restore.step) == ("replicas", 10)
    assert found.source_layout == layout
    assert {giver.held_state.coordinates.fsdp for giver in found.restore.sources} == {0, 1, 2}


def test_without_copies_the_disk_decides() -> None:
    layout = Layout(fsdp=2)
    worker_reports = survivors(layout, {0: 12})
    found = plan_generation(worker_reports, layouts={1: layout}, current=1, target=2, replan=by_dp)
    assert found is not None
    assert (found.restore.kind, found.restore.step) == ("checkpoint", None)


def test_who_leaves_gives_what_nobody_else_has() -> None:
    layout = Layout(fsdp=3)
    worker_reports = survivors(layout, {0: 5, 1: 5, 2: 5})
    worker_reports[1] = WorkerReport(worker=1, rank=1, live=worker_reports[1].live, is_leaving=True)
    found = plan_generation(
        worker_reports, layouts={1: layout}, current=1, target=2, replan=lambda n: Layout(fsdp=n)
    )
    assert found is not None
    assert found.workers == (0, 2)
    assert found.departing == (1,)
    assert {giver.handoff_rank for giver in found.restore.sources} == {0, 1, 2}


def test_who_leaves_a_replica_gives_nothing() -> None:
    layout = Layout(dp=3)
    worker_reports = survivors(layout, {0: 5, 1: 5, 2: 5})
    worker_reports[0] = WorkerReport(worker=0, rank=0, live=worker_reports[0].live, is_leaving=True)
    found = plan_generation(worker_reports, layouts={1: layout}, current=1, target=2, replan=by_dp)
    assert found is not None
    assert not found.departing
    assert sorted(found.workers) == [1, 2]


def test_copies_of_two_generations_with_the_same_cut_are_one_state() -> None:
    wide, narrow = Layout(dp=2, fsdp=2), Layout(fsdp=2)
    worker_reports = [
        WorkerReport(worker=0, rank=0, replicas=(held_state(wide, 0, 4, 1),)),
        WorkerReport(worker=1, rank=1, replicas=(held_state(narrow, 1, 4, 2),)),
    ]
    found = plan_generation(
        worker_reports, layouts={1: wide, 2: narrow}, current=2, target=2, replan=lambda _: narrow
    )
    assert found is not None
    assert (found.restore.kind, found.restore.step) == ("replicas", 4)


def test_under_zero1_each_replica_is_a_part_of_its_own() -> None:
    layout = Layout(dp=2, zero1=True)
    worker_reports = survivors(layout, {0: 3})
    found = plan_generation(worker_reports, layouts={1: layout}, current=1, target=2, replan=by_dp)
    assert found is not None
    assert found.restore.kind == "checkpoint"


LAYOUTS = st.builds(
    Layout,
    dp=st.integers(1, 3),
    fsdp=st.integers(1, 3),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    zero1=st.booleans(),
)


@st.composite
def worker_groups(draw: st.DrawFn) -> tuple[Layout, list[WorkerReport], int, Layout]:
    layout, after = draw(LAYOUTS), draw(LAYOUTS)
    worker_reports: list[WorkerReport] = []
    for rank in range(layout.world):
        if draw(st.booleans()):
            live = draw(st.sampled_from([None, 8, 9]))
            kept = draw(st.lists(st.integers(0, layout.world - 1), max_size=3, unique=True))
            worker_reports.append(
                WorkerReport(
                    worker=rank,
                    rank=rank,
                    live=None if live is None else held_state(layout, rank, live),
                    replicas=tuple(
                        held_state(layout, owner, draw(st.sampled_from([5, 7]))) for owner in kept
                    ),
                    is_leaving=draw(st.integers(0, 4)) == 0,
                )
            )
    spares = draw(st.integers(0, 3))
    worker_reports += [WorkerReport(worker=100 + number) for number in range(spares)]
    return layout, worker_reports, draw(st.integers(1, 12)), after


@given(worker_groups())
def test_any_decision_is_whole(group: tuple[Layout, list[WorkerReport], int, Layout]) -> None:
    layout, worker_reports, target, after = group

    def replan(devices: int) -> Layout:
        return (
            after
            if after.world <= devices
            else layout
            if layout.world == devices
            else by_dp(devices)
        )

    found = plan_generation(
        worker_reports, layouts={1: layout}, current=1, target=target, replan=replan
    )
    able = {report.worker for report in worker_reports if not report.is_leaving}
    if found is None:
        assert not able
        return
    # Every seat is taken, once, by somebody who stays.
    assert len(found.workers) == found.layout.world <= min(target, len(able))
    assert len(set(found.workers)) == len(found.workers)
    assert set(found.workers) <= able
    assert not set(found.workers) & set(found.departing)
    # What is given is held by the giver, all of one step, and the whole state.
    by_member = {report.worker: report for report in worker_reports}
    meeting = [*found.workers, *found.departing]
    parts = split_of(layout).parts()
    for giver in found.restore.sources:
        report = by_member[meeting[giver.handoff_rank]]
        assert giver.held_state.step == found.restore.step
        assert giver.held_state in (report.replicas if giver.is_replica else (report.live,))
    given = {part_at(layout, giver.held_state.coordinates) for giver in found.restore.sources}
    assert given in (set(), parts)
    # There is no newer step that is whole, live or in copies.
    held: dict[int, set[tuple[int, ...]]] = {}
    for report in worker_reports:
        for each in (*((report.live,) if report.live else ()), *report.replicas):
            held.setdefault(each.step, set()).add(part_at(layout, each.coordinates))
    whole = [step for step, found_parts in held.items() if found_parts == parts]
    assert found.restore.step == max(whole, default=None)
    # If nothing moves, everyone has its part already.
    if found.restore.sources and not found.restore.needs_transfer:
        for rank, worker in enumerate(found.workers):
            live = by_member[worker].live
            assert live is not None
            mine = part_at(layout, live.coordinates)
            assert mine == part_at(found.layout, found.layout.place_of(rank))


@given(LAYOUTS, st.data())
def test_one_loss_moves_nobody_else(layout: Layout, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, layout.world - 1))
    steps = {rank: 4 for rank in range(layout.world) if rank != lost}
    replicas = tuple(held_state(layout, rank, 4) for rank in range(layout.world))
    worker_reports = [
        WorkerReport(worker=r.worker, rank=r.rank, live=r.live, replicas=replicas)
        for r in survivors(layout, steps)
    ] + [WorkerReport(worker=99)]
    found = plan_generation(
        worker_reports, layouts={1: layout}, current=1, target=layout.world, replan=lambda _: layout
    )
    assert found is not None
    expected = [99 if rank == lost else rank for rank in range(layout.world)]
    if layout.world > 1:
        assert list(found.workers) == expected


def test_places_travel_as_json() -> None:
    sent = HeldState(step=3, generation=2, coordinates=RankCoordinates(pp=1, tp=1))
    assert HeldState.model_validate_json(sent.model_dump_json()) == sent
