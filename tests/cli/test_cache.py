"""``specdec cache``, and the options of ``specdec run`` for it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from specdec.prefix_cache.disk import DiskTier
from tests.prefix_cache.entries import SIZE, served, write_chain

from .conftest import Specdec

Refusing = Callable[[str], AbstractContextManager[None]]
TOKENS = list(range(3 * SIZE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    disk = DiskTier(tmp_path / "cache", 1 << 30)
    write_chain(disk, TOKENS, model="a-model")
    disk.close()
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    return tmp_path / "cache"


def damage(folder: Path) -> str:
    """Flip a bit of the first entry; its name."""
    name = served(DiskTier(folder, 1 << 30), TOKENS)[0].name
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    return name


def test_list_and_verify(specdec: Specdec, folder: Path) -> None:
    listed = specdec("cache", "list", str(folder))
    assert listed.exit_code == 0
    first, last = listed.stdout.splitlines()
    assert first.startswith("55555555  a-model: 3 entries, ")
    assert ", longest prefix 12 tokens, last used 2" in first
    assert last.startswith("3 entries, ")
    verified = specdec("cache", "verify", str(folder))
    assert verified.exit_code == 0
    assert verified.stdout.startswith("3 entries, ")
    assert verified.stdout.endswith(": verified\n")
    (folder / f"block-{'0' * 32}-{'0' * 32}.safetensors").write_text("")
    listed = specdec("cache", "list", str(folder))
    assert "note: 1 entry of no use: specdec cache verify" in listed.stderr


def test_damage_is_removed_with_what_stands_on_it(
    specdec: Specdec, folder: Path
) -> None:
    name = damage(folder)
    result = specdec("cache", "verify", str(folder))
    assert result.exit_code == 1
    assert f"removed {name}: its contents do not match its name" in result.stdout
    assert result.stdout.count("what it stands on is not there") == 2
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_clear(specdec: Specdec, folder: Path, not_writable: Refusing) -> None:
    """Files of the user's are removed, or what could not be is not named."""
    first, *_ = served(DiskTier(folder, 1 << 30), TOKENS)
    damage(folder)
    (folder / f".{'a' * 32}.specdec-tmp").write_text("half")
    (folder / f"block-{'0' * 32}-{'0' * 32}.safetensors").write_text("")
    with not_writable(first.name):
        result = specdec("cache", "clear", str(folder))
    assert (result.exit_code, result.stdout) == (1, "removed 3 entries\n")
    assert f"{first.name} could not be removed from {folder}: Perm" in result.stderr
    assert {path.name for path in folder.iterdir()} == {"notes.txt", first.name}
    assert specdec("cache", "clear", str(folder)).stdout == "removed 1 entry\n"
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.fixture
def not_writable(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    """Entries whose names begin so cannot be removed."""

    @contextmanager
    def refuse(start: str) -> Iterator[None]:
        unlink = Path.unlink

        def refusing(path: Path, missing_ok: bool = False) -> None:
            if path.name.startswith(start):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            unlink(path, missing_ok=missing_ok)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refusing)
            yield

    return refuse


@pytest.mark.parametrize("command", ["verify", "clear"])
def test_nothing_can_be_removed(
    command: str, specdec: Specdec, folder: Path, not_writable: Refusing
) -> None:
    name = damage(folder)
    with not_writable("block-"):
        result = specdec("cache", command, str(folder))
    assert result.exit_code == 1
    if command == "clear":
        assert result.stdout == "removed 0 entries\n"
    else:
        assert f"damaged {name}: its contents do not match" in result.stdout
        assert "removed" not in result.stdout
    assert " and 2 more could not be removed from " in result.stderr
    assert result.stderr.endswith(": Permission denied\n")
    assert result.stderr.count("\n") == 1
    assert len(list(folder.iterdir())) == 4


def test_it_answers_without_mlx(folder: Path) -> None:
    code = (
        "import sys; from specdec.cli import main;"
        f"main(['cache', 'list', {str(folder)!r}], standalone_mode=False);"
        "print({'mlx', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")
