"""Run all functions of a program whose names begin with ``check_``, and say which of them failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def run_checks(functions: dict[str, Callable[[], object]]) -> None:
    checks = {name: check for name, check in functions.items() if name.startswith("check_")}
    failed = 0
    for name, check in checks.items():
        try:
            check()
        except Exception:  # noqa: BLE001 - all that failed are told together
            failed += 1
            sys.stderr.write(f"--- {name} failed\n")
            traceback.print_exc()
    sys.stdout.write(f"{len(checks) - failed} of {len(checks)} passed\n")
    sys.exit(failed > 0)


@contextmanager
def raises(kind: type[BaseException], words: str = "") -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert words in str(error), f"not in the words of the error: {words!r}\n{error}"  # noqa: PT017
        return
    raise AssertionError(f"no {kind.__name__}")
