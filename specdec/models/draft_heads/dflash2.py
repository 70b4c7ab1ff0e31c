"""DFlash 2: DFlash with convolutions in the block and a selector of candidates.

With y the normed input of a sublayer (attention or MLP) f, and * a causal convolution
over the slots of the block, whose taps depend on y:

    x + taps_1(y) * f(taps_0(y) * y)

A token is chosen among the most likely ones of its slot. The token before it adds a
bilinear score to each of these candidates:

    score(c) = logit(c) + <predecessor[before] * (projection h), successor[c]>
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import UnsupportedModelError
from ...utils.data_files import DataError
from .block import BlockConfig, BlockHead, Walk, block_values
from .config import Published
from .layers import HeadLayer

# How far below its logit a token is that is no candidate: its probability is 0. Where a
# grammar forbids all candidates, its logit still counts.
_BELOW = 1e4


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """A DFlash 2 head.

    Args:
        taps: K, slots that a convolution reads, its own included.
        group: channels that share the part of a tap that depends on the input.
        rank: r, width of the selector's codebooks.
        candidates: tokens that are candidates for a slot.
    """

    taps: int
    group: int
    rank: int
    candidates: int


class BlockConvolution(nn.Module):
    """Two causal convolutions over a block: of a sublayer's input and of its output.

    Args:
        size: H, channels.
        taps, group: see :class:`DFlash2Config`.
    """

    def __init__(self, size: int, taps: int, group: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self._taps, self._groups = taps, size // group
        self.base_kernel = mx.zeros((2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * self._groups, bias=False)

    def around(self, x: mx.array, inner: Callable[[mx.array], mx.array]) -> mx.array:
        """``inner`` between both convolutions, whose taps are made from ``x``."""
        rows, width, _ = x.shape
        groups = (rows, width, 2, self._taps, self._groups)
        taps = self.kernel_projection(x).reshape(groups)[..., None]
        return self._convolved(inner(self._convolved(x, taps, 0)), taps, 1)

    def _convolved(self, y: mx.array, taps: mx.array, side: int) -> mx.array:
        shape = y.shape
        y = y.reshape(*shape[:2], self._groups, -1)
        base = self.base_kernel[side].reshape(self._taps, self._groups, -1)
        out = mx.zeros_like(y)
        for back in range(min(self._taps, shape[1])):
            before = mx.pad(y, [(0, 0), (back, 0), (0, 0), (0, 0)])[:, : shape[1]]
            out = out + (base[back] + taps[:, :, side, back]) * before
        return out.reshape(shape)


class ConvolvedLayer(HeadLayer):
    """A decoder layer with convolutions around attention and MLP."""

    def __init__(self, config: DFlash2Config):
        super().__init__(config.sizes)
        sizes = config.sizes.hidden_size, config.taps, config.group
        self.attention_conv = BlockConvolution(*sizes)
        self.mlp_conv = BlockConvolution(*sizes)

    def around(self, x: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        """The layer's output for ``x``, with ``attend`` as its attention."""
        h = x + self.attention_conv.around(self.input_layernorm(x), attend)
        normed = self.post_attention_layernorm(h)
        out: mx.array = h + self.mlp_conv.around(normed, self.mlp)
        return out


class CandidateSelector(nn.Module):
    """Scores of candidates that depend on the token before.

    Args:
        config: the head's configuration.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = config.candidates
        self.predecessor_codebook = mx.zeros((config.vocab_size, config.rank))
        self.successor_codebook = mx.zeros((config.vocab_size, config.rank))
        self.hidden_projection = nn.Linear(
            config.sizes.hidden_size, config.rank, bias=False
        )

    def walk(self, logits: mx.array, states: mx.array, anchor: mx.array) -> Walk:
        """Logits of slot after slot, see :meth:`BlockHead.walk`."""
        logits = logits.astype(mx.float32)
        ids = mx.argpartition(-logits, self._count - 1, axis=-1)[..., : self._count]
        likely = mx.take_along_axis(logits, ids, axis=-1)
        projected = self.hidden_projection(states).astype(mx.float32)
        after = self.successor_codebook[ids].astype(mx.float32)

        def scored(proposed: Sequence[mx.array]) -> mx.array:
            j = len(proposed)
            before, here = proposed[-1] if proposed else anchor, slice(j, j + 1)
            mixed = self.predecessor_codebook[before] * projected[:, here]
            scores = likely[:, here] + (after[:, here] @ mixed[..., None])[..., 0]
            rest = logits[:, here] - _BELOW
            return mx.put_along_axis(rest, ids[:, here], scores, axis=-1)

        return scored


class DFlash2Head(BlockHead):
    """A DFlash 2 head."""

    args: DFlash2Config

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def _layer(self, config: Any) -> HeadLayer:
        return ConvolvedLayer(config)

    def begin_as_dflash(self) -> None:
        """Let convolutions pass their input on, and let the selector add nothing."""
        for layer in self.layers:
            for part in (layer.attention_conv, layer.mlp_conv):
                kernel = part.kernel_projection
                kernel.weight = mx.zeros_like(kernel.weight)
                base = mx.zeros_like(part.base_kernel)
                base[:, 0] = 1
                part.base_kernel = base
        selector = self.candidate_selector
        codebook = selector.successor_codebook
        selector.successor_codebook = mx.zeros_like(codebook)

    @property
    def bias_matrix(self) -> mx.array:
        """The successors' codebook: training scores all tokens, not candidates."""
        codebook: mx.array = self.candidate_selector.successor_codebook
        return codebook

    def bias_input(self, before: mx.array, states: mx.array) -> mx.array:
        """See :meth:`BlockHead.bias_input`."""
        part = self.candidate_selector
        first: mx.array = part.predecessor_codebook.astype(mx.float32)[before]
        return first * part.hidden_projection(states)

    @property
    def in_order(self) -> bool:
        """Each token depends on the one chosen before it."""
        return True

    def walk(self, states: mx.array, anchor: mx.array) -> Walk:
        """Logits of slot after slot, see :meth:`BlockHead.walk`."""
        return self.candidate_selector.walk(self.logits(states), states, anchor)


def dflash2_config(published: Published) -> DFlash2Config:
    """The configuration of a DFlash 2 head."""
    values = block_values(published, published.sizes())
    size, vocab_size = values["sizes"].hidden_size, values["vocab_size"]
    group: int = published.required("conv_group_size")
    candidates: int = published.required("selector_top_k")
    if size % group:
        raise DataError(f"conv_group_size is {group}, which does not divide {size}")
    if candidates > vocab_size:
        raise DataError(f"selector_top_k is {candidates}: it has {vocab_size} tokens")
    if values["draft_vocab_size"] != vocab_size:
        raise UnsupportedModelError(
            f"{published.source} is a DFlash 2 head of {values['draft_vocab_size']} of "
            f"{vocab_size} tokens: only heads of all tokens are supported"
        )
    return DFlash2Config(
        **values | {"kind": "DFlash 2", "raw_embedding": True},
        taps=published.required("conv_kernel_size"),
        group=group,
        rank=published.required("selector_rank"),
        candidates=candidates,
    )
