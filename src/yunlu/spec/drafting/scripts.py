"""Training scripts of Transformers, Lightning, Keras and torch: what their calls say of a job."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from yunlu.spec.counterparts import counterpart as c
from yunlu.spec.counterparts.counterpart import NotTakenError, Taken
from yunlu.spec.counterparts.optimizers import optimizer_keys, schedule_keys
from yunlu.spec.counterparts.table import by_name
from yunlu.spec.drafting.keras_models import draft_keras_model
from yunlu.spec.drafting.script import Script, ScriptCall, UnknownValueError, read_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from yunlu.spec.drafting.draft import Draft

_UNKNOWN = "only running the script would tell its value"
_HF_TASKS = {
    "SequenceClassification": "text-classification",
    "CausalLM": "language-modeling",
    "LMHeadModel": "language-modeling",
    "Seq2SeqLM": "seq2seq",
    "ConditionalGeneration": "seq2seq",
    "ImageClassification": "image-classification",
    "AudioClassification": "keyword-spotting",
    "ForCTC": "speech-to-text",
}
_SKLEARN = {"digits", "iris", "wine", "breast_cancer", "diabetes"}
_LIGHTNING = ("lightning", "pytorch_lightning")
_KERAS = ("keras", "tensorflow", "tf_keras", "scikeras")
_FORMATS = {"csv", "json", "text", "parquet"}


def draft_script(text: str, draft: Draft) -> None:
    """Draft from a script, which is parsed and never run."""
    script = read_script(text, draft.source)
    _Drafting(script, draft).run()


class _Drafting:
    """One script; each kind of call has a method."""

    def __init__(self, script: Script, draft: Draft) -> None:
        self.script, self.draft = script, draft
        self.uses_lightning = bool(script.imported & {*_LIGHTNING})
        self.uses_keras = bool(script.imported & {*_KERAS})
        self.batch: Any = None
        self.tokenizers = self._assigned_by("from_pretrained", "Tokenizer")

    def run(self) -> None:
        """Every call in its order, then what no call says."""
        self._find_batch()
        for call in self.script.calls:
            if handle := self._handler(call):
                handle(call)
        if self.uses_keras:
            draft_keras_model(self.script, self.draft)
            if (
                "train.optimizer.name" in self.draft.values
                and "train.schedule.name" not in self.draft.values
            ):
                self.draft.note(
                    "Keras keeps the learning rate; here it falls by default: train.schedule: constant keeps it"
                )
        self._own_classes()
        self._finalize()

    def _handler(self, call: ScriptCall) -> Callable[[ScriptCall], None] | None:
        for is_ours, handle in (
            (call.last.endswith("TrainingArguments") or call.last == "SFTConfig", self._training_arguments),
            (call.last == "Trainer" and call.is_of(*_LIGHTNING), self._lightning_trainer),
            (call.last.endswith("Trainer") and call.is_of("transformers", "trl"), self._hf_trainer),
            (call.last == "from_pretrained", self._from_pretrained),
            (call.last == "load_dataset", self._load_dataset),
            (call.last == "EarlyStoppingCallback", self._hf_early_stopping),
            (call.last == "LoraConfig", self._lora),
            (call.last in {"EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"}, self._callback),
            (call.last in {"WandbLogger", "MLFlowLogger", "WandbCallback", "WandbMetricsLogger"}, self._logger),
            (call.last == "DataLoader", self._loader),
            (call.last in {"GradScaler", "autocast", "set_global_policy", "set_policy"}, self._precision),
            (call.last == "LossScaleOptimizer", self._loss_scaling),
            (call.last in {"clip_grad_norm_", "clip_grad_value_"}, self._clip),
            (call.last in {"manual_seed", "set_seed", "seed_everything", "set_random_seed"}, self._seed),
            (call.last.endswith("Strategy") and call.is_of("tensorflow"), self._strategy),
            (call.last in {"DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"}, self._parallel),
            (".optimizers." in call.name and self.uses_keras, self._keras_optimizer),
            (call.name.startswith("torch.optim.lr_scheduler."), self._schedule),
            (call.last.startswith("get_") and call.last.endswith("_with_warmup"), self._schedule),
            (call.name.startswith(("torch.optim.", "bitsandbytes.optim.")), self._torch_optimizer),
            (call.last == "CrossEntropyLoss" and call.is_of("torch"), self._cross_entropy),
            (call.name == ".compile" and self.uses_keras, self._keras_call),
            (call.name == ".fit" and self.uses_keras and "epochs" in call.keywords, self._keras_call),
            (call.last in {"KerasClassifier", "KerasRegressor"}, self._keras_call),
            (call.last in {"GridSearchCV", "RandomizedSearchCV"}, self._search),
            (call.last == "load_model" and self.uses_keras, self._load_model),
            (call.last in {"image_dataset_from_directory", "text_dataset_from_directory", "ImageFolder",
                           "flow_from_directory"}, self._folder),
            (call.last in {"read_csv", "read_parquet", "read_json"}, self._table),
            (call.last.startswith("load_") and call.last[5:] in _SKLEARN, self._sklearn),
            (call.last == "train_test_split", self._split),
            (self._is_tokenizing(call), self._tokenizing),
            (call.last in {"load_metric", "compute_metrics"} or call.name == "evaluate.load", self._metric),
        ):  # fmt: skip
            if is_ours:
                return handle
        return None

    # -- Transformers -----------------------------------------------------------------------------

    def _training_arguments(self, call: ScriptCall) -> None:
        settings, lines = self._settings(call, "Transformers", ("output_dir",))
        self.draft.convert("Transformers", settings, lines=lines)
        if "train.steps" in self.draft.values:
            self.draft.values.pop("train.epochs", None)
        elif not call.keywords.keys() & {"num_train_epochs", "max_steps"}:
            self.draft.take("train.epochs", 3)  # its default, which decides how much is trained
        defaults = {
            "learning_rate": "5e-5",
            "per_device_train_batch_size": "8",
            "lr_scheduler_type": "linear",
        }
        unsaid = [f"{name} {value}" for name, value in defaults.items() if name not in settings]
        if unsaid:
            self.draft.note(
                f"Transformers' defaults are not taken over, the plan chooses: {', '.join(unsaid)}"
            )

    def _hf_trainer(self, call: ScriptCall) -> None:
        reasons = {
            "compute_metrics": c.TASK_METRICS,
            "data_collator": "each task pads and collates by itself; see train.padding",
            "optimizers": "the job names its optimiser: train.optimizer, train.schedule",
            "callbacks": "early stopping and trackers have keys; other code does not stand in a job file",
            "preprocess_logits_for_metrics": c.TASK_METRICS,
            "compute_loss_func": c.TASK_LOSS,
        }
        for name in reasons.keys() & call.keywords.keys():
            is_stopping = name == "callbacks" and "EarlyStopping" in ast.dump(call.keywords[name])
            if not is_stopping:
                self.draft.leave(name, reasons[name], call.keywords[name].lineno)

    def _from_pretrained(self, call: ScriptCall) -> None:
        kind = call.name.split(".")[-2] if call.name.count(".") else ""
        node = (
            call.positional[0]
            if call.positional
            else call.keywords.get("pretrained_model_name_or_path")
        )
        name = self._value(node)
        if (
            "Tokenizer" in kind
            or "Processor" in kind
            or "FeatureExtractor" in kind
            or kind.endswith("Config")
        ):
            if isinstance(name, str) and "Tokenizer" in kind:
                self._tokenizer_name = name
            return
        task = next((task for end, task in _HF_TASKS.items() if kind.endswith(end)), None)
        if not isinstance(name, str):
            self.draft.leave(f"{kind}.from_pretrained", _UNKNOWN, call.line)
        elif task is None and kind:
            self.draft.leave(
                f"{kind}.from_pretrained({name!r})", "there is no task for this head", call.line
            )
        if isinstance(name, str):
            self.draft.take("model.name", f"hf:{name}")
            if "/" in name or not name.startswith("."):
                self.draft.note(
                    f"hf:{name} is a directory or a name of the hub; pin the latter with @COMMIT"
                )
        if task is not None:
            self.draft.take("task", task)
        for label in {"num_labels", "id2label", "label2id"} & call.keywords.keys():
            self.draft.leave(label, "labels are found in the data", call.line)

    def _load_dataset(self, call: ScriptCall) -> None:
        name = self._value(call.positional[0] if call.positional else call.keywords.get("path"))
        files = self._value(call.keywords.get("data_files"))
        if isinstance(files, dict):
            for part, ours in (("train", "train"), ("validation", "validation"), ("valid", "validation"),
                               ("dev", "validation"), ("test", "test")):  # fmt: skip
                if part in files:
                    self.draft.take(f"data.{ours}", _first(files[part]))
        elif files is not None:
            self.draft.take("data.train", _first(files))
        elif isinstance(name, str) and name not in _FORMATS:
            self.draft.take("data.train", f"hf:{name}")
            self.draft.note(f"pin the data with a commit: hf:{name}@COMMIT")
            if len(call.positional) > 1:
                self.draft.leave(f"configuration {self._value(call.positional[1])!r} of {name}",
                                 "name its files, or save it with Dataset.to_parquet", call.line)  # fmt: skip
        else:
            self.draft.leave("load_dataset", _UNKNOWN, call.line)

    def _hf_early_stopping(self, call: ScriptCall) -> None:
        settings, lines = self._settings(
            call, "Transformers", ("early_stopping_patience", "early_stopping_threshold")
        )
        self.draft.convert("Transformers", {"early_stopping_patience": 1, **settings}, lines=lines)

    def _lora(self, call: ScriptCall) -> None:
        self.draft.take("model.adapter.name", "lora")
        settings, lines = self._settings(call, "PEFT")
        self.draft.convert("PEFT", settings, lines=lines)

    def _is_tokenizing(self, call: ScriptCall) -> bool:
        return call.name in self.tokenizers or (
            call.name.partition(".")[0] in self.tokenizers
            and call.last in {"encode", "encode_plus", "batch_encode_plus"}
        )

    def _tokenizing(self, call: ScriptCall) -> None:
        settings, lines = self._settings(call, "Transformers")
        if isinstance(settings.get("max_length"), int):
            self.draft.take("data.max_length", settings["max_length"])
        if settings.get("padding") == "max_length":
            self.draft.leave("padding='max_length'", "a batch is padded to its own longest text, or not at all: train.padding",
                             lines.get("padding"))  # fmt: skip
        columns = [
            node.slice.value
            for node in call.positional
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
            if isinstance(node.slice.value, str)
        ]
        if columns:
            self.draft.take("data.input", columns[0] if len(columns) == 1 else columns)

    def _metric(self, call: ScriptCall) -> None:
        self.draft.leave(call.last, c.TASK_METRICS, call.line)

    # -- Lightning, torch -------------------------------------------------------------------------

    def _lightning_trainer(self, call: ScriptCall) -> None:
        settings, lines = self._settings(call, "Lightning")
        settings.pop("callbacks", None)
        if not isinstance(settings.get("logger"), bool | str):
            settings.pop("logger", None)
        self.draft.convert("Lightning", settings, beside={"batch_size": self.batch}, lines=lines)
        devices = settings.get("devices")
        if isinstance(self.batch, int) and isinstance(devices, int) and devices > 1:
            self.draft.take("train.batch", self.batch * devices)

    def _callback(self, call: ScriptCall) -> None:
        if call.name.startswith("torch.optim"):
            self._schedule(call)
            return
        tool = "Lightning" if call.is_of(*_LIGHTNING) else "Keras"
        positional = {
            "EarlyStopping": ("monitor",),
            "ModelCheckpoint": ("filepath",),
            "ReduceLROnPlateau": ("monitor",),
        }
        settings, lines = self._settings(call, tool, positional[call.last], within=f"{call.last}.")
        if call.last == "EarlyStopping":
            settings = {"patience": 3 if tool == "Lightning" else 1, **settings}
            settings["patience"] = (
                max(settings["patience"], 1)
                if isinstance(settings["patience"], int)
                else settings["patience"]
            )
        self.draft.convert(tool, settings, lines=lines, within=f"{call.last}.")

    def _logger(self, call: ScriptCall) -> None:
        self.draft.take("trackers", ["mlflow" if "MLFlow" in call.last else "wandb"])

    def _find_batch(self) -> None:
        """The batch of the loader that shuffles, else of the first."""
        loaders = [call for call in self.script.calls if call.last == "DataLoader"]
        loaders.sort(key=lambda call: self._value(call.keywords.get("shuffle")) is not True)
        if loaders:
            node = (
                loaders[0].positional[1]
                if len(loaders[0].positional) > 1
                else loaders[0].keywords.get("batch_size")
            )
            self.batch = self._value(node)

    def _loader(self, call: ScriptCall) -> None:
        if self.batch is not None and not self.uses_lightning:
            self.draft.take("train.batch", self.batch)
        workers = self._value(call.keywords.get("num_workers"))
        if isinstance(workers, int) and workers > 0:
            self.draft.take("train.workers", workers)

    def _torch_optimizer(self, call: ScriptCall) -> None:
        names = ("params", "lr")
        arguments = dict(zip(names, call.positional, strict=False)) | call.keywords
        taken = self._named(call, lambda: optimizer_keys(call.last))
        for name in ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov"):
            value = self._value(arguments.get(name))
            if value is not None:
                self.draft.take(f"train.optimizer.{name}", value)
            elif name in arguments:
                self.draft.leave(f"{name}={ast.unparse(arguments[name])}"[:60], _UNKNOWN, call.line)
        if taken.get("train.optimizer.name") == "sgd" and self._value(arguments.get("momentum")):
            self.draft.values["train.optimizer.name"] = "momentum"

    def _schedule(self, call: ScriptCall) -> None:
        if not self._named(call, lambda: schedule_keys(call.last)):
            return
        for theirs, ours in (
            ("factor", "factor"),
            ("patience", "patience"),
            ("num_warmup_steps", "warmup"),
        ):
            value = self._value(call.keywords.get(theirs))
            if value is not None:
                self.draft.take(f"train.schedule.{ours}", value)

    def _precision(self, call: ScriptCall) -> None:
        if call.last.startswith("set_"):
            policy = self._value(call.positional[0] if call.positional else None)
            chosen = {"mixed_float16": "fp16", "mixed_bfloat16": "bf16", "float32": "fp32"}.get(
                str(policy)
            )
            if chosen:
                self.draft.take("train.precision", chosen)
            else:
                self.draft.leave(
                    f"{call.last}({policy!r})", "weights stay in FP32: train.precision", call.line
                )
            return
        kinds = [self._value(node) for node in (*call.positional, *call.keywords.values())]
        is_bf16 = any("bfloat16" in str(kind) for kind in kinds)
        if call.last == "GradScaler" or is_bf16:
            self.draft.take("train.precision", "bf16" if is_bf16 else "fp16")
        elif not any(other.last == "GradScaler" for other in self.script.calls):
            self.draft.take("train.precision", "fp16")
        if call.last == "GradScaler":
            self.draft.leave("GradScaler", c.SCALED, call.line)

    def _loss_scaling(self, call: ScriptCall) -> None:
        self.draft.take("train.precision", "fp16")
        self.draft.leave("LossScaleOptimizer", c.SCALED, call.line)

    def _clip(self, call: ScriptCall) -> None:
        node = (
            call.positional[1]
            if len(call.positional) > 1
            else next(iter(call.keywords.values()), None)
        )
        value = self._value(node)
        key = "train.clip.norm" if call.last == "clip_grad_norm_" else "train.clip.value"
        if value is None:
            self.draft.leave(call.last, _UNKNOWN, call.line)
        else:
            self.draft.take(key, value)

    def _seed(self, call: ScriptCall) -> None:
        value = self._value(call.positional[0] if call.positional else call.keywords.get("seed"))
        if isinstance(value, int) and not isinstance(value, bool):
            self.draft.take("train.seed", value)

    def _strategy(self, call: ScriptCall) -> None:
        self.draft.leave(
            call.last,
            "all GPUs of a machine are used by default; say devices: N, or a layout",
            call.line,
        )

    def _parallel(self, call: ScriptCall) -> None:
        self.draft.leave(
            call.last,
            "the layout over devices is chosen, or pinned by layout: dp2 or fsdp2",
            call.line,
        )

    def _cross_entropy(self, call: ScriptCall) -> None:
        smoothing = self._value(call.keywords.get("label_smoothing"))
        if smoothing:
            self.draft.take("train.label_smoothing", smoothing)
        if "weight" in call.keywords:
            self.draft.leave(
                "CrossEntropyLoss(weight=...)", "weights of classes are not offered", call.line
            )

    # -- Keras, scikit-learn ----------------------------------------------------------------------

    def _keras_optimizer(self, call: ScriptCall) -> None:
        if call.last.endswith(("Decay", "Schedule", "Restarts")):
            self._schedule(call)
            return
        settings, lines = self._settings(call, "Keras", ("learning_rate",))
        if "lr" in settings:  # the spelling of Keras 1 and 2
            settings["learning_rate"] = settings.pop("lr")
        if self._named(call, lambda: optimizer_keys(call.last)):
            self.draft.convert("Keras", settings, lines=lines)
            if call.last == "SGD" and settings.get("momentum"):
                self.draft.values["train.optimizer.name"] = "momentum"

    def _keras_call(self, call: ScriptCall) -> None:
        positional = {".compile": ("optimizer", "loss"), ".fit": ("x", "y", "batch_size", "epochs")}
        settings, lines = self._settings(call, "Keras", positional.get(call.name, ()))
        optimizer = settings.get("optimizer")
        if not isinstance(optimizer, str):  # an object: looked at where it is made
            settings.pop("optimizer", None)
        for name in ("callbacks", "model", "build_fn", "x", "y"):
            settings.pop(name, None)
        self._guess_task_by_loss(settings.get("loss"))
        self.draft.convert("Keras", settings, lines=lines)

    def _guess_task_by_loss(self, loss: Any) -> None:
        if isinstance(loss, str) and "task" not in self.draft.values:
            self._loss = (
                "regression" if "error" in loss or loss in {"mse", "mae"} else "classification"
            )

    def _search(self, call: ScriptCall) -> None:
        node = call.keywords.get("param_grid") or call.keywords.get("param_distributions")
        node = node or (call.positional[1] if len(call.positional) > 1 else None)
        grid = self._value(node)
        if not isinstance(grid, dict):
            self.draft.leave(call.last, _UNKNOWN, call.line)
            return
        self.draft.take("search.method", "grid" if call.last == "GridSearchCV" else "random")
        homes = {"learning_rate": "train.optimizer.lr", "lr": "train.optimizer.lr", "batch_size": "train.batch",
                 "epochs": "train.epochs", "dropout": "model.args.dropout", "hidden": "model.args.hidden",
                 "optimizer": "train.optimizer.name"}  # fmt: skip
        for name, choices in grid.items():
            plain = str(name).rpartition("__")[2]
            if plain in homes and isinstance(choices, list):
                self.draft.take(f"search.space.{homes[plain]}", choices)
            else:
                self.draft.leave(
                    f"{name} of the grid", "no field of a job is known for it", call.line
                )
        self.draft.note(
            "each setting is scored on the validation data, not by cross-validation: yunlu tune"
        )

    def _load_model(self, call: ScriptCall) -> None:
        name = self._value(call.positional[0] if call.positional else None)
        if isinstance(name, str):
            self.draft.take("model.name", name)
            if not name.endswith(".keras"):
                self.draft.note(
                    f"{name}: only .keras files are read; save it again with model.save('model.keras')"
                )

    def _folder(self, call: ScriptCall) -> None:
        node = (
            call.positional[0]
            if call.positional
            else call.keywords.get("directory", call.keywords.get("root"))
        )
        folder = self._value(node)
        if isinstance(folder, str):
            self.draft.take("data.train", folder)
        else:
            self.draft.leave(call.last, _UNKNOWN, call.line)
        self.draft.take(
            "task",
            "text-classification" if call.last.startswith("text") else "image-classification",
        )
        size = self._value(call.keywords.get("image_size", call.keywords.get("target_size")))
        if isinstance(size, list) and size and size[0] == size[-1]:
            self.draft.take("data.image_size", size[0])
        for name, key in (
            ("validation_split", "data.split.validation"),
            ("batch_size", "train.batch"),
            ("seed", "train.seed"),
        ):
            value = self._value(call.keywords.get(name))
            if value is not None:
                self.draft.take(key, value)

    def _table(self, call: ScriptCall) -> None:
        path = self._value(
            call.positional[0] if call.positional else call.keywords.get("filepath_or_buffer")
        )
        if not isinstance(path, str):
            self.draft.leave(call.last, _UNKNOWN, call.line)
            return
        part = next(
            (
                part
                for part in ("validation", "valid", "val", "dev", "test")
                if part in path.lower().split("/")[-1]
            ),
            "",
        )
        ours = "test" if part == "test" else "validation" if part else "train"
        self.draft.take(f"data.{ours}", path)

    def _sklearn(self, call: ScriptCall) -> None:
        name = call.last.removeprefix("load_")
        self.draft.take("data.train", f"sklearn:{name}")
        self._fallback_task = (
            "tabular-regression" if name == "diabetes" else "tabular-classification"
        )

    def _split(self, call: ScriptCall) -> None:
        share = self._value(call.keywords.get("test_size"))
        if isinstance(share, float) and 0 < share < 1:
            self.draft.take("data.split.test", share)
        seed = self._value(call.keywords.get("random_state"))
        if isinstance(seed, int):
            self.draft.take("train.seed", seed)

    # -- What no call says ------------------------------------------------------------------------

    def _own_classes(self) -> None:
        for name, bases in self.script.classes.items():
            base = " ".join(bases)
            methods = self.script.methods[name]
            line = min(methods.values(), default=None)
            if "Trainer" in base:
                self.draft.leave(
                    f"class {name}",
                    "a Trainer of your own: its loss or its steps belong into a task, see docs/tasks.md",
                    line,
                )
            elif (
                any(
                    base.endswith(end)
                    for end in ("LightningModule", "nn.Module", "torch.nn.Module")
                )
                and "forward" in methods
            ):
                self.draft.take("model.name", f"{self.draft.source}:{name}")
                if self.draft.values["model.name"] == f"{self.draft.source}:{name}":
                    self.draft.note(
                        f"{self.draft.source} is imported for {name}: keep what trains below if __name__ == '__main__', "
                        "and give its arguments defaults or model.args; its forward takes the inputs of the task and gives logits"
                    )
            for method, why in (
                (
                    "training_step",
                    "the loss is that of the task; see docs/tasks.md for one of your own",
                ),
                ("validation_step", c.TASK_METRICS),
                ("configure_optimizers", ""),
            ):
                if method in methods and why and "LightningModule" in base:
                    self.draft.leave(f"{name}.{method}", why, methods[method])

    _loss = ""
    _fallback_task = ""
    _tokenizer_name = ""

    def _finalize(self) -> None:
        values = self.draft.values
        name = str(values.get("model.name", "")).removeprefix("hf:")
        if self._tokenizer_name and name and self._tokenizer_name != name:
            self.draft.take("data.tokenizer", self._tokenizer_name)
        if self._fallback_task:
            self.draft.take("task", self._fallback_task)
        elif self._loss and str(values.get("data.train", "")).endswith(
            (".csv", ".parquet", ".tsv")
        ):
            self.draft.take("task", f"tabular-{self._loss}")
        if values.get("model.name") == "mlp" and not str(values.get("task", "tabular")).startswith(
            "tabular"
        ):
            for key in [key for key in values if key.startswith("model.")]:
                self.draft.leave(
                    f"{key}={values.pop(key)}",
                    f"{values['task']} has no model mlp: name a module of your own",
                )
        if str(values.get("data.train", "")).endswith(".txt") and values.pop("data.input", None):
            self.draft.note("columns of a text file have no names: each line is label<TAB>text")

    # -- Values -----------------------------------------------------------------------------------

    def _settings(
        self, call: ScriptCall, tool: str, positional: tuple[str, ...] = (), *, within: str = ""
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """The arguments whose values stand in the file; the others are listed."""
        nodes = dict(zip(positional, call.positional, strict=False)) | call.keywords
        rows = by_name(tool)
        settings: dict[str, Any] = {}
        for name, node in nodes.items():
            row = rows.get(f"{within}{name}")
            try:
                settings[name] = self.script.value(node)
            except UnknownValueError:
                if row is not None:
                    why = _UNKNOWN if row.keys else row.remark
                    if name not in {"optimizer", "callbacks", "x", "y", "logger"}:
                        self.draft.leave(f"{name}={ast.unparse(node)}"[:60], why, node.lineno)
        return settings, {name: node.lineno for name, node in nodes.items()}

    def _value(self, node: ast.expr | None) -> Any:
        try:
            return self.script.value(node)
        except UnknownValueError:
            return None

    def _named(self, call: ScriptCall, find: Callable[[], Taken]) -> Taken:
        try:
            taken = find()
        except NotTakenError as reason:
            self.draft.leave(call.last, str(reason), call.line)
            return {}
        for key, value in taken.items():
            self.draft.take(key, value)
        return taken

    def _assigned_by(self, method: str, kind: str) -> set[str]:
        """Names of variables that ``Kind.method(...)`` is assigned to."""
        variables: set[str] = set()
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                name = self.script.full_name(node.value.func) or ""
                if name.endswith(f".{method}") and kind in name:
                    variables |= {
                        target.id for target in node.targets if isinstance(target, ast.Name)
                    }
        return variables


def _first(files: Any) -> Any:
    return files[0] if isinstance(files, list) and files else files
