"""Which layers of a target make a good draft: a search with bounded work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..draft_names import layers_name
from ..models import LoadedModel
from ..models.layer_skip import SkippingModel

#: Longest draft that predictions look at.
MAX_DRAFT_TOKENS = 16
# Layers that a step of the search tries to leave out: those that did least harm
# when they were last tried.
_TRIED = 4
# Fewer layers than those of a draft that is this seldom right are not looked at.
_HOPELESS = 0.1


@dataclass(frozen=True)
class Candidate:
    """Some layers, and how often a draft of them is right.

    Args:
        layers: those kept, ascending.
        agreement: share of the target's greedy choices that they make as well, each
            from the target's own text.
        num_layers: of the target.
    """

    layers: tuple[int, ...]
    agreement: float
    num_layers: int

    @property
    def name(self) -> str:
        """What ``--draft`` calls it."""
        return layers_name(self.layers)

    def speed_up(self, num_draft_tokens: int) -> float:
        """Predicted speed over plain decoding: tokens of a round over its cost.

        ``(1 - a^(k+1)) / (1 - a)`` tokens (Leviathan et al. 2023), where each is kept
        with the agreement ``a``; k draft steps cost their share of layers, and a
        verification as much as a plain step. That holds on a GPU at small batches,
        not on a CPU.
        """
        k, a = num_draft_tokens, self.agreement
        tokens = sum(a**i for i in range(k + 1))
        return tokens / (1 + k * len(self.layers) / self.num_layers)

    @property
    def best_k(self) -> int:
        """The draft length of the largest predicted speed-up."""
        return max(range(1, MAX_DRAFT_TOKENS + 1), key=self.speed_up)

    @property
    def best_speed_up(self) -> float:
        """The largest predicted speed-up."""
        return self.speed_up(self.best_k)


class Agreement:
    """How often a model with layers skipped chooses as the target did.

    Args:
        target: the model.
        texts: for each prompt its tokens, and those that the target chose greedily.
    """

    def __init__(
        self, target: LoadedModel, texts: Iterable[tuple[Sequence[int], Sequence[int]]]
    ):
        self._target = target
        self._texts = [
            (mx.array([[*prompt, *chosen[:-1]]]), mx.array(list(chosen)))
            for prompt, chosen in texts
            if chosen
        ]
        self.num_tokens = sum(len(chosen) for _, chosen in self._texts)

    def __call__(self, layers: tuple[int, ...]) -> float:
        """The share of all chosen tokens; one forward of every text.

        Raises:
            UnsupportedModelError: layers of this target cannot be skipped.
        """
        model = SkippingModel(self._target.model, layers, self._target.name)
        right = 0
        for tokens, chosen in self._texts:
            logits = model(tokens)[0, -len(chosen) :]
            same: Any = (mx.argmax(logits, axis=-1) == chosen).sum().item()
            right += same
        return right / max(self.num_tokens, 1)


def search_layers(
    agreement: Callable[[tuple[int, ...]], float],
    num_layers: int,
    *,
    keep: int | None = None,
    max_evaluations: int,
    progress: Callable[[Candidate], None] = lambda candidate: None,
) -> list[Candidate]:
    """Leave out layers, one after the other; then exchange some.

    First every layer is left out alone. Each step then leaves out the best of those
    that did least harm when they were last tried. Once ``keep`` layers are left, or
    one, what evaluations remain go to the best set: it exchanges a kept layer for
    one that was left out wherever that makes it better.

    Args:
        agreement: of a set of layers, see :class:`Agreement`.
        keep: layers to keep; ``None``: as many as the best predicted speed-up has.
        max_evaluations: most calls of ``agreement``, at least one more than
            ``num_layers``.

    Returns:
        The best candidate of each number of layers that was looked at, the best of
        all first; with ``keep`` that of so many layers is first.
    """
    known: dict[tuple[int, ...], Candidate] = {}

    def evaluate(layers: Iterable[int]) -> Candidate:
        key = tuple(sorted(layers))
        if key not in known:
            known[key] = Candidate(key, agreement(key), num_layers)
            progress(known[key])
        return known[key]

    current = frozenset(range(num_layers))
    #: Agreement when the layer was last left out.
    without: dict[int, float] = {}
    reached = 1.0
    while len(current) > (keep or 1) and len(known) < max_evaluations:
        if keep is None and reached < _HOPELESS:
            break
        order = sorted(current, key=lambda i: -without.get(i, 2.0))
        tried = order if not without else order[:_TRIED]
        for layer in tried[: max_evaluations - len(known)]:
            without[layer] = evaluate(current - {layer}).agreement
        out = max(tried, key=lambda i: without.get(i, -1.0))
        current, reached = current - {out}, without[out]
    if keep is not None and len(current) > keep:  # out of evaluations
        order = sorted(current, key=lambda i: -without.get(i, -1.0))
        evaluate(current - set(order[: len(current) - keep]))
    first = ranked(known.values(), keep)[0]
    _exchanged(first, evaluate, lambda: len(known) < max_evaluations)
    return ranked(known.values(), keep)


def ranked(candidates: Iterable[Candidate], keep: int | None = None) -> list[Candidate]:
    """The best candidate of each number of layers, the best of all first.

    Args:
        candidates: one or more.
        keep: layers that the first is to have, if one of them has so many; ``None``:
            as many as the best predicted speed-up has.
    """
    best: dict[int, Candidate] = {}
    for each in candidates:
        size = len(each.layers)
        if size not in best or each.agreement > best[size].agreement:
            best[size] = each
    found = sorted(best.values(), key=lambda c: len(c.layers))
    first = best.get(keep or 0) or max(found, key=lambda c: c.best_speed_up)
    return [first, *(c for c in reversed(found) if c is not first)]


def _exchanged(
    candidate: Candidate,
    evaluate: Callable[[Iterable[int]], Candidate],
    may_go_on: Callable[[], bool],
) -> None:
    """Exchange layers of the candidate, one by one, while that makes it better."""
    improved = True
    while improved:
        improved = False
        kept = set(candidate.layers)
        spare = set(range(candidate.num_layers)) - kept
        # Neighbours first: nearby layers do similar things.
        swaps = sorted((abs(a - b), a, b) for a in kept for b in spare)
        for _, out, into in swaps:
            if not may_go_on():
                return
            other = evaluate(kept - {out} | {into})
            if other.agreement > candidate.agreement:
                candidate, improved = other, True
                break
