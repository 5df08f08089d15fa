"""Streams, events, late copies: every missing wait is an error, every time, and what waits is none."""

from __future__ import annotations

import math
import threading

import pretend_accelerator as pretend
import torch

from tests.pretend.programs.checks import raises, run_checks


def make_streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.accelerator.current_stream(), torch.Stream("npu")


def check_a_missing_wait_is_a_race_every_time() -> None:
    for _ in range(5):
        _, side = make_streams()
        x = torch.ones(4, device="npu")
        with side, raises(RuntimeError, "reads what stream 0 of device 0 wrote"):
            x + 1
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x * 2
        with raises(RuntimeError, "still reads"):
            x.add_(1)
        torch.accelerator.synchronize()
        x.add_(1)


def check_waits_are_enough() -> None:
    main, side = make_streams()
    before = pretend.counters()["races"]
    x = torch.ones(4, device="npu")
    side.wait_stream(main)
    with side:
        y = x + 1
    main.wait_stream(side)
    assert (y * 2).tolist() == [4, 4, 4, 4]
    event = torch.Event("npu")
    x.add_(1)
    event.record()
    side.wait_event(event)
    with side:
        z = x + 1
        done = side.record_event()
    done.synchronize()  # the host's wait orders all that comes after
    assert (z + x).tolist() == [5, 5, 5, 5]
    assert pretend.counters()["races"] == before


def check_parts_of_one_buffer_are_apart() -> None:
    main, side = make_streams()
    buffer = torch.zeros(8, device="npu")
    side.wait_stream(main)
    with side:
        buffer[:4].add_(1)
    buffer[4:].add_(2)
    with raises(RuntimeError, "race"):
        buffer[3:5].add_(1)


def check_memory_freed_too_early_is_found_at_its_reuse() -> None:
    main, side = make_streams()
    before = pretend.counters()["races"]
    x = torch.ones(1000, device="npu")
    side.wait_stream(main)
    with side:
        x + 1
    del x
    assert pretend.counters()["races"] == before  # not at the free
    with raises(RuntimeError, "uses memory again that stream"):
        torch.ones(1000, device="npu")
    # With a wait between, or with record_stream, the same is fine.
    for keeps in ("wait", "record"):
        torch.accelerator.synchronize()
        x = torch.ones(1000, device="npu")
        address = x.data_ptr()
        side.wait_stream(main)
        with side:
            x + 1
        if keeps == "record":
            x.record_stream(side)
        del x
        if keeps == "wait":
            main.wait_stream(side)
        y = torch.ones(1000, device="npu")
        assert (y.data_ptr() == address) == (keeps == "wait")
        del y


def check_recorded_memory_comes_back() -> None:
    main, side = make_streams()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    big = torch.ones(48 << 18, device="npu")  # 48 of 64 MiB
    side.wait_stream(main)
    with side:
        big.sum()
    big.record_stream(side)
    del big
    torch.ones(48 << 18, device="npu")  # waits for the stream, as CUDA's allocator
    assert torch.accelerator.memory_stats()["num_ooms"] == 0


def check_copies_to_the_host_arrive_late() -> None:
    x = torch.ones(4, device="npu")
    for kind, poison in ((torch.float32, math.isnan), (torch.int64, lambda v: v == -1)):
        pinned = torch.zeros(4, dtype=kind).pin_memory()
        pinned.copy_(x.to(kind), non_blocking=True)
        assert all(poison(value) for value in pinned.tolist())
        x + 1  # later kernels do not bring it
        assert all(poison(value) for value in pinned.tolist())
        torch.accelerator.current_stream().synchronize()
        assert pinned.tolist() == [1, 1, 1, 1]


def check_the_wrong_stream_brings_no_copy() -> None:
    """What tears checkpoints: to wait in a thread whose current device is another."""
    x = torch.ones(4, device="npu:1")
    pinned = torch.zeros(4).pin_memory()
    pinned.copy_(x, non_blocking=True)
    found = []

    def wait() -> None:
        torch.accelerator.current_stream().synchronize()  # of device 0
        found.append(pinned.tolist())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert all(math.isnan(value) for value in found[0])
    torch.accelerator.synchronize(1)
    assert pinned.tolist() == [1, 1, 1, 1]


def check_copies_to_the_device_are_made_late() -> None:
    pinned, x = torch.ones(4).pin_memory(), torch.empty(4, device="npu")
    x.copy_(pinned, non_blocking=True)
    pinned.fill_(7)  # too early
    assert (x + 0).tolist() == [7, 7, 7, 7]
    x.copy_(pinned, non_blocking=True)
    torch.accelerator.synchronize()
    pinned.fill_(1)
    assert x.tolist() == [7, 7, 7, 7]
    kept = torch.full((4,), 5.0).pin_memory().to("npu", non_blocking=True)  # the source is freed
    assert kept.tolist() == [5, 5, 5, 5]
    # The same stream brings a value to the host and back with no wait of the host.
    pinned.copy_(x, non_blocking=True)
    y = pinned.to("npu", non_blocking=True)
    assert y.tolist() == [7, 7, 7, 7]
    # A prefetch on a side stream needs a wait.
    main, side = make_streams()
    with side:
        z = pinned.to("npu", non_blocking=True)
    with raises(RuntimeError, "race"):
        z + 1
    main.wait_stream(side)
    assert z.tolist() == [7, 7, 7, 7]


def check_events_can_be_asked() -> None:
    pinned, x = torch.zeros(4).pin_memory(), torch.ones(4, device="npu")
    torch.accelerator.synchronize()
    pinned.copy_(x, non_blocking=True)
    event = torch.Event("npu")
    event.record()
    assert not event.query()  # as late as it may be
    while not event.query():
        assert all(math.isnan(value) for value in pinned.tolist())
    assert pinned.tolist() == [1, 1, 1, 1]
    first, second = torch.Event("npu", enable_timing=True), torch.Event("npu", enable_timing=True)
    first.record()
    second.record()
    assert first.elapsed_time(second) >= 0


def check_two_devices_wait_for_each_other() -> None:
    x = torch.ones(4, device="npu:0")
    y = x.to("npu:1")
    y.add_(1)
    x.copy_(y)
    assert x.tolist() == [2, 2, 2, 2]


if __name__ == "__main__":
    run_checks(dict(globals()))
