"""Stored machine profile and calibration of this machine.

Both lie in the settings' cache rather than among the runs: they belong to the machine, and a home is a
directory of one project.
"""

from __future__ import annotations

import fcntl
import hashlib
import heapq
import os
import platform
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from yunlu.core.errors import StoreError, YunluError
from yunlu.core.files import make_directory, open_lock, write_atomically
from yunlu.core.limits import decode_json
from yunlu.core.processes import piped_process
from yunlu.core.settings import read_settings, worker_environment
from yunlu.core.value import Value
from yunlu.executors.worker_process import require_training
from yunlu.hardware.catalog import HERE, KINDS, DeviceModel, Offer
from yunlu.planning import calibration as learnt
from yunlu.planning.calibration import Calibration, RunMeasurement
from yunlu.planning.machine_profile import (
    FOLDER,
    MachineProfile,
    choose_profile,
    file_names,
    is_same_version,
    parse_profiles,
    read_processor,
)
from yunlu.runs.events import AttemptStarted, MemoryExhausted
from yunlu.runs.fold import read_view
from yunlu.runs.home import find_runs
from yunlu.runs.run_store import Document, Log
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from yunlu.planning.plan import Measurement, Plan
    from yunlu.runs.run_store import RunStore

_STARTS = 9
"""Number of recent runs whose start-up times predict the next one."""


def stored_probe() -> MachineProfile | None:
    """Stored profile of this machine for the installed torch; None before any probe.

    Of several, those come first that know the threads a run would take.
    """
    probes: list[MachineProfile] = []
    for path in _probe_files():
        with suppress(OSError):
            probes += parse_profiles(path.read_bytes())
    with suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
        probes = [probe for probe in probes if is_same_version(probe.torch, torch)]
    return choose_profile([probe for probe in probes if knows_threads(probe)] or probes)


def knows_threads(probed: MachineProfile) -> bool:
    """Whether it was measured with the number of threads that torch uses here."""
    requested = worker_environment().get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if requested.isdecimal() and int(requested) > 0:
        return probed.knows(int(requested))
    # Only torch knows whether it uses hyper-threads; here only the physical cores are counted.
    return probed.kind != "cpu" or probed.threads in _usual_threads()


def _usual_threads() -> set[int]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    counts = {allowed, psutil.cpu_count(), psutil.cpu_count(logical=False)}
    return {count for count in counts if count}


def _probe_files() -> list[Path]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    processor = read_processor(text) or platform.processor() or platform.machine()
    folder = read_settings().cache / FOLDER
    return [folder / name for name in file_names(processor, socket.gethostname())]


def this_machine() -> tuple[DeviceModel, Offer] | None:
    """This machine as the catalog would list it, from the stored probe; None before any."""
    probed = stored_probe()
    return None if probed is None else (device_of(probed), offer_of(probed))


def device_of(probed: MachineProfile) -> DeviceModel:
    """The probed device; its rate in large matrix products is its peak."""
    rates = {
        precision: rate
        for precision in ("fp32", "tf32", "bf16", "fp16")
        if (rate := probed.products_per_s(precision)) is not None
    }
    link = probed.link.all_reduce.bytes_per_s if probed.link else probed.memory_bytes_per_s / 8
    given = f"measured by yunlu probe on {probed.host} with torch {probed.torch}"
    fields = ("memory_bytes", "memory_bytes_per_s", "peak_flops", "link_bytes_per_s", "reachable")
    return DeviceModel(
        name=probed.name,
        kind=probed.kind if probed.kind in KINDS else "other",
        memory_bytes=probed.memory_bytes,
        memory_bytes_per_s=probed.memory_bytes_per_s,
        peak_flops=rates,
        link_bytes_per_s=link,
        node_devices=probed.devices,
        fabric_devices=probed.devices,
        # No link to other nodes was measured; no link of this machine is a bound.
        network_bytes_per_s=link,
        reachable=1.0,
        aliases=(HERE,),
        sources=dict.fromkeys(fields, given),
    )


def offer_of(probed: MachineProfile) -> Offer:
    """Free, unless the settings name a price."""
    return Offer(
        cloud=HERE,
        instance=probed.host,
        device=probed.name,
        devices=probed.devices,
        cpus=float(probed.cores),
        memory_bytes=probed.memory_bytes if probed.kind == "cpu" else None,
        regions=(HERE,),
        dollars_per_hour=read_settings().dollars_per_hour or 0.0,
        source="yunlu probe",
        terms="this machine; YUNLU_DOLLARS_PER_HOUR sets what it costs",
    )


