"""Makes the C++ of an emulated kernel, and compiles it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx

HERE = Path(__file__).parent
METAL = HERE.parents[1] / "metal"
FLAGS = (
    *("-O1", "-std=c++20", "-fPIC", "-w", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"),
    *("-fno-strict-aliasing", "-ffp-contract=off", "-fno-threadsafe-statics"),
    # The sanitizers' handlers are in simt.cpp.
    "-fsanitize=bounds,alignment,integer-divide-by-zero",
)
# Fills variables that a kernel never sets, so that they are not zero by chance; since
# GCC 12.
PATTERN = "-ftrivial-auto-var-init=pattern"
TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.float64: "double",
}
# Inline PTX: device.h has functions in its place.
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+SPECDEC_\w+\((?:.*\\\n)*.*\n?", re.M)
_PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.")
_ELEMENTS = {"bf16": "__nv_bfloat16", "f16": "__half"}


def constants(template: Sequence[tuple[str, int | bool | mx.Dtype]]) -> tuple[str, ...]:
    """The template's constants, with which a kernel's source begins."""
    lines = []
    for name, value in template:
        if isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"constexpr int {name} = {value};")
        else:
            lines.append(f"using {name} = {TYPES[value]};")
    return tuple(lines)


@cache
def generated(
    name: str,
    inputs: tuple[tuple[str, mx.Dtype, bool], ...],
    outputs: tuple[tuple[str, mx.Dtype], ...],
    template: tuple[str, ...],
    source: str,
    header: str,
) -> str:
    """The code that MLX makes from a kernel's source, and a function that launches it.

    Args:
        inputs: each input's name, type, and whether it has dimensions.
        template: see :func:`constants`.
    """
    parameters, arguments = [], []
    for i, (of, dtype, sized) in enumerate(inputs):
        kind = f"const {TYPES[dtype]}"
        parameters.append(f"{kind}* {of}")
        arguments.append(f"simt::pointer<{kind}>({i})")
        for suffix, its, taken in (
            ("shape", "const Shape", f"simt::shape({i})"),
            ("strides", "const Strides", f"simt::strides({i})"),
            ("ndim", "const int", f"simt::arrays[{i}].ndim"),
        ):
            if f"{of}_{suffix}" not in source:
                continue
            if not sized:
                # MLX passes shape, strides and ndim anyway, which shifts the arguments
                # after them.
                raise ValueError(f"{of}_{suffix}: the array has no dimensions")
            parameters.append(f"{its} {of}_{suffix}")
            arguments.append(taken)
    for i, (of, dtype) in enumerate(outputs, start=len(inputs)):
        parameters.append(f"{TYPES[dtype]}* {of}")
        arguments.append(f"simt::pointer<{TYPES[dtype]}>({i})")
    # The element type of tensor-core products: the header's, or else the template's T.
    elements = "T"
    product = _PRODUCT.search(header)
    if product:
        elements = _ELEMENTS[product[1]]
    # MLX's own code follows the header without a new line.
    begun = f"{header}static void {name}({', '.join(parameters)}) {{"
    return "\n".join(
        (
            '#include "simt.h"',
            f"#define SPECDEC_MMA_TYPE {elements}",
            _MACRO.sub("", begun),
            *template,
            '#line 1 "source"',
            source,
            "}",
            launching(name, arguments),
        )
    )


def launching(function: str, arguments: Sequence[str]) -> str:
    """The functions of a library that runs ``function`` in each thread of a launch."""
    return f"""
static void simt_body() {{ {function}({", ".join(arguments)}); }}
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED int simt_launch(const simt::Launch* l, const simt::Array* a) {{
  return simt::launch(*l, a, simt_body);
}}
EXPORTED void* simt_stacks() {{ return simt::new_stacks(); }}
EXPORTED const char* simt_message() {{ return simt::message_of(); }}
"""


@cache
def _folder() -> Path:
    """The user's folder of compiled libraries."""
    folder = Path(tempfile.gettempdir()) / f"specdec-simt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} is someone else's")
    return folder


@cache
def _flags() -> tuple[str, ...]:
    """The flags that this compiler knows."""
    asked = ["g++", "-dumpversion"]
    version = subprocess.run(asked, capture_output=True, check=True, text=True).stdout
    return (*FLAGS, *([PATTERN] if int(version.split(".")[0]) >= 12 else []))


@cache
def _shims() -> bytes:
    """Everything that a library depends on in addition to its code."""
    version = subprocess.run(["g++", "--version"], capture_output=True, check=True)
    names = "simt.h", "device.h", "simt.cpp"
    paths = [*(HERE / name for name in names), METAL / "metal.h"]
    files = [path.read_bytes() for path in paths]
    return b"".join([version.stdout, *files, " ".join(_flags()).encode()])


@cache
def _runtime() -> Path:
    """The compiled runtime that runs every kernel."""
    name = hashlib.sha256(_shims()).hexdigest()[:24]
    built = _folder() / f"{name}.o"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as own:
            compiled = Path(own, "simt.o")
            _compile(*_flags(), "-c", HERE / "simt.cpp", "-o", compiled)
            compiled.replace(built)
    return built


@cache
def library(code: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The compiled kernel of :func:`generated`, or of another device's code."""
    key = _shims() + repr((code, flags)).encode()
    name = hashlib.sha256(key).hexdigest()[:24]
    built = _folder() / f"{name}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as own:
            written, compiled = Path(own, "kernel.cpp"), Path(own, "kernel.o")
            linked = Path(own, "kernel.so")
            written.write_text(code, "utf-8")
            headers = "-I", HERE, "-I", METAL
            _compile(*_flags(), *flags, *headers, "-c", written, "-o", compiled)
            # Without C++'s library, which takes half the time.
            libraries = ("-nostdlib", "-lm", "-lc", "-lgcc")
            _compile("-shared", compiled, _runtime(), *libraries, "-o", linked)
            linked.replace(built)
    made = ctypes.CDLL(str(built))
    made.simt_message.restype = ctypes.c_char_p
    made.simt_stacks.restype = ctypes.c_void_p
    return made


def _compile(*arguments: str | Path) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the kernel does not compile:\n{done.stderr}")
