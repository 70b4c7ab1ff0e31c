"""Requests that come and go: each gets what it would get alone."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from specdec import (
    ConfigError,
    EngineConfig,
    GenerationResult,
    PromptError,
    SamplingParams,
    SessionError,
    SpecDecoder,
)
from specdec.engine.session import Session
from specdec.sampling import RowSampling
from tests.plain import VOCAB, plainly
from tests.test_decoder import loaded


@pytest.fixture
def draft(drafts: dict[str, Any]) -> Any:
    return drafts["near"]


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
    caches: list[weakref.ref[Any]] = []
    decode = decoder(target, draft)
    for runner in (decode._target, decode._drafter.runner):  # type: ignore[union-attr]
        rows = runner.rows

        def watched(*args: Any, _rows: Any = rows, **options: Any) -> Any:
            new = _rows(*args, **options)
            caches.append(weakref.ref(new))
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
    assert caches
    assert not any(ref() for ref in caches)


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
    shown = len(by_text.token_ids)
    # The comma that the stop text begins with is the last token's own.
    assert "".join(f"{t}," for t in plain[:shown]) == by_text.text + ","
    assert by_id.token_ids == plain[: plain.index(plain[4])]
    assert (by_id.stop_token, by_id.stop_reason) == (plain[4], None)
    assert by_text.stop_token is None
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


def test_results_say_what_happened(target: Any, draft: Any) -> None:
    decode = decoder(target, target, num_draft_tokens=2)
    (result,) = decode.generate([[5, 6, 7]], SamplingParams(max_tokens=10))
    assert result.acceptance_by_position == [1.0, 1.0]
    assert result.num_draft_tokens_per_pos[0] == result.rounds
    assert result.time_to_first_token is not None
    assert result.time_to_first_token > 0
    assert result.tokens_per_second > 0
    assert result.logprobs is None
    (result,) = decode.generate(
        [[5, 6, 7]], SamplingParams(max_tokens=10, top_logprobs=2)
    )
    assert result.logprobs is not None
    assert [t.top[0][0] for t in result.logprobs] == result.token_ids
    # With their texts, the second likeliest's too.
    assert [t.text for t in result.logprobs] == [f"{t}," for t in result.token_ids]
    assert all(
        t.top_texts == [f"{token}," for token, _ in t.top] for t in result.logprobs
    )
    assert all(t.logprob == t.top[0][1] for t in result.logprobs)
    assert isinstance(result.to_dict()["logprobs"], list)
    assert decode.stats.acceptance_by_position == [1.0, 1.0]


# -- steps that do not end -------------------------------------------------


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the ``line``-th line of specdec that runs.

    The last lines of a step, in ``Session.step``, count as done.
    """
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if "/specdec/" not in code.co_filename or code.co_qualname == "Session.step":
            return (
                None if event == "call" and "specdec" not in code.co_filename else trace
            )
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_step_that_is_interrupted_ends_the_session(target: Any, draft: Any) -> None:
    """At any line: what was reported is right, and nothing is decoded after it.

    A session that went on had wrong or missing tokens in 42 of 200 such trials.
    """
    rng = random.Random(0)
    decode = decoder(target, draft, num_draft_tokens=2)
    work = [
        ([i, i + 1], SamplingParams(max_tokens=n, stop=stop))
        for i, (n, stop) in enumerate(((4, ()), (9, ("never",)), (9, ("7,",)), (9, ())))
    ]
    whole = {i: decode.generate([p], q)[0] for i, (p, q) in enumerate(work)}
    interrupted = ended = 0
    for _ in range(40):
        client = Client(decode.session())
        for prompt, params in work:
            client.session.add(prompt, params)
        for _ in range(rng.randrange(8)):
            client.step()
        requests = dict(client.session._engine._alive)
        try:
            with interrupted_at(rng.randrange(1, 2500)):
                client.step()
        except KeyboardInterrupt:
            interrupted += 1
            with pytest.raises(SessionError, match="begin another session"):
                client.session.add([1])
            before = len(client.results)
            with pytest.raises(SessionError, match="did not end"):
                client.finish()
            ended += len(client.results) - before
            alive = client.session._engine._alive.values()
            assert all(s.finish_reason is None for s in alive)
            over = {i for i, s in requests.items() if s.finish_reason is not None}
            assert over <= client.results.keys()
        else:
            client.finish()
        for index, tokens in client.tokens.items():
            assert tokens == whole[index].token_ids[: len(tokens)]
        for index, result in client.results.items():
            assert result.token_ids == whole[index].token_ids
            assert result.text == whole[index].text
            assert result.finish_reason == whole[index].finish_reason
    assert interrupted > 12
    assert ended > 0
    again = decode.generate([p for p, _ in work], [q for _, q in work])
    assert [r.token_ids for r in again] == [r.token_ids for r in whole.values()]


