"""Kernels as machine code, which is compiled once on a machine and kept.

What ``mx.fast.cuda_kernel`` is given, MLX compiles in every process, one after the
other, and most of that time goes into headers. Here NVRTC compiles code that needs
none, several kernels at a time, and ``mx.fast.precompiled_cuda_kernel`` launches them.
Where NVRTC is not found or fails, ``mx.fast.cuda_kernel`` is used.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from math import prod
from typing import Any, Protocol

import mlx.core as mx

from . import nvrtc
from .views import View

logger = logging.getLogger(__name__)

MOST_THREADS = 16
# Numbers of 16 bits are converted by the instructions that CUDA's own headers use.
NUMBERS = """
struct specdec_bf16 {
  unsigned short bits;
  specdec_bf16() = default;
  __device__ explicit specdec_bf16(float value) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  __device__ explicit operator float() const {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
  }
};
struct specdec_f16 {
  unsigned short bits;
  specdec_f16() = default;
  __device__ explicit specdec_f16(float value) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  __device__ explicit operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};
"""
_TYPES = {
    mx.bool_: "bool",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.float32: "float",
    mx.bfloat16: "specdec_bf16",
    mx.float16: "specdec_f16",
}

Template = Sequence[tuple[str, int | bool | mx.Dtype]]


class Binaries(Protocol):
    """Compiled kernels on disk, by name."""

    def get(self, name: str, /) -> bytes | None:
        """What an earlier process has put; ``None``: nothing, or it is damaged."""

    def put(self, name: str, data: bytes, /) -> None:
        """Keep it for other processes."""


_kept: Binaries | None = None
_ahead: ContextVar[Executor | None] = ContextVar("ahead", default=None)


def keep_in(binaries: Binaries | None) -> None:
    """From now on, look for compiled kernels in ``binaries``, and keep them there."""
    global _kept
    _kept = binaries


@contextmanager
def ahead() -> Iterator[None]:
    """Within this, kernels are compiled at once instead of launched.

    What they return is zeros. After it, all of them are compiled.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        token = _ahead.set(pool)
        try:
            yield
        finally:
            _ahead.reset(token)


