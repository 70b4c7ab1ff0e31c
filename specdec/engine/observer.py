"""What the engine reports about its rounds, for tools that measure them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from ..request import Request

Part = Literal["draft", "verify", "sampling"]


class RoundObserver:
    """Watches the rounds of a session; this one does nothing.

    Whatever an observer does, the tokens are the same. One that waits for the
    device in :meth:`built` makes rounds slower than they are without it.
    """

    def begun(self, num_draft_tokens: int) -> None:
        """A round of k is about to be built; a prompt's last step counts as k = 0."""

    def built(self, part: Part, *arrays: mx.array) -> None:
        """The graph of a part was built; ``arrays`` are what it computes."""

    def read(self, num_draft_tokens: int, rows: Sequence[Request]) -> None:
        """A round of k was read; ``rows`` are those that had not ended before it.

        Their counts (``rounds``, ``drafted``, ``accepted``, ``tokens``) include the
        round. A prompt's last step does not count in ``rounds``.
        """
