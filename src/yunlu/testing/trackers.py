"""What every tracker must do, as tests to inherit.

In your own test suite::

    class TestMyTracker(TrackerContract):
        def make_tracker(self):
            return MyTracker()

pytest finds the methods by their names; ``tmp_path`` is its own fixture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from yunlu.runs.home import open_run
from yunlu.spec.job import Job
from yunlu.training.trackers.tracker import Tracker

if TYPE_CHECKING:
    from pathlib import Path

    from yunlu.runs.run_store import RunStore

Curves: TypeAlias = dict[str, dict[int, float]]
"""Name of a metric to its value at each step."""


class TrackerContract:
    """The behaviours the training loop relies on.

    Override ``make_tracker``, and ``read_back`` if you can: then the contract sees that no metric
    is lost.
    """

    def make_tracker(self) -> Tracker:
        """A fresh tracker, as the engine would make one."""
        raise NotImplementedError

    def read_back(self, run: RunStore) -> Curves | None:
        """Everything the tracker holds of the run; None where it cannot be read back."""
        del run
        return None

    def test_it_has_the_methods_of_a_tracker(self) -> None:
        """The engine checks the same before training."""
        assert isinstance(self.make_tracker(), Tracker)

    def test_every_metric_logged_is_kept(self, tmp_path: Path) -> None:
        """Names with slashes, several calls for one step, names that come later."""
        run, tracker = _run(tmp_path), self.make_tracker()
        tracker.start(run, _JOB, resumed=False)
        for step in range(1, 8):
            tracker.log({"train/loss": 1 / step, "train/lr": 0.25}, step=step)
        tracker.log({"validation/accuracy": 0.5}, step=7)
        tracker.finish(state="finished", summary={"test/accuracy": 0.75})
        expected: Curves = {
            "train/loss": {step: 1 / step for step in range(1, 8)},
            "train/lr": dict.fromkeys(range(1, 8), 0.25),
            "validation/accuracy": {7: 0.5},
        }
        self._assert_holds(run, expected)

    def test_a_resumed_attempt_continues_the_same_curves(self, tmp_path: Path) -> None:
        """A crashed attempt logged steps 1 to 4; the next begins at step 3."""
        run, crashed = _run(tmp_path), self.make_tracker()
        crashed.start(run, _JOB, resumed=False)
        for step in range(1, 5):
            crashed.log({"train/loss": 1 / step}, step=step)
        # A crash cannot call finish; a stop is the closest within one process.
        crashed.finish(state="stopped", summary={})
        tracker = self.make_tracker()
        tracker.start(run, _JOB, resumed=True)
        for step in range(3, 7):
            tracker.log({"train/loss": 1 / step}, step=step)
        tracker.finish(state="finished", summary={})
        self._assert_holds(run, {"train/loss": {step: 1 / step for step in range(1, 7)}})

    def test_numbers_that_are_not_finite_do_not_stop_it(self, tmp_path: Path) -> None:
        """A diverging loss must reach the user, not end the tracker."""
        run, tracker = _run(tmp_path), self.make_tracker()
        tracker.start(run, _JOB, resumed=False)
        tracker.log({"train/loss": math.nan}, step=1)
        tracker.log({"train/loss": math.inf}, step=2)
        tracker.log({"train/loss": 2.0}, step=3)
        tracker.finish(state="failed", summary={"train/loss": math.nan})
        curves = self.read_back(run)
        assert curves is None or curves["train/loss"][3] == 2.0

    def test_a_run_that_logged_nothing_can_finish(self, tmp_path: Path) -> None:
        """Stopped before the first step."""
        tracker = self.make_tracker()
        tracker.start(_run(tmp_path), _JOB, resumed=False)
        tracker.finish(state="stopped", summary={})

    def test_an_attempt_resumed_without_earlier_records_starts_new_curves(
        self, tmp_path: Path
    ) -> None:
        """The first attempt may have died before the tracker started."""
        run, tracker = _run(tmp_path), self.make_tracker()
        tracker.start(run, _JOB, resumed=True)
        tracker.log({"train/loss": 0.5}, step=9)
        tracker.finish(state="finished", summary={})
        self._assert_holds(run, {"train/loss": {9: 0.5}})

    def _assert_holds(self, run: RunStore, expected: Curves) -> None:
        curves = self.read_back(run)
        if curves is None:
            return
        for name, points in expected.items():
            assert name in curves, f"{name} was lost; there is {sorted(curves)}"
            assert curves[name].keys() == points.keys(), f"{name}: other steps"
            for step, value in points.items():
                # Some trackers keep single precision.
                assert math.isclose(curves[name][step], value, rel_tol=1e-6), (name, step)


_JOB = Job.model_validate(
    {"name": "contract", "task": "tabular-classification", "model": "mlp", "data": "sklearn:iris"}
)


def _run(directory: Path) -> RunStore:
    path = directory / "contract-run"
    path.mkdir()
    return open_run(path)
