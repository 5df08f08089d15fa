"""Drafts from the files of other tools: what is taken over loads, what is not is listed with its reason."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from yunlu.core.errors import YunluError
from yunlu.spec.drafting.drafting import JobDraft, draft_job
from yunlu.spec.load import InvalidJobError, job_from_mapping, load_job

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 3,
    "learning_rate": 2e-5,
    "bf16": True,
    "output_dir": "out",
}


def draft(folder: Path, name: str, text: str, **given: str) -> tuple[dict[str, Any], JobDraft]:
    """The job as a mapping, and the draft."""
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    made = draft_job(path, **given)
    (folder / "job.yaml").write_text(made.text, encoding="utf-8")
    body = yaml.safe_load(made.text)
    if not made.missing:
        load_job(folder / "job.yaml")
    else:
        try:
            job_from_mapping({**body, "task": "text-classification"})
        except InvalidJobError as error:
            pytest.fail(str(error))
    assert all(len(line) < 80 for line in made.text.splitlines() if line.startswith("#"))
    return body, made


def reasons(made: JobDraft) -> dict[str, str]:
    return {each.what.partition("=")[0]: each.why for each in made.left}


TRAINER = """
    import argparse
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import (AutoModelForSequenceClassification as Model, AutoTokenizer,
                              EarlyStoppingCallback, Trainer, TrainingArguments)

    raise SystemExit("a draft never runs this")
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2e-5)
    options = parser.parse_args()
    NAME = "prajjwal1/bert-tiny"
    BATCH = 4 * 8
    common = {"weight_decay": 0.01, "seed": 7}

    tokenizer = AutoTokenizer.from_pretrained(NAME)
    data = load_dataset("csv", data_files={"train": "a.csv", "validation": ["b.csv"]})
    data = data.map(lambda rows: tokenizer(rows["review"], truncation=True, max_length=64))
    model = Model.from_pretrained(NAME, num_labels=3)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["query"], task_type="SEQ_CLS")
    arguments = TrainingArguments("out", per_device_train_batch_size=BATCH, learning_rate=options.lr,
        num_train_epochs=choose_epochs(), warmup_ratio=0.1, report_to="wandb", **common)
    trainer = Trainer(model, arguments, train_dataset=data["train"], compute_metrics=score,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])
    trainer.train()
