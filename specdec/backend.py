"""What differs between MLX's backends: defaults, the compiler, the versions.

MLX is imported inside the functions, so that naming a type from here is free.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from .errors import CompilerMissingError

#: Rounds on the device when the host builds another one, which it reads later.
LOOKAHEAD = 1

_INSTALL = "Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++"


@dataclass(frozen=True)
class BackendDefaults:
    """How the engine shapes its work where it runs.

    Args:
        name: of the backend.
        read_bucket: cache columns handed to attention are rounded up to a
            multiple of this. CUDA builds an attention plan for every new shape
            (about 40 ms each); elsewhere every extra column costs instead.
        static_shapes: keep shapes the same from round to round, even when that
            computes a little more, because each new one costs.
        costs_by_token: a forward takes as long as it has tokens, and hardly longer to
            launch: speculative rounds are read at once and verify nothing in vain, and
            what one row costs says what any number does.
        join_rounds: rounds that taking prompts in takes as long as, where launches
            bound it, so that it hardly matters of how many rows they are.
        new_shape_seconds: what a shape that was not met before costs.
        compile_after: a decode forward is compiled once its shapes were met so many
            times; ``None``: never. It takes shapes that repeat, and pays where
            launching and Python take longer than computing.
        pad_single_token: steps of one token per row compute a second one in vain:
            CUDA's fused attention takes a mask only for several queries. Left out for
            models whose attention is ours, or whose packed weights MLX multiplies.
        unpacks: packed keys and values are unpacked for attention; CUDA's products
            with packed ones take no views, and few of the shapes that attention has.
        kernels: models, prompt lookup and commits run by what :mod:`specdec.cuda`
            has, as far as it is proven on the device.
        peek_rows: rows of a batch up to which plain rounds look what a drafter would
            propose, where it says so; ``None``: any number.
    """

    name: Literal["cpu", "cuda", "metal"]
    read_bucket: int
    static_shapes: bool
    costs_by_token: bool = False
    join_rounds: int = 0
    new_shape_seconds: float = 0.0
    compile_after: int | None = None
    pad_single_token: bool = False
    unpacks: bool = False
    kernels: bool = False
    peek_rows: int | None = None

    def rows_to_keep(self, rows: int, running: int) -> int:
        """Rows of a batch of ``rows`` to go on with when just ``running`` still run.

        A new batch size is a new shape. With static shapes ``rows`` is halved as
        often as the running ones fit: few shapes, whatever the rows' lengths.
        """
        if not self.static_shapes or not running:
            return running
        while running < rows and (rows + 1) // 2 >= running:
            rows = (rows + 1) // 2
        return rows


_DEFAULTS = {
    each.name: each
    for each in (
        BackendDefaults("cpu", read_bucket=1, static_shapes=False, costs_by_token=True),
        BackendDefaults(
            "cuda",
            read_bucket=256,
            static_shapes=True,
            # 3 to 5, plain and with a draft, of 8 rows and 32
            # (benchmarks/results/jobs-joins-h200.md).
            join_rounds=4,
            new_shape_seconds=0.04,
            compile_after=1,
            pad_single_token=True,
            unpacks=True,
            kernels=True,
            # A look held a round of 8 rows up by a tenth to a third, of one by 5 to 8%
            # (one H200).
            peek_rows=1,
        ),
        # Not measured; what follows from MLX's source is in docs/architecture.md. A
        # new length costs nothing: a multiple of the keys that a block of the
        # attention kernel takes has all blocks full. Launching what a look takes may
        # cost more than it brings.
        BackendDefaults("metal", read_bucket=32, static_shapes=False, peek_rows=0),
    )
}


def defaults() -> BackendDefaults:
    """The defaults of MLX's default device."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return _DEFAULTS["cpu"]
    return _DEFAULTS["metal" if mx.metal.is_available() else "cuda"]


def memory_size() -> int | None:
    """Bytes that MLX can use on its default device; ``None`` when nothing says it.

    On Metal what the system recommends, which is less than all of the memory; on
    CUDA the GPU's; on a CPU the machine's, or the container's if that is less.
    """
    import mlx.core as mx

    if defaults().name == "cpu":
        return _system_memory()
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        size = info.get(key)
        if isinstance(size, int) and size > 0:
            return size
    return None


def _system_memory() -> int | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):  # a system that does not count its pages
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text("ascii").strip()
    except (OSError, ValueError):
        return size
    return min(size, int(limit)) if limit.isdecimal() else size


def check_compiler() -> str | None:
    """Check that MLX's CPU backend can compile its fused kernels.

    MLX calls ``g++`` by that name (``$CXX`` and ``clang++`` do not count). Where
    there is none it runs unfused, which is only a little slower; where there is
    one that does not work, the first fused kernel fails.

    Returns:
        ``None`` when all is well, or one line to show where ``g++`` is missing.

    Raises:
        CompilerMissingError: ``g++`` is there and MLX cannot compile with it.
    """
    import mlx.core as mx

    if defaults().name != "cpu":
        return None
    if shutil.which("g++") is None:
        return f"no g++ found, so MLX runs without fused kernels ({_INSTALL})"
    try:
        # MLX keeps the compiled kernel on disk: half a second, once.
        mx.eval(mx.compile(_fused)(mx.zeros(1)))
    except RuntimeError as error:
        reason = str(error).rpartition("the output is:")[2].strip().splitlines()
        raise CompilerMissingError(
            f"MLX cannot compile its kernels: {reason[0] if reason else error} "
            f"(repair g++, or take it off PATH to run unfused; {_INSTALL})"
        ) from error
    return None


def describe() -> dict[str, str]:
    """Versions and device, for reports."""
    import mlx.core as mx

    device = mx.device_info().get("device_name", "unknown")
    return {
        "specdec": _version("mlx-specdec"),
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": defaults().name,
        "device": str(device),
    }


def _fused(x):  # type: ignore[no-untyped-def]
    return (x + 1) * 2


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a tree that is not installed
        return "unknown"
