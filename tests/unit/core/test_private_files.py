"""Files are their owner's alone, whatever the umask says."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from yunlu.core.errors import StoreError
from yunlu.core.files import (
    append_lines,
    check_home,
    create_private,
    make_directory,
    open_lock,
    open_private,
    restrict_tree,
    write_atomically,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_new_files_have_mode_600(tmp_path: Path, umask: int) -> None:
    write_atomically(tmp_path / "a", "x")
    append_lines(tmp_path / "b", [{"x": 1}])
    with open_private(tmp_path / "c", "xb") as file:
        file.write(b"x")
    create_private(tmp_path / "d")
    open_lock(tmp_path / "e").close()
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == dict.fromkeys("abcde", 0o600)


def test_new_directories_have_mode_700(tmp_path: Path, umask: int) -> None:
    make_directory(tmp_path / "a" / "b" / "c")
    make_directory(tmp_path / "a" / "b" / "c")
    assert {mode(path) for path in tmp_path.rglob("*")} == {0o700}


def test_parents_that_are_there_keep_their_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    make_directory(shared / "new" / "home")
    assert [mode(shared / name) for name in (".", "new", "new/home")] == [0o755, 0o700, 0o700]
    make_directory(shared)  # named itself, it is one's own
    assert mode(shared) == 0o700


def test_the_root_of_all_files_is_no_home() -> None:
    before = mode(Path("/"))
    with pytest.raises(StoreError, match="root of all files"):
        check_home(Path("/"))
    assert mode(Path("/")) == before


def test_existing_files_lose_the_rights_of_others(tmp_path: Path) -> None:
    for name in ("log", "lock"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o666)
    append_lines(tmp_path / "log", [1])
    open_lock(tmp_path / "lock").close()
    assert (mode(tmp_path / "log"), mode(tmp_path / "lock")) == (0o600, 0o600)


def test_what_a_user_names_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "page.html", "x", private=False)
    finally:
        os.umask(before)
    assert mode(tmp_path / "page.html") == 0o640


def test_a_tree_of_a_library_is_restricted_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("")
    outside.chmod(0o644)
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("")
    (tree / "link").symlink_to(outside)
    restrict_tree(tree)
    assert (mode(tree), mode(tree / "deep"), mode(tree / "deep" / "file")) == (0o700, 0o700, 0o600)
    assert mode(outside) == 0o644


@pytest.mark.parametrize("rights", [0o777, 0o775, 0o757, 0o1777, 0o722, 0o702])
def test_a_home_that_others_can_write_to_is_refused(tmp_path: Path, rights: int) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(rights)
    with pytest.raises(StoreError, match="Others can write") as refused:
        check_home(home)
    assert refused.value.hint == f"chmod 700 {home}"
    assert mode(home) == rights


@pytest.mark.parametrize("rights", [0o755, 0o750, 0o711, 0o700])
def test_a_home_that_others_can_read_is_closed_to_them(tmp_path: Path, rights: int) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(rights)
    assert check_home(home) == home
    assert mode(home) == 0o700


def test_a_home_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    assert check_home(tmp_path / "home") == tmp_path / "home"
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_home_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(StoreError, match=r"belongs to another user \(uid 65534\)"):
        check_home(tmp_path)
