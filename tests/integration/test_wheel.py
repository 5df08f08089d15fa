"""What ``pip install yunlu`` gets: built, looked into, installed beside nothing of the source, and used."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pytest.importorskip("hatchling", reason="the package is built with hatchling")


def _load_check() -> Any:
    path = ROOT / "scripts" / "check_wheel.py"
    spec = importlib.util.spec_from_file_location("check_wheel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_wheel = _load_check()


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place, cwd=ROOT)
    (built,) = place.glob("yunlu-*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    assert check_wheel.find_problems(wheel, source=ROOT / "src" / "yunlu") == []
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("render/templates/", "render/i18n/zh.json", "hardware/data/", "planning/data/",
                 "py.typed"):  # fmt: skip
        assert any(name.startswith(f"yunlu/{part}") for name in names), part
    assert not any(name.startswith(("tests/", "docs/")) for name in names)


def test_a_wheel_that_lacks_something_is_not_passed(wheel: Path, tmp_path: Path) -> None:
    poor = tmp_path / "poor.whl"
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(poor, "w") as part:
        for name in whole.namelist():
            if not name.endswith(("zh.json", "LICENSE", "METADATA")):
                part.writestr(name, whole.read(name))
            elif name.endswith("METADATA"):
                part.writestr(
                    name, "Name: yunlu\nVersion: 0.2.dev1\nProject-URL: A, https://b.example\n\n"
                )
        part.writestr("tests/test_it.py", "")
    problems = "\n".join(
        check_wheel.find_problems(poor, source=ROOT / "src" / "yunlu", is_release=True)
    )
    for words in (
        "missing: yunlu/render/i18n/zh.json",
        "does not belong there: tests/test_it.py",
        "missing: the licence",
        "no Classifier",
        "0.2.dev1 is not the version",
        "b.example leads nowhere",
    ):
        assert words in problems


@pytest.mark.slow
def test_the_installed_wheel_shows_help_examines_the_machine_and_trains(
    wheel: Path, tmp_path: Path, own_home: Path
) -> None:
    place = tmp_path / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", place, cwd=tmp_path)
    python, yunlu = place / "bin" / "python", place / "bin" / "yunlu"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
         "--no-index", "--no-compile", wheel, cwd=tmp_path)  # fmt: skip
    # What it needs comes from here; a .pth found through a .pth is not read, so the source is not.
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import yunlu, importlib.metadata as m; print(yunlu.__file__, m.version('yunlu'))"
    file, version = _run(python, "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(place)
    assert f"yunlu-{version}-" in wheel.name

    assert "prune" in _run(yunlu, "--help", cwd=tmp_path)
    findings = json.loads(_run(yunlu, "doctor", "--json", cwd=tmp_path))
    assert (findings["yunlu"], findings["can_train"]) == (version, True)
    job = "task: tabular-classification\nmodel: mlp\ndata: sklearn:iris\ntrain: {epochs: 1}\n"
    (tmp_path / "iris.yaml").write_text(job)
    out = _run(yunlu, "train", "iris.yaml", cwd=tmp_path)
    assert "finished" in out
    assert "A100" in _run(yunlu, "catalog", "--gpu", "A100", cwd=tmp_path)
    assert "iris-" in _run("env", "YUNLU_LANG=zh", yunlu, "du", cwd=tmp_path)
    (page,) = own_home.glob("iris-*/report.html")
    assert "数据" in page.read_text(encoding="utf-8")
    assert "finished" in _run(yunlu, "ps", cwd=tmp_path)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_says_how_large_every_extra_is(page: str) -> None:
    extras = PROJECT["optional-dependencies"].keys() - {"all", "dev", "docs", "audit", "train"}
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = {name for name in extras if not re.search(rf"`{name}` \d\.\d\d", text)}
    assert not missing


def test_the_metadata_of_the_project_names_classifiers_that_exist() -> None:
    from trove_classifiers import classifiers

    assert set(PROJECT["classifiers"]) <= classifiers
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= PROJECT["urls"].keys()
