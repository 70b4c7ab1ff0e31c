"""The state of a row in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..utils.printable import shorten

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: How the error of a row begins whose grammar has failed.
FAILED = "its grammar failed"


class GrammarState:
    """A row's state in its grammar, after its committed tokens or tokens ahead of them.

    Args:
        fresh: a matcher at the beginning of the grammar; not changed.
        num_words: 32-bit words of a mask, which has one bit per token.
    """

    def __init__(self, fresh: LLMatcher, num_words: int):
        self.num_words = num_words
        self._fresh = fresh
        self._matcher = fresh.deep_copy()
        self._committed: list[int] = []
        # Tokens after the committed ones that the matcher has taken.
        self._ahead: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Move to the state after ``tokens``, all tokens that the row has generated.

        ``tokens`` begins with those committed before. Tokens ahead that match the rest
        are not taken again.
        """
        new = tokens[len(self._committed) :]
        self.move(new)
        self._committed += new
        self._ahead = []

    def move(self, ahead: Sequence[int]) -> None:
        """Move to the state after the committed tokens and ``ahead``, all allowed."""
        if self._matcher.is_error():  # caused by tokens ahead, which may be dropped
            self._matcher, self._ahead = self._fresh.deep_copy(), []
            self._matcher.consume_tokens(self._committed)
        same = 0
        for before, after in zip(self._ahead, ahead, strict=False):
            if before != after:
                break
            same += 1
        if len(self._ahead) > same:
            self._matcher.rollback(len(self._ahead) - same)
            del self._ahead[same:]
        for token in ahead[same:]:
            if not self._matcher.consume_token(token):
                return
            self._ahead.append(token)

    def fill(self, address: int) -> bool:
        """Write the mask of the next token to memory, ``num_words`` words.

        Returns:
            Whether there is a mask. If not, :attr:`error` says why, and the memory's
            content is undefined.
        """
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(address, 4 * self.num_words)
        return not self._matcher.is_error()

    def forced(self) -> list[int]:
        """The forced tokens that follow, often none.

        They are the usual spelling of the text that must follow; other tokens may spell
        it, too.
        """
        return [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()

    @property
    def error(self) -> str:
        """Why the grammar has failed; usually a limit was reached."""
        return shorten(self._matcher.get_error().replace("<non-verbose/>", ""))
