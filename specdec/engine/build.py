"""Builds the parts of a decoder: runners, drafter, memory checks."""

from __future__ import annotations

import logging
import os

from .. import backend
from ..backend import BackendDefaults
from ..config import EngineConfig
from ..errors import ConfigError, ModelError, UnsupportedModelError
from ..memory.planning import plan_memory
from ..model_names import DraftSpec
from ..models import LoadedModel
from ..models.draft_folder import fingerprint, is_made_for, read_card
from ..models.loaded import Described
from ..models.loading import fetch_files
from ..models.model_outline import outline, outline_draft
from ..models.runner import ModelRunner
from ..models.vision import BLANK_TOKENS, ImageEncoder, image_encoder, no_images
from ..parallel import Ranks, differing
from ..prefix_cache.store import PrefixStore
from ..spec_decode import (
    DraftContext,
    DrafterFactory,
    NamedDrafter,
    NgramOptions,
    make_drafter,
)
from ..spec_decode.factory import ngram_of
from .admission import Preflight
from .engine import Models

log = logging.getLogger("specdec.engine")


def models_of(
    target: LoadedModel,
    drafter: DrafterFactory | None,
    config: EngineConfig,
    *,
    backend: BackendDefaults,
    store: PrefixStore | None,
) -> Models:
    """The target's runner, and the drafter.

    Raises:
        ConfigError: ``load_vision`` is set, and the target takes no images.
        ModelError, PromptError: what images need cannot be loaded.
    """

    def runner(model: LoadedModel, images: ImageEncoder | None = None) -> ModelRunner:
        return ModelRunner(model.model, model.name, config, backend, store, images)

    images = image_encoder(target)
    if config.load_vision:
        if images is None:
            raise ConfigError(no_images(target, "load_vision"))
        images.load()
    of_target = runner(target, images)
    if drafter is None or not config.max_draft_tokens:
        return of_target, None
    context = DraftContext(
        target,
        vocab_size=of_target.vocab_size,
        max_draft_tokens=config.max_draft_tokens,
        runner=runner,
        corpus=config.draft_corpus,
    )
    built = make_drafter(drafter, context)
    recording = of_target.recording(
        built.hidden_layers, built.context, whole=built.reads_prompts
    )
    return recording, built


def check_shared(config: EngineConfig, ranks: Ranks | None) -> None:
    """Refuse options with which ranks could differ.

    Raises:
        ConfigError: a prefix cache on disk.
    """
    if ranks is not None and config.prefix_cache is not None:
        raise ConfigError(
            "prefix_cache does not go with tensor parallelism, where each rank has "
            "other keys: use prefix_cache_memory, which keeps them in memory"
        )


def check_alike(
    ranks: Ranks,
    target: LoadedModel,
    draft: LoadedModel | None,
    config: EngineConfig,
    draft_name: str | None,
) -> None:
    """Compare drafts and options of the ranks, before they decode together.

    Raises:
        RankError: they have different drafts or options.
    """
    facts: dict[str, object] = {
        "draft": draft_name,
        "options": repr(config),
        "tokenizer": sorted(target.tokenizer.eos_token_ids),
    }
    if draft is not None and draft.ranks is None:
        facts["draft model"] = fingerprint(draft.model)
    ranks.check(facts, differing, wait=True)


def load_drafter(
    spec: DraftSpec | None,
    target: LoadedModel,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> NamedDrafter | None:
    """Load a draft.

    Returns:
        ``None`` if no draft is wanted. The default draft is left out, with a warning,
        if it was made for another model than this target.

    Raises:
        ConfigError, ModelError: see :func:`specdec.models.load_draft`.
    """
    if spec is None:
        return None
    if spec.implied and spec.model is not None:
        card = read_card(spec.model.source)
        if card is None or not is_made_for(card, target):
            log.warning(
                "nothing is drafted: %s was made for another version of %s; "
                "name another draft, or none",
                spec.name,
                target.name,
            )
            return None
    return NamedDrafter.load(
        spec, target, dtype=dtype, trust_remote_code=trust_remote_code
    )


def preflight_of(
    target: Described,
    draft: Described | None,
    config: EngineConfig,
    *,
    drafts: bool,
    ngram: NgramOptions | None = None,
    ranks: Ranks | None = None,
) -> Preflight | None:
    """The memory checks of a run; ``None`` if the size of the memory is unknown.

    With ranks, the rank with the least memory counts.
    """
    size = backend.memory_size() if ranks is None else ranks.memory_size
    limit = config.memory_limit or size
    if limit is None:
        return None

    plan = plan_memory(
        target,
        draft,
        config,
        backend.defaults(),
        drafts=drafts,
        lookup_bytes=0 if ngram is None else ngram.nbytes(config.batch_size),
    )
    preflight = Preflight(plan, limit)
    preflight.check_models(BLANK_TOKENS if config.load_vision else 0)
    return preflight


def check_before_loading(
    target: str,
    spec: DraftSpec | None,
    dtype: str | None,
    config: EngineConfig,
    *,
    trust_remote_code: bool = False,
    adapter_path: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    ranks: Ranks | None = None,
    fetch: bool = False,
) -> None:
    """Refuse models that cannot fit in memory or cannot run, as far as files show.

    Args:
        fetch: download what is not on this machine, and refuse what is missing or
            corrupt; otherwise loading will.

    Raises:
        MemoryLimitError: the models do not fit; the message has the numbers.
        UnsupportedModelError: the target's layers cannot draft, a model needs code
            that is not trusted, or the target cannot be sharded.
        ModelError: as :func:`specdec.models.load`, with ``fetch``.
    """
    model = None
    try:
        if fetch:
            fetch_files(target, revision)
            if spec is not None and spec.model is not None and not spec.model.of_target:
                fetch_files(spec.model.source)
        target_outline = outline(
            target,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            adapter_path=adapter_path,
            revision=revision,
            ranks=ranks,
        )
        if spec is not None and spec.model is not None:
            model = outline_draft(
                spec.model,
                target_outline,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
    except UnsupportedModelError:
        raise
    except ModelError:
        if fetch:
            raise
        return  # not downloaded yet, or broken: loading will report it
    ngram = None if spec is None else ngram_of(spec)
    drafts = spec is not None
    preflight_of(target_outline, model, config, drafts=drafts, ngram=ngram, ranks=ranks)
