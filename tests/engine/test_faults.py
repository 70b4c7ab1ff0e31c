"""Requests at the edge of what makes sense, and models that fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec import (
    EngineConfig,
    GenerationResult,
    PromptError,
    SamplingParams,
    SpecDecoder,
)
from specdec.backend import BackendDefaults
from specdec.sampling_params import VERIFICATIONS
from tests.plain import (
    AT_ONCE,
    BACKENDS,
    BEHIND,
    METAL,
    VOCAB,
    exact,
    greedy,
    plainly,
    run_rows,
)
from tests.test_decoder import loaded

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [16] * 30, [17]]


@pytest.fixture
def near(drafts: dict[str, Any]) -> Any:
    return drafts["near"]


def decode(
    target: Any,
    draft: Any,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    **options: Any,
) -> list[GenerationResult]:
    """Through the public API."""
    config = EngineConfig(**{"num_draft_tokens": 3, **options})
    decoder = SpecDecoder(
        loaded(target), draft and loaded(draft, "draft"), config=config
    )
    return decoder.generate(prompts, params)


# -- lengths ---------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[], "", ()])
def test_no_prompt_tokens_are_refused_in_one_line(target: Any, prompt: Any) -> None:
    decoder = SpecDecoder(loaded(target))
    with pytest.raises(PromptError, match="empty") as refused:
        decoder.generate([[1], prompt])
    assert str(refused.value).startswith("prompt 1: ")
    assert "\n" not in str(refused.value)
    session = decoder.session()
    with pytest.raises(PromptError, match="empty"):
        session.add(prompt)
    assert not session.busy


@BACKENDS
@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_one_prompt_token(
    target: Any, near: Any, with_draft: bool, max_tokens: int, backend: BackendDefaults
) -> None:
    """Nothing to prefill, for one row, for some and for all."""
    draft = near if with_draft else None
    for prompts in ([[3]], [[3], [4]], [[3], [5, 6, 7], [4]]):
        exact(target, draft, prompts, max_tokens, backend=backend)
    # One new token needs no round.
    if max_tokens == 1:
        rows = exact(target, draft, PROMPTS, 1, batch_size=2, backend=backend)
        assert {(r.rounds, r.drafted) for r in rows} == {(0, 0)}


@BACKENDS
@pytest.mark.parametrize("draft", ["perfect", "near", "none"])
@pytest.mark.parametrize("waiting", [0, 2])
def test_all_rows_end_in_the_same_round(
    target: Any,
    drafts: dict[str, Any],
    draft: str,
    waiting: int,
    backend: BackendDefaults,
) -> None:
    """The batch is empty at once; those that wait begin a new one."""
    draft_model = drafts[draft]
    rows = exact(
        target, draft_model, PROMPTS[: 4 + waiting], 9, batch_size=4, backend=backend
    )
    if draft != "near":
        assert len({r.rounds for r in rows}) == 1


@pytest.mark.parametrize("batch_size", [1, 6, 7, 64])
def test_more_places_than_prompts_or_just_one(
    target: Any, near: Any, batch_size: int
) -> None:
    results = decode(
        target, near, PROMPTS, SamplingParams(max_tokens=7), batch_size=batch_size
    )
    assert [r.token_ids for r in results] == [greedy(target, p, 7) for p in PROMPTS]
    assert decode(target, near, [], SamplingParams(), batch_size=batch_size) == []


# -- settings --------------------------------------------------------------


@BACKENDS
def test_a_bias_as_large_as_the_vocabulary(
    target: Any, near: Any, backend: BackendDefaults
) -> None:
    """On every token, beside rows without any; one that leaves a single token."""
    rng = random.Random(0)
    params = [
        SamplingParams(
            max_tokens=12, logit_bias={t: rng.uniform(-4, 4) for t in range(VOCAB)}
        ),
        SamplingParams(max_tokens=12),
        SamplingParams(
            max_tokens=12,
            temperature=1.3,
            logit_bias={t: rng.uniform(-4, 4) for t in range(VOCAB)},
        ),
        SamplingParams(
            max_tokens=12,
            temperature=1.0,
            logit_bias={t: -float("inf") for t in range(VOCAB) if t != 42},
        ),
    ]
    rows = exact(target, near, PROMPTS[:4], params, backend=backend)
    assert rows[3].tokens == [42] * 12


@pytest.mark.parametrize(
    ("verification", "draft_context", "backend"),
    [
        ("coupled", 12, AT_ONCE),
        ("rejection", None, AT_ONCE),
        ("rejection", 12, BEHIND),
        ("rejection", None, METAL),
        ("block", 12, METAL),
        ("block", None, BEHIND),
    ],
)
def test_companions_change_no_row_whatever_its_verification(
    target: Any,
    near: Any,
    verification: Any,
    draft_context: int | None,
    backend: BackendDefaults,
) -> None:
    """With the ratio rules, a row's output depends on how much it may accept.

    That must be its own affair: near its end, without a draft of its own, past the
    draft's context, and while others have functions that keep rounds from being
    in flight.
    """
    params = [
        SamplingParams(
            max_tokens=n,
            temperature=1.2,
            seed=n,
            verification=verification,
            num_draft_tokens=k,
        )
        for n, k in ((10, None), (2, None), (17, 0), (24, 1), (14, None), (9, 2))
    ]
    companion = SamplingParams(
        max_tokens=15, logits_processors=(lambda tokens, logits: logits,)
    )
    options: dict[str, Any] = {
        "num_draft_tokens": 3,
        "backend": backend,
        "draft_context": draft_context,
    }
    together = run_rows(
        target, near, [*PROMPTS, [3, 4]], [*params, companion], batch_size=7, **options
    )
    some = run_rows(target, near, PROMPTS, params, batch_size=3, **options)
    for i, (prompt, p) in enumerate(zip(PROMPTS, params, strict=True)):
        (alone,) = run_rows(target, near, [prompt], [p], **options)
        for row in (together[i], some[i]):
            assert row.tokens == alone.tokens
            assert row.rounds == alone.rounds
            assert row.num_draft_tokens_per_pos == alone.num_draft_tokens_per_pos
            assert row.num_accepted_tokens_per_pos == alone.num_accepted_tokens_per_pos


@BACKENDS
def test_a_draft_is_never_asked_for_tokens_that_it_lacks(
    target: Any, tiny_model: Callable[..., Any], backend: BackendDefaults
) -> None:
    """An embedding after the last is memory of somebody else: random drafts."""
    draft = tiny_model("llama", seed=5, vocab_size=60)
    asked: list[mx.array] = []
    embed = draft.model.embed_tokens

    class Watched(nn.Module):
        weight = embed.weight

        def __call__(self, tokens: mx.array) -> mx.array:
            asked.append(tokens.max())
            return embed(tokens)  # type: ignore[no-any-return]

        def as_linear(self, x: mx.array) -> mx.array:
            return embed.as_linear(x)  # type: ignore[no-any-return]

    draft.model.embed_tokens = Watched()  # type: ignore[no-untyped-call]
    prompts = [[90, 91, 5], [60], [3] * 20 + [96] * 9]
    params = [
        SamplingParams(max_tokens=12, temperature=2.0, verification=v)
        for v in VERIFICATIONS
    ]
    # What a forward is asked shows only where Python runs for each.
    backend = replace(backend, compile_after=None)
    run_rows(target, draft, prompts, params, batch_size=2, backend=backend)
    tokens = []
    for token in asked:
        with suppress(RuntimeError):  # one of a trace has no value
            tokens.append(int(token))
    assert len(tokens) > 20
    assert max(tokens) == 59


# -- models that fail ------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(tiny_model: Callable[..., Any]) -> Any:
    """The target, but token 50 has no number for an embedding."""
    model = tiny_model("llama", seed=0, tie_word_embeddings=False)
    weight = model.model.embed_tokens.weight
    weight[50] = float("nan")
    model.model.embed_tokens.weight = weight
    return model


@BACKENDS
@pytest.mark.parametrize("with_draft", [True, False])
def test_nan_logits_are_the_rows_own_loss(
    poisoned: Any, near: Any, with_draft: bool, backend: BackendDefaults
) -> None:
    """In the prompt, or met half way; rows beside and after it are unharmed."""
    to_50 = SamplingParams(max_tokens=30, logit_bias={50: 100.0})
    plain = SamplingParams(max_tokens=30)
    never_50 = SamplingParams(max_tokens=30, logit_bias={50: -float("inf")})
    work = [
        ([5, 6, 7], never_50),
        ([1, 50, 2], plain),
        ([8], to_50),
        ([9, 10, 11], never_50),
        ([50], SamplingParams(max_tokens=30, temperature=1.0)),
        ([12] * 9, never_50),
        ([13], never_50),
    ]
    rows = run_rows(
        poisoned,
        near if with_draft else None,
        [prompt for prompt, _ in work],
        [params for _, params in work],
        batch_size=3,
        backend=backend,
    )
    failed = {1: [], 2: [50], 4: list[int]()}
    for i, (row, (prompt, params)) in enumerate(zip(rows, work, strict=True)):
        if i in failed:
            assert row.finish_reason == "error"
            assert row.error == f"its logits hold NaN at token {len(failed[i])}"
            assert row.tokens == failed[i]
        else:
            assert row.finish_reason == "length"
            assert row.tokens == plainly(poisoned, prompt, params).tokens


def test_an_error_result_names_its_row(poisoned: Any) -> None:
    results = decode(
        poisoned, None, [[1], [50], [2]], SamplingParams(max_tokens=1), batch_size=3
    )
    assert [r.index for r in results if r.finish_reason == "error"] == [1]
    line = results[1].to_dict()
    assert (line["index"], line["error"]) == (1, "its logits hold NaN at token 0")
