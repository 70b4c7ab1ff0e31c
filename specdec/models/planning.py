"""The memory plan of an engine, from its models (loaded or outlines) and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mlx.nn as nn

from ..backend import BackendDefaults
from ..config import EngineConfig
from ..memory import MemoryPlan
from .geometry import geometry_of
from .runner import cache_options


class Described(Protocol):
    """A :class:`LoadedModel` or a :class:`~specdec.models.outline.ModelOutline`."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def name(self) -> str: ...

    @property
    def loading_bytes(self) -> int: ...


def plan_memory(
    target: Described,
    draft: Described | None,
    config: EngineConfig,
    backend: BackendDefaults,
) -> MemoryPlan:
    """The plan of a run of these models.

    Raises:
        UnsupportedModelError: the batch caches cannot serve a model.
    """
    options = cache_options(config, backend)
    k = config.num_draft_tokens if draft is not None else 0
    described = [
        geometry_of(each.model, each.config, each.name, options, each.loading_bytes)
        for each in (target, draft)
        if each is not None
    ]
    return MemoryPlan(
        target=described[0],
        draft=described[1] if k else None,
        num_draft_tokens=k,
        prefill_step_size=config.prefill_step_size,
        read_bucket=options.read_bucket,
        lookahead=backend.lookahead,
        patient=backend.repeat_shapes,
        quantized_kv_start=config.quantized_kv_start,
        prefix_bytes=config.prefix_memory,
    )
