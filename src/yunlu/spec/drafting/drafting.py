"""``yunlu init --from FILE``: the draft of a job from another tool's script or configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from yunlu.core.errors import JobError
from yunlu.core.limits import over_limit, read_limits
from yunlu.spec.credentials import refuse_credential_in
from yunlu.spec.drafting.configs import draft_config
from yunlu.spec.drafting.draft import Draft, LeftOut, write_draft
from yunlu.spec.drafting.scripts import draft_script
from yunlu.spec.scaffold import check_task
from yunlu.spec.source import parse

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDraft:
    """The text of a job file, and what is missing in it."""

    text: str
    missing: tuple[str, ...]
    """Keys that the file does not say and that must be filled in."""
    left: tuple[LeftOut, ...]


def draft_job(path: Path, *, task: str | None = None, data: str | None = None) -> JobDraft:
    """Draft a job; ``task`` and ``data`` count before what the file says."""
    text = _read(path)
    draft = Draft(source=path.name)
    if task is not None:
        check_task(task)
        draft.take("task", task)
    if data is not None:
        refuse_credential_in(data, "The data")
        draft.take("data.train", data)
    if path.suffix == ".py":
        draft_script(text, draft)
    elif path.suffix in {".json", ".yaml", ".yml"}:
        text = text.replace("\t", " ") if path.suffix == ".json" else text
        document = parse(text, where=str(path))
        draft_config(document.data, draft)
    else:
        raise JobError(
            f"{path} is neither a script nor a configuration.",
            hint="expected .py, .json, .yaml or .yml; a notebook is exported by: jupyter nbconvert --to script",
        )
    written, missing = write_draft(draft)
    return JobDraft(text=written, missing=tuple(missing), left=tuple(draft.left))


def _read(path: Path) -> str:
    if not path.is_file():
        raise JobError(f"There is no file {path}.", hint="--from takes a script or a configuration")
    most = read_limits().job
    try:
        with path.open("rb") as stream:
            content = stream.read(most + 1)
        if len(content) > most:
            raise over_limit(
                f"{path} is larger than {most:,} bytes, the most that is read of such a file.",
                "job",
                path.stat().st_size,
                kind=JobError,
            )
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not UTF-8 text (byte {error.start}).") from None
    except OSError as error:
        raise JobError(f"Cannot read {path}: {error.strerror}.") from error
