"""``yunlu finetune``: from a trained model and a job file to a model trained further."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from yunlu.cli.watching import watch_started
from yunlu.client.connect import default_client
from yunlu.render.terminal.page import title_text


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
    """Fine-tune a trained model on other data: every weight, or a LoRA adapter.

    Model, tokenizer and labels come from the trained model, so the job needs only task and data.
    --set model.adapter=lora trains an adapter; the exported model has it merged.

    Args:
        start: A run (its id, a unique prefix of it, or: last), a model directory, or hf:NAME.
        job: The job file: YAML, or Python (jobs.py:name).
        overrides: Change the job: --set model.adapter=lora; may be repeated.
        devices: Number of workers, one for each device.
        detach: Return at once; the run continues. `yunlu logs -f last` watches it.
        json: Write every event and metric record as one JSON line, and nothing else.
        name: Name of the run.
    """
    options = [f"name={name}"] if name else []
    options += [f"devices={devices}"] if devices is not None else []
    client = default_client()
    started = client.finetune(start, job, overrides=(*overrides, *options), detach=detach)
    title = title_text(started.id, f"{started.task}, from").append(f" {start}\n")
    return watch_started(client, started, title=title, json=json, detach=detach)
