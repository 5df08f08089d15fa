"""Processes beside the workers start at once and stay small: they load no torch."""

from __future__ import annotations

import subprocess
import sys

LIGHT = ("yunlu.training.elastic.supervisor", "yunlu.training.trial_control")


def test_supervisors_and_the_control_of_trials_load_no_torch() -> None:
    # A new supervisor takes over while workers wait: a second of importing is a second of the group.
    program = f"import sys; sys.modules['torch'] = None; import {', '.join(LIGHT)}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
