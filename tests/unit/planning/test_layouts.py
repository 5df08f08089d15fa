"""Layouts that are asked for, chosen, and changed as devices come and go."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yunlu.core.errors import JobError, ModelError, YunluError
from yunlu.planning.layouts import (
    Layout,
    SplitConstraints,
    check_layout,
    choose_layout,
    count_devices,
    fits,
    layout_from,
    moved_share,
    parse_layout,
    refuse_conflicts,
    replan,
    replan_with_reason,
    restrict,
    worker_bytes,
    worker_share,
)
from yunlu.spec.job import Job, LayoutSpec, spell_layout

ROOMY = math.inf


def facts(**changes: Any) -> SplitConstraints:
    """16 MB of weights, gradients and moments; 2 heads' worth of ways, 4 blocks."""
    fields: dict[str, Any] = {
        "parameters": 1_000_000, "trainable": 1_000_000, "state_bytes": 8e6,
        "activation_bytes_per_sample": 1e5, "layers": 4, "tensor_ways": (1, 2, 4),
    }  # fmt: skip
    return SplitConstraints.model_validate(fields | changes)


def asked(text: str, **more: Any) -> LayoutSpec:
    return LayoutSpec.model_validate({**(spell_layout(text) or {}), **more})


def layout(text: str) -> Layout:
    found = parse_layout(text)
    assert found is not None
    return found


def job(**parts: Any) -> Job:
    return Job.model_validate({"task": "t", "model": "m", "data": "d"} | parts)


@pytest.mark.parametrize(
    ("devices", "room", "nodes", "expected"),
    [
        (1, 1e3, 1, "single"),
        (4, ROOMY, 1, "dp4"),
        (3, 17e6, 1, "dp3"),
        (4, 15e6, 1, "fsdp4"),
        (8, 15e6, 2, "dp2 x fsdp4"),
        (8, 7.0e6, 2, "fsdp8"),  # half a shard each is not enough: over the nodes, too
        (4, 7.0e6, 1, "fsdp2 x tp2"),  # a gathered block is cut as well
    ],
)
def test_the_plainest_layout_that_fits_is_chosen(
    devices: int, room: float, nodes: int, expected: str
) -> None:
    found, reason = choose_layout(devices, facts(), batch=32, room_bytes=room, nodes=nodes)
    assert str(found) == expected
    assert reason


def test_a_pipeline_comes_last() -> None:
    only_stages = facts(why_not={"fsdp": "no", "tp": "no"})
    found, reason = choose_layout(4, only_stages, batch=32, room_bytes=9e6)
    assert str(found) == "dp2 x pp2"
    assert "do not fit" in reason
    assert "in a row" in reason


def test_too_few_samples_for_replicas_cut_the_model_instead() -> None:
    found, reason = choose_layout(4, facts(), batch=2, room_bytes=ROOMY)
    assert str(found) == "dp2 x tp2"
    assert "2 samples a step are too few for 4 replicas" in reason


def test_devices_that_cannot_be_used_are_said() -> None:
    found, reason = choose_layout(3, facts(layers=1, tensor_ways=(1,)), batch=2, room_bytes=ROOMY)
    assert str(found) == "dp2"
    assert reason.startswith("2 of 3 devices can be used (The layout")


def test_what_fits_nowhere_is_tried_all_the_same_with_a_doubt() -> None:
    _, reason = choose_layout(2, facts(), batch=32, room_bytes=1e3)
    assert "may not fit" in reason


def test_what_is_asked_for_stays_and_the_rest_is_chosen() -> None:
    found, _ = choose_layout(8, facts(), batch=32, room_bytes=ROOMY, wanted=LayoutSpec(tp=2))
    assert str(found) == "dp4 x tp2"
    found, reason = choose_layout(
        4, facts(), batch=32, room_bytes=ROOMY, wanted=asked("dp2 x tp2", sequence=True)
    )
    assert (str(found), found.sequence, reason) == ("dp2 x tp2", True, "as asked")
    with pytest.raises(JobError, match="is for 2 devices, not 4"):
        choose_layout(4, facts(), batch=32, room_bytes=ROOMY, wanted=asked("dp2"))


