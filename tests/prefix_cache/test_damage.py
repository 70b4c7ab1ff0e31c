"""Whatever an entry holds: a warning, a prefill, the same output."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.prefix_cache.audit import audit
from specdec.prefix_cache.files import tensors
from tests.cache.small_models import MODELS
from tests.fuzz.prefix_folders import signed

from .damaging import Damage
from .harness import TinyModel, decode
from .test_engine import STEM, other
from .test_faults import disk_store

#: They share nothing, so that damage to one of them does not hide that to others.
PROMPTS = [STEM[:22], other(21, 1), other(12, 2), [96 - t for t in STEM[:9]]]
FOLDERS = 64


@pytest.fixture
def sound(
    tiny_model: TinyModel, tmp_path: Path
) -> tuple[Any, list[list[int]], list[list[Path]], int]:
    """A model, its tokens without a store, its entries by prompt, what they save."""
    arch, arguments = MODELS["sliding"]
    target = tiny_model(arch, **arguments)
    store = disk_store(tmp_path / "sound")
    by_prompt: list[list[Path]] = []
    for prompt in PROMPTS:
        before = {path for paths in by_prompt for path in paths}
        decode(target, None, [prompt], store)
        there = set((tmp_path / "sound").iterdir())
        by_prompt.append(sorted(there - before))
    wanted = decode(target, None, PROMPTS, None)[0]
    got = decode(target, None, PROMPTS, store)
    assert got[0] == wanted
    store.close()
    return target, wanted, by_prompt, sum(got[1])


def test_damaged_entries_cost_a_prefill_alone(
    sound: tuple[Any, list[list[int]], list[list[Path]], int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """256 of them, 4 a run: none fails it, changes a token, or is used unnoticed.

    Catches a header or an array that is believed before it is checked, and a file
    whose opening waits.
    """
    target, wanted, by_prompt, whole = sound
    fewer = 0
    for seed in range(FOLDERS):
        folder = tmp_path / "run"
        shutil.copytree(tmp_path / "sound", folder)
        damaged = []
        for i, paths in enumerate(by_prompt):
            victim = folder / paths[(seed + i) % len(paths)].name
            damaged.append(Damage(victim, len(by_prompt) * seed + i))
        store = disk_store(folder)
        tokens, reused, _ = decode(target, None, PROMPTS, store)
        assert tokens == wanted, seed
        store.close()
        for each in damaged:
            # What nothing reaches any more is removed without a word.
            there = each.path.exists() and not each.moved
            assert each.path.name in caplog.text or not there, (seed, each.path)
        fewer += sum(reused) < whole
        audit(folder, contents=True)
        for path in folder.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()
        caplog.clear()
    assert fewer == FOLDERS


@pytest.mark.parametrize("value", [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"])
def test_values_that_are_not_finite_end_no_run(
    sound: tuple[Any, list[list[int]], list[list[Path]], int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    value: bytes,
) -> None:
    """A NaN or an infinity under a digest that is right: it ended the row."""
    target, wanted, by_prompt, _ = sound
    for paths in by_prompt:
        for path in paths:
            data = bytearray(path.read_bytes())
            last = max(tensors(bytes(data)).values(), key=lambda each: each.end)
            data[last.end - 4 : last.end] = value
            signed(path, bytes(data))
    store = disk_store(tmp_path / "sound")
    tokens, reused, _ = decode(target, None, PROMPTS, store)
    store.close()
    assert tokens == wanted
    assert not any(reused)
    assert "not finite" in caplog.text
