"""Metal kernels on the CPU: the source that MLX would hand to Metal, compiled by g++.

MLX writes a kernel's signature itself: a call is traced for export, which needs no
Metal. The runtime is that of CUDA's emulator (``tests/cuda/emulation``).

Not checked: limits of registers and threadgroup memory, the order of hardware sums,
what Apple's compiler fuses, whether threads that ended are missed at a barrier, memory
order between threadgroups, which address space a pointer has, every speed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tests.cuda.emulation.building import launching, library
from tests.cuda.emulation.cuda import KernelFault, in_both_orders

_usual: Any = mx.fast.metal_kernel
_PLACES = {
    "thread_position_in_grid": (
        "blockIdx.x * blockDim.x + threadIdx.x, "
        "blockIdx.y * blockDim.y + threadIdx.y, "
        "blockIdx.z * blockDim.z + threadIdx.z"
    ),
    "thread_position_in_threadgroup": "threadIdx.x, threadIdx.y, threadIdx.z",
    "threadgroup_position_in_grid": "blockIdx.x, blockIdx.y, blockIdx.z",
    "threadgroups_per_grid": "gridDim.x, gridDim.y, gridDim.z",
    "threads_per_threadgroup": "blockDim.x, blockDim.y, blockDim.z",
}
#: What a kernel's parameters with these attributes are.
PLACES = {name: f"uint3({parts})" for name, parts in _PLACES.items()} | {
    "thread_index_in_simdgroup": "simt::running % 32",
    "simdgroup_index_in_threadgroup": "simt::running / 32",
    "thread_index_in_threadgroup": "simt::running",
    "threads_per_simdgroup": "32",
    "simdgroups_per_threadgroup": "(simt::threads + 31) / 32",
}
_PARAMETER = re.compile(
    r"\s*(const )?(device|constant) ([\w<>]+)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]|"
    r"\s*\w+ (\w+) \[\[(\w+)\]\]"
)
# Memory of a threadgroup is static, and known to the runtime.
_THREADGROUP = re.compile(
    r"(?:(?<=[;{}])|^)(\s*)threadgroup\s+([\w:]+(?:<[^;]*?>)?)\s+(\w+)"
    r"\s*((?:\[[^;]*?\])*)\s*;",
    re.M,
)
_UNKNOWN = re.compile(r"\bthreadgroup\s+[\w:]+(?:<[^;]*?>)?\s+\w+\s*[\[,;=]")
_TYPE = r"(?:vec<[^<>]*>|(?:u?(?:int|short|char|long)|float|half|bfloat)\w*|T)"
_POINTER = re.compile(rf"((?:\w+\s+)*)(?<![\w:])(?:metal::)?{_TYPE}\s*\*")
_SPACES = {"device", "constant", "thread", "threadgroup"}
#: What Metal forbids and g++ takes, or computes in another type.
_RULES = {
    r"\bdouble\b": "there is no double",
    r"(?<![\w.])\d+\.\d*(?:e[-+]?\d+)?(?![\w.])": "a constant without f is a double",
    r"\b(?:new|delete|virtual|goto|static|throw)\b": "Metal has no such word",
}


def check_source(code: str) -> None:
    """Refuse what Metal's language forbids, as far as a text shows it.

    Raises:
        KernelFault: names the rule and the line.
    """
    code = re.sub(r"//.*", "", code)
    faults = [(m, why) for rule, why in _RULES.items() for m in re.finditer(rule, code)]
    faults += [
        (found, "a pointer names no address space")
        for found in _POINTER.finditer(code)
        if _SPACES.isdisjoint(found[1].split())
    ]
    for found, why in faults:
        raise KernelFault(f"line {code.count(chr(10), 0, found.end()) + 1}: {why}")


def compiled(
    code: str, function: str, arguments: Sequence[str], flags: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """The library of a kernel in Metal's language.

    Args:
        function: its name, with values for its template.
        arguments: for each parameter, a C++ expression.
    """
    # The runtime knows, and poisons, the memory of a threadgroup.
    known = r"\1static \2 \3\4; static simt::Shared shared_\3(&\3, sizeof \3);"
    code = _THREADGROUP.sub(known, code)
    if found := _UNKNOWN.search(code):
        raise KernelFault(f"{found[0]}...: declare one threadgroup array a statement")
    parts = (
        "#define SIMT_METAL",
        '#include "simt.h"',
        '#line 1 "source"',
        code,
        launching(function, arguments),
    )
    return library("\n".join(parts), flags)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    *,
    flags: tuple[str, ...] = (),
    **options: Any,
) -> Callable[..., list[mx.array]]:
    """A stand-in for ``mx.fast.metal_kernel``, which runs when it is called.

    Args:
        flags: for the compiler, such as ``-DSUMS_BACKWARDS``.
        options: others of ``mx.fast.metal_kernel``.
    """
    check_source(header)
    check_source(source)
    usual = _usual(name, input_names, output_names, source, header, **options)

    def kernel(
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
        **asked: Any,
    ) -> list[mx.array]:
        if any(g % t for g, t in zip(grid, threadgroup, strict=True)):
            raise ValueError("threadgroups that are not whole are not emulated")
        wanted: dict[str, Any] = {"output_shapes": output_shapes, "grid": grid}
        wanted |= {"threadgroup": threadgroup, "output_dtypes": output_dtypes}
        full, text, sizes = _traced(usual, inputs, wanted | asked)
        arrays: list[mx.array] = []
        for array, (shape, strides, ndim) in zip(inputs, sizes, strict=True):
            arrays.append(array)
            if array.ndim and shape:
                arrays.append(mx.array(array.shape, mx.int32))
            if array.ndim and strides:
                steps = np.cumprod([1, *array.shape[:0:-1]])[::-1]
                arrays.append(mx.array(steps.astype(np.int64)))
            if array.ndim and ndim:
                arrays.append(mx.array([array.ndim], mx.int32))
        begin = text.index(f"[[kernel]] void {full}(") + len(f"[[kernel]] void {full}(")
        parameters = text[begin : text.index(") {\n", begin)].split(",\n")
        arguments = [_argument(each) for each in parameters]
        of = re.search(rf"decltype\({full}(<[^)]*>)\)", text)
        kept = text if of is None else text[: text.rindex("template", 0, of.start())]
        outputs = list(zip(output_names, output_shapes, output_dtypes, strict=True))
        built = compiled(kept, full + (of[1] if of else ""), arguments, flags)
        return in_both_orders(
            built, name, arrays, outputs, grid, threadgroup, init_value
        )

    return kernel


def _traced(
    usual: Any, inputs: Sequence[mx.array], wanted: dict[str, Any]
) -> tuple[str, str, Sequence[tuple[bool, bool, bool]]]:
    """A kernel's name, the source that MLX makes, and which sizes each input has."""
    parts: list[dict[str, Any]] = []
    mx.export_function(
        parts.append, lambda *arrays: usual(inputs=list(arrays), **wanted), *inputs
    )
    (part,) = (each for each in parts if each.get("name") == "CustomKernel")
    arguments = part["arguments"]
    return arguments[0], arguments[1], arguments[8]


def _argument(parameter: str) -> str:
    found = _PARAMETER.match(parameter)
    assert found is not None, parameter
    const, _, dtype, reference, _, place, _, attribute = found.groups()
    if attribute is not None:
        return PLACES[attribute]
    pointer = f"simt::pointer<{const or ''}{dtype}>({place})"
    return f"*{pointer}" if reference == "&" else pointer
