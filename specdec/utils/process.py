"""What a process sets before it imports MLX. No mlx here."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import reason_of
from .blas import load_blas, mlx_is_for_cpu
from .child import child_environment
from .user_cache import cache_path, private_folder

log = logging.getLogger("specdec.process")

_VISIBLE, _KERNELS = "CUDA_VISIBLE_DEVICES", "MLX_PTX_CACHE_DIR"
_COUNT = "import mlx.core as mx; print(mx.device_count(mx.DeviceType.gpu))"
# Seconds that counting the devices may take: each is initialised.
_COUNTING = 120
# Seconds after which a file that MLX has begun is complete.
_SETTLED = 10
# The user's value of CUDA_VISIBLE_DEVICES, once all but one device are hidden.
_user_visible: list[str | None] = []


@cache
def prepare_process() -> None:
    """Prepare this process for MLX; the first call acts, if MLX is not imported.

    Commands and ``from specdec import SpecDecoder`` call it.

    - mlx-lm may raise the limit of open files, and not lower it.
    - Metal multiplies float32 in float32, where an M5 would round factors to TF32.
    - CUDA sees one device: the first of those that the user left visible. With
      several, an array made from a list can fail (docs/devices.md).
    - MLX keeps compiled CUDA kernels in a folder of the user's, not in one of the
      system's temporary files, which others may have made.
    - A CPU multiplies with OpenBLAS (:func:`~specdec.utils.blas.load_blas`).
    """
    sys.meta_path.insert(0, _FileLimit())
    if "mlx.core" not in sys.modules and may_use_cuda():
        visible = os.environ.get(_VISIBLE)
        _user_visible.append(visible)
        os.environ[_VISIBLE] = "0" if visible is None else visible.split(",")[0]
        folder = os.environ.get(_KERNELS)
        # That of the process which started this one may be for another GPU.
        if not folder or Path(folder).parent == cache_path("").resolve():
            os.environ[_KERNELS] = _kernel_folder()
    if sys.platform == "darwin":
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    load_blas()


def _kernel_folder() -> str:
    """Where MLX keeps compiled kernels: by MLX, kind of GPU and concurrent process.

    Where no folder is safe, a path that cannot exist: MLX keeps nothing.
    """
    lines: list[str] = []
    with suppress(OSError):  # containers may hide the driver's files
        for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
            lines += file.read_text("utf-8", "replace").splitlines()
    kinds = {line.partition(":")[2].strip() for line in lines if line[:6] == "Model:"}
    facts = [platform.machine(), *(sorted(kinds) or [platform.node()])]
    if len(kinds) > 1:  # CUDA's numbers are not those of the driver
        facts.append(os.environ[_VISIBLE])
    try:
        facts.append(metadata.version("mlx"))
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        return str(_unshared_folder(f"cuda-{digest}"))
    except metadata.PackageNotFoundError:
        pass
    except OSError as error:
        log.warning(
            "compiled kernels are not kept (%s): each process compiles them again. "
            "Let only this user write to it, or set %s",
            reason_of(error),
            _KERNELS,
        )
    return str(Path(os.devnull, "none"))


def _unshared_folder(name: str) -> Path:
    """A private folder that no other process uses at this time.

    MLX writes compiled kernels in place, and another process could read a part of one.
    The first folder that is free is taken, and gets what is complete in the others.

    Raises:
        OSError: it cannot be made, or others can write to it.
    """
    for number in count():
        folder = private_folder(f"{name}-{number}" if number else name)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        except OSError:  # a file system without locks
            os.close(lock)
            return folder
        break  # the lock stays until the process ends
    settled = time.time() - _SETTLED
    # What earlier processes left when they were killed.
    for part in folder.glob("tmp*"):  # cuda/mlx_kernels.py
        shutil.rmtree(part, ignore_errors=True)
    for part in folder.glob("*.part"):
        part.unlink(missing_ok=True)
    for code in folder.glob("*.ptx"):
        if not code.with_suffix(".txt").exists():
            code.unlink()
    for code in folder.parent.glob(f"{name}*/*.ptx"):
        copy, names = folder / code.name, code.with_suffix(".txt")
        with suppress(FileNotFoundError):
            if not copy.exists() and names.stat().st_mtime < settled:
                shutil.copyfile(code, copy)
                part = copy.with_suffix(".part")
                shutil.copyfile(names, part)
                part.replace(copy.with_suffix(".txt"))  # so the pair is whole
    for mark in folder.parent.glob(f"{name}*/launched_*"):  # cuda/mlx_kernels.py
        (folder / mark.name).touch()
    return folder


def may_use_cuda() -> bool:
    """Whether the MLX that is installed can be one for CUDA."""
    return sys.platform == "linux" and not mlx_is_for_cpu()


def user_visible() -> str | None:
    """The user's value of ``CUDA_VISIBLE_DEVICES``."""
    return _user_visible[0] if _user_visible else os.environ.get(_VISIBLE)


@cache
def cuda_devices() -> list[str]:
    """CUDA's names of the devices that the user left visible, hidden ones included."""
    visible = user_visible()
    environment = child_environment()
    environment.pop(_VISIBLE, None)
    if visible is not None:
        environment[_VISIBLE] = visible
    counted = subprocess.run(
        [sys.executable, "-P", "-c", _COUNT],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=_COUNTING,
        check=True,
    )
    count = int(counted.stdout)
    names = visible.split(",") if visible else list(map(str, range(count)))
    return names[:count]


class _FileLimit(MetaPathFinder):
    """Lets mlx-lm's import raise the limit of open files, and never lower it.

    ``mlx_lm.utils`` sets 2048, and 4096 as the hard limit. That fails where the hard
    limit is lower, and takes files from a process that may open more.
    """

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find ``mlx_lm.utils``, whose code then runs with another ``setrlimit``."""
        if fullname != "mlx_lm.utils":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Raising(spec.loader.name, spec.loader.path)
        return spec


class _Raising(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        setrlimit = resource.setrlimit
        resource.setrlimit = _raise_limit
        try:
            super().exec_module(module)
        finally:
            resource.setrlimit = setrlimit


def _raise_limit(
    kind: int, limits: tuple[int, int], *, set_limit: Any = resource.setrlimit
) -> None:
    """Raise the soft limit to that of ``limits``, as far as the hard one lets it."""
    soft, hard = resource.getrlimit(kind)
    wanted = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        set_limit(kind, (wanted, hard))
