"""The recipes of torchtune: YAML with ``_component_``; keys of a section stand after a dot."""

from __future__ import annotations

from typing import Any

from yunlu.spec.counterparts import counterpart as c
from yunlu.spec.counterparts.counterpart import NotTakenError, Settings, Taken, Tool
from yunlu.spec.counterparts.optimizers import optimizer_keys, schedule_keys

_T = Tool("torchtune")


def _batch(value: Any, settings: Settings) -> Taken:
    return c.global_batch(
        value,
        c.count_or(settings, "gradient_accumulation_steps", 1),
        c.count_or(settings, "devices", 1),
    )


def _accumulation(value: Any, settings: Settings) -> Taken:
    if c.whole(value) <= 1:
        return {}
    batch = settings.get("batch_size")
    if c.is_unsaid(batch):
        raise NotTakenError("say train.batch (a whole step) and train.micro_batch (one pass)")
    return c.global_batch(batch, c.whole(value), c.count_or(settings, "devices", 1))


def _files(value: Any, _: Settings) -> Taken:
    return {"data.train": value[0] if isinstance(value, list) and value else value}


def _source(value: Any, settings: Settings) -> Taken:
    if value in {"json", "csv", "text", "parquet"} and "dataset.data_files" in settings:
        return {}
    return {"data.train": f"hf:{value}"}


def _rank(value: Any, _: Settings) -> Taken:
    return {"model.adapter.name": "lora", "model.adapter.rank": value}


def _release(value: Any, _: Settings) -> Taken:
    return {"train.gradient_release": True, "train.clip.norm": None} if value is True else {}


def _tracker(value: Any, _: Settings) -> Taken:
    if "wandb" in str(value).lower():
        return {"trackers": ["wandb"]}
    return {}


TORCHTUNE = [
    _T.row("batch_size", "train.batch", "train.micro_batch", take=_batch, remark="here train.batch counts all devices"),
    _T.row("gradient_accumulation_steps", "train.batch", "train.micro_batch", take=_accumulation,
           remark="here train.batch is a whole step, and train.micro_batch a pass of it"),
    _T.same("epochs", "train.epochs"),
    _T.row("optimizer._component_", "train.optimizer.name", "train.optimizer.state", take=lambda value, _: optimizer_keys(value)),
    _T.same("optimizer.lr", "train.optimizer.lr"),
    _T.same("optimizer.weight_decay", "train.optimizer.weight_decay", "here biases and norms never decay"),
    _T.row("optimizer.betas", "train.optimizer.betas", take=lambda value, _: {"train.optimizer.betas": list(value)}),
    _T.same("optimizer.eps", "train.optimizer.eps"),
    _T.switch("optimizer.fused", "train.optimizer.kernel", "fused", remark="here auto takes the fastest"),
    _T.row("lr_scheduler._component_", "train.schedule.name", take=lambda value, _: schedule_keys(value)),
    _T.number("lr_scheduler.num_warmup_steps", "train.schedule.warmup"),
    _T.same("clip_grad_norm", "train.clip.norm"),
    _T.row(
        "optimizer_in_bwd",
        "train.gradient_release",
        "train.clip.norm",
        take=_release,
        remark="the whole gradient never exists then, so it cannot be clipped",
    ),
    _T.switch("compile", "train.compile", True),
    _T.word("dtype", "train.precision", {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}, "here weights stay in FP32"),
    _T.switch("enable_activation_checkpointing", "train.recompute", "full",
              remark="here auto recomputes only where memory is short"),
    _T.same("seed", "train.seed"),
    _T.number("run_val_every_n_steps", "train.evaluate"),
    _T.same("tensor_parallel_dim", "layout.tp"),
    _T.same("data_parallel_replicate_dim", "layout.dp"),
    _T.number("data_parallel_shard_dim", "layout.fsdp"),
    _T.row("model.lora_rank", "model.adapter.name", "model.adapter.rank", take=_rank),
    _T.same("model.lora_alpha", "model.adapter.alpha"),
    _T.same("model.lora_dropout", "model.adapter.dropout"),
    _T.row("model.lora_attn_modules", "model.adapter.targets",
           take=lambda value, _: {"model.adapter.targets": list(value)}, remark="here the ends of the layers' own names"),
    _T.same("tokenizer.max_seq_len", "data.max_length"),
    _T.row("dataset.source", "data.train", take=_source),
    _T.row("dataset.data_files", "data.train", take=_files),
    _T.switch("dataset.packed", "train.padding", "pack"),
    _T.same("dataset.column", "data.input"),
    _T.same("checkpointer.checkpoint_dir", "model.name", "here hf:DIRECTORY"),
    _T.row("metric_logger._component_", "trackers", take=_tracker, remark="here TensorBoard is always written"),
    _T.switch("profiler.enabled", "train.profile", True),
    _T.switch("cudnn_deterministic_mode", "train.deterministic", True),
    *_T.none("the head and the layers between get an update by name: model.adapter.targets", "model.apply_lora_to_mlp",
             "model.apply_lora_to_output"),
    *_T.none("not offered", "model.quantize_base", "model.use_dora", "dataset.train_on_input"),
    *_T.none("set train.steps for the whole run", "max_steps_per_epoch"),
    *_T.none("an epoch visits every sample once, in an order that the seed decides", "shuffle"),
    *_T.none(c.TASK_LOSS, "loss", "loss._component_"),
    *_T.none(c.LOGGED, "log_every_n_steps", "log_peak_memory_stats", "log_level"),
    *_T.none(c.RUNS, "output_dir", "checkpointer.output_dir", "metric_logger.log_dir", "metric_logger.project"),
    *_T.none("devices are found: --devices N, or YUNLU_ACCELERATORS=cpu", "device"),
    *_T.none(c.MEMORY, "enable_activation_offloading", "fsdp_cpu_offload", "custom_sharded_layers", "fsdp_reshard_after_forward"),
    *_T.none(c.RESUMED, "resume_from_checkpoint", "checkpointer.recipe_checkpoint", "enable_async_checkpointing", "save_last_epoch_only"),
    *_T.none("with model.adapter the export holds the adapter and the merged model", "save_adapter_weights_only"),
    *_T.none("read from the model's directory", "model._component_",
        "checkpointer._component_", "checkpointer.checkpoint_files",
             "checkpointer.model_type", "tokenizer._component_", "tokenizer.path"),
    *_T.none(
        "name the files, or hf:NAME, in data.train; rows are read as plain text",
        "dataset._component_",
    ),
    *_T.none(c.EVALUATED, "batch_size_val"),
]  # fmt: skip
