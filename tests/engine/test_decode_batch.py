"""Every setting of a request, in batches, against plain decoding of it alone.

Float32 and small random models: no difference is allowed, whatever the draft, its
length, the batch and the way of reading rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler

from specdec.backend import BackendDefaults
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.utils.output_text import OutputText
from tests.plain import (
    AT_ONCE,
    BACKENDS,
    BEHIND,
    VOCAB,
    ask,
    drafts_of,
    engine_of,
    exact,
    plainly,
    run_rows,
)
from tests.utils.test_output_text import HALVES, Detokenizer


def only_even(tokens: mx.array, logits: mx.array) -> mx.array:
    """A logits processor that looks at the last token."""
    even = mx.arange(logits.shape[-1]) % 2 == tokens[-1] % 2
    return mx.where(even, logits, -float("inf"))


def no_twice(tokens: mx.array, logits: mx.array) -> mx.array:
    """One that writes into its argument, as mlx-lm's do."""
    logits[:, tokens[-9:]] = -float("inf")
    return logits


# Each is a request of its own; none of them but the last greedy ones is plain.
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 1.3, "repetition_context_size": 3, "temperature": 0.7},
    {"presence_penalty": 1.5, "presence_context_size": 40},
    {"frequency_penalty": 0.6, "temperature": 1.2, "top_k": 20},
    {"frequency_penalty": -0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"logit_bias": {3: 5.0, 11: -float("inf")}, "temperature": 1.0},
    {"logit_bias": {t: (t % 7) / 3 for t in range(VOCAB)}},
    {"min_tokens": 9, "stop_token_ids": tuple(range(60))},
    {"min_tokens": 4, "stop_token_ids": tuple(range(80)), "temperature": 1.5},
    {"stop_token_ids": (5, 6, 7, 8, 9, 10), "temperature": 1.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02, "temperature": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01, "temperature": 0.8, "top_p": 0.9},
    {
        "xtc_probability": 0.7,
        "xtc_threshold": 0.01,
        "xtc_special_tokens": (1, 2, 3),
        "min_p": 0.05,
        "top_k": 9,
        "temperature": 1.4,
    },
    {"logits_processors": (only_even,), "temperature": 1.0},
    {"logits_processors": (only_even, no_twice), "repetition_penalty": 1.2},
    {"sampler": make_sampler(temp=1.0, top_p=0.8, xtc_probability=0.5)},
    {"sampler": make_sampler(temp=0.0), "logits_processors": (no_twice,)},
    {"num_draft_tokens": 0, "temperature": 1.0},
    {"num_draft_tokens": 1},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.5, "min_p": 0.2},  # filtered together with the one before
    {"temperature": 3.0, "top_p": 0.9, "min_p": 0.05, "top_k": 5},
    {},
]


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 7, 30)))],
            SamplingParams(**{"max_tokens": 14 + i % 5, "seed": i, **settings}),
        )
        for i, settings in enumerate(SETTINGS)
    ]


@pytest.mark.parametrize(
    ("draft", "k", "batch_size", "backend"),
    [
        ("near", 3, 8, AT_ONCE),
        ("near", 3, 8, BEHIND),
        ("near", 1, 3, BEHIND),
        ("near", 6, 24, BEHIND),
        ("near", 3, 1, AT_ONCE),
        ("perfect", 4, 5, BEHIND),
        ("unrelated", 2, 8, AT_ONCE),
        ("none", 0, 8, BEHIND),
    ],
)
def test_every_row_is_what_it_would_be_alone(
    target: Any,
    drafts: dict[str, Any],
    requests: list[tuple[list[int], SamplingParams]],
    draft: str,
    k: int,
    batch_size: int,
    backend: BackendDefaults,
) -> None:
    prompts, params = map(list, zip(*requests, strict=True))
    rows = exact(
        target, drafts[draft], prompts, params, batch_size=batch_size,
        num_draft_tokens=k, backend=backend, prefill_step_size=8,
    )  # fmt: skip
    for row, p in zip(rows, params, strict=True):
        if p.num_draft_tokens is not None:
            assert row.drafted <= p.num_draft_tokens * row.rounds
    if draft == "perfect":
        drafted, accepted = drafts_of([r for r in rows if not r.params.stepwise])
        # The draft chooses with the row's penalties, filters and noise, too.
        assert accepted == drafted > 100


