"""Kernels that NVRTC compiles once: what is launched, kept, and done without it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

from specdec.cuda import (
    compiled,
    decode_attention,
    gated_delta,
    kernels,
    nvrtc,
    proofs,
    skinny_matmul,
)
from specdec.cuda.kernels import cuda_kernel
from specdec.cuda.views import View, _noted, noted, part, split
from specdec.utils.kept import KeptFiles
from tests.cuda.emulation import cuda

from .test_gated_delta import PLAIN

BF16 = mx.bfloat16
KEPT = skinny_matmul._kernel, decode_attention._kernel, gated_delta._kernel, cuda_kernel


class Compiler:
    """In NVRTC's place: what it makes of code is the code.

    Attributes:
        asked: names of what it compiled.
        fails: whether it cannot.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.asked: list[str] = []
        self.fails = False
        patch.setattr(nvrtc, "library", lambda: self)
        patch.setattr(nvrtc, "version", lambda: "13.0")
        patch.setattr(nvrtc, "compiled", self._compiled)
        patch.setattr(compiled, "_target", lambda: "sm_90")
        patch.setattr(compiled, "_kept", None)

    def _compiled(self, code: str, target: str) -> bytes:
        if self.fails:
            raise RuntimeError("NVRTC: error 6")
        self.asked.append(code.partition("__global__ void ")[2].partition("(")[0])
        return code.encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    for kept in KEPT:
        kept.cache_clear()
    yield Compiler(monkeypatch)
    for kept in KEPT:
        kept.cache_clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for MLX's launch: what it was given."""
    calls: list[dict[str, Any]] = []

    def launch(**given: Any) -> list[mx.array]:
        calls.append(given)
        both = zip(given["output_shapes"], given["output_dtypes"], strict=True)
        return [mx.ones(shape, dtype) for shape, dtype in both]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    return calls


def double(x: mx.array | View, name: str = "double", scale: int = 2) -> mx.array:
    found: mx.array = cuda_kernel(name, "out[0] = S * x[0];", ("x",), ("out",))(
        inputs=[x],
        template=[("S", scale)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )[0]
    return found


def products() -> list[mx.array]:
    """Of arrays of one to three dimensions, and where matrices are stacked."""
    x, weight, bias = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(BF16)
        for i, shape in enumerate([(3, 2, 96), (40, 96), (40,)])
    )
    found = [skinny_matmul.product(some, weight, None) for some in (x, x[0], x[0, 0])]
    return [*found, *skinny_matmul.parts(x, weight, bias, (8, 11, 40))]


def attentions() -> list[mx.array]:
    """Of the first columns of what is stored, each form of the mask."""
    q, *stored = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(BF16)
        for i, shape in enumerate([(2, 6, 3, 64), (2, 2, 70, 64), (2, 2, 70, 64)])
    )
    k, v = (part(array[:, :, :50], array) for array in stored)
    seen = mx.arange(50) < 45 + mx.arange(3)[:, None]
    added = mx.where(seen[None, None], 0.0, -mx.inf).astype(BF16)
    # Queries as a model has them before they are turned round.
    q = q.transpose(0, 2, 1, 3)
    q = mx.contiguous(q).transpose(0, 2, 1, 3)
    return [decode_attention.attention(q, k, v, 0.1, m) for m in (added, "causal")]


def rounds() -> list[mx.array]:
    """Of a recurrent layer, whose inputs are parts of a product, and one after it."""
    weights, inputs, window, state = gated_delta.drawn(PLAIN, 2, 3)
    ends = list(accumulate(i.shape[-1] for i in inputs))
    parts = split(mx.concatenate([*inputs], axis=-1), ends)
    found = gated_delta.scan(PLAIN, weights, gated_delta.Inputs(*parts), window, state)
    kept = mx.array([2, 0])
    after = gated_delta.scan(PLAIN, weights, inputs, found.log, state, kept)
    return [found.y, found.after, after.y, after.before, after.after, *after.log]


