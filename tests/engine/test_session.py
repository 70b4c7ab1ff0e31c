"""Requests that come and go: each gets what it would get alone."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from specdec import (
    ConfigError,
    EngineConfig,
    GenerationResult,
    PromptError,
    SamplingParams,
    SpecDecoder,
)
from specdec.engine.session import Session
from tests.plain import plainly
from tests.test_decoder import loaded

VOCAB = 97


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama", seed=0)


@pytest.fixture(scope="module")
def draft(tiny_model: Callable[..., Any]) -> Any:
    import mlx.core as mx

    near = tiny_model("llama", seed=0)
    noise = mx.random.normal(near.model.embed_tokens.weight.shape, key=mx.random.key(1))
    near.model.embed_tokens.weight = near.model.embed_tokens.weight + 0.1 * noise
    return near


def decoder(target: Any, draft: Any, **options: Any) -> SpecDecoder:
    config = EngineConfig(**{"batch_size": 3, "prefill_step_size": 4, **options})
    return SpecDecoder(loaded(target), loaded(draft, "draft"), config=config)


class Client:
    """Steps a session, and keeps what its events say."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.results: dict[int, GenerationResult] = {}

    def step(self) -> None:
        for event in self.session.step():
            assert event.index not in self.results, "nothing may follow a result"
            self.tokens.setdefault(event.index, []).extend(event.token_ids)
            self.text[event.index] = self.text.get(event.index, "") + event.text
            if event.result is not None:
                self.results[event.index] = event.result

    def finish(self) -> None:
        while self.session.busy:
            self.step()
        for index, result in self.results.items():
            assert self.tokens[index] == result.token_ids
            assert self.text[index] == result.text


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_come_go_and_are_cancelled(
    target: Any, draft: Any, seed: int
) -> None:
    """Random arrivals, cancellations and settings, in shuffled order."""
    rng = random.Random(seed)
    client = Client(decoder(target, draft, num_draft_tokens=2).session())
    asked: dict[int, tuple[list[int], SamplingParams]] = {}
    cancelled: set[int] = set()
    for _ in range(60):
        if rng.random() < 0.4:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 11)))]
            params = SamplingParams(
                max_tokens=rng.choice((1, 3, 9, 25)),
                temperature=rng.choice((0.0, 1.0)),
                seed=rng.randrange(50),
                repetition_penalty=rng.choice((None, 1.3)),
                num_draft_tokens=rng.choice((None, 0, 1)),
            )
            asked[client.session.add(prompt, params)] = prompt, params
        if asked and rng.random() < 0.2:
            index = rng.choice(sorted(asked))
            if client.session.cancel(index):
                cancelled.add(index)
        client.step()
    client.finish()
    assert client.results.keys() == asked.keys()
    assert cancelled
    for index, (prompt, params) in asked.items():
        result, alone = client.results[index], plainly(target, prompt, params).tokens
        if index in cancelled:
            assert result.finish_reason == "cancelled"
            assert result.token_ids == alone[: len(result.token_ids)]
            assert len(result.token_ids) < params.max_tokens
        else:
            assert result.finish_reason == "length"
            assert result.token_ids == alone


def test_cancelling(target: Any, draft: Any) -> None:
    """While it waits, while its prompt is read, while it runs, and too late."""
    client = Client(decoder(target, draft, batch_size=1).session())
    session = client.session
    running = session.add([1, 2, 3], SamplingParams(max_tokens=50))
    waiting = session.add([4, 5], SamplingParams(max_tokens=5))
    after = session.add([6] * 30, SamplingParams(max_tokens=5))
    assert session.cancel(waiting)
    assert not session.cancel(waiting), "once is enough"
    assert not session.cancel(99)
    client.step()
    assert client.results[waiting].token_ids == []
    assert client.results[waiting].time_to_first_token is None
    while len(client.tokens.get(running, [])) < 7:
        client.step()
    assert session.cancel(running)
    client.step()
    result = client.results[running]
    assert result.finish_reason == "cancelled"
    assert 7 <= len(result.token_ids) < 50
    client.step()  # a chunk of the long prompt
    assert session.cancel(after)
    client.finish()
    assert client.results[after].token_ids == []
    assert not session.cancel(running)
    assert session.step() == []


def test_a_cancelled_session_leaves_nothing_behind(target: Any, draft: Any) -> None:
    made: list[weakref.ref[Any]] = []
    decode = decoder(target, draft)
    for runner in (decode._target, decode._drafter.runner):  # type: ignore[union-attr]
        rows = runner.rows

        def watched(*args: Any, _rows: Any = rows, **options: Any) -> Any:
            new = _rows(*args, **options)
            made.append(weakref.ref(new))
            return new

        runner.rows = watched  # type: ignore[method-assign]
    client = Client(decode.session())
    indices = [
        client.session.add([i] * 9, SamplingParams(max_tokens=40)) for i in (1, 2)
    ]
    for _ in range(6):
        client.step()
    for index in indices:
        client.session.cancel(index)
    client.finish()
    gc.collect()
    assert made
    assert not any(ref() for ref in made)


