"""Compiles our kernels into the folder in which MLX looks for compiled ones.

MLX compiles a kernel of ``mx.fast.cuda_kernel`` in every process, after headers that
take a second, and keeps nothing of it. But first it looks for the kernel in the folder
where it keeps its own, ``$MLX_PTX_CACHE_DIR``. Here NVRTC compiles the same code
without those headers, once on a machine, and puts the result there. MLX finds it by a
hash of the code that it would compile.

Whatever is not as expected (another MLX, no headers of CUDA's), MLX compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import mlx.core as mx

logger = logging.getLogger(__name__)

#: The MLX whose code this was written after (custom_kernel.cpp and jit_module.cpp).
MLX = "0.32.4"
# By type: its name in code, and in names of kernels.
_TYPES: dict[mx.Dtype, tuple[str, str]] = {
    mx.bool_: ("bool", "bool"),
    mx.int32: ("int32_t", "int32_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
    mx.float32: ("float", "float"),
    mx.float16: ("__half", "float16_t"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
}
_MLX_HEADER = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
# What our kernels need of these: types, and shapes and strides of ten dimensions.
_HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
struct Shape {
  int32_t sizes[10];
  __device__ int32_t operator[](int i) const { return sizes[i]; }
};
struct Strides {
  int64_t sizes[10];
  __device__ int64_t operator[](int i) const { return sizes[i]; }
};
"""
_LONGEST_NAME = 200


class Kernel(NamedTuple):
    """A kernel's code.

    Args: as for :func:`mx.fast.cuda_kernel`.
    """

    name: str
    header: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(
        cls,
        name: str,
        header: str,
        source: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        architecture: str = "",
    ) -> Kernel:
        """A kernel with its code in its name, by which MLX finds compiled ones."""
        whole = header + source + architecture
        version = hashlib.sha256(whole.encode()).hexdigest()[:12]
        return cls(f"specdec_{name}_{version}", header, source, inputs, outputs)

    def launched_by(self, make: Callable[..., Any], *, copies_views: bool) -> Any:
        """What ``make``, of :mod:`mx.fast`, makes of it."""
        return make(
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=self.source,
            header=self.header,
            ensure_row_contiguous=copies_views,
        )


class NotCompiledError(Exception):
    """A kernel was launched that :func:`compile_together` compiles with others."""


# The code that compile_together is to compile, by file; None: place compiles it.
_waiting: ContextVar[dict[Path, str] | None] = ContextVar("waiting", default=None)
# What NVRTC could not compile. MLX reports what is wrong with it.
_failed: set[Path] = set()


def place(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
) -> None:
    """Put the compiled kernel where MLX finds it, if it is not there.

    Args:
        inputs, output_dtypes, template: as for a kernel's call.

    Raises:
        NotCompiledError: it is compiled later, see :func:`compile_together`.
    """
    folder = kernel_folder()
    if folder is None:
        return
    try:
        name, function = written(kernel, inputs, output_dtypes, template)
    except KeyError:  # a type that is not in the table
        return
    code = (
        f"{_MLX_HEADER}{kernel.header}namespace mlx::core::cu {{\n\n"
        f"namespace cg = cooperative_groups;\n\n__global__ void {function}\n}}\n\n"
        "} // namespace mlx::core::cu\n"
    )
    file = folder / f"{name}_{hashed(code.encode()):x}.ptx"
    if len(file.name) > _LONGEST_NAME or file in _failed or os.path.exists(file):
        return
    code = f'{_HEADER}{kernel.header}extern "C" __global__ void {function}\n}}\n'
    waiting = _waiting.get()
    if waiting is None:
        _compile(file, code)
    else:
        waiting[file] = code
        raise NotCompiledError(name)


def compile_together(checks: Sequence[Callable[[], object]]) -> None:
    """Compile the kernels that checks launch, side by side, and run the checks.

    A check that needs a kernel which is not compiled ends there, and begins again once
    the kernels that all checks have come to are compiled.
    """
    if kernel_folder() is None:
        return
    while True:
        codes: dict[Path, str] = {}
        token = _waiting.set(codes)
        try:
            for check in checks:
                with suppress(NotCompiledError):
                    check()
        finally:
            _waiting.reset(token)
        if not codes:
            return
        logger.info(
            "compiling kernels for this GPU, once on this machine",
            extra={"passing": True},
        )
        with ThreadPoolExecutor() as pool:
            list(pool.map(_compile, codes, codes.values()))


