"""Devices, tensors, memory, random numbers, counters; what is fatal runs in forked children."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import signal
from collections.abc import Callable

import pretend_accelerator as pretend
import torch

from tests.pretend.programs.checks import raises, run_checks

MIB = 1 << 20
npu = torch.get_device_module("npu")


def in_child(work: Callable[[], object]) -> int:
    """Return how a forked child ended: 0 if the work came to its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(1)
    return os.waitpid(child, 0)[1]


def check_nothing_is_used_by_asking() -> None:
    assert torch.accelerator.current_accelerator().type == "npu"
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.is_available()
    torch.manual_seed(1)
    assert not npu.is_initialized()
    assert pretend.contexts() == []

    def work() -> None:
        torch.ones(2, device="npu:1")

    assert in_child(work) == 0  # a fork before the first use is fine


def check_visible_devices() -> None:
    def count(visible: str) -> int:
        def work() -> None:
            os.environ["ASCEND_RT_VISIBLE_DEVICES"] = visible
            os._exit(10 + npu.device_count())

        return os.waitstatus_to_exitcode(in_child(work)) - 10

    assert [count(text) for text in ("0,1", "1", "1,0", "7", "0;1", "", "0,9,1")] == [
        *(2, 1, 2, 0, 1, 0, 1)
    ]

    def second() -> None:
        os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1"
        torch.ones(1, device="npu:0")
        assert npu.get_device_name(0) == "Pretend npu 1"
        with raises(RuntimeError, "invalid device ordinal"):
            torch.ones(1, device="npu:1")

    assert in_child(second) == 0


def check_only_a_used_device_has_a_context() -> None:
    def work() -> None:
        torch.accelerator.set_device_index(1)
        torch.ones(2, device="npu").sum().item()
        torch.accelerator.synchronize()
        torch.ones(2).pin_memory()
        assert pretend.contexts() == [1]
        npu.mem_get_info(0)
        assert pretend.contexts() == [0, 1]

    assert in_child(work) == 0


def check_devices_do_not_mix() -> None:
    here = torch.ones(3, device="npu")
    with raises(RuntimeError, "same device"):
        here + torch.ones(3)
    with raises(RuntimeError, "same device"):
        here + torch.ones(3, device="npu:1")
    with raises(TypeError, "numpy"):
        here.numpy()
    with raises(RuntimeError, "same device"):
        torch.add(torch.ones(3), 1, out=here.cpu()).add_(here)


def check_numbers_of_the_host_pass_only_element_wise() -> None:
    here, number = torch.ones(2, 2, device="npu"), torch.tensor(3.0)
    assert (here * number).tolist() == [[3, 3], [3, 3]]
    assert here.clone().mul_(number).sum().item() == 12
    assert torch.where(here > 0, here, number).sum().item() == 4
    torch._foreach_mul_([here.clone()], number)
    with raises(RuntimeError, "same device"):
        torch.stack([here[0, 0], number])
    with raises(RuntimeError, "same device"):
        torch.cat([here[0], number[None]])
    with raises(RuntimeError, "same device"):
        here.index_add(0, torch.tensor([1]), here[:1])
    assert here[torch.tensor([1])].tolist() == [[1, 1]]  # as on CUDA: indices of the host


def check_host_access_is_fatal() -> None:
    address = torch.ones(4, device="npu").data_ptr()
    assert os.WTERMSIG(in_child(lambda: ctypes.string_at(address, 4))) == signal.SIGSEGV


def check_a_fork_after_use_is_bad() -> None:
    here = torch.ones(4, device="npu")

    def work() -> None:
        assert npu._is_in_bad_fork()
        for use in (
            lambda: torch.ones(4, device="npu"),
            lambda: here + 1,
            here.cpu,
            torch.accelerator.synchronize,
            lambda: torch.ones(1).pin_memory(),
        ):
            with raises(RuntimeError, "forked subprocess"):
                use()

    assert in_child(work) == 0


