"""Prompts through the engine with a store, and what of them was not computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from specdec import EngineConfig, SamplingParams
from specdec.backend import BackendDefaults
from specdec.engine.engine import Engine
from specdec.models.runner import ModelRows, ModelRunner
from specdec.prefix_cache.store import PrefixStore
from specdec.request import Request
from specdec.spec_decode import DraftModel
from tests.plain import AT_ONCE

TinyModel = Callable[..., nn.Module]
Prompt = list[int]

BLOCK = 8
STEP = 6  # chunks and blocks end at different places
NEW_TOKENS = 8


def memory_store(**changes: Any) -> PrefixStore:
    return PrefixStore(**{"memory": 1 << 30, "block_size": BLOCK, **changes})


class Watched(ModelRunner):
    """Remembers its rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches: list[ModelRows] = []

    def rows(self, *args: Any, **kwargs: Any) -> ModelRows:
        self.batches.append(super().rows(*args, **kwargs))
        return self.batches[-1]

    def reused(self, prompts: Sequence[Prompt]) -> list[int]:
        """Of each prompt; those of like length begin together, in any order."""
        counts: dict[tuple[int, ...], list[int]] = {}
        for rows in self.batches:
            for prompt, n in zip(rows._prompts, rows.reused, strict=True):
                counts.setdefault(tuple(prompt), []).append(n)
        # Equal prompts begin in their order. A prompt's last token is never prefilled.
        return [counts[tuple(p[:-1])].pop(0) for p in prompts]


def decode(
    target: Any,
    draft: Any | None,
    prompts: Sequence[Prompt],
    store: PrefixStore | None,
    *,
    backend: BackendDefaults = AT_ONCE,
    batch_size: int | None = None,
    params: SamplingParams | None = None,
    salts: Sequence[str | None] = (),
    **options: Any,
) -> tuple[list[list[int]], list[int], list[int]]:
    """Tokens of every row; tokens of its prompt that target and draft reused."""
    config = EngineConfig(
        batch_size=batch_size or len(prompts),
        num_draft_tokens=3 if draft is not None else 0,
        **{"prefill_step_size": STEP, "prefix_answers": False, **options},
    )
    params = params or SamplingParams(max_tokens=NEW_TOKENS)
    runner = Watched(target, "target", config, backend, store)
    drafter, draft_runner = None, None
    if draft is not None:
        draft_runner = Watched(draft, "draft", config, backend, store)
        drafter = DraftModel(
            draft_runner,
            vocab_size=runner.vocab_size,
            max_draft_tokens=config.max_draft_tokens,
        )
    engine = Engine(runner, drafter, config, backend, frozenset())
    for i, prompt in enumerate(prompts):
        own = replace(params, cache_salt=salts[i]) if salts else params
        engine.add(Request(i, "", tuple(prompt), own))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.busy:
        for output in engine.step():
            tokens[output.request.index] += output.token_ids
    if store is not None:
        store.flush()
    by_draft = draft_runner.reused(prompts) if draft_runner else []
    return tokens, runner.reused(prompts), by_draft