def test_stop_texts_and_ids(target: Any, draft: Any) -> None:
    """The detokenizer of these tests writes tokens as their numbers."""
    decode = decoder(target, draft, batch_size=4)
    plain = plainly(target, [5, 6, 7], SamplingParams(max_tokens=20)).tokens
    text = "".join(f"{t}," for t in plain)
    stop = f",{plain[4]},{plain[5]}"
    at = text.index(stop)
    results = decode.generate(
        [[5, 6, 7]] * 4,
        [
            SamplingParams(max_tokens=20, stop=(stop,)),
            SamplingParams(max_tokens=20, stop_token_ids=(plain[4],)),
            SamplingParams(max_tokens=20, stop=("never",)),
            SamplingParams(max_tokens=20, stop=(text[0],)),
        ],
    )
    by_text, by_id, unused, at_once = results
    assert by_text.text == text[:at]
    assert by_text.stop_reason == stop
    kept = len(by_text.token_ids)
    # The comma that the stop text begins with is the last token's own.
    assert "".join(f"{t}," for t in plain[:kept]) == by_text.text + ","
    assert by_id.token_ids == plain[: plain.index(plain[4])]
    assert by_id.stop_reason == plain[4]
    assert [r.finish_reason for r in results] == ["stop", "stop", "length", "stop"]
    assert unused.token_ids == plain
    assert (at_once.text, at_once.token_ids) == ("", [])


def test_what_does_not_fit_the_context(target: Any, draft: Any) -> None:
    model = loaded(target)
    model.config["max_position_embeddings"] = 10
    decode = SpecDecoder(
        model, loaded(draft, "draft"), config=EngineConfig(num_draft_tokens=3)
    )
    with pytest.raises(PromptError) as caught:
        decode.generate([[1] * 3, [2] * 11])
    assert str(caught.value) == (
        "prompt 1: it has 11 tokens and the target's context is 10: shorten it"
    )
    session = decode.session()
    with pytest.raises(PromptError, match="it has 12 tokens and the target's context"):
        session.add([2] * 12)
    assert not session.busy
    lengths = [len(r.token_ids) for r in decode.generate([[1] * n for n in (3, 9, 10)])]
    assert lengths == [7, 1, 1]
    least = SamplingParams(max_tokens=20, min_tokens=9)
    assert len(decode.generate([[1] * 8], least)[0].token_ids) == 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={97: 1.0}), "logit_bias names token 97: the target"),
        (SamplingParams(stop_token_ids=(3, 500)), "stop_token_ids names token 500"),
        (
            SamplingParams(temperature=1.0, xtc_special_tokens=(98,)),
            "xtc_special_tokens names token 98: the target's last is 96",
        ),
    ],
)
def test_tokens_that_the_target_does_not_have(
    target: Any, draft: Any, params: SamplingParams, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder(target, draft).session().add([1], params)
    with pytest.raises(ConfigError, match=f"prompt 1: {message}"):
        decoder(target, draft).generate([[1], [2]], [SamplingParams(), params])


@pytest.mark.parametrize("params", [{"max_tokens": 3}, {}, [SamplingParams()], 3])
def test_params_of_another_type(target: Any, draft: Any, params: Any) -> None:
    """As generate has it; an empty dict is no default either."""
    session = decoder(target, draft).session()
    with pytest.raises(ConfigError, match=r"params are of type \w+: give SamplingPar"):
        session.add([5], params)
    assert not session.busy


def test_results_tell_what_happened(target: Any, draft: Any) -> None:
    decode = decoder(target, target, num_draft_tokens=2)
    (result,) = decode.generate([[5, 6, 7]], SamplingParams(max_tokens=10))
    assert result.acceptance_by_position == [1.0, 1.0]
    assert result.drafted_at[0] == result.rounds
    assert result.time_to_first_token is not None
    assert result.time_to_first_token > 0
    assert result.tokens_per_second > 0
    assert result.logprobs is None
    (told,) = decode.generate(
        [[5, 6, 7]], SamplingParams(max_tokens=10, top_logprobs=2)
    )
    assert told.logprobs is not None
    assert [t.top[0][0] for t in told.logprobs] == told.token_ids
    assert all(t.logprob == t.top[0][1] for t in told.logprobs)
    assert isinstance(told.to_dict()["logprobs"], list)
    assert decode.stats.acceptance_by_position == [1.0, 1.0]