def usual_start_s() -> float | None:
    """Start-up time to the first step: of the newest runs here, else of the probe."""
    starts_s: list[float] = []
    with suppress(OSError):  # a run may be deleted meanwhile
        runs = find_runs(read_settings().home, having=Log.METRICS)
        newest = heapq.nlargest(_STARTS, runs, key=_last_written_at)
        starts_s = [start_s for run in newest if (start_s := _start_s(run))]
    if starts_s:
        return median(starts_s)
    probed = stored_probe()
    return None if probed is None or probed.start is None else probed.start.worker_s


def _last_written_at(run: RunStore) -> float:
    stat = run.stat(Log.METRICS)
    return stat.modified_at if stat else 0.0


def _start_s(run: RunStore) -> float | None:
    """None for a run without a step, or trained in an existing process."""
    with suppress(StopIteration, ValueError, LookupError, TypeError):  # truncated
        events = (event for event, _ in run.read_events())
        attempt = next(event for event in events if isinstance(event, AttemptStarted))
        step, _ = next(run.read_metrics())
        if attempt.own_process:
            return max(step["at"] - attempt.began_at, 0.0)
    return None


def read_calibration(*, refresh: bool = False) -> Calibration:
    """Stored calibration; ``refresh`` adds runs that ended without a report."""
    if refresh:
        with suppress(StoreError):  # stored figures can be shown even where nothing can be written
            learn_from(_finished_runs())
    try:
        calibration = learnt.parse_calibration(_file().read_bytes())
    except OSError:
        return Calibration()
    return Calibration(figures=tuple(map(_without_place, calibration.figures)))


def _without_place(figure: RunMeasurement) -> RunMeasurement:
    """Key without the directory of the run, which an earlier version stored."""
    path = Path(figure.run)
    return figure.model_copy(update={"run": name_run(path)}) if path.is_absolute() else figure


def learn_from(runs: Iterable[RunStore]) -> int:
    """Add the measurements of these runs; returns how many were new. A run counts once."""
    known = {one_figure.run for one_figure in read_calibration().figures}
    fresh = [run for run in runs if name_run(Path(run.address)) not in known]
    figures = [figure for run in fresh for figure in figures_of(run)]
    if not figures:
        return 0
    with _alone():
        _write(learnt.learn(read_calibration(), figures))
    return len({one_figure.run for one_figure in figures})


def forget_deleted() -> int:
    """Drop measurements of deleted runs of this home; returns how many."""
    home = read_settings().home
    there = {name_run(Path(run.address)) for run in find_runs(home, having=Document.JOB)}

    def find_gone() -> set[str]:
        ours = {
            figure.run
            for figure in read_calibration().figures
            if figure.run.startswith(_hash(home))
        }
        return ours - there

    if not find_gone():
        return 0
    with _alone():
        gone = find_gone()
        _write(learnt.forget(read_calibration(), gone))
    return len(gone)


def forget_all() -> int:
    """Drop all measurements and probes; returns the number of runs."""
    taught = {figure.run for figure in read_calibration().figures}
    folder = read_settings().cache / FOLDER
    try:
        for path in (_file(), *(folder.glob("*.json") if folder.is_dir() else ())):
            path.unlink(missing_ok=True)
    except NotADirectoryError:
        return 0  # no cache, so nothing in it
    except OSError as error:
        raise StoreError(f"{error.filename} cannot be deleted: {error.strerror}.") from error
    return len(taught)


def name_run(path: Path) -> str:
    """Identifies a run and its home by a hash; a shared cache names no directory."""
    return f"{_hash(path.parent)}-{_hash(path)}"


def _hash(path: Path) -> str:
    return hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()