@pytest.mark.parametrize(
    ("text", "changes", "error", "words"),
    [
        ("dp8", {}, JobError, "needs 8 devices, and there are 4"),
        ("dp4", {"batch": 3}, JobError, "shares 3 samples a step among 4 replicas"),
        ("tp3", {}, ModelError, "cannot be cut 3 ways"),
        ("pp4", {"layers": 3}, ModelError, "4 stages; the model can be parted into 3"),
        ("fsdp2", {"why_not": {"fsdp": "it shares weights"}}, ModelError, "it shares weights"),
        ("pp2", {"why_not": {"pp": "no blocks found"}}, ModelError, "no pp here, no blocks found"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_reason(
    text: str, changes: dict[str, Any], error: type[YunluError], words: str
) -> None:
    batch = changes.pop("batch", 32)
    with pytest.raises(error, match=words) as caught:
        check_layout(layout(text), facts(**changes), devices=4, batch=batch)
    assert caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        Layout(dp=2, sequence=True),
        Layout(dp=2, vocabulary=True),
        Layout(fsdp=2, zero1=True),
        Layout(dp=2, fsdp=2, zero1=True),
        Layout(dp=2, schedule="gpipe"),
        Layout(pp=2, schedule="interleaved"),
        Layout(pp=2, schedule="1f1b", stages_per_rank=2),
        Layout(dp=2, schedule="interleaved", stages_per_rank=2),
    ],
)
def test_options_without_their_axis_are_refused(wrong: Layout) -> None:
    with pytest.raises(JobError, match="cannot be"):
        check_layout(wrong, facts(), devices=8, batch=32)


@pytest.mark.parametrize(
    ("before", "devices", "room", "after"),
    [
        ("dp4", 3, ROOMY, "dp3"),
        ("dp3", 4, ROOMY, "dp4"),
        ("fsdp4", 3, ROOMY, "fsdp3"),
        ("dp2 x fsdp2", 2, ROOMY, "fsdp2"),
        ("dp2 x fsdp2", 6, ROOMY, "dp3 x fsdp2"),
        ("dp2 x fsdp2", 3, ROOMY, "fsdp3"),
        ("dp2 x tp2", 3, ROOMY, "dp3"),
        ("dp2 x tp2", 3, 15e6, "fsdp3"),
        ("dp2 x tp2", 2, ROOMY, "tp2"),
        ("dp2 x tp2", 6, ROOMY, "dp3 x tp2"),
        ("dp2 x pp2", 3, ROOMY, "dp3"),
        ("dp2 x pp2", 3, 12e6, "fsdp3"),
        ("dp3", 2, 15e6, "fsdp2"),
        ("single", 4, ROOMY, "dp4"),
        ("tp4", 1, 1e3, "single"),
    ],
)
def test_a_resize_changes_as_little_as_it_can(
    before: str, devices: int, room: float, after: str
) -> None:
    found, reason = replan_with_reason(layout(before), devices, facts(), batch=32, room_bytes=room)
    assert str(found) == after
    assert before in reason
    assert found == replan(layout(before), devices, facts(), batch=32, room_bytes=room)


def test_the_users_layout_comes_back_as_soon_as_it_can() -> None:
    wish = asked("dp2 x tp2", sequence=True)
    now = layout_from(wish, wish.sizes)
    seen: list[str] = []
    for devices in (3, 2, 4):
        now, reason = replan_with_reason(
            now, devices, facts(), batch=32, room_bytes=ROOMY, pinned=wish
        )
        seen.append(str(now))
    assert seen == ["dp3", "dp2", "dp2 x tp2"]
    assert (now.sequence, reason) == (True, "as asked")


def test_what_is_pinned_stays_as_long_as_the_number_allows() -> None:
    tp2 = LayoutSpec(tp=2)
    assert str(_resized("dp2 x tp2", 6, tp2)) == "dp3 x tp2"
    assert str(_resized("dp2 x tp2", 3, tp2)) == "dp3"
    assert str(_resized("dp3", 4, tp2)) == "dp2 x tp2"


def test_options_go_with_their_axis() -> None:
    wish = LayoutSpec(zero1=True)
    assert _resized("dp4", 1, wish) == Layout()
    assert _resized("single", 4, wish) == Layout(dp=4, zero1=True)
    interleaved = Layout(pp=2, schedule="interleaved", stages_per_rank=2)
    found = replan(interleaved, 4, facts(layers=7), batch=32, room_bytes=ROOMY)
    assert found == interleaved.model_copy(update={"dp": 2})
    fewer = replan(Layout(dp=2), 2, facts(layers=3), batch=32, room_bytes=ROOMY,
                   pinned=asked("pp2", schedule="interleaved"))  # fmt: skip
    assert fewer.stages <= 3


def test_replicas_share_the_optimisers_state_only_where_each_gets_a_tensor() -> None:
    few = facts(trained_tensors=3)
    for fine in (Layout(dp=3, zero1=True), Layout(dp=4)):
        check_layout(fine, few, devices=4, batch=32)
    check_layout(Layout(dp=4, zero1=True), facts(), devices=4, batch=32)  # nobody counted
    for wrong in (Layout(dp=4, zero1=True), Layout(dp=2, pp=2, zero1=True)):
        with pytest.raises(ModelError, match="3 trained tensors are too few for 4") as caught:
            check_layout(wrong, few, devices=4, batch=32)
        assert caught.value.hint == "remove zero1"
    with pytest.raises(ModelError, match="cannot have zero1"):
        choose_layout(4, few, batch=32, room_bytes=ROOMY, wanted=asked("dp4", zero1=True))
    found, reason = choose_layout(4, few, batch=32, room_bytes=ROOMY, wanted=LayoutSpec(zero1=True))
    assert found == Layout(dp=4)
    assert "without zero1, 3 trained tensors" in reason
    grown, reason = replan_with_reason(Layout(dp=3, zero1=True), 4, few, batch=32, room_bytes=ROOMY)
    assert grown == Layout(dp=4)
    assert "without zero1" in reason


def test_on_a_cpu_the_copies_of_shards_weigh_against_sharding() -> None:
    share = worker_share(Layout(fsdp=2), batch=2, micro_batch=1)
    on_cpu = facts(on_cpu=True)
    more = worker_bytes(Layout(fsdp=2), on_cpu, share) - worker_bytes(
        Layout(fsdp=2), facts(), share
    )
    assert more == pytest.approx(4 * 12e6 / 2)
    assert str(choose_layout(2, facts(), batch=32, room_bytes=15e6)[0]) == "fsdp2"
    assert str(choose_layout(2, on_cpu, batch=32, room_bytes=15e6)[0]) != "fsdp2"


def _resized(before: str, devices: int, pinned: LayoutSpec) -> Layout:
    return replan(layout(before), devices, facts(), batch=32, room_bytes=ROOMY, pinned=pinned)


def test_the_state_that_moves_is_what_a_worker_lacks() -> None:
    assert moved_share(Layout(dp=4), Layout(dp=3)) == 0
    assert moved_share(Layout(dp=2, tp=2), Layout(tp=2)) == 0
    assert moved_share(Layout(dp=2), Layout(dp=3)) == 1
    assert moved_share(Layout(tp=2), Layout(dp=2)) == pytest.approx(1)
    assert moved_share(Layout(fsdp=4), Layout(fsdp=2)) == pytest.approx(0.75)


some_facts = st.builds(
    facts,
    layers=st.integers(1, 9),
    tensor_ways=st.sampled_from([(1,), (1, 2), (1, 2, 4), (1, 3)]),
    why_not=st.dictionaries(st.sampled_from(["fsdp", "tp", "pp"]), st.just("no"), max_size=3),
)
sizes = st.sampled_from([1, 1, 1, 2, 3]) | st.just("auto")
wishes = st.builds(LayoutSpec, dp=sizes, fsdp=sizes, tp=sizes, pp=sizes)
rooms = st.floats(1e5, 4e7)


@settings(deadline=None)
@given(some_facts, st.integers(1, 24), st.integers(1, 40), rooms, wishes)
def test_a_chosen_layout_can_be_had_and_uses_what_can_be_used(
    known: SplitConstraints, devices: int, batch: int, room: float, wish: LayoutSpec
) -> None:
    try:
        found, reason = choose_layout(devices, known, batch=batch, room_bytes=room, wanted=wish)
    except YunluError:
        assert wish.sizes  # what nobody restricts always has an answer
        return
    check_layout(found, known, devices=devices, batch=batch)
    assert all(found.size_of(axis) == size for axis, size in wish.sizes.items())
    _check_use(found, devices, reason, is_tight=not fits(found, known, room))


@settings(deadline=None)
@given(
    some_facts, st.tuples(st.integers(1, 24), st.integers(1, 12)), st.integers(1, 40), rooms, wishes
)
def test_a_resized_layout_can_be_had_whatever_was_before(
    known: SplitConstraints, counts: tuple[int, int], batch: int, room: float, wish: LayoutSpec
) -> None:
    before, devices = counts
    old, _ = choose_layout(before, known, batch=batch, room_bytes=room)
    found, reason = replan_with_reason(
        old, devices, known, batch=batch, room_bytes=room, pinned=wish
    )
    check_layout(found, known, devices=devices, batch=batch)
    _check_use(found, devices, reason, is_tight=not fits(found, known, room))
    again, _ = replan_with_reason(
        found, found.world, known, batch=batch, room_bytes=room, pinned=wish
    )
    assert again.world == found.world


def _check_use(found: Layout, devices: int, reason: str, *, is_tight: bool) -> None:
    assert found.world <= devices
    assert (found.world < devices) == ("can be used" in reason)
    assert not is_tight or "may not fit" in reason or reason == "as before"


@pytest.mark.parametrize(
    ("parts", "gpus", "expected"),
    [
        ({}, 0, 1),
        ({}, 8, 8),
        ({"devices": 3}, 8, 3),
        ({"layout": "dp2 x tp2"}, 0, 4),
        ({"layout": "single"}, 8, 1),
        ({"layout": {"tp": 2}}, 0, 2),
        ({"layout": {"tp": 2}}, 7, 6),
        ({"train": {"compile": True}}, 8, 1),
    ],
)
def test_devices_follow_the_job_then_the_layout_then_the_gpus(
    parts: dict[str, Any], gpus: int, expected: int
) -> None:
    assert count_devices(job(**parts), gpus=gpus) == expected


@pytest.mark.parametrize(
    ("parts", "refused", "allowed"),
    [
        ({"train": {"gradient_release": True, "clip": None}}, ["dp2", "tp2"], []),
        ({"train": {"compile": True}}, ["dp2", "pp2"], []),
        ({"train": {"compile": "xla"}}, ["dp2"], []),
        ({"train": {"quantize": "int8"}}, ["dp2"], []),
        ({"train": {"precision": "fp8"}}, ["dp2"], []),
        ({"train": {"adapt_precision": True}}, ["dp2"], []),
        ({"train": {"profile": True}}, ["dp2", "fsdp2", "tp2", "pp2"], []),
        ({"train": {"precision": "fp16"}}, ["fsdp2", "tp2", "pp2"], ["dp2"]),
        ({"train": {"ema": 0.9}}, ["fsdp2", "dp2 x tp2", "pp2"], ["dp2"]),
        ({"train": {"optimizer": "lamb"}}, ["fsdp2", "tp2"], ["dp2", "pp2"]),
        ({"train": {"optimizer": {"state": "8bit"}}}, ["fsdp2", "tp2"], ["dp2", "pp2"]),
        ({"model": {"name": "m", "adapter": "lora"}}, ["tp2", "pp2"], ["dp2", "fsdp2"]),
        ({"train": {"grow_batch": 2}}, [], ["dp2", "fsdp2", "tp2", "pp2"]),
    ],
)
def test_what_a_layout_cannot_give_is_refused_and_never_chosen(
    parts: dict[str, Any], refused: list[str], allowed: list[str]
) -> None:
    asking = job(**parts)
    refuse_conflicts(asking, Layout())
    known = restrict(facts(), asking)
    for text in refused:
        with pytest.raises(JobError, match="does not go with the layout") as caught:
            refuse_conflicts(asking, layout(text))
        assert "remove " in str(caught.value.hint)
        with pytest.raises(ModelError):
            check_layout(layout(text), known, devices=8, batch=32)
    for text in allowed:
        refuse_conflicts(asking, layout(text))
    for room in (ROOMY, 9e6, 1e3):
        found, _ = choose_layout(4, known, batch=32, room_bytes=room)
        refuse_conflicts(asking, found)
