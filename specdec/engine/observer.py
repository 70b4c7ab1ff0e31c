"""What the engine reports about its rounds, for tools that measure them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from ..request import Request

Part = Literal["draft", "verify", "sampling"]


class RoundObserver:
    """Watches the rounds of a session; this one does nothing.

    No observer changes the tokens. An observer that waits for the device in
    :meth:`built` makes rounds slower.
    """

    def begun(self, num_draft_tokens: int) -> None:
        """A round of k is about to be built; a prompt's last step counts as k = 0."""

    def built(self, part: Part, *arrays: mx.array) -> None:
        """The graph of a part was built; it computes ``arrays``."""

    def read(self, num_draft_tokens: int, rows: Sequence[Request]) -> None:
        """A round of k was read; ``rows`` are the rows that had not ended before it.

        Their counts (``rounds``, ``drafted``, ``accepted``, ``tokens``) include the
        round. A prompt's last step does not count in ``rounds``.
        """
