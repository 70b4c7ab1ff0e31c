"""Whatever happens to the folder: a warning, a prefill as usual, the same tokens."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.prefix_cache.disk import DiskTier
from specdec.prefix_cache.files import File
from specdec.prefix_cache.store import PrefixStore
from tests.cache.small_models import MODELS
from tests.plain import greedy

from .harness import (
    NEW_TOKENS,
    TinyModel,
    decode,
    memory_store,
)
from .test_engine import STEM, other

PROMPTS = [STEM[:40], STEM[:26] + other(30, 1), other(35, 2)]
#: Tokens reused when everything is stored.
WHOLE = [39, 55, 34]
KILLS = 50


def disk_store(folder: Path) -> PrefixStore:
    return memory_store(memory=0, folder=folder, disk=1 << 30)


@pytest.fixture
def models(tiny_model: TinyModel) -> tuple[Any, Any, list[list[int]]]:
    arch, arguments = MODELS["sliding"]
    target = tiny_model(arch, **arguments)
    wanted = [greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    return target, tiny_model("llama", seed=1), wanted


def counts_of(module: str, *arguments: Any) -> list[int]:
    """What a module of these tests prints, run as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.prefix_cache.{module}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_killed_while_writing(
    models: tuple[Any, Any, list[list[int]]], tmp_path: Path
) -> None:
    """50 times, at random moments; after them a run uses what was left."""
    target, draft, wanted = models
    source, folder = tmp_path / "source", tmp_path / "folder"
    store = disk_store(source)
    assert decode(target, draft, PROMPTS, store)[0] == wanted
    store.close()
    folder.mkdir()
    killed, partial = counts_of("killed", source, folder, KILLS, 0)
    assert killed == KILLS
    store = disk_store(folder)
    tokens, *found = decode(target, draft, PROMPTS, store)
    assert tokens == wanted
    # That run has stored the rest.
    assert decode(target, draft, PROMPTS, store)[:2] == (wanted, WHOLE)
    store.close()
    assert partial > 5  # moments in the middle of the work
    assert sum(map(sum, found)) > 0


def test_two_processes_write_at_once(
    models: tuple[Any, Any, list[list[int]]], tmp_path: Path
) -> None:
    """Into one folder, one of them with place for half: neither is harmed."""
    target, draft, _ = models
    source, folder = tmp_path / "source", tmp_path / "folder"
    store = disk_store(source)
    decode(target, draft, PROMPTS, store)
    store.close()
    folder.mkdir()
    (whole,) = counts_of("raced", source, folder, 20, 0)
    # Where both had place for all, all is there.
    assert whole >= 10


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(remove, "ring"), (cut, "block"), (flip, "block"), (flip, "ring")],
)
def test_between_look_up_and_read(
    fault: Callable[[Path], None],
    kind: str,
    models: tuple[Any, Any, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One entry after the other is gone, or wrong, when its turn comes."""
    target, draft, wanted = models
    store = disk_store(tmp_path)
    decode(target, draft, PROMPTS, store)
    assert decode(target, draft, PROMPTS, store)[1] == WHOLE
    harmed: list[str] = []
    read = DiskTier.read

    def harm(self: DiskTier, file: File) -> bytes | None:
        if file.kind == kind and len(harmed) < 3:
            harmed.append(file.name)
            fault(self.folder / file.name)
        return read(self, file)

    monkeypatch.setattr(DiskTier, "read", harm)
    tokens, reused, _ = decode(target, draft, PROMPTS, store)
    assert tokens == wanted
    assert len(set(harmed)) == 3
    assert all(name in caplog.text for name in harmed)
    monkeypatch.undo()
    # It was computed, and stored again.
    assert sum(reused) < sum(WHOLE)
    assert decode(target, draft, PROMPTS, store)[:2] == (wanted, WHOLE)


@pytest.mark.parametrize(
    ("code", "good"), [(errno.ENOSPC, 0), (errno.EROFS, 1), (errno.ENOSPC, 5)]
)
def test_a_full_disk_and_a_read_only_folder(
    code: int,
    good: int,
    models: tuple[Any, Any, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After some good writes none succeeds; what was written is still used."""
    target, draft, wanted = models
    calls = []

    def fsync(_: int) -> None:
        calls.append(1)
        if len(calls) > 2 * good:  # each file, then its folder
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    store = disk_store(tmp_path)
    for _ in range(2):
        assert decode(target, draft, PROMPTS, store)[0] == wanted
    assert caplog.text.count("cannot be written") == 1
    assert len(list(tmp_path.iterdir())) == good
    monkeypatch.undo()
    assert decode(target, draft, PROMPTS, disk_store(tmp_path))[0] == wanted


def test_a_folder_that_is_gone(
    models: tuple[Any, Any, list[list[int]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, draft, wanted = models
    store = disk_store(tmp_path / "gone")
    decode(target, draft, PROMPTS, store)
    for path in (tmp_path / "gone").iterdir():
        path.unlink()
    (tmp_path / "gone").rmdir()
    tokens, reused, _ = decode(target, draft, PROMPTS, store)
    assert tokens == wanted
    assert sum(reused) == 0
    assert "cannot be read" in caplog.text
