"""What fused kernels a run compiles: the fewer, the sooner a first run is fast."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.backend import defaults

RUN = """
from dataclasses import replace
import mlx.core as mx
from specdec import EngineConfig, SamplingParams, SpecDecoder, backend
from specdec.tools.bench.models import random_model
from specdec.tools.decoding import token_level
cpu = backend.defaults()
made = replace(
    cpu, read_bucket=64, static_shapes=True, costs_by_token=False,
    compile_after=0, pad_single_token=True
)
backend.defaults = lambda: made
target, draft = random_model("tiny", "float32"), random_model("tiny", "float32")
for k in map(int, {ks!r}.split()):
    config = EngineConfig(batch_size=2, num_draft_tokens=k)
    decoder = SpecDecoder(token_level(target), token_level(draft), config=config)
    decoder.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=70))
"""


def kernels(folder: Path, ks: str) -> set[str]:
    """Names of what MLX compiled into ``folder`` for runs with these draft lengths."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    run = [sys.executable, "-c", RUN.format(ks=ks)]
    subprocess.run(run, env=environment, check=True, timeout=300)
    return {file.name for file in folder.rglob("*.so")}


@pytest.mark.skipif(
    defaults().name != "cpu" or shutil.which("g++") is None,
    reason="MLX's CPU backend tells what it compiles, and needs g++ for that",
)
def test_another_draft_length_needs_no_other_kernels(tmp_path: Path) -> None:
    """A number is part of a kernel; or a mask's, or a position's, broadcasts are."""
    one = kernels(tmp_path, "2")
    assert one
    assert not [name for name in one if "LessEqual" in name or "OSelect" in name]
    assert not [name for name in one if "i4OAdd" in name or "i4OSubtract" in name]
    # What is there is used: only others would be compiled.
    assert kernels(tmp_path, "2 3 5") == one
