"""``yunlu init``, ``validate``, ``schema``: write and check a job file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from yunlu.client import default_client
from yunlu.core.errors import JobError, YunluError
from yunlu.core.files import write_atomically
from yunlu.render.terminal.page import make_console, print_json, print_lines, print_text


def init(
    task: str | None = None,
    data: str | None = None,
    /,
    *,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    output: Annotated[Path, Parameter(alias="-o")] = Path("job.yaml"),
    force: bool = False,
) -> None:
    """Write a first job file for a task and some data, or from a script or configuration of another tool.

    Args:
        task: What to learn, such as text-classification.
        data: A file, a folder, a URL, hf:NAME or sklearn:NAME.
        from_: Draft the job from this file: a Python script of Transformers, Lightning, Keras or torch (it is
            read, never run), TrainingArguments as JSON, a LightningCLI or torchtune YAML, a DeepSpeed JSON.
        output: The job file to write.
        force: Replace the file if it exists.
    """
    if from_ is not None:
        text, missing = _draft(from_, task, data)
    elif task is None or data is None:
        raise JobError(
            "A job needs a task and data.",
            hint="yunlu init TASK DATA; or from another tool's file: yunlu init --from trainer.py",
        )
    else:
        from yunlu.spec.scaffold import scaffold  # noqa: PLC0415 (slow to import)

        text, missing = scaffold(task, data), ()
    if output.suffix not in {".yaml", ".yml"}:
        raise JobError(f"{output} must end in .yaml or .yml.")
    if output.exists() and not force:
        raise JobError(
            f"{output} exists.", hint="choose another name with -o, or --force to replace it"
        )
    try:
        write_atomically(output, text, private=False)
    except OSError as error:
        raise JobError(f"Cannot write {output}: {error.strerror}.") from error
    following = f"yunlu train {output}" if from_ is None else f"yunlu validate {output}"
    if missing:
        following = f"fill in {', '.join(missing)}, then: {following}"
    console = make_console()
    print_lines(console, Text(f"Wrote {output}. Next: {following}"))
    if (
        data is not None
        and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", data)
        and not Path(data).exists()
    ):
        print_lines(console, Text(f"Note: {data} does not exist yet."))


def _draft(source: Path, task: str | None, data: str | None) -> tuple[str, tuple[str, ...]]:
    from yunlu.spec.drafting.drafting import draft_job  # noqa: PLC0415 (slow to import)

    draft = draft_job(source, task=task, data=data)
    if draft.left:
        count = len(draft.left)
        print_text(
            f"Not taken over: {count} setting{'s' if count > 1 else ''}, listed with reasons in the file."
        )
    return draft.text, draft.missing


def validate(
    job: str,
    /,
    *,
    set_: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    json_: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Check a job file and show how it was read.

    Args:
        job: A job file: job.yaml, job.py or jobs.py:name.
        set_: Change a value first, such as train.epochs=3; may be repeated.
        json_: Print the result as JSON.
    """
    result = default_client().validate(job, overrides=set_)
    if json_:
        problems = [problem.model_dump() for problem in result.problems]
        print_json({"valid": result.is_valid, "problems": problems})
        return 0 if result.is_valid else 1
    from yunlu.render.terminal.plan_options import job_summary  # noqa: PLC0415 (slow to import)

    console = make_console()
    print_lines(console, Text(f"{job} is valid."))
    print_lines(console, Text(job_summary(result.require())), hang=12)
    return 0


def schema(*, output: Annotated[Path | None, Parameter(alias="-o")] = None) -> None:
    """Print the JSON Schema of a job file, for editors.

    Args:
        output: Write it to this file instead.
    """
    from yunlu.spec.schema import job_schema  # noqa: PLC0415 (slow to import)

    text = json.dumps(job_schema(), indent=2, ensure_ascii=False)
    if output is None:
        print(text)
        return
    try:
        write_atomically(output, f"{text}\n", private=False)
    except OSError as error:
        raise YunluError(f"Cannot write {output}: {error.strerror}.") from error
    print_text(f"Wrote {output}.")
