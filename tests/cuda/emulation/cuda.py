"""CUDA kernels on the CPU: the code of ``mx.fast.cuda_kernel``, compiled by g++.

A launch runs twice, with threads and blocks in opposite orders. If the results differ,
threads race. This also finds a missing barrier.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from threading import Lock
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.backend import defaults

from .building import constants, generated, library

MOST_DIMENSIONS, MOST_THREADS = 10, 1024
# The emulator's sections, signals and fibers need Linux.
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux's g++"
)
needs_cuda = pytest.mark.skipif(
    defaults().name != "cuda", reason="needs MLX's CUDA backend"
)


# The inputs that a kernel may write into, in place, by its name in ours.
_CHANGED = {"cache_write": ("k", "v")}


class KernelFault(RuntimeError):  # noqa: N818
    """The kernel did something forbidden: a race, a deadlock, a wrong memory access."""


@dataclass(frozen=True)
class Strided:
    """An array with gaps, as kernels get if inputs are not made contiguous.

    Args:
        buffer: a flat array of all elements that may be read.
        shape: the array's shape.
        strides: the array's strides, in elements.
        offset: the first element's position in the buffer.
    """

    buffer: mx.array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def dtype(self) -> mx.Dtype:
        return self.buffer.dtype

    @property
    def has_gaps(self) -> bool:
        """Whether MLX would copy the array: dimensions of one do not count."""
        expected = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size != 1 and stride != expected:
                return True
            expected *= size
        return False

    def contiguous(self) -> mx.array:
        flat = _numbers(self.buffer)[self.offset :]
        strides = [s * flat.itemsize for s in self.strides]
        view = np.lib.stride_tricks.as_strided(flat, self.shape, strides)
        return _array(np.ascontiguousarray(view), self.dtype)


Input = mx.array | Strided


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("writable", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int32 * MOST_DIMENSIONS),
        ("strides", ctypes.c_int64 * MOST_DIMENSIONS),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("count", ctypes.c_int32),
        ("backwards", ctypes.c_int32),
        ("stacks", ctypes.c_void_p),
    )


# CUDA's allocations begin at a multiple of this many bytes.
_LINE = 16

# Faults are signals, which belong to the process, so one launch runs at a time.
_one_at_a_time = Lock()
# The threads' stacks, for all kernels; the first launch makes them.
_stacks: list[int] = []
# MLX keeps a compiled kernel by its name and the template's values.
_sources: dict[str, str] = {}


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> Callable[..., list[mx.array]]:
    """A stand-in for ``mx.fast.cuda_kernel``, which runs when it is called.

    The header's ``SPECDEC_MMA``, inline PTX, is replaced by an equivalent function; the
    rest of the header is used.
    """
    if shared_memory:
        raise ValueError("dynamic shared memory is not emulated")

    def kernel(
        *,
        inputs: Sequence[Input],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, int | bool | mx.Dtype]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        if len(inputs) != len(input_names):
            raise ValueError(f"{len(input_names)} inputs, not {len(inputs)}")
        if not len(output_shapes) == len(output_dtypes) == len(output_names):
            raise ValueError(f"{len(output_names)} outputs")
        if ensure_row_contiguous:
            inputs = [_without_gaps(i) for i in inputs]
        named = zip(input_names, inputs, strict=True)
        code = generated(
            name,
            tuple((n, i.dtype, i.ndim > 0) for n, i in named),
            tuple(zip(output_names, output_dtypes, strict=True)),
            constants(template),
            source,
            header,
        )
        values = "".join(f"_{value}" for _, value in template)
        if _sources.setdefault(name + values, code) != code:
            raise ValueError(f"{name}: MLX has compiled another kernel of this name")
        if verbose:
            print(code)
        outputs = list(zip(output_names, output_shapes, output_dtypes, strict=True))
        own = name.removeprefix("specdec_").rpartition("_")[0].rpartition("_")[0]
        changes = {input_names.index(each) for each in _CHANGED.get(own, ())}
        return in_both_orders(
            library(code), name, inputs, outputs, grid, threadgroup, init_value, changes
        )

    return kernel


def in_both_orders(
    built: ctypes.CDLL,
    name: str,
    inputs: Sequence[Input],
    outputs: Sequence[tuple[str, Sequence[int], mx.Dtype]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    init_value: float | None = None,
    changes: Collection[int] = (),
) -> list[mx.array]:
    """The outputs of a kernel, whose threads and blocks run in both orders.

    Args:
        outputs: each output's name, shape and type.
        grid, threadgroup: numbers of threads.
        changes: the inputs that the kernel may write into, in place.

    Raises:
        KernelFault: the kernel did something forbidden, or the orders differ.
    """
    if not 0 < prod(threadgroup) <= MOST_THREADS or min(grid) < 1:
        raise ValueError(f"threads {threadgroup} of {grid} cannot be launched")
    runs = []
    for backwards in (False, True):
        written = [_fresh(shape, dtype, init_value) for _, shape, dtype in outputs]
        held = _run(built, name, inputs, written, grid, threadgroup, backwards, changes)
        runs.append(written + [held[i] for i in sorted(changes)])
    called = [at for at, _, _ in outputs] + [f"input {i}" for i in sorted(changes)]
    for one, other, at in zip(*runs, called, strict=True):
        if one.tobytes() != other.tobytes():
            raise KernelFault(f"{name}: {at} depends on which thread is first")
    for i, changed in zip(sorted(changes), runs[0][len(outputs) :], strict=True):
        array = inputs[i]
        _bits(array.buffer if isinstance(array, Strided) else array)[...] = changed
    pairs = zip(runs[0][: len(outputs)], outputs, strict=True)
    return [_array(numbers, dtype) for numbers, (_, _, dtype) in pairs]


def _run(
    built: ctypes.CDLL,
    name: str,
    inputs: Sequence[Input],
    outputs: Sequence[np.ndarray[Any, Any]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    backwards: bool,
    changes: Collection[int] = (),
) -> list[np.ndarray[Any, Any]]:
    held: list[np.ndarray[Any, Any]] = []
    arrays = []
    for array in inputs:
        strided = array if isinstance(array, Strided) else None
        flat = array.buffer if isinstance(array, Strided) else array
        held.append(_placed(flat))
        arrays.append(_described(held[-1], strided))
        arrays[-1].writable = len(held) - 1 in changes
    for output in outputs:
        arrays.append(_described(output, None))
        arrays[-1].writable = 1
    blocks = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]
    launch = _Launch(
        (ctypes.c_uint32 * 3)(*blocks),
        (ctypes.c_uint32 * 3)(*threadgroup),
        len(arrays),
        backwards,
    )
    given = (_Array * len(arrays))(*arrays)
    with _one_at_a_time:
        if not _stacks:
            _stacks.append(built.simt_stacks())
        launch.stacks = _stacks[0]
        failed = built.simt_launch(ctypes.byref(launch), given)
        if failed:
            raise KernelFault(f"{name}: {built.simt_message().decode()}")
    return held


def _described(numbers: np.ndarray[Any, Any], strided: Strided | None) -> _Array:
    shape, size = numbers.shape, numbers.itemsize
    strides, offset = tuple(s // size for s in numbers.strides), 0
    if strided is not None:
        shape, strides, offset = strided.shape, strided.strides, strided.offset
    described = _Array(numbers.ctypes.data, numbers.nbytes, offset * size)
    described.ndim = len(shape)
    described.shape[: len(shape)] = shape
    described.strides[: len(shape)] = strides
    return described


def _numbers(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's numbers in order; the bits of bfloat16, which NumPy lacks."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(bits)


def _without_gaps(array: Input) -> Input:
    """The input of a kernel that asks for contiguous arrays; only gaps cause a copy."""
    if not isinstance(array, Strided) or not array.has_gaps:
        return array
    return array.contiguous()


def _bits(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's own memory, not a copy."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(bits)
    own: np.ndarray[Any, Any] = np.array(bits, copy=False)
    return own


@cache
def _origin() -> int:
    """How far MLX's arrays on the CPU begin after a multiple of ``_LINE``."""
    address: int = _bits(mx.zeros(64)).ctypes.data
    return address % _LINE


