"""What the target writes: its plain decoding, and draws of its distribution."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from specdec.models import load
from specdec.tools.distill import seed_prompts
from specdec.tools.distill.corpus import GREEDY, Document
from specdec.tools.distill.options import Budget, DistillOptions
from specdec.tools.distill.seed_prompts import Opening, draw
from specdec.tools.distill.wave import (
    Author,
    begin_of_turn,
    text_documents,
    user_turn,
    without_loops,
)
from tests.models.folders import tokenizer_of
from tests.plain import greedy

from .harness import make_author, write_target

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [3]]


def until(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: at + 1])


def test_greedy_rows_equal_plain_decoding(tiny_model: Callable[..., Any]) -> None:
    """Rows that end early and leave, others that go on; token for token."""
    model = tiny_model("llama")
    plain = [greedy(model, prompt, 80) for prompt in PROMPTS]
    ends = [plain[0][1], plain[1][3], plain[2][34]]
    wanted = [until(tokens, ends) for tokens in plain]
    assert len({len(tokens) for tokens in wanted}) > 2
    # Some end a row by the tokenizer, others a user's turn.
    author = make_author(model, ends=(ends[0],))
    how: dict[str, Any] = {"max_tokens": 80, "temperature": 0.0, "ends": ends[1:]}
    found = author._write(PROMPTS, Random(0), **how)
    assert [list(tokens) for tokens in found] == wanted
    assert author._write([], Random(0), **how) == []


def test_draws_follow_the_temperature_and_the_seed(
    tiny_model: Callable[..., Any],
) -> None:
    """800 rows of one prompt; each token's share within five standard deviations."""
    model = tiny_model("llama")
    author = make_author(model)

    def draws(seed: int) -> list[Sequence[int]]:
        rows = [[5, 6, 7]] * 800
        return author._write(rows, Random(seed), max_tokens=1, temperature=0.7)

    found = draws(1)
    assert found == draws(1)
    assert found != draws(2)
    logits = model(mx.array([[5, 6, 7]]))[0, -1]
    expected = mx.softmax(logits / 0.7)
    counted = mx.zeros(97).at[mx.array(found)[:, 0]].add(1) / 800
    tolerance = 5 * mx.sqrt(expected * (1 - expected) / 800) + 1e-3
    assert bool(mx.all(mx.abs(counted - expected) < tolerance))


def test_a_turn_begins_in_the_template_and_ends_with_its_end(tmp_path: Any) -> None:
    tokenizer = tokenizer_of(tmp_path / "t")
    turn = user_turn(tokenizer)
    assert turn is not None
    assert turn[0] == "<|im_start|>user\n"
    end = tokenizer.get_vocab()["<|im_end|>"]
    assert end in turn[1]
    begun = begin_of_turn(tokenizer, turn, "Hello the")
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "Hello there"}])
    assert tokenizer.decode(begun) == "<|im_start|>user\nHello the"
    assert whole[: len(begun) - 1] == begun[:-1]
    bare: Any = SimpleNamespace(has_chat_template=False)
    assert user_turn(bare) is None


