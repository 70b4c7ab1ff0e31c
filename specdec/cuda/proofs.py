"""Proofs that each kernel computes what its reference does, on this device.

A kernel is tried when it is first asked for. A process that has the verdicts of earlier
processes does not try it again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import mlx.core as mx

logger = logging.getLogger(__name__)


class Verdicts(Protocol):
    """Verdicts about kernels on this device, by name."""

    def get(self, name: str, /) -> bool | None:
        """The verdict of this process or an earlier one; ``None``: there is none."""

    def put(self, name: str, verdict: bool | None, /) -> None:
        """Keep a verdict; ``None``: forget it."""


_kept: Verdicts | None = None
# Whether a kernel was reported. On a GPU that is too old, each would be.
_reported = False


@contextmanager
def kept_in(verdicts: Verdicts | None) -> Iterator[None]:
    """Let proofs look into ``verdicts`` first, and add to them; ``None``: try all.

    A kernel that failed is not kept: the next process tries it again.
    """
    global _kept
    before, _kept = _kept, verdicts
    try:
        yield
    finally:
        _kept = before


def holds(name: str, check: Callable[[], bool]) -> bool:
    """Whether a kernel runs on this device, and computes what it should.

    Args:
        name: the name of the kernel and of all that it was compiled for.
        check: compares the kernel with its reference.
    """
    if kept(name):
        return True
    why = "its results differ from MLX's"
    try:
        right = check()
    except (RuntimeError, ValueError) as error:
        right, why = False, (str(error) or type(error).__name__).splitlines()[0][:300]
    if right:
        keep(name, right)
    else:
        _report(name, why)
    return right


Form = TypeVar("Form", bound=Hashable)


class Proofs(Generic[Form]):
    """Whether a kernel is right on this device, by the form that it is compiled for.

    Args:
        name: of the kernel.
        agrees: compares the kernel with its reference.
        supports: whether there is such a kernel.

    Attributes:
        verdicts: of the forms that were tried.
    """

    def __init__(
        self,
        name: str,
        agrees: Callable[[Form], bool],
        supports: Callable[[Form], bool] = lambda form: True,
    ):
        self._name, self._agrees, self.supports = name, agrees, supports
        self.verdicts: dict[Form, bool] = {}

    def __call__(self, form: Form) -> bool:
        """Whether the kernel runs, and computes what it should.

        The first call tries it, and must not be within a function that is traced.
        """
        if form not in self.verdicts:
            check = partial(self._agrees, form)
            supported = self.supports(form)
            self.verdicts[form] = supported and holds(self.named(form), check)
        return self.verdicts[form]

    def named(self, form: Form) -> str:
        """The name under which a verdict is kept."""
        return f"{self._name} {form}"

    def reached(self, form: Form) -> bool:
        """Whether it was found right; in functions that are traced, too."""
        return self.verdicts.get(form, False)

    def of(self, forms: Iterable[Form | None]) -> list[Callable[[], bool]]:
        """Calls that try each of the forms."""
        return [partial(self, f) for f in dict.fromkeys(forms) if f is not None]


def close(ours: mx.array, exact: mx.array, most: float) -> bool:
    """Whether no number is off by more than a share of the largest one."""
    exact = exact.astype(mx.float32)
    off = mx.abs(ours.astype(mx.float32) - exact).max()
    # Compared this way round, NaN is no agreement.
    return bool((off <= most * mx.abs(exact).max()).item())


@contextmanager
def unfused() -> Iterator[None]:
    """Let MLX compile no functions; afterwards it does if it did before."""
    traced: list[mx.array] = []

    @mx.compile
    def probe(x: mx.array) -> mx.array:
        traced.append(x)
        return x

    for _ in range(2):
        probe(mx.zeros(1))
    mx.disable_compile()
    try:
        yield
    finally:
        if len(traced) == 1:  # the second call took what the first had compiled
            mx.enable_compile()


def _report(name: str, why: str) -> None:
    global _reported
    logger.log(
        logging.DEBUG if _reported else logging.WARNING,
        "the kernel %r is not used on this GPU (%s): MLX's operations take its place, "
        "which are slower. If the GPU has compute capability 8.0 or more, please "
        "report this line",
        name,
        why,
    )
    _reported = True


def kept(name: str) -> bool | None:
    """The verdict that is kept for ``name``; ``None``: there is none."""
    return None if _kept is None else _kept.get(name)


def keep(name: str, verdict: bool | None) -> None:
    """Keep a verdict, if :func:`kept_in` says where; ``None``: forget it."""
    if _kept is not None:
        _kept.put(name, verdict)


@cache
def sources() -> str:
    """A digest of all kernels, references and proofs, of Metal, too."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for file in sorted([*package.glob("cuda/*.py"), *package.glob("metal/*.py")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