def figures_of(run: RunStore) -> list[RunMeasurement]:
    """Measurements of a finished run; empty where it did not finish, or nothing was predicted."""
    plan, measured, ended_at = _read(run)
    if plan is None or plan.estimate is None or measured is None or not plan.layout.is_single:
        return []
    estimate = plan.estimate
    if estimate.version != learnt.VERSION:
        return []
    return [
        RunMeasurement(
            run=name_run(Path(run.address)),
            at=ended_at,
            quantity=quantity,
            device=estimate.device,
            stack=estimate.stack,
            precision=plan.precision,
            work=estimate.work,
            predicted=estimate.raw[quantity],
            measured=getattr(measured, quantity),
            busy=estimate.busy if quantity == "step_s" else 1.0,
        )
        for quantity in learnt.SPREADS
        if estimate.raw.get(quantity) and getattr(measured, quantity)
    ]


def _read(run: RunStore) -> tuple[Plan | None, Measurement | None, float]:
    view = read_view(run)
    if any(isinstance(incident, MemoryExhausted) for incident in view.incidents):
        return None, None, 0.0  # its steps differ from the predicted ones
    is_finished = view.state is RunState.FINISHED
    return view.plan, view.measured if is_finished else None, view.status.updated_at


def _finished_runs() -> list[RunStore]:
    return [*find_runs(read_settings().home, having=Document.PLAN)]


def _file() -> Path:
    return read_settings().cache / learnt.FILE


def _write(calibration: Calibration) -> None:
    try:
        write_atomically(_file(), calibration.model_dump_json(indent=1))
    except OSError as error:
        raise StoreError(f"{_file()} cannot be written: {error.strerror or error}.") from error


@contextmanager
def _alone() -> Generator[None]:
    """Lock: two runs that end at the same time must not overwrite each other."""
    path = _file()
    try:
        make_directory(path.parent)
        file = open_lock(path.with_suffix(".lock"))
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}.") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_PROGRAM = (sys.executable, "-m", "yunlu.training.probing.measure")


class ProbeError(YunluError):
    """The machine could not be measured."""

    code = "probe"


class ProbeProgress(Value):
    """Which part of a probe is being measured."""

    part: str
    index: int
    of: int
    """Number of parts; 0 where not known yet."""


class LearntFactor(Value):
    """Step times of runs on this machine over the prediction from the probe alone."""

    runs: int
    factor: float
    sd_of_log: float
    """Standard deviation of the logarithm of the factor."""


class ProbeResult(Value):
    """Figures of this machine."""

    probed: MachineProfile
    calibration: LearntFactor


class ForgottenRuns(Value):
    """Runs whose measurements were dropped from the calibration."""

    forgotten: int


def probe_machine(
    *,
    show: bool = False,
    afresh: bool = False,
    on_progress: Callable[[ProbeProgress], None] | None = None,
) -> ProbeResult:
    """Figures of this machine; measured where none are stored, or where asked ``afresh``."""
    probed = stored_probe()
    if show and probed is None:
        raise ProbeError("this machine was never probed", hint="yunlu probe")
    is_known = probed is not None and not probed.is_quick and knows_threads(probed)
    if not show and (afresh or not is_known):
        require_training()
        probed = measure(on_progress)
    assert probed is not None
    belief = read_calibration(refresh=True).belief(probed.name)
    learnt = LearntFactor(runs=belief.runs, factor=belief.factor, sd_of_log=belief.sd)
    return ProbeResult(probed=probed, calibration=learnt)


def forget_runs(*, all_: bool = False) -> ForgottenRuns:
    """Drop what deleted runs have taught, or every run and every probe."""
    count = forget_all() if all_ else forget_deleted()
    return ForgottenRuns(forgotten=count)


def measure(on_progress: Callable[[ProbeProgress], None] | None = None) -> MachineProfile:
    """Run the measuring process to its end."""
    if on_progress is not None:
        on_progress(ProbeProgress(part="starting", index=0, of=0))
    for message in _read_messages():
        if "probed" in message:
            return MachineProfile.model_validate(message["probed"])
        if on_progress is not None:
            on_progress(ProbeProgress.model_validate(message))
    raise AssertionError("unreachable")


def _read_messages() -> Iterator[dict[str, Any]]:
    """Messages of the measuring process; torch is imported there, not here."""
    with piped_process(_PROGRAM, errors=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith(b"{"):
                yield decode_json(line)
        output = process.stderr.read().decode(errors="replace").strip().splitlines()
        raise ProbeError(
            f"the machine could not be measured: {output[-1] if output else 'no message'}",
            hint="yunlu doctor shows what is missing",
        )