def _compile(file: Path, code: str) -> None:
    name, parts = file.stem.rpartition("_")[0], []
    # MLX reads the code first, so the names are there before it.
    names = f"mlx::core::cu::{name}\t{name}\n".encode()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        machine_code = compiled(code)
        for end, content in ((".txt", names), (".ptx", machine_code)):
            parts.append(file.with_suffix(f"{end}.{os.getpid()}.{get_ident()}.part"))
            parts[-1].write_bytes(content)
            parts[-1].replace(file.with_suffix(end))
    except (OSError, RuntimeError, AttributeError) as error:
        _failed.add(file)
        logger.debug("MLX compiles %s itself: %r", name, error)
        for part in parts:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def written(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
) -> tuple[str, str]:
    """The name that MLX gives a kernel, and the function that it writes for it.

    The function has neither what comes before its name, nor its last brace.

    Raises:
        KeyError: the name of a type is not known.
    """
    name, constants = f"custom_kernel_{kernel.name}", ""
    for each, value in template:
        if isinstance(value, bool):
            name += "_t" if value else "_f"
            constants += f"  constexpr bool {each} = {str(value).lower()};\n"
        elif isinstance(value, int):
            name += f"_{value}"
            constants += f"  constexpr int {each} = {value};\n"
        else:
            name += f"_{_TYPES[value][1]}"
            constants += f"  using {each} = {_TYPES[value][0]};\n"
    parameters = []
    for each, array in zip(kernel.inputs, inputs, strict=True):
        parameters.append(f"const {_TYPES[array.dtype][0]}* {each}")
        parameters += [
            f"const __grid_constant__ {kind} {each}_{what}"
            for what, kind in (
                ("shape", "Shape"),
                ("strides", "Strides"),
                ("ndim", "int"),
            )
            if array.ndim and f"{each}_{what}" in kernel.source
        ]
    for each, dtype in zip(kernel.outputs, output_dtypes, strict=True):
        parameters.append(f"{_TYPES[dtype][0]}* {each}")
    text = f"{name}(\n    " + ",\n    ".join(parameters) + ") {\n"
    return name, text + (f"{constants}\n" if template else "") + kernel.source


def hashed(data: bytes) -> int:
    """``std::hash`` of a string, as libstdc++ has it: MurmurHash64A with its seed."""
    factor, mask = 0xC6A4A7935BD1E995, 2**64 - 1

    def mixed(value: int) -> int:
        return value ^ value >> 47

    result = 0xC70F6907 ^ len(data) * factor & mask
    whole = len(data) - len(data) % 8
    for i in range(0, whole, 8):
        word = int.from_bytes(data[i : i + 8], "little") * factor & mask
        result = (result ^ mixed(word) * factor & mask) * factor & mask
    if whole < len(data):
        result = (result ^ int.from_bytes(data[whole:], "little")) * factor & mask
    return mixed(mixed(result) * factor & mask)


@cache
def architecture() -> str:
    """What kernels are compiled for; "" if MLX compiles them.

    It is the architecture that MLX compiles for: an H100 is ``sm_90a``.
    """
    if kernel_folder() is None:
        return ""
    info = mx.device_info()
    major, minor = (int(info[f"compute_capability_{n}"]) for n in ("major", "minor"))
    return f"sm_{major}{minor}" + "a" * (major >= 9)


@cache
def kernel_folder() -> Path | None:
    """The folder in which MLX looks; ``None``: it is not known, or is not needed."""
    try:
        if metadata.version("mlx") != MLX or mx.default_device() == mx.cpu:
            return None
    except metadata.PackageNotFoundError:  # it was not installed by an installer
        return None
    if mx.metal.is_available() or _nvrtc() is None or _includes() is None:
        return None
    name = os.environ.get("MLX_PTX_CACHE_DIR")
    return Path(name) if name else None


@cache
def _nvrtc() -> Any:
    """The NVRTC that MLX uses; ``None``: it is not loaded, or cannot be opened."""
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
        # The last of six columns is the path, which may have spaces.
        lines = [line for line in maps.splitlines() if "libnvrtc.so" in line]
        paths = {line.split(maxsplit=5)[-1] for line in lines}
        return ctypes.CDLL(min(paths)) if paths else None
    except OSError:
        return None


@cache
def _includes() -> Path | None:
    """The folder of CUDA's headers."""
    packages = Path(mx.__file__).parents[1]
    folders = [f.parent for f in packages.glob("nvidia/*/include/cuda_bf16.h")]
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    homes.append("/usr/local/cuda")
    folders += [Path(home) / "include" for home in homes if home]
    return next((f for f in folders if (f / "cuda_bf16.h").is_file()), None)


def compiled(code: str) -> bytes:
    """Machine code. Several threads may compile at once.

    Raises:
        RuntimeError: the code is wrong, or the device is too new for NVRTC.
    """
    options = [
        f"--gpu-architecture={architecture()}",
        "--device-as-default-execution-space",
        f"--include-path={_includes()}",
    ]
    library, program = _nvrtc(), ctypes.c_void_p()
    strings = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    size = ctypes.c_size_t()

    def call(function: str, *arguments: Any) -> None:
        error = getattr(library, function)(*arguments)
        if error:
            raise RuntimeError(f"{function}: error {error}")

    source = ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None
    call("nvrtcCreateProgram", *source)
    try:
        call("nvrtcCompileProgram", program, len(options), strings)
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, buffer)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return buffer.raw
