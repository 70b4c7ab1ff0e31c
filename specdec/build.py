"""What a decoder is put together of: its models, and whether they fit in memory."""

from __future__ import annotations

import logging
import os

from . import backend
from .backend import BackendDefaults
from .config import EngineConfig
from .draft_names import DraftSpec
from .engine.admission import Preflight
from .engine.engine import Models
from .errors import ModelError, UnsupportedModelError
from .memory.planning import plan_memory
from .models import LoadedModel
from .models.draft_folder import is_made_for, read_card
from .models.loaded import Described
from .models.model_outline import outline, outline_draft
from .models.runner import ModelRunner
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
    beside = getattr(made, "context", None)
    return of_target.recording(made.hidden_layers, beside), made


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
) -> Preflight | None:
    """What fits in memory; ``None`` where nobody says how much there is."""
    limit = config.memory_limit or backend.memory_size()
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
) -> None:
    """Refuse models that cannot fit, as far as their files show.

    Raises:
        MemoryLimitError: with the numbers.
        UnsupportedModelError: layers of the target are to draft, and cannot; or a
            model wants to run code that is not trusted.
    """
    model = None
    try:
        target_outline = outline(
            target,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            adapter_path=adapter_path,
            revision=revision,
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
    preflight_of(target_outline, model, config, drafts=spec is not None, ngram=ngram)
