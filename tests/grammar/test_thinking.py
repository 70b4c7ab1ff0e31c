"""Budgets of thinking tokens: exact for every draft, closed with the model's marker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import ConfigError, SamplingParams, SpecDecoder
from specdec.grammar import ThinkingBudget, ThinkingMarks
from tests.server.harness import tiny_decoder

PROMPTS: Any = [
    [{"role": "user", "content": text}]
    for text in ("Name a river.", "And <think> what </think> is a lake <think>?", "Hm?")
]
#: Logits that no token of the tokenizer has.
PADDING = {token: float("-inf") for token in range(285, 320)}
THINK: Any = {"chat_template_config": {"think": True}}


def _params(**settings: Any) -> SamplingParams:
    return SamplingParams(logit_bias=PADDING, **settings)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> list[SpecDecoder]:
    folder = tmp_path_factory.mktemp("thinking")
    return [tiny_decoder(folder, num_draft_tokens=k) for k in (0, 2, 5)]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_thoughts_end_after_the_budget(
    decoders: list[SpecDecoder], budget: int
) -> None:
    """A token too many or too few, another after the marker, or one by the draft."""
    tokenizer: Any = decoders[0].tokenizer
    (end,) = tokenizer.think_end_tokens
    free = decoders[0].generate(PROMPTS, _params(max_tokens=budget or 1), **THINK)
    params = _params(max_tokens=24, max_thinking_tokens=budget)
    for decoder in decoders:
        closed = decoder.generate(PROMPTS, params, **THINK)
        for prompt, before, result in zip(PROMPTS, free, closed, strict=True):
            thought = before.token_ids[:budget]
            assert end not in thought
            assert list(result.token_ids[: budget + 1]) == [*thought, end]
            ids = tokenizer.encode(before.prompt, add_special_tokens=False)
            ids += [*thought, end]
            (rest,) = decoders[0].generate([ids], _params(max_tokens=24 - budget - 1))
            # A later thought ends at once: compare up to it.
            later = [*rest.token_ids, tokenizer.think_start_id]
            same_for = later.index(tokenizer.think_start_id)
            after = result.token_ids[budget + 1 :]
            assert after[:same_for] == rest.token_ids[:same_for], prompt
            # Without a thought there is nothing to end.
            (other,) = decoder.generate([prompt], _params(max_tokens=12))
            (same,) = decoder.generate(
                [prompt], _params(max_tokens=12, max_thinking_tokens=budget)
            )
            if tokenizer.think_start_id not in other.token_ids:
                assert other.token_ids == same.token_ids


def test_sampling_does_not_depend_on_the_draft(decoders: list[SpecDecoder]) -> None:
    """Drafts that are verified without the mask give other tokens."""
    params = _params(max_tokens=20, max_thinking_tokens=5, temperature=1.0, seed=3)
    texts = [
        [r.token_ids for r in decoder.generate(PROMPTS, params, **THINK)]
        for decoder in decoders
    ]
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(ConfigError, match="max_thinking_tokens"):
        _params(max_thinking_tokens=-1)
    with pytest.raises(ConfigError, match="max_thinking_tokens"):
        _params(max_thinking_tokens=1, sampler=lambda logprobs: logprobs)


def test_markers_of_several_tokens() -> None:
    """A marker that is written is not finished, or a later thought does not end."""
    marks = ThinkingMarks((7, 8), (1, 1, 2), thinks=False)

    def state(tokens: list[int], ahead: list[int], budget: int = 3) -> list[int]:
        made = ThinkingBudget(marks, budget, 2)
        made.commit(tokens)
        made.move(ahead)
        bits = np.zeros(2, np.uint32)
        assert made.fill(bits.ctypes.data)
        allowed = [t for t in range(64) if bits[t >> 5] >> (t & 31) & 1]
        forced = made.forced()
        assert allowed == (forced[:1] or list(range(64)))
        return forced

    assert state([5, 5, 5, 5, 5], []) == []
    assert state([7, 8, 5, 5], []) == []
    assert state([7, 8, 5, 5, 5], []) == [1, 1, 2]
    assert state([7, 8], [5, 5, 5]) == [1, 1, 2]
    assert state([7, 8, 5, 5, 5, 1], []) == [1, 2]
    assert state([7, 8, 5, 1, 1], []) == []
    assert state([7, 8, 5, 1, 1], [1]) == []
    assert state([7, 8, 5, 1, 1, 1], [1]) == [2]
    assert state([7, 8, 5, 1, 1, 2], [5, 5, 5, 5]) == []
    # One token was spent before, so two are left.
    assert state([7, 8, 5, 1, 1, 2, 7, 8, 5], []) == []
    assert state([7, 8, 5, 1, 1, 2, 7, 8, 5], [5]) == [1, 1, 2]
    assert state([7, 7, 8], [], budget=0) == [1, 1, 2]


def test_the_budget_is_part_of_requests(tmp_path: Path) -> None:
    """A protocol's budget that is read and dropped."""
    from specdec.server import chat, messages, responses
    from tests.server.harness import running

    user = [{"role": "user", "content": "a"}]
    with running(tiny_decoder(tmp_path)) as server:
        service = server.service
        thinking = {"type": "enabled", "budget_tokens": 5}
        made: list[Any] = [
            chat.parse({"messages": user, "max_thinking_tokens": 5}, service),
            responses.parse({"input": "a", "max_thinking_tokens": 5}, service),
            messages.parse(
                {"model": "tiny", "max_tokens": 9, "messages": user,
                 "thinking": thinking}, service),
        ]  # fmt: skip
        assert [r.job.params.max_thinking_tokens for r in made] == [5, 5, 5]
