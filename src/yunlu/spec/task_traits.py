"""Traits of tasks: what planning and scaffolding must know of a task without importing it.

A package that registers a task may register its traits too (``yunlu.task_traits``, the same name), in a
module that does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from yunlu.core.errors import JobError
from yunlu.core.imports import TASK_TRAITS, known_names, load_registered


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTraits:
    """What a task is like; the defaults hold of a task that nothing is known of."""

    counts_tokens: bool = False
    """Samples are texts, whose length is counted in tokens."""
    is_stream: bool = False
    """Plain text is one stream of tokens, cut into blocks."""
    head: Literal["tokens", "labels"] | None = None
    """What the outputs of a Hugging Face model stand for."""
    transformer: Literal["causal", "classifier", "seq2seq"] | None = None
    """Which of our transformers its model ``transformer`` is."""
    model: str = "mlp"
    """A model that fits any of its data, for a first job file."""
    hints: tuple[tuple[str, str], ...] = ()
    """Keys of ``data`` worth knowing, and what they do."""


def traits_of(task: str) -> TaskTraits:
    """The traits that are registered for a task; the defaults if there are none."""
    if task not in known_names(TASK_TRAITS):
        return _UNKNOWN
    traits = load_registered(TASK_TRAITS, task, kind="task")
    if not isinstance(traits, TaskTraits):
        raise JobError(
            f"The traits of the task {task} are {traits!r:.80}, not TaskTraits.",
            hint="correct the entry point in the group yunlu.task_traits of its package",
        )
    return traits


_UNKNOWN = TaskTraits()
_COLUMNS = (
    ("input: [a, b]", "columns fed to the model; all but the target when not set"),
    ("target: label", "column to predict; found by name when not set"),
)
_SPEECH = (("sample_rate: 16000", "the rate of the first file when not set"),)

TABULAR_CLASSIFICATION = TABULAR_REGRESSION = TaskTraits(model="mlp", hints=_COLUMNS)
IMAGE_CLASSIFICATION = TaskTraits(
    head="labels",
    model="cnn",
    hints=(("image_size: 32", "pixels; the size of the first image when not set"),),
)
TEXT_CLASSIFICATION = TaskTraits(
    counts_tokens=True,
    head="labels",
    transformer="classifier",
    model="transformer",
    hints=(
        ("input: text", "column with the text; found by name when not set"),
        ("target: label", "column to predict; found by name when not set"),
        ("max_length: 128", "tokens; longer texts are cut"),
    ),
)
LANGUAGE_MODELING = TaskTraits(
    counts_tokens=True,
    is_stream=True,
    head="tokens",
    transformer="causal",
    model="transformer",
    hints=(
        ("max_length: 128", "tokens per sample"),
        ("tokenizer: bpe", "or bytes, or a Hugging Face directory"),
    ),
)
SEQ2SEQ = TaskTraits(
    counts_tokens=True,
    head="tokens",
    transformer="seq2seq",
    model="transformer",
    hints=(
        ("input: source", "column to read; found by name when not set"),
        ("target: target", "column to write; found by name when not set"),
    ),
)
KEYWORD_SPOTTING = TaskTraits(head="labels", model="cnn", hints=_SPEECH)
SPEECH_TO_TEXT = TaskTraits(model="conv-gru", hints=_SPEECH)
RECOMMENDATION = TaskTraits(
    model="factors",
    hints=(
        ("input: [user, item]", "found by name when not set"),
        ("target: rating", "found by name when not set"),
    ),
)
