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

from ..cuda import gated_delta, proofs
from ..cuda.attention_patch import attending_kind
from ..cuda.gated_delta import Form, form_of, is_layer
from ..cuda.modules import change_kinds, leaves_of
from ..metal import attention, few_rows
from ..metal.few_rows import BANDS, KINDS, Kind
from ..metal.trial import form_wire
from ..utils.child import Child, ChildError
from .kernel_proofs import kept_proofs

#: Set to 0, no Metal kernel of ours is used.
SWITCH = "SPECDEC_METAL_KERNELS"
#: The numbers of rows whose products are timed.
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 24, 32)
#: The most tokens of a row that our kernel of gated delta layers computes on Metal.
TOKENS = gated_delta.TILE
# A kernel is used if it is faster by this factor for each timed number of rows.
MARGIN = 1.15
# The most seconds of a trial. One takes some 10 on a GPU, more on a CPU.
_SECONDS = 240.0


@dataclass(frozen=True)
class Trial:
    """What was found about products with one kind of matrix, or one kind of layer.

    Attributes:
        name: the kind.
        layers: how many layers of the model are of that kind.
        mlx, ours: milliseconds by number of rows; ours empty: not tried.
        fault: why there are no times of ours, or none at all.
        used: the numbers of rows for which our kernel is used from now on.
    """

    name: str
    layers: int
    mlx: dict[int, float] = field(default_factory=dict)
    ours: dict[int, float] = field(default_factory=dict)
    fault: str = ""
    used: tuple[int, ...] = ()


@dataclass(frozen=True)
class Subject:
    """What is tried: what a child is asked, and the verdicts by ranges of rows."""

    name: str
    request: dict[str, Any]
    rows: tuple[int, ...]
    verdicts: dict[tuple[int, int], str]

    @property
    def used(self) -> tuple[int, ...]:
        """The numbers of rows with which the kernel is proven, and faster."""
        bands = [band for band, name in self.verdicts.items() if proofs.kept(name)]
        return tuple(n for low, high in bands for n in range(low, high + 1))


def _of_matrix(kind: Kind, rows: Sequence[int] = ROWS) -> Subject:
    bands = BANDS if kind.fits else ()
    verdicts = {
        each: f"few rows: {kind.name}, {each[0]} to {each[1]}" for each in bands
    }
    return Subject(kind.name, {"kind": kind.wire()}, tuple(rows), verdicts)


def _of_layer(form: Form, rows: Sequence[int] = ROWS) -> Subject:
    heads = f"{form.key_heads} and {form.value_heads} heads"
    name = f"gated delta, {heads} of {form.key_size}, tokens"
    tokens = tuple(n for n in rows if n <= TOKENS)
    request = {"form": form_wire(form)}
    return Subject(name, request, tokens, {(1, TOKENS): gated_delta.proven.named(form)})


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


def _of_attention(form: attention.Form, rows: Sequence[int] = ROWS) -> Subject:
    bands = attention.BANDS if form.known else ()
    verdicts = {(low, high): f"{form.name}, {low} to {high}" for low, high in bands}
    tokens = tuple(n for n in rows if n <= attention.MOST_TOKENS)
    request = {"attention": form.wire()}
    return Subject(f"{form.name}, queries", request, tokens, verdicts)


def _by_kernel(module: nn.Module) -> Any:
    return attending_kind(type(module), attention)


def attention_of(model: nn.Module) -> Counter[attention.Form]:
    """The forms of a model's attention, and how many layers have each."""
    modules: list[tuple[str, Any]] = model.named_modules()
    forms = (_form_of(each) for _, each in modules if _by_kernel(each) is not None)
    return Counter(form for form in forms if form is not None)


