"""Which Metal kernels are used on this machine: those that it has proven and timed.

A trial runs in a child process with a time limit. Before it begins, its verdict is kept
as "off". So a trial that crashes, hangs or takes the machine down has said no, and is
not repeated.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from ..cuda import proofs
from ..cuda.modules import change_kinds, leaves_of
from ..metal import few_rows
from ..metal.few_rows import BANDS, KINDS, Kind
from ..utils.child import Child, ChildError
from .kernel_proofs import kept_proofs

#: Set to 0, no Metal kernel of ours is used.
SWITCH = "SPECDEC_METAL_KERNELS"
#: The numbers of rows whose products are timed.
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 24, 32)
# A kernel is used if it is faster by this factor for each timed number of rows.
MARGIN = 1.15
# The most seconds of a trial. One takes some 10 on a GPU, more on a CPU.
_SECONDS = 240.0


@dataclass(frozen=True)
class Trial:
    """What was found about products with one kind of matrix.

    Attributes:
        layers: how many layers of the model have such a matrix.
        mlx, ours: milliseconds of a product, by number of rows; ours empty: not tried.
        fault: why there are no times of ours, or none at all.
        used: the numbers of rows for which our kernel is used from now on.
    """

    kind: Kind
    layers: int
    mlx: dict[int, float] = field(default_factory=dict)
    ours: dict[int, float] = field(default_factory=dict)
    fault: str = ""
    used: tuple[int, ...] = ()


def matrices_of(model: nn.Module) -> Counter[Kind]:
    """The kinds of a model's matrices, and how many layers have each.

    Of an embedding, the product as an output layer counts. Experts do not.
    """
    leaves = leaves_of(model)
    tied = not any(path.endswith("lm_head") for path, _ in leaves)
    counts: Counter[Kind] = Counter()
    for _, layer in leaves:
        embeds = isinstance(layer, nn.Embedding | nn.QuantizedEmbedding)
        if embeds and not tied:
            continue
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            kind = Kind.of(layer)
        elif isinstance(layer, nn.Linear | nn.Embedding):
            columns, length = layer.weight.shape
            kind = Kind(0, 0, layer.weight.dtype, columns, length)
        else:
            continue
        if kind is not None:
            counts[kind] += 1
    return counts


def trials(
    kinds: Counter[Kind], *, ours: bool, again: bool = False, rows: Sequence[int] = ROWS
) -> Iterator[Trial]:
    """Time MLX's products of each kind, and try our kernel where it has not been tried.

    Args:
        ours: whether this machine can run our kernels.
        again: try them even if they were tried before.
        rows: the numbers of rows to time.
    """
    child = Child("specdec.metal.trial", again=False)
    try:
        for kind, layers in kinds.items():
            with kept_proofs():
                yield _try(child, kind, layers, ours=ours, again=again, rows=rows)
    finally:
        child.kill()
        child.close()


def _try(
    child: Child,
    kind: Kind,
    layers: int,
    *,
    ours: bool,
    again: bool,
    rows: Sequence[int],
) -> Trial:
    names = {band: _verdict(kind, band) for band in BANDS}
    tries = ours and kind.fits and (again or proofs.kept(names[BANDS[0]]) is None)
    if tries:
        for name in names.values():
            proofs.keep(name, False)
    fault, answer = "", None
    for with_ours in (True, False) if tries else (False,):
        request = {"kind": kind.wire(), "rows": list(rows), "ours": with_ours}
        try:
            answer = child.ask(request, _SECONDS)
            break
        except ChildError as error:
            fault = fault or str(error)
    if answer is None:
        return Trial(kind, layers, fault=fault)
    by_mlx, by_ours = (
        {int(number): ms for number, ms in answer[name].items()}
        for name in ("mlx", "ours")
    )
    for (low, high), name in names.items() if by_ours else ():
        gains = [by_mlx[n] / ms for n, ms in by_ours.items() if low <= n <= high]
        proofs.keep(name, bool(gains) and min(gains) >= MARGIN)
    used = _rows(kind) if ours and kind.fits else frozenset()
    fault = fault or answer["fault"]
    if ours and kind.fits and not tries and not used:
        fault = "our kernel was tried before, and is off (--again tries it again)"
    return Trial(kind, layers, by_mlx, by_ours, fault, tuple(sorted(used)))


def _verdict(kind: Kind, band: tuple[int, int]) -> str:
    return f"few rows: {kind.name}, {band[0]} to {band[1]}"


def _rows(kind: Kind) -> frozenset[int]:
    """The numbers of rows for which the kernel has been proven and found faster."""
    rows: set[int] = set()
    for low, high in BANDS:
        if proofs.kept(_verdict(kind, (low, high))):
            rows.update(range(low, high + 1))
    return frozenset(rows)


def take_few_rows(model: nn.Module) -> None:
    """Let proven kernels compute the model's products of few rows, in place."""
    if os.environ.get(SWITCH, "").strip() == "0":
        return

    def suits(layer: Any) -> bool:
        kind = Kind.of(layer)
        if kind is None:
            return False
        few_rows.rows_of[kind] = _rows(kind)
        return bool(few_rows.rows_of[kind])

    with kept_proofs():
        change_kinds(model, KINDS, suits)
