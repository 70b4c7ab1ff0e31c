"""What a decoder is put together of: its models, and whether they fit in memory."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from . import backend
from .backend import BackendDefaults
from .config import EngineConfig
from .engine.admission import Preflight
from .engine.engine import Models
from .errors import ConfigError, ModelError, UnsupportedModelError
from .memory.planning import plan_memory
from .model_names import DraftSpec
from .models import LoadedModel
from .models.draft_folder import is_made_for, read_card
from .models.fingerprint import fingerprint
from .models.loaded import Described
from .models.model_outline import outline, outline_draft
from .models.runner import ModelRunner
from .parallel import Ranks, differing
from .prefix_cache.store import PrefixStore
from .spec_decode import (
    DraftContext,
    DrafterFactory,
    NamedDrafter,
    NgramOptions,
    make_drafter,
)
from .spec_decode.factory import ngram_of

log = logging.getLogger("specdec.build")


def models_of(
    target: LoadedModel,
    drafter: DrafterFactory | None,
    config: EngineConfig,
    *,
    backend: BackendDefaults,
    store: PrefixStore | None,
) -> Models:
    """What runs the target, and what drafts for it."""

    def runner(model: LoadedModel) -> ModelRunner:
        own = backend
        if model.ranks is not None:
            # Whether a compiled graph can replay NCCL's collectives is not known.
            own = replace(backend, compile_after=None)
        return ModelRunner(model.model, model.name, config, own, store)

    of_target = runner(target)
    if drafter is None or not config.max_draft_tokens:
        return of_target, None
    context = DraftContext(
        target,
        vocab_size=of_target.vocab_size,
        max_draft_tokens=config.max_draft_tokens,
        runner=runner,
    )
    made = make_drafter(drafter, context)
    beside = getattr(made, "context", None)
    return of_target.recording(made.hidden_layers, beside), made


def check_shared(config: EngineConfig, ranks: Ranks | None) -> None:
    """Refuse what ranks could find different things in.

    Raises:
        ConfigError: a prefix cache on disk.
    """
    if ranks is not None and config.prefix_cache is not None:
        raise ConfigError(
            "prefix_cache does not go with tensor parallelism: each rank has other "
            "keys; prefix_cache_memory keeps them in memory"
        )


def check_alike(
    ranks: Ranks,
    target: LoadedModel,
    draft: LoadedModel | None,
    config: EngineConfig,
    draft_name: str | None,
) -> None:
    """Compare what the ranks have, before they decode together.

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
    """Load what a draft needs.

    Returns:
        ``None`` where none is wanted, or where the one that nobody named was made for
        another model than this target, which a warning reports.

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
    """What fits in memory; ``None`` where nobody says how much there is.

    Of ranks, in that of the one which has least.
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
    preflight.check_models()
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
) -> None:
    """Refuse models that cannot fit, as far as their files show.

    Raises:
        MemoryLimitError: with the numbers.
        UnsupportedModelError: layers of the target are to draft, and cannot; a model
            wants to run code that is not trusted; or it cannot be sharded.
    """
    model = None
    try:
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
        return  # not downloaded yet, or broken: loading reports it, and checks again
    ngram = None if spec is None else ngram_of(spec)
    drafts = spec is not None
    preflight_of(target_outline, model, config, drafts=drafts, ngram=ngram, ranks=ranks)
