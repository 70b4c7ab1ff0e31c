"""Streamed text is decoded text, whatever the tokenizer does at a beginning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.models.detokenizer import ExactStreamingDetokenizer


class Bytes:
    """Tokens are runs of bytes; many end inside a character."""

    PIECES = (b"a", b" ", b"\n", b"\xf0\x9f", b"\xa4\x97", b"\xc3", b"\xa9", b"\xff")

    def decode(self, tokens: list[int]) -> str:
        joined = b"".join(self.PIECES[token] for token in tokens)
        return joined.decode("utf-8", "replace")


class Stripping(Bytes):
    """Drops the one space that its encoder put in front, as Llama 2's does."""

    def decode(self, tokens: list[int]) -> str:
        return super().decode(tokens).removeprefix(" ")


TOKENS = st.lists(st.integers(0, len(Bytes.PIECES) - 1), max_size=30)


@pytest.mark.parametrize("kind", [Bytes, Stripping])
def test_any_tokens_asked_at_any_time(kind: Callable[[], Bytes]) -> None:
    @given(TOKENS, st.lists(st.booleans(), min_size=30, max_size=30))
    def check(tokens: list[int], asked: list[bool]) -> None:
        tokenizer = kind()
        detokenizer = ExactStreamingDetokenizer(tokenizer)
        streamed = ""
        for token, ask in zip(tokens, asked, strict=False):
            detokenizer.add_token(token)
            if ask:
                streamed += detokenizer.last_segment
        detokenizer.finalize()
        streamed += detokenizer.last_segment
        assert streamed == detokenizer.text == tokenizer.decode(tokens)

    check()


def test_a_character_is_never_split() -> None:
    detokenizer = ExactStreamingDetokenizer(Bytes())
    segments = []
    for token in (0, 3, 4, 5, 6):
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    assert segments == ["a", "", "🤗", "", "é"]


def test_what_is_settled_is_not_held_back() -> None:
    detokenizer = ExactStreamingDetokenizer(Bytes())
    for token in (0, 1, 0, 3):
        detokenizer.add_token(token)
    assert detokenizer.last_segment == "a a"
    detokenizer.add_token(4)
    assert detokenizer.last_segment == "🤗"


def test_finalize_shows_half_a_character() -> None:
    detokenizer = ExactStreamingDetokenizer(Bytes())
    detokenizer.add_token(3)
    assert detokenizer.text == ""
    detokenizer.finalize()
    assert detokenizer.text == "\ufffd"


def test_reset() -> None:
    detokenizer = ExactStreamingDetokenizer(Stripping())
    for token in (1, 0, 3):
        detokenizer.add_token(token)
    assert detokenizer.text == "a"
    detokenizer.reset()
    assert (detokenizer.text, detokenizer.tokens) == ("", [])
    detokenizer.add_token(1)
    detokenizer.add_token(0)
    assert detokenizer.last_segment == "a"


def test_the_cost_of_a_token_does_not_grow() -> None:
    lengths = []

    class Counting(Bytes):
        def decode(self, tokens: list[int]) -> str:
            lengths.append(len(tokens))
            return super().decode(tokens)

    detokenizer = ExactStreamingDetokenizer(Counting())
    for _ in range(300):
        detokenizer.add_token(0)
        assert detokenizer.last_segment == "a"
    assert max(lengths) <= 2
