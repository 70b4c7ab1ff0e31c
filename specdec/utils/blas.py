"""OpenBLAS for MLX's CPU backend on Linux. No mlx here.

MLX's wheel for Linux brings the reference BLAS, which multiplies float32 matrices on
one core, a number at a time. A function of a library that is loaded for all, before
MLX is, takes the place of the wheel's. The package ``scipy-openblas32`` has OpenBLAS
under prefixed names, so a few lines of C++ pass MLX's calls on. They are compiled once,
with the g++ that MLX calls too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from .files import replace_file
from .kept import kept_path

_PACKAGE, _LIBRARY = "scipy_openblas32", "libscipy_openblas.so"
# The functions of BLAS that MLX calls.
_SHIM = """\
#define GEMM(name, scalar, number) \\
  void scipy_##name(int, int, int, int, int, int, scalar, const number*, int, \\
                    const number*, int, scalar, number*, int); \\
  void name(int order, int ta, int tb, int m, int n, int k, scalar alpha, \\
            const number* a, int lda, const number* b, int ldb, scalar beta, \\
            number* c, int ldc) { \\
    scipy_##name(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \\
  }
extern "C" {
GEMM(cblas_sgemm, float, float)
GEMM(cblas_dgemm, double, double)
GEMM(cblas_cgemm, const void*, void)
}
"""


def load_blas() -> bool:
    """Let MLX's CPU backend multiply float32 matrices with OpenBLAS.

    Call it before MLX is imported; later, nothing happens. Nor does it on macOS, with
    CUDA, if MLX is no wheel for Linux, or if a BLAS was preloaded (``LD_PRELOAD``).
    Commands and ``from specdec import SpecDecoder`` do so.

    Returns:
        Whether MLX multiplies with another BLAS than the reference.
    """
    if "mlx.core" not in sys.modules and not is_fast():
        # The package or g++ may be missing, or be of another architecture.
        with suppress(OSError, subprocess.CalledProcessError):
            _load()
    return is_fast()


def is_fast() -> bool:
    """Whether MLX's BLAS is another than the reference."""
    return not _brings_reference() or hasattr(ctypes.CDLL(None), "cblas_sgemm")


def _brings_reference() -> bool:
    """Whether the reference BLAS lies beside MLX, as in its wheel for Linux."""
    spec = find_spec("mlx")
    folders = spec.submodule_search_locations if spec is not None else None
    return sys.platform == "linux" and any(
        any(Path(folder).parent.glob("mlx_cpu.libs/libblas-*"))
        for folder in folders or ()
    )


def _load() -> None:
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return
    library = Path(spec.origin).parent / "lib" / _LIBRARY
    known = hashlib.sha256(f"{library}\n{_SHIM}".encode()).hexdigest()[:16]
    shim = kept_path(f"openblas-{known}.so")
    if not shim.exists():
        _compile(library, shim)
    ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)


def _compile(library: Path, shim: Path) -> None:
    """Write the shim, whole or not at all: other processes may be doing the same."""
    shim.parent.mkdir(parents=True, exist_ok=True)
    made = shim.with_suffix(f".{os.getpid()}.so")
    command = ["g++", "-shared", "-fPIC", "-O2", "-x", "c++", "-", "-o", str(made)]
    linked = ["-x", "none", str(library), f"-Wl,-rpath,{library.parent}"]
    try:
        subprocess.run(
            [*command, *linked], input=_SHIM.encode(), check=True, capture_output=True
        )
        replace_file(shim, made.read_bytes())
    finally:
        made.unlink(missing_ok=True)
