"""Defaults follow MLX's device; the compiler check shows what MLX would meet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import mlx.core as mx
import pytest

from specdec import backend
from specdec.errors import CompilerMissingError, ConfigError
from specdec.utils import process
from specdec.utils.blas import MEND_GXX, load_blas

needs_cpu_backend = pytest.mark.skipif(
    backend.defaults().name != "cpu", reason="MLX runs on a GPU here"
)


@pytest.mark.parametrize(
    ("device", "metal", "expected"),
    [
        (mx.cpu, False, ("cpu", 1, False)),
        (mx.cpu, True, ("cpu", 1, False)),
        (mx.gpu, False, ("cuda", 256, True)),
        (mx.gpu, True, ("metal", 32, False)),
    ],
)
def test_defaults(
    monkeypatch: pytest.MonkeyPatch,
    device: mx.DeviceType,
    metal: bool,
    expected: tuple[str, int, bool],
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    defaults = backend.defaults()
    assert expected == (defaults.name, defaults.read_bucket, defaults.static_shapes)


@pytest.mark.parametrize(
    ("visible", "remedy"),
    [
        (None, "nvidia-smi says what is missing"),
        ("9", "CUDA_VISIBLE_DEVICES is '9'"),
        ("", "CUDA_VISIBLE_DEVICES is ''"),
    ],
)
def test_cuda_without_a_gpu_is_one_line(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, remedy: str
) -> None:
    """MLX for CUDA takes a GPU for granted, and its first allocation fails."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_count", lambda _: 0)
    monkeypatch.setattr(backend, "may_use_cuda", lambda: True)
    monkeypatch.setattr(process, "_user_visible", [visible])
    backend._check_gpu.cache_clear()
    with pytest.raises(ConfigError, match="finds no") as caught:
        backend.check_compiler()
    assert remedy in str(caught.value)
    monkeypatch.setattr(mx, "device_count", lambda _: 1)
    assert backend.check_compiler() is None
    backend._check_gpu.cache_clear()


def test_a_gpu_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setenv("PATH", "")
    assert backend.check_compiler() is None


