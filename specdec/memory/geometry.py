"""What a model's arrays are made of, as numbers: read off it by models/geometry.py."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.capacity import cache_slots, ring_slots, round_up

# Layers whose arrays the device has not given back yet, at most: MLX hands CUDA a graph
# of about a layer's operations at a time, waits where ten are under way, and gives an
# array back with the graph that used it last.
UNDER_WAY = 10


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """One cache of one layer.

    Args:
        slot_bytes: of one token of one row: key and value of every head, packed
            with their scales and biases where they are quantized. 0 where the
            model never writes to it.
        window: tokens that a query sees in a ring (sinks not counted), or a
            chunk; ``None``: everything.
        keep: first tokens that a ring never drops.
        packed: whether keys and values are quantized.
        unpacked_bytes: of the same token, where packed keys and values are unpacked
            for attention; else 0.
    """

    slot_bytes: int
    window: int | None = None
    keep: int = 0
    packed: bool = False
    unpacked_bytes: int = 0

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
        """Of ``extent`` columns, those that the cache has."""
        if self.window is None:
            return extent
        return min(extent, ring_slots(self.window, max_write, self.keep))


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """A model's weights, its caches, and how wide its activations are.

    Args:
        name: for messages.
        num_parameters: of the model, however they are packed.
        weight_bytes: of all weights as the run holds them.
        caches: in the order in which the model uses them.
        dense_caches: the same before they are quantized, where rows are quantized
            when they are long (``quantized_kv_start``); else empty.
        vocab_size: logits of one position.
        elem_bytes: of one logit, key or activation.
        hidden_size: width of the residual stream.
        layer_width: outputs of all projections of the widest layer; of experts, only
            of those that one token uses, and what is gathered for them.
        num_heads: of queries.
        head_width: of one query head.
        score_copies: scores that attention holds at a time: 1, or 2 where it adds
            its own to the mask (latent attention).
        expanded_width: numbers per cached token that attention unfolds while it
            runs (latent attention); 0 for most.
        loading_bytes: most that is held while the model is loaded, its weights
            included; 0 when it is loaded already.
    """

    name: str
    num_parameters: int
    weight_bytes: int
    caches: tuple[CacheGeometry, ...]
    dense_caches: tuple[CacheGeometry, ...] = ()
    vocab_size: int
    elem_bytes: int
    hidden_size: int
    layer_width: int
    num_heads: int
    head_width: int
    score_copies: int = 1
    expanded_width: int = 0
    loading_bytes: int = 0

    def layer_bytes(
        self,
        rows: int,
        length: int,
        *,
        max_length: int | None = None,
        max_write: int = 1,
        dense: bool = False,
    ) -> list[int]:
        """Bytes that each cache has allocated for ``rows`` rows.

        Args:
            length: tokens of the longest row, those written and taken back included.
            max_length: most that a row can hold, as the caches were told.
            max_write: most tokens of one write, as rings were told.
            dense: before they are quantized.
        """
        caches = self.dense_caches if dense else self.caches
        # Layers of a model are of few kinds.
        sizes = {
            c: rows
            * c.slot_bytes
            * c.slots(length, max_length=max_length, max_write=max_write)
            for c in set(caches)
        }
        return [sizes[c] for c in caches]

    def columns(self, length: int, *, max_write: int, read_bucket: int) -> int:
        """Keys that attention reads for rows of ``length`` tokens, at most."""
        extent = round_up(length, read_bucket)
        return max((c.columns(extent, max_write) for c in self.caches), default=0)

    def workspace_bytes(self, rows: int, tokens: int, columns: int) -> int:
        """What a forward holds beside weights, caches and logits, at most.

        Linear in the tokens of the forward; the factors were measured with MLX's
        CPU backend, see docs/memory.md:

        - ``layer_width`` outputs of a layer's projections, and six more of its
          queries (rotated, scaled, transposed, the output of attention);
        - eight residual streams in float32: norms compute in it;
        - a score for each head and column, and masks: up to four bytes a column;
        - a copy of the packed keys and values of one layer, which kernels want
          contiguous, and dense ones of several where they are unpacked;
        - what latent attention unfolds.

        Args:
            rows: of the batch.
            tokens: that each row feeds.
            columns: keys that each row has, its newest included.
        """
        if not rows or not tokens:
            return 0
        queries = self.num_heads * self.head_width
        per_token = (
            self.elem_bytes * (self.layer_width + 6 * queries)
            + 32 * self.hidden_size
            + self.score_copies * self.num_heads * columns * self.elem_bytes
            + 4 * columns
        )
        per_column = self.elem_bytes * self.expanded_width
        per_column += max((c.slot_bytes for c in self.caches if c.packed), default=0)
        unpacked = sorted(c.unpacked_bytes for c in self.caches)
        per_column += sum(unpacked[-UNDER_WAY:])
        return rows * (tokens * per_token + columns * per_column)
