"""Files that are there whole or not at all: names, locks, and what a kill leaves."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.utils.files import (
    Staged,
    open_plain,
    read_plain,
    remove_leftover,
    remove_leftovers,
    replace_file,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_folder_is_flushed_after_the_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, name, folder: in this order, or a power cut can lose the file."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        seen.append("folder" if folder else "data")
        fsync(descriptor)

    def renamed(*arguments: Path) -> None:
        seen.append("name")
        replace(*arguments)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    replace_file(tmp_path / "file", b"new")
    if Path("/proc/self/fd").exists():
        assert seen == ["data", "name", "folder"]
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    replace_file(tmp_path / "file", b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "file", b"new")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_private_files_are_so_from_the_first_byte_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a file that others can open while it is written."""
    modes: list[int] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    umask = os.umask(0o022)
    try:
        replace_file(tmp_path / "mine", b"1", private=True)
        replace_file(tmp_path / "ours", b"2")
    finally:
        os.umask(umask)
    assert modes[::2] == [0o600, 0o644]
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert found == {"mine": 0o600, "ours": 0o644}


def test_nothing_is_put_before_all_is_written(tmp_path: Path) -> None:
    """A folder is missing: the file before has no name yet, and none is left."""
    with pytest.raises(FileNotFoundError):
        Staged(tmp_path, {"a": b"1", "nowhere/b": b"2"})
    assert names(tmp_path) == []
    with Staged(tmp_path, {"a": b"1", "b": b"2"}) as staged:
        staged.put("b")
    assert names(tmp_path) == ["b"]


def test_leftovers_go_but_not_what_is_being_written(tmp_path: Path) -> None:
    left = tmp_path / f".{'a' * 32}.specdec-tmp"
    left.write_bytes(b"half")
    (tmp_path / ".mine.specdec-tmp").write_bytes(b"of somebody else")
    with Staged(tmp_path, {"a": b"1"}) as staged:
        remove_leftovers(tmp_path)
        staged.put("a")
    assert names(tmp_path) == [".mine.specdec-tmp", "a"]
    remove_leftovers(tmp_path / "nowhere")


def test_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none: files are written all the same."""

    def fail(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    lock: Callable[..., None] = fail
    monkeypatch.setattr(fcntl, "flock", lock)
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.timeout(60)
def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    """Opening a FIFO waits for a writer, for ever."""
    os.mkfifo(tmp_path / "fifo")
    for name in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(OSError, match="it is not a plain file"):
            open_plain(name)
    with pytest.raises(IsADirectoryError):
        open_plain(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    with open_plain(tmp_path / "link") as file:
        assert file.read() == b"abc"
    assert read_plain(tmp_path / "file", 3) == b"abc"
    with pytest.raises(OSError, match="it has more than 2 bytes"):
        read_plain(tmp_path / "file", 2)


@pytest.mark.timeout(60)
def test_a_leftover_that_is_no_file(tmp_path: Path) -> None:
    """Whoever may write to the folder could stop every run at its beginning."""
    path = tmp_path / f".{'0' * 32}.specdec-tmp"
    os.mkfifo(path)
    remove_leftovers(tmp_path)
    assert not remove_leftover(path)
