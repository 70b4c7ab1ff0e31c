"""Differences between MLX's backends: defaults, memory, the compiler, versions.

MLX is imported inside the functions, so that importing this module is cheap.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from .errors import CompilerMissingError, ConfigError
from .utils.blas import MEND_GXX, load_blas
from .utils.extras import INSTALL_GXX
from .utils.printable import quoted
from .utils.process import may_use_cuda, user_visible

#: How many rounds the device may be computing while the host builds another one.
LOOKAHEAD = 1
#: Tokens of a prefill chunk, of all rows, that are many for a layer.
MANY_TOKENS = 4096
#: The most bytes of a prompt's logits, in float32, that are scored at once.
SCORED_BYTES = 64 * 2**20
#: The versions that the tests ran with, as in requirements.lock.
TESTED = {"mlx": "0.32.4", "mlx-lm": "0.32.2"}


@dataclass(frozen=True)
class BackendDefaults:
    """How the engine shapes its work on a backend.

    Args:
        name: the backend's name.
        read_bucket: cache columns passed to attention are rounded up to a multiple of
            this. CUDA builds an attention plan for every new shape (about 40 ms each);
            on other backends every extra column costs time instead.
        static_shapes: keep shapes the same from round to round, even if that computes
            a little more, because each new shape takes time.
        costs_by_token: a forward takes longer with every token, and little time to
            launch. So rounds with a draft are read at once and verify nothing in vain,
            and costs measured with one row are scaled to any number of rows.
        join_rounds: how many rounds the prefill of joining rows takes, if launches
            dominate it, so that its time hardly depends on the number of rows.
        new_shape_seconds: seconds that a new shape takes.
        compile_after: compile a decode forward once its shapes have occurred this many
            times; ``None``: never. It needs shapes that repeat, and pays if launching
            and Python take longer than computing.
        pad_single_token: compute a second token in steps of one token per row, since
            CUDA's fused attention takes a mask only for several queries. Not done for
            models that use our attention kernel, or whose packed weights MLX
            multiplies.
        unpacks: unpack packed keys and values for attention, since CUDA's products
            with packed arrays take no views, and few of attention's shapes.
        prefills_by_layers: hand prefill chunks over layer by layer, a few ahead of the
            device, because each launch allocates its result at once.
        most_chunk_tokens: the most tokens of all rows in a prefill chunk, if each row
            may have as many as the read bucket; ``None``: any number.
        kernels: use the kernels of :mod:`specdec.cuda` for models, prompt lookup and
            commits, as far as they are proven on the device.
        boolean_masks: attention's kernels read boolean masks, half as many bytes, of
            as many heads as queries have.
        shares_memory: the system has no other memory than the device, so buffers that
            MLX keeps for reuse are limited while rows decode, too.
        copied_layers: MLX is at most so many layers ahead of the device. A write copies
            a cache that one of them reads, unless it is in place. 0: too few to matter.
        tail: columns of the tails of drafts' caches, see :mod:`specdec.cache.tail`; 0:
            they have none.
        draft_lengths: what ``auto`` chooses from, if not from those that suit CUDA.
        verify_widths: the numbers of tokens of the verify forwards that are timed.
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
    prefills_by_layers: bool = False
    most_chunk_tokens: int | None = None
    kernels: bool = False
    boolean_masks: bool = False
    shares_memory: bool = False
    copied_layers: int = 0
    tail: int = 0
    draft_lengths: tuple[int, ...] | None = None
    verify_widths: tuple[int, ...] = (1, 2, 5)

    def prefill_step(self, size: int, num_rows: int) -> int:
        """The most tokens of each of ``num_rows`` rows in a chunk of ``size``."""
        most = self.most_chunk_tokens
        if most is None:
            return size
        fitting = most // max(1, num_rows) // self.read_bucket * self.read_bucket
        return min(size, max(fitting, self.read_bucket))

    def layers_ahead(self, num_tokens: int) -> int:
        """Layers of a prefill chunk that wait for the device besides the one computed.

        With ``MANY_TOKENS`` a layer takes so long that one is enough, and its hidden
        states take most memory.

        Args:
            num_tokens: tokens of all rows, padding included.
        """
        return 1 if num_tokens >= MANY_TOKENS else 2

    def rows_to_keep(self, rows: int, running: int) -> int:
        """How many of a batch's ``rows`` to keep when only ``running`` still run.

        A new batch size is a new shape. With static shapes, ``rows`` is halved as long
        as the running rows fit, which gives few shapes.
        """
        if not self.static_shapes or not running:
            return running
        while running < rows and (rows + 1) // 2 >= running:
            rows = (rows + 1) // 2
        return rows