"""


def test_a_script_of_transformers_becomes_a_job(tmp_path: Path) -> None:
    body, made = draft(tmp_path, "trainer.py", TRAINER)
    assert body == {
        "task": "text-classification",
        "model": {
            "name": "hf:prajjwal1/bert-tiny",
            "adapter": {"name": "lora", "rank": 4, "alpha": 8, "targets": ["query"]},
        },
        "data": {"train": "a.csv", "validation": "b.csv", "max_length": 64, "input": "review"},
        "train": {
            "batch": 32,
            "optimizer": {"lr": 2e-5, "weight_decay": 0.01},
            "schedule": {"warmup": 0.1},
            "seed": 7,
            "early_stopping": {"patience": 2},
        },
        "trackers": ["wandb"],
    }
    found = reasons(made)
    assert "only running the script would tell" in found["num_train_epochs"]
    assert "own directory" in found["output_dir"]
    assert "metrics" in found["compute_metrics"]
    assert "labels are found" in found["num_labels"]
    lines = {each.what.partition("=")[0]: each.line for each in made.left}
    assert lines["num_train_epochs"] == 22


def test_arguments_as_transformers_writes_them_become_a_job(tmp_path: Path) -> None:
    body, made = draft(
        tmp_path,
        "training_args.json",
        json.dumps(ARGUMENTS),
        task="text-classification",
        data="d.csv",
    )
    assert body["train"] == {
        "batch": 32, "micro_batch": 16, "epochs": 3, "optimizer": {"lr": 2e-5}, "precision": "bf16",
    }  # fmt: skip
    assert (body["task"], body["data"], body["model"]) == (
        "text-classification",
        "d.csv",
        "transformer",
    )
    assert list(reasons(made)) == ["output_dir"]


def test_a_script_of_lightning_becomes_a_job(tmp_path: Path) -> None:
    body, made = draft(
        tmp_path,
        "lit.py",
        """
        import lightning as L
        import torch
        from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

        class Classifier(L.LightningModule):
            def forward(self, x):
                return self.net(x)
            def training_step(self, batch, index):
                return 0
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1, momentum=0.95)

        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=2)
        trainer = L.Trainer(max_epochs=4, precision="bf16-mixed", accumulate_grad_batches=4,
            gradient_clip_val=0.5, callbacks=[EarlyStopping("val_loss", patience=6),
                                              ModelCheckpoint(monitor="val_acc", save_top_k=2)])
        """,
        task="tabular-classification",
        data="d.csv",
    )
    assert body["model"] == "lit.py:Classifier"
    assert body["train"] == {
        "optimizer": {"name": "momentum", "lr": 0.1, "momentum": 0.95},
        "workers": 2,
        "epochs": 4,
        "precision": "bf16",
        "batch": 64,
        "micro_batch": 16,
        "clip": {"norm": 0.5},
        "early_stopping": {"patience": 6, "metric": "loss"},
        "checkpoint": {"metric": "accuracy", "keep_best": 2},
    }
    assert "Classifier.training_step" in reasons(made)


def test_a_configuration_of_lightning_becomes_a_job(tmp_path: Path) -> None:
    body, made = draft(
        tmp_path,
        "config.yaml",
        """
        seed_everything: 3
        trainer:
          max_epochs: 10
          devices: 2
          strategy: fsdp
          callbacks: [{class_path: lightning.pytorch.callbacks.EarlyStopping,
                       init_args: {monitor: val_loss, patience: 4}},
                      {class_path: my.Callback}]
        model: {class_path: my.Net, init_args: {hidden: 64, lr: 0.001}}
        data: {class_path: my.Data, init_args: {data_dir: pictures/, batch_size: 32}}
        lr_scheduler: {class_path: torch.optim.lr_scheduler.CosineAnnealingLR}
        """,
        task="image-classification",
    )
    assert body["model"] == {"name": "my:Net", "args": {"hidden": 64}}
    assert (body["data"], body["devices"], body["layout"]) == ("pictures/", 2, {"fsdp": 2})
    assert body["train"]["batch"] == 64
    assert body["train"]["optimizer"] == {"lr": 0.001}
    assert list(reasons(made)) == ["callbacks: Callback"]


KERAS = """
    import tensorflow as tf
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV, train_test_split

    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    strategy = tf.distribute.MirroredStrategy()
    digits = load_digits()
    x, x_test, y, y_test = train_test_split(digits.data, digits.target, test_size=0.2)

    def create_model(learning_rate=0.01):
        model = tf.keras.Sequential([
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dropout(0.2),
            tf.keras.layers.Dense(10, activation="softmax"),
        ])
        model.compile(loss="sparse_categorical_crossentropy",
                      optimizer=tf.keras.optimizers.Adam(lr=learning_rate), metrics=["accuracy"])
        return model

    model = KerasClassifier(build_fn=create_model, epochs=10, batch_size=32)
    grid = {"learning_rate": [0.001, 0.01], "batch_size": [16, 32]}
    GridSearchCV(estimator=model, param_grid=grid).fit(x, y)
