"""The most memory that this process held: the system remembers it between two looks."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """The most bytes of main memory that the process has held since it began."""
    with suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
