"""A process that is killed leaves whole files, and a run goes on exactly."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx

from specdec.tools.distill.checkpoint import NAME
from specdec.tools.distill.corpus import Corpus, Document
from specdec.tools.distill.storage import write_file
from specdec.utils.files import is_temporary, remove_leftovers

from .harness import (
    options,
    run,
    same,
    write_target,
)

KILLS = 60
VERSIONS = [bytes([i]) * 300_000 for i in range(4)]


def forked() -> int:
    """As ``os.fork``; the child has nothing to do with MLX's threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later
        return os.fork()


def test_a_file_is_one_of_its_versions(tmp_path: Path) -> None:
    """A child replaces it again and again and is killed; 60 times and more.

    Some of the moments have to be in the middle of the work; how many kills that
    takes, and how long a child takes to begin, depends on the machine.
    """
    draw, path, left, longest = random.Random(0), tmp_path / "file", 0, 0.02
    write_file(path, VERSIONS[0])
    for kills in range(20 * KILLS):
        if kills >= KILLS and left > 5:
            break
        child = forked()
        if child == 0:
            while True:
                for version in VERSIONS:
                    write_file(path, version)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in VERSIONS
        if any(is_temporary(p.name) for p in tmp_path.iterdir()):
            left += 1
        else:
            longest = min(1.1 * longest, 1.0)
        remove_leftovers(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert left > 5


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Killed twice while it learns; the end is that of a run in one piece."""
    target, out = write_target(tmp_path / "target"), tmp_path / "out"
    whole = run(options(target, tmp_path / "whole"))
    command = [
        sys.executable,
        "-m",
        "tests.tools.distill.killed",
        str(target),
        str(out),
    ]
    checkpoint, seen = out / "work" / NAME, 0
    for checkpoints in (1, 2):
        done = subprocess.run([*command, str(checkpoints)], check=False)
        assert done.returncode == -signal.SIGKILL, "it ended before it was killed"
        written = checkpoint.stat().st_mtime_ns
        assert written > seen
        seen = written
    card = run(options(target, out, resume=True))
    assert card["training"]["steps"] == whole["training"]["steps"]
    found: Any = mx.load(str(out / "model.safetensors"))
    wanted: Any = mx.load(str(tmp_path / "whole" / "model.safetensors"))
    assert same(found, wanted)


def test_waves_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    documents = [Document((1, 2, 3), 1, 0), Document((4, 5), 1, 1)]
    corpus = Corpus(tmp_path, "a")
    corpus.add(corpus.next_wave, documents, 2.5)
    (tmp_path / f".{'a' * 32}.specdec-tmp").write_bytes(b"half")
    again = Corpus(tmp_path, "a")
    assert again.waves == ["wave-00000"]
    assert (again.num_tokens, again.seconds) == (5, 2.5)
    assert list(again.documents(again.waves)) == documents
    assert len(list(tmp_path.iterdir())) == 1
