"""The real command with trials that train nothing: ``toy_tune.py tune JOB ...``."""

from __future__ import annotations

import sys
from typing import Any

from tests.integration.toy_study import ToySlots
from yunlu.cli.main import main
from yunlu.tuning import forecast
from yunlu.tuning.study_dir import StudyError
from yunlu.tuning.study_runner import slots


def find_toys(**_asked: Any) -> ToySlots:
    """Two places for toys, whatever is asked."""
    return ToySlots()


def refuse_plan(_job: Any) -> Any:
    """Nobody knows how long toys take."""
    raise StudyError("toys are not planned")


if __name__ == "__main__":
    slots.find_slots = find_toys
    forecast.plan_alone = refuse_plan
    sys.exit(main(sys.argv[1:]))
