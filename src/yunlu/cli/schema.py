"""``yunlu schema``."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from yunlu.core.errors import YunluError
from yunlu.core.files import write_atomically
from yunlu.render.terminal.page import print_text


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
