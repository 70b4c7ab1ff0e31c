"""Finished answers: what is found in them, and whose they are."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.engine.engine import Engine
from specdec.errors import ConfigError
from specdec.models import load
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.spec_decode import ChainDrafter, DraftModel, NgramDrafter, NgramOptions
from specdec.spec_decode.corpus import DEPTH, SHORTEST, Corpora, Corpus
from tests.models.folders import write_folder
from tests.plain import AT_ONCE, BEHIND, ask, engine_of, finish, greedy, run_rows
from tests.spec_decode.repetitive import Knowing, make_prompts

K = 4


def tail_of(texts: Sequence[Sequence[int]]) -> mx.array:
    """The newest tokens, the newest first; -2 before a text's beginning."""
    rows = [[*list(t)[::-1][:DEPTH], *[-2] * DEPTH][:DEPTH] for t in texts]
    return mx.array(rows, mx.int32)


def by_hand(
    answers: Sequence[Sequence[int]], text: Sequence[int], k: int
) -> tuple[list[int], int]:
    """The tokens after the longest, then newest match, and its size, over lists."""
    best: tuple[int, int, int] = (0, -1, -1)
    for number, answer in enumerate(answers):
        for end in range(SHORTEST, len(answer)):
            size = 0
            while (
                size < min(end, len(text), DEPTH)
                and answer[end - 1 - size] == text[-1 - size]
            ):
                size += 1
            if size >= SHORTEST:
                best = max(best, (size, number, end))
    size, number, end = best
    return (list(answers[number][end : end + k]) if size else []), size


letters = st.integers(0, 2)


@given(
    st.lists(st.lists(letters, min_size=0, max_size=14), max_size=7),
    st.lists(st.lists(letters, min_size=1, max_size=20), min_size=1, max_size=3),
)
def test_the_longest_newest_match_is_continued(
    answers: list[list[int]], texts: list[list[int]]
) -> None:
    """Equal to a search over lists, for rows of any lengths.

    Of few letters, so that most matches have rivals. A place of each hash is kept of
    each answer: its last one.
    """
    corpora = Corpora(1 << 16, 4)
    for answer in answers:
        corpora.add("", answer)
    continuation = corpora.find([""] * len(texts), tail_of(texts), K)
    if continuation is None:
        assert not any(answers)
        return
    for i, text in enumerate(texts):
        _, size = by_hand(answers, text, K)
        count = int(continuation.count[i])
        # With rivals in one answer, an older place may match more tokens.
        assert (int(continuation.size[i]) > 0) == (size > 0)
        assert int(continuation.size[i]) <= size
        whole = [a for a in answers if len(a) > SHORTEST]
        got: Any = continuation.tokens[i, :count].tolist()
        matched = text[len(text) - int(continuation.size[i]) :]
        if count:
            assert any(holds(a, [*matched, *got]) for a in whole)


def holds(answer: Sequence[int], part: Sequence[Any]) -> bool:
    return any(
        list(answer[i : i + len(part)]) == list(part) for i in range(len(answer))
    )


@given(
    st.permutations(range(40)).map(lambda p: [p[:13], p[13:26], p[26:]]),
    st.integers(0, 2),
    st.integers(3, 12),
)
def test_without_rivals_it_is_the_match(
    answers: list[list[int]], number: int, end: int
) -> None:
    """Tokens, count and size are those of the search over lists."""
    corpora = Corpora(1 << 16, 4)
    for answer in answers:
        corpora.add("", answer)
    text = [99, *answers[number][:end]]
    continuation = corpora.find([""], tail_of([text]), K)
    assert continuation is not None
    tokens, size = by_hand(answers, text, K)
    assert continuation.tokens[0, : int(continuation.count[0])].tolist() == tokens
    assert int(continuation.size[0]) == size