@pytest.mark.parametrize(
    ("info", "sharing", "expected"),
    [
        ({"total_memory": 80, "free_memory": 70}, 1, 80),  # what MLX holds is ours
        ({"total_memory": 80, "free_memory": 30}, 1, 50),
        # Another replica holds its half; the rest is this one's.
        ({"total_memory": 80, "free_memory": 20}, 2, 40),
        ({"total_memory": 80, "free_memory": 10}, 2, 30),
        ({"max_recommended_working_set_size": 60, "memory_size": 80}, 1, 60),
        ({"memory_size": 80}, 2, 40),
        ({}, 1, None),
    ],
)
def test_memory_that_other_programs_hold_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
    info: dict[str, int],
    sharing: int,
    expected: int | None,
) -> None:
    """A run that plans with all of a shared GPU ends when it is full."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 15)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 5)
    assert backend.memory_size(sharing) == expected


def run_check(tmp_path: Path, gxx: str | None) -> str:
    """Run the check, then a fused kernel, in a process that finds ``gxx`` as g++."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sh").symlink_to("/bin/sh")
    if gxx is not None:
        (folder / "g++").write_text(f"#!/bin/sh\n{gxx}\n")
        (folder / "g++").chmod(0o755)
    code = (
        "import mlx.core as mx\n"
        "from specdec import backend, errors\n"
        "try:\n"
        "    print(backend.check_compiler())\n"
        "except errors.CompilerMissingError as error:\n"
        "    print('refused:', error)\n"
        "else:\n"
        "    print(mx.compile(lambda x: mx.tanh(x) * 2)(mx.zeros(1)).item())\n"
    )
    # Its own folder for kernels, so that none compiled earlier is found.
    environment = {**os.environ, "PATH": str(folder), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stdout


@needs_cpu_backend
def test_mlx_runs_without_a_compiler_and_the_note_says_so(tmp_path: Path) -> None:
    """CXX and clang++ do not count: MLX calls g++ by name."""
    note, value = run_check(tmp_path, None).splitlines()
    assert note.startswith("no g++ found, so MLX runs without fused kernels")
    assert "apt-get install g++" in note
    assert value == "0.0"


@needs_cpu_backend
def test_a_compiler_that_fails_is_refused(tmp_path: Path) -> None:
    """It answers --version, as MLX asks, and cannot compile."""
    gxx = '[ "$1" = --version ] || { echo "cmath: No such file"; exit 1; }'
    (line,) = run_check(tmp_path, gxx).splitlines()
    assert line.startswith(
        "refused: MLX cannot compile its kernels: cmath: No such file (repair g++"
    )


@needs_cpu_backend
def test_this_machine_passes() -> None:
    """What the other tests need."""
    try:
        backend.check_compiler()
    except CompilerMissingError as error:
        pytest.fail(str(error))


def test_describe_is_for_reports() -> None:
    described = backend.describe()
    assert described.keys() == {
        "specdec",
        "mlx",
        "mlx_lm",
        "python",
        "platform",
        "backend",
        "blas",
        "device",
    }
    assert all(isinstance(value, str) for value in described.values())
    assert all(value for name, value in described.items() if name != "blas")
    assert described["blas"] in (load_blas()[0], "")
    assert described["mlx_lm"].startswith("0.32.")


OPENBLAS, NO_BLAS = ("OpenBLAS", ""), ("", "")


@pytest.mark.parametrize(
    ("name", "blas", "float32", "words"),
    [
        ("cpu", OPENBLAS, False, ["(4 bytes each): use --dtype float32"]),
        ("cpu", OPENBLAS, True, []),
        ("cpu", ("preloaded BLAS", ""), True, []),
        ("cpu", ("reference BLAS", "get it"), True, ["as long as OpenBLAS: get it"]),
        (
            "cpu",
            ("reference BLAS", "get it"),
            False,
            ["(4 bytes each) and OpenBLAS: use --dtype float32, and get it"],
        ),
        ("cpu", ("reference BLAS", MEND_GXX), True, ["OpenBLAS: install g++, or"]),
        ("cpu", NO_BLAS, False, []),  # a Mac's
        ("cuda", NO_BLAS, False, []),
    ],
)
def test_what_would_multiply_faster(
    monkeypatch: pytest.MonkeyPatch,
    name: Literal["cpu", "cuda"],
    blas: tuple[str, str],
    float32: bool,
    words: list[str],
) -> None:
    """Advice that has been followed, or that helps nobody here."""
    monkeypatch.setattr(backend, "defaults", lambda: backend._DEFAULTS[name])
    monkeypatch.setattr(backend, "load_blas", lambda: blas)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    notes = backend.product_notes(float32=float32, fixed_draft=False)
    for word, note in zip(words, notes, strict=True):
        assert word in note
    drafts = backend.product_notes(float32=float32, fixed_draft=True)[len(words) :]
    assert bool(drafts) == (name == "cpu" and not float32)


@pytest.mark.parametrize("float32", [False, True])
def test_a_missing_compiler_is_named_once(
    monkeypatch: pytest.MonkeyPatch, float32: bool
) -> None:
    """Two notes that both tell how to install it."""
    monkeypatch.setattr(backend, "defaults", lambda: backend._DEFAULTS["cpu"])
    monkeypatch.setattr(backend, "load_blas", lambda: ("reference BLAS", MEND_GXX))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "and without OpenBLAS, many times slower" in (backend.check_compiler() or "")
    assert backend.product_notes(float32=float32, fixed_draft=False) == []
    # Compiled before g++ was removed.
    monkeypatch.setattr(backend, "load_blas", lambda: OPENBLAS)
    assert "OpenBLAS" not in (backend.check_compiler() or "OpenBLAS")


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ("0.32.2", False),
        ("0.32.9", False),
        ("0.33.0", True),
        ("0.33.0.dev20261101", True),
        ("1.0", True),
        ("unknown", False),
    ],
)
def test_a_newer_release_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: str, named: bool
) -> None:
    """An error of a release that nobody tested looks like one of specdec's."""
    monkeypatch.setattr(backend, "_version", lambda _: installed)
    line = backend.newer_than_tested()
    assert ("mlx-lm==0.32.2" in line) is named
    assert (f"mlx-lm {installed}" in line) is named
