"""A home that cannot be made: every command that writes says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from yunlu.cli.main import main

JOB = "task: image-classification\nmodel: cnn\ndata: sklearn:digits\n"
SEARCH = "search: {space: {train.optimizer.lr: 1e-4 .. 1e-1 log}, trials: 2}\n"


@pytest.mark.parametrize("home", ["/dev/null/runs", "/proc/runs"])
@pytest.mark.parametrize(
    "words", [("train", "job.yaml"), ("submit", "job.yaml"), ("pool", "up"), ("tune", "job.yaml")]
)
def test_a_store_that_cannot_be_made_says_what_to_do(
    words: tuple[str, ...],
    home: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB + (SEARCH if words[0] == "tune" else ""))
    monkeypatch.setenv("YUNLU_HOME", home)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert home in said
    assert "set YUNLU_HOME to a directory that is" in said