@pytest.mark.parametrize("capacity", [64, 1 << 16])
def test_answers_that_come_between_look_ups_are_found(capacity: int) -> None:
    """The device is told of new answers alone: a place or a token would be old."""
    draw, corpora = random.Random(0), Corpora(capacity, 4)
    answers = [[draw.randrange(9) for _ in range(23)] for _ in range(40)]
    for number, answer in enumerate(answers):
        corpora.add("a" if number % 3 else "b", answer)
        if number % 5 == 4 or number > 30:
            once, texts = Corpora(capacity, 4), answers[: number + 1]
            for i, earlier in enumerate(texts):
                once.add("a" if i % 3 else "b", earlier)
            tail = tail_of([t[:9] for t in [*texts[-8:], *texts[:8]][:8]])
            for clients in (["a"] * 8, ["a", "b", None, "b"] * 2):
                continuation, right = (
                    c.find(clients, tail, K) for c in (corpora, once)
                )
                assert continuation is not None
                assert right is not None
                for name, one in vars(continuation).items():
                    assert mx.array_equal(one, getattr(right, name))


def test_answers_that_nobody_looks_up_take_no_memory() -> None:
    """A server whose rounds draft nothing would grow with every answer."""
    corpora = Corpora(1 << 10, 4)
    for looks in (False, True):
        corpora.add("", range(100))
        if looks:
            corpora.find([""], tail_of([[1, 2, 3]]), K)
        tracemalloc.start()
        for _ in range(500):
            corpora.add("", range(100))
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size < 50_000


def test_the_ring_wraps() -> None:
    """Places of answers that were overwritten do not match, and no bytes are added."""
    corpora = Corpora(256, 4)
    for i in range(40):
        corpora.add("", [100 * i + j for j in range(23)])
    assert corpora.nbytes == Corpus.nbytes(256) == 256 * 12
    seen = list[int]()
    for i in range(40):
        text = [100 * i + j for j in range(9)]
        continuation = corpora.find([""], tail_of([text]), K)
        assert continuation is not None
        if int(continuation.count[0]):
            seen.append(i)
            assert continuation.tokens[0].tolist() == [
                100 * i + j for j in range(9, 13)
            ]
    # Some have lost a place to an equal hash, which a small ring has many of.
    assert min(seen) >= 30
    assert len(seen) >= 5
    corpora.add("", list(range(5000, 9000)))
    continuation = corpora.find([""], tail_of([[8990, 8991, 8992]]), K)
    assert continuation is not None
    assert continuation.tokens[0].tolist() == [8993, 8994, 8995, 8996]
    for i in range(6):
        corpora.add(f"client {i}", [1, 2, 3, 4, 5])
    assert corpora.nbytes == 4 * Corpus.nbytes(256)


def test_clients_never_see_each_other() -> None:
    """Rows of one batch look in their own client's answers, or in none."""
    corpora = Corpora(256, 4)
    corpora.add("a", [1, 2, 3, 4, 5, 6, 7])
    corpora.add("b", [1, 2, 3, 8, 9, 10, 11])
    clients = ["b", None, "a", "nobody", "a"]
    continuation = corpora.find(clients, tail_of([[1, 2, 3]] * 5), 3)
    assert continuation is not None
    assert continuation.count.tolist() == [3, 0, 3, 0, 3]
    assert continuation.tokens[0].tolist() == [8, 9, 10]
    assert (
        continuation.tokens[2].tolist() == continuation.tokens[4].tolist() == [4, 5, 6]
    )
    assert corpora.find(["nobody", None], tail_of([[1, 2, 3]] * 2), 3) is None


def test_clients_of_long_ago_are_forgotten() -> None:
    """The one that was here first is forgotten, though it asks all the time."""
    corpora = Corpora(256, 2)
    for client in "abac":
        corpora.add(client, [1, 2, 3, 4])
    assert corpora.owners(["a", "b", "c"]) == ["a", "c"]


def run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    backend: Any = AT_ONCE,
    drafter: Any = None,
) -> list[Request]:
    """Requests one after the other, with one drafter."""
    config = EngineConfig(num_draft_tokens=K)
    runner = ModelRunner(model, "target", config, backend)
    drafter = drafter or NgramDrafter(NgramOptions(corpus=256))
    requests = []
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine = Engine(runner, drafter, config, backend, frozenset())
        request = ask(engine, prompt, p, i)
        finish(engine)
        assert engine.stats.draft_error is None
        requests.append(request)
    return requests


def accepted(request: Request) -> int:
    return sum(request.num_accepted_tokens_per_pos)