@cuda.needs_compiler
@pytest.mark.parametrize("run", [products, attentions, rounds])
def test_sources_find_what_mlx_would_give_them(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[mx.array]]
) -> None:
    """Shapes and strides are made from numbers: one that is wrong, or misplaced."""
    for by_mlx in cuda.emulated(monkeypatch, *KEPT):
        expected = run()
        assert by_mlx is None
    Compiler(monkeypatch)
    monkeypatch.delattr(mx.fast, "cuda_kernel")
    monkeypatch.setattr(
        mx.fast, "precompiled_cuda_kernel", cuda.precompiled_cuda_kernel
    )
    found = run()
    for kept in KEPT:
        kept.cache_clear()
    assert all(map(mx.array_equal, found, expected))


def test_one_machine_code_serves_any_number_of_dimensions_and_sizes(
    compiler: Compiler, launched: list[dict[str, Any]]
) -> None:
    """Else proofs of one do not hold for the other, and each takes its time."""
    weight = mx.zeros((40, 96), BF16)
    for shape in ((5, 96), (1, 96), (2, 3, 96), (96,)):
        skinny_matmul.product(mx.zeros(shape, BF16), weight, None)
    assert len(compiler.asked) == 1
    assert len({call["name"] for call in launched}) == 1
    # x's rows and columns, how many dimensions; then the matrix; then the bias'.
    ends = [call["scalars"] for call in launched]
    assert ends == [
        [5, 96, 2, 40, 96, 2],
        [1, 96, 2, 40, 96, 2],
        [6, 96, 2, 40, 96, 2],
        [96, 1, 1, 40, 96, 2],
    ]


def test_names_are_of_all_that_is_compiled(
    compiler: Compiler, launched: list[dict[str, Any]]
) -> None:
    """MLX launches what it has loaded by that name, whatever it is given later."""
    for dtype in (mx.float32, BF16):
        for scale in (2, 3):
            double(mx.ones(1, dtype), scale=scale)
    double(mx.ones(1), "twice")
    double(mx.ones(1))
    assert len(launched) == 6
    end = split(mx.arange(6.0), (2, 6))[1]
    double(View.of(end))  # what reads no strides is given no other array
    assert launched.pop()["inputs"] == [end]
    assert len({call["name"] for call in launched}) == 5 == len(compiler.asked)
    for call in launched:
        assert f"void {call['name']}(" in call["compiled_source"].decode()


def test_a_second_process_compiles_nothing(
    compiler: Compiler,
    launched: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Unless what it would compile is another, or for another GPU or compiler."""
    compiled.keep_in(KeptFiles(tmp_path / "kernels", most=8))

    def compiles() -> int:
        before = len(compiler.asked)
        cuda_kernel.cache_clear()
        double(mx.ones(1))
        return len(compiler.asked) - before

    assert [compiles() for _ in range(2)] == [1, 0]
    monkeypatch.setattr(compiled, "_target", lambda: "sm_80")
    assert [compiles() for _ in range(2)] == [1, 0]
    monkeypatch.setattr(nvrtc, "version", lambda: "13.1")
    assert [compiles() for _ in range(2)] == [1, 0]
    monkeypatch.setattr(compiled, "NUMBERS", compiled.NUMBERS + "// other")
    assert [compiles() for _ in range(2)] == [1, 0]
    assert len({call["compiled_source"] for call in launched}) == 2
    for file in (tmp_path / "kernels").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert [compiles() for _ in range(2)] == [1, 0]


def test_what_a_proof_launches_is_compiled_at_once(
    compiler: Compiler, launched: list[dict[str, Any]]
) -> None:
    """And launched after that: what is compiled ahead proves nothing."""
    seen: list[tuple[int, int]] = []

    def check() -> Iterator[mx.array]:
        for scale in (2, 3, 4):
            yield double(mx.ones(1), scale=scale) == 1
            seen.append((len(launched), len(compiler.asked)))

    assert proofs.holds("double", check)
    assert [n for n, _ in seen] == [0, 0, 0, 1, 2, 3]
    assert [n for _, n in seen[3:]] == [3, 3, 3]
    compiler.fails = True
    assert not proofs.holds("other", lambda: [double(mx.ones(1), "other") == 1])


def test_without_machine_code_mlx_compiles(
    compiler: Compiler,
    launched: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where NVRTC fails or is not found, and where only MLX knows the strides."""
    by_mlx: list[Any] = []

    def kernel(**made: Any) -> Any:
        def launch(**given: Any) -> list[mx.array]:
            by_mlx.append(given["inputs"])
            return [mx.zeros((1, 1, 1, 1))]

        return launch

    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel)
    q, k = mx.zeros((1, 2, 1, 64), BF16), mx.zeros((1, 2, 9, 64), BF16)
    decode_attention.attention(q, k[:, :, :4], k[:, :, :4], 1.0, "causal")
    assert [a.shape for a in by_mlx.pop()[1:]] == [(1, 2, 4, 64)] * 2
    assert not compiler.asked
    compiler.fails = True
    double(mx.ones(1))
    assert len(by_mlx) == 1
    kernels.cuda_kernel.cache_clear()
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    double(mx.ones(1))
    assert len(by_mlx) == 2
    assert not launched