"""


def test_a_script_of_keras_becomes_a_job_with_its_grid(tmp_path: Path) -> None:
    body, made = draft(tmp_path, "grid.py", KERAS)
    assert body == {
        "task": "tabular-classification",
        "model": {"name": "mlp", "args": {"hidden": [128], "dropout": 0.2}},
        "data": {"train": "sklearn:digits", "split": {"test": 0.2}},
        "train": {
            "precision": "bf16",
            "optimizer": {"name": "adam", "lr": 0.01},
            "epochs": 10,
            "batch": 32,
        },
        "search": {
            "method": "grid",
            "space": {"train.optimizer.lr": [0.001, 0.01], "train.batch": [16, 32]},
        },
    }
    assert "all GPUs" in reasons(made)["MirroredStrategy"]


def test_convolutions_are_left_to_the_function_that_builds_them(tmp_path: Path) -> None:
    body, _ = draft(
        tmp_path,
        "pictures.py",
        """
        import keras
        def build():
            return keras.Sequential([keras.layers.Conv2D(8, 3), keras.layers.Dense(10)])
        data = keras.utils.image_dataset_from_directory("photos", image_size=(32, 32), batch_size=16)
        build().fit(data, epochs=2, callbacks=[keras.callbacks.ReduceLROnPlateau(factor=0.2, patience=3)])
        """,
    )
    assert body["model"] == "pictures.py:build"
    assert body["data"] == {"train": "photos", "image_size": 32}
    assert body["train"]["schedule"] == {"name": "plateau", "factor": 0.2, "patience": 3}


def test_a_plain_loop_of_torch_says_what_it_can(tmp_path: Path) -> None:
    body, made = draft(
        tmp_path,
        "loop.py",
        """
        import torch
        from torch.cuda.amp import GradScaler, autocast
        torch.manual_seed(5)
        optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
        scaler = GradScaler()
        with autocast():
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
        """,
    )
    assert body["train"]["precision"] == "fp16"
    assert body["train"]["clip"] == {"norm": 0.5}
    assert body["train"]["seed"] == 5
    assert "is not built in" in reasons(made)["RMSprop"]
    assert made.missing == ("task", "model", "data")


def test_deepspeed_and_torchtune_are_read_too(tmp_path: Path) -> None:
    body, made = draft(
        tmp_path,
        "ds.json",
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": true},'
        ' "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}',
    )
    assert body["train"] == {
        "batch": 64, "micro_batch": 4, "precision": "fp16", "optimizer": {"name": "adamw"},
    }  # fmt: skip
    assert "fsdp" in reasons(made)["zero_optimization.stage"]
    body, _ = draft(
        tmp_path,
        "1B_lora.yaml",
        """
        model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 64}
        checkpointer: {checkpoint_dir: models/llama}
        dataset: {source: tatsu-lab/alpaca, packed: true}
        batch_size: 4
        gradient_accumulation_steps: 4
        dtype: bf16
        """,
    )
    assert body["model"] == {"name": "hf:models/llama", "adapter": {"name": "lora", "rank": 64}}
    assert body["data"] == "hf:tatsu-lab/alpaca"
    assert body["train"] == {"padding": "pack", "batch": 16, "micro_batch": 4, "precision": "bf16"}


def test_what_contradicts_itself_is_left_out_with_the_reason(tmp_path: Path) -> None:
    arguments = {**ARGUMENTS, "eval_strategy": "no", "early_stopping_patience": 3}
    body, made = draft(tmp_path, "a.json", json.dumps(arguments), task="seq2seq", data="d.tsv")
    assert "early_stopping" not in body["train"]
    assert "needs evaluations" in reasons(made)["train.early_stopping.patience"]


def test_secrets_do_not_reach_the_draft(tmp_path: Path) -> None:
    token = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"
    url = f"https://me:{token}@h/x.csv"
    arguments = {**ARGUMENTS, "hub_token": token, "run_name": token, "train_file": url}
    (tmp_path / "a.json").write_text(json.dumps(arguments))
    made = draft_job(tmp_path / "a.json", task="seq2seq")
    assert token not in made.text
    assert made.missing == ("data",)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "def broken(:", "not valid Python: line 1"),
        ("a.py", "x = " + "(" * 500 + ")" * 500, "a.py"),
        ("a.py", "x\0y", "a.py"),
        ("a.json", "[1, 2]", "no mapping"),
        ("a.json", '{"colour": 1}', "no configuration that is known"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.txt", "x", "neither a script nor a configuration"),
        ("a.ipynb", "{}", "nbconvert"),
    ],
)
def test_files_that_say_nothing_are_refused_in_words(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(YunluError) as caught:
        draft_job(tmp_path / name)
    assert said in f"{caught.value} {caught.value.hint}"


def test_a_wrong_task_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ARGUMENTS))
    with pytest.raises(YunluError, match="did you mean 'text-classification'"):
        draft_job(tmp_path / "a.json", task="text-clasification")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)
WORDS = ["fp16", "optimizer", "num_train_epochs", "max_steps", "zero_optimization", "trainer", "callbacks", "batch_size",
         "train_batch_size", "report_to", "eval_strategy", "model", "data", "learning_rate", "adam_beta1"]  # fmt: skip


@given(config=st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=6), PLAIN, max_size=6))
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_configuration_breaks_the_draft(tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"num_train_epochs": 3, **config}))
    try:
        made = draft_job(path, task="seq2seq", data="d.tsv")
    except YunluError:
        return
    (tmp_path / "job.yaml").write_text(made.text, encoding="utf-8")
    load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    "value",
    ["x()", "-'a'", "1 / 0", "10 ** 10 ** 10", "[*a]", "{**a}", "a if b else c", "a.b.c", "f'{x}'",
     "{1: 2}", "-True", "b'x'", "1j", "..."],
)  # fmt: skip
def test_no_expression_breaks_the_draft(tmp_path: Path, value: str) -> None:
    _, made = draft(
        tmp_path,
        "t.py",
        "from transformers import TrainingArguments\na = a\n"
        f"TrainingArguments(seed={value}, max_steps=a)\n",
    )
    assert {"seed", "train.seed"} & reasons(made).keys()
