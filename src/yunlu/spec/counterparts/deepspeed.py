"""The JSON configuration of DeepSpeed; keys of a section stand after a dot."""

from __future__ import annotations

from typing import Any

from yunlu.spec.counterparts import counterpart as c
from yunlu.spec.counterparts.counterpart import NotTakenError, Settings, Taken, Tool
from yunlu.spec.counterparts.optimizers import optimizer_keys, schedule_keys

_D = Tool("DeepSpeed")
_PRECISION = "here train.precision names the arithmetic"


def _micro(value: Any, settings: Settings) -> Taken:
    if not c.is_unsaid(whole := settings.get("train_batch_size")):
        return {"train.batch": c.whole(whole), "train.micro_batch": c.whole(value)}
    return c.global_batch(
        value,
        c.count_or(settings, "gradient_accumulation_steps", 1),
        c.count_or(settings, "devices", 1),
    )


def _accumulation(value: Any, settings: Settings) -> Taken:
    if c.whole(value) <= 1:
        return {}
    micro = settings.get("train_micro_batch_size_per_gpu")
    if not c.is_unsaid(micro):
        return _micro(micro, settings)
    whole = settings.get("train_batch_size")
    if c.is_unsaid(whole):
        raise NotTakenError("say train.batch (a whole step) and train.micro_batch (one pass)")
    return {
        "train.batch": c.whole(whole),
        "train.micro_batch": max(c.whole(whole) // c.whole(value), 1),
    }


def _stage(value: Any, _: Settings) -> Taken:
    stage = c.whole(value)
    if stage == 0:
        return {}
    if stage == 1:
        return {"layout.zero1": True}
    raise NotTakenError(
        f"stage {stage} is an fsdp axis here: say into how many shards, layout: fsdp8, or leave it to the plan"
    )


def _params(value: Any, _: Settings) -> Taken:
    return {"train.optimizer.betas": list(value)}


DEEPSPEED = [
    _D.same("train_batch_size", "train.batch"),
    _D.row("train_micro_batch_size_per_gpu", "train.batch", "train.micro_batch", take=_micro,
           remark="here train.batch counts all devices"),
    _D.row("gradient_accumulation_steps", "train.batch", "train.micro_batch", take=_accumulation,
           remark="here train.batch is a whole step, and train.micro_batch a pass of it"),
    _D.row("optimizer.type", "train.optimizer.name", "train.optimizer.state", take=lambda value, _: optimizer_keys(value)),
    _D.same("optimizer.params.lr", "train.optimizer.lr"),
    _D.same("optimizer.params.weight_decay", "train.optimizer.weight_decay", "here biases and norms never decay"),
    _D.row("optimizer.params.betas", "train.optimizer.betas", take=_params),
    _D.same("optimizer.params.eps", "train.optimizer.eps"),
    _D.same("optimizer.params.momentum", "train.optimizer.momentum"),
    _D.row("scheduler.type", "train.schedule.name", take=lambda value, _: schedule_keys(value)),
    _D.number("scheduler.params.warmup_num_steps", "train.schedule.warmup"),
    _D.same("scheduler.params.warmup_max_lr", "train.optimizer.lr"),
    _D.number("scheduler.params.total_num_steps", "train.steps"),
    _D.number("scheduler.params.cos_min_ratio", "train.schedule.final"),
    _D.same("gradient_clipping", "train.clip.norm"),
    _D.switch("fp16.enabled", "train.precision", "fp16", remark=_PRECISION),
    _D.switch("bf16.enabled", "train.precision", "bf16", remark=_PRECISION),
    _D.switch("bfloat16.enabled", "train.precision", "bf16", remark=_PRECISION),
    _D.switch("amp.enabled", "train.precision", "fp16", remark=_PRECISION),
    _D.switch("torch_autocast.enabled", "train.precision", "bf16", remark=_PRECISION),
    _D.row("zero_optimization.stage", "layout.zero1", "layout.fsdp", take=_stage),
    _D.same("tensor_parallel.autotp_size", "layout.tp"),
    _D.same("pipeline.stages", "layout.pp"),
    _D.switch("tensorboard.enabled", "trackers", None, remark="here TensorBoard is always written"),
    _D.switch("wandb.enabled", "trackers", ["wandb"]),
    _D.switch("compile.enabled", "train.compile", True),
    _D.switch("flops_profiler.enabled", "train.profile", True),
    *_D.none(c.SCALED, "fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis",
             "fp16.consecutive_hysteresis", "fp16.min_loss_scale", "fp16.auto_cast", "amp.opt_level", "fp16.fp16_master_weights_and_grads"),
    *_D.none("warm-up starts at nothing", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_type",
             "scheduler.params.last_batch_iteration"),
    *_D.none(c.TRANSPORT, "communication_data_type", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients",
             "zero_optimization.allgather_partitions", "zero_optimization.allgather_bucket_size", "zero_optimization.overlap_comm",
             "zero_optimization.reduce_scatter", "zero_optimization.reduce_bucket_size", "zero_optimization.contiguous_gradients",
             "zero_optimization.round_robin_gradients", "zero_optimization.sub_group_size", "seq_parallel_communication_data_type",
             "comms_logger", "zero_optimization.stage3_max_live_parameters", "zero_optimization.stage3_max_reuse_distance",
             "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
             "zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero_optimization.zero_hpz_partition_size",
             "zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients",
             "zero_optimization.ignore_unused_parameters"),
    *_D.none("nothing is moved to the host's memory or a disk; shards (fsdp), recompute and 8-bit state save memory",
             "zero_optimization.offload_param", "zero_optimization.offload_optimizer", "aio", "zero_optimization.cpu_offload"),
    *_D.none("auto recomputes only where memory is short: train.recompute", "activation_checkpointing"),
    *_D.none(c.LOGGED, "steps_per_print", "wall_clock_breakdown", "dump_state", "csv_monitor", "comet"),
    *_D.none("yunlu plan searches the layouts, yunlu tune the settings", "autotuning"),
    *_D.none("workers may come and go: yunlu resize, train.adapt_batch", "elasticity"),
    *_D.none("not offered", "sparse_attention", "data_efficiency", "curriculum_learning", "compression_training",
             "progressive_layer_drop", "eigenvalue", "hybrid_engine", "data_types"),
    *_D.none("train.quantize: int8 trains with the rounding of the deployed model", "quantize_training"),
    *_D.none("any optimiser may be sharded", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *_D.none("train.checkpoint says how often and how many", "checkpoint"),
]  # fmt: skip
