"""Runs in which choosing tokens takes most memory: a large vocabulary, few layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec.backend import SCORED_BYTES
from specdec.config import EngineConfig
from specdec.grammar import Grammar, GrammarCompiler
from specdec.memory import plan as plan_module
from specdec.memory.rows import RowNeeds
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import prompt_scores
from tests.byte_tokenizer import byte_tokenizer

from .test_peak import fullest, loaded, measure

VOCAB, ROWS = 12_000, 5
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
}

WARM: dict[str, Any] = {"temperature": 0.8}
TOP_P = {**WARM, "top_p": 0.9}
XTC = {
    **WARM,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.01,
    "xtc_special_tokens": (1, 2, 3),
}
FILTERED = {**TOP_P, **XTC, "min_p": 0.01, "top_k": 20}
PENALTIES = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}
ADJUSTED = {
    **PENALTIES,
    "logit_bias": {3: 1.0},
    "min_tokens": 4,
    "stop_token_ids": (7,),
}
WORDS = Grammar.regex("[a-z ]{9,}")
BLOCK = {**WARM, "verification": "block"}
RATIO = {**TOP_P, "verification": "rejection"}
EVERYTHING = {**FILTERED, **ADJUSTED, "top_logprobs": 5, "verification": "block"}

#: Options of the rows, in turn, and how many times too much may be planned.
MIXES: dict[str, tuple[list[dict[str, Any]], float]] = {
    "greedy": ([{}], 1.75),
    "temperature": ([WARM], 1.75),
    "top_p": ([TOP_P], 1.5),
    "min_p": ([{**WARM, "min_p": 0.01}], 1.5),
    "top_k": ([{**WARM, "top_k": 20}], 1.5),
    "xtc": ([XTC], 1.6),
    "filters": ([FILTERED], 2),
    "many top_p": ([{**WARM, "top_p": 0.9 + i / 100} for i in range(5)], 1.75),
    "a filter a row": ([TOP_P, {**WARM, "min_p": 0.01}, XTC, WARM, {}], 1.6),
    "bias": ([{"logit_bias": {3: 1.0}}], 1.75),
    "min_tokens": ([{"min_tokens": 4, "stop_token_ids": (7,)}], 1.75),
    "penalties": ([PENALTIES], 1.5),
    "adjusted": ([ADJUSTED], 1.75),
    "logprobs": ([{"logprobs": True}], 2.1),
    "top_logprobs": ([{"top_logprobs": 5}], 1.75),
    "grammar": ([{"grammar": WORDS}], 2.5),
    "block": ([BLOCK], 1.6),
    "ratio rules": ([RATIO, BLOCK, {}], 2),
    "everything": ([EVERYTHING], 2.5),
    "all sorts": ([EVERYTHING, RATIO, XTC, ADJUSTED, {"logprobs": True}], 2.75),
}


SOME = ("xtc", "adjusted", "top_logprobs", "grammar")
CASES = [
    *((mix, 3, mx.float32) for mix in MIXES),
    *((mix, 0, mx.float32) for mix in SOME),
    *((mix, 2, mx.bfloat16) for mix in (*SOME, "a filter a row", "ratio rules")),
]


@pytest.mark.parametrize(("mix", "k", "dtype"), CASES, ids=str)
def test_what_choosing_holds_is_counted(
    tiny_model: Callable[..., nn.Module], mix: str, k: int, dtype: mx.Dtype
) -> None:
    """Without its part the peak would pass the plan, where that is large enough."""
    options, most = MIXES[mix]
    target = loaded(tiny_model, "full", **SMALL)
    draft = loaded(tiny_model, "full", seed=1, **SMALL) if k else None
    for model in (target, draft):
        if model is not None:
            model.model.set_dtype(dtype)
    config = EngineConfig(batch_size=ROWS, num_draft_tokens=k, prefill_step_size=16)
    grammars = GrammarCompiler(byte_tokenizer(), VOCAB)
    requests = [
        Request(
            i,
            "",
            (5 + i,) * 16,
            SamplingParams(max_tokens=7, **each),
            grammar=grammars.compile(WORDS) if "grammar" in each else None,
        )
        for i, each in enumerate(islice(cycle(options), ROWS))
    ]
    peak, plan = measure(target, draft, config, requests)
    rows = fullest(requests, ROWS)
    planned = plan.peak(rows)
    assert peak <= planned
    if (k, dtype) == (3, mx.float32):
        assert planned - plan.weight_bytes <= most * (peak - plan.weight_bytes)
        if mix not in ("greedy", "bias", "min_tokens", "grammar", "logprobs"):
            greedy = [SamplingParams(max_tokens=r.params.max_tokens) for r in rows]
            assert plan.peak([RowNeeds(16, params) for params in greedy]) < peak


@pytest.mark.parametrize("slice_bytes", [SCORED_BYTES, 1 << 18])
@pytest.mark.parametrize("top", [0, 5])
def test_scores_of_prompts_are_counted(
    tiny_model: Callable[..., nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    top: int,
    slice_bytes: int,
) -> None:
    """A prompt's logits, whole or in slices, of which a limit would know nothing."""
    for module in (plan_module, prompt_scores):
        monkeypatch.setattr(module, "SCORED_BYTES", slice_bytes)
    target = loaded(tiny_model, "full", **SMALL)
    config = EngineConfig(batch_size=2, num_draft_tokens=0, prefill_step_size=64)
    params = SamplingParams(max_tokens=2, prompt_logprobs=top)
    requests = [Request(i, "", (5 + i,) * 130, params) for i in range(2)]
    # The fullest of some runs: how many slices are under way depends on timing.
    runs = [measure(target, None, config, requests) for _ in range(4)]
    peak, plan = max(runs, key=lambda run: run[0])
    rows = fullest(requests, 2)
    unscored = replace(params, prompt_logprobs=None)
    assert plan.peak([replace(row, params=unscored) for row in rows]) < peak
    assert peak <= plan.peak(rows)


def row_of(**options: Any) -> RowNeeds:
    return RowNeeds(1, SamplingParams(**options))
