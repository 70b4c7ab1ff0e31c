"""A row's budget of thinking tokens, as a state like that of a grammar."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .state import GrammarState


@dataclass(frozen=True)
class ThinkingMarks:
    """The tokens around a model's thoughts.

    Args:
        start, end: the tokens of the two markers.
        thinks: the answer begins within a thought.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    thinks: bool


@dataclass(frozen=True)
class _Place:
    """Where a row is: in a thought or not, and how many tokens of thoughts it has.

    ``matched`` is how many tokens of the next marker were written last.
    """

    thinking: bool
    spent: int = 0
    matched: int = 0

    def after(self, token: int, marks: ThinkingMarks) -> _Place:
        marker = marks.end if self.thinking else marks.start
        matched = _matched(marker, self.matched, token)
        spent = self.spent + self.thinking
        if matched < len(marker):
            return replace(self, spent=spent, matched=matched)
        # The marker itself is no part of the thought.
        return _Place(not self.thinking, spent - self.thinking * len(marker))


def _matched(marker: Sequence[int], before: int, token: int) -> int:
    """How long a beginning of the marker the text ends with, after one more token."""
    written = (*marker[:before], token)
    return next(
        size
        for size in range(len(written), -1, -1)
        if tuple(marker[:size]) == written[len(written) - size :]
    )


class ThinkingBudget:
    """Ends thoughts after a number of tokens, with the model's own marker.

    The mask of the next token depends on the row's tokens alone, so the output is the
    same for every draft. Once the thoughts of a row have ``budget`` tokens together,
    the tokens of the end marker are forced; a later thought ends at once.

    Args:
        budget: the most tokens of thoughts, markers not counted.
        num_words: 32-bit words of a mask.
        inner: the state of the row's grammar, if it has one.
    """

    def __init__(
        self,
        marks: ThinkingMarks,
        budget: int,
        num_words: int,
        inner: GrammarState | None = None,
    ):
        self.num_words = num_words if inner is None else inner.num_words
        self._marks, self._budget, self._inner = marks, budget, inner
        self._place = self._now = _Place(marks.thinks)
        self._num_committed = 0

    def commit(self, tokens: Sequence[int]) -> None:
        """Move to the state after ``tokens``, all tokens that the row has generated."""
        self._place = self._ahead(tokens[self._num_committed :])
        self._num_committed, self._now = len(tokens), self._place
        if self._inner is not None:
            self._inner.commit(tokens)

    def move(self, ahead: Sequence[int]) -> None:
        """Move to the state after the committed tokens and ``ahead``, all allowed."""
        self._now = self._ahead(ahead)
        if self._inner is not None:
            self._inner.move(ahead)

    def _ahead(self, tokens: Sequence[int]) -> _Place:
        place = self._place
        for token in tokens:
            place = place.after(token, self._marks)
        return place

    def fill(self, address: int) -> bool:
        """Write the mask of the next token to memory, ``num_words`` words.

        Returns:
            Whether there is a mask; see :meth:`GrammarState.fill`.
        """
        ending = self._ending()
        if not ending:
            if self._inner is not None:
                return self._inner.fill(address)
            ctypes.memset(address, 0xFF, 4 * self.num_words)
            return True
        ctypes.memset(address, 0, 4 * self.num_words)
        words = (ctypes.c_uint32 * self.num_words).from_address(address)
        words[ending[0] >> 5] = 1 << (ending[0] & 31)
        return True

    def forced(self) -> list[int]:
        """The forced tokens that follow, often none."""
        ending = self._ending()
        if ending or self._inner is None:
            return ending
        return self._inner.forced()

    def _ending(self) -> list[int]:
        """The rest of the end marker, once the budget is spent."""
        place = self._now
        if not place.thinking or place.spent - place.matched < self._budget:
            return []
        return list(self._marks.end[place.matched :])

    @property
    def error(self) -> str:
        """Why the grammar has failed."""
        return "" if self._inner is None else self._inner.error