@BACKENDS
@pytest.mark.parametrize("draft", ["near", "none"])
def test_logprobs_are_those_of_plain_decoding(
    target: Any, drafts: dict[str, Any], draft: str, backend: BackendDefaults
) -> None:
    """Of the logits that processors leave, unfiltered, also where rows ask for less."""
    settings: list[dict[str, Any]] = [
        {"logprobs": True},
        {"top_logprobs": 4, "temperature": 1.0, "top_p": 0.5},
        {"top_logprobs": 1, "repetition_penalty": 1.5},
        {"top_logprobs": 3, "logits_processors": (no_twice,), "temperature": 1.0},
        {},
    ]
    prompts = [[5, 6, 7], [8] * 20, [9, 9, 10], [11, 12], [13]]
    params = [SamplingParams(max_tokens=12, seed=3, **s) for s in settings]
    rows = exact(target, drafts[draft], prompts, params, backend=backend)
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        expected = plainly(target, prompt, p)
        if not p.logprobs and not p.top_logprobs:
            assert all(not t.top for t in row.logprobs)
            continue
        assert len(row.logprobs) == len(row.tokens)
        for token, got, logprobs in zip(
            row.tokens, row.logprobs, expected.logprobs, strict=True
        ):
            assert got.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
            assert len(got.top) == p.top_logprobs
            best = mx.argsort(-logprobs)[: p.top_logprobs].tolist()
            assert [t for t, _ in got.top] == best
            for t, value in got.top:
                assert value == pytest.approx(float(logprobs[t]), abs=1e-4)