def check_memory_figures() -> None:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    block = torch.empty(MIB, dtype=torch.uint8, device="npu")
    assert torch.accelerator.memory_allocated() - before == MIB
    free, total = torch.accelerator.get_memory_info()
    assert total == 64 * MIB
    assert free == total - torch.accelerator.memory_reserved()
    del block
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == MIB
    reserved = torch.accelerator.memory_reserved()
    torch.accelerator.empty_cache()
    assert reserved - torch.accelerator.memory_reserved() >= MIB
    # What a kernel needs beside its results counts too.
    x = torch.rand(MIB // 4, device="npu")
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    x.sort()
    assert torch.accelerator.max_memory_allocated() - before >= 3 * MIB


def check_an_emptied_cache_leaves_its_neighbours() -> None:
    kept = [torch.full((100,), number, device="npu") for number in range(40)]  # many in a page
    del kept[::3]
    torch.accelerator.empty_cache()
    for tensor in kept:
        assert tensor.unique().numel() == 1
    assert [int(tensor[0]) % 3 for tensor in kept] == [1, 2] * 13


def check_out_of_memory_and_fragmentation() -> None:
    torch.accelerator.empty_cache()
    kinds = torch.uint8
    with raises(torch.OutOfMemoryError, "out of memory. Tried to allocate 80.0 MiB"):
        torch.empty(80 * MIB, dtype=kinds, device="npu")
    pieces = [torch.empty(6 * MIB, dtype=kinds, device="npu") for _ in range(10)]
    with raises(torch.OutOfMemoryError):
        torch.empty(6 * MIB, dtype=kinds, device="npu")
    del pieces[::2]  # 30 MiB are free, and no two pieces touch
    free = 64 * MIB - torch.accelerator.memory_allocated()
    assert free > 30 * MIB
    with raises(torch.OutOfMemoryError, "largest free piece has 6.0 MiB"):
        torch.empty(12 * MIB, dtype=kinds, device="npu")
    again = torch.empty(5 * MIB, dtype=kinds, device="npu")
    pieces.clear()
    del again
    torch.empty(60 * MIB, dtype=kinds, device="npu")
    assert torch.accelerator.memory_stats()["num_ooms"] == 3
    with raises(torch.OutOfMemoryError):  # a kernel's results, too
        torch.rand(5000, 1, device="npu") + torch.rand(1, 5000, device="npu")


def check_generators() -> None:
    torch.manual_seed(5)
    host, here, other = torch.randn(9), torch.randn(9, device="npu"), torch.randn(9, device="npu:1")
    assert torch.equal(host, here.cpu())
    assert torch.equal(here.cpu(), other.cpu())
    state, of_host = npu.get_rng_state(), torch.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(99, device="npu"), 0.5).cpu()
    torch.rand(5, device="npu:1")
    torch.randperm(5, device="npu")
    assert torch.equal(of_host, torch.get_rng_state())  # the host's draws are its own
    npu.set_rng_state(state)
    again = torch.nn.functional.dropout(torch.ones(99, device="npu"), 0.5).cpu()
    assert torch.equal(first, again)
    own = torch.Generator("npu").manual_seed(3)
    drawn = torch.rand(4, device="npu", generator=own)
    assert torch.equal(drawn, torch.rand(4, device="npu", generator=own.manual_seed(3)))
    assert own.device.type == "npu"


def check_counters_are_exact() -> None:
    x, m = torch.ones(4, device="npu"), torch.ones(4, 4, device="npu")
    pinned = torch.ones(4).pin_memory()
    event = torch.Event("npu")
    stream = torch.accelerator.current_stream()

    def counted(work: Callable[[], object]) -> dict[str, int]:
        with pretend.counting() as counts:
            work()
        return {name: count for name, count in counts.items() if count}

    def waits(reason: str, **others: int) -> dict[str, int]:
        return {"synchronizations": 1, f"waits_{reason}": 1, **others}

    assert counted(lambda: x + 1) == {"kernels": 1}
    assert counted(lambda: m.t()[1:].unsqueeze(0)) == {}  # views are free
    assert counted(lambda: torch._foreach_add_([x] * 9, 1)) == {"kernels": 1}
    assert counted(x[0].item) == waits("item", kernels=1)
    assert counted(x.tolist) == waits("copy_to_host", copies_to_host=1)
    assert counted(x.cpu) == waits("copy_to_host", copies_to_host=1)
    assert counted(lambda: x.to("npu:1")) == {"kernels": 1}
    assert counted(lambda: torch.ones(4).to("npu")) == waits("copy_from_host", copies_from_host=1)
    assert counted(lambda: x.copy_(pinned, non_blocking=True)) == {
        "copies_from_host": 1,
        "copies_late": 1,
    }
    assert counted(lambda: pinned.copy_(x, non_blocking=True)) == {
        "copies_to_host": 1,
        "copies_late": 1,
    }
    assert counted(torch.accelerator.synchronize) == waits("device")
    assert counted(stream.synchronize) == waits("stream")
    assert counted(event.record) == {}
    assert counted(event.synchronize) == waits("event")
    assert counted(x.nonzero) == waits("kernel", kernels=1)
    assert counted(lambda: m[m > 0])["synchronizations"] == 1
    pretend.reset_counters()
    assert not any(pretend.counters().values())
    pretend.set_sync_mode("error")
    try:
        x + 1
        with raises(RuntimeError, "the host waits for the device (item)"):
            x[0].item()
        with raises(RuntimeError, "copy_from_host"):
            torch.tensor([1.0], device="npu")
    finally:
        pretend.set_sync_mode("default")


def check_tensors_are_kept_and_moved() -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3, device="npu:1")}, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()))["a"]
    assert loaded.device == torch.device("npu:1")
    on_host = torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu")["a"]
    assert on_host.tolist() == [1, 1, 1]
    assert copy.deepcopy(loaded).device == loaded.device
    assert torch.ones(4).pin_memory().is_pinned()
    assert not torch.ones(4).is_pinned()
    storage = torch.ones(8, device="npu").untyped_storage()
    storage.resize_(0)
    storage.resize_(64)
    assert storage.nbytes() == 64
    out = torch.empty(0, device="npu")
    torch.add(loaded.to("npu:0"), 1, out=out)
    assert out.tolist() == [2, 2, 2]


if __name__ == "__main__":
    run_checks(dict(globals()))
