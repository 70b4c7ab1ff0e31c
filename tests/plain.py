"""The reference: what mlx-lm produces for one sequence, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.drafters import Drafter, DraftModel
from specdec.engine import Engine
from specdec.models.runner import ModelRunner
from specdec.params import SamplingParams
from specdec.sequence import Request
from specdec.sequence import Sequence as TokenSequence

# Exact shapes, speculative rounds read at once; bucketed shapes, read one behind.
AT_ONCE = BackendDefaults("cpu", read_bucket=1, repeat_shapes=False, lookahead=1)
BEHIND = BackendDefaults("cuda", read_bucket=64, repeat_shapes=True, lookahead=1)


def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """mlx-lm's plain greedy decoding."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens)
    return [int(token) for token, _ in steps]


def drawable(logits: mx.array, params: SamplingParams) -> mx.array:
    """Logits of one position as mlx-lm's sampler chain leaves them."""
    chain: list[Any] = []
    if params.top_p < 1:
        chain.append(lambda x: apply_top_p(x, params.top_p))
    if params.min_p > 0:
        chain.append(lambda x: apply_min_p(x, params.min_p))
    if params.top_k > 0:
        chain.append(lambda x: apply_top_k(x, params.top_k))
    if chain:
        logits = logits - mx.logsumexp(logits)
    for step in chain:
        logits = step(logits[None])[0]
    return logits


def sampled(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Plain decoding with the noise that the request's seed and positions name."""
    cache = make_prompt_cache(model)
    inputs, tokens = list(prompt), []
    for position in range(len(prompt), len(prompt) + params.max_tokens):
        logits = model(mx.array([inputs]), cache=cache)[0, -1]
        if params.temperature:
            key = mx.array([params.seed % 2**32, position], mx.uint32)
            noise = mx.random.gumbel(logits.shape, key=key)
            logits = drawable(logits, params) + params.temperature * noise
        inputs = [int(mx.argmax(logits))]
        tokens += inputs
    return tokens


def run_rows(
    target: Any,
    draft: Any | None,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    batch_size: int = 8,
    num_draft_tokens: int = 3,
    backend: BackendDefaults = AT_ONCE,
    prefill_step_size: int = 16,
    eos: frozenset[int] = frozenset(),
    drafter: Drafter | None = None,
    **options: Any,
) -> list[TokenSequence]:
    """Decode through the engine; the finished rows, in the order of the prompts."""
    config = EngineConfig(
        batch_size=batch_size,
        num_draft_tokens=num_draft_tokens,
        prefill_step_size=prefill_step_size,
        **options,
    )
    runner = ModelRunner(target, "target", config, backend)
    if draft is not None:
        drafter = DraftModel(
            ModelRunner(draft, "draft", config, backend),
            vocab_size=runner.vocab_size,
            max_draft_tokens=num_draft_tokens,
        )
    requests = [
        Request(i, "", tuple(prompt), p)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    engine = Engine(runner, drafter, config, backend, eos)
    for request in requests:
        engine.add(request)
    rows: dict[int, TokenSequence] = {}
    emitted: dict[int, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            index = output.sequence.request.index
            rows[index] = output.sequence
            emitted.setdefault(index, []).extend(output.token_ids)
    assert [emitted[i] for i in range(len(requests))] == [
        rows[i].tokens for i in range(len(requests))
    ]
    return [rows[i] for i in range(len(requests))]