class Recorder:
    """A logits processor that remembers the tokens that it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.shown.append(tokens.tolist())  # type: ignore[arg-type]
        return logits


@BACKENDS
@pytest.mark.parametrize("draft", ["perfect", "near", "unrelated"])
def test_a_processor_sees_every_accepted_token_once_and_in_order(
    target: Any, drafts: dict[str, Any], draft: str, backend: BackendDefaults
) -> None:
    """Never a rejected one: a processor may keep a state of its own."""
    recorders = [Recorder() for _ in range(3)]
    prompts = [[5, 6, 7], [8], [9] * 11]
    params = [SamplingParams(max_tokens=13, logits_processors=(r,)) for r in recorders]
    rows = run_rows(target, drafts[draft], prompts, params, backend=backend)
    for row, prompt, recorder in zip(rows, prompts, recorders, strict=True):
        whole = [*prompt, *row.tokens]
        first = len(prompt)
        assert recorder.shown == [whole[:n] for n in range(first, len(whole))]
    if draft == "perfect":
        assert all(r.accepted == r.drafted > 0 for r in rows)


def fails_at(length: int) -> Callable[[mx.array, mx.array], mx.array]:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == length:
            raise RuntimeError("out of\nluck\x1b" + "!" * 5000)
        return logits

    return processor


@BACKENDS
def test_a_row_whose_processor_fails_leaves_the_others_alone(
    target: Any, drafts: dict[str, Any], backend: BackendDefaults
) -> None:
    prompts = [[5, 6, 7], [8] * 20, [9, 9, 10], [11, 12], [13], [14]]
    broken: list[dict[str, Any]] = [
        {"logits_processors": (fails_at(8),)},  # 3 of the prompt, 5 generated
        {"logits_processors": (fails_at(20),)},  # the first token
        {"logits_processors": (lambda tokens, logits: logits[0],)},
        {"sampler": lambda logprobs: 5000},
        {},
        {"temperature": 1.0},
    ]
    params = [SamplingParams(max_tokens=12, seed=3, **s) for s in broken]
    rows = run_rows(
        target, drafts["near"], prompts, params, batch_size=4, backend=backend
    )
    assert [r.finish_reason for r in rows] == [*["error"] * 4, "length", "length"]
    expected = plainly(target, prompts[0], SamplingParams(max_tokens=12)).tokens
    assert rows[0].tokens == expected[:5]
    assert [r.tokens for r in rows[1:4]] == [[], [], []]
    error = str(rows[0].error)
    assert error.startswith(
        "its sampler or a logits processor failed at token 5: "
        "RuntimeError: out of luck?!!!"
    )
    assert error.isprintable()
    assert len(error) < 400
    assert "not logits of shape (1, 97)" in str(rows[2].error)
    assert "token 5000 is not in the vocabulary" in str(rows[3].error)
    for row, prompt, p in list(zip(rows, prompts, params, strict=True))[4:]:
        assert row.tokens == plainly(target, prompt, p).tokens


@BACKENDS
def test_a_draft_of_shorter_context_stops_drafting_for_long_rows(
    target: Any, drafts: dict[str, Any], backend: BackendDefaults
) -> None:
    """Rows within it, that grow out of it, and that begin outside.

    With k = 3 a row of 30 tokens is the longest that fits: two of its proposals are
    written after them.
    """
    prompts = [[5] * 4, [6] * 21, [6] * 22, [7] * 50]
    rows = exact(
        target, target, prompts, [10, 30, 30, 20], backend=backend, draft_context=32
    )
    assert all(row.accepted == row.drafted for row in rows)
    inside, to_the_end, longer, outside = rows
    assert inside.drafted >= len(inside.tokens) - 1 - inside.rounds > 0
    assert to_the_end.accepted == 9  # of rounds that begin with 22, 26 and 30 tokens
    assert longer.accepted == 6  # with 23 and 27
    assert outside.drafted == 0


def test_counts_by_position(target: Any, drafts: dict[str, Any]) -> None:
    prompts = [[5, 6, 7], [8] * 9]
    for row in exact(target, drafts["near"], prompts, 30, num_draft_tokens=4):
        drafted = row.num_draft_tokens_per_pos
        accepted = row.num_accepted_tokens_per_pos
        assert len(drafted) == 4
        for counts in (drafted, accepted):
            assert counts == sorted(counts, reverse=True)
        assert all(a <= d for a, d in zip(accepted, drafted, strict=False))
        assert drafted[0] <= row.rounds
        assert len(row.tokens) == 1 + row.rounds + row.accepted


@BACKENDS
@pytest.mark.parametrize("draft", ["near", "none"])
def test_a_row_that_no_token_is_left_for_ends_with_an_error(
    target: Any, drafts: dict[str, Any], draft: str, backend: BackendDefaults
) -> None:
    nothing = dict.fromkeys(range(VOCAB), -float("inf"))
    params = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, logit_bias=nothing),
        # Until min_tokens nothing may end the row, and everything would.
        SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=tuple(range(VOCAB))),
    ]
    prompts = [[5, 6], [7], [8, 9]]
    rows = run_rows(target, drafts[draft], prompts, params, backend=backend)
    assert rows[0].tokens == plainly(target, prompts[0], params[0]).tokens
    for row in rows[1:]:
        assert (row.finish_reason, row.tokens) == ("error", [])
        assert row.error == "its logits leave no token at token 0"


@BACKENDS
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_a_draft_that_gives_nan_changes_nothing(
    target: Any,
    tiny_model: Callable[..., Any],
    verification: Any,
    backend: BackendDefaults,
) -> None:
    """Whatever it proposes and draws from: the rows decode as without it."""
    broken = tiny_model("llama", seed=0)
    broken.model.embed_tokens.weight = broken.model.embed_tokens.weight * float("nan")
    prompts = [[5, 6, 7], [8] * 9]
    params = [
        SamplingParams(
            max_tokens=12, temperature=1.0, seed=s, verification=verification
        )
        for s in range(2)
    ]
    rows = run_rows(target, broken, prompts, params, backend=backend)
    alone = run_rows(target, None, prompts, params, backend=backend)
    assert [r.finish_reason for r in rows] == ["length"] * 2
    if verification == "coupled":
        assert [r.tokens for r in rows] == [r.tokens for r in alone]
    else:
        assert all(len(set(r.tokens)) > 5 for r in rows)


def test_logits_that_overflow_end_a_row_with_an_error(target: Any) -> None:
    params = [
        SamplingParams(max_tokens=5, logit_bias={5: 3e38}, temperature=1.0),
        SamplingParams(max_tokens=5),
    ]
    target.model.norm.weight = target.model.norm.weight * 1e38
    try:
        rows = run_rows(target, None, [[5], [6]], params)
    finally:
        target.model.norm.weight = target.model.norm.weight / 1e38
    assert rows[0].finish_reason == "error"
    assert "its logits hold" in str(rows[0].error)


def test_a_context_size_beyond_the_row_costs_nothing(target: Any) -> None:
    """It is cut to what the row can hold; else one request could take all memory."""
    params = SamplingParams(
        max_tokens=6, presence_penalty=1.0, presence_context_size=1_000_000_000
    )
    exact(target, None, [[5, 6, 7]], params)


def test_first_tokens_do_not_wait_for_the_drafter(target: Any) -> None:
    """A prompt of many chunks, and a draft that has to read as many."""
    first: dict[bool, int] = {}
    for speculate in (False, True):
        draft = target if speculate else None
        engine = engine_of(target, draft, num_draft_tokens=2)
        ask(engine, (5,) * 161, 9)
        steps = 0
        while not any(o.token_ids for o in engine.step()):
            steps += 1
        first[speculate] = steps
        tokens: list[int] = []
        while engine.busy:
            tokens += [t for o in engine.step() for t in o.token_ids]
        assert len(tokens) == 8
    assert first[True] == first[False]


def test_end_tokens_that_the_model_does_not_have(target: Any) -> None:
    params = SamplingParams(max_tokens=5, min_tokens=3)
    (row,) = run_rows(target, None, [[5, 6]], [params], eos=frozenset({10**6}))
    plain = SamplingParams(max_tokens=5)
    assert row.tokens == plainly(target, [5, 6], plain).tokens


def test_a_row_that_fails_keeps_its_error_though_a_stop_text_is_there() -> None:
    """What was held back may complete a stop text just when the row fails."""
    params = SamplingParams(max_tokens=9, stop=("?",))
    output = OutputText(Detokenizer(), params.stop)
    sequence = Request(0, "", (1,), params, frozenset(), output)
    sequence.commit([0, HALVES[0]])  # shows as "?" when nothing follows
    sequence.fail("for a reason")
    assert (sequence.finish_reason, sequence.error) == ("error", "for a reason")
    assert sequence.tokens == [0, HALVES[0]]
