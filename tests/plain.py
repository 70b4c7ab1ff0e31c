"""The reference: what mlx-lm produces for one sequence, one token at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_logits_processors,
)

from specdec import backend
from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.round import RoundObserver
from specdec.grammar import Grammar, GrammarCompiler
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import Drafter, DraftModel
from specdec.spec_decode.draft_length import DraftLength

# AT_ONCE has exact shapes, and reads rounds with a draft at once. BEHIND has bucketed
# shapes, reads rounds a round late, compiles forwards, pads steps of one token, and
# unpacks packed keys and values for attention.
AT_ONCE = BackendDefaults(
    "cpu", read_bucket=1, static_shapes=False, costs_by_token=True
)
BEHIND = BackendDefaults(
    "cuda",
    read_bucket=64,
    static_shapes=True,
    compile_after=1,
    pad_single_token=True,
    unpacks=True,
)
# As on Metal: exact shapes, all rounds read a round late.
METAL = backend._DEFAULTS["metal"]
VOCAB = 97
BACKENDS = pytest.mark.parametrize("backend", [AT_ONCE, BEHIND], ids=["cpu", "gpu"])


@dataclass
class Plain:
    """The output of one request's plain decoding, up to a token that ends it."""

    tokens: list[int] = field(default_factory=list)
    #: Log-probabilities of every token of the vocabulary, at each token.
    logprobs: list[mx.array] = field(default_factory=list)
    finish_reason: str = "length"


# Earlier outputs by everything that decides them: many tests ask for the same ones.
_greedy: dict[tuple[str, tuple[int, ...]], list[int]] = {}
_plainly: dict[tuple[str, tuple[int, ...], str, frozenset[int]], Plain] = {}
# A digest of larger weights takes longer than decoding.
_MOST_BYTES = 4 << 20


def identity(model: Any) -> str | None:
    """A digest of a small model: its class, arguments and current weights.

    ``None`` if these do not define the model, or the weights are too large to read.
    """
    leaves: Any = tree_flatten(model.parameters())
    if "args" not in vars(model) or sum(a.nbytes for _, a in leaves) > _MOST_BYTES:
        return None
    digest = hashlib.blake2b(f"{type(model)} {model.args}".encode())
    for name, array in leaves:
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(memoryview(array.reshape(-1).view(mx.uint8)))
    return digest.hexdigest()


def greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """mlx-lm's plain greedy decoding."""
    known_as = identity(model)
    key = (known_as or "", tuple(prompt))
    if known_as is not None and len(_greedy.get(key, ())) >= max_tokens:
        return _greedy[key][:max_tokens]
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens)
    tokens = [int(token) for token, _ in steps]
    if known_as is not None:
        _greedy[key] = tokens
    return list(tokens)


def drawable(logits: mx.array, params: SamplingParams, position: int = 0) -> mx.array:
    """Logits of one position after mlx-lm's chain of samplers."""
    chain: list[Any] = []
    if params.top_p < 1:
        chain.append(lambda x: apply_top_p(x, params.top_p))
    if params.min_p > 0:
        chain.append(lambda x: apply_min_p(x, params.min_p))
    if params.xtc_probability > 0:
        # mlx-lm decides with a global draw whether XTC applies; here the request's key
        # decides.
        key = mx.random.key(params.seed_key << 32 | position)
        draw = mx.random.uniform(key=mx.random.split(key, 4)[1])
        if bool(draw <= params.xtc_probability):
            special = list(params.xtc_special_tokens or ())
            chain.append(lambda x: apply_xtc(x, 1.0, params.xtc_threshold, special))
    if 0 < params.top_k < logits.shape[-1]:
        chain.append(lambda x: apply_top_k(x, params.top_k))
    if chain:
        logits = logits - mx.logsumexp(logits)
    for step in chain:
        logits = step(logits[None])[0]
    return logits


