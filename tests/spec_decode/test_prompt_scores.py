"""Log-probabilities of prompts: equal to one forward of the whole prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.errors import ConfigError
from specdec.models.layers import TargetEnds
from specdec.models.runner import ModelRunner
from specdec.prefix_cache.store import PrefixStore
from specdec.spec_decode import prompt_scores
from specdec.spec_decode.prompt_scores import PromptScores
from tests.byte_tokenizer import character_tokenizer
from tests.models.architectures import Guesses
from tests.plain import AT_ONCE, VOCAB, greedy

PROMPTS = [[*range(3, 40)], [5], [7, 7, 7, 9, 1, 2], [11, 12, 13]]
TOPS = [2, 0, None, 3]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("slice_bytes", [4 * VOCAB * 5, 10**9])
def test_each_position_of_a_prompt(
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    slice_bytes: int,
) -> None:
    """A token is scored by the logits of another position, row or chunk."""
    monkeypatch.setattr(prompt_scores, "SCORED_BYTES", slice_bytes)
    usual, widths = TargetEnds.logits, []

    def noted(self: TargetEnds, part: mx.array) -> mx.array:
        widths.append(part.shape[1])
        return usual(self, part)

    monkeypatch.setattr(TargetEnds, "logits", noted)
    model = tiny_model(architecture, seed=3)
    store = PrefixStore(block_size=4, memory=10**7)
    runner = ModelRunner(model, "it", EngineConfig(prefill_step_size=8), AT_ONCE, store)
    for _ in range(2):  # prefixes are stored by now, and may not be used
        scores = PromptScores(runner, PROMPTS, TOPS)
        rows = runner.rows([p[:-1] for p in PROMPTS], max_round=4, max_length=64)
        for _ in rows.prefill(scores):
            pass
        assert scores.rows == [0, 1, 3]
        assert [rows.reused[i] for i in scores.rows] == [0, 0, 0]
        for row in scores.rows:
            logits = model(mx.array([PROMPTS[row]]))[0].astype(mx.float32)
            logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
            entries = scores.of(row)
            assert len(entries) == len(PROMPTS[row])
            assert entries[0] is None
            for i, entry in enumerate(entries[1:], 1):
                assert entry is not None
                expected = logprobs[i - 1]
                assert entry.logprob == pytest.approx(
                    expected[PROMPTS[row][i]], abs=1e-4
                )
                best = np.argsort(-expected)[: TOPS[row]]
                assert [token for token, _ in entry.top] == best.tolist()
    assert max(widths) == (5 if slice_bytes < 10**9 else 8)  # a chunk, or less of it


@pytest.mark.parametrize("draft", [None, "near", "reading"])
def test_a_whole_run(target: Any, drafts: dict[str, Any], draft: str | None) -> None:
    """Rows that only score end without a token; others decode as before.

    Scores may be of layers that a draft records, or of the prompts beside a row.
    """
    how: dict[str, Any] = {}
    if draft == "near":
        how["draft"] = drafts[draft], character_tokenizer(0)
    elif draft == "reading":
        how["drafter"] = lambda context: Guesses([], (0, -1))
    decoder = SpecDecoder(
        target,
        character_tokenizer(0),
        config=EngineConfig(
            batch_size=2, prefill_step_size=8, num_draft_tokens=3 if draft else 0,
            prefix_cache_memory=10**7,
        ),
        **how,
    )  # fmt: skip
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3], PROMPTS[0][:20]]
    params = [
        SamplingParams(max_tokens=0, prompt_logprobs=1),
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=5, prompt_logprobs=0, logprobs=True),
        SamplingParams(max_tokens=0, prompt_logprobs=0),
    ]
    results = decoder.generate(prompts, params)
    for prompt, asked, result in zip(prompts, params, results, strict=True):
        assert result.token_ids == greedy(target, prompt, 6)[: asked.max_tokens]
        assert result.finish_reason == "length"
        if asked.prompt_logprobs is None:
            assert result.prompt_logprobs is None
            continue
        logits = target(mx.array([prompt]))[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        for i, entry in enumerate(result.prompt_logprobs[1:], 1):
            assert entry is not None
            expected = float(logprobs[i - 1, prompt[i]])
            assert entry.logprob == pytest.approx(expected, abs=1e-4)
            assert len(entry.top) == asked.prompt_logprobs
        line: Any = result.to_dict()["prompt_logprobs"]
        assert [e and e["token_id"] for e in line] == [None, *prompt[1:]]


def test_nothing_is_decoded_only_where_prompts_are_scored() -> None:
    """A typing error decodes nothing."""
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)
