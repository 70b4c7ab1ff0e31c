"""The text of a row as it grows, cut where a stop text begins. No mlx here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """mlx-lm's streaming detokenizers, as far as they are used."""

    @property
    def text(self) -> str:
        """The text so far, as far as its characters are complete."""

    def add_token(self, token: int) -> None:
        """Take one token id."""

    def finalize(self) -> None:
        """Complete the text, also when it ends inside a character."""


class OutputText:
    """Text and tokens of one row, released only when nothing can take them back.

    A stop text may begin in one token and end in a later one, so what could be
    its beginning is held back until the next tokens tell.

    Args:
        detokenizer: new, of this row alone.
        stop: texts that end the row.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()):
        self._detokenizer = detokenizer
        self._stop = stop
        self._window = max(map(len, stop), default=0)
        # Length of the text behind each token; kept only to look for stop texts.
        self._lengths: list[int] = []
        self._end: int | None = None
        self._released = 0
        self.matched: str | None = None

    def add(self, token: int) -> bool:
        """Take one token; whether a stop text is complete now."""
        self._detokenizer.add_token(token)
        return self._looked_for_stop() if self._stop else False

    def finish(self, *, look: bool = True) -> None:
        """No more tokens come: what was held back is text, or ends a stop text.

        Args:
            look: whether the row may end by a stop text now.
        """
        if self.matched is None:
            self._detokenizer.finalize()
            if self._stop and look:
                self._looked_for_stop(last=True)

    def _looked_for_stop(self, *, last: bool = False) -> bool:
        before = self._lengths[-1] if self._lengths else 0
        text = self._detokenizer.text
        if last and self._lengths:
            self._lengths[-1] = len(text)
        else:
            self._lengths.append(len(text))
        # What was searched before holds no whole stop text.
        start = max(0, before - self._window + 1)
        found = [(at, s) for s in self._stop if (at := text.find(s, start)) >= 0]
        if not found:
            return False
        # The first to begin; of those that begin there, the longest.
        self._end, self.matched = min(found, key=lambda f: (f[0], -len(f[1])))
        return True

    @property
    def text(self) -> str:
        """The text so far, cut before a stop text."""
        return self._detokenizer.text[: self._end]

    @property
    def num_tokens(self) -> int | None:
        """Tokens with a part in the text; ``None``: all, no stop text was found."""
        if self._end is None:
            return None
        return self._begun_before(self._end)

    def _begun_before(self, end: int) -> int:
        """Tokens whose text begins before character ``end``."""
        behind = bisect_left(self._lengths, end)
        return min(behind + 1, len(self._lengths)) if end > 0 else 0

    def take(self, num_tokens: int, *, ended: bool) -> tuple[str, int]:
        """New text, and how many tokens may be shown by now.

        Args:
            num_tokens: tokens of the row so far.
            ended: nothing is held back any more.
        """
        text = self.text
        safe = len(text) if ended else len(text) - self._held_back(text)
        new, self._released = text[self._released : safe], max(self._released, safe)
        if ended or not self._stop:
            return new, num_tokens
        # A token without text of its own may belong to what comes next.
        return new, min(self._begun_before(safe), bisect_right(self._lengths, safe))

    def _held_back(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop text begins."""
        for length in range(min(self._window - 1, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                return length
        return 0
