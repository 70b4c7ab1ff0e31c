"""A sequence ends where it should and counts what was used, however it is fed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.outputs import GenerationResult
from specdec.request import Request, TokenLogprobs
from specdec.sampling_params import SamplingParams

EOS = 0


def new_sequence(max_tokens: int = 100) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(0, "prompt", (1, 2), params, {EOS})


def test_commit_stops_before_the_end_of_sequence() -> None:
    sequence = new_sequence()
    logprobs = [TokenLogprobs(-float(i)) for i in range(4)]
    assert sequence.commit([5, 6, EOS, 7], logprobs) == 3
    assert sequence.tokens == [5, 6]
    assert sequence.logprobs == logprobs[:2]
    assert sequence.finish_reason == "stop"


def test_commit_stops_after_max_tokens() -> None:
    sequence = new_sequence(max_tokens=2)
    assert sequence.commit([5, 6, 7]) == 2
    assert sequence.finish_reason == "length"
    assert sequence.remaining == 0


def test_the_end_right_after_max_tokens_is_a_length() -> None:
    sequence = new_sequence(max_tokens=2)
    sequence.commit([5, 6, EOS])
    assert sequence.finish_reason == "length"


def test_a_finished_sequence_takes_nothing() -> None:
    sequence = new_sequence()
    sequence.commit([5, EOS], (), 3)
    before = (sequence.rounds, sequence.drafted, sequence.accepted)
    assert sequence.commit([7]) == 0
    sequence.commit([7, 8], (), 3)
    assert (sequence.rounds, sequence.drafted, sequence.accepted) == before
    assert sequence.tokens == [5]


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "drafted", "accepted"),
    [
        pytest.param([5, 6, 7, 8], 100, 3, 3, id="every draft token kept"),
        pytest.param([8], 100, 3, 0, id="none kept"),
        pytest.param([5, 8], 100, 3, 1, id="one kept"),
        pytest.param([5, EOS, 8], 100, 2, 2, id="the draft proposed the end"),
        pytest.param([EOS, 6, 7, 8], 100, 1, 1, id="the end comes first"),
        pytest.param([5, EOS], 100, 2, 1, id="the extra token is the end"),
        pytest.param([5, 6, 7, 8], 2, 2, 2, id="max_tokens inside the block"),
        pytest.param([5, 6, 7, 8], 4, 3, 3, id="max_tokens at its end"),
    ],
)
def test_a_round_counts_what_was_used(
    tokens: list[int], max_tokens: int, drafted: int, accepted: int
) -> None:
    """Three tokens were drafted; those after the row's end count as neither."""
    sequence = new_sequence(max_tokens)
    sequence.commit(tokens, (), 3)
    assert (sequence.drafted, sequence.accepted) == (drafted, accepted)
    assert sequence.rounds == 1


@given(
    blocks=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=8),
    max_tokens=st.integers(1, 20),
)
def test_rounds_emit_what_one_by_one_would(
    blocks: list[list[int]], max_tokens: int
) -> None:
    """The text does not depend on how rounds cut it, and the counts add up."""
    rounds, single = new_sequence(max_tokens), new_sequence(max_tokens)
    emitted = []
    for block in blocks:
        rounds.commit(block, (), 4)
        emitted += rounds.take()[0]
    for token in (t for block in blocks for t in block):
        single.commit([token])
    assert emitted == rounds.tokens == single.tokens
    assert rounds.finish_reason == single.finish_reason
    assert len(emitted) <= max_tokens
    assert EOS not in emitted
    assert 0 <= rounds.accepted <= rounds.drafted <= 4 * rounds.rounds
    if rounds.finish_reason is None:
        assert len(emitted) == rounds.rounds + rounds.accepted


def new_result(**counts: Any) -> GenerationResult:
    return GenerationResult(
        index=3,
        prompt="prompt",
        text="text",
        token_ids=[5, 6],
        finish_reason="length",
        prompt_tokens=2,
        **{"rounds": 4, "drafted": 12, "accepted": 6, **counts},
    )


def test_the_line_of_a_result() -> None:
    assert json.loads(json.dumps(new_result().to_dict())) == {
        "index": 3,
        "prompt": "prompt",
        "text": "text",
        "token_ids": [5, 6],
        "finish_reason": "length",
        "prompt_tokens": 2,
        "prefix_tokens": 0,
        "kv_bits": None,
        "generated_tokens": 2,
        "rounds": 4,
        "drafted": 12,
        "accepted": 6,
        "acceptance_rate": 0.5,
        "acceptance_length": 2.5,
        "acceptance_by_position": [],
        "stop_reason": None,
        "stop_token": None,
        "error": None,
        "seed": None,
        "time_to_first_token": None,
        "tokens_per_second": 0.0,
    }


def test_rates_without_rounds_or_drafts() -> None:
    """A first token that ends the row; plain decoding."""
    assert new_result(rounds=0, drafted=0, accepted=0).acceptance_length == 1.0
    assert new_result(drafted=0, accepted=0).acceptance_rate == 0.0
    assert new_result(drafted=0, accepted=0).acceptance_length == 1.0
