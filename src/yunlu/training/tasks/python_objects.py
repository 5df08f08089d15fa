"""Task of in-memory objects: ``yunlu.train(model=net, data=(x, y), loss=nn.CrossEntropyLoss())``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate

from yunlu.core.errors import DataError, JobError, ModelError, did_you_mean
from yunlu.training.data.sample_order import permute
from yunlu.training.models.keras import as_module
from yunlu.training.tasks.media import ends_in_softmax
from yunlu.training.tasks.own_metrics import OwnMetricsScorer, open_metrics
from yunlu.training.tasks.scoring import ClassScorer, RegressionScorer
from yunlu.training.tasks.task import Batch, Evaluation, Samples, Splits, call, logits_of

if TYPE_CHECKING:
    from yunlu.spec.job import Job
    from yunlu.training.tasks.task import Scorer

Loss = Callable[[Any, Any], Tensor]
_PARTS = ("train", "validation", "test")
_LOW = {torch.bfloat16, torch.float16}


class ObjectTask:
    """Any ``nn.Module``, any map-style data of (input, target) pairs, any loss.

    ``data`` is a pair of arrays or tensors, a torch ``Dataset``, or a mapping with the keys
    ``train``, ``validation`` and ``test`` of either. A loss with a ``reduction`` is summed over the
    items it counts; any other must be the mean over the samples of its batch. ``metrics`` are
    named functions of (outputs, targets) of a batch, averaged over samples, or one function of all
    outputs and targets of an evaluation, as arrays.
    """

    special_keys = frozenset[str]()

    def __init__(
        self,
        *,
        model: nn.Module,
        data: Any,
        loss: Loss | None = None,
        metrics: Mapping[str, Loss] | Callable[..., Any] | None = None,
    ) -> None:
        _check_parts(model, data, loss)
        self._model, self._data = model, data
        self._metrics = dict(metrics) if isinstance(metrics, Mapping) else {}
        is_whole = not (metrics is None or isinstance(metrics, Mapping))
        self._own_metrics = open_metrics([cast("Any", metrics)]) if is_whole else ()
        self._loss = loss
        self._summed_loss: Loss | None = None
        self._is_classes = self._gives_probabilities = False
        self._chooses_loss = loss is None
        self.metric = "loss"

    def load(self, job: Job) -> Splits:
        """Wrap the user's data; missing splits are held out of the training data."""
        parts = self._parts()
        held = job.data.split
        if not len(parts["train"]):
            raise DataError("The training data is empty.", hint="Pass at least one sample.")
        if "validation" not in parts and "test" not in parts:
            parts = _hold_out(parts["train"], held.validation, held.test, seed=job.train.seed)
        _, target = _pair(parts["train"][0])
        if self._loss is None:  # a loss of the user's own may leave them out
            _refuse_missing_targets(parts)
        self._choose_loss(torch.as_tensor(target))
        return Splits(
            train=parts["train"],
            validation=parts.get("validation"),
            test=parts.get("test"),
            fingerprint=_fingerprint(parts["train"]),
            about={"kind": type(self._data).__name__},
        )

    def build(self, job: Job) -> nn.Module:
        """The user's module; a Keras model is wrapped."""
        model = as_module(self._model, job.model.name)
        # A loss that the user names is for the outputs as they are.
        self._gives_probabilities = self._chooses_loss and ends_in_softmax(model)
        return model

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Stack pairs, unless already stacked."""
        if isinstance(samples, _Stacked):
            inputs, targets = samples.inputs, samples.targets
        else:
            inputs, targets = default_collate([_pair(sample) for sample in samples])
        count = len(targets)
        if isinstance(inputs, Mapping):
            arguments: Any = {str(name): value for name, value in inputs.items()}
        else:
            arguments = tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
        return Batch(inputs=arguments, targets=targets, samples=count, items=self._items(targets))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The user's loss as a sum."""
        assert self._loss is not None, "load comes first"
        outputs = call(model, batch)
        predictions = outputs if _is_bare(outputs) else logits_of(outputs)
        if isinstance(predictions, Tensor) and predictions.dtype in _LOW:
            predictions = predictions.float()  # losses are computed in FP32, as in every task
        if self._gives_probabilities and self._is_classes:
            predictions = predictions.clamp(min=1e-7).log()
        if self._summed_loss is not None:
            return self._summed_loss(predictions, batch.targets), predictions
        return self._loss(predictions, batch.targets) * batch.samples, predictions

    def scorer(self) -> Scorer:
        """Accuracy for classes, errors for numbers, otherwise only the loss."""
        inferred = _InferredScorer(is_classes=self._is_classes, metrics=self._metrics)
        own = self._own_metrics
        return OwnMetricsScorer(inferred, own, self) if own else inferred

    def _parts(self) -> dict[str, Samples]:
        if not isinstance(self._data, Mapping):
            return {"train": _as_samples(self._data)}
        for name in self._data:
            if name not in _PARTS:
                raise DataError(f"data has no part {name!r}.", hint=did_you_mean(str(name), _PARTS))
        if "train" not in self._data:
            raise DataError("data has no 'train' part.", hint="Pass {'train': (x, y), ...}.")
        return {name: _as_samples(part) for name, part in self._data.items() if part is not None}

    def _choose_loss(self, target: Tensor) -> None:
        if self._loss is None:
            classes = not target.is_floating_point() and target.ndim == 0
            self._loss = nn.CrossEntropyLoss() if classes else nn.MSELoss()
        self._summed_loss = _summed_loss(self._loss)
        name = getattr(self._loss, "__name__", type(self._loss).__name__)
        self._is_classes = name in {
            "CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss"
        }  # fmt: skip
        if self._is_classes and not target.is_floating_point():
            self.metric = "accuracy"

    def _items(self, targets: Tensor) -> int:
        """Number of items that the user's loss averages over."""
        if self._summed_loss is None:
            return len(targets)
        ignored = getattr(self._loss, "ignore_index", -100)
        if self._is_classes:
            return (
                int((targets != ignored).sum()) if not targets.is_floating_point() else len(targets)
            )
        return targets.numel()


