"""Starts a run from another run's checkpoint, with another setting."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from yunlu.planning.large_batch import scale_rate
from yunlu.runs.documents import read_job, read_plan, write_plan
from yunlu.runs.run_store import Area, require_local
from yunlu.tuning.study_runner.shared_prefix import find_length
from yunlu.tuning.study_runner.trial_events import read_trial_events

if TYPE_CHECKING:
    from yunlu.planning.plan import Plan
    from yunlu.runs.run_store import RunStore
    from yunlu.tuning.study_runner.trial_events import TrialEvents

_REPLAN_FIELDS = (
    "batch",
    "micro_batch",
    "padding",
    "precision",
    "compile",
    "recompute",
    "memory_gb",
)
"""Fields of ``train`` whose change requires a new plan."""


def clone(parent: RunStore, child: RunStore, rung: int) -> bool:
    """Copy the checkpoint of a rung into a run that was not started yet.

    False where the checkpoint is gone; the run then starts from scratch.
    """
    events = read_trial_events(parent)
    step = events.step_of(rung)
    where = events.checkpoints.get(-1 if step is None else step, "")
    source = Path(parent.location(where))
    if not where or "://" in where or not source.is_dir():
        return False
    if not _link_tree(source, require_local(child).directory(Area.CHECKPOINTS) / source.name):
        return False
    plan = _adapt_plan(parent, child, events)
    if plan is not None:
        write_plan(child, plan)
    return True


def _link_tree(source: Path, target: Path) -> bool:
    """Hard links to the same files; the parent may delete its checkpoints meanwhile."""
    aside = target.with_name(f".part-{target.name}-clone")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(source, aside, copy_function=_link_or_copy)
    except (OSError, shutil.Error):
        shutil.rmtree(aside, ignore_errors=True)
        return False
    if target.exists():  # made by a runner that was killed just then
        shutil.rmtree(aside)
    else:
        aside.rename(target)
    return True


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _adapt_plan(parent: RunStore, child: RunStore, events: TrialEvents) -> Plan | None:
    """The parent's plan adapted to the child's job; None where the worker should plan anew.

    Measurements are kept: the child then computes each step exactly as the parent would.
    """
    plan = read_plan(parent)
    if plan is None:
        return None
    before, after = (read_job(run) for run in (parent, child))
    old, new = before.train, after.train
    is_other = any(getattr(old, name) != getattr(new, name) for name in _REPLAN_FIELDS)
    if is_other or before.model != after.model or before.data != after.data:
        return None
    length = find_length(after, samples=events.train_samples, batch=plan.batch)
    updates: dict[str, float] = {
        "steps": length.steps,
        "warmup_steps": length.warmup_steps,
        "epochs": length.steps / plan.steps_per_epoch,
    }
    is_same_length = (old.epochs, old.steps) == (new.epochs, new.steps)
    if is_same_length:
        updates["epochs"] = plan.epochs
    rules, others = old.optimizer, new.optimizer
    if rules != others:
        if "auto" in {others.lr, others.weight_decay} - {rules.lr, rules.weight_decay}:
            return None
        if others.lr != "auto":
            updates["lr"] = scale_rate(
                others.lr, batch=plan.batch, base_batch=others.base_batch, rule=others.scaling
            )
        if others.weight_decay != "auto":
            updates["weight_decay"] = others.weight_decay
    fields = {"steps": "steps", "warm-up": "warmup_steps", "learning rate": "lr"}
    choices = tuple(
        choice.model_copy(update={"value": f"{updates[fields[choice.name]]:g}"})
        if fields.get(choice.name) in updates
        else choice
        for choice in plan.choices
    )
    return plan.model_copy(update=updates | {"choices": choices})
