"""``compile`` and ``fit`` of Keras, its optimisers and its usual callbacks."""

from __future__ import annotations

from typing import Any

from yunlu.spec.counterparts import counterpart as c
from yunlu.spec.counterparts.counterpart import NotTakenError, Settings, Take, Taken, Tool
from yunlu.spec.counterparts.optimizers import optimizer_keys

_K = Tool("Keras")


def _optimizer(value: Any, _: Settings) -> Taken:
    if not isinstance(value, str):
        raise NotTakenError(c.NO_CODE)
    return optimizer_keys(value)


def _batch(value: Any, settings: Settings) -> Taken:
    return c.global_batch(value, c.count_or(settings, "gradient_accumulation_steps", 1), 1)


def _accumulation(value: Any, settings: Settings) -> Taken:
    if c.whole(value) <= 1:
        return {}
    return c.global_batch(c.count_or(settings, "batch_size", 32), c.whole(value), 1)


def _betas(value: Any, settings: Settings) -> Taken:
    betas = [
        c.number(default if c.is_unsaid(given) else given)
        for given, default in ((settings.get("beta_1"), 0.9), (settings.get("beta_2"), 0.999))
    ]
    return (
        {}
        if betas == [0.9, 0.999] and c.number(value) in betas
        else {"train.optimizer.betas": betas}
    )


def _momentum(value: Any, _: Settings) -> Taken:
    if c.number(value) == 0:
        return {}
    return {"train.optimizer.name": "momentum", "train.optimizer.momentum": value}


def _ema(value: Any, settings: Settings) -> Taken:
    return {"train.ema": settings.get("ema_momentum", 0.99)} if value is True else {}


def _ema_decay(value: Any, settings: Settings) -> Taken:
    return {"train.ema": value} if settings.get("use_ema") is True else {}


def _validation(value: Any, _: Settings) -> Taken:
    if not isinstance(value, str):
        raise NotTakenError(
            "arrays do not stand in a job file: name a file, or a share: data.split.validation"
        )
    return {"data.validation": value}


def _validation_freq(value: Any, _: Settings) -> Taken:
    if value != 1:
        raise NotTakenError("train.evaluate takes steps, epoch or never")
    return {"train.evaluate": "epoch"}


def _saving(value: Any, _: Settings) -> Taken:
    return {"train.checkpoint.every": "epoch" if value == "epoch" else c.whole(value)}


def _metric(key: str) -> Take:
    return lambda value, _: {key: c.metric_name(value)}


def _plateau(key: str) -> Take:
    return lambda value, _: {"train.schedule.name": "plateau", key: value}


def _best(value: Any, _: Settings) -> Taken:
    return {"train.checkpoint.keep_best": 1} if value is True else {}


_BEST = "here the best weights are exported by default"

KERAS = [
    _K.row("batch_size", "train.batch", "train.micro_batch", take=_batch),
    _K.same("epochs", "train.epochs"),
    _K.same("learning_rate", "train.optimizer.lr"),
    _K.row("optimizer", "train.optimizer.name", take=_optimizer),
    _K.same("weight_decay", "train.optimizer.weight_decay", "here biases and norms never decay"),
    _K.row("beta_1", "train.optimizer.betas", take=_betas),
    _K.row("beta_2", "train.optimizer.betas", take=_betas),
    _K.same("epsilon", "train.optimizer.eps"),
    _K.row("momentum", "train.optimizer.name", "train.optimizer.momentum", take=_momentum),
    _K.switch("nesterov", "train.optimizer.nesterov", True),
    _K.same("global_clipnorm", "train.clip.norm"),
    _K.same("clipvalue", "train.clip.value"),
    _K.row("use_ema", "train.ema", take=_ema),
    _K.row("ema_momentum", "train.ema", take=_ema_decay),
    _K.row("gradient_accumulation_steps", "train.batch", "train.micro_batch", take=_accumulation,
           remark="here train.batch is a whole step, and train.micro_batch a pass of it"),
    _K.switch("jit_compile", "train.compile", True),
    _K.same("validation_split", "data.split.validation", "here held out at random, not from the end"),
    _K.row("validation_data", "data.validation", take=_validation),
    _K.row("validation_freq", "train.evaluate", take=_validation_freq),
    _K.same("EarlyStopping.patience", "train.early_stopping.patience"),
    _K.number("EarlyStopping.min_delta", "train.early_stopping.min_delta"),
    _K.row("EarlyStopping.monitor", "train.early_stopping.metric", take=_metric("train.early_stopping.metric")),
    _K.row("EarlyStopping.restore_best_weights", "train.checkpoint.keep_best", take=_best, remark=_BEST),
    _K.row("ModelCheckpoint.monitor", "train.checkpoint.metric", take=_metric("train.checkpoint.metric")),
    _K.row("ModelCheckpoint.save_best_only", "train.checkpoint.keep_best", take=_best, remark=_BEST),
    _K.row("ModelCheckpoint.save_freq", "train.checkpoint.every", take=_saving),
    _K.row("ReduceLROnPlateau.factor", "train.schedule.name", "train.schedule.factor", take=_plateau("train.schedule.factor")),
    _K.row("ReduceLROnPlateau.patience", "train.schedule.name", "train.schedule.patience", take=_plateau("train.schedule.patience")),
    *_K.none("arrays do not stand in a job file: name a file in data, or pass them in Python: yunlu.train(model=..., data=(x, y))",
             "x", "y"),
    *_K.none(c.TASK_LOSS, "loss", "loss_weights", "auto_scale_loss"),
    *_K.none(c.TASK_METRICS, "metrics", "weighted_metrics"),
    *_K.none("weights of classes or samples are not offered in a job; from Python, with a loss of your own",
             "class_weight", "sample_weight"),
    *_K.none(c.SHOWN, "verbose", "EarlyStopping.verbose", "ModelCheckpoint.verbose", "ReduceLROnPlateau.verbose"),
    *_K.none("each callback is looked at by itself: early stopping, checkpoints, plateau have keys; TensorBoard is always written",
             "callbacks"),
    *_K.none("an epoch visits every sample once, in an order that the seed decides", "shuffle", "steps_per_epoch"),
    *_K.none(c.RESUMED, "initial_epoch"),
    *_K.none(c.EVALUATED, "validation_steps", "validation_batch_size"),
    *_K.none(c.COMPILER, "run_eagerly", "steps_per_execution"),
    *_K.none("clips each weight by itself; train.clip.norm bounds the whole gradient, train.clip.value each component", "clipnorm"),
    *_K.none(c.SCALED, "loss_scale_factor", "initial_scale", "dynamic_growth_steps"),
    *_K.none("not offered", "amsgrad", "ema_overwrite_frequency", "EarlyStopping.baseline", "EarlyStopping.start_from_epoch",
             "ModelCheckpoint.initial_value_threshold", "ReduceLROnPlateau.cooldown", "ReduceLROnPlateau.min_lr",
             "ReduceLROnPlateau.min_delta"),
    *_K.none("what is larger, and what smaller, is better is known of each metric", "EarlyStopping.mode",
             "ModelCheckpoint.mode", "ReduceLROnPlateau.mode", "ReduceLROnPlateau.monitor"),
    *_K.none(c.RUNS, "ModelCheckpoint.filepath", "ModelCheckpoint.save_weights_only"),
]  # fmt: skip
