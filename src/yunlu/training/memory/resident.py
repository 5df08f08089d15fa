"""Peak resident memory of this process."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Peak resident bytes since the process began."""
    with suppress(OSError):
        match = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
        if match:
            return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
