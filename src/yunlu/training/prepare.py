"""Preparation of a run: load the data, build the model, load or make the plan."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch

from yunlu.core.errors import DataError
from yunlu.core.limits import decode_json
from yunlu.core.processes import piped_process
from yunlu.planning.analytic_estimate import contention, make_estimate, measured_with, name_work
from yunlu.planning.layouts import count_devices
from yunlu.planning.machine_profile import MachineProfile
from yunlu.planning.plan import refine
from yunlu.planning.planner import make_plan
from yunlu.runs.events import DataOpened, ModelBuilt, PlanMade, ProgressReported
from yunlu.runs.run_store import Document, read_submitted_plan, require_plan, write_plan
from yunlu.training.autotune.budget import SPEEDS_S, MeasuredFigures, MeasuringBudget
from yunlu.training.compiler import xla_device
from yunlu.training.data.sources import dataset_commit, is_hub_dataset
from yunlu.training.determinism import seed_everything
from yunlu.training.device import CPU, accelerator_kind
from yunlu.training.hooks.callback import import_callbacks
from yunlu.training.models.hf import find_hf_directory, hub_commit, names_hf, split_revision
from yunlu.training.models.initial_weights import load_initial_weights
from yunlu.training.models.networks import allow_single_samples
from yunlu.training.precision import check_precision
from yunlu.training.probe import load_speeds, measured_speeds
from yunlu.training.probing.profile_store import (
    background_load,
    load_calibration,
    load_profile,
    save_profile,
)
from yunlu.training.profile import measure
from yunlu.training.quantize import convert_to_fp8, prepare_int8
from yunlu.training.tasks.own_metrics import open_metrics
from yunlu.training.tasks.task import SPECIAL_KEYS, DeclaresKeys, TrainingInputs, open_task

if TYPE_CHECKING:
    from torch import nn

    from yunlu.hardware.fleet import Machine
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job
    from yunlu.training.models.initial_weights import WeightsOrigin
    from yunlu.training.tasks.task import Splits, Task


def prepare(directory: RunStore, job: Job, task: Task | None = None) -> TrainingInputs:
    """Load the data and build the model, with events for both."""
    directory.emit(ProgressReported(phase="loading data"))
    import_callbacks(job.callbacks)
    metrics = open_metrics(job.metrics)
    task = task or open_task(job.task)
    _warn_of_unused_keys(directory, job, task)
    seed_everything(job.train.seed)
    splits = task.load(job)
    if splits.validation is None:
        _refuse_keys_that_need_validation(job)
    _warn_of_single_labels(directory, job, splits)
    directory.emit(
        DataOpened(
            fingerprint=splits.fingerprint,
            source=job.data.train,
            revision=_data_revision(directory, job),
            about=splits.about,
            train=len(splits.train),
            validation=len(splits.validation) if splits.validation is not None else 0,
            test=len(splits.test) if splits.test is not None else 0,
        )
    )
    directory.emit(ProgressReported(phase="building the model"))
    model, origin = build_model(job, task)
    if origin is not None:
        directory.emit(ProgressReported(phase=str(origin)))
    if job.train.quantize == "int8":
        model = prepare_int8(model)
    if job.train.precision == "fp8":
        _convert_to_fp8(directory, model)
    weights = list(model.parameters())
    directory.emit(
        ModelBuilt(
            name=job.model.name,
            revision=_model_revision(directory, job),
            parameters=sum(weight.numel() for weight in weights),
            trainable=sum(weight.numel() for weight in weights if weight.requires_grad),
        )
    )
    return TrainingInputs(task=task, model=model, splits=splits, metrics=metrics)


def _data_revision(directory: RunStore, job: Job) -> str | None:
    if not is_hub_dataset(job.data.train):
        return None
    repository = job.data.train.removeprefix("hf:").partition(":")[0]
    commit = dataset_commit(*split_revision(repository))
    _advise_commit(directory, f"hf:{repository}", commit)
    return commit


def _model_revision(directory: RunStore, job: Job) -> str | None:
    commit = hub_commit(find_hf_directory(job.model.name)) if names_hf(job.model.name) else None
    _advise_commit(directory, job.model.name, commit)
    return commit


def _advise_commit(directory: RunStore, name: str, commit: str | None) -> None:
    """A branch can be moved, by its owner or a thief of his token: what is trained on then changes."""
    repository, revision = split_revision(name)
    if commit is not None and revision != commit:
        directory.warn(
            f"{name} is not a fixed version: it stood for commit {commit}. "
            f"Write {repository}@{commit} to use the same files again."
        )


def build_model(job: Job, task: Task) -> tuple[nn.Module, WeightsOrigin | None]:
    """The model with its initial weights, and their origin unless random."""
    # Seeded again: the weights must not depend on random numbers drawn while loading.
    seed_everything(job.train.seed)
    model = task.build(job)
    allow_single_samples(model)
    return model, load_initial_weights(model, job, task)


def load_or_make_plan(
    directory: RunStore, job: Job, inputs: TrainingInputs, machine: Machine, *, started_at: float
) -> Plan:
    """Load the plan of an earlier attempt, or make one: a resumed run keeps its plan.

    A plan that was submitted with the run is refined: what measurements changed in it is part of the plan.
    """
    if directory.has(Document.PLAN):
        plan = require_plan(directory)
    else:
        directory.emit(ProgressReported(phase="measuring and planning"))
        budget = MeasuringBudget(job.train.trial_share)
        load = background_load(machine)
        _check_precision(directory, job, machine, budget)
        if job.train.compile == "xla":
            xla_device()  # fails here, before anything is measured
        measured_figures = _measured_figures(job, inputs, machine)
        profile, work = measure(
            job,
            inputs,
            machine,
            started_at=started_at,
            budget=budget,
            measured_figures=measured_figures,
        )
        # After the first pass, which tells how long the run is; part of its start-up all the same.
        probed = load_or_measure(machine, budget)
        profile = profile.model_copy(
            update={"startup_s": time.time() - started_at, "measuring": budget.summary()}
        )
        guess = None
        if work is not None and probed is not None:
            guess = make_estimate(
                profile, work, probed, load_calibration(), name=name_work(job),
                busy=contention(load, cores=machine.cores, threads=profile.settings.threads),
                workers=count_devices(job, gpus=machine.gpus),
            )  # fmt: skip
        if probed is not None:
            profile = measured_with(profile, work, probed)
        plan = make_plan(job, machine, profile, guess)
        if (submitted := read_submitted_plan(directory)) is not None:
            plan = refine(submitted, plan)
        write_plan(directory, plan)
        measured_figures.forget()
        for text in plan.warnings:
            directory.warn(text)
    directory.emit(PlanMade(plan=plan))
    return plan


def _convert_to_fp8(directory: RunStore, model: nn.Module) -> None:
    """Convert layers of suitable shape to FP8, on the host.

    Workers are forked from the process that prepares, and no driver survives a fork: the device itself is
    asked by whoever plans and trains on it.
    """
    if accelerator_kind() is None:
        check_precision("fp8", CPU)
    if not convert_to_fp8(model, None):
        directory.warn("train.precision is fp8, but no layer of this model has a suitable shape.")


def _check_precision(
    directory: RunStore, job: Job, machine: Machine, budget: MeasuringBudget
) -> None:
    """Refuse an unsupported precision, and warn of a slow one."""
    name, device = job.train.precision, machine.best_device
    if name in {"auto", "fp32"}:
        return
    check_precision(name, torch.device(device.kind))
    way_out = "Leave train.precision out: auto takes what is fast here; or set fp32"
    speeds = load_speeds(device)
    if speeds is None and budget.allows(SPEEDS_S, "the speed of precisions"):
        speeds = measured_speeds(device)
    if speeds is None and device.kind == "cpu" and name not in device.fast_precisions:
        directory.warn(
            f"train.precision is {name}, which this processor has no instructions for: it may take many "
            f"times as long as fp32. {way_out}."
        )
    for speed in speeds or ():
        if speed.precision == name and speed.relative_speed < 1:
            directory.warn(
                f"train.precision is {name}, which this device computes {1 / speed.relative_speed:.3g} "
                f"times slower than fp32; auto would not choose it. {way_out}."
            )


def _warn_of_single_labels(directory: RunStore, job: Job, splits: Splits) -> None:
    """Where every label occurs once, nothing holds for other data: often a number, or an id."""
    labels = splits.about.get("labels")
    if not isinstance(labels, list) or len(labels) < len(splits.train):
        return
    target = splits.about.get("target") or job.data.target
    count = f"{len(labels)} labels"
    if target:
        count = f"{len(labels)} labels in the column {target!r}"
    directory.warn(
        f"There are {count} for {len(splits.train)} training samples: hardly one "
        "occurs twice, so nothing can be learnt that holds for other data. Is data.target the right "
        "column? Numbers are predicted by task: tabular-regression."
    )


def _refuse_keys_that_need_validation(job: Job) -> None:
    needing = {
        "train.early_stopping": job.train.early_stopping is not None,
        "train.schedule: plateau": job.train.schedule.name == "plateau",
    }
    for key, is_set in needing.items():
        if is_set:
            raise DataError(
                f"{key} needs validation data, and this job has none.",
                hint="name data.validation, hold out a share (data.split.validation), or remove it",
            )


def _warn_of_unused_keys(directory: RunStore, job: Job, task: Task) -> None:
    """Warn of keys that this task does not read."""
    if not isinstance(task, DeclaresKeys):  # a user's own task may read anything
        return
    for key in SPECIAL_KEYS:
        section, name = key.split(".")
        fields = type(getattr(job, section)).model_fields
        is_set = getattr(getattr(job, section), name) != fields[name].default
        if is_set and key not in task.special_keys:
            directory.warn(f"{key} is set, but the task {job.task} does not use it.")


_BENCHMARKS = (sys.executable, "-m", "yunlu.training.probing.measure", "--quick")


_QUICK_S = 4.0
"""What the quick benchmarks take, with the start of a process."""
_MACHINE = "this machine's operators (yunlu probe measures them once)"


def load_or_measure(machine: Machine, budget: MeasuringBudget) -> MachineProfile | None:
    """The stored profile; else a quick measurement, which is then stored; None if it takes too long."""
    profile = load_profile(machine)
    if profile is None and budget.allows(_QUICK_S, _MACHINE):
        profile = _measure_in_subprocess(limit_s=budget.left_s)
        if profile is None:
            budget.leave_out(_MACHINE)
        else:
            save_profile(profile)
    return profile


def _measure_in_subprocess(*, limit_s: float) -> MachineProfile | None:
    """Measure in a subprocess: benchmark arrays would count in the run's peak memory."""
    command = [*_BENCHMARKS, "--threads", str(torch.get_num_threads())]
    with piped_process(command, errors=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        timer = threading.Timer(limit_s, child.kill)
        timer.daemon = True
        timer.start()
        try:
            for line in child.stdout:
                if line.startswith(b'{"probed"'):
                    return MachineProfile.model_validate(decode_json(line)["probed"])
        finally:
            timer.cancel()
    return None


def _measured_figures(job: Job, inputs: TrainingInputs, machine: Machine) -> MeasuredFigures:
    parameters = sum(weight.numel() for weight in inputs.model.parameters())
    return MeasuredFigures(
        *(machine.hostname, machine.best_device.name, torch.__version__, torch.get_num_threads()),
        *(job.model_dump(mode="json"), inputs.splits.fingerprint, parameters),
    )
