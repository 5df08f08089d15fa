"""Self-test: small jobs by the public verbs, which show whether this machine trains as it should.

The device's losses are those of the CPU, every layout gives them too, a killed worker is replaced, and a
resumed run equals the undisturbed one bit for bit. Runs live in a home of their own, which is removed.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from yunlu import __version__
from yunlu.core.errors import YunluError
from yunlu.core.secrets import is_secret_name, mask_value
from yunlu.core.settings import override_variables, read_accelerators, read_settings
from yunlu.core.value import Value
from yunlu.executors.worker_process import count_gpus, require_training
from yunlu.hardware.accelerators import ACCELERATORS, is_shared_variable
from yunlu.jobs.accelerator_facts import AcceleratorFacts, read_accelerator_facts
from yunlu.jobs.run_log import LogCursor, MetricRecord
from yunlu.jobs.selftest_plan import (
    COMPARED_STEPS,
    LONG_STEPS,
    PlannedCheck,
    compare_losses,
    find_gap,
    has_fallen,
    make_selftest_job,
    make_text,
    plan_checks,
    require_known,
    tolerance_of,
)
from yunlu.planning.machine_profile import FOLDER as PROFILES
from yunlu.runs.events import EnvironmentRecorded, PlanMade, PredictionMeasured
from yunlu.runs.states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from yunlu.jobs.run_log import RunUpdate
    from yunlu.jobs.run_record import ListedRun
    from yunlu.jobs.run_view import LogText, RunDetails, RunFailure, StartedRun
    from yunlu.spec.job import Job

_TOTAL_S, _RUN_S = 600.0, 200.0
"""Longest self-test, and longest single run; ``YUNLU_PATIENCE`` multiplies both."""
_LOG_LINES = 60
_VARIABLES = {"OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "YUNLU_ACCELERATORS", "YUNLU_PATIENCE"} | {
    name for kind in ACCELERATORS for name in (*kind.visible, *kind.worker, *kind.deterministic)
}

Outcome = Literal["ok", "failed", "skipped"]


class SelftestFigures(Value):
    """Memory and speed of one run, beside what its plan predicted."""

    memory_bytes: float
    predicted_memory_bytes: float
    step_s: float
    predicted_step_s: float


class SelftestCheck(Value):
    """Result of one check."""

    name: str
    outcome: Outcome
    detail: str
    """What was seen, or why it failed or was skipped."""
    seconds: float = 0.0
    layout: str = "single"
    difference: float | None = None
    """Largest relative difference of a loss from what it is compared with."""
    figures: SelftestFigures | None = None
    log: tuple[str, ...] = ()
    """Of a check that failed: the end of the worker's log."""


class SelftestResult(Value):
    """Everything that a self-test found, to be sent to whoever can help: no secrets."""

    version: Literal[1] = 1
    at: float
    took_s: float
    is_quick: bool
    yunlu: str
    python: str
    platform: str
    packages: dict[str, str]
    kind: str
    """Torch's name of the device that was tested: ``cuda``, ``npu``, ..., or ``cpu``."""
    device: str
    devices: int
    precisions: tuple[str, ...]
    accelerators: AcceleratorFacts
    environment: dict[str, str]
    """Variables that configure accelerators; no others."""
    checks: tuple[SelftestCheck, ...]

    @property
    def has_passed(self) -> bool:
        """Whether no check failed."""
        return all(check.outcome != "failed" for check in self.checks)

    def count(self, outcome: Outcome) -> int:
        """Number of checks with this outcome."""
        return sum(check.outcome == outcome for check in self.checks)


class SelftestProgress(Value):
    """A check begins."""

    check: str
    index: int
    """0 for the first."""
    of: int
    """Checks in all; 0 while the devices are not known yet."""


class SelftestClient(Protocol):
    """The verbs that a self-test uses."""

    def train(self, job: Job, *, detach: bool = False) -> StartedRun:
        """Create a run and start it."""
        ...

    def resume(self, run: str, *, detach: bool = False) -> StartedRun:
        """Continue a run."""
        ...

    def stop(self, run: str, *, now: bool = False) -> ListedRun:
        """Save and stop, or kill."""
        ...

    def show(self, run: str) -> RunDetails:
        """State, workers, lost workers."""
        ...

    def failure(self, run: str) -> RunFailure | None:
        """Why it failed."""
        ...

    def logs(self, run: str, *, lines: int | None = None) -> LogText:
        """The end of its output."""
        ...

    def follow(self, run: str, *, since: LogCursor | None = None) -> Iterator[RunUpdate]:
        """Events and metrics, several times a second."""
        ...


