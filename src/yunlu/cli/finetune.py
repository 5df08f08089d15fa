"""``yunlu finetune``: from a trained model and a job file to a model trained further."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from yunlu.cli.train import leave, watch, watch_launched
from yunlu.client.api import finetuning_job, source_of
from yunlu.jobs import service
from yunlu.jobs.launch import find_launch
from yunlu.render.terminal.page import ACCENT, make_console

if TYPE_CHECKING:
    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job


def finetune(
    start: str,
    job: str,
    /,
    *,
    overrides: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    devices: Annotated[int | None, Parameter(show_default=False)] = None,
    detach: bool = False,
    json: bool = False,
    name: Annotated[str | None, Parameter(show_default=False)] = None,
) -> int:
    """Go on from a trained model with other data: every weight, or a LoRA adapter.

    The model, its tokenizer and labels come from the start, so the job needs only task and data.
    --set model.adapter=lora trains an adapter; the exported model has it merged.

    Args:
        start: A run (its id, a unique beginning of it, or: last), a model directory, or hf:NAME.
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set model.adapter=lora; may be repeated.
        devices: Workers that share the training, one for each device.
        detach: Return at once; the run goes on. `yunlu logs -f last` watches it.
        json: Write every event and metric record as one JSON line, and nothing else.
        name: Name the run.
    """
    said = [f"name={name}"] if name else []
    said += [f"devices={devices}"] if devices is not None else []
    asked = finetuning_job(start, job, (*overrides, *said))
    place = find_launch(asked, waits=not detach)
    if place is not None:
        return watch_launched(asked, place, source=source_of(job), json=json)
    run = service.submit(asked, source=source_of(job))
    if not json:
        _print_title(run, asked, start)
    service.start(run)
    if detach:
        return leave(run, json=json)
    return watch(run, json=json)


def _print_title(run: RunStore, job: Job, start: str) -> None:
    title = f"\n [bold {ACCENT}]云炉[/]  [bold]{run.id}[/]  [dim]{job.task}, from[/] {start}\n"
    make_console().print(title, highlight=False)
