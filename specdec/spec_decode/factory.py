"""Makes a decoder's drafter: by name, or by a function of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from ..errors import ConfigError
from ..model_names import DraftSpec, named_draft
from ..models import (
    LoadedModel,
    VocabularyMap,
    context_length,
    load_draft,
    map_vocabulary,
)
from ..models.draft_heads import DraftHead
from ..models.runner import ModelRunner
from .chain import ChainDrafter
from .draft_model import DraftModel
from .drafter import Drafter
from .head_drafter import HeadDrafter
from .ngram import NgramDrafter, NgramOptions

# With a model that can propose as well, a match of two tokens is too weak.
_MIN_NGRAM_BEFORE_A_MODEL = 3


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is made for.

    Args:
        target: the model that it drafts for.
        vocab_size: the target's number of logits.
        max_draft_tokens: largest k of any round.
        runner: runs a model with the decoder's settings for caches and prefill.
        corpus: whether finished answers may be proposed again.
    """

    target: LoadedModel
    vocab_size: int
    max_draft_tokens: int
    runner: Callable[[LoadedModel], ModelRunner]
    corpus: bool = True


#: Makes the drafter of a decoder: a function, or a class whose constructor takes the
#: context. It may also be a :class:`DescribedFactory`.
DrafterFactory = Callable[[DraftContext], Drafter]


@runtime_checkable
class DescribedFactory(Protocol):
    """A factory that describes the drafter before it makes one.

    Attributes:
        name: a name for reports. Other factories go by the function's or class's name.
        model: the model that the drafter will run, so that its memory is counted;
            ``None``: no model. For other factories, no memory is counted.
    """

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> LoadedModel | None: ...

    def __call__(self, context: DraftContext, /) -> Drafter: ...


def ngram_of(spec: DraftSpec) -> NgramOptions | None:
    """How the draft looks n-grams up; ``None`` if it does not."""
    if not spec.ngram:
        return None
    if spec.model is None:
        return NgramOptions()
    return NgramOptions(min_ngram=_MIN_NGRAM_BEFORE_A_MODEL)


@dataclass(frozen=True)
class NamedDrafter:
    """The factory of specdec's own drafters; their models are loaded already.

    Args:
        name: a name for reports.
        model: the model that proposes; ``None``: n-grams alone.
        ngram: n-grams to look up before the model is asked; ``None``: none.
        vocabulary: maps the target's tokens to the model's; ``None``: found out when
            the drafter is made.
    """

    name: str
    model: LoadedModel | None = None
    ngram: NgramOptions | None = None
    vocabulary: VocabularyMap | None = None

    @classmethod
    def load(
        cls,
        spec: DraftSpec,
        target: LoadedModel,
        *,
        dtype: str | None = None,
        trust_remote_code: bool = False,
    ) -> NamedDrafter:
        """Load what a draft needs.

        Raises:
            ConfigError: the draft is ``auto``.
            ConfigError, ModelError: see :func:`specdec.models.load_draft`.
        """
        if spec.automatic:
            raise ConfigError(
                "draft 'auto' is chosen when a target is loaded by its name: name the "
                "draft, or use SpecDecoder.from_pretrained"
            )
        model = None
        if spec.model is not None:
            model = load_draft(
                spec.model, target, dtype=dtype, trust_remote_code=trust_remote_code
            )
        return cls(spec.name, model, ngram_of(spec))

    def __call__(self, context: DraftContext) -> Drafter:
        """The drafter.

        Raises:
            VocabularyMismatchError: target and draft model share too few tokens.
            UnsupportedModelError: the draft model needs a cache that is not
                supported.
        """
        drafters: list[Drafter] = []
        if self.ngram is not None:
            options = self.ngram if context.corpus else replace(self.ngram, corpus=0)
            drafters.append(NgramDrafter(options))
        if self.model is not None:
            settings: dict[str, Any] = {
                "vocab_size": context.vocab_size,
                "max_draft_tokens": context.max_draft_tokens,
                "context_length": context_length(self.model.config),
            }
            head = self.model.model
            most = head.max_proposals if isinstance(head, DraftHead) else None
            if most is not None and self.ngram is None:
                # No round is wider than the block; the memory plan counts on that.
                settings["max_draft_tokens"] = min(context.max_draft_tokens, most)
            runner = context.runner(self.model)
            if isinstance(head, DraftHead):
                added = getattr(self.model.tokenizer, "added_tokens_decoder", None)
                drafters.append(HeadDrafter(runner, special=added or (), **settings))
            else:
                known = self.vocabulary or map_vocabulary(context.target, self.model)
                drafters.append(DraftModel(runner, vocabulary=known, **settings))
        return drafters[0] if len(drafters) == 1 else ChainDrafter(*drafters)


def factory_of(
    drafter: DrafterFactory | str | None,
    draft: LoadedModel | None,
    target: LoadedModel,
) -> DrafterFactory | None:
    """The factory for what a decoder was given: a factory, a name, or a draft model.

    Raises:
        ConfigError: both are given, one has the wrong type, or see
            :meth:`NamedDrafter.load`.
        ModelError: see :meth:`NamedDrafter.load`.
    """
    if draft is not None and drafter is not None:
        raise ConfigError("draft and drafter are both given: leave one out")
    if draft is not None:
        if not isinstance(draft, LoadedModel):
            raise ConfigError(
                f"draft is of type {type(draft).__name__}: give a LoadedModel, or the "
                "name of a draft as drafter"
            )
        return NamedDrafter(draft.name, draft)
    if isinstance(drafter, str):
        spec = named_draft(drafter)
        return None if spec is None else NamedDrafter.load(spec, target)
    if drafter is not None and not _takes_one(drafter):
        what = drafter if isinstance(drafter, type) else type(drafter)
        kind = "the class" if isinstance(drafter, type) else "of type"
        raise ConfigError(
            f"drafter is {kind} {what.__name__}, which makes no drafter of a "
            "DraftContext: give a function or a class that does, or a name such as "
            "'ngram'"
        )
    return drafter


def describe(factory: DrafterFactory) -> tuple[str, LoadedModel | None]:
    """A factory's name, and the model that its drafter will run.

    Raises:
        ConfigError: it names something that is not a loaded model.
    """
    # A class may have properties of these names, for its instances.
    if isinstance(factory, DescribedFactory) and not isinstance(factory, type):
        if not isinstance(factory.model, LoadedModel | None):
            raise ConfigError(
                f"the model of drafter {factory.name} is of type "
                f"{type(factory.model).__name__}: it must be a LoadedModel or None"
            )
        return factory.name, factory.model
    return str(getattr(factory, "__name__", type(factory).__name__)), None


def make_drafter(factory: DrafterFactory, context: DraftContext) -> Drafter:
    """Make the drafter.

    Raises:
        ConfigError: the factory returned something else.
    """
    drafter = factory(context)
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"drafter {describe(factory)[0]} made a {type(drafter).__name__}: derive "
            "it from specdec.spec_decode.Drafter"
        )
    return drafter


def _takes_one(factory: object) -> bool:
    """Whether ``factory`` can be called with one argument."""
    if not callable(factory):
        return False
    try:
        inspect.signature(factory).bind(None)
    except TypeError:
        return False
    except ValueError:  # a built-in function may have no signature
        pass
    return True
