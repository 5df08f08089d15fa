"""``Trainer`` of Lightning, and the arguments of its usual callbacks."""

from __future__ import annotations

from typing import Any

from yunlu.spec.counterparts import counterpart as c
from yunlu.spec.counterparts.counterpart import NotTakenError, Settings, Take, Taken, Tool

_L = Tool("Lightning")
_PRECISION = {
    "16-mixed": "fp16", "16": "fp16", 16: "fp16", "bf16-mixed": "bf16", "bf16": "bf16",
    "32-true": "fp32", "32": "fp32", 32: "fp32", "transformer-engine": "fp8",
}  # fmt: skip


def _devices(value: Any, settings: Settings) -> Taken:
    nodes = c.count_or(settings, "num_nodes", 1)
    if isinstance(value, list):
        return {"devices": len(value) * nodes}
    return {} if c.whole(value) < 1 else {"devices": c.whole(value) * nodes}


def _nodes(value: Any, settings: Settings) -> Taken:
    devices = settings.get("devices")
    if c.whole(value) == 1:
        return {}
    if c.is_unsaid(devices) or isinstance(devices, list):
        raise NotTakenError("here devices counts those of all machines; say devices: N")
    return {"devices": c.whole(devices) * c.whole(value)}


def _strategy(value: Any, settings: Settings) -> Taken:
    name, devices = str(value).lower(), settings.get("devices")
    if not isinstance(devices, int) or devices < 2:
        raise NotTakenError(
            "the plan chooses the layout; to pin it, say devices and layout: dp4 or fsdp4"
        )
    count = devices * c.count_or(settings, "num_nodes", 1)
    if name.startswith(("fsdp", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed")):
        return {"layout.fsdp": count}
    if name.startswith("ddp"):
        return {"layout.dp": count}
    raise NotTakenError(f"{value!r} is not offered: layout takes dp, fsdp, tp and pp")


def _precision(value: Any, _: Settings) -> Taken:
    if value not in _PRECISION:
        raise NotTakenError(
            f"{value!r} is not offered: weights stay in FP32, under fp32, tf32, bf16, fp16 or fp8"
        )
    return {"train.precision": _PRECISION[value]}


def _clip(value: Any, settings: Settings) -> Taken:
    by_value = settings.get("gradient_clip_algorithm") == "value"
    if by_value:
        return {"train.clip.norm": None, "train.clip.value": value}
    return {"train.clip.norm": value if c.number(value) > 0 else None}


def _clip_algorithm(value: Any, settings: Settings) -> Taken:
    amount = settings.get("gradient_clip_val")
    return {} if c.is_unsaid(amount) else _clip(amount, {"gradient_clip_algorithm": value})


def _accumulation(value: Any, settings: Settings) -> Taken:
    if c.whole(value) <= 1:
        return {}
    batch = settings.get("batch_size")
    if c.is_unsaid(batch):
        raise NotTakenError("say train.batch (a whole step) and train.micro_batch (one pass)")
    return c.global_batch(batch, c.whole(value), c.count_or(settings, "devices", 1))


def _interval(value: Any, _: Settings) -> Taken:
    if isinstance(value, float):
        if value == 1.0:
            return {"train.evaluate": "epoch"}
        raise NotTakenError("a share of an epoch is not taken here: say steps, or epoch")
    return {"train.evaluate": c.whole(value)}


def _every_epochs(value: Any, _: Settings) -> Taken:
    if c.whole(value) != 1:
        raise NotTakenError("train.evaluate takes steps, epoch or never")
    return {"train.evaluate": "epoch"}


def _top_k(value: Any, _: Settings) -> Taken:
    if c.whole(value) < 0:
        raise NotTakenError(
            "not every checkpoint is kept: say how many, train.checkpoint.keep_last"
        )
    return {"train.checkpoint.keep_best": c.whole(value)}


def _save_epochs(value: Any, _: Settings) -> Taken:
    if c.whole(value) != 1:
        raise NotTakenError("train.checkpoint.every takes steps, epoch or auto")
    return {"train.checkpoint.every": "epoch"}


def _metric(key: str) -> Take:
    return lambda value, _: {key: c.metric_name(value)}


LIGHTNING = [
    _L.same("max_epochs", "train.epochs"),
    _L.number("max_steps", "train.steps"),
    _L.row("devices", "devices", take=_devices),
    _L.row("num_nodes", "devices", take=_nodes, remark="here devices counts those of all machines"),
    _L.row("strategy", "layout.dp", "layout.fsdp", take=_strategy),
    _L.row("precision", "train.precision", take=_precision),
    _L.row("gradient_clip_val", "train.clip.norm", "train.clip.value", take=_clip),
    _L.row("gradient_clip_algorithm", "train.clip.norm", "train.clip.value", take=_clip_algorithm),
    _L.row("accumulate_grad_batches", "train.batch", "train.micro_batch", take=_accumulation,
           remark="here train.batch is a whole step, and train.micro_batch a pass of it"),
    _L.row("val_check_interval", "train.evaluate", take=_interval),
    _L.row("check_val_every_n_epoch", "train.evaluate", take=_every_epochs),
    _L.word("deterministic", "train.deterministic", {True: True, False: False, "warn": True}),
    _L.row("profiler", "train.profile", take=lambda _value, _: {"train.profile": True}),
    _L.same("seed_everything", "train.seed"),
    _L.same("EarlyStopping.patience", "train.early_stopping.patience"),
    _L.number("EarlyStopping.min_delta", "train.early_stopping.min_delta"),
    _L.row("EarlyStopping.monitor", "train.early_stopping.metric", take=_metric("train.early_stopping.metric")),
    _L.row("ModelCheckpoint.monitor", "train.checkpoint.metric", take=_metric("train.checkpoint.metric")),
    _L.row("ModelCheckpoint.save_top_k", "train.checkpoint.keep_best", take=_top_k),
    _L.same("ModelCheckpoint.every_n_train_steps", "train.checkpoint.every"),
    _L.row("ModelCheckpoint.every_n_epochs", "train.checkpoint.every", take=_save_epochs),
    _L.same("StochasticWeightAveraging.swa_lrs", "train.ema",
            "here train.ema averages the weights, with a decay such as 0.999"),
    *_L.none("each callback is looked at by itself: early stopping, checkpoints and trackers have keys", "callbacks"),
    *_L.none("trackers: [wandb], [mlflow] or your own module:Class; TensorBoard is always written", "logger"),
    *_L.none("devices are found: --devices N, or YUNLU_ACCELERATORS=cpu", "accelerator"),
    *_L.none(c.QUICK, "fast_dev_run", "limit_train_batches", "limit_val_batches", "limit_test_batches",
             "limit_predict_batches", "overfit_batches", "barebones"),
    *_L.none("a run has one length: train.epochs or train.steps, less with train.early_stopping", "min_epochs", "min_steps"),
    *_L.none("goal.deadline chooses the hardware; a run is not cut", "max_time"),
    *_L.none("the plan measures a step before the first", "num_sanity_val_steps"),
    *_L.none(c.LOGGED, "log_every_n_steps", "enable_autolog_hparams"),
    *_L.none(c.SHOWN, "enable_progress_bar", "enable_model_summary"),
    *_L.none("a run always keeps a checkpoint, so that it can be resumed", "enable_checkpointing"),
    *_L.none("kernels are measured before the first step", "benchmark"),
    *_L.none(c.EVALUATED, "inference_mode"),
    *_L.none(c.LOADING, "use_distributed_sampler", "reload_dataloaders_every_n_epochs"),
    *_L.none(c.FINITE, "detect_anomaly"),
    *_L.none(c.NO_CODE, "plugins"),
    *_L.none("batch norm is synchronised over replicas by itself", "sync_batchnorm"),
    *_L.none(c.RUNS, "default_root_dir", "model_registry", "ModelCheckpoint.dirpath", "ModelCheckpoint.filename",
             "ModelCheckpoint.auto_insert_metric_name", "ModelCheckpoint.enable_version_counter"),
    *_L.none("checkpoints are complete, and the last ones are kept: train.checkpoint.keep_last", "ModelCheckpoint.save_last",
             "ModelCheckpoint.save_weights_only", "ModelCheckpoint.save_on_exception", "ModelCheckpoint.train_time_interval",
             "ModelCheckpoint.save_on_train_epoch_end"),
    *_L.none("what is larger, and what smaller, is better is known of each metric", "EarlyStopping.mode", "ModelCheckpoint.mode"),
    *_L.none(c.SHOWN, "EarlyStopping.verbose", "ModelCheckpoint.verbose", "EarlyStopping.log_rank_zero_only"),
    *_L.none(c.FINITE, "EarlyStopping.check_finite", "EarlyStopping.divergence_threshold"),
    *_L.none("not offered", "EarlyStopping.strict", "EarlyStopping.stopping_threshold", "EarlyStopping.check_on_train_epoch_end"),
    *_L.none(c.RESUMED, "ckpt_path"),
]  # fmt: skip
