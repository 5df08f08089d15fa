"""``TrainingArguments`` of Transformers, with those of older versions, and PEFT's ``LoraConfig``."""

from __future__ import annotations

from typing import Any

from yunlu.spec.counterparts import counterpart as c
from yunlu.spec.counterparts.counterpart import NotTakenError, Settings, Taken, Tool
from yunlu.spec.counterparts.optimizers import optimizer_keys, schedule_keys

_T = Tool("Transformers")
_P = Tool("PEFT")
_ALL_DEVICES = "here train.batch counts all devices"
_BETAS = (0.9, 0.999)


def _per_device(value: Any, settings: Settings) -> Taken:
    return c.global_batch(
        value,
        c.count_or(settings, "gradient_accumulation_steps", 1),
        c.count_or(settings, "devices", 1),
    )


def _accumulation(value: Any, settings: Settings) -> Taken:
    if c.whole(value) <= 1:
        return {}
    per_device = settings.get("per_device_train_batch_size")
    if c.is_unsaid(per_device):
        raise NotTakenError(
            "here a micro-batch is said, and the batch is the sum: train.batch and train.micro_batch"
        )
    return c.global_batch(per_device, c.whole(value), c.count_or(settings, "devices", 1))


def _betas(value: Any, settings: Settings) -> Taken:
    given = [settings.get("adam_beta1"), settings.get("adam_beta2")]
    betas = [
        c.number(default if c.is_unsaid(beta) else beta)
        for beta, default in zip(given, _BETAS, strict=True)
    ]
    return (
        {}
        if betas == list(_BETAS) and c.number(value) in _BETAS
        else {"train.optimizer.betas": betas}
    )


def _evaluation(value: Any, settings: Settings) -> Taken:
    word = str(value).lower().rpartition(".")[2]
    if word == "epoch":
        return {"train.evaluate": "epoch"}
    if word == "no":
        return {"train.evaluate": "never"}
    if word != "steps":
        raise NotTakenError(f"{value!r} is not known: no, steps or epoch")
    steps = settings.get("eval_steps") or settings.get("logging_steps") or 500
    return {"train.evaluate": _steps(steps)}


def _eval_steps(value: Any, settings: Settings) -> Taken:
    strategy = settings.get("eval_strategy", settings.get("evaluation_strategy", "steps"))
    return {"train.evaluate": _steps(value)} if str(strategy).lower() == "steps" else {}


def _saving(value: Any, settings: Settings) -> Taken:
    word = str(value).lower().rpartition(".")[2]
    if word == "no":
        raise NotTakenError("a run always keeps a checkpoint, so that it can be resumed")
    if word == "best":
        return {"train.checkpoint.keep_best": 1}
    if word not in {"epoch", "steps"}:
        raise NotTakenError(f"{value!r} is not known: no, steps, epoch or best")
    return {
        "train.checkpoint.every": "epoch"
        if word == "epoch"
        else _steps(settings.get("save_steps") or 500)
    }


def _save_steps(value: Any, settings: Settings) -> Taken:
    is_steps = str(settings.get("save_strategy", "steps")).lower() == "steps"
    return {"train.checkpoint.every": _steps(value)} if is_steps else {}


def _steps(value: Any) -> int:
    if 0 < c.number(value) < 1:
        raise NotTakenError("a share of the run is not taken here: say steps, or epoch")
    return c.whole(value)


def _trackers(value: Any, _: Settings) -> Taken:
    names = [value] if isinstance(value, str) else list(value)
    known = [name for name in names if name in {"wandb", "mlflow"}]
    if other := set(names) - {"wandb", "mlflow", "tensorboard", "none", "all"}:
        raise NotTakenError(
            f"{', '.join(sorted(map(str, other)))}: trackers are wandb, mlflow or your own module:Class"
        )
    return {"trackers": known} if known else {}


def _final(value: Any, settings: Settings) -> Taken:
    options = value if isinstance(value, dict) else {}
    if c.is_unsaid(value) or not options:
        return {}
    if "min_lr_rate" in options:
        return {"train.schedule.final": options["min_lr_rate"]}
    if "min_lr" in options and not c.is_unsaid(settings.get("learning_rate")):
        return {
            "train.schedule.final": c.number(options["min_lr"])
            / c.number(settings["learning_rate"])
        }
    raise NotTakenError(
        "of these options train.schedule has only final, decay, factor and patience"
    )


