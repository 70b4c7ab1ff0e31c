"""Streamed text is decoded text, whatever the tokenizer does at a beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.models.tokenizer import ExactStreamingDetokenizer


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


class ByteFallback:
    """Tokens are pieces, or bytes; a run of bytes that is not UTF-8 is lost whole.

    As the decoder of that name in ``tokenizers`` does, which Llama 2 and Gemma use.
    """

    def decode(self, tokens: list[int]) -> str:
        """Tokens below 256 are bytes; those above are the letters from ``a`` on."""
        text, run = "", b""
        for token in [*tokens, 256]:  # the last one ends a run and is taken off
            if token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            text, run = text + chr(ord("a") + token - 256), b""
        return text[:-1]


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


def stream(tokenizer: Any, tokens: list[int], asked: list[bool]) -> str:
    detokenizer = ExactStreamingDetokenizer(tokenizer)
    streamed = ""
    for index, token in enumerate(tokens):
        detokenizer.add_token(token)
        if asked[index % len(asked)]:
            streamed += detokenizer.last_segment
    detokenizer.finalize()
    assert streamed + detokenizer.last_segment == detokenizer.text
    return detokenizer.text


def with_bytes(text: str) -> list[int]:
    """Letters a to e as pieces, all else as the bytes of it."""
    tokens: list[int] = []
    for character in text:
        piece = 256 + ord(character) - ord("a")
        tokens += [piece] if "a" <= character <= "e" else character.encode()
    return tokens


ASKED = st.lists(st.booleans(), min_size=1, max_size=40)


@given(st.text("abcde\néß日本🤗", max_size=20), ASKED)
def test_whole_texts_in_byte_tokens(text: str, asked: list[bool]) -> None:
    assert stream(ByteFallback(), with_bytes(text), asked) == text


@given(st.text("ab\né日🤗", max_size=10), st.integers(0, 40), st.text("abé日"), ASKED)
def test_byte_tokens_that_are_cut(
    text: str, cut: int, more: str, asked: list[bool]
) -> None:
    """What ``decode`` shows of a cut run is there, and maybe whole characters of it."""
    tokens = with_bytes(text)[:cut] + with_bytes(more)
    decoded = ByteFallback().decode(tokens)
    streamed = stream(ByteFallback(), tokens, asked)
    left = iter(streamed)
    assert all(c in left for c in decoded if c != "\ufffd"), (streamed, decoded)
    assert set(streamed) <= {*text, *more, "\ufffd"}
    assert len(streamed) <= len(decoded)


def test_characters_before_a_cut_stay_in_the_text() -> None:
    """``decode`` takes them back; what was streamed cannot be taken back."""
    tokens = with_bytes("aé日")[:-1]
    assert ByteFallback().decode(tokens) == "a" + "\ufffd" * 4
    assert stream(ByteFallback(), tokens, [True]) == "aé" + "\ufffd" * 3
    assert stream(ByteFallback(), tokens, [False]) == "a" + "\ufffd" * 4


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
