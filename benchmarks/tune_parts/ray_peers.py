"""Ray Tune's ASHA as a method: its own scheduler decides, on results that come by our clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from benchmarks.tune_parts.random_search import Random
from yunlu.tuning.values import Judgement, Verdict

if TYPE_CHECKING:
    from yunlu.tuning.values import Action, Dimension, StudySnapshot


class RayAsha:
    """Random settings, as Ray Tune draws by default, stopped by ``ASHAScheduler``.

    The scheduler sees of a trial its id only, so light stand-ins do; no Ray cluster runs.
    """

    def __init__(self, dimensions: tuple[Dimension, ...], rungs: int, seed: int) -> None:
        self._random = Random(dimensions, seed=seed)
        self._scheduler: Any = ASHAScheduler(metric="value", mode="min", max_t=rungs)
        self._trials: dict[int, Any] = {}

    def choose(self, snapshot: StudySnapshot) -> Action:
        """A new trial, always: ASHA in Ray Tune stops, and never holds."""
        number = len(snapshot.trials)
        self._trials[number] = SimpleNamespace(trial_id=str(number))
        self._scheduler.on_trial_add(None, self._trials[number])
        return self._random.choose(snapshot)

    def judge(self, number: int, snapshot: StudySnapshot) -> Judgement:
        """What the scheduler says."""
        trial = snapshot.trials[number]
        result = {"training_iteration": trial.rung, "value": trial.points[-1].value}
        action = self._scheduler.on_trial_result(None, self._trials[number], result)
        if action != TrialScheduler.STOP:
            return Judgement(Verdict.GO_ON)
        self._scheduler.on_trial_complete(None, self._trials[number], result)
        return Judgement(Verdict.PRUNE)
