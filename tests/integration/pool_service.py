"""The pool's service, with runs that train nothing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from yunlu.executors import local
from yunlu.scheduler import service

LIGHT_WORKER_GROUP = (sys.executable, str(Path(__file__).with_name("light_worker_group.py")))


def light_program(run: object, devices: int) -> tuple[str, ...]:
    return (*LIGHT_WORKER_GROUP, "--devices", str(devices))


if __name__ == "__main__":
    local.lead_program = light_program
    sys.exit(service.main())