def _form_of(module: Any) -> attention.Form | None:
    """The form of an attention module; ``None``: its numbers have other names."""
    projection = module.get("q_proj")
    heads, pairs = (
        next((n for name in names if (n := getattr(module, name, None))), None)
        for names in (
            ("n_heads", "num_heads", "num_attention_heads"),
            ("n_kv_heads", "num_key_value_heads"),
        )
    )
    if not heads or not pairs or projection is None or "weight" not in projection:
        return None
    dtype = projection.get("scales", projection["weight"]).dtype
    size = getattr(module, "head_dim", projection["weight"].shape[0] // heads)
    return attention.Form(size, heads, pairs, dtype)


def layers_of(model: nn.Module) -> Counter[Form]:
    """The forms of a model's gated delta layers, and how many layers have each."""
    modules: list[tuple[str, Any]] = model.named_modules()
    forms = (form_of(each) for _, each in modules if is_layer(type(each)))
    return Counter(form for form in forms if form is not None)


def subjects_of(
    model: nn.Module, *, ours: bool, rows: Sequence[int] = ROWS
) -> list[tuple[Subject, int]]:
    """What :func:`trials` times for a model, and how many layers are of each kind.

    Args:
        ours: with attention and gated delta layers, of which only our kernels are
            compared with MLX's operations.
        rows: the numbers of rows to time.
    """
    subjects = [(_of_matrix(k, rows), n) for k, n in matrices_of(model).items()]
    if ours:
        heads = attention_of(model).items()
        subjects += [(_of_attention(f, rows), n) for f, n in heads if f.known]
        subjects += [(_of_layer(f, rows), n) for f, n in layers_of(model).items()]
    return subjects


def trials(
    subjects: Sequence[tuple[Subject, int]], *, ours: bool, again: bool = False
) -> Iterator[Trial]:
    """Time MLX's computations, and try our kernels that were not tried before.

    Args:
        ours: whether this machine can run our kernels.
        again: try them even if they were tried before.
    """
    child = Child("specdec.metal.trial", again=False)
    try:
        for subject, layers in subjects:
            with kept_proofs():
                yield _try(child, subject, layers, ours=ours, again=again)
    finally:
        child.kill()
        child.close()


def _try(
    child: Child, subject: Subject, layers: int, *, ours: bool, again: bool
) -> Trial:
    verdicts = subject.verdicts if ours else {}
    new = any(proofs.kept(name) is None for name in verdicts.values())
    tries = bool(verdicts) and (again or new)
    if tries:
        for name in verdicts.values():
            proofs.keep(name, False)
    fault, answer = "", None
    for with_ours in (True, False) if tries else (False,):
        request = {**subject.request, "rows": subject.rows, "ours": with_ours}
        try:
            answer = child.ask(request, _SECONDS)
            break
        except ChildError as error:
            fault = fault or str(error)
    if answer is None:
        return Trial(subject.name, layers, fault=fault)
    by_mlx, by_ours = (
        {int(number): ms for number, ms in answer[name].items()}
        for name in ("mlx", "ours")
    )
    for (low, high), name in verdicts.items() if by_ours else ():
        gains = [by_mlx[n] / ms for n, ms in by_ours.items() if low <= n <= high]
        proofs.keep(name, bool(gains) and min(gains) >= MARGIN)
    used = subject.used if ours else ()
    fault = fault or answer["fault"]
    if verdicts and not tries and not used:
        fault = "our kernel was tried before, and is off (--again tries it again)"
    return Trial(subject.name, layers, by_mlx, by_ours, fault, used)


def take_kernels(model: nn.Module) -> None:
    """Let proven kernels compute the model's products and layers, in place."""
    if os.environ.get(SWITCH, "").strip() == "0":
        return
    with kept_proofs():
        for kind in matrices_of(model):
            few_rows.rows_of[kind] = frozenset(_of_matrix(kind).used)
        for form in layers_of(model):
            gated_delta.proven.verdicts[form] = bool(_of_layer(form).used)
        for heads in attention_of(model):
            attention.tokens_of[heads] = frozenset(_of_attention(heads).used)
    rows_of: Any = few_rows.rows_of
    change_kinds(model, KINDS, lambda layer: bool(rows_of.get(Kind.of(layer))))
    modules: list[tuple[str, Any]] = model.named_modules()
    for _, module in modules:
        kind, of = _by_kernel(module), _form_of(module)
        if kind is not None and of is not None and attention.tokens_of.get(of):
            module.__class__ = kind
