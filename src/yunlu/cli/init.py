"""``yunlu init TASK DATA``."""

import re
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from yunlu.core.errors import JobError
from yunlu.core.files import write_atomically
from yunlu.render.terminal.page import print_text


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
    print_text(f"Wrote {output}. Next: yunlu train {output}")
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", data) and not Path(data).exists():
        print_text(f"Note: {data} does not exist yet.")
