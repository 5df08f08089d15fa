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
    task: str,
    data: str,
    /,
    *,
    output: Annotated[Path, Parameter(alias="-o")] = Path("job.yaml"),
    force: bool = False,
) -> None:
    """Write a first job file for a task and some data.

    Args:
        task: What to learn, such as text-classification.
        data: A file, a folder, a URL, hf:NAME or sklearn:NAME.
        output: The job file to write.
        force: Replace the file if it exists.
    """
    from yunlu.spec.scaffold import scaffold  # noqa: PLC0415 (slow to import)

    text = scaffold(task, data)
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
    console = make_console()
    print_lines(console, Text(f"Wrote {output}. Next: yunlu train {output}"))
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", data) and not Path(data).exists():
        print_lines(console, Text(f"Note: {data} does not exist yet."))


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
