"""docs/api.md says what the docstrings say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT, anchors
from yunlu import __all__ as public_names

SCRIPT = ROOT / "scripts" / "make_api_page.py"
MODULE = '''
class Value: ...
class Base(Value):
    """What all have."""
    number: int = 1
    """How many."""
    _hidden: int = 0
class Answer(Base):
    """An answer."""
    text: Annotated[str | None, Field(max_length=3)] = None
    @property
    def is_long(self) -> bool:
        """Whether it is ``long``."""
class Inner(Value):
    """Inside."""
    plain: int
class Outer(Value):
    inner: Inner
@overload
def ask(question: str) -> Answer: ...
def ask(question: str, *, patience: float = 1.0, **more: Any) -> Answer | Outer:
    """Ask.

    Args:
        question: What is asked,
            in words.
        more: Others.
    """
class AskVerbs(Protocol):
    """Questions."""
    def again(self, name: str, *, loud: bool = False) -> Answer:
        """Ask again."""
class Client(AskVerbs, Protocol):
    """All."""
class Voice(Protocol):
    """A way to say it."""
    def say(self, text: str) -> None:
        """Say it."""
class VoiceContract:
    """Behaviours."""
    def make_voice(self) -> Voice: ...
    def test_it_says_all(self) -> None: ...
'''
PROJECT = "[project.entry-points.'yunlu.voices']\nloud = 'package.module:Loud'\n"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("make_api_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = _load()


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_every_public_name_every_door_and_fits() -> None:
    found = anchors(ROOT / "docs" / "api.md")
    assert {f"yunlu{name.lower()}" for name in public_names} <= found
    assert {"task", "tracker", "executor", "client", "runstore"} <= found
    assert len((ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()) <= 1500


def _make_page(directory: Path) -> str:
    package = directory / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        '_HOMES = {"ask": "package.module"}\n__all__ = ["ask"]\n', encoding="utf-8"
    )
    (package / "module.py").write_text(MODULE, encoding="utf-8")
    return script.make_page(script.Source.read(package), PROJECT)


def test_a_function_has_its_signature_and_arguments(tmp_path: Path) -> None:
    page = _make_page(tmp_path)
    call = "ask(question: str, *, patience: float = 1.0, **more: Any) -> Answer | Outer"
    assert call in page
    assert "| `question` | What is asked, in words. |" in page
    assert "| `more` | Others. |" in page


def test_a_value_has_documented_and_inherited_fields(tmp_path: Path) -> None:
    page = _make_page(tmp_path)
    assert "- `number: int` How many." in page
    assert "`text: str | None`." in page
    assert "- `is_long: bool` Whether it is `long`." in page
    assert "_hidden" not in page
    assert "| `Inner` | Inside. | `plain` |" in page


def test_verbs_and_doors_are_shown_with_contract_and_built_ins(tmp_path: Path) -> None:
    page = _make_page(tmp_path)
    assert "| `again(name, *, loud)` | [`Answer`](#answer) | Ask again. |" in page
    assert "Entry point group `yunlu.voices`; built in: `loud`." in page
    assert "- `say(text) -> None` Say it." in page
    assert "Contract `package.module.VoiceContract`; override `make_voice`. It tests:" in page
    assert "it says all." in page