def _fsdp(value: Any, _: Settings) -> Taken:
    if value in ([], False):
        return {}
    raise NotTakenError("say into how many shards: layout: fsdp8, or leave the layout to the plan")


def _length_strategy(value: Any, _: Settings) -> Taken:
    return {"train.padding": "bucket"} if value == "group_by_length" else {}


def _clip(value: Any, _: Settings) -> Taken:
    return {"train.clip.norm": value if c.number(value) > 0 else None}


def _warmup(value: Any, _: Settings) -> Taken:
    return {"train.schedule.warmup": value} if c.number(value) else {}


_precision = "here train.precision names the arithmetic"

TRANSFORMERS = [
    _T.row("per_device_train_batch_size", "train.batch", "train.micro_batch", take=_per_device, remark=_ALL_DEVICES),
    _T.row("per_gpu_train_batch_size", "train.batch", "train.micro_batch", take=_per_device, remark=_ALL_DEVICES),
    _T.row("gradient_accumulation_steps", "train.batch", "train.micro_batch", take=_accumulation,
           remark="here train.batch is a whole step, and train.micro_batch a pass of it"),
    _T.same("num_train_epochs", "train.epochs"),
    _T.number("max_steps", "train.steps"),
    _T.same("learning_rate", "train.optimizer.lr"),
    _T.same("weight_decay", "train.optimizer.weight_decay", "here biases and norms never decay"),
    _T.row("adam_beta1", "train.optimizer.betas", take=_betas),
    _T.row("adam_beta2", "train.optimizer.betas", take=_betas),
    _T.same("adam_epsilon", "train.optimizer.eps"),
    _T.row("optim", "train.optimizer.name", "train.optimizer.state",
           take=lambda value, _: optimizer_keys(str(value).rpartition("OptimizerNames.")[2])),
    _T.switch("adafactor", "train.optimizer.name", "adafactor", remark="here it comes with a package that registers it"),
    _T.row("lr_scheduler_type", "train.schedule.name", take=lambda value, _: schedule_keys(value)),
    _T.row("lr_scheduler_kwargs", "train.schedule.final", take=_final),
    _T.row("warmup_steps", "train.schedule.warmup", take=_warmup),
    _T.row("warmup_ratio", "train.schedule.warmup", take=_warmup, remark="here a number below 1 is a share"),
    _T.row("max_grad_norm", "train.clip.norm", take=_clip),
    _T.same("label_smoothing_factor", "train.label_smoothing"),
    _T.switch("bf16", "train.precision", "bf16", remark=_precision),
    _T.switch("fp16", "train.precision", "fp16", remark=_precision),
    _T.switch("tf32", "train.precision", "tf32", remark=_precision),
    _T.switch("gradient_checkpointing", "train.recompute", "full", remark="here auto recomputes only where memory is short"),
    _T.switch("torch_compile", "train.compile", True),
    _T.row("eval_strategy", "train.evaluate", take=_evaluation),
    _T.row("evaluation_strategy", "train.evaluate", take=_evaluation),
    _T.row("eval_steps", "train.evaluate", take=_eval_steps),
    _T.row("save_strategy", "train.checkpoint.every", "train.checkpoint.keep_best", take=_saving),
    _T.row("save_steps", "train.checkpoint.every", take=_save_steps),
    _T.number("save_total_limit", "train.checkpoint.keep_last"),
    _T.switch("load_best_model_at_end", "train.checkpoint.keep_best", 1, remark="here the best weights are exported by default"),
    _T.row("metric_for_best_model", "train.checkpoint.metric",
           take=lambda value, _: {"train.checkpoint.metric": c.metric_name(value)}, remark="here without eval_"),
    _T.same("seed", "train.seed"),
    _T.switch("full_determinism", "train.deterministic", True),
    _T.number("dataloader_num_workers", "train.workers"),
    _T.row("train_sampling_strategy", "train.padding", take=_length_strategy),
    _T.switch("group_by_length", "train.padding", "bucket"),
    _T.row("report_to", "trackers", take=_trackers, remark="here TensorBoard is always written"),
    _T.same("run_name", "name"),
    _T.row("fsdp", "layout.fsdp", take=_fsdp),
    *_T.none(c.RUNS, "output_dir", "overwrite_output_dir", "logging_dir"),
    *_T.none(c.LOGGED, "logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter",
             "include_num_input_tokens_seen", "include_tokens_per_second"),
    *_T.none(c.SHOWN, "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm"),
    *_T.none("the tracker reads its own variables, such as WANDB_PROJECT", "project", "trackio_space_id",
             "trackio_bucket_id", "trackio_static_space_id"),
    *_T.none(c.EVALUATED, "per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps",
             "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics", "bf16_full_eval",
             "fp16_full_eval", "half_precision_backend"),
    *_T.none("there is one kind of mixed precision: FP32 weights, and autocast; see docs/precision.md", "fp16_opt_level"),
    *_T.none(c.TASK_METRICS, "prediction_loss_only", "include_for_metrics", "include_inputs_for_metrics", "label_names",
             "predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
    *_T.none("evaluations come at an interval: train.evaluate", "eval_delay", "eval_on_start"),
    *_T.none("what is larger, and what smaller, is better is known of each metric", "greater_is_better"),
    *_T.none(c.HUB, "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
             "hub_revision"),
    *_T.none(c.MEMORY, "auto_find_batch_size", "torch_empty_cache_steps", "gradient_checkpointing_kwargs",
             "skip_memory_metrics", "use_cache"),
    *_T.none(c.COMPILER, "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "jit_mode_eval"),
    *_T.none(c.LOADING, "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
             "dataloader_multiprocessing_context", "dataloader_in_order", "length_column_name", "sortish_sampler"),
    *_T.none("the last, smaller batch of an epoch is trained on, with its true size", "dataloader_drop_last"),
    *_T.none("columns are chosen by data.input and data.target", "remove_unused_columns"),
    *_T.none("one seed decides everything: train.seed", "data_seed"),
    *_T.none("devices are found: --devices N, or YUNLU_ACCELERATORS=cpu", "use_cpu", "no_cuda", "use_mps_device", "use_ipex"),
    *_T.none("checkpoints are complete: they can always be resumed", "save_only_model", "save_on_each_node",
             "save_safetensors", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "ignore_data_skip"),
    *_T.none(c.RESUMED, "resume_from_checkpoint"),
    *_T.none(c.TRANSPORT, "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
             "ddp_backend", "ddp_timeout", "local_rank", "average_tokens_across_devices"),
    *_T.none("the layout is a line: layout: dp2 x tp2, or the plan's choice", "fsdp_config", "accelerator_config", "parallelism_config"),
    *_T.none("draft from that file: yunlu init --from ds_config.json", "deepspeed"),
    *_T.none("not offered", "optim_args", "optim_target_modules", "neftune_noise_alpha"),
    *_T.none("yunlu train trains, evaluates and tests", "do_train", "do_eval", "do_predict"),
    *_T.none("for tracebacks: yunlu --debug", "debug"),
    _P.same("r", "model.adapter.rank"),
    _P.same("lora_alpha", "model.adapter.alpha"),
    _P.same("lora_dropout", "model.adapter.dropout"),
    _P.row("target_modules", "model.adapter.targets",
           take=lambda value, _: {} if isinstance(value, str) else {"model.adapter.targets": list(value)}),
    *_P.none("low-rank updates as in the paper: rank, alpha, dropout, targets", "task_type", "bias", "modules_to_save",
             "use_rslora", "use_dora", "init_lora_weights", "fan_in_fan_out", "inference_mode", "layers_to_transform",
             "layers_pattern", "rank_pattern", "alpha_pattern"),
    Tool("Transformers").same("early_stopping_patience", "train.early_stopping.patience"),
    Tool("Transformers").same("early_stopping_threshold", "train.early_stopping.min_delta"),
]  # fmt: skip