def _check_parts(model: Any, data: Any, loss: Any) -> None:
    if isinstance(model, type):
        raise ModelError(
            f"model is the class {model.__name__}, not a model.",
            hint=f"Pass an object of it: {model.__name__}(...).",
        )
    if isinstance(data, (str, Path)):
        raise DataError(
            f"data is the name {str(data)!r}; a model object is trained on samples in memory.",
            hint="Pass (inputs, targets) or a Dataset; for files, name the model: 'module:Class'.",
        )
    if loss is not None and not callable(loss):
        raise ModelError(
            f"loss is {loss!r}; a function of (outputs, targets) was expected.",
            hint="Pass one such as torch.nn.MSELoss(); without it, the targets decide.",
        )


class _Stacked:
    """Many samples fetched in one call."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets


class _Pairs:
    """Two arrays of equal length as a map-style data set."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def fetch_array(self, indices: np.ndarray) -> _Stacked:
        """Many samples by an index array."""
        chosen = torch.from_numpy(indices)
        return _Stacked(self.inputs.index_select(0, chosen), self.targets.index_select(0, chosen))


class _InferredScorer:
    """Chooses its metrics by the shapes of the first batch."""

    def __init__(self, *, is_classes: bool, metrics: dict[str, Loss]) -> None:
        self._is_classes, self._metrics = is_classes, metrics
        self._sums = dict.fromkeys(metrics, 0.0)
        self._samples = 0
        self._scorer: ClassScorer | RegressionScorer | None = None

    def add(self, outputs: Any, batch: Batch) -> None:
        targets = batch.targets
        self._samples += batch.samples
        for name, metric in self._metrics.items():
            self._sums[name] += float(metric(outputs, targets)) * batch.samples
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return
        if self._is_classes and not targets.is_floating_point():
            if outputs.ndim > 2:  # torch has classes in dimension 1
                outputs = outputs.movedim(1, -1)
            self._scorer = self._scorer or ClassScorer([str(i) for i in range(outputs.shape[-1])])
            self._scorer.add(outputs, targets)
        elif outputs.shape == targets.shape and targets.is_floating_point():
            self._scorer = self._scorer or RegressionScorer()
            self._scorer.add(outputs, targets)

    def result(self) -> Evaluation:
        evaluation = self._scorer.result() if self._scorer else Evaluation(metrics={})
        custom = {name: total / max(self._samples, 1) for name, total in self._sums.items()}
        return evaluation.model_copy(update={"metrics": evaluation.metrics | custom})


