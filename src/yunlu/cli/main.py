"""The ``yunlu`` command: finds the verb, and turns every result into a message and an exit code.

Exit codes: 0 done, 1 an error the user can fix, 2 wrong usage, 3 an error of ours, 130 Ctrl-C, 143 SIGTERM.
A verb returns None or its own exit code; its module is imported only when it is called.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cyclopts import App, CycloptsError, Group, Parameter, UnknownCommandError, UnusedCliTokensError
from rich.text import Text

from yunlu import __version__
from yunlu.core.errors import YunluError, did_you_mean
from yunlu.core.secrets import mask
from yunlu.core.settings import read_language
from yunlu.render.terminal.page import TerminalConsole, print_lines, print_note

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

VERBS: dict[str, dict[str, str]] = {
    "Train": {
        "train": "Train the job of a file: plan, train, evaluate, report.",
        "finetune": "Fine-tune a trained model on other data: every weight, or LoRA.",
        "tune": "Search for good settings of a job: many trials, poor ones stopped early.",
        "plan": "Choose hardware and layout, predict time and cost, without training.",
        "resume": "Continue a stopped, failed or lost run.",
        "resize": "Give a run more or fewer workers while it trains.",
        "join": "Lend this machine's devices to a run that trains elsewhere.",
    },
    "Share": {
        "submit": "Queue a job for the pool, and return.",
        "pool": "Share devices among jobs: start a pool, watch it, explain its decisions.",
        "priority": "Change the priority of a queued or running job.",
        "pause": "Save a run of the pool and release its devices, until it is resumed.",
    },
    "Watch": {
        "ps": "List runs and their progress.",
        "logs": "Print events and output of a run; -f follows it.",
        "show": "Show one run: state, plan, metrics, checkpoints.",
        "study": "Show studies: list, show, report, best; stop one that runs.",
        "stop": "Ask a run to save a checkpoint and stop.",
        "report": "Write the report of a run: terminal, JSON, one HTML page.",
    },
    "Clean up": {
        "du": "Show who takes the space: runs, checkpoints, caches, data sets.",
        "rm": "Remove runs, after a question.",
        "prune": "Remove old checkpoints, failed runs and caches, after a question.",
    },
    "Set up": {
        "init": "Write a first job file for a task and some data.",
        "validate": "Check a job file and show how it was read.",
        "schema": "Print the JSON Schema of a job file, for editors.",
        "catalog": "List devices and what they cost; add prices, machines, devices.",
        "doctor": "Show what this machine has and what is missing.",
        "selftest": "Train small jobs on this machine's devices: does it work, how fast.",
        "probe": "Measure this machine, so that predictions for it are accurate.",
    },
}

_FILES = {
    **dict.fromkeys(("finetune", "resume"), "train"),
    **dict.fromkeys(("submit", "priority", "pause"), "pool"),
    **dict.fromkeys(("ps", "show", "logs", "report", "stop", "resize", "join"), "runs"),
    **dict.fromkeys(("du", "rm", "prune"), "cleanup"),
    **dict.fromkeys(("init", "validate", "schema"), "job_file"),
    **dict.fromkeys(("doctor", "probe"), "machine"),
}
"""Files of verbs that are named otherwise than the verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    tokens, debug = _take_debug(list(sys.argv[1:] if argv is None else argv))
    try:
        with _sigterm_raised():
            code = _run(tokens, debug=debug)
        sys.stdout.flush()
    except TerminatedError:
        return 143
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141  # as a shell counts a program ended by SIGPIPE
    return code


class TerminatedError(KeyboardInterrupt):
    """SIGTERM: ends a verb as Ctrl-C does, with its processes and temporary files."""


@contextmanager
def _sigterm_raised() -> Generator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # a program that calls us has its own way to end
        return

    def end(*_: object) -> None:
        raise TerminatedError

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def build_app() -> App:
    """The verbs and their help; nothing behind them is imported."""
    app = App(
        name="yunlu",
        **_speak_chinese(),
        help="Plan, train and report large models from one job file.",
        version=__version__,
        help_epilogue="Add --debug to any command to see the traceback of an error.",
        help_format="plaintext",
        version_format="plaintext",
        default_parameter=Parameter(negative=(), show_default=_show_default),
        group_commands=Group("Options", sort_key=len(VERBS)),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for order, (title, verbs) in enumerate(VERBS.items()):
        group = Group(title, sort_key=order)
        for position, (verb, about) in enumerate(verbs.items()):
            import_path = f"yunlu.cli.{_FILES.get(verb, verb)}:{verb}"
            app.command(import_path, name=verb, help=about, group=group, sort_key=position)
    app.command(
        "yunlu.cli.completion:install_completion",
        name="--install-completion",
        help="Install completion for bash, zsh or fish.",
    )
    return app


def _speak_chinese() -> dict[str, Any]:
    """Options of the help in Chinese, which English users need not import."""
    if read_language() != "zh":
        return {}
    from yunlu.cli.chinese_help import ChineseHelp  # noqa: PLC0415 (as above)

    return {"console": TerminalConsole(), "help_formatter": ChineseHelp()}


def _run(tokens: list[str], *, debug: bool) -> int:
    try:
        code = build_app()(tokens)
    except CycloptsError as error:
        verb = " ".join(["yunlu", *(error.command_chain or ())])
        return _fail(2, mask(_describe_usage(error)), hint=f"{verb} --help", debug=debug)
    except YunluError as error:
        return _fail(1, mask(error.message), hint=mask(error.hint or "") or None, debug=debug)
    except (BrokenPipeError, KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:  # noqa: BLE001 (the last border: the user gets a message, not a traceback)
        message = mask(f"unexpected {type(error).__name__}: {error}".rstrip(": "))
        hint = None if debug else "run the same command with --debug and report what it prints"
        return _fail(3, message, hint=hint, debug=debug)
    return code if isinstance(code, int) else 0


def _take_debug(tokens: list[str]) -> tuple[list[str], bool]:
    """``--debug`` may come before or after the verb."""
    end = tokens.index("--") if "--" in tokens else len(tokens)
    options = [token for token in tokens[:end] if token != "--debug"]  # noqa: S105 (not a secret)
    return [*options, *tokens[end:]], len(options) < end


def _describe_usage(error: CycloptsError) -> str:
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        # The library would import every verb to answer.
        verb, known = error.unused_tokens[0], [verb for verbs in VERBS.values() for verb in verbs]
        return f"there is no command {verb!r}; {did_you_mean(verb, known)}"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"{' '.join(error.unused_tokens)!r} was not expected here"
    return " ".join(str(error).split())


def _show_default(value: Any) -> str | None:
    """Flags that are off, empty lists and empty texts need no mention."""
    return None if value is False or value in ((), "") else str(value)


def _fail(code: int, message: str, *, hint: str | None, debug: bool) -> int:
    if debug:
        print_note(mask(traceback.format_exc()).rstrip())
    console = TerminalConsole(stderr=True)
    print_lines(console, Text.assemble(("error: ", "bold red"), (message, "red")))
    if hint:
        print_lines(console, Text.assemble(("  → ", "dim"), hint), hang=4)
    return code


def _silence_stdout() -> None:
    """The reader is gone: what is still buffered must raise no error when Python ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a stdout without a descriptor
        return


if __name__ == "__main__":
    sys.exit(main())
