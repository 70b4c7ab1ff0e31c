"""Kernels that are compiled into the folder in which MLX looks for them."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Barrier
from typing import Any

import mlx.core as mx
import pytest

from specdec.backend import TESTED
from specdec.cuda import kernel_files
from specdec.cuda.kernels import cuda_kernel

# What custom_kernel.cpp of MLX 0.32.4 writes for the call of ``launched``.
WRITTEN = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define TWO 2
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_NAME_3_t_bfloat16_t(
    const float* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ int x_ndim,
    const int32_t* at,
    const __nv_bfloat16* y,
    const __grid_constant__ Strides y_strides,
    __half* out,
    uint32_t* chosen) {
  constexpr int N = 3;
  constexpr bool FAST = true;
  using T = __nv_bfloat16;

out[0]=x_shape[0]+ x_ndim + at_shape[0]+ y_strides[1];

}

} // namespace mlx::core::cu
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of MLX's, and a compiler that gives the code itself."""
    monkeypatch.setattr(kernel_files, "kernel_folder", lambda: tmp_path / "ptx")
    monkeypatch.setattr(kernel_files, "compiled", lambda code: code.encode())
    monkeypatch.setattr(kernel_files, "architecture", lambda: "sm_80")
    monkeypatch.setattr(kernel_files, "_failed", set())
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **how: Launches(how["name"]))
    return tmp_path / "ptx"


class Launches:
    """Stands for a kernel of MLX's: the names of its arguments."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, **call: Any) -> list[str]:
        return [self.name, *sorted(call)]


def launched(number: int = 3) -> str:
    """Launch a kernel whose inputs are of all kinds; return its name."""
    kernel = cuda_kernel.__wrapped__(
        "probe",
        "out[0] = x_shape[0] + x_ndim + at_shape[0] + y_strides[1];",
        ("x", "at", "y"),
        ("out", "chosen"),
        header="#define TWO 2",
    )
    half = mx.zeros((2, 2), mx.bfloat16)
    for _ in range(2):
        name, *arguments = kernel(
            inputs=[mx.zeros(3), mx.array(1, mx.int32), half],
            template=[("N", number), ("FAST", True), ("T", mx.bfloat16)],
            output_dtypes=[mx.float16, mx.uint32],
            output_shapes=[(1,), (1,)],
        )
        assert arguments == ["inputs", "output_dtypes", "output_shapes", "template"]
    return str(name)


def test_mlx_finds_them(folder: Path) -> None:
    """A name that MLX does not look for, or code without its names."""
    name = launched()
    theirs = WRITTEN.replace("NAME", name)
    whole = f"custom_kernel_{name}_3_t_bfloat16_t"
    file = folder / f"{whole}_{kernel_files.hashed(theirs.encode()):x}.ptx"
    assert sorted(folder.iterdir()) == [file, file.with_suffix(".txt")]
    names = file.with_suffix(".txt").read_text("utf-8")
    assert names == f"mlx::core::cu::{whole}\t{whole}\n"
    code = file.read_text("utf-8")
    assert f'extern "C" __global__ void {whole}(' in code
    begin, end = (theirs.index(mark) for mark in ("  constexpr", "}\n\n} //"))
    assert theirs[begin:end] in code
    assert "mlx/backend" not in code


def test_hashes_are_those_of_the_c_library() -> None:
    """Known values of libstdc++: whole words, and what is left of one."""
    assert kernel_files.hashed(b"abc") == 0x32D82BF8ED3DBA39
    assert kernel_files.hashed(b"hello world") == 0x4D6686D362067FF9
    assert kernel_files.hashed(b"x" * 1000) == 0x787C888415FE47CE


def test_each_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch compiles it, or another process does so again."""
    codes: list[str] = []

    def compiles(code: str) -> bytes:
        codes.append(code)
        return b""

    monkeypatch.setattr(kernel_files, "compiled", compiles)
    launched()
    launched()
    assert len(codes) == 1


def test_kernels_of_several_checks_are_compiled_side_by_side(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One waits for the other, or a check counts that ended before its kernel."""
    caplog.set_level("INFO")
    meet = Barrier(2, timeout=60)
    done: list[int] = []

    def compiles(code: str) -> bytes:
        meet.wait()
        return b""

    def check(*numbers: int) -> None:
        for number in numbers:
            launched(number)
        done.append(numbers[0])

    monkeypatch.setattr(kernel_files, "compiled", compiles)
    checks = [partial(check, 1, 3), partial(check, 2, 4), partial(check, 1, 2)]
    kernel_files.compile_together(checks)
    assert set(done) == {1, 2}
    assert caplog.messages[0].startswith("compiling kernels")


def test_what_fails_is_left_to_mlx(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch fails, MLX finds a file that is not whole, or it is tried for ever."""

    def fails(code: str) -> bytes:
        raise RuntimeError("nvrtcCompileProgram: error 5")

    monkeypatch.setattr(kernel_files, "compiled", fails)
    launched()
    kernel_files.compile_together([launched])
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["file", "file/folder", 300 * "x"])
def test_nothing_is_compiled_for_a_folder_that_cannot_be_made(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch fails, or each kernel is compiled twice."""
    path = folder.parent / name
    (folder.parent / "file").touch()
    monkeypatch.setattr(kernel_files, "kernel_folder", lambda: path)
    monkeypatch.setattr(kernel_files, "compiled", lambda code: pytest.fail("twice"))
    launched()
    kernel_files.compile_together([launched])


@pytest.mark.parametrize("there", [True, False])
def test_the_compiler_is_found_in_any_folder(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A space in the path of an environment would end every launch with an error."""
    library = tmp_path / "my tools" / "libnvrtc.so.12"
    maps = f"7f00-7f01 r-xp 00000000 08:01 42   {library}\n7f01-7f02 rw-p 0 0:0 0\n"
    monkeypatch.setattr(Path, "read_bytes", lambda path: maps.encode())
    opened: list[str] = []

    def opens(path: str) -> str:
        opened.append(path)
        if not there:
            raise OSError("cannot open shared object file")
        return "library"

    monkeypatch.setattr(ctypes, "CDLL", opens)
    kernel_files._nvrtc.cache_clear()
    assert kernel_files._nvrtc() == ("library" if there else None)
    assert opened == [str(library)]
    kernel_files._nvrtc.cache_clear()


def test_a_thread_that_decodes_is_not_stopped(folder: Path) -> None:
    """A model that is loaded meanwhile would end its launches."""

    def check() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(launched).result()

    kernel_files.compile_together([check])


def test_it_is_written_after_the_mlx_that_is_tested() -> None:
    """With another one, every process would compile all kernels again."""
    assert TESTED["mlx"] == kernel_files.MLX


def unknown(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_another_mlx_or_a_cpu_compiles_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel_files.kernel_folder.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    assert kernel_files.kernel_folder() is None
    kernel_files.kernel_folder.cache_clear()
    monkeypatch.setattr(metadata, "version", unknown)
    assert kernel_files.kernel_folder() is None
    kernel_files.kernel_folder.cache_clear()
    monkeypatch.undo()
    if mx.default_device() == mx.cpu:
        assert kernel_files.kernel_folder() is None
