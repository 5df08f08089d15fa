"""Commands to copy and paths to open from a study's report."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING

import yaml

from yunlu.core.json_decode import decode_json
from yunlu.runs.home import is_run_id
from yunlu.runs.run_store import Document

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.tuning.values import ParamValue
    from yunlu.tuning.view import StudyView, TrialFacts


def train_command(view: StudyView, facts: TrialFacts) -> str:
    """The command that trains a job with a trial's setting."""
    job = view.source or "JOB"
    params = {**view.extra, **facts.params}
    settings = [
        f"--set {shlex.quote(f'{name}={_as_yaml(value)}')}" for name, value in params.items()
    ]
    # Overrides of the search do not concern a training.
    own = [
        f"--set {shlex.quote(override)}"
        for override in view.overrides
        if not override.startswith("search.")
    ]
    return " ".join(["yunlu train", shlex.quote(job), *own, *settings])


def run_path(view: StudyView, facts: TrialFacts) -> Path | None:
    """The directory of a trial's run."""
    if facts.run is None or not is_run_id(facts.run):
        return None
    return view.path.parent.parent / facts.run


def model_path(view: StudyView, facts: TrialFacts) -> Path | None:
    """Where the model of a trial was exported, if it was."""
    run = run_path(view, facts)
    return run / "model" if run is not None and (run / "model").is_dir() else None


def report_link(view: StudyView, facts: TrialFacts, beside: Path) -> str | None:
    """How a page links to the report of a trial's run."""
    run = run_path(view, facts)
    if run is None or not (run / Document.REPORT_PAGE).is_file():
        return None
    return os.path.relpath(run / Document.REPORT_PAGE, beside.parent).replace(os.sep, "/")


def _as_yaml(value: ParamValue) -> str:
    """As ``--set`` reads it back; a list or a mapping stands in a setting as its JSON text."""
    if isinstance(value, str):
        return value if _is_encoded(value) or _is_word(value) else json.dumps(value)
    text = json.dumps(value)
    # YAML takes 1e-05 for a word.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def _is_encoded(text: str) -> bool:
    try:
        return isinstance(decode_json(text), list | dict)
    except ValueError:
        return False


def _is_word(text: str) -> bool:
    try:
        return yaml.safe_load(text) == text
    except yaml.YAMLError:
        return False
