"""The frame of the command line: help, exit codes, what is and is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from cyclopts.completion.detect import ShellDetectionError

from yunlu import __version__
from yunlu.cli.main import VERBS, main
from yunlu.core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

ALL_VERBS = [verb for verbs in VERBS.values() for verb in verbs]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Put an act of the test's own behind the verb ``doctor``."""

    def play(act: Callable[[], Any]) -> None:
        module = ModuleType("yunlu.cli.machine")

        def doctor() -> Any:
            """Stand in."""
            return act()

        module.doctor = doctor  # pyright: ignore[reportAttributeAccessIssue] (a module made here)
        monkeypatch.setitem(sys.modules, "yunlu.cli.machine", module)

    return play


def fail(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_help_names_every_verb_under_its_group(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in [*ALL_VERBS, *VERBS, "--install-completion", "--debug"])


def test_no_words_at_all_show_the_help(capsys):
    assert main([]) == 0
    assert "Usage: yunlu" in capsys.readouterr().out


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_and_version_import_nothing_heavy():
    """Not even the help of a verb: whoever reads it should not wait."""
    commands = [["--version"], ["--help"], *([verb, "--help"] for verb in ALL_VERBS)]
    script = (
        "import json, sys; from yunlu.cli.main import main;"
        "[main(command) for command in json.loads(sys.argv[1])];"
        "heavy = {'torch', 'numpy', 'sqlalchemy', 'pydantic', 'yunlu.spec', 'yunlu.client.local'};"
        "sys.exit(', '.join(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (4, 4)])
def test_a_verb_ends_with_its_own_code_or_zero(play, result, code):
    play(lambda: result)
    assert main(["doctor"]) == code


def test_a_fault_the_user_can_mend_is_words_on_stderr(play, capsys):
    play(fail(TrainingError("The loss is not finite.", hint="lower the learning rate")))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: The loss is not finite.\n  → lower the learning rate\n"


@pytest.mark.parametrize("command", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(play, capsys, command):
    play(fail(TrainingError("stop")))
    assert main(command) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("error: stop\n")


def test_a_fault_of_ours_is_one_line_and_asks_for_debug(play, capsys):
    play(fail(KeyError("lost [bold]thing[/]")))
    assert main(["doctor"]) == 3
    shown = capsys.readouterr().err
    assert shown.startswith("error: unexpected KeyError: 'lost [bold]thing[/]'\n")
    assert "--debug" in shown
    assert "Traceback" not in shown


def test_long_messages_are_not_broken_into_lines(play, capsys):
    play(fail(TrainingError("word " * 100)))
    main(["doctor"])
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_ctrl_c_ends_with_the_code_shells_expect(play, capsys):
    play(fail(KeyboardInterrupt()))
    assert main(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    script = (
        "import sys, types; m = types.ModuleType('yunlu.cli.machine');"
        "m.doctor = lambda: print('x' * 1_000_000) or sys.stdout.flush();"
        "sys.modules['yunlu.cli.machine'] = m;"
        "from yunlu.cli.main import main; sys.exit(main(['doctor']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_an_unknown_verb_suggests_the_nearest_without_importing_any(capsys):
    assert main(["trian"]) == 2
    shown = capsys.readouterr().err
    assert "there is no command 'trian'; did you mean 'train'?" in shown
    assert "yunlu --help" in shown


def test_a_word_too_many_is_named(capsys):
    assert main(["pool", "simulat"]) == 2
    shown = capsys.readouterr().err
    assert "'simulat' was not expected here" in shown
    assert "yunlu pool --help" in shown


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["validate"], "JOB requires an argument"),
        (["validate", "job.yaml", "--jsn"], "Unknown option: --jsn. Did you mean --json?"),
        (["schema", "extra"], "extra"),
        (["--install-completion", "--shell", "tcsh"], "tcsh"),
    ],
)
def test_wrong_usage_ends_with_two_and_names_the_help(capsys, command, expected):
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert f"yunlu {command[0]} --help" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_knows_the_verbs_and_their_flags(tmp_path, capsys, shell):
    script = tmp_path / "completion"
    assert main(["--install-completion", "--shell", shell, "-o", str(script)]) == 0
    text = script.read_text()
    assert all(verb in text for verb in ALL_VERBS)
    assert "force" in text
    assert str(script) in capsys.readouterr().out


def test_a_shell_that_cannot_be_told_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("yunlu.cli.completion.detect_shell", fail(ShellDetectionError()))
    assert main(["--install-completion"]) == 1
    assert "--shell bash" in capsys.readouterr().err