_DEFAULTS: dict[str, BackendDefaults] = {
    each.name: each
    for each in (
        BackendDefaults(
            "cpu",
            read_bucket=1,
            static_shapes=False,
            costs_by_token=True,
        ),
        BackendDefaults(
            "cuda",
            read_bucket=256,
            static_shapes=True,
            # Measured: 3 to 5 when one or two rows join batches of 8 and of 32, with a
            # draft and without (benchmarks/results/jobs-joins-h200.md).
            join_rounds=4,
            new_shape_seconds=0.04,
            compile_after=1,
            pad_single_token=True,
            unpacks=True,
            # One H100: 0.6 to 1.4 times as long, in an eighth to a quarter of the
            # memory (benchmarks/results/prefill-h100.md).
            prefills_by_layers=True,
            most_chunk_tokens=8192,
            kernels=True,
            # Ten graphs or command buffers of 50 to 100 operations.
            copied_layers=25,
        ),
        # Not measured; docs/devices.md derives these values from MLX's source. A new
        # length costs nothing; the bucket fills the attention kernel's blocks.
        # A product's time rises in steps with the rows in all, up to 5, to 10 and to 32
        # (published costs), so each draft length is timed.
        BackendDefaults(
            "metal",
            read_bucket=32,
            static_shapes=False,
            boolean_masks=True,
            shares_memory=True,
            copied_layers=25,
            # With k = 4 and 8192 tokens, about the least is copied: tails by each
            # forward, the base once they are full.
            tail=64,
            draft_lengths=(0, 1, 2, 3, 4, 7),
            verify_widths=(1, 2, 3, 4, 5, 8),
        ),
    )
}


def defaults(name: str | None = None) -> BackendDefaults:
    """The defaults of a backend.

    Args:
        name: ``cpu``, ``cuda`` or ``metal``; ``None``: that of MLX's default device.

    Raises:
        ConfigError: MLX is one for CUDA, and there is no GPU.
    """
    if name is not None:
        return _DEFAULTS[name]
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return _DEFAULTS["cpu"]
    if mx.metal.is_available():
        return _DEFAULTS["metal"]
    _check_gpu()
    return _DEFAULTS["cuda"]


@cache
def _check_gpu() -> None:
    """Refuse CUDA without a GPU, which MLX notices at the first allocation.

    Raises:
        ConfigError: there is none, or the user left none visible.
    """
    import mlx.core as mx

    if not may_use_cuda() or mx.device_count(mx.DeviceType.gpu):
        return
    visible = user_visible()
    if visible is None:
        raise ConfigError(
            "MLX is the one for CUDA, and CUDA finds no GPU: nvidia-smi says what is "
            "missing, and the extra cpu needs none"
        )
    raise ConfigError(
        f"CUDA_VISIBLE_DEVICES is {quoted(visible)}, and CUDA finds no such GPU: take "
        "the numbers that nvidia-smi -L lists, or unset it"
    )


