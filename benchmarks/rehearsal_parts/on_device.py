"""Rehearsed and real peaks of cases, in an environment with a pretend device.

``python -m benchmarks.rehearsal_parts.on_device CASE...`` prints a JSON object a case. Everything is forked
from one process that has torch loaded and has not touched the device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.rehearsal_parts.cases import CASES, Case
from yunlu.training import loop
from yunlu.training.device import accelerator_kind, open_device
from yunlu.training.engine import Engine
from yunlu.training.models.adapter import add_adapter
from yunlu.training.models.networks import allow_single_samples
from yunlu.training.parallel import parallel_model, parallelize
from yunlu.training.parallel.world import form_world
from yunlu.training.rehearsal import rehearse
from yunlu.training.tasks.task import TrainingInputs, open_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.training.loop import Step

_LOADED = (parallel_model, parallelize)  # before forking


def main() -> int:
    """Compare the cases named."""
    kind = accelerator_kind()
    assert kind is not None, "there is no pretend device here"
    failed = 0
    for name in sys.argv[1:]:
        try:
            found = compare(CASES[name], kind)
        except RuntimeError as error:
            found, failed = {"error": str(error)}, failed + 1
        print(json.dumps({"case": name, **found}), flush=True)  # noqa: T201
    return 1 if failed else 0


def compare(case: Case, kind: str) -> dict[str, Any]:
    """Peaks of the case by rank: rehearsed, and real."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"rank-{rank}") for rank in range(case.layout.world)]
        store = str(Path(folder, "store"))

        def make_step(rank: int) -> Callable[[], dict[str, Any]]:
            return lambda: step_really(case, kind, rank, store)

        real = _in_children([(file, make_step(rank)) for rank, file in enumerate(files)])
        rehearsal = Path(folder, "rehearsal")
        (rehearsed,) = _in_children([(rehearsal, lambda: _rehearse(case, kind))])
    return {"real": real, "rehearsed": rehearsed}


def step_really(case: Case, kind: str, rank: int, store: str) -> dict[str, Any]:
    """Peak bytes of this rank over the steps of the training loop, but for the first one."""
    device, layout = open_device(kind, rank), case.layout
    meeting = dist.FileStore(store, layout.world) if layout.world > 1 else None
    world = None
    if not layout.is_single:
        world = form_world(layout, rank, meeting, device=device, secret=b"benchmark")
    job = case.job
    task = open_task(job.task)
    splits = task.load(job)
    model = task.build(job)
    allow_single_samples(model)
    if job.model.adapter is not None:
        model = add_adapter(model, job.model.adapter)
    inputs = TrainingInputs(task=task, model=model, splits=splits)
    engine = Engine(job, case.plan(kind), inputs, lambda *_: None, world=world)
    built = torch.accelerator.max_memory_allocated(device)
    watch = _Peaks(device)
    loop.run(engine, watch)
    if world is not None:  # who leaves early breaks the connections of the others
        torch.accelerator.synchronize(device)
        world.sum_over_all(torch.zeros(1))
    engine.close()
    if world is not None:
        world.close()
    return {"built": built, "first": watch.peaks[0], "peak": max(watch.peaks[1:])}


class _Peaks:
    """Peak memory of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peaks = device, list[int]()
        torch.accelerator.reset_peak_memory_stats(device)

    def before_first_step(self) -> bool:
        return False

    def after_undone_step(self) -> None:
        pass

    def before_step(self) -> Any:
        return ""

    def after_step(self, step: Step) -> bool:
        assert step.is_applied, step.verdict
        self.peaks.append(torch.accelerator.max_memory_allocated(self.device))
        torch.accelerator.reset_peak_memory_stats(self.device)
        return False


def _rehearse(case: Case, kind: str) -> dict[str, Any]:
    return rehearse(case.job, case.plan(kind)).model_dump(mode="json")


def _in_children(works: list[tuple[Path, Callable[[], Any]]]) -> list[Any]:
    """What each gives, in a process of its own; all at the same time."""
    children = {_fork(file, work) for file, work in works}
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            for other in children:  # they would wait for it
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            raise RuntimeError(
                f"a process of the case ended with {os.waitstatus_to_exitcode(status)}"
            )
    return [json.loads(file.read_text()) for file, _ in works]


def _fork(file: Path, work: Callable[[], Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        file.write_text(json.dumps(work()))
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may leave a forked child
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
