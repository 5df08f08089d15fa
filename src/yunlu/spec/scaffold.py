"""A first job file for a task and some data: short, commented, ready to train."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from yunlu.core.errors import JobError
from yunlu.spec.credentials import refuse_credential_in
from yunlu.spec.entry_points import OWN_CODE, TASKS, known_names
from yunlu.spec.explain import unknown_name
from yunlu.spec.problems import InvalidJobError
from yunlu.spec.source import parse


@dataclass(frozen=True, slots=True)
class _Start:
    """What suits a task: a model that fits any of its data, and the settings worth knowing."""

    model: str
    hints: tuple[tuple[str, str], ...] = ()


_COLUMNS = (
    ("input: [a, b]", "columns fed to the model; all but the target when not set"),
    ("target: label", "column to predict; found by name when not set"),
)
_TEXT = (
    ("input: text", "column with the text; found by name when not set"),
    ("target: label", "column to predict; found by name when not set"),
    ("max_length: 128", "tokens; longer texts are cut"),
)
_LINES = (
    ("max_length: 128", "tokens per sample"),
    ("tokenizer: bpe", "or bytes, or a Hugging Face directory"),
)
_PAIRS = (
    ("input: source", "column to read; found by name when not set"),
    ("target: target", "column to write; found by name when not set"),
)
_RATINGS = (
    ("input: [user, item]", "found by name when not set"),
    ("target: rating", "found by name when not set"),
)
_IMAGES = (("image_size: 32", "pixels; the size of the first image when not set"),)
_SPEECH = (("sample_rate: 16000", "the rate of the first file when not set"),)
_STARTS = {
    "tabular-classification": _Start("mlp", _COLUMNS),
    "tabular-regression": _Start("mlp", _COLUMNS),
    "image-classification": _Start("cnn", _IMAGES),
    "text-classification": _Start("transformer", _TEXT),
    "language-modeling": _Start("transformer", _LINES),
    "seq2seq": _Start("transformer", _PAIRS),
    "keyword-spotting": _Start("cnn", _SPEECH),
    "speech-to-text": _Start("conv-gru", _SPEECH),
    "recommendation": _Start("factors", _RATINGS),
}

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
    known = known_names(TASKS) or sorted(_STARTS)
    if task not in known and not re.fullmatch(OWN_CODE, task):
        raise JobError(f"{unknown_name('task', task, known)}.")
    if not data:
        raise JobError("The data has no name.", hint="give a file, a folder or a URL")
    refuse_credential_in(data, "The data")
    start = _STARTS.get(task, _Start("mlp"))
    return _TEMPLATE.format(
        task=task,
        model=start.model,
        data=_quoted(data),
        data_hints="".join(f"  # {setting:<25}# {why}\n" for setting, why in start.hints),
    )


def _quoted(text: str) -> str:
    """Bare where YAML reads it back as it stands, else in quotes."""
    try:
        if parse(f"key: {text}", where="data").data == {"key": text} and "\n" not in text:
            return text
    except InvalidJobError:
        pass
    return json.dumps(text, ensure_ascii=not text.isprintable())
