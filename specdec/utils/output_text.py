"""The text of a row as it grows, cut where a stop text begins. No mlx here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol


class Detokenizer(Protocol):
    """The part of mlx-lm's streaming detokenizers that is used."""

    @property
    def text(self) -> str:
        """The text so far, up to its last complete character."""

    def add_token(self, token: int) -> None:
        """Take one token id."""

    def finalize(self) -> None:
        """Complete the text, even if it ends inside a character."""


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token, even if the token is only a part of a character.

    Decoders drop the space at the start of a text; this function keeps it.
    """
    text = str(tokenizer.decode([token]))
    piece_of = getattr(tokenizer, "convert_ids_to_tokens", None)
    piece = None if piece_of is None else piece_of(token)
    spaced = isinstance(piece, str) and piece.startswith("\u2581")
    return f" {text}" if spaced and not text.startswith(" ") else text


class StopTexts:
    """Finds texts in a growing text, reading each character once (Aho-Corasick).

    A state is the longest end of the text so far that is the beginning of a stop text;
    state 0 is the empty beginning.

    Args:
        texts: the texts to look for, none of them empty.
    """

    def __init__(self, texts: Sequence[str]):
        #: Length of each state's beginning of a stop text.
        self.depth = [0]
        #: Length of the longest stop text with which a state ends; 0: none.
        self.matched = [0]
        self._next: list[dict[str, int]] = [{}]
        for text in texts:
            state = 0
            for character in text:
                following = self._next[state]
                if character not in following:
                    following[character] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.matched.append(0)
                state = following[character]
            self.matched[state] = len(text)
        # The state of the longest proper end, tried when a state cannot go on.
        self._shorter = [0] * len(self._next)
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, longer in self._next[state].items():
                shorter = self.after(self._shorter[state], character)
                self._shorter[longer] = shorter
                if not self.matched[longer]:
                    self.matched[longer] = self.matched[shorter]
                states.append(longer)

    def after(self, state: int, character: str) -> int:
        """The state one character later."""
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._shorter[state]
        return self._next[state][character]


@lru_cache(maxsize=16)
def stop_texts(texts: tuple[str, ...]) -> StopTexts:
    """The automaton of stop texts; requests with the same texts share it."""
    return StopTexts(texts)


class OutputText:
    """Text and tokens of one row, released only when nothing can take them back.

    A stop text may begin in one token and end in a later one. So text that could be its
    beginning is held back until the next tokens decide.

    Args:
        detokenizer: a new detokenizer, for this row alone.
        stop: texts that end the row.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()):
        self._detokenizer = detokenizer
        self._stop = stop_texts(tuple(stop)) if stop else None
        # How many characters were read, and the state after them.
        self._looked_at = self._state = 0
        # Length of the text after each token; kept only if there are stop texts.
        self._lengths: list[int] = []
        self._end: int | None = None
        self._released = 0
        self.matched: str | None = None

    def add(self, token: int) -> bool:
        """Take one token; return whether a stop text is complete now."""
        self._detokenizer.add_token(token)
        return self._stop is not None and self._looked_for_stop()

    def finish(self, *, look: bool = True) -> None:
        """End the text: text held back is released, or completes a stop text.

        Args:
            look: whether a stop text may still end the row.
        """
        if self.matched is None:
            self._detokenizer.finalize()
            if self._stop is not None and look:
                self._looked_for_stop(last=True)

    def _looked_for_stop(self, *, last: bool = False) -> bool:
        assert self._stop is not None
        text = self._detokenizer.text
        if last and self._lengths:
            self._lengths[-1] = len(text)
        else:
            self._lengths.append(len(text))
        matches: list[tuple[int, int]] = []
        for character in text[self._looked_at :]:
            self._state = self._stop.after(self._state, character)
            self._looked_at += 1
            if length := self._stop.matched[self._state]:
                matches.append((self._looked_at - length, -length))
        if not matches:
            return False
        # The stop text that begins first; of several there, the longest.
        at, length = min(matches)
        self._end, self.matched = at, text[at : at - length]
        return True

    @property
    def text(self) -> str:
        """The text so far, cut before a stop text."""
        return self._detokenizer.text[: self._end]

    @property
    def num_tokens(self) -> int | None:
        """How many tokens contribute to the text; ``None``: all (no stop text)."""
        if self._end is None:
            return None
        return self._begun_before(self._end)

    def _begun_before(self, end: int) -> int:
        """How many tokens begin before character ``end``."""
        before = bisect_left(self._lengths, end)
        return min(before + 1, len(self._lengths)) if end > 0 else 0

    def take(self, num_tokens: int, *, ended: bool) -> tuple[str, int]:
        """New text, and how many tokens may be shown by now.

        Args:
            num_tokens: how many tokens the row has so far.
            ended: the row has ended, so nothing is held back.
        """
        text = self.text
        safe = len(text) if ended else len(text) - self._held_back()
        new, self._released = text[self._released : safe], max(self._released, safe)
        if ended or self._stop is None:
            return new, num_tokens
        # A token without text of its own may be part of the next character.
        return new, min(self._begun_before(safe), bisect_right(self._lengths, safe))

    def _held_back(self) -> int:
        """Length of the longest end of the text with which a stop text begins."""
        return 0 if self._stop is None else self._stop.depth[self._state]