def test_where_arrays_lie_is_noted_while_they_are_there() -> None:
    """An array that is there no more leaves its address, and held what is large."""
    whole = mx.arange(12).reshape(2, 6)
    parts = split(whole, (2, 6))
    views = [noted(array) for array in parts]
    assert [view and (view.whole is whole, view.offset) for view in views] == [
        (True, 0),
        (True, 2),
    ]
    assert noted(whole) is None
    assert noted(part(whole, whole)) == (whole, whole, 0)
    ids = list(map(id, (*parts, whole)))
    assert set(ids) <= set(_noted)
    del parts, whole, views
    assert not set(ids) & set(_noted)


def test_files_that_were_used_longest_ago_go(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path / "a" / "b", most=2)
    for i, name in enumerate("xyz"):
        files.put(name, name.encode())
        os.utime(files.folder / name, (i, i))
        assert files.get("x") == b"x"
    assert files.get("y") is None
    assert files.get("z") == b"z"
    with pytest.MonkeyPatch.context() as patch:  # a folder that is read only
        patch.setattr(os, "utime", Mock(side_effect=PermissionError))
        assert files.get("z") == b"z"
    (files.folder / "z").write_bytes(b"")
    assert files.get("z") is None
    (tmp_path / "file").touch()
    nowhere = KeptFiles(tmp_path / "file" / "folder", most=2)
    nowhere.put("x", b"x")
    assert nowhere.get("x") is None


@pytest.mark.parametrize("run", [products, attentions, rounds])
def test_nvrtc_compiles_sources_without_headers(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[mx.array]]
) -> None:
    """On a CPU, too: what they name and no header declares, or a GPU lacks."""
    try:
        library = nvrtc.library() or ctypes.CDLL("libnvrtc.so.13")
    except OSError:
        pytest.skip("needs NVIDIA's libnvrtc.so.13")
    monkeypatch.setattr(nvrtc, "library", lambda: library)
    monkeypatch.setattr(compiled, "_target", lambda: "sm_90")
    found: list[bytes] = []
    compile_it = nvrtc.compiled

    def noted(code: str, target: str) -> bytes:
        found.append(compile_it(code, target))
        return found[-1]

    monkeypatch.setattr(nvrtc, "compiled", noted)
    for kept in KEPT:
        kept.cache_clear()
    with compiled.ahead():
        run()
    for kept in KEPT:
        kept.cache_clear()
    assert found
    assert all(binary.startswith(b"\x7fELF") for binary in found)
