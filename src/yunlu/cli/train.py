"""``yunlu train``: from a job file to a trained, evaluated, reported model."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from yunlu.cli.watching import run_title, watch_started
from yunlu.client.connect import default_client


def train(
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    plan: Annotated[str | None, Parameter(show_default=False)] = None,
    devices: Annotated[int | None, Parameter(show_default=False)] = None,
    detach: bool = False,
    json: bool = False,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
    profile: bool = False,
) -> int:
    """Train a job: plan it, show its progress, report on it.

    Ctrl-C saves a checkpoint and stops; `yunlu resume` continues from there.

    Args:
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set train.epochs=3; may be repeated.
        plan: Train so as `yunlu plan JOB --json > FILE` planned it: FILE, or FILE:2 for its second option.
        devices: Number of workers, one for each device.
        detach: Return at once; the run continues. `yunlu logs -f last` watches it.
        json: Write every event and metric record as one JSON line, and nothing else.
        name: Name of the run.
        profile: Trace a few steps: a table of where their time goes, and a file for Perfetto.
    """
    from yunlu.spec.load import load_job, source_of  # noqa: PLC0415 (slow to import)

    options = [f"name={name}"] if name else []
    options += ["train.profile=true"] if profile else []
    options += [f"devices={devices}"] if devices is not None else []
    loaded = load_job(job, overrides=(*overrides, *options))
    client = default_client()
    chosen = None if plan is None else client.load_plan(plan)
    started = client.train(loaded, source=source_of(job), plan=chosen, detach=detach)
    title = run_title(started.id, started.task)
    return watch_started(client, started, title=title, json=json, detach=detach)
