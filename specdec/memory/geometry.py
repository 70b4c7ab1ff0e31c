"""The sizes of a model's arrays; :mod:`.planning` finds them."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.capacity import cache_slots, ring_slots, round_up
from ..cuda.packed_matmul import TIMED_ROWS

#: Tokens that mlx-lm's scans score with each other at a time.
SCAN_PART = 256
#: The most layers whose arrays are not freed yet. MLX gives CUDA a graph of about one
#: layer's operations at a time, waits if ten are running, and frees an array with the
#: last graph that used it.
UNDER_WAY = 10
#: Copies of a recurrent layer's states that are held at once: the current ones, the
#: next ones, and, if tokens can be taken back, those before the last write.
STATE_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """One cache of one layer.

    Args:
        slot_bytes: bytes of one token of one row: key and value of every head, packed
            with their scales and biases if they are quantized. 0 if the model never
            writes to the cache.
        window: tokens that a query sees in a ring (sinks not counted), or a
            chunk; ``None``: everything.
        keep: first tokens that a ring never drops.
        state_bytes: bytes of a recurrent layer's states for one row of any length.
        held_bytes: bytes per token of a round: inputs of a recurrent layer, which are
            held to take tokens back.
    """

    slot_bytes: int
    window: int | None = None
    keep: int = 0
    state_bytes: int = 0
    held_bytes: int = 0

    def slots(self, length: int, *, max_length: int | None, max_write: int) -> int:
        """Slots per row, see :func:`~specdec.cache.capacity.cache_slots`."""
        return cache_slots(
            length,
            max_length=max_length,
            window=self.window,
            keep=self.keep,
            max_write=max_write,
        )

    def columns(self, extent: int, max_write: int) -> int:
        """How many of ``extent`` columns the cache has."""
        if self.window is None:
            return extent
        return min(extent, ring_slots(self.window, max_write, self.keep))


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """A model's weights, its caches, and what a forward holds besides them.

    Args:
        name: for messages.
        num_parameters: parameters of the model, however they are packed.
        weight_bytes: bytes of all weights as the run holds them.
        caches: in the order in which the model uses them.
        dense_caches: the same caches before they are quantized, if rows are quantized
            once they are long (``quantized_kv_start``); else empty.
        vocab_size: number of logits of one position.
        elem_bytes: bytes of one logit.
        token_bytes: bytes of the activations of one token in one layer.
        score_bytes: bytes of attention scores and masks per token and cached column.
        pair_bytes: bytes per pair of tokens of a row in one part of a scan
            (:data:`SCAN_PART`).
        column_bytes: bytes of the copy that attention makes of one cached column of a
            row.
        unpacked_column_bytes: bytes of such a column in a layer whose packed keys and
            values are unpacked for attention.
        unpacked_bytes: bytes of a layer's packed matrices once they are unpacked for
            the products of many rows.
        loading_bytes: the most bytes held while the model is loaded, including its
            weights; 0 if it is loaded already.
        feature_bytes: for a draft head, bytes of the target's hidden states of one
            token that it reads: recorded, joined and normed.
        proposes_blocks: whether one forward computes the logits of all proposals.
    """

    name: str
    num_parameters: int
    weight_bytes: int
    caches: tuple[CacheGeometry, ...]
    dense_caches: tuple[CacheGeometry, ...] = ()
    vocab_size: int
    elem_bytes: int
    token_bytes: int
    score_bytes: int
    pair_bytes: int = 0
    column_bytes: int = 0
    unpacked_column_bytes: int = 0
    unpacked_bytes: int = 0
    loading_bytes: int = 0
    feature_bytes: int = 0
    proposes_blocks: bool = False

    def layer_bytes(
        self,
        rows: int,
        length: int,
        *,
        max_length: int | None = None,
        max_write: int = 1,
        dense: bool = False,
        takes_back: bool = True,
    ) -> list[int]:
        """Bytes that each cache has allocated for ``rows`` rows.

        Args:
            length: tokens of the longest row, including tokens that were taken back.
            max_length: the most tokens of a row that the caches were made for.
            max_write: the most tokens of one write that rings were made for.
            dense: count the caches as they are before they are quantized.
            takes_back: whether tokens are taken back in rounds.
        """
        states = STATE_COPIES - (not takes_back)
        caches = self.dense_caches if dense else self.caches
        # A model has few kinds of layers.
        sizes = {
            c: rows
            * (
                c.slot_bytes
                * c.slots(length, max_length=max_length, max_write=max_write)
                + c.state_bytes * states * (length > 0)
            )
            for c in set(caches)
        }
        return [sizes[c] for c in caches]

    def held_bytes(self, rows: int, tokens: int) -> int:
        """Bytes that recurrent layers hold of a round of ``tokens`` tokens per row."""
        return rows * tokens * sum(c.held_bytes for c in self.caches)

    def columns(self, length: int, *, max_write: int, read_bucket: int) -> int:
        """The most keys that attention reads for rows of ``length`` tokens."""
        extent = round_up(length, read_bucket)
        return max((c.columns(extent, max_write) for c in self.caches), default=0)

    def workspace_bytes(
        self, rows: int, tokens: int, columns: int, layers: int | None = None
    ) -> int:
        """The most bytes that a forward holds besides weights, caches and logits.

        Args:
            rows: rows of the batch.
            tokens: how many tokens each row feeds.
            columns: how many keys each row has, its newest included.
            layers: layers that are under way at once; ``None``: the host runs ahead.
        """
        ahead = min(layers or UNDER_WAY, len(self.caches))
        per_token = (layers or 1) * self.token_bytes + columns * self.score_bytes
        per_token += min(tokens, SCAN_PART) * self.pair_bytes
        per_column = self.column_bytes + ahead * self.unpacked_column_bytes
        unpacked = self.unpacked_bytes if rows * tokens >= TIMED_ROWS[0] else 0
        forward = rows * (tokens * per_token + columns * per_column)
        return forward + ahead * unpacked
