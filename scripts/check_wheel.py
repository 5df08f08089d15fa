"""Check a wheel before it goes anywhere: its files, its metadata.

    python scripts/check_wheel.py dist/yunlu-*.whl [--release]

``--release`` also wants a version that is released and addresses that exist.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message

ROOT = Path(__file__).resolve().parents[1]
_HEADERS = (
    "Summary",
    "License-Expression",
    "License-File",
    "Requires-Python",
    "Classifier",
    "Project-URL",
)


def find_problems(wheel: Path, *, source: Path, is_release: bool = False) -> list[str]:
    """What is wrong with a wheel; nothing, if it is as it should be."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(archive.read(metadata).decode())
    return [*_file_problems(names, source), *_metadata_problems(about, is_release=is_release)]


def _file_problems(names: set[str], source: Path) -> Iterator[str]:
    wanted = {
        path.relative_to(source.parent).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in names if ".dist-info/" not in name}
    yield from (f"missing: {name}" for name in sorted(wanted - packed))
    yield from (f"does not belong there: {name}" for name in sorted(packed - wanted))
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield "missing: the licence"
    if not any(name.endswith(".dist-info/entry_points.txt") for name in names):
        yield "missing: the command and the entry points"


def _metadata_problems(about: Message, *, is_release: bool) -> Iterator[str]:
    yield from (f"metadata: no {header}" for header in _HEADERS if not about.get_all(header))
    if len(str(about.get_payload())) < 1000 or "markdown" not in str(
        about["Description-Content-Type"]
    ):
        yield "metadata: no description in Markdown"
    if is_release:
        version = str(about["Version"])
        if not all(part.isdecimal() for part in version.split(".")):
            yield f"release: {version} is not the version of a release"
        for url in about.get_all("Project-URL") or ():
            if ".example" in url:
                yield f"release: {url} leads nowhere; set project.urls in pyproject.toml"


def main() -> int:
    """Print what is wrong."""
    parser = argparse.ArgumentParser(description="Check a wheel.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--release", action="store_true")
    arguments = parser.parse_args()
    source = ROOT / "src" / "yunlu"
    problems = find_problems(arguments.wheel, source=source, is_release=arguments.release)
    for problem in problems:
        print(problem)
    if not problems:
        print(
            f"{arguments.wheel.name}: {arguments.wheel.stat().st_size / 1e6:.1f} MB, as it should be"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
