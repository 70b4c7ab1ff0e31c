"""OpenBLAS for MLX's CPU backend on Linux. No mlx here.

MLX's wheel for Linux brings the reference BLAS, which multiplies float32 matrices on
one core, and is tuned for no processor. A function of a library that is loaded for
all, before MLX is, takes the place of the wheel's function. The package
``scipy-openblas32`` has OpenBLAS under prefixed names, so a few lines of C++ pass MLX's
calls on. They are compiled with the g++ that MLX calls too, and kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from .extras import INSTALL_GXX, install
from .files import replace_file
from .user_cache import cache_path

#: The way out of the reference BLAS if g++ cannot compile.
MEND_GXX = f"install g++, or repair it ({INSTALL_GXX})"
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
_COMPILE_SECONDS = 60
# What OpenBLAS reads: a user's own number of threads. The last is Ray's, too.
_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
# Sets the number of OpenBLAS's threads, once it is loaded.
_set_threads: Callable[[int], object] | None = None


@cache
def load_blas() -> tuple[str, str]:
    """Let MLX's CPU backend multiply float32 matrices with OpenBLAS.

    The first call decides; it must come before MLX is imported. Nothing happens on
    macOS, with CUDA, if MLX is not the wheel for Linux, or if a BLAS was preloaded
    (``LD_PRELOAD``).
    OpenBLAS gets :func:`free_cores` threads, unless the user has set their number.

    Returns:
        The BLAS that MLX has: "OpenBLAS", "preloaded BLAS", "reference BLAS", or "" if
        MLX is no wheel for Linux. Then the way out of the reference BLAS, or "".
    """
    if not mlx_is_for_cpu():
        return "", ""
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return "preloaded BLAS", ""
    if "mlx.core" in sys.modules:
        return "reference BLAS", "import specdec's SpecDecoder before mlx"
    package = find_spec(_PACKAGE)
    if package is None or package.origin is None:
        return "reference BLAS", install("cpu")
    library = Path(package.origin).parent / "lib" / _LIBRARY
    # Of this machine's kind: folders of users are shared, and so may site-packages be.
    kind = f"{platform.machine()} {platform.libc_ver()}"
    known = hashlib.sha256(f"{library}\n{kind}\n{_SHIM}".encode()).hexdigest()[:16]
    shim = cache_path(f"openblas-{known}.so")
    try:
        _load(shim)
    except OSError:  # not compiled yet, somebody else's, or damaged
        try:
            _compile(library, shim)
        except (OSError, subprocess.SubprocessError):
            return "reference BLAS", MEND_GXX
    return "OpenBLAS", ""


def own_threads(processes: int) -> dict[str, str]:
    """The environment of one of several processes that share this machine's cores.

    It is empty if the user has set the number of threads, which processes inherit.
    """
    if _threads_are_set():
        return {}
    return {_THREADS[0]: str(free_cores(processes))}


def use_threads(number: int) -> None:
    """Let OpenBLAS use so many threads from now on, unless the user has set a number.

    Another number can change the last bits of a product.
    """
    if _set_threads is not None and not _threads_are_set():
        _set_threads(number)


def usable_cores() -> int:
    """How many cores this process may use, by its affinity and a container's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup, or "max", which is no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def free_cores(sharing: int = 1) -> int:
    """How many of the usable cores other processes leave, at least 1.

    With ``sharing``, it is an equal part for each of so many processes.

    A core counts as busy if something ran on it through the last minute and still does.
    The last minute alone would count a process that has just ended, such as the command
    before this one. The moment alone would count one that is about to end.
    """
    try:
        minute, _, _, running, _ = Path("/proc/loadavg").read_text("ascii").split()
        # This process runs, too.
        busy = min(int(float(minute)), int(running.split("/")[0]) - 1)
    except (OSError, ValueError):  # a system that does not count
        busy = 0
    free = max(1, min(usable_cores(), (os.cpu_count() or 1) - busy))
    return max(1, free // sharing)


def _threads_are_set() -> bool:
    return any(map(os.environ.get, _THREADS))


def mlx_is_for_cpu() -> bool:
    """Whether MLX is its wheel for CPUs on Linux, which has the reference BLAS."""
    spec = find_spec("mlx")
    folders = spec.submodule_search_locations if spec is not None else None
    return sys.platform == "linux" and any(
        any(Path(folder).parent.glob("mlx_cpu.libs/libblas-*"))
        for folder in folders or ()
    )


def _load(shim: Path) -> None:
    """Load the library for all; one that others could have written is refused."""
    status = shim.lstat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{shim} is not this user's own")
    global _set_threads
    library = ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
    _set_threads = getattr(library, "scipy_openblas_set_num_threads", None)
    # Threads wait for each other: one on a busy core slows all of them many times.
    use_threads(free_cores())


def _compile(library: Path, shim: Path) -> None:
    """Compile the library and load it; keep it, if the cache folder can be written."""
    with TemporaryDirectory(prefix="specdec-") as folder:
        compiled = Path(folder, shim.name)
        subprocess.run(
            [
                *("g++", "-shared", "-fPIC", "-O2", "-o", str(compiled)),
                *("-x", "c++", "-", "-x", "none", str(library)),
                *("-Xlinker", "-rpath", "-Xlinker", str(library.parent)),
            ],
            input=_SHIM.encode(),
            check=True,
            capture_output=True,
            timeout=_COMPILE_SECONDS,
        )
        compiled.chmod(0o700)
        _load(compiled)
        with suppress(OSError):
            shim.parent.mkdir(parents=True, exist_ok=True)
            replace_file(shim, compiled.read_bytes(), private=True)
