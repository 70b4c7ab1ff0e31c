"""Kernels of CUDA's language in Metal's: one text, two devices.

Only texts that use threads, shared memory, shuffles and float arithmetic are
translated. Metal's language has address spaces, and not all of its versions have
functions within functions: those become macros.
"""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx

from .kernel_files import Kernel

# ln(1 + x) for 0 <= x <= 1, which Metal lacks: the error of 1 + x is divided out
# (Kahan).
_LOG1P = """
METAL_FUNC float log1p_of(float x) {
  const float y = 1.0f + x;
  return y == 1.0f ? x : metal::precise::log(y) * (x / (y - 1.0f));
}
"""
_NAMES = {
    r"__device__ __forceinline__": "METAL_FUNC",
    r"__shfl_xor_sync\(\w+, (\w+), (\w+)\)": r"metal::simd_shuffle_xor(\1, ushort(\2))",
    r"__syncthreads\(\)": "threadgroup_barrier(metal::mem_flags::mem_threadgroup)",
    r"\bthreadIdx\.x": "int(thread_index_in_threadgroup)",
    r"\bblockIdx\.x": "int(threadgroup_position_in_grid.x)",
    r"\bfmaf\(": "metal::fma(",
    r"\bexpf\(": "metal::precise::exp(",
    r"\bsqrtf\(": "metal::precise::sqrt(",
    r"\bfabsf\(": "metal::fabs(",
    r"\b(?:fmaxf|max)\(": "metal::max(",
    r"(?<![:\w])min\(": "metal::min(",
    r"\blog1pf\(": "log1p_of(",
    r"\bmake_float4\(": "float4(",
    r"\bfloat4& ": "thread float4& ",
    r"#pragma unroll(?: 1)?\n": "\n",
}
_LAMBDA = re.compile(r"auto (\w+) = \[&?\]\(([^)]*)\) \{(.*?)\n?\s*\};", re.S)
_SHARED = re.compile(r"__shared__ (\w+) ([^;]+);")
_POINTER = re.compile(r"((?:const )?\w+)\* (\w+)( =\s*)([^;]+);")
_CAST = re.compile(r"reinterpret_cast<((?:const )?\w+)\*>\(")


def in_metal(header: str) -> str:
    """A kernel's header in Metal's language; its functions have no pointers."""
    return _LOG1P + _renamed(header)


def translated(code: str) -> str:
    """A kernel's body in Metal's language."""
    code = re.sub(r"//.*", "", code)
    shared = {
        re.match(r"\w+", each.strip())[0]  # type: ignore[index]
        for match in _SHARED.finditer(code)
        for each in match[2].split(",")
    }
    code = _SHARED.sub(_declared, code)
    code = _LAMBDA.sub(_macro, code)

    def space(text: str) -> str:
        of_group = any(re.search(rf"\b{name}\b", text) for name in shared)
        return "threadgroup" if of_group else "device"

    def pointer(match: re.Match[str]) -> str:
        kind, name, equals, value = match.groups()
        return f"{_spaced(kind, space(value))}* {name}{equals}{value};"

    def cast(match: re.Match[str]) -> str:
        value = code[match.end() : code.index(";", match.end())]
        return f"reinterpret_cast<{_spaced(match[1], space(value))}*>("

    code = _POINTER.sub(pointer, code)
    return _renamed(_CAST.sub(cast, code))


def _renamed(code: str) -> str:
    for name, metal in _NAMES.items():
        code = re.sub(name, metal, code)
    return code


def _spaced(kind: str, space: str) -> str:
    const = "const " * kind.startswith("const ")
    return f"{const}{space} {kind.removeprefix('const ')}"


def _declared(match: re.Match[str]) -> str:
    """Arrays of a threadgroup, each in a statement of its own."""
    kind, names = match.groups()
    return "\n".join(f"threadgroup {kind} {each.strip()};" for each in names.split(","))


def _macro(match: re.Match[str]) -> str:
    """A function within a function as a macro; its arguments are names or values."""
    name, parameters, body = match.groups()
    names = [each.split()[-1].lstrip("*&") for each in parameters.split(",")]
    statements = [each.strip() for each in body.strip().split(";") if each.strip()]
    if statements[-1].startswith("return "):
        # Constants before the result are put into it.
        result = statements[-1].removeprefix("return ")
        for each in reversed(statements[:-1]):
            constant, _, value = each.partition(" = ")
            result = re.sub(rf"\b{constant.split()[-1]}\b", f"({value})", result)
        body = f"({result})"
    else:
        body = f"{{ {body} }}"
    for each in names:
        body = re.sub(rf"\b{each}\b", f"({each})", body)
    line = re.sub(r"#pragma.*", "", body)
    return f"\n#define {name}({', '.join(names)}) " + " ".join(line.split()) + "\n"


def metal_kernel(
    name: str,
    source: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    header: str = "",
    copies_views: bool = True,
) -> Any:
    """The function that launches ``source``, see :func:`mx.fast.metal_kernel`.

    Args: as for :func:`specdec.cuda.kernels.cuda_kernel`.
    """
    kernel = Kernel.of(name, header, source, inputs, outputs)
    return kernel.launched_by(mx.fast.metal_kernel, copies_views=copies_views)
