"""What a decoder is put together of: its models, and whether they fit in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from . import backend
from .backend import BackendDefaults
from .config import EngineConfig
from .draft_spec import DraftSpec
from .drafters import DraftContext, DrafterFactory, NgramOptions, make_drafter
from .drafters.factory import ngram_of
from .engine import Models
from .errors import ModelError, UnsupportedModelError
from .memory import MemoryPlan
from .models import LoadedModel
from .models.loaded import Described
from .models.outline import outline, outline_draft
from .models.planning import plan_memory
from .models.runner import ModelRunner
from .prefix.store import PrefixStore
from .preflight import Preflight


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
        return ModelRunner(model.model, model.name, config, backend, store)

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
    return of_target.recording(made.hidden_layers), made


def preflight_of(
    target: Described,
    draft: Described | None,
    config: EngineConfig,
    *,
    drafts: bool,
    ngram: NgramOptions | None = None,
) -> Preflight | None:
    """What fits in memory; ``None`` where nobody says how much there is."""
    limit = config.memory_limit or backend.memory_size()
    if limit is None:
        return None

    def plan(config: EngineConfig) -> MemoryPlan:
        return plan_memory(
            target,
            draft,
            config,
            backend.defaults(),
            drafts=drafts,
            lookup_bytes=0 if ngram is None else ngram.nbytes(config.batch_size),
        )

    packed = None
    if config.kv_bits == "auto":
        packed = cache(lambda bits: plan(replace(config, kv_bits=bits)))
    preflight = Preflight(plan(config), limit, packed)
    preflight.check_models()
    return preflight


def check_before_loading(
    target: str, spec: DraftSpec | None, dtype: str | None, config: EngineConfig
) -> None:
    """Refuse models that cannot fit, as far as their files tell.

    Raises:
        MemoryLimitError: with the numbers.
        UnsupportedModelError: layers of the target are to draft, and cannot.
    """
    model = None
    try:
        target_outline = outline(target, dtype=dtype)
        if spec is not None and spec.model is not None:
            model = outline_draft(spec.model.name, target_outline, dtype=dtype)
    except UnsupportedModelError:
        raise
    except ModelError:
        return  # not downloaded yet, or broken: loading tells, and checks again
    ngram = None if spec is None else ngram_of(spec)
    preflight_of(target_outline, model, config, drafts=spec is not None, ngram=ngram)