def test_documents_of_a_wave(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Any]
) -> None:
    """Turns that end, once each; each answered twice; a function's text is cut."""
    tokenizer = tokenizer_of(tmp_path / "t")
    end = tokenizer.get_vocab()["<|im_end|>"]

    def said(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    turns = [
        [*said(" are seven days"), end],
        [*said(" are seven days"), end],
        said(" never ends"),
        [*said(' the sum.\n    """\n    return 1'), end],
    ]
    begun = [Opening("There")] * 3 + [Opening('def f():\n    """', until='"""')]
    answers = iter([turns, [said("yes"), said("no")], [said("No"), [end]]])
    monkeypatch.setattr(Author, "_write", lambda *_, **__: next(answers))
    asked = set()

    def drawn(rng: Random, topics: Sequence[str]) -> Opening:
        asked.add(tuple(topics))
        return begun.pop(0)

    monkeypatch.setattr(seed_prompts, "draw", drawn)
    wanted = DistillOptions(
        target=None, budget=Budget(tokens=1), topics=("code", "problems")
    )
    author = Author(tiny_model("llama"), tokenizer, wanted, 4)
    documents = author.wave(0)
    assert asked == {("code", "problems")}
    texts = [tokenizer.decode(list(d.tokens)) for d in documents]
    assert [d.kind for d in documents] == [0, 0, 1, 1]
    assert texts[0] == "<|im_start|>user\nThere are seven days<|im_end|>\nyes"
    assert 'def f():\n    """ the sum.\n    """\n<|im_end|>' in texts[1]
    assert documents[1].prompt_length == documents[3].prompt_length
    assert tokenizer.decode(list(documents[3].tokens[-1:])) == "<|im_end|>"


def test_openings_differ() -> None:
    rng = random.Random(0)
    found = [draw(rng) for _ in range(4000)]
    assert len({o.text for o in found}) > 1500
    assert any(not o.text for o in found)
    assert all(o.text == o.text.rstrip(" ") for o in found)
    code = [o for o in found if o.until is not None]
    assert 0.1 < len(code) / len(found) < 0.3
    assert all(o.text.count('"""') == 1 for o in code)
    # One topic alone, and draws that are the same again for the next run.
    assert not any(draw(rng, ["problems"]).until for _ in range(300))
    assert draw(random.Random(5)) == draw(random.Random(5))


def test_loops_are_cut() -> None:
    """Where a token is the fourth in a row of one period, by a plain count."""

    def plain(tokens: list[int]) -> list[int]:
        for period in range(1, 25):
            run = 0
            for i in range(period, len(tokens)):
                run = run + 1 if tokens[i] == tokens[i - period] else 0
                if run >= max(3 * period, 8):
                    tokens = tokens[: i + 1]
                    break
        return tokens

    rng = random.Random(0)
    texts = [[*range(40), 3, 3, 4, 4, 40], [*range(10), *([7, 8, 9] * 20), 1], [], [5]]
    for _ in range(300):
        head = [rng.randrange(9) for _ in range(rng.randrange(30))]
        loop = [rng.randrange(99) for _ in range(rng.randrange(1, 30))]
        texts.append(head + loop * rng.randrange(8) + head)
    found = without_loops(texts)
    assert found == [plain(text) for text in texts]
    assert found[0] == texts[0]
    assert 10 < len(found[1]) < 30
    assert sum(a != b for a, b in zip(found, texts, strict=True)) > 50
    assert without_loops([[5] * 50]) == [[5] * 9]
    assert without_loops([]) == []


def test_texts_are_cut_to_pieces(tmp_path: Any) -> None:
    tokenizer = tokenizer_of(tmp_path / "t")
    documents = text_documents(tokenizer, ["abcdefgh" * 4, "x"], max_tokens=10)
    tokens = [t for d in documents for t in d.tokens]
    assert tokens == list(tokenizer.encode("abcdefgh" * 4))
    assert all(1 < len(d.tokens) <= 10 for d in documents)


def test_a_wave_is_a_function_of_its_number(tmp_path: Any) -> None:
    """Data that another run cannot make again; a wave that repeats the one before."""
    target = load(str(write_target(tmp_path / "target")), dtype="float32")
    wanted = DistillOptions(
        target=None, budget=Budget(tokens=1), turn_tokens=24, answer_tokens=6
    )

    def wave(number: int) -> list[Document]:
        # A model of random weights ends few turns by itself.
        author = Author(target.model, target.tokenizer, wanted, 8)
        assert author._turn is not None
        ends = frozenset(range(0, 320, 4))
        author._turn = author._turn[0], ends
        return author.wave(number)

    first = wave(0)
    assert first == wave(0) != wave(1)
    greedily = [d for d in first if d.kind == GREEDY]
    assert len(greedily) > 2
    for document in greedily:
        prompt = list(document.tokens[: document.prompt_length])
        text = greedy(target.model, prompt, 6)
        assert list(document.tokens[document.prompt_length :]) == text