class _FailedError(Exception):
    """A check failed; the text says how."""

    def __init__(self, text: str, log: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.log = tuple(log)


class _SkippedError(Exception):
    """A check cannot be made."""


def run_selftest(
    client: SelftestClient,
    *,
    quick: bool = False,
    devices: int | None = None,
    checks: Sequence[str] = (),
    on_progress: Callable[[SelftestProgress], None] | None = None,
) -> SelftestResult:
    """Make every check that fits this machine; raises only where none can begin."""
    require_training()
    require_known(checks)
    visible = count_gpus()
    if devices is not None and (devices < 1 or (visible and devices > visible)):
        raise YunluError(
            f"{devices} devices were asked for, and {visible or 'none'} can be seen.",
            hint="yunlu doctor shows what hides the others" if visible else "use 1 or more",
        )
    with _own_home() as folder:
        session = _SelftestSession(client, folder, on_progress or (lambda _: None))
        try:
            return session.run(quick=quick, devices=devices, only=checks)
        finally:
            session.stop_running()


@contextmanager
def _own_home() -> Generator[Path]:
    """A home and a cache for these runs alone: small runs are no lesson for later predictions."""
    cache = read_settings().cache
    # A killed worker may still be writing its last file.
    with tempfile.TemporaryDirectory(
        prefix="yunlu-selftest-", ignore_cleanup_errors=True
    ) as directory:
        folder = Path(directory)
        for name in (PROFILES, "precisions"):  # measured once for each machine
            with suppress(OSError):
                shutil.copytree(cache / name, folder / "cache" / name)
        (folder / "text.txt").write_text(make_text(), encoding="utf-8")
        places = {"YUNLU_HOME": str(folder / "runs"), "YUNLU_CACHE": str(folder / "cache")}
        with override_variables(places):
            yield folder


@dataclass(slots=True)
class _Training:
    """What was seen of one run."""

    run: str
    losses: dict[int, float] = field(default_factory=dict[int, float])
    """Of each step, the last that was reported."""
    every: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """All losses of each step: a step that was made twice must give the same."""
    environment: EnvironmentRecorded | None = None
    plan: PlanMade | None = None
    measured: PredictionMeasured | None = None
    cursor: LogCursor = field(default_factory=LogCursor)
    was_disturbed: bool = False

    def take(self, item: Any) -> None:
        """One more event or metric."""
        match item:
            case MetricRecord() if "loss" in item.record:
                step, loss = int(item.record["step"]), float(item.record["loss"])
                self.losses[step] = loss
                self.every.setdefault(step, []).append(loss)
            case EnvironmentRecorded():
                self.environment = item
            case PlanMade():
                self.plan = item
            case PredictionMeasured():
                self.measured = item
            case _:
                pass

    @property
    def figures(self) -> SelftestFigures | None:
        """Predicted beside measured."""
        if self.plan is None or self.measured is None:
            return None
        predicted, measured = self.plan.plan.prediction, self.measured.measured
        return SelftestFigures(
            memory_bytes=measured.memory_bytes,
            predicted_memory_bytes=predicted.memory_bytes,
            step_s=measured.step_s,
            predicted_step_s=predicted.step_s,
        )


@dataclass(slots=True)
class _SelftestSession:
    """One self-test: the runs that others are compared with are trained once."""

    client: SelftestClient
    folder: Path
    on_progress: Callable[[SelftestProgress], None]
    began: float = field(default_factory=time.monotonic)
    running: str | None = None
    kind: str = "cpu"
    references: dict[str, _Training] = field(default_factory=dict[str, _Training])
    wholes: dict[int, _Training] = field(default_factory=dict[int, _Training])

    def run(self, *, quick: bool, devices: int | None, only: Sequence[str]) -> SelftestResult:
        at, text = time.time(), PlannedCheck(name="text", family="single")
        self.on_progress(SelftestProgress(check="text", index=0, of=0))
        began = time.monotonic()
        problem: _FailedError | None = None
        with _caught() as caught:
            self._whole(LONG_STEPS[0])
        problem, first_s = caught.error, time.monotonic() - began
        machine = self.wholes[LONG_STEPS[0]].environment if self.wholes else None
        best = max(machine.devices, key=lambda item: item.kind != "cpu") if machine else None
        self.kind = best.kind if best else "cpu"
        count = devices or _count_devices(self.kind, machine)
        precisions = best.fast_precisions if best else ("fp32",)
        plan = plan_checks(self.kind, devices=count, precisions=precisions, quick=quick, only=only)
        if problem is not None:
            reason = "one worker alone does not train: see text"
            done = [
                SelftestCheck(
                    name="text",
                    outcome="failed",
                    detail=str(problem),
                    seconds=first_s,
                    log=problem.log,
                )
                if check.name == text.name
                else SelftestCheck(name=check.name, outcome="skipped", detail=check.skip or reason)
                for check in plan
            ]
        else:
            done = [
                self._make(check, index, len(plan), first_s if check.name == "text" else 0.0)
                for index, check in enumerate(plan)
            ]
        return _summarise(
            done, at=at, took_s=time.monotonic() - self.began, quick=quick, machine=machine,
            kind=self.kind, device=best.name if best else platform.processor(), devices=count,
            precisions=precisions,
        )  # fmt: skip

    def stop_running(self) -> None:
        """Leave no worker behind, whatever ended the self-test."""
        if self.running is not None:
            with suppress(YunluError):
                self.client.stop(self.running, now=True)

    def _make(self, check: PlannedCheck, index: int, of: int, spent_s: float) -> SelftestCheck:
        result = SelftestCheck(
            name=check.name, outcome="skipped", detail=check.skip, layout=check.layout
        )
        if check.skip:
            return result
        if self._left_s() <= 0:
            over = f"the {_limit(_TOTAL_S) / 60:.0f} minutes were over"
            return result.model_copy(update={"detail": over})
        self.on_progress(SelftestProgress(check=check.name, index=index, of=of))
        began = time.monotonic() - spent_s
        changes: dict[str, Any]
        try:
            changes = {"outcome": "ok", **self._check(check)}
        except _SkippedError as reason:
            changes = {"detail": str(reason)}
        except _FailedError as problem:
            changes = {"outcome": "failed", "detail": str(problem), "log": problem.log}
        except YunluError as error:  # the verb itself refused
            changes = {"outcome": "failed", "detail": str(error)}
        return result.model_copy(update={**changes, "seconds": time.monotonic() - began})

    def _check(self, check: PlannedCheck) -> dict[str, Any]:
        match check.family:
            case "reference":
                return self._check_reference()
            case "single":
                return self._check_single(check)
            case "resume":
                return self._check_disturbed(check, self._stop_and_resume)
            case "kill":
                return self._check_disturbed(check, self._kill_and_recover)
            case "layout" | "precision" | "compile":
                return self._check_like_the_cpu(check)

    def _check_reference(self) -> dict[str, Any]:
        training = self._reference("text")
        return {"detail": f"{COMPARED_STEPS} steps to compare with", "figures": training.figures}

    def _check_single(self, check: PlannedCheck) -> dict[str, Any]:
        if check.task == "text":
            training = self._whole(LONG_STEPS[0])
        elif self.kind == "cpu":
            training = self._reference(check.task)
        else:
            training = self._train(check, steps=COMPARED_STEPS)
        if self.kind != "cpu":
            return self._compare(check, training)
        first, last = training.losses[1], training.losses[max(training.losses)]
        if not has_fallen(training.losses):
            raise _FailedError(f"the loss does not fall: {first:.4g} at first, {last:.4g} at last")
        return {"detail": f"loss {first:.4g} → {last:.4g}", "figures": training.figures}

    def _check_like_the_cpu(self, check: PlannedCheck) -> dict[str, Any]:
        self._reference("text")  # without it, no run would tell anything
        return self._compare(check, self._train(check, steps=COMPARED_STEPS))

    def _compare(self, check: PlannedCheck, training: _Training) -> dict[str, Any]:
        reference = self._reference(check.task)
        difference = compare_losses(training.losses, reference.losses, steps=COMPARED_STEPS)
        allowed = tolerance_of(check.precision)
        base = "the CPU's" if self.kind != "cpu" else "one worker's"
        if not difference.relative <= allowed:
            raise _FailedError(
                f"step {difference.step}: loss {difference.loss:.6g}, {base} {difference.expected:.6g} "
                f"({_percent(difference.relative)} off, {_percent(allowed)} allowed)",
                self._log(training.run),
            )
        off = _percent(difference.relative)
        detail = f"losses within {off} of {base}" if difference.relative else f"losses equal {base}"
        return {"detail": detail, "difference": difference.relative, "figures": training.figures}

    def _check_disturbed(
        self, check: PlannedCheck, disturb: Callable[[PlannedCheck, int], _Training]
    ) -> dict[str, Any]:
        for steps in LONG_STEPS:
            training = disturb(check, steps)
            if training.was_disturbed:
                break
        else:
            raise _SkippedError("every run was over before it could be disturbed")
        whole = self._whole(steps)
        if check.devices > 1:
            return self._judge_recovery(training, whole)
        if (gap := find_gap(training.losses, steps)) is not None:
            raise _FailedError(f"step {gap} is missing or not finite", self._log(training.run))
        if any(set(losses) != {whole.losses[step]} for step, losses in training.every.items()):
            difference = compare_losses(training.losses, whole.losses)
            raise _FailedError(
                f"not bit-equal to the undisturbed run: step {difference.step}, loss {difference.loss!r} "
                f"instead of {difference.expected!r}",
                self._log(training.run),
            )
        return {"detail": f"all {steps} losses bit-equal to the undisturbed run", "difference": 0.0}

    def _judge_recovery(self, training: _Training, whole: _Training) -> dict[str, Any]:
        """Several workers add up in another order, so their losses are close, not equal to the bit."""
        details, log = self.client.show(training.run), self._log(training.run)
        if not details.lost_workers:
            raise _FailedError("the run does not say that it lost a worker", log)
        # The record of the step in which a worker died may be lost with it: no loss tells whether the
        # step was. Those after it do.
        missing = sorted(whole.losses.keys() - training.losses.keys())
        if len(missing) > 1:
            raise _FailedError(f"{len(missing)} steps are missing, step {missing[0]} first", log)
        uneven = [step for step, losses in training.every.items() if not _are_close(losses)]
        if uneven:
            raise _FailedError(f"step {uneven[0]} gave another loss after the recovery", log)
        known = {step: loss for step, loss in whole.losses.items() if step not in missing}
        difference, allowed = compare_losses(training.losses, known), tolerance_of("fp32")
        if not difference.relative <= allowed:
            raise _FailedError(
                f"step {difference.step}: loss {difference.loss:.6g}, undisturbed {difference.expected:.6g} "
                f"({_percent(difference.relative)} off, {_percent(allowed)} allowed)",
                log,
            )
        redone = sum(len(losses) - 1 for losses in training.every.values())
        lost = f", no record of step {missing[0]}" if missing else ""
        text = f"recovered as {details.layout}, {redone} steps redone{lost}; "
        text += f"losses within {_percent(difference.relative)} of the undisturbed run"
        return {"detail": text, "difference": difference.relative}

    def _stop_and_resume(self, check: PlannedCheck, steps: int) -> _Training:
        self._whole(steps)
        training = self._start(check, steps)
        self._watch(training, steps, lambda: self.client.stop(training.run))
        return self._go_on(training, steps, {RunState.STOPPED})

    def _kill_and_recover(self, check: PlannedCheck, steps: int) -> _Training:
        self._whole(steps)
        training = self._start(check, steps)
        self._watch(training, steps, lambda: self._kill(training.run))
        return self._go_on(training, steps, {RunState.LOST})

    def _kill(self, run: str) -> None:
        """SIGKILL: the process can neither save nor say goodbye."""
        details = self.client.show(run)
        group = details.worker_group
        pid = group.ranks[-1].pid if group is not None else details.pid
        if pid is None:
            raise _FailedError("the run does not say which processes work for it")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _go_on(self, training: _Training, steps: int, ended: set[RunState]) -> _Training:
        """Resume where no worker is left; a group recovers by itself."""
        state = self.client.show(training.run).state
        if training.was_disturbed and state in ended:
            started = self.client.resume(training.run, detach=True)
            self.running, training.cursor = started.id, started.cursor
            self._watch(training, steps)
            state = self.client.show(training.run).state
        self._require_finished(training, state)
        return training

    def _whole(self, steps: int) -> _Training:
        """The undisturbed run of one device."""
        if steps not in self.wholes:
            check = PlannedCheck(name="text", family="single")
            self.wholes[steps] = self._train(check, steps=steps)
        return self.wholes[steps]

    def _reference(self, task: Any) -> _Training:
        """The run that losses are compared with: one worker on the CPU."""
        if task not in self.references:
            if self.kind == "cpu" and task == "text":
                self.references[task] = self._whole(LONG_STEPS[0])
            else:
                check = PlannedCheck(name=f"cpu-{task}", family="reference", task=task)
                with override_variables({"YUNLU_ACCELERATORS": "cpu"}):
                    self.references[task] = self._train(check, steps=COMPARED_STEPS)
        return self.references[task]

    def _train(self, check: PlannedCheck, *, steps: int) -> _Training:
        training = self._start(check, steps)
        self._watch(training, steps)
        state = self.client.show(training.run).state
        self._require_finished(training, state, can_refuse=check.family in {"precision", "compile"})
        return training

    def _start(self, check: PlannedCheck, steps: int) -> _Training:
        started = self.client.train(make_selftest_job(check, self.folder, steps=steps), detach=True)
        self.running = started.id
        return _Training(run=started.id, cursor=started.cursor)

    def _watch(
        self, training: _Training, steps: int, disturb: Callable[[], object] | None = None
    ) -> None:
        """Follow a run to its end; disturb it once, in the middle."""
        until = time.monotonic() + max(min(_limit(_RUN_S), self._left_s()), 1.0)
        for update in self.client.follow(training.run, since=training.cursor):
            for item in update.items:
                training.take(item)
            training.cursor = update.cursor
            done = max(training.losses, default=0)
            if disturb is not None and done >= COMPARED_STEPS and not training.was_disturbed:
                if done >= steps:
                    disturb = None
                    continue
                disturb()
                training.was_disturbed = True
            if time.monotonic() > until:
                self._give_up(training)
        self.running = None

    def _give_up(self, training: _Training) -> None:
        log = self._log(training.run)
        self.stop_running()
        self.running = None
        done = max(training.losses, default=0)
        if self._left_s() <= 0:
            raise _SkippedError(f"the time was over at step {done}")
        raise _FailedError(f"no end after {_limit(_RUN_S):.0f} s, at step {done}", log)

    def _require_finished(
        self, training: _Training, state: RunState, *, can_refuse: bool = False
    ) -> None:
        if state is RunState.FINISHED:
            return
        failure = self.client.failure(training.run)
        text = failure.message if failure is not None else f"the run is {state}"
        if can_refuse and failure is not None and _is_refusal(failure):
            raise _SkippedError(text)
        raise _FailedError(text, self._log(training.run))

    def _log(self, run: str) -> tuple[str, ...]:
        with suppress(YunluError):
            return self.client.logs(run, lines=_LOG_LINES).lines
        return ()

    def _left_s(self) -> float:
        return self.began + _limit(_TOTAL_S) - time.monotonic()


@dataclass(slots=True)
class _Caught:
    error: _FailedError | None = None


@contextmanager
def _caught() -> Generator[_Caught]:
    """Keep what went wrong with the first run: the table still shows every check."""
    caught = _Caught()
    try:
        yield caught
    except _FailedError as error:
        caught.error = error
    except (YunluError, _SkippedError) as error:
        caught.error = _FailedError(str(error))


def _is_refusal(failure: RunFailure) -> bool:
    """Whether the job asks for what the device or an installed package cannot do."""
    return failure.code == "job" or (failure.hint or "").startswith("Set train.")


def _limit(seconds: float) -> float:
    return seconds * max(read_settings().patience, 1.0)


def _are_close(losses: list[float]) -> bool:
    return max(losses) - min(losses) <= tolerance_of("fp32") * max(map(abs, losses))


def _percent(share: float) -> str:
    return "infinitely" if share == float("inf") else f"{100 * share:.2g} %"


def _count_devices(kind: str, machine: EnvironmentRecorded | None) -> int:
    """All accelerators that can be seen; on the CPU two workers, which is where groups begin."""
    if kind == "cpu":
        return 2
    if kind == "mps":
        return 1
    seen = sum(device.kind == kind for device in machine.devices) if machine else 0
    return count_gpus() or max(seen, 1)


def _summarise(
    checks: Sequence[SelftestCheck],
    *,
    at: float,
    took_s: float,
    quick: bool,
    machine: EnvironmentRecorded | None,
    kind: str,
    device: str,
    devices: int,
    precisions: Sequence[str],
) -> SelftestResult:
    declared, environment = read_accelerators()
    packages = dict(machine.packages) if machine else {}
    facts = read_accelerator_facts(
        environment,
        declared=declared,
        torch=packages.get("torch"),
        seen=[kind] * devices if kind != "cpu" else (),
    )
    result = SelftestResult(
        at=at,
        took_s=took_s,
        is_quick=quick,
        yunlu=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages,
        kind=kind,
        device=device,
        devices=devices,
        precisions=tuple(precisions),
        accelerators=facts,
        environment=_allowed(environment),
        checks=tuple(checks),
    )
    return SelftestResult.model_validate(_without_home(mask_value(result.model_dump(mode="json"))))


def _allowed(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in _VARIABLES or is_shared_variable(name)) and not is_secret_name(name)
    }


def _without_home(value: Any) -> Any:
    """The user's name stands in the paths of logs."""
    home = str(Path.home())
    if isinstance(value, str):
        return value.replace(home, "~") if len(home) > 1 else value
    if isinstance(value, dict):
        return {key: _without_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_home(item) for item in value]
    return value
