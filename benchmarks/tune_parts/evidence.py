"""Recorded learning curves as tasks to search: LCBench (by YAHPO's surrogate) and TaskSet.

LCBench: Zimmer et al. 2021, https://arxiv.org/abs/2006.13799; its surrogate: Pfisterer et al. 2022,
https://arxiv.org/abs/2109.03670. TaskSet: Metz et al. 2020, https://arxiv.org/abs/2002.11887.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmarks.tune_parts.sampling import sample
from yunlu.tuning.values import Dimension

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from yunlu.tuning.values import Params

DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "evidence" / "tune"
LCBENCH = "lcbench"
TASKSET = "taskset"
TASKS = (
    "lcbench/167168", "lcbench/189873", "lcbench/189906", "lcbench/126026", "lcbench/168330",
    "lcbench/7593", "taskset/patch32_GRU128_bs128", "taskset/patch128_LSTM128_bs64",
    "taskset/patch32_VRNN64_relu_avg_bs128",
)  # fmt: skip
"""Those for which others were measured."""
_NO_TASK = ("#na#", "167083")
"""In the surrogate's list of codes, but not among its tasks."""
_STEPS = 51
_BAD_LOSS = 10.0
"""Stands for every loss that is not finite, or worse."""
_TYPICAL = 512
"""Settings whose mean time is that of a whole training."""

Course: TypeAlias = "tuple[list[float], list[float]]"
"""The value at each step, and the time until it."""


def list_tasks(folder: Path) -> list[str]:
    """Every task there is, those of LCBench first."""
    codes = _read_codes(folder)
    lcbench = sorted((name for name in codes if name not in _NO_TASK), key=int)
    with np.load(_taskset_file(folder)) as table:
        taskset = sorted({key.split("/")[0] for key in table.files if "/" in key})
    short = [name.removeprefix("imdb_") for name in taskset]
    return [f"{LCBENCH}/{name}" for name in lcbench] + [f"{TASKSET}/{name}" for name in short]


def load_task(folder: Path, task: str) -> Lcbench | Taskset:
    """The curves of a task, by its name in ``list_tasks``."""
    kind, _, name = task.partition("/")
    if kind == LCBENCH:
        return Lcbench(folder=folder, code=_read_codes(folder)[name])
    return Taskset(folder=folder, name=f"imdb_{name}")


@dataclass(kw_only=True)
class Lcbench:
    """Small networks on one tabular data set; values are minus the validation accuracy in %."""

    folder: Path
    code: int
    rungs: int = _STEPS
    _known: dict[tuple[Any, ...], Course] = field(default_factory=dict[tuple[Any, ...], Any])

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """In the order of the surrogate's inputs."""
        return (
            Dimension(name="batch_size", low=16, high=512, log=True, is_int=True),
            Dimension(name="learning_rate", low=1e-4, high=0.1, log=True),
            Dimension(name="momentum", low=0.1, high=0.99),
            Dimension(name="weight_decay", low=1e-5, high=0.1),
            Dimension(name="num_layers", low=1, high=5, is_int=True),
            Dimension(name="max_units", low=64, high=1024, log=True, is_int=True),
            Dimension(name="max_dropout", low=0.0, high=1.0),
        )

    def curve(self, params: Params) -> Course:
        """From one call of the surrogate for all epochs, asked once for each setting."""
        setting = tuple(params[each.name] for each in self.dimensions)
        if setting not in self._known:
            self._known[setting] = self._predict(setting)
        return self._known[setting]

    @cached_property
    def whole_s(self) -> float:
        """The mean time of a whole training, over random settings."""
        settings = sample(self.dimensions, _TYPICAL, seed=0)
        # One by one: a large batch takes a large share of the memory.
        whole = [self.curve(each)[1][-1] for each in settings]
        return float(np.mean(whole))

    def _predict(self, setting: tuple[Any, ...]) -> Course:
        # Epoch 1 is the untrained network: step k ends with epoch k + 1.
        rows = np.empty((self.rungs, 1 + len(setting)), dtype=np.float32)
        rows[:, 0] = np.arange(2, self.rungs + 2)
        rows[:, 1:] = setting
        codes = np.full((self.rungs, 1), self.code, dtype=np.int32)
        found = _open_surrogate(self.folder).run(None, {"x_cat": codes, "x_cont": rows})[0]
        seconds, accuracy = np.asarray(found, dtype=np.float64)[:, :2].T
        # Time counts from the start of the training. A surrogate may let it run backwards a little.
        return (-accuracy).tolist(), np.maximum.accumulate(seconds).tolist()


@dataclass(kw_only=True)
class Taskset:
    """Text models with 1,000 settings of Adam; a setting is taken for the nearest of them."""

    folder: Path
    name: str
    rungs: int = _STEPS

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """All logarithmic; of the betas, how far they are from 1."""
        ranges = {
            "learning_rate": (1e-8, 10.0),
            "one_minus_beta1": (1e-4, 1.0),
            "one_minus_beta2": (1e-6, 1.0),
            "epsilon": (1e-10, 1e3),
            "l1": (1e-8, 10.0),
            "l2": (1e-8, 10.0),
            "linear_decay": (1e-7, 1e-4),
            "exponential_decay": (1e-6, 1e-3),
        }
        return tuple(
            Dimension(name=name, low=low, high=high, log=True)
            for name, (low, high) in ranges.items()
        )

    @property
    def whole_s(self) -> float:
        """No times were recorded: a step is a unit."""
        return float(self.rungs)

    def curve(self, params: Params) -> Course:
        """That of the nearest setting there is, by the logarithms, each range counted as 1."""
        request = self._place(np.asarray([[params[each.name] for each in self.dimensions]]))
        nearest = int(np.argmin(((self._settings - request) ** 2).sum(axis=1)))
        return self._losses[nearest].tolist(), [float(step + 1) for step in range(self.rungs)]

    @cached_property
    def _losses(self) -> NDArray[np.float64]:
        with np.load(_taskset_file(self.folder)) as table:
            losses = np.asarray(table[f"{self.name}/valid"], dtype=np.float64)
        return np.minimum(np.where(np.isfinite(losses), losses, _BAD_LOSS), _BAD_LOSS)

    @cached_property
    def _settings(self) -> NDArray[np.float64]:
        with np.load(_taskset_file(self.folder)) as table:
            settings = np.array(table["hp"], dtype=np.float64)
        settings[:, 1:3] = 1.0 - settings[:, 1:3]
        return self._place(settings)

    def _place(self, settings: NDArray[Any]) -> NDArray[np.float64]:
        low = np.log([each.low for each in self.dimensions])
        high = np.log([each.high for each in self.dimensions])
        return (np.log(settings.astype(np.float64)) - low) / (high - low)


def _taskset_file(folder: Path) -> Path:
    return folder / "taskset_adam8p_12x1000x51.npz"


@lru_cache(maxsize=1)
def _read_codes(folder: Path) -> dict[str, int]:
    text = (folder / "yahpo_lcbench" / "encoding.json").read_text(encoding="utf-8")
    return json.loads(text)["OpenML_task_id"]


@lru_cache(maxsize=1)
def _open_surrogate(folder: Path) -> Any:
    import onnxruntime  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    options: Any = onnxruntime.SessionOptions()  # pyright: ignore[reportUnknownMemberType]
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    model = str(folder / "yahpo_lcbench" / "model.onnx")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
