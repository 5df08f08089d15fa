"""Sizes of an installation: the core, and what each extra adds, as they lie in this environment.

    .venv/bin/python scripts/install_sizes.py

Downloads are smaller: wheels are compressed. An extra that is not installed here is left out.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "yunlu"


def closure(name: str, extras: frozenset[str]) -> set[str]:
    """A package with all that it needs, by normal names."""
    found: set[str] = set()
    pending = [(name, extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        entry = pending.pop()
        if entry in seen:
            continue
        seen.add(entry)
        name, extras = entry
        found.add(_normal(name))
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras)):
                pending.append((requirement.name, frozenset(requirement.extras)))
    return found


@cache
def size(name: str) -> int:
    """Bytes of the files of a package."""
    about: Distribution = distribution(name)
    if name == PACKAGE:  # an editable one has no files of its own
        root = Path(__file__).resolve().parents[1] / "src"
        return sum(
            path.stat().st_size for path in root.rglob("*") if "__pycache__" not in path.parts
        )
    paths = (Path(str(about.locate_file(file))) for file in about.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def main() -> int:
    """Print one line for the core and for each extra."""
    core = closure(PACKAGE, frozenset())
    train = closure(PACKAGE, frozenset({"train"}))
    extras = distribution(PACKAGE).metadata.get_all("Provides-Extra") or ()
    print(f"{'core':12} {len(core):4} packages {sum(map(size, core)) / 1e6:8,.0f} MB")
    for extra in extras:
        base = core if extra in {"train", "docs", "plot", "tune"} else train
        try:
            added = closure(PACKAGE, frozenset({extra})) - base
            total = sum(map(size, added))
        except PackageNotFoundError as error:
            print(f"{extra:12} not installed here ({error})")
            continue
        beyond = "the core" if base is core else "train"
        print(f"{extra:12} {len(added):4} packages {total / 1e6:8,.0f} MB beyond {beyond}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
