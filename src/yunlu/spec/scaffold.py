"""A first job file for a task and some data: short, commented, ready to train."""

from __future__ import annotations

import json
import re

from yunlu.core.errors import JobError
from yunlu.core.imports import OWN_CODE, TASKS, known_names
from yunlu.spec.credentials import refuse_credential_in
from yunlu.spec.schema import unknown_name
from yunlu.spec.source import InvalidJobError, parse
from yunlu.spec.task_traits import traits_of

_TEMPLATE = """\
# yaml-language-server: $schema=yunlu.schema.json
# Editors complete and check this file once `yunlu schema -o yunlu.schema.json` has run here.
# Look before you train: yunlu validate, yunlu plan.   Then: yunlu train
task: {task}
model: {model:<22}# or hf:DIRECTORY, a .keras file, your own module:Class
data:
  train: {data}
  # validation: PATH         # else a tenth of the training data is held out; so with test
{data_hints}\
train:
  epochs: 10
  # batch: 64                # samples per step; chosen for the data when not set
  # optimizer: {{name: adamw, lr: 1e-3}}
  # schedule: cosine         # or constant, linear, wsd, plateau
  # early_stopping: 3        # evaluations without improvement
# devices: 4                 # workers that share the training; see also: layout
# trackers: [wandb]          # besides TensorBoard; or mlflow
"""


def scaffold(task: str, data: str) -> str:
    """The text of a job file for the task and the data; everything not set is ``auto``."""
    check_task(task)
    if not data:
        raise JobError("The data has no name.", hint="give a file, a folder or a URL")
    refuse_credential_in(data, "The data")
    traits = traits_of(task)
    return _TEMPLATE.format(
        task=task,
        model=traits.model,
        data=_quoted(data),
        data_hints="".join(f"  # {setting:<25}# {why}\n" for setting, why in traits.hints),
    )


def check_task(task: str) -> None:
    """Refuse a task that is neither installed nor the user's own."""
    known = known_names(TASKS)
    if task not in known and not re.fullmatch(OWN_CODE, task):
        raise JobError(f"{unknown_name('task', task, known)}.")


def _quoted(text: str) -> str:
    """Bare where YAML reads it back as it stands, else in quotes."""
    try:
        if parse(f"key: {text}", where="data").data == {"key": text} and "\n" not in text:
            return text
    except InvalidJobError:
        pass
    return json.dumps(text, ensure_ascii=not text.isprintable())
