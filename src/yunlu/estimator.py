"""Yunlu as an estimator of scikit-learn: ``GridSearchCV``, ``Pipeline``, ``cross_val_score``."""

from __future__ import annotations

import random
from contextlib import contextmanager
from importlib import import_module
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from yunlu.core.errors import JobError, TrainingError, missing_part
from yunlu.jobs import lifecycle
from yunlu.jobs.lifecycle import create_run
from yunlu.jobs.run import error_of, move
from yunlu.runs.run_store import Area, require_local
from yunlu.runs.states import RunState
from yunlu.spec.load import job_from_mapping, lay_fields

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise missing_part("scikit-learn", "train", "An estimator of scikit-learn") from error

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import Self

    from numpy.typing import ArrayLike, NDArray

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

    Numbers = NDArray[np.float64]

__all__ = ["YunluClassifier", "YunluRegressor"]

_BATCH, _EPOCHS, _STEPS = 32, 10, 300
"""Without a word about it: as many epochs, and in any case as many steps."""
_ROWS = 8192
"""Answered at once."""
_checked: Any = validate_data  # its inline types are of its defaults, not of what it takes
_OURS = ("task", "model.name", "data.train", "devices", "layout", "communication")
"""Fields of the job that an estimator sets itself."""


class _Estimator(BaseEstimator):
    """What both share: parameters, the run, the border to torch."""

    def __init__(
        self,
        model: str = "mlp",
        *,
        hidden: Sequence[int] | int = (128, 64),
        dropout: float = 0.0,
        activation: str = "relu",
        epochs: float | None = None,
        batch: int | str = "auto",
        lr: float | str = "auto",
        optimizer: str = "adamw",
        validation: float = 0.0,
        seed: int = 0,
        job: Mapping[str, Any] | None = None,
        keep_run: bool = True,
        batch_size: int | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """A network that is trained by a Yunlu run.

        Args:
            model: ``mlp``, or ``module:Class`` of your own, called with ``inputs`` and ``outputs``.
            hidden: Sizes of the hidden layers of ``mlp``.
            dropout: Of ``mlp``.
            activation: Of ``mlp``: ``relu``, ``gelu``, ``silu`` or ``tanh``.
            epochs: Passes over the data; none: 10, or as many as 300 steps take.
            batch: Samples per step, or ``auto``.
            lr: Peak learning rate, or ``auto``.
            optimizer: As ``train.optimizer`` of a job: ``adamw``, ``adam``, ``momentum``, ``sgd``, ...
            validation: Share of the samples held out to evaluate after each epoch and to take the
                best weights by.
            seed: Decides the first weights, the order of the samples and dropout.
            job: Any other field of the job by its dotted name, such as
                ``{"train.schedule": "constant", "model.args.batch_norm": True}``.
            keep_run: Whether the run stays in the store, with its report and checkpoints.
            batch_size: The same as ``batch``, as Keras calls it.
            learning_rate: The same as ``lr``, as Keras calls it.
        """
        self.model = model
        self.hidden = hidden
        self.dropout = dropout
        self.activation = activation
        self.epochs = epochs
        self.batch = batch
        self.lr = lr
        self.optimizer = optimizer
        self.validation = validation
        self.seed = seed
        self.job = job
        self.keep_run = keep_run
        self.batch_size = batch_size
        self.learning_rate = learning_rate

    def _fit(self, inputs: Numbers, targets: NDArray[Any], *, outputs: int) -> None:
        """Train on what is standardised already, and keep the module."""
        job = self._make_job(len(inputs))
        objects, torch = _import("yunlu.training.tasks.python_objects"), _import("torch")
        net = _build(job, inputs=inputs.shape[1], outputs=outputs)
        live = objects.ObjectTask(
            model=net, data=(inputs.astype(np.float32), targets), loss=None, metrics=None
        )
        with _random_as_it_was(torch):
            if self.keep_run:
                run = lifecycle.submit(job)
                _train(run, live)
                self.run_dir_: Path | None = Path(run.address)
                self.module_ = _trained(job, run, net, inputs=inputs.shape[1], outputs=outputs)
            else:
                with TemporaryDirectory(prefix="yunlu-") as home:
                    run = create_run(job, None, Path(home))
                    _train(run, live)
                    self.run_dir_ = None
                    self.module_ = _trained(job, run, net, inputs=inputs.shape[1], outputs=outputs)

    def _answer(self, x: ArrayLike) -> Numbers:
        """What the network answers to rows as the user has them."""
        check_is_fitted(self)
        torch, module = _import("torch"), self.module_
        rows = self._standardise(_checked(self, x, reset=False))
        kind = next(iter(module.parameters())).dtype
        outputs: list[Numbers] = []
        with torch.no_grad():
            for start in range(0, len(rows), _ROWS):
                part = torch.tensor(rows[start : start + _ROWS], dtype=kind)
                outputs.append(module(part).double().numpy())
        return np.concatenate(outputs)

    def _learn_scale(self, x: Numbers) -> Numbers:
        spread = x.std(axis=0)
        self._mean, self._spread = x.mean(axis=0), np.where(spread > 0, spread, 1.0)
        return self._standardise(x)

    def _standardise(self, x: NDArray[Any]) -> Numbers:
        return (np.asarray(x, dtype=np.float64) - self._mean) / self._spread

    def _one_of(self, name: str, alias: str) -> Any:
        """A parameter under its name or its alias; both only where they agree."""
        value, other = getattr(self, name), getattr(self, alias)
        if other is None:
            return value
        if value not in ("auto", other):
            raise JobError(
                f"{name} is {value!r}, but its alias {alias} is {other!r}.",
                hint=f"set one of them: both say the same, {alias} as Keras spells it",
            )
        return other

    def _make_job(self, samples: int) -> Job:
        own = self.model == "mlp"
        hidden = [self.hidden] if isinstance(self.hidden, int | np.integer) else list(self.hidden)
        args = {
            "hidden": [_plain(size) for size in hidden],
            "dropout": _plain(self.dropout),
            "activation": self.activation,
        }
        batch = _plain(self._one_of("batch", "batch_size"))
        trained = samples - round(samples * self.validation)
        per_epoch = ceil(trained / (min(_BATCH, trained) if batch == "auto" else batch))
        epochs = max(_EPOCHS, ceil(_STEPS / per_epoch)) if self.epochs is None else self.epochs
        mapping = {
            "name": type(self).__name__,
            "task": lifecycle.IN_PROCESS,
            "model": {"name": self.model, "args": args if own else {}},
            "data": {
                "train": lifecycle.IN_PROCESS,
                "split": {"validation": _plain(self.validation), "test": 0.0},
            },
            "train": {
                "epochs": _plain(epochs),
                "batch": batch if batch == "auto" else min(batch, trained),
                "optimizer": {
                    "name": self.optimizer,
                    "lr": _plain(self._one_of("lr", "learning_rate")),
                },
                "seed": _plain(self.seed),
                # Arrays are here already, and processes do not belong into a grid's own.
                "workers": 0,
            },
            "devices": 1,
        }
        job = job_from_mapping(mapping, where=type(self).__name__)
        return _lay_over(job, self.job or {})


class YunluClassifier(ClassifierMixin, _Estimator):
    """Rows of numbers to one of the classes seen in training.

    Attributes:
        classes_: The classes, sorted.
        n_features_in_: Columns of the training data.
        module_: The trained ``torch.nn.Module``; it takes standardised rows.
        run_dir_: The run's directory; none where it is not kept.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Train on rows and their classes."""
        rows, labels = _checked(self, X, y, ensure_min_samples=2)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs two classes to tell apart; the data has one class only."
            )
        self._fit(
            self._learn_scale(np.asarray(rows, dtype=np.float64)),
            numbers.astype(np.int64),
            outputs=len(self.classes_),
        )
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """The likeliest class of each row."""
        scores = self._answer(X)
        return self.classes_[scores.argmax(axis=1)]

    def predict_proba(self, X: ArrayLike) -> Numbers:  # noqa: N803
        """How likely each class is, in the order of ``classes_``."""
        scores = self._answer(X)
        if _import("yunlu.training.tasks.media").ends_in_softmax(self.module_):
            return scores
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return shares / shares.sum(axis=1, keepdims=True)


