"""``yunlu --install-completion``."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.completion import detect_shell
from cyclopts.completion.detect import ShellDetectionError

from yunlu.cli.main import build_app
from yunlu.core.errors import YunluError
from yunlu.render.terminal.page import print_text


def install_completion(
    *,
    shell: Literal["bash", "zsh", "fish"] | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
) -> None:
    """Install completion for bash, zsh or fish.

    Args:
        shell: The shell to complete in; the one running now when not given.
        output: Write the script here and touch nothing else.
    """
    chosen = shell or _running_shell()
    app = build_app()
    path = app.install_completion(shell=chosen, output=output, add_to_startup=output is None)
    print_text(f"Wrote {path}.")
    if output is None:
        print_text("Open a new shell to use it.")


def _running_shell() -> Literal["bash", "zsh", "fish"]:
    hint = "name it: yunlu --install-completion --shell bash (or zsh, fish)"
    try:
        running = detect_shell()
    except ShellDetectionError:
        raise YunluError("Cannot tell which shell is running.", hint=hint) from None
    if running == "powershell":
        raise YunluError("There is no completion for PowerShell yet.", hint=hint)
    return running