class Masked:
    """A logits processor that masks by llguidance's own bytes, from the first token."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, prompt: int):
        self._matcher = compiler.compile(grammar)._fresh.deep_copy()
        self._seen = prompt

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        new: Any = tokens[self._seen :].tolist()
        for token in new:
            assert self._matcher.consume_token(token)
        self._seen = len(tokens)
        bits, n = self._matcher.compute_bitmask(), logits.shape[-1]
        allowed = [
            i // 8 < len(bits) and bool(bits[i // 8] >> i % 8 & 1) for i in range(n)
        ]
        return mx.where(mx.array(allowed)[None], logits, -mx.inf)


def plainly(
    model: Any,
    prompt: Sequence[int],
    params: SamplingParams,
    eos: frozenset[int] = frozenset(),
) -> Plain:
    """Plain decoding with mlx-lm's own processors, one token at a time.

    The noise is keyed by the request's seed and positions. Stop texts are not looked
    for.
    """
    # A caller's functions cannot be a key: names may repeat, and functions keep state.
    theirs = params.logits_processors or params.sampler is not None
    known_as = None if theirs else identity(model)
    if known_as is None:
        return _decoded(model, prompt, params, eos)
    key = (known_as, tuple(prompt), repr(params), eos)
    if key not in _plainly:
        _plainly[key] = _decoded(model, prompt, params, eos)
    plain = _plainly[key]
    return Plain(list(plain.tokens), list(plain.logprobs), plain.finish_reason)


def _decoded(
    model: Any, prompt: Sequence[int], params: SamplingParams, eos: frozenset[int]
) -> Plain:
    cache = make_prompt_cache(model)
    inputs, plain = list(prompt), Plain()
    ends = eos | frozenset(params.stop_token_ids)
    processors = make_logits_processors(
        dict(params.logit_bias or {}),
        params.repetition_penalty,
        params.repetition_context_size,
        params.presence_penalty,
        params.presence_context_size,
        params.frequency_penalty,
        params.frequency_context_size,
    )
    for position in range(len(prompt), len(prompt) + params.max_tokens):
        history = mx.array([*prompt, *plain.tokens])
        logits = model(mx.array([inputs]), cache=cache)[:, -1]
        for processor in processors:
            logits = processor(history, logits)
        if len(plain.tokens) < params.min_tokens:
            logits[:, mx.array(sorted(ends))] = -float("inf")
        for processor in params.logits_processors:
            logits = processor(history, logits)
        logprobs = logits[0] - mx.logsumexp(logits[0])
        key = params.seed_key << 32 | position
        if params.sampler is not None:
            mx.random.seed(key)
            token = int(params.sampler(logprobs[None]))
        else:
            drawn = logits[0]
            if params.temperature:
                noise = mx.random.gumbel(drawn.shape, key=mx.random.key(key))
                drawn = drawable(drawn, params, position) + params.temperature * noise
            token = int(mx.argmax(drawn))
        if token in ends:
            plain.finish_reason = "stop"
            break
        plain.tokens.append(token)
        plain.logprobs.append(logprobs)
        inputs = [token]
    return plain


def sampled(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The tokens of :func:`plainly`."""
    return plainly(model, prompt, params).tokens


def engine_of(
    target: Any,
    draft: Any | None = None,
    *,
    batch_size: int = 8,
    num_draft_tokens: int = 3,
    backend: BackendDefaults = AT_ONCE,
    prefill_step_size: int = 16,
    eos: frozenset[int] = frozenset(),
    drafter: Drafter | None = None,
    draft_context: int | None = None,
    length: DraftLength | None = None,
    observer: RoundObserver | None = None,
    **options: Any,
) -> Engine:
    """An engine with a target and a draft model, another drafter, or none."""
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
            context_length=draft_context,
        )
    if drafter is not None:
        runner = runner.recording(drafter.hidden_layers)
    return Engine(
        runner, drafter, config, backend, eos, length=length, observer=observer
    )


def ask(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams | int = 16,
    index: int = 0,
    **options: Any,
) -> Request:
    """A request that an engine has; a number means a greedy one of that many tokens."""
    if isinstance(params, int):
        params = SamplingParams(max_tokens=params)
    request = Request(index, "", tuple(prompt), params, **options)
    engine.add(request)
    return request


def finish(engine: Engine) -> dict[int, list[int]]:
    """Step until nothing is left; the tokens of each request, as they came."""
    emitted: dict[int, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            emitted.setdefault(output.request.index, []).extend(output.token_ids)
    return emitted


def run_rows(
    target: Any,
    draft: Any | None,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    grammars: GrammarCompiler | None = None,
    **options: Any,
) -> list[Request]:
    """Decode with an :func:`engine_of`; return the rows in the order of the prompts."""
    engine = engine_of(target, draft, **options)
    requests = []
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        grammar = grammars.compile(p.grammar) if grammars and p.grammar else None
        requests.append(ask(engine, prompt, p, i, grammar=grammar))
    emitted = finish(engine)
    assert [emitted[r.index] for r in requests] == [r.tokens for r in requests]
    return requests


def exact(
    target: Any,
    draft: Any | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | int | Sequence[SamplingParams | int],
    **options: Any,
) -> list[Request]:
    """Decode as :func:`run_rows`; each row must equal its own plain decoding.

    Args:
        params: each prompt's, or one for all. A number means a greedy row of that many
            tokens.
    """
    if not isinstance(params, Sequence):
        params = [params] * len(prompts)
    each = [SamplingParams(max_tokens=p) if isinstance(p, int) else p for p in params]
    rows = run_rows(target, draft, prompts, each, **options)
    for row, prompt, p in zip(rows, prompts, each, strict=True):
        if "eos" not in options and p == SamplingParams(max_tokens=p.max_tokens):
            wanted = Plain(greedy(target, prompt, p.max_tokens))
        else:
            wanted = plainly(target, prompt, p, options.get("eos", frozenset()))
        assert (row.tokens, row.error) == (wanted.tokens, None), p
        assert row.finish_reason == wanted.finish_reason
    return rows


def drafts_of(rows: Sequence[Request]) -> tuple[int, int]:
    """How many draft tokens all rows proposed, and how many they accepted."""
    return sum(row.drafted for row in rows), sum(row.accepted for row in rows)
