"""The words of other tools: every row leads to a key of ours, and a job that uses them is answered."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from typing import Any

import pytest

from yunlu.core.errors import JobError
from yunlu.core.settings import use_keras_on_torch
from yunlu.jobs.job_input import read_options
from yunlu.spec.counterparts.counterpart import Counterpart, NotTakenError
from yunlu.spec.counterparts.table import TABLE, answer_key, answer_value, by_name
from yunlu.spec.load import InvalidJobError, job_from_mapping, lay_fields
from yunlu.spec.schema import homes_of, schema_at

BASE = {"task": "text-classification", "model": "hf:bert", "data": "train.txt", "devices": 8}


def answers(train: dict[str, Any], **top: Any) -> dict[str, str]:
    """What the error of a job says at each key."""
    with pytest.raises(InvalidJobError) as caught:
        job_from_mapping({**BASE, **top, "train": train})
    return {
        problem.key.removeprefix("train."): problem.message for problem in caught.value.problems
    }


def test_every_target_is_a_key_of_a_job() -> None:
    for row in TABLE:
        for key in row.keys:
            assert schema_at(tuple(key.split("."))) is not None, f"{row.name}: {key} is no key"
        assert row.keys or row.remark, f"{row.name} has no counterpart, and does not say why"


def test_no_argument_stands_twice_in_the_table_of_its_tool() -> None:
    assert not [
        name for name, count in Counter((r.tool, r.name) for r in TABLE).items() if count > 1
    ]


def arguments_of(tool: str) -> set[str]:
    """What the installed package documents."""
    if tool == "Transformers":
        from transformers import Seq2SeqTrainingArguments

        return {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    if tool == "Lightning":
        from lightning import Trainer
        from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

        kinds: list[Any] = [EarlyStopping, ModelCheckpoint]
        plain = {*inspect.signature(Trainer).parameters}
    else:
        import keras
        from keras.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

        kinds = [EarlyStopping, ModelCheckpoint, ReduceLROnPlateau]
        calls = (keras.Model.compile, keras.Model.fit, keras.optimizers.Adam, keras.optimizers.SGD)
        plain = {name for call in calls for name in inspect.signature(call).parameters}
        plain -= {"self", "name", "kwargs"}
    dotted = {f"{k.__name__}.{name}" for k in kinds for name in inspect.signature(k).parameters}
    return plain | {name for name in dotted if not name.endswith(".kwargs")}


@pytest.mark.parametrize("tool", ["Transformers", "Lightning", "Keras"])
def test_every_documented_argument_has_a_row(tool: str) -> None:
    if tool == "Keras":
        use_keras_on_torch()
    pytest.importorskip(tool.lower())
    assert not arguments_of(tool) - by_name(tool).keys()


# A value of each row's own kind, in the neighbourhood it needs.
VALUES: dict[str, Any] = {
    "optim": "adamw_torch_fused", "lr_scheduler_type": "cosine", "eval_strategy": "steps",
    "evaluation_strategy": "epoch", "save_strategy": "epoch", "report_to": ["wandb", "tensorboard"],
    "run_name": "tuesday", "metric_for_best_model": "eval_accuracy", "train_sampling_strategy":
    "group_by_length", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "target_modules": ["q_proj"],
    "fsdp": "full_shard", "precision": "bf16-mixed", "strategy": "ddp", "gradient_clip_algorithm":
    "norm", "val_check_interval": 100, "deterministic": "warn", "profiler": "simple", "optimizer": "sgd",
    "validation_data": "v.csv", "validation_split": 0.2, "EarlyStopping.monitor": "val_loss",
    "ModelCheckpoint.monitor": "val_acc", "ModelCheckpoint.save_freq": "epoch",
    "optimizer.type": "AdamW", "scheduler.type": "WarmupDecayLR", "optimizer.params.betas": [0.9, 0.95],
    "optimizer._component_": "torch.optim.AdamW", "lr_scheduler._component_":
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "dtype": "bf16",
    "optimizer.betas": [0.9, 0.95], "model.lora_attn_modules": ["q_proj"], "dataset.source":
    "tatsu-lab/alpaca", "dataset.data_files": ["a.json"], "dataset.column": "text",
    "checkpointer.checkpoint_dir": "llama", "metric_logger._component_": "WandBLogger",
    "zero_optimization.stage": 1, "optimizer_in_bwd": True,
    "check_val_every_n_epoch": 1, "ModelCheckpoint.every_n_epochs": 1, "validation_freq": 1, "save_total_limit": 2, "adafactor": False,
}  # fmt: skip
SHARES = {"factor", "momentum", "ema_momentum", "dropout", "label_smoothing_factor", "beta_1", "beta_2",
          "adam_beta1", "adam_beta2", "lora_dropout", "swa_lrs", "cos_min_ratio", "warmup_ratio"}  # fmt: skip
BESIDE = {"per_device_train_batch_size": 8, "batch_size": 8, "devices": 2, "eval_steps": 50, "train_batch_size": 32,
          "train_micro_batch_size_per_gpu": 8, "gradient_clip_val": 0.5, "eval_strategy": "steps",
          "use_ema": True, "learning_rate": 1e-4}  # fmt: skip
NOT_TAKEN = {"fsdp"}  # needs a number that the tool does not say


@pytest.mark.parametrize("row", [r for r in TABLE if r.keys], ids=lambda r: f"{r.tool}-{r.name}")
def test_what_a_row_answers_is_a_valid_value(row: Counterpart) -> None:
    value = VALUES.get(row.name, 0.4 if row.name.rpartition(".")[2] in SHARES else 2)
    try:
        taken = row.convert(value, {**BESIDE, row.name: value})
    except NotTakenError as reason:
        if str(reason) == "expected true or false":
            taken = row.convert(True, {**BESIDE, row.name: True})
        else:
            assert row.name in NOT_TAKEN
            return
    assert set(taken) <= set(row.keys)
    lay_fields(job_from_mapping({**BASE, "devices": "auto"}), {"train.clip.norm": 1.0, **taken})


def test_a_batch_per_device_is_answered_with_the_batch_of_all() -> None:
    found = answers({"per_device_train_batch_size": 8})
    assert found == {
        "per_device_train_batch_size": "here train.batch counts all devices; write train.batch: 64"
    }


@pytest.mark.parametrize(
    ("key", "value", "answer"),
    [
        ("num_train_epochs", 3, "Transformers' name for train.epochs; write train.epochs: 3"),
        ("fp16", True, "write train.precision: fp16"),
        ("fp16", {"enabled": True, "loss_scale": 0}, "write train.precision: fp16"),
        ("fp16", False, "leave it out"),
        ("max_grad_norm", 0, "write train.clip.norm: null"),
        ("gradient_clip_val", 0.5, "write train.clip.norm: 0.5"),
        ("max_epochs", 3, "write train.epochs: 3"),
        ("validation_split", 0.2, "write data.split.validation: 0.2"),
        ("zero_optimization", {"stage": 1}, "write layout.zero1: true"),
        ("zero_optimization", {"stage": 3}, "layout: fsdp8"),
        ("clip_grad_norm", 2.0, "write train.clip.norm: 2.0"),
        ("lr_scheduler_type", "inverse_sqrt", "inverse_sqrt is not offered"),
        ("logging_steps", 10, "has no counterpart here: every step is logged"),
        ("learning_rate", 0.1, "write train.optimizer.lr: 0.1"),
    ],
)
def test_a_key_of_another_tool_is_answered_with_ours(key: str, value: Any, answer: str) -> None:
    assert answer in answers({key: value})[key]


def test_neighbours_decide_between_tools_that_share_a_word() -> None:
    assert "write train.batch: 64" in answers({"batch_size": 64}, devices="auto")["batch_size"]
    tuned = answers({"batch_size": 4, "enable_activation_checkpointing": True})
    assert (
        "write train.batch: 32" in tuned["batch_size"]
    )  # torchtune's is per device, and there are 8


def test_values_spelled_as_elsewhere_are_answered_too() -> None:
    found = answers(
        {"precision": "16-mixed", "schedule": "constant_with_warmup", "optimizer": "adamw_torch"}
    )
    assert "Lightning's word; write train.precision: fp16" in found["precision"]
    assert "write train.schedule.name: constant" in found["schedule"]
    assert "write train.optimizer.name: adamw" in found["optimizer"]


def test_our_own_keys_are_never_taken_for_another_tools() -> None:
    assert answer_key("lerning_rat", 1, {}) is None
    own = {row.name for row in TABLE if "." not in row.name and homes_of(row.name)}
    for name in own:  # spelled alike: the home of the key is said, as before
        assert "write" not in answers({}, **{name: {"a": 1}}).get(name, "")


def test_python_options_are_answered_too() -> None:
    with pytest.raises(JobError) as caught:
        read_options({"num_train_epochs": 3})
    assert "write train.epochs: 3" in str(caught.value.hint)


@pytest.mark.parametrize("value", [True, "many", [1], {"a": 1}, -1, 0, None], ids=str)
def test_a_value_of_the_wrong_kind_never_breaks_the_answer(value: Any) -> None:
    for row in TABLE:
        answer_key(row.name, value, {row.name: value})
        answer_key(row.name, value, dict.fromkeys(by_name(row.tool), value))


def test_a_word_that_no_tool_uses_gets_no_advice() -> None:
    assert answer_value("train.schedule.name", "linear_with_warmup") is None
    advice = answer_value("train.precision", "16-mixed")
    assert advice is not None
    assert "write train.precision: fp16" in advice
