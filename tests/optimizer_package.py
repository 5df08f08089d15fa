"""The optimiser that docs/optimizers.md shows, as an installed package of somebody else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.docs.pages import ROOT, blocks
from yunlu.core import imports
from yunlu.spec import schema

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MODULE = "lion_optimizer"


def install_lion(site: Path, *, further: str = "") -> None:
    """Write one module and its entry point, as pip would; ``further`` code follows the page's."""
    page = blocks(ROOT / "docs" / "optimizers.md")
    source = next(block.source for block in page if "LION" in block.source)
    points = next(block.source for block in page if block.language == "toml")
    metadata = site / f"{MODULE}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / f"{MODULE}.py").write_text(source + further, encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1.0\n")
    group, lines = '[project.entry-points."yunlu.optimizers"]', "[yunlu.optimizers]"
    (metadata / "entry_points.txt").write_text(points.replace(group, lines).replace('"', ""))


def use_lion(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install it for this process, and those that it starts, until the test ends."""
    install_lion(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    # What is installed is looked up once per process.
    for module, name in ((imports, "_registered"), (schema, "_plain_schema")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
