"""Drafters by name, and how a decoder gets its drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..draft_spec import DraftSpec
from ..models import LoadedModel, check_same_vocabulary, context_length, load_draft
from ..models.runner import ModelRunner
from .base import Drafter
from .chain import ChainDrafter
from .model import DraftModel
from .ngram import NgramDrafter, NgramOptions

# Beside a model that can propose as well, two tokens that occurred before are a
# weak reason.
_MIN_NGRAM_BEFORE_A_MODEL = 3


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is made for.

    Args:
        target: the model that it drafts for.
        vocab_size: the target's number of logits.
        max_draft_tokens: largest k of any round.
        runner: runs a model with the decoder's settings for caches and prefill.
    """

    target: LoadedModel
    vocab_size: int
    max_draft_tokens: int
    runner: Callable[[LoadedModel], ModelRunner]


#: Makes the drafter of a decoder; a class whose constructor takes the context is one.
DrafterFactory = Callable[[DraftContext], Drafter]


@dataclass(frozen=True)
class NamedDrafter:
    """The factory of specdec's own drafters; their models are loaded.

    Args:
        name: for reports.
        model: what proposes; ``None``: n-grams alone.
        ngram: looked up before the model is asked; ``None``: none are.
    """

    name: str
    model: LoadedModel | None = None
    ngram: NgramOptions | None = None

    @classmethod
    def load(
        cls, spec: DraftSpec, target: LoadedModel, *, dtype: str | None = None
    ) -> NamedDrafter:
        """Load what a draft needs.

        Raises:
            ModelError: see :func:`specdec.models.load_draft`.
        """
        model = ngram = None
        if spec.model is not None:
            model = load_draft(spec.model.name, target, dtype=dtype)
        if spec.ngram:
            least = (
                NgramOptions().min_ngram if model is None else _MIN_NGRAM_BEFORE_A_MODEL
            )
            ngram = NgramOptions(min_ngram=least, shared=spec.shared)
        return cls(spec.name, model, ngram)

    def __call__(self, context: DraftContext) -> Drafter:
        """The drafter.

        Raises:
            VocabularyMismatchError: target and draft model do not share one.
            UnsupportedModelError: the draft model needs a cache that is not
                supported.
        """
        found: list[Drafter] = []
        if self.ngram is not None:
            found.append(NgramDrafter(self.ngram))
        if self.model is not None:
            check_same_vocabulary(context.target, self.model)
            found.append(
                DraftModel(
                    context.runner(self.model),
                    vocab_size=context.vocab_size,
                    max_draft_tokens=context.max_draft_tokens,
                    context_length=context_length(self.model.config),
                )
            )
        return found[0] if len(found) == 1 else ChainDrafter(*found)
