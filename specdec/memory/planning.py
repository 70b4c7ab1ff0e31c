"""The memory plan of an engine, from its models (loaded or outlines) and options."""

from __future__ import annotations

from dataclasses import replace

from ..backend import BackendDefaults
from ..config import EngineConfig
from ..models.layers import arrays_of
from ..models.loaded import Described
from ..models.runner import cache_options
from . import MemoryPlan
from .model_geometry import geometry_of


def plan_memory(
    target: Described,
    draft: Described | None,
    config: EngineConfig,
    backend: BackendDefaults,
    *,
    drafts: bool | None = None,
    lookup_bytes: int = 0,
) -> MemoryPlan:
    """The plan of a run of these models.

    Args:
        drafts: whether anything proposes; ``None``: a draft model does, if there
            is one.
        lookup_bytes: what it takes to look n-grams up.

    Raises:
        UnsupportedModelError: the batch caches cannot serve a model.
    """
    options = cache_options(config, backend)
    if drafts is None:
        drafts = draft is not None
    k = config.max_draft_tokens if drafts else 0
    described = [
        geometry_of(each.model, each.config, each.name, options, each.loading_bytes)
        for each in (target, draft)
        if each is not None
    ]
    planned = None
    if draft is not None and k:
        # It may share weights with its target.
        lent = {id(array) for _, array in arrays_of(target.model)}
        arrays = {id(array): array for _, array in arrays_of(draft.model)}
        own = sum(array.nbytes for i, array in arrays.items() if i not in lent)
        planned = replace(described[1], weight_bytes=own)
    return MemoryPlan(
        target=described[0],
        draft=planned,
        num_draft_tokens=k,
        pauses=config.num_draft_tokens == "auto",
        prefill_step_size=config.prefill_step_size,
        backend=backend,
        quantized_kv_start=config.quantized_kv_start,
        prefix_bytes=config.prefix_memory,
        lookup_bytes=lookup_bytes if k else 0,
    )
