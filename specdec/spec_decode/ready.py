"""Proposals of our own rows that follow each row's newest token already.

The target reads that token whatever is proposed, and nothing looks at it again: so the
output is the target's only where nobody else may hand it over. Of rows of other classes
:class:`~specdec.spec_decode.DraftGuard` passes on nothing but the proposals.
"""

from __future__ import annotations

import mlx.core as mx

from .drafter import Proposals


class Ready(Proposals):
    """Proposals, and what the target is given: putting it together is a launch.

    Args:
        inputs: each row's newest token, then ``tokens``, shape (B, k + 1). A copy
            (:func:`dataclasses.replace`) has none: its tokens may be others.
    """

    def __init__(
        self,
        tokens: mx.array,
        probabilities: mx.array | None = None,
        lengths: mx.array | None = None,
        *,
        inputs: mx.array | None = None,
    ):
        super().__init__(tokens, probabilities, lengths)
        self.inputs = inputs

    @classmethod
    def within(
        cls,
        inputs: mx.array,
        probabilities: mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> Ready:
        """Of ``inputs``, int32, all but the first column is proposed."""
        return cls(inputs[:, 1:], probabilities, lengths, inputs=inputs)


def verify_inputs(newest: mx.array, proposals: Proposals) -> mx.array:
    """What the target is given: newest tokens (B, 1), then those proposed."""
    inputs = proposals.inputs if type(proposals) is Ready else None
    if inputs is None:
        inputs = mx.concatenate([newest, proposals.tokens], axis=1)
    return inputs