class Kernel:
    """Launches a source as :func:`mx.fast.cuda_kernel` does.

    Of an array whose number of dimensions the source reads, all but the last count as
    one, so that the same machine code does for any number. An array whose strides it
    reads has to be a :class:`.View`: otherwise MLX, which knows them, compiles.
    """

    def __init__(
        self,
        name: str,
        source: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        header: str,
    ):
        self._name, self._source, self._header = name, source, header
        self._inputs, self._outputs = inputs, outputs
        self._reads = [
            tuple(f"{i}_{what}" in source for what in ("shape", "strides", "ndim"))
            for i in inputs
        ]
        self._found: dict[Any, Any] = {}

    @cached_property
    def _by_mlx(self) -> Any:
        return mx.fast.cuda_kernel(
            name=self._name,
            input_names=list(self._inputs),
            output_names=list(self._outputs),
            source=self._source,
            header=self._header,
            ensure_row_contiguous=not any(strides for _, strides, _ in self._reads),
        )

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template = (),
    ) -> list[mx.array]:
        strided = [strides for _, strides, _ in self._reads]
        both = list(zip(inputs, strided, strict=True))
        arrays = [i.array if isinstance(i, View) else i for i in inputs]
        launch: dict[str, Any] = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
        }
        known = all(isinstance(i, View) or not strides for i, strides in both)
        found = None
        if known and nvrtc.library() is not None:
            found = self._compiled(arrays, output_dtypes, template)
        if _ahead.get() is not None:
            return list(map(mx.zeros, output_shapes, output_dtypes))
        if found is None:
            given = {"template": list(template)} if template else {}
            made: list[mx.array] = self._by_mlx(inputs=arrays, **given, **launch)
            return made
        name, binary = found
        views = [
            i if strides else View(array, array)
            for (i, strides), array in zip(both, arrays, strict=True)
        ]
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=binary,
            inputs=[view.whole for view in views],
            scalars=self._scalars(views),
            ensure_row_contiguous=True,
            **launch,
        )

    def _compiled(
        self, arrays: Sequence[mx.array], dtypes: Sequence[mx.Dtype], template: Template
    ) -> tuple[str, bytes] | None:
        """Name and machine code; ``None``: it could not be compiled."""
        forms = tuple(
            (array.dtype, array.ndim if (shape or strides) and not ndim else 0)
            for array, (shape, strides, ndim) in zip(arrays, self._reads, strict=True)
        )
        key = forms, tuple(dtypes), tuple(template)
        if key not in self._found:
            code = self._code(forms, dtypes, template)
            pool = _ahead.get()
            # The architecture is asked for in this thread.
            asked = self._name, code, _target()
            self._found[key] = pool.submit(_binary, *asked) if pool else _binary(*asked)
        found: Any = self._found[key]
        if isinstance(found, Future) and _ahead.get() is None:
            found = self._found[key] = found.result()
        made: tuple[str, bytes] | None = found
        return made

    def _scalars(self, views: Sequence[View]) -> list[int]:
        """What follows the arrays: see :meth:`_code`."""
        found: list[int] = []
        for view, (shape, strides, ndim) in zip(views, self._reads, strict=True):
            sizes = view.array.shape
            if ndim:
                sizes = (prod(sizes[:-1]), sizes[-1]) if len(sizes) > 1 else (*sizes, 1)
            found += (*sizes,) if shape else ()
            found += (*view.whole.shape[1:], view.offset) if strides else ()
            found += (min(view.array.ndim, 2),) if ndim else ()
        return found

    def _code(
        self,
        forms: Sequence[tuple[mx.Dtype, int]],
        dtypes: Sequence[mx.Dtype],
        template: Template,
    ) -> str:
        """All that is compiled; the kernel's name is left as ``@NAME@``.

        Its parameters are the inputs, the outputs, and for every input what the source
        reads: its shape, the whole's shape but for the first dimension and the offset,
        and the number of dimensions. The source's names are made of them.
        """
        inputs = zip(self._inputs, forms, strict=True)
        outputs = zip(self._outputs, dtypes, strict=True)
        parameters = [f"const {_TYPES[dtype]}* {name}" for name, (dtype, _) in inputs]
        parameters += [f"{_TYPES[dtype]}* {name}" for name, dtype in outputs]
        lines = []
        for name, (_, size), (shape, strides, ndim) in zip(
            self._inputs, forms, self._reads, strict=True
        ):
            if shape:
                sizes = [f"{name}_size{i}" for i in range(2 if ndim else size)]
                parameters += [f"const int {each}" for each in sizes]
                lines.append(f"const int {name}_shape[] = {{{', '.join(sizes)}}};")
            if strides:
                sizes = [f"{name}_whole{i}" for i in range(1, size)]
                parameters += [f"const int {each}" for each in sizes]
                steps = [" * ".join(["1ll", *sizes[i:]]) for i in range(size)]
                lines.append(
                    f"const long long {name}_strides[] = {{{', '.join(steps)}}};"
                )
                parameters.append(f"const int {name}_offset")
                lines.append(f"{name} += {name}_offset;")
            if ndim:
                parameters.append(f"const int {name}_ndim")
        for name, value in template:
            if isinstance(value, mx.Dtype):
                lines.append(f"using {name} = {_TYPES[value]};")
            else:
                kind = "bool" if isinstance(value, bool) else "int"
                lines.append(f"constexpr {kind} {name} = {int(value)};")
        head = f'extern "C" __global__ void @NAME@(\n    {", ".join(parameters)}) {{'
        return "\n".join((NUMBERS, self._header, head, *lines, self._source, "}"))


@cache
def _target() -> str:
    return str(mx.device_info()["architecture"])


def _binary(name: str, code: str, target: str) -> tuple[str, bytes] | None:
    """Machine code, kept or compiled now, and the kernel's name in it."""
    # MLX knows compiled kernels by name: no other one may have it.
    name = f"{name}_{hashlib.sha256(code.encode()).hexdigest()[:16]}"
    try:
        key = f"{name}-{target}-{nvrtc.version()}"
        found = None if _kept is None else _kept.get(key)
        if found is None:
            found = nvrtc.compiled(code.replace("@NAME@", name), target)
            if _kept is not None:
                _kept.put(key, found)
    except RuntimeError as error:
        logger.debug("no machine code of %s: %s", name, error)
        return None
    return name, found
