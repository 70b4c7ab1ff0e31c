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
        self.made: list[ModelRows] = []

    def rows(self, *args: Any, **kwargs: Any) -> ModelRows:
        self.made.append(super().rows(*args, **kwargs))
        return self.made[-1]

    def reused(self, num_rows: int) -> list[int]:
        """Of each row, in the order in which they began; not of idle slots."""
        groups = [list(zip(r.reused, r._prompts, strict=True)) for r in self.made]
        idle = sum(map(len, groups)) - num_rows if groups else 0
        for group in groups:
            while idle and not group[-1][1]:
                group.pop()
                idle -= 1
        return [n for group in groups for n, _ in group]


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
        **{"prefill_step_size": STEP, **options},
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
    n = len(prompts)
    return tokens, runner.reused(n), draft_runner.reused(n) if draft_runner else []
