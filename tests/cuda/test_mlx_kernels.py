"""MLX's kernels that other processes compile."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec.cuda import kernel_files, mlx_kernels
from specdec.cuda.mlx_kernels import LAUNCHES, compiled_beside
from specdec.utils.child import module_process

WRITES = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["MLX_PTX_CACHE_DIR"])
for end in ("ptx", "txt", "cu"):
    (folder / f"{sys.argv[1]}_{sys.argv[2]}.{end}").write_text(end)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MLX's folder on a GPU with much free memory."""
    monkeypatch.setattr(kernel_files, "kernel_folder", lambda: tmp_path)
    monkeypatch.setattr(mx, "device_info", lambda: {"free_memory": 60 << 30})
    runs(monkeypatch, WRITES)
    return tmp_path


def runs(monkeypatch: pytest.MonkeyPatch, code: str) -> list[str]:
    """Let each process run this code; return which have been started."""
    started: list[str] = []

    def program(module: str, arguments: Any) -> Any:
        assert module == "specdec.cuda.mlx_kernels"
        started.append(arguments[0])
        _, environment = module_process(module)
        return [sys.executable, "-c", code, *arguments], environment

    monkeypatch.setattr(mlx_kernels, "module_process", program)
    return started


def compile_all(dtype: mx.Dtype | None = mx.bfloat16) -> None:
    with compiled_beside(dtype) as waits:
        for wait in waits:
            wait()


def names(folder: Path, suffix: str) -> set[str]:
    return {file.stem for file in folder.glob(f"*{suffix}")}


def test_mlx_finds_what_they_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files left where they were made, or compiled by every process again."""
    compile_all()
    expected = {f"{each}_bfloat16" for each in LAUNCHES}
    for suffix in (".ptx", ".txt", ".cu"):
        assert names(folder, suffix) == expected
    assert not [entry for entry in folder.iterdir() if entry.is_dir()]
    started = runs(monkeypatch, WRITES)
    compile_all()
    assert started == []
    compile_all(mx.float16)
    assert started == list(LAUNCHES)


def test_one_that_fails_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX reads half a kernel, or each process waits for one that never works."""
    runs(monkeypatch, f"{WRITES}\nsys.exit(1)")
    compile_all()
    assert not list(folder.glob("*.ptx"))
    started = runs(monkeypatch, WRITES)
    compile_all()
    assert started == []


def test_what_is_not_waited_for_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while a model loads leaves processes on the GPU, and their folders."""
    runs(monkeypatch, "import time; time.sleep(600)")
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def watched(*arguments: Any, **options: Any) -> Any:
        processes.append(start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", watched)

    def fails() -> None:
        with compiled_beside(mx.bfloat16):
            raise ValueError("a shape")

    with pytest.raises(ValueError, match="a shape"):
        fails()
    assert len(processes) == len(LAUNCHES)
    assert all(process.poll() is not None for process in processes)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("missing", ["folder", "memory", "type", "program"])
def test_mlx_compiles_where_they_cannot(
    missing: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that take the memory a model needs, or an error where none can run."""
    started = runs(monkeypatch, WRITES)
    if missing == "folder":
        monkeypatch.setattr(kernel_files, "kernel_folder", lambda: None)
    if missing == "memory":
        monkeypatch.setattr(mx, "device_info", lambda: {"free_memory": 2 << 30})
    if missing == "program":
        monkeypatch.setattr(mlx_kernels, "module_process", lambda *_: (["/no"], {}))
    compile_all(None if missing == "type" else mx.bfloat16)
    assert started == []
    assert not list(folder.glob("*.ptx"))


@pytest.mark.parametrize("name", LAUNCHES)
def test_each_process_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process ends with an error, and compiles nothing."""
    program, environment = module_process(mlx_kernels.__name__, (name, "bfloat16"))
    subprocess.run(program, env=environment, check=True, timeout=60)


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX fuses nothing")
def test_the_activation_is_fused_as_in_a_model(tmp_path: Path) -> None:
    """MLX finds no kernel of the name that a model's own activation has."""

    def fused(name: str, code: str) -> set[str]:
        (tmp_path / name).mkdir()
        program, environment = module_process("unused")
        environment["TMPDIR"] = str(tmp_path / name)  # where a CPU keeps its kernels
        subprocess.run([*program[:2], "-c", code], env=environment, check=True)
        return {file.name for file in (tmp_path / name).rglob("*.so")}

    start = "import mlx.core as mx; x = mx.ones((2, 2), mx.bfloat16); "
    start += "from specdec.cuda.mlx_kernels import LAUNCHES as L; "
    ours = "mx.eval(L['activation'](x.dtype), L['activation-alone'](x.dtype))"
    theirs = "from mlx_lm.models.activations import swiglu; "
    theirs += "mx.eval(swiglu(x, x), mx.compile(lambda g, x: swiglu(g, x))(x, x))"
    launched = fused("ours", start + ours)
    assert len(launched) == 2
    assert launched == fused("theirs", start + theirs)