def memory_size(sharing: int = 1) -> int | None:
    """Bytes that MLX can use on its default device; ``None``: unknown.

    On Metal this is the working set that the system recommends, which is less than all
    memory; on CUDA what other programs leave of the GPU's memory; on a CPU the
    machine's memory, or the container's if that is less. With ``sharing``, it is at
    most an equal part of the device's memory.

    Args:
        sharing: processes that share the device in equal parts, this one included.
    """
    import mlx.core as mx

    if defaults().name == "cpu":
        memory = _system_memory()
        return None if memory is None else memory // sharing
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        size = info.get(key)
        if isinstance(size, int) and size > 0:
            free, held = info.get("free_memory"), mx.get_active_memory()
            size //= sharing
            if not isinstance(free, int):
                return size
            return min(size, free + held + mx.get_cache_memory())
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

    MLX calls ``g++`` by that name (``$CXX`` and ``clang++`` do not count). Without a
    ``g++`` it runs unfused, which is only a little slower. With one that does not work,
    the first fused kernel fails.

    Returns:
        ``None`` if it can, or one line to show if ``g++`` is missing.

    Raises:
        CompilerMissingError: ``g++`` exists, but MLX cannot compile with it.
    """
    import mlx.core as mx

    if defaults().name != "cpu":
        return None
    if shutil.which("g++") is None:
        without = "fused kernels"
        if load_blas()[1] == MEND_GXX:
            without += " and without OpenBLAS, many times slower in float32"
        return f"no g++ found, so MLX runs without {without} ({INSTALL_GXX})"
    try:
        # MLX keeps the compiled kernel on disk: half a second, once.
        mx.eval(mx.compile(_fused)(mx.zeros(1)))
    except RuntimeError as error:
        reason = str(error).rpartition("the output is:")[2].strip().splitlines()
        raise CompilerMissingError(
            f"MLX cannot compile its kernels: {reason[0] if reason else error} "
            f"(repair g++, or take it off PATH to run unfused; {INSTALL_GXX})"
        ) from error
    return None


def product_notes(*, float32: bool, fixed_draft: bool) -> list[str]:
    """Lines to show if a CPU computes a model's products slowly.

    Args:
        float32: the weights are float32, and not packed.
        fixed_draft: every round drafts the same number of tokens, worth it or not.
    """
    if defaults().name != "cpu":
        return []
    notes = []
    blas, remedy = load_blas()
    if remedy == MEND_GXX and shutil.which("g++") is None:
        pass  # check_compiler says it
    elif remedy and float32:
        notes.append(
            "MLX multiplies float32 matrices with a reference BLAS here, which takes "
            f"many times as long as OpenBLAS: {remedy}"
        )
    elif blas and not float32:
        needed = (" and OpenBLAS", f", and {remedy}") if remedy else ("", "")
        notes.append(
            "on this CPU MLX is fastest by far with float32 weights (4 bytes "
            f"each){needed[0]}: use --dtype float32{needed[1]}"
        )
    if fixed_draft and not float32:
        notes.append(
            "on a CPU, verifying costs nearly as much as decoding, except in float32: "
            "with a fixed number of draft tokens most pairs are slower; the output is "
            "the same"
        )
    return notes


def describe() -> dict[str, str]:
    """Versions and device, for reports.

    ``blas`` is what a CPU multiplies float32 matrices with (see
    :func:`~specdec.utils.blas.load_blas`).
    """
    import mlx.core as mx

    device = mx.device_info().get("device_name", "unknown")
    installed = versions()
    return {
        "specdec": installed["mlx-specdec"],
        "mlx": installed["mlx"],
        "mlx_lm": installed["mlx-lm"],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": defaults().name,
        "blas": load_blas()[0] if defaults().name == "cpu" else "",
        "device": str(device),
    }


def versions() -> dict[str, str]:
    """Installed versions by distribution, without importing MLX."""
    return {name: _version(name) for name in ("mlx-specdec", *TESTED)}


def newer_than_tested() -> str:
    """One line if MLX or mlx-lm is of a later minor release than the tested one."""
    newer = [
        f"{name} {version}"
        for name, version in versions().items()
        if name in TESTED and _minor(version) > _minor(TESTED[name])
    ]
    if not newer:
        return ""
    tested = " ".join(f"'{name}=={version}'" for name, version in TESTED.items())
    return f"{' and '.join(newer)}: newer than specdec was tested with; try {tested}"


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; (0, 0) for one that has none."""
    numbers = version.split(".")[:2]
    return tuple(int(each) if each.isdecimal() else 0 for each in numbers)


def _fused(x):  # type: ignore[no-untyped-def]
    return (x + 1) * 2


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a tree that is not installed
        return "unknown"
