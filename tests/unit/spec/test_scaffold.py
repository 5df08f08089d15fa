"""First job files."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from yunlu.core.errors import JobError
from yunlu.core.imports import TASKS, known_names
from yunlu.spec.load import load_job
from yunlu.spec.scaffold import scaffold

MODELS = {
    "tabular-classification": "mlp",
    "tabular-regression": "mlp",
    "image-classification": "cnn",
    "text-classification": "transformer",
    "language-modeling": "transformer",
    "seq2seq": "transformer",
    "keyword-spotting": "cnn",
    "speech-to-text": "conv-gru",
    "recommendation": "factors",
}


def test_every_installed_task_has_a_model_to_start_from():
    assert set(known_names(TASKS)) >= set(MODELS)


@pytest.mark.parametrize("task", MODELS)
def test_a_scaffold_loads_and_its_commented_settings_are_real(tmp_path, task):
    path = tmp_path / "job.yaml"
    path.write_text(scaffold(task, "data/train.csv"))
    job = load_job(path)
    assert (job.task, job.model.name, job.data.train) == (task, MODELS[task], "data/train.csv")
    assert path.read_text().startswith("# yaml-language-server: $schema=")
    lines = path.read_text().splitlines()
    head, settings = lines[:3], [line.replace("# ", "", 1) for line in lines[3:]]
    path.write_text("\n".join([*head, *settings]))
    assert load_job(path).trackers == ["wandb"]


def test_own_code_gets_a_scaffold_too(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(scaffold("my.module:Task", "d"))
    assert load_job(path).task == "my.module:Task"


def test_an_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(JobError, match="did you mean 'language-modeling'"):
        scaffold("language-modelling", "d")


@given(data=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_name_of_data_survives_the_trip(tmp_path, data):
    path = tmp_path / "job.yaml"
    path.write_bytes(scaffold("seq2seq", data).encode())
    assert load_job(path).data.train == data
