"""Which Metal kernels are used on this machine: those that it has proven and timed.

A trial runs in a child process with a time limit. Before it begins, its verdict is kept
as "off". So a trial that crashes, hangs or takes the machine down has said no, and is
not repeated. A trial that the time or the user ended has said nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.nn as nn

from ..backend import BackendDefaults
from ..cache import CacheOptions, check_caches
from ..cuda import gated_delta, proofs
from ..cuda.attention_patch import attending_kind
from ..cuda.gated_delta import Form, form_of, is_layer
from ..cuda.modules import change_kinds, leaves_of
from ..metal import attention, few_rows
from ..metal.few_rows import BANDS, KINDS, Kind
from ..metal.trial import COLUMNS, form_wire
from ..utils.child import Child, ChildError
from .kernel_proofs import cached_proofs

#: Set to 0, no Metal kernel of ours is used.
SWITCH = "SPECDEC_METAL_KERNELS"
#: The numbers of rows whose products are timed.
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 24, 32)
#: The numbers of rows with which steps of a draft are timed, with a tail and without.
TAIL_ROWS = 1, 4
#: The most tokens of a row that our kernel of gated delta layers computes on Metal.
TOKENS = gated_delta.TILE
_KERNELS = {"kind", "attention", "form", "tail"}
# A kernel is used if it is faster by this factor for each timed number of rows.
MARGIN = 1.15
# The most seconds of one number of rows, once kernels are compiled, and the fewest that
# are left to time any.
_MOST_SECONDS, _FEWEST_SECONDS = 2.0, 0.1
# Our kernel has hung if one number of rows takes a quarter of the time left, and at
# least these seconds. With less time left it is not tried.
_HANGS_SECONDS = 15.0


@dataclass(eq=False)
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


def _of_tail(form: attention.Form, rows: Sequence[int] = ROWS) -> Subject:
    name = form.name.replace("attention", "tail of a draft's cache")
    number = tuple(n for n in TAIL_ROWS if n in rows)
    verdicts = {(n, n): f"{name}, {n * COLUMNS} tokens" for n in TAIL_ROWS}
    return Subject(f"{name}, rows", {"tail": form.wire()}, number, verdicts)


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
    # An output layer, which takes longest, comes last.
    kinds = sorted(matrices_of(model).items(), key=lambda e: e[0].columns * e[0].length)
    subjects = [(_of_matrix(k, rows), n) for k, n in kinds]
    if ours:
        heads = attention_of(model).items()
        forms = [(each, n) for f, n in heads if f.known for each in f.variants]
        subjects += [(_of_attention(form, rows), n) for form, n in forms]
        subjects += [(_of_tail(form, rows), n) for form, n in heads]
        subjects += [(_of_layer(f, rows), n) for f, n in layers_of(model).items()]
    return subjects


class _EndError(Exception):
    """The time is up, or no process can time anything."""


class Trials:
    """Times MLX's computations, and tries our kernels that were not tried before.

    Args:
        child: runs :mod:`..metal.trial`; it is killed if the time is up.
        end: of :func:`time.monotonic`; what is not timed by then is left out.
        ours: whether this machine can run our kernels.
        again: try them even if they were tried before.
    """

    def __init__(self, child: Child, end: float, *, ours: bool, again: bool = False):
        self._child, self._end = child, end
        self._ours, self._again = ours, again
        self._answers = False  # whether the child's process has answered
        self._unsafe: set[str] = set()  # kernels that have hung or crashed

    def of(self, subjects: Sequence[tuple[Subject, int]]) -> Iterator[Trial]:
        """Yield each trial as it begins, and again after each number of rows."""
        # Whatever hangs, and wherever it does, ends with the time.
        timer = threading.Timer(self._seconds, self._child.kill)
        timer.daemon = True
        timer.start()
        try:
            with cached_proofs():
                # New kernels come first: a second run goes on where the time was up.
                order = sorted(subjects, key=lambda each: not self._is_new(each[0]))
                left = sum(len(subject.rows) for subject, _ in order)
                for subject, layers in order:
                    yield from self._try(subject, Trial(subject.name, layers), left)
                    left -= len(subject.rows)
        except _EndError:
            return
        finally:
            timer.cancel()

    @property
    def _seconds(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _is_new(self, subject: Subject) -> bool:
        names = subject.verdicts.values() if self._ours else ()
        return any(self._again or proofs.kept(name) is None for name in names)

    def _try(self, subject: Subject, trial: Trial, left: int) -> Iterator[Trial]:
        """Time each number of rows; ``left``: so many measurements share the time."""
        kept = {name: proofs.kept(name) for name in subject.verdicts.values()}
        (kernel,) = subject.request
        tries = self._is_new(subject)
        if tries and kernel in self._unsafe:
            tries, trial.fault = (
                False,
                "our kernel has ended a process, so it is not tried here",
            )
        elif tries and self._seconds <= _HANGS_SECONDS:
            tries, trial.fault = False, "too little time is left to try our kernel"
        elif self._ours and kept and not tries and not subject.used:
            trial.fault = (
                "our kernel was tried before, and is off (--again tries it again)"
            )
        for name in kept if tries else ():
            proofs.keep(name, False)
        yield trial
        right = tries
        try:
            for done, number in enumerate(subject.rows):
                share = min(_MOST_SECONDS, self._seconds / (left - done))
                request = {**subject.request, "rows": [number], "seconds": share}
                right = right and self._time(trial, request, ours=True)
                if number in trial.mlx or self._time(trial, request, ours=False):
                    yield trial
                else:
                    break
        finally:
            if tries and not right:
                trial.ours = {}
            elif tries:
                self._judge(subject, trial, kept)
            trial.used = subject.used if self._ours else ()

    def _time(self, trial: Trial, request: dict[str, Any], *, ours: bool) -> bool:
        """Add a measurement to the trial; ``False``: there is none, or a fault."""
        left = self._seconds
        limit = min(left, max(_HANGS_SECONDS, left / 4)) if ours else left
        try:
            if left < _FEWEST_SECONDS:
                raise _EndError
            answer = self._child.ask(request | {"ours": ours}, limit)
        except ChildError as error:
            if self._seconds < _FEWEST_SECONDS:
                raise _EndError from error
            trial.fault = trial.fault or str(error)
            if error.kind in ("error", "memory"):
                return False
            if ours:
                self._unsafe.update(request.keys() & _KERNELS)
            elif not self._answers:
                raise _EndError from error
            self._answers = False
            return False
        self._answers = True
        for name, times in (("mlx", trial.mlx), ("ours", trial.ours)):
            times.update({int(number): ms for number, ms in answer[name].items()})
        trial.fault = trial.fault or answer["fault"]
        return not answer["fault"]

    def _judge(
        self, subject: Subject, trial: Trial, kept: Mapping[str, bool | None]
    ) -> None:
        """Keep which ranges of rows are faster; of others, what was kept before."""
        for (low, high), name in subject.verdicts.items():
            rows = [n for n in subject.rows if low <= n <= high]
            verdict = kept[name]
            if all(n in trial.ours for n in rows):
                gains = [trial.mlx[n] / trial.ours[n] for n in rows]
                verdict = bool(gains) and min(gains) >= MARGIN
            proofs.keep(name, verdict)


def take_kernels(model: nn.Module) -> None:
    """Let proven kernels compute the model's products and layers, in place."""
    if os.environ.get(SWITCH, "").strip() == "0":
        return
    with cached_proofs():
        for kind in matrices_of(model):
            few_rows.rows_of[kind] = frozenset(_of_matrix(kind).used)
        for form in layers_of(model):
            gated_delta.proven.verdicts[form] = bool(_of_layer(form).used)
        for heads in attention_of(model):
            for each in heads.variants:
                attention.tokens_of[each] = frozenset(_of_attention(each).used)
    rows_of: Any = few_rows.rows_of
    change_kinds(model, KINDS, lambda layer: bool(rows_of.get(Kind.of(layer))))
    modules: list[tuple[str, Any]] = model.named_modules()
    for _, module in modules:
        kind, of = _by_kernel(module), _form_of(module)
        used = of is not None and any(map(attention.tokens_of.get, of.variants))
        if kind is not None and used:
            module.__class__ = kind


def tail_from(model: nn.Module) -> int | None:
    """With how many tokens of all rows a tail was faster here; ``None``: with none."""
    modules: list[tuple[str, Any]] = model.named_modules()
    forms = {form for _, each in modules if (form := _form_of(each)) is not None}
    if os.environ.get(SWITCH, "").strip() == "0":
        return None
    with cached_proofs():
        least = [min(_of_tail(form).used, default=None) for form in forms]
    known = [n * COLUMNS for n in least if n is not None]
    return max(known) if len(known) == len(forms) > 0 else None


def with_tails(
    model: nn.Module, name: str, options: CacheOptions, backend: BackendDefaults
) -> CacheOptions:
    """Options for caches of a draft: with a tail, where that was faster here.

    The model's attention then takes what such caches hand out; nothing else changes.
    """
    least = tail_from(model) if backend.tail else None
    if least is None:
        return options
    modules: list[tuple[str, Any]] = model.named_modules()
    for _, module in modules:
        if (kind := _by_kernel(module)) is not None:
            module.__class__ = kind
    options = replace(options, tail=backend.tail, tail_from=least)
    return check_caches(model, name, options)