def _as_samples(part: Any) -> Samples:
    if isinstance(part, tuple) and len(part) == 2:
        inputs, targets = (_as_tensor(array) for array in part)
        if len(inputs) != len(targets):
            raise DataError(f"There are {len(inputs)} inputs but {len(targets)} targets.")
        return _Pairs(inputs, targets)
    if hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        return part
    raise DataError(
        f"data is a {type(part).__name__}, which is not a map-style data set.",
        hint="Pass (inputs, targets), a map-style torch Dataset, or {'train': ..., 'test': ...}.",
    )


def _as_tensor(array: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(np.asarray(array) if not isinstance(array, Tensor) else array)
    except (TypeError, ValueError) as error:
        raise DataError(f"The data cannot become a tensor: {error}") from error
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _refuse_missing_targets(parts: Mapping[str, Samples]) -> None:
    """NaN as a target makes every loss NaN; only of arrays, which cost nothing to look at."""
    for name, samples in parts.items():
        base, chosen = samples, None
        if isinstance(samples, Subset):
            base, chosen = samples.dataset, samples.indices
        if not isinstance(base, _Pairs) or not base.targets.is_floating_point():
            continue
        is_finite = base.targets.isfinite().reshape(len(base.targets), -1).all(dim=1)
        bad = (
            [i for i in (chosen or range(len(is_finite))) if not is_finite[i]]
            if not is_finite.all()
            else []
        )
        if bad:
            raise DataError(
                f"The target of sample {bad[0]} of the {name} data is NaN or infinite"
                f"{f', and those of {len(bad) - 1} more' if len(bad) > 1 else ''}.",
                hint="Leave such samples out, or fill them in: every loss would be NaN.",
            )


def _pair(sample: Any) -> tuple[Any, Any]:
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        return sample[0], sample[1]
    raise DataError(
        f"A sample is a {type(sample).__name__}; expected an (input, target) pair.",
        hint="Return pairs from your Dataset, or write a Task for anything else.",
    )


def _hold_out(samples: Samples, validation: float, test: float, *, seed: int) -> dict[str, Samples]:
    size = len(samples)
    # An unreachable epoch number makes this order independent of the training order.
    order = permute(np.arange(size, dtype=np.uint64), size, seed=seed, epoch=2**63).tolist()
    held = round(size * validation)
    tested = round(size * test)
    parts = {"test": order[:tested], "validation": order[tested : tested + held]}
    parts["train"] = order[tested + held :]
    return {name: Subset(cast("Any", samples), chosen) for name, chosen in parts.items() if chosen}


def _fingerprint(samples: Samples) -> str:
    digest = xxhash.xxh3_128(str(len(samples)).encode())
    step = max(len(samples) // 1024, 1)  # a sample: user data may be slow to read
    for index in range(0, len(samples), step):
        for value in _pair(samples[index]):
            digest.update(np.ascontiguousarray(torch.as_tensor(value).numpy()).tobytes()
                          if not isinstance(value, Mapping) else repr(value).encode())  # fmt: skip
    return digest.hexdigest()


def _is_bare(outputs: Any) -> bool:
    return isinstance(outputs, (Tensor, tuple, list, dict)) and not hasattr(outputs, "logits")


def _summed_loss(loss: Any) -> Loss | None:
    """The same loss with sum reduction; None if it has no reduction."""
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return None
        if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.weight is not None:
            raise JobError(
                "A class-weighted loss averages by weight, which is not supported.",
                hint="Pass a function that weighs each sample and returns the mean.",
            )
        summing: Any = copy.copy(loss)
        summing.reduction = "sum"
        return summing
    try:
        has_reduction = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return None
    return partial(loss, reduction="sum") if has_reduction else None
