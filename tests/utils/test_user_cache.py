"""Folders of the user's cache for code that is run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.utils.user_cache import private_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def test_a_folder_is_made_once(cache: Path) -> None:
    folder = private_folder("code")
    assert folder == private_folder("code") == cache / "specdec" / "code"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_links_above_it_are_followed_at_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever changes a link later would choose the code that is run."""
    (tmp_path / "link").symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert private_folder("code") == cache / "specdec" / "code"


def make_link(folder: Path) -> None:
    (folder.parent / "other").mkdir(mode=0o700)
    folder.rmdir()
    folder.symlink_to(folder.parent / "other")


def make_file(folder: Path) -> None:
    folder.rmdir()
    folder.touch()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: folder.chmod(0o770),
        lambda folder: folder.chmod(0o707),
        lambda folder: folder.parent.chmod(0o777),
        lambda folder: folder.parent.parent.chmod(0o777),
        make_link,
        make_file,
    ],
)
def test_what_others_can_write_is_refused(
    cache: Path, change: Callable[[Path], None]
) -> None:
    """Code of another user would run as this one."""
    change(private_folder("code"))
    with pytest.raises(OSError, match=r"alone|others|exists"):
        private_folder("code")


def test_another_user_s_folder_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_folder("code")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="alone"):
        private_folder("code")


def test_a_folder_within_another_user_s_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns a folder can replace what is in it, whatever its mode says."""
    above, lstat = private_folder("code").parent, Path.lstat

    def owned(path: Path) -> os.stat_result:
        entry = list(lstat(path))
        if path == above:
            entry[4] = os.geteuid() + 1
        return os.stat_result(entry)

    monkeypatch.setattr(Path, "lstat", owned)
    with pytest.raises(PermissionError, match="others can write"):
        private_folder("code")


def test_a_shared_folder_above_is_no_harm_if_entries_are_safe(cache: Path) -> None:
    """A user's group is often the user alone, and ``/tmp`` is sticky."""
    cache.chmod(0o1777)
    private_folder("code").parent.chmod(0o770)
    assert private_folder("code").is_dir()
