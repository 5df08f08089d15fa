"""The audit fails where it could not look, and on acceptances that nothing needs."""

from __future__ import annotations

import re
import sys
import tomllib
from datetime import UTC, datetime
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def _load() -> Any:
    loader = SourceFileLoader("audit_script", str(ROOT / "scripts" / "audit"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module
    was, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = was
    return module


audit = _load()
PINS = {"torch": "2.13.0", "huggingface-hub": "2.4.0"}


def _answer(name: str, version: str, *flaws: str) -> dict[str, Any]:
    vulns = [{"id": flaw, "fix_versions": ["9"], "aliases": []} for flaw in flaws]
    return {"name": name, "version": version, "vulns": vulns}


def test_an_answer_for_every_pin_passes() -> None:
    answers = [_answer("torch", "2.13.0"), _answer("huggingface_hub", "2.4.0")]
    assert audit.parse_pip_audit({"dependencies": answers}, PINS) == []


@pytest.mark.parametrize(
    "last",
    [
        [{"name": "huggingface-hub", "skip_reason": "Dependency not found on PyPI"}],
        [],
        [{"name": "huggingface-hub", "version": "2.4.1", "vulns": []}],
    ],
    ids=["skipped", "left out", "of another version"],
)
def test_a_skipped_package_is_a_failure_and_not_clean(last: list[Any]) -> None:
    """pip-audit prints "No known vulnerabilities found" and returns 0 where it skipped all."""
    report = {"dependencies": [_answer("torch", "2.13.0"), *last]}
    with pytest.raises(audit.AuditError, match="skipped 1 of 2 packages"):
        audit.parse_pip_audit(report, PINS)


def test_a_flaw_is_named_with_its_fix() -> None:
    answers = [_answer("torch", "2.13.0", "CVE-1"), _answer("huggingface_hub", "2.4.0")]
    problems = audit.parse_pip_audit({"dependencies": answers}, PINS)
    assert problems == ["torch 2.13.0: CVE-1, fixed in 9"]


def test_a_tool_that_is_not_there_or_says_nothing_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(audit.AuditError, match="is not installed"):
        audit._run("no-such-tool", tool_directory=tmp_path)
    with pytest.raises(audit.AuditError, match="ended with code 3"):
        audit._run(Path(sys.executable).name, "-c", "raise SystemExit(3)")
    with pytest.raises(audit.AuditError, match="gave no report"):
        audit._json("pip-audit", "ConnectionError: no route to host")


def test_an_unpinned_line_is_refused() -> None:
    assert audit.read_pins("# c\nTorch_x==2.13.0  # why\n\nb==1; python_version<'3'") == {
        "torch-x": "2.13.0",
        "b": "1",
    }
    with pytest.raises(audit.AuditError, match="is not pinned"):
        audit.read_pins("torch>=2")


def _finding(rule: str, text: str) -> Any:
    return audit.Finding(tool="bandit", rule=rule, file="a.py", line=3, text=text, message="bad")


def test_only_accepted_findings_pass_and_only_while_they_are_found() -> None:
    entry = {"tool": "bandit", "rule": "B1", "file": "a.py", "text": "x = 1", "why": "a test"}
    assert audit.judge("bandit", [_finding("B1", "x = 1")], [entry]) == []
    assert "a.py:3: B2" in audit.judge("bandit", [_finding("B2", "x = 1")], [])[0]
    assert len(audit.judge("bandit", [_finding("B1", "x = 2")], [entry])) == 2
    assert "no longer found" in audit.judge("bandit", [], [entry])[0]
    assert audit.judge("semgrep", [], [entry]) == []


def test_an_acceptance_without_a_reason_is_refused() -> None:
    text = '[[accepted]]\ntool="bandit"\nrule="B1"\nfile="a"\ntext="x"\nwhy=""\n'
    with pytest.raises(audit.AuditError, match="lacks why"):
        audit.read_accepted(text)


def test_the_accepted_findings_of_this_repository_have_reasons() -> None:
    for entry in audit.read_accepted((ROOT / ".audit.toml").read_text()):
        content = (ROOT / entry["file"]).read_text()
        if entry["tool"] != "detect-secrets":  # of secrets, only hashes are kept
            assert entry["text"] in {line.strip() for line in content.splitlines()}, entry


def test_files_that_a_tool_could_not_read_are_a_failure() -> None:
    with pytest.raises(audit.AuditError, match="could not read"):
        audit.parse_bandit({"errors": ["a.py"], "results": []})
    error = {"level": "error", "message": "syntax"}
    with pytest.raises(audit.AuditError, match="syntax"):
        audit.parse_semgrep({"errors": [error], "results": [], "paths": {"scanned": ["a"]}})
    with pytest.raises(audit.AuditError, match="no file"):
        audit.parse_semgrep({"errors": [], "results": [], "paths": {"scanned": []}})


ADVISORY = """
id: PYSEC-1
modified: "{modified}"
affected:
- package: {{name: torch, ecosystem: PyPI}}
  ranges:
  - type: ECOSYSTEM
    events: [{{introduced: "0"}}, {{fixed: "{fixed}"}}]
"""


def _snapshot(directory: Path, *, fixed: str, modified: str = "2026-11-01T00:00:00Z") -> Path:
    (directory / "vulns" / "torch").mkdir(parents=True)
    text = ADVISORY.format(fixed=fixed, modified=modified)
    (directory / "vulns" / "torch" / "PYSEC-1.yaml").write_text(text)
    return directory


NOW = datetime(2026, 11, 18, tzinfo=UTC)


def test_a_snapshot_names_flaws_and_its_age(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = audit.check_snapshot(PINS, _snapshot(tmp_path, fixed="2.14"), now=NOW)
    assert problems == ["torch 2.13.0: PYSEC-1"]
    assert "the newest 17 days old" in capsys.readouterr().out


def test_a_fixed_flaw_is_none(tmp_path: Path) -> None:
    assert audit.check_snapshot(PINS, _snapshot(tmp_path, fixed="2.13.0"), now=NOW) == []


def test_an_advisory_that_cannot_be_judged_is_a_failure() -> None:
    affected = [{"package": {"name": "torch"}, "ranges": [{"type": "GIT", "events": []}]}]
    with pytest.raises(audit.AuditError, match="says of no version"):
        audit.is_affected("2.13.0", affected, "torch")


def test_an_old_snapshot_is_a_failure(tmp_path: Path) -> None:
    snapshot = _snapshot(tmp_path, fixed="2.13.0", modified="2024-10-01T00:00:00.123Z")
    assert "777 days old" in str(audit.check_snapshot(PINS, snapshot, now=NOW))
    with pytest.raises(audit.AuditError, match="no copy of the advisory database"):
        audit.check_snapshot(PINS, tmp_path / "vulns", now=NOW)


def test_every_rule_says_what_to_do_and_the_flaws_of_the_audit_have_theirs() -> None:
    rules = yaml.safe_load((ROOT / ".semgrep.yaml").read_text())["rules"]
    assert all(rule["message"].endswith(".") and rule["severity"] == "ERROR" for rule in rules)
    names = {rule["id"] for rule in rules}
    assert {"store-listens-everywhere", "module-from-a-value", "json-outside-the-decoder"} <= names


def _requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in extras for line in extras[name])]
    return [Requirement(line) for line in lines if not line.startswith("yunlu[")]


def test_the_tested_versions_satisfy_the_lower_bounds() -> None:
    pins = audit.read_pins((ROOT / "constraints.txt").read_text())
    for requirement in _requirements():
        name = audit.normalise(requirement.name)
        if name in pins:
            assert requirement.specifier.contains(pins[name]), requirement


FIXED_IN = {
    "transformers": "5.10.0",  # CVE-2026-9856
    "keras": "3.14.1",  # CVE-2026-12480
    "pillow": "12.3.0",  # CVE-2026-55379
    "pyarrow": "23.0.1",  # CVE-2026-25087
    "ray": "2.55.0",  # CVE-2026-32981
    "mlflow": "3.13.0",  # CVE-2026-8147
    "wandb": "0.28.2",  # GO-2026-5970 in wandb-core
    "lightning": "2.6.6",  # CVE-2026-58659
    "jinja2": "3.1.6",  # CVE-2025-27516
}


@pytest.mark.parametrize("package", FIXED_IN)
def test_lower_bounds_exclude_versions_with_known_flaws(package: str) -> None:
    requirement = next(entry for entry in _requirements() if entry.name == package)
    lowest = re.search(r">=([\d.]+)", str(requirement.specifier))
    assert lowest is not None
    assert Version(lowest[1]) >= Version(FIXED_IN[package])