@pytest.mark.parametrize("backend", [AT_ONCE, BEHIND], ids=["cpu", "gpu"])
@pytest.mark.parametrize("chained", [False, True])
def test_an_answer_is_drafted_again(
    backend: Any, chained: bool, target: Any, drafts: dict[str, Any]
) -> None:
    """For the same client alone, and the text is plain decoding's in any case.

    The answer does not repeat itself, so that only the earlier answer has it.
    """
    drafter: Any = NgramDrafter(NgramOptions(corpus=256))
    if chained:
        runner = ModelRunner(drafts["unrelated"], "draft", EngineConfig(), backend)
        second = DraftModel(runner, vocab_size=97, max_draft_tokens=K)
        drafter = ChainDrafter(drafter, second)
    prompt = make_prompts()[3]
    plain = SamplingParams(max_tokens=30)
    salts = (None, None, "a", "a", "b")
    params = [
        SamplingParams(max_tokens=30, cache_salt=salt, draft_corpus=name)
        for salt, name in zip(salts, (None, None, None, None, "x"), strict=True)
    ]
    params.append(SamplingParams(max_tokens=30, cache_salt="c", draft_corpus="x"))
    requests = run(target, [prompt] * 6, params, backend=backend, drafter=drafter)
    wanted = greedy(target, prompt, plain.max_tokens)
    assert all(r.tokens == wanted for r in requests)
    first, again, other, others, third, fourth = map(accepted, requests)
    assert first == other == third
    assert again == others == fourth > first + 5


def test_ratio_rules_neither_give_nor_take(target: Any) -> None:
    """Else a row's text would depend on what was asked before."""
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=3, verification=rule)
        for rule in ("coupled", "coupled", "rejection")
    ]
    prompts = [make_prompts()[3]] * 3
    *_, ruled = run(target, prompts, params)
    (alone,) = run(target, prompts[:1], params[2:])
    assert ruled.tokens == alone.tokens


def test_a_switch_turns_it_off(tmp_path: Path) -> None:
    """In the config of a decoder; and a size that is no power of two is refused."""
    write_folder(tmp_path, "llama")
    loaded, counts = load(str(tmp_path)), []
    for kept in (True, False):
        config = EngineConfig(num_draft_tokens=K, draft_corpus=kept)
        decoder = SpecDecoder(loaded, drafter="ngram", config=config)
        for _ in range(2):
            (result,) = decoder.generate([[5, 9, 11, 40]], max_tokens=30)
        counts.append(result.accepted)
    assert counts[0] > counts[1] + 5
    with pytest.raises(ConfigError, match="power of two"):
        NgramOptions(corpus=1000)


def test_rows_of_a_batch_learn_from_each_other(target: Any) -> None:
    """While some decode, others end and join; all texts are plain decoding's."""
    prompts = make_prompts()[:6] * 2
    drafter = NgramDrafter(NgramOptions(corpus=256))
    rows = run_rows(
        target, None, prompts, [SamplingParams(max_tokens=9 + i) for i in range(12)],
        batch_size=3, num_draft_tokens=K, drafter=drafter,
    )  # fmt: skip
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens == greedy(target, prompt, row.params.max_tokens)
    assert drafter.corpora.nbytes


def test_only_whole_answers_are_learnt(target: Any) -> None:
    """What was cancelled, or failed, is proposed as if the model had said it."""
    learnt = list[tuple[list[int], str]]()

    class Learning(Knowing):
        def remember(self, answer: Sequence[int], client: str) -> None:
            learnt.append((list(answer), client))

    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError

    engine = engine_of(target, drafter=Learning({}), batch_size=4)
    whole = SamplingParams(max_tokens=6, draft_corpus="me")
    for i, params in enumerate(
        (
            whole,
            replace(whole, max_tokens=50),
            replace(whole, logits_processors=(broken,)),
            replace(whole, verification="rejection", temperature=1.0),
        )
    ):
        ask(engine, (5, 6 + i), params, i)
    while engine.busy:
        engine.step()
        if learnt:
            engine.cancel(1)
    assert learnt == [(greedy(target, [5, 6], 6), "me")]
