from __future__ import annotations

import csv
from importlib.resources import files

import pytest

from yunlu.planning.models.known_models import find_model
from yunlu.planning.models.shape import active_parameters, parameters

PUBLISHED = {  # billions of weights, as the models' cards and papers say
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-405B": 405.85,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "mistralai/Mixtral-8x22B-v0.1": 140.6,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235.1,
    "openai/gpt-oss-20b": 20.9,
    "openai/gpt-oss-120b": 116.8,
    "deepseek-ai/DeepSeek-V2": 235.7,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "google/gemma-2-27b": 27.2,
    "microsoft/phi-4": 14.66,
    "tiiuae/falcon-40b": 41.3,
    "EleutherAI/gpt-neox-20b": 20.55,
    "google-t5/t5-11b": 11.3,
    "bigscience/bloom": 176.2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_their_published_size(name: str) -> None:
    shape = find_model(name)
    assert shape is not None
    assert parameters(shape) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.003)


@pytest.mark.parametrize(
    ("name", "active"),
    [("Qwen3-235B-A22B", 22), ("gpt-oss-120b", 5.1), ("Kimi K2", 32), ("Nemotron_3_Super", 12)],
)
def test_active_weights_are_as_their_names_say(name: str, active: float) -> None:
    shape = find_model(name)
    assert shape is not None
    assert active_parameters(shape) / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("hf:meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("LLAMA3_70B", "meta-llama/Meta-Llama-3-70B"),
        ("LLAMA3.1_405B", "meta-llama/Llama-3.1-405B"),
        ("llama3_1_8b", "meta-llama/Llama-3.1-8B"),
        ("LLAMA2-70B-LoRA", "meta-llama/Llama-2-70b-hf"),
        ("NousResearch/Llama-2-70b-hf", "meta-llama/Llama-2-70b-hf"),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", "mistralai/Mixtral-8x7B-v0.1"),
        ("DeepSeekV3 (w/o MTP)", "deepseek-ai/DeepSeek-V3"),
        ("DeepSeek3-671B-MaxText", "deepseek-ai/DeepSeek-V3"),
        ("Qwen3_30B_a3B (tokendrop)", "Qwen/Qwen3-30B-A3B"),
        ("GPT OSS 120B", "openai/gpt-oss-120b"),
        ("Nemotron_3_Nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("HuggingFace BERT-Large Ph1 pre-training", "google-bert/bert-large-uncased"),
        ("Llama-3.1-70B pre-training", "meta-llama/Llama-3.1-70B"),
        ("mpt-13b", "mosaicml/mpt-13b"),
        ("mpt-1.3b", "mosaicml/mpt-1b"),
    ],
)
def test_usual_spellings_are_found(spelling: str, name: str) -> None:
    found = find_model(spelling)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("name", ["", "llama", "my/own-model-7b", "mistral 70b", "gpt-oss-121b"])
def test_what_is_not_known_is_not_guessed(name: str) -> None:
    assert find_model(name) is None


def test_every_line_is_a_model_that_its_own_name_finds() -> None:
    table = files("yunlu.planning").joinpath("data/models.csv").read_text(encoding="utf-8")
    names = [row["name"] for row in csv.DictReader(table.splitlines())]
    assert len(names) > 120
    for name in names:
        shape = find_model(name)
        assert shape is not None
        assert shape.name == name
        assert parameters(shape) > 1e7
