"""Masks the tokens that grammars forbid, at each position of a round.

Masks are made on the host, from tokens that it has to read: a row's committed tokens
and the tokens proposed after them. The first caller, draft or target, has them made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..grammar import FAILED, GrammarState, ThinkingBudget

_ANY = np.uint32(0xFFFFFFFF)


@dataclass
class _Path:
    """The proposals that a row's masks were made for.

    Args:
        state: the row's state in its grammar.
        ends: tokens that end the row: nothing follows them.
        most: the most proposals that the row may accept.
        tokens: proposals that the mask at their position allows.
        num_masks: how many positions, from the first on, have a mask.
    """

    state: GrammarState | ThinkingBudget
    ends: AbstractSet[int]
    most: int
    tokens: list[int] = field(default_factory=list)
    num_masks: int = 0


class GrammarMasks:
    """The masks of one round; a row without a grammar may choose any token.

    A position after a proposal that the grammar refuses, or that ends the row, is never
    reached: its mask allows everything.

    Args:
        states: the grammar states after the committed tokens, by row.
        ends: tokens that end each of these rows.
        limits: the most proposals that each row of the batch may accept.
        num_tokens: number of positions in the round, k + 1.

    Attributes:
        errors: why a row's grammar has failed, by row.
    """

    def __init__(
        self,
        states: Mapping[int, GrammarState | ThinkingBudget],
        ends: Mapping[int, AbstractSet[int]],
        limits: Sequence[int],
        num_tokens: int,
    ):
        self._paths = {
            row: _Path(state, ends[row], min(max(limits[row], 0), num_tokens - 1))
            for row, state in states.items()
        }
        num_words = max(state.num_words for state in states.values())
        self._bits = np.full((len(limits), num_tokens, num_words), _ANY)
        self.errors: dict[int, str] = {}

    def forced(self) -> tuple[list[list[int]], list[int]]:
        """Each row's forced tokens after its committed tokens, and their numbers."""
        num_rows, num_tokens, _ = self._bits.shape
        tokens = [[0] * (num_tokens - 1) for _ in range(num_rows)]
        lengths = [0] * num_rows
        for row, path in self._paths.items():
            forced_tokens = path.state.forced()[: path.most]
            tokens[row][: len(forced_tokens)] = forced_tokens
            lengths[row] = len(forced_tokens)
        return tokens, lengths

    def mask(self, logits: mx.array, proposed: mx.array) -> mx.array:
        """Logits, minus infinity for tokens that a row's grammar forbids.

        Args:
            logits: logits of all positions, shape (B, k + 1, V).
            proposed: the proposed tokens, shape (B, k).
        """
        # The device computes them while the host reads and makes masks.
        mx.async_eval(logits)
        self._extend(proposed.tolist())
        return mx.where(_expanded(self._bits, logits), logits, -mx.inf)

    def mask_next(self, logits: mx.array, proposed: Sequence[mx.array]) -> mx.array:
        """Mask a draft's logits of the position after ``proposed`` in the same way.

        If the draft's vocabulary lacks all allowed tokens, its logits stay as they are,
        so that they remain a distribution to draw from. The proposal is then refused.

        Args:
            logits: shape (B, 1, V' <= V).
            proposed: each of shape (B, 1).
        """
        j = len(proposed)
        tokens: Any = [[]] * logits.shape[0]
        if proposed:
            tokens = mx.concatenate(list(proposed), axis=1).tolist()
        self._extend(tokens)
        allowed = _expanded(self._bits[:, j : j + 1], logits) & (logits > -mx.inf)
        allowed = allowed | ~allowed.any(axis=-1, keepdims=True)
        return mx.where(allowed, logits, -mx.inf)

    def _extend(self, proposed: Any) -> None:
        """Make the masks of every position up to the one after ``proposed``."""
        for row, path in self._paths.items():
            tokens = proposed[row][: path.most]
            same = 0
            while same < min(len(tokens), len(path.tokens)) and (
                tokens[same] == path.tokens[same]
            ):
                same += 1
            bits = self._bits[row]
            if same < len(path.tokens) and same < len(tokens):
                # These masks were made for other proposals.
                del path.tokens[same:]
                path.num_masks = same + 1
                bits[same + 1 :] = _ANY
            self._go_on(path, bits, tokens)
            if not bits[0].any():
                self.errors[row] = f"{FAILED}: {path.state.error}"

    def _go_on(self, path: _Path, bits: Any, tokens: list[int]) -> None:
        while path.num_masks <= len(tokens):
            at = path.num_masks
            if at:
                token = tokens[at - 1]
                refused = not bits[at - 1, token >> 5] >> (token & 31) & 1
                if token in path.ends or refused:
                    return
                path.tokens.append(token)
            path.state.move(path.tokens)
            if not path.state.fill(bits[at].ctypes.data):
                bits[at] = 0
            path.num_masks += 1


def _expanded(bits: Any, logits: mx.array) -> mx.array:
    """Bits of tokens, shape (B, S, words), as booleans shaped like the logits."""
    bytes_ = mx.array(np.ascontiguousarray(bits)).view(mx.uint8)
    flags = (bytes_[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1
    return flags.reshape(*bits.shape[:2], -1)[..., : logits.shape[-1]].astype(mx.bool_)
