"""NVIDIA's runtime compiler, which MLX's CUDA backend brings into the process."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

_LOADED = re.compile(r" (/.*/libnvrtc\.so[.\d]*)$", re.MULTILINE)


@cache
def library() -> Any:
    """NVRTC as MLX has loaded it; ``None``: it has not, or that cannot be seen."""
    try:
        found = _LOADED.search(Path("/proc/self/maps").read_text("utf-8"))
        return found and ctypes.CDLL(found[1])
    except OSError:
        return None


@cache
def version() -> str:
    """Of the library."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def compiled(source: str, architecture: str) -> bytes:
    """The machine code, a cubin, of CUDA code for an architecture like ``sm_90``.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    nvrtc, program = library(), ctypes.c_void_p()
    text, no_headers = source.encode(), (0, None, None)
    begun = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, None, *no_headers)
    _check(begun)
    try:
        option = ctypes.c_char_p(f"--gpu-architecture={architecture}".encode())
        failed = nvrtc.nvrtcCompileProgram(program, 1, ctypes.byref(option))
        if failed:
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC: {log.decode(errors='replace')}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    _check(read(program, found))
    return found.raw


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError(f"NVRTC: error {failed}")