def _placed(array: mx.array) -> np.ndarray[Any, Any]:
    """A copy aligned as the array would be on a GPU: a view may begin anywhere."""
    own = _bits(array)
    offset = own.ctypes.data - _origin() if own.flags.c_contiguous else 0
    room = np.empty(own.nbytes + 2 * _LINE, np.uint8)
    begin = -room.ctypes.data % _LINE + offset % _LINE
    own_room = room[begin : begin + own.nbytes]
    placed: np.ndarray[Any, Any] = own_room.view(own.dtype).reshape(own.shape)
    placed[...] = own
    return placed


def _array(numbers: np.ndarray[Any, Any], dtype: mx.Dtype) -> mx.array:
    array = mx.array(numbers)
    return array.view(dtype) if dtype == mx.bfloat16 else array


def _fresh(
    shape: Sequence[int], dtype: mx.Dtype, value: float | None
) -> np.ndarray[Any, Any]:
    """An output before the kernel runs: ``value``, or numbers that cannot be right."""
    output = _numbers(
        mx.zeros(shape, dtype) if value is None else mx.full(shape, value, dtype)
    )
    if value is None:
        output.view(np.uint8).fill(0xFF if mx.issubdtype(dtype, mx.floating) else 0xA5)
    return output


def emulated(
    monkeypatch: pytest.MonkeyPatch, *caches: Any, **kernels: Any
) -> Iterator[None]:
    """Replace ``mx.fast.cuda_kernel`` by the emulator while a fixture lasts.

    Args:
        caches: ``@cache``d functions that keep kernels.
        kernels: functions of ``mx.fast`` to replace, if not that one.
    """
    for name, kernel in (kernels or {"cuda_kernel": cuda_kernel}).items():
        monkeypatch.setattr(mx.fast, name, kernel)
    for kept in caches:
        kept.cache_clear()
    yield
    for kept in caches:
        kept.cache_clear()


def plant(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, old: str, new: str
) -> None:
    """Plant a fault in a source: replace its only ``old`` by ``new``."""
    source: str = getattr(module, name)
    assert source.count(old) == 1
    monkeypatch.setattr(module, name, source.replace(old, new))
