"""``yunlu selftest`` on pretend NPUs: what a person sees who runs it on real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.canned_profiles import store_profiles
from tests.pretend.build import environment
from yunlu.training.probe import cpu_name

# A device whose attention is a little wrong, as after a bad driver update.
WRONG_ATTENTION = """
import sys

if "yunlu" in " ".join(sys.orig_argv):
    from importlib.abc import MetaPathFinder

    class Patch(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "yunlu.training.models.transformer":
                sys.meta_path.remove(self)
                from torch.nn import functional
                right = functional.scaled_dot_product_attention

                def wrong(query, *args, **kwargs):
                    answer = right(query, *args, **kwargs)
                    return answer if query.device.type == "cpu" else answer * 1.5

                functional.scaled_dot_product_attention = wrong
            return None

    sys.meta_path.insert(0, Patch())
"""


def run_selftest(folder: Path, *options: str, path: str = "") -> tuple[int, str, dict[str, Any]]:
    """Exit code, what it printed, and the file that it wrote."""
    store_profiles(folder / "cache", cpu=cpu_name(), npu="Pretend npu 0")
    env = environment(memory=256 << 20, PRETEND_RACE_LOG=str(folder / "races")) | {
        "YUNLU_HOME": str(folder / "home"),
        "YUNLU_CACHE": str(folder / "cache"),
        "YUNLU_ACCELERATORS": "npu:2",
        "YUNLU_PATIENCE": "20",
        "COLUMNS": "80",
    }
    env["PYTHONPATH"] = f"{path}:{env['PYTHONPATH']}" if path else env["PYTHONPATH"]
    file = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "yunlu.cli.main", "selftest", *options, "--output", str(file)],
        check=False,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads(file.read_text())


@pytest.mark.usefixtures("pretend")
def test_quick_one_passes_on_two_devices(tmp_path: Path) -> None:
    code, shown, result = run_selftest(tmp_path, "--quick")
    checks = {check["name"]: check for check in result["checks"]}
    assert code == 0, shown
    assert "✓ This machine trains as it should." in shown
    assert result["kind"] == "npu"
    assert result["devices"] == 2
    made = ("cpu", "text", "resume", "kill")
    assert [checks[name]["outcome"] for name in made] == ["ok"] * 4, shown
    assert checks["text"]["difference"] <= 1e-5
    assert "bit-equal" in checks["resume"]["detail"]
    assert "recovered as dp2" in checks["kill"]["detail"]
    figures = checks["text"]["figures"]
    assert 0.5 < figures["memory_bytes"] / figures["predicted_memory_bytes"] < 2
    # The reference is a process of the CPU; a device counts its tensors alone.
    assert checks["cpu"]["figures"]["memory_bytes"] > 100 << 20 > figures["memory_bytes"]
    assert not (tmp_path / "races").exists()
    assert not (tmp_path / "home").exists()


@pytest.mark.usefixtures("pretend")
def test_device_that_computes_wrongly_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(WRONG_ATTENTION)
    path = str(tmp_path / "broken")
    code, shown, result = run_selftest(tmp_path, "--check", "text", path=path)
    assert code == 1
    (failed,) = (check for check in result["checks"] if check["outcome"] == "failed")
    assert failed["name"] == "text"
    assert "the CPU's" in failed["detail"]
    assert "0.1 % allowed" in failed["detail"]
    assert "✗ 1 of 15 checks failed." in shown


@pytest.mark.long
@pytest.mark.usefixtures("pretend")
def test_every_check_that_fits_two_devices_passes(tmp_path: Path) -> None:
    code, shown, result = run_selftest(tmp_path)
    assert code == 0, shown
    outcomes = {check["name"]: check["outcome"] for check in result["checks"]}
    layouts = ("dp", "fsdp", "tp", "pp", "image", "table", "bf16")
    assert {outcomes[name] for name in layouts} == {"ok"}, shown
    assert outcomes["fsdp+tp"] == outcomes["fp8"] == "skipped"