@pytest.mark.parametrize("lengths", [(3, 3), (3, 20)])
def test_rows_that_a_step_took_leave_of_are_reported_after_it(
    target: Any, draft: Any, lengths: tuple[int, ...]
) -> None:
    """An interrupt between the count of rows that ended and the step's return.

    The engine had forgotten them, and the session did not have them yet.
    """
    client = Client(decoder(target, draft).session())
    for i, n in enumerate(lengths):
        client.session.add([i, 9], SamplingParams(max_tokens=n))
    engine = client.session._engine
    count = engine._count

    def interrupted(outputs: Any) -> None:
        count(outputs)
        if any(output.ended for output in outputs):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_count", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.finish()
    assert client.session.busy
    assert not client.results
    client.step()
    over = [i for i, n in enumerate(lengths) if n == 3]
    assert sorted(client.results) == over
    for i, tokens in client.tokens.items():
        plain = plainly(target, [i, 9], SamplingParams(max_tokens=lengths[i])).tokens
        assert tokens == plain[: len(tokens)]
        if i in over:
            assert client.results[i].token_ids == tokens == plain
    assert client.session.stats.prompts == len(over)
    assert client.session.stats.generated_tokens == sum(
        map(len, client.tokens.values())
    )
    assert client.session.busy == (len(over) < len(lengths))
    with pytest.raises(SessionError, match="did not end"):
        client.step()


def test_an_interrupted_cancel_reports_nothing_twice(
    target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step before had returned came again, results included."""
    client = Client(decoder(target, draft).session())
    params = SamplingParams(max_tokens=3)
    ended = client.session.add([1, 2], params)
    other = client.session.add([3, 4], SamplingParams(max_tokens=30))
    while ended not in client.results:
        client.step()
    before = {i: list(tokens) for i, tokens in client.tokens.items()}

    def interrupted(index: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(client.session._engine, "cancel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.session.cancel(other)
    with pytest.raises(SessionError, match="did not end"):
        client.step()
    assert client.tokens == before


def test_an_interrupt_in_a_processor_changes_no_neighbour(
    target: Any, draft: Any
) -> None:
    """Its row was cut short, and the tokens of the row beside it were others."""
    calls: list[int] = []

    def process(tokens: Any, logits: Any) -> Any:
        calls.append(len(tokens))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return logits

    client = Client(decoder(target, draft, num_draft_tokens=2).session())
    client.session.add([1, 2], SamplingParams(max_tokens=3))
    neighbour = client.session.add([3, 4], SamplingParams(max_tokens=20))
    client.session.add([5], SamplingParams(max_tokens=9, logits_processors=(process,)))
    with pytest.raises(KeyboardInterrupt):
        client.finish()
    with pytest.raises(SessionError):
        client.finish()
    assert client.session.busy
    with pytest.raises(SessionError):
        client.session.cancel(neighbour)
    tokens = client.tokens[neighbour]
    plain = plainly(target, [3, 4], SamplingParams(max_tokens=20)).tokens
    assert tokens == plain[: len(tokens)]


def test_a_request_that_cannot_be_built_ends_alone(
    target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its parameters do when arrays are made of them."""
    of = RowSampling.of

    def fails(params: Any, **options: Any) -> Any:
        if any(p.top_logprobs == 7 for p in params):
            raise RuntimeError("std::bad_cast")
        return of(params, **options)

    monkeypatch.setattr(RowSampling, "of", fails)
    good, bad = SamplingParams(max_tokens=5), SamplingParams(top_logprobs=7)
    for params in ([good, bad, good], [bad], [bad, bad, good, good, bad, good]):
        prompts = [[i, 9] for i in range(len(params))]
        results = decoder(target, draft).generate(prompts, params)
        for prompt, p, result in zip(prompts, params, results, strict=True):
            if p is bad:
                assert result.finish_reason == "error"
                assert result.error == (
                    "it cannot be decoded (RuntimeError: std::bad_cast)"
                )
            else:
                assert result.token_ids == plainly(target, prompt, good).tokens


def test_requests_without_a_seed_draw_differently(target: Any, draft: Any) -> None:
    """All had seed 0; the one that is reported gives the same tokens again."""
    session = decoder(target, draft).session()
    client = Client(session)
    warm = SamplingParams(max_tokens=12, temperature=2.0)
    for _ in range(3):
        session.add([1, 2], warm)
    greedy = session.add([1, 2], SamplingParams(max_tokens=3, seed=5))
    client.finish()
    assert client.results.pop(greedy).seed is None
    drawn = {tuple(r.token_ids) for r in client.results.values()}
    assert len(drawn) == 3  # false alarm: less than 1 in 10**9
    for result in client.results.values():
        assert result.to_dict()["seed"] == result.seed
        params = SamplingParams(max_tokens=12, temperature=2.0, seed=result.seed)
        assert plainly(target, [1, 2], params).tokens == result.token_ids


def test_a_prefill_says_how_far_it_is(target: Any) -> None:
    """A long prompt on a slow device, for which nothing is reported until it ends."""
    config = EngineConfig(prefill_step_size=4)
    session = SpecDecoder(loaded(target), config=config).session()
    seen = []
    for prompt in ([1] * 12, [1] * 10):
        session.add(prompt, SamplingParams(max_tokens=1))
        while session.busy:
            session.step()
            seen.append(session.stats.prefill_tokens)
    # The last token of a prompt is given with the first round.
    assert sorted(set(seen)) == [4, 8, 11, 15, 19, 20]


def test_a_session_in_another_thread(target: Any, draft: Any) -> None:
    """MLX's streams belong to a thread: a bare error that named no way out."""
    session = decoder(target, draft).session()
    index = session.add([1, 2], SamplingParams(max_tokens=2))
    with ThreadPoolExecutor(1) as pool:
        for call in (
            session.step,
            partial(session.add, [1]),
            partial(session.cancel, 0),
        ):
            with pytest.raises(
                SessionError, match="belongs to the thread that made it"
            ):
                pool.submit(call).result()
    results = [e.result for _ in range(9) for e in session.step() if e.result]
    assert [each.index for each in results] == [index]