class YunluRegressor(RegressorMixin, _Estimator):
    """Rows of numbers to a number.

    Attributes:
        n_features_in_: Columns of the training data.
        module_: The trained ``torch.nn.Module``; it takes standardised rows and answers in deviations
            from the mean of the training data.
        run_dir_: The run's directory; none where it is not kept.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Train on rows and their numbers."""
        rows, numbers = _checked(self, X, y, ensure_min_samples=2, y_numeric=True)
        numbers = np.asarray(numbers, dtype=np.float64)
        self._level, self._unit = float(numbers.mean()), float(numbers.std()) or 1.0
        targets = ((numbers - self._level) / self._unit).astype(np.float32)[:, None]
        self._fit(self._learn_scale(np.asarray(rows, dtype=np.float64)), targets, outputs=1)
        return self

    def predict(self, X: ArrayLike) -> Numbers:  # noqa: N803
        """The number of each row."""
        return self._answer(X)[:, 0] * self._unit + self._level


def _lay_over(job: Job, fields: Mapping[str, Any]) -> Job:
    for name in fields:
        if any(name == ours or name.startswith(f"{ours}.") for ours in _OURS):
            raise JobError(
                f"job: {name} is set by the estimator itself.",
                hint="its own parameters say the model; for another task, use yunlu.train",
            )
    try:
        return lay_fields(job, {name: _plain(value) for name, value in fields.items()})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise JobError(
            f"job: {key}: {first['msg']}.", hint="dotted names as with `yunlu train --set`"
        ) from error


