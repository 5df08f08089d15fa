"""Configurations in JSON and YAML: of Transformers, Lightning, DeepSpeed and torchtune."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from yunlu.core.errors import JobError
from yunlu.spec.counterparts.counterpart import NO_CODE, RUNS, NotTakenError
from yunlu.spec.counterparts.optimizers import optimizer_keys, schedule_keys
from yunlu.spec.counterparts.table import by_name, flatten

if TYPE_CHECKING:
    from yunlu.spec.drafting.draft import Draft

Section = dict[str, Any]


def draft_config(content: Any, draft: Draft) -> None:
    """Draft from a configuration; which tool's it is, its keys say."""
    if not isinstance(content, dict):
        raise JobError(f"{draft.source} holds no mapping of settings.")
    config = cast("Section", content)
    flat = flatten(config)
    if isinstance(config.get("trainer"), dict):
        _lightning(config, draft)
    elif any(key.endswith("_component_") for key in flat):
        _torchtune(flat, draft)
    elif config.keys() & {
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "zero_optimization",
    }:
        draft.convert("DeepSpeed", flat, beside=flat)
    elif len(config.keys() & by_name("Transformers").keys()) >= 1:
        _transformers(config, draft)
    else:
        raise JobError(
            f"{draft.source} is no configuration that is known here.",
            hint="expected TrainingArguments as JSON, a LightningCLI or torchtune YAML, or a "
            "DeepSpeed JSON; a script ends in .py",
        )


def _transformers(config: Section, draft: Draft) -> None:
    # As TrainingArguments writes itself every argument is there; 40 or more is no choice of a person.
    is_whole = len(config) >= 40
    known = {key: value for key, value in config.items() if not str(key).startswith("_")}
    for key in ("model_name_or_path", "model_name"):
        if isinstance(known.get(key), str):
            draft.take("model.name", f"hf:{known.pop(key)}")
    for key, ours in (("train_file", "data.train"), ("validation_file", "data.validation"), ("test_file", "data.test"),
                      ("max_seq_length", "data.max_length"), ("max_length", "data.max_length")):  # fmt: skip
        if known.get(key) is not None:
            draft.take(ours, known.pop(key))
    draft.convert("Transformers", known, beside=known, is_whole=is_whole)
    if "train.steps" in draft.values:
        draft.values.pop("train.epochs", None)
    if is_whole:
        draft.note("the file names every argument; those without a counterpart are not listed")


def _lightning(config: Section, draft: Draft) -> None:
    trainer = {
        key: value for key, value in cast("Section", config["trainer"]).items() if value is not None
    }
    flat = flatten({key: value for key, value in config.items() if key != "trainer"})
    batch = next((value for key, value in flat.items() if key.endswith("batch_size")), None)
    callbacks = trainer.pop("callbacks", None) or []
    logger = trainer.pop("logger", None)
    draft.convert("Lightning", trainer, beside={**trainer, "batch_size": batch})
    if isinstance(config.get("seed_everything"), int) and not isinstance(
        config["seed_everything"], bool
    ):
        draft.take("train.seed", config["seed_everything"])
    if batch is not None:
        devices = trainer.get("devices")
        count = devices if isinstance(devices, int) and devices > 0 else 1
        draft.take("train.batch", batch * count if isinstance(batch, int) else batch)
    for entry in callbacks if isinstance(callbacks, list) else [callbacks]:
        _callback(entry, draft)
    for entry in logger if isinstance(logger, list) else [logger]:
        _logger(entry, draft)
    _optimizer(config, draft)
    _own_code(config, draft)


def _callback(entry: Any, draft: Draft) -> None:
    name, arguments = _component(entry)
    if name in {"EarlyStopping", "ModelCheckpoint"}:
        draft.convert("Lightning", arguments, within=f"{name}.")
    elif name:
        draft.leave(f"callbacks: {name}", NO_CODE)


def _logger(entry: Any, draft: Draft) -> None:
    name, _ = _component(entry)
    if name == "WandbLogger":
        draft.take("trackers", ["wandb"])
    elif name == "MLFlowLogger":
        draft.take("trackers", ["mlflow"])
    elif name and name != "TensorBoardLogger":
        draft.leave(f"logger: {name}", "trackers are wandb, mlflow or your own module:Class")


def _optimizer(config: Section, draft: Draft) -> None:
    name, arguments = _component(config.get("optimizer"))
    if name:
        try:
            for key, value in optimizer_keys(name).items():
                draft.take(key, value)
        except NotTakenError as reason:
            draft.leave(f"optimizer: {name}", str(reason))
        for theirs in ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov"):
            if theirs in arguments:
                draft.take(f"train.optimizer.{theirs}", arguments[theirs])
    name, arguments = _component(config.get("lr_scheduler"))
    if name:
        try:
            for key, value in schedule_keys(name).items():
                draft.take(key, value)
        except NotTakenError as reason:
            draft.leave(f"lr_scheduler: {name}", str(reason))


def _own_code(config: Section, draft: Draft) -> None:
    path, arguments = _class_path(config.get("model")), _component(config.get("model"))[1]
    if path and ":" not in path:
        module, _, name = path.rpartition(".")
        draft.take("model.name", f"{module}:{name}")
        optimisation = {"lr", "learning_rate", "weight_decay"}
        for key, value in arguments.items():
            if key in optimisation:
                draft.take(f"train.optimizer.{key.replace('learning_rate', 'lr')}", value)
            else:
                draft.take(f"model.args.{key}", value)
        draft.note(
            f"{module}:{name} is used as a torch module: its forward must take the inputs of the task and "
            "give logits; training_step and configure_optimizers are not called"
        )
    name, arguments = _component(config.get("data"))
    for key in ("data_dir", "root", "path", "train_file"):
        if isinstance(arguments.get(key), str):
            draft.take("data.train", arguments[key])
            return
    if name:
        draft.leave(
            f"data: {name}",
            "a DataModule is code: name its files in data.train, data.validation, data.test",
        )
    if config.get("ckpt_path"):
        draft.leave("ckpt_path", RUNS)


def _class_path(entry: Any) -> str:
    if not isinstance(entry, dict):
        return ""
    return str(cast("Section", entry).get("class_path", ""))


def _component(entry: Any) -> tuple[str, Section]:
    """Name and arguments of ``{class_path: a.b.C, init_args: {...}}``."""
    if not isinstance(entry, dict):
        return "", {}
    section = cast("Section", entry)
    inner = section.get("init_args", {})
    return _class_path(section).rpartition(".")[2], cast("Section", inner) if isinstance(
        inner, dict
    ) else {}


def _torchtune(flat: Section, draft: Draft) -> None:
    draft.take("task", "language-modeling")
    draft.convert("torchtune", flat, beside=flat)
    directory = draft.values.get("model.name")
    if isinstance(directory, str):
        draft.values["model.name"] = f"hf:{directory}"
    draft.note("a Hugging Face directory is expected where the recipe has torchtune's own model")