def _build(job: Job, *, inputs: int, outputs: int) -> Any:
    """The network with first weights that only the seed decides."""
    torch = _import("torch")
    builtins = {"mlp": _import("yunlu.training.models.networks").MLP}
    sizes = {"inputs": inputs, "outputs": outputs}
    build: Any = _import("yunlu.training.models.build").build_model
    with _import("yunlu.training.device").random_kept():
        torch.manual_seed(job.train.seed)
        return build(job.model, builtins=builtins, sizes=sizes)


def _train(run: RunStore, live: Any) -> None:
    """Train in this process: a grid of small fits should not start a process for each."""
    state = RunState.FAILED
    try:
        state = _import("yunlu.training.worker").run(run.address, task=live)
    finally:
        record = lifecycle.read_record(run)
        if record.state.is_active:  # an interrupt came between two of its events
            move(run, record, RunState.STOPPED, reason="interrupted")
    if state is RunState.STOPPED:
        raise KeyboardInterrupt
    if state is not RunState.FINISHED:
        events = (event for event, _ in run.read_events())
        raise error_of(events) or TrainingError(f"the run {run.id} is {state}")


def _trained(job: Job, run: RunStore, net: Any, *, inputs: int, outputs: int) -> Any:
    """A plain module with the weights that the run exported."""
    fresh = _build(job, inputs=inputs, outputs=outputs)
    exported = require_local(run).directory(Area.MODEL) / "model.safetensors"
    if exported.exists():
        # Weights that two layers share stand there once.
        weights = _import("safetensors.torch").load_file(exported)
        fresh.load_state_dict(weights, strict=False)
    else:
        fresh.load_state_dict({name: value.cpu() for name, value in net.state_dict().items()})
    # In double precision a row's answer does not depend on the rows it came with; a network of
    # somebody's own may ask for single.
    return (fresh.double() if job.model.name == "mlp" else fresh).eval()


@contextmanager
def _random_as_it_was(torch: Any) -> Generator[None]:
    """Put the random numbers of this process back: a run seeds them all."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise missing_part(error.name or "torch", "train", "Training in this process") from error
