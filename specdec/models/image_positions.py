"""Positions of images in rotary embeddings (M-RoPE), for each row of a batch.

In Qwen's models an image of h x w tokens takes max(h, w) positions: its tokens have
three positions each, of time, height and width, and the text after it goes on from the
largest one (Qwen2-VL, arXiv 2409.12191, section 2.1). So after a prompt a row needs one
number, by which its positions differ from its offset. Only chunks that hold an image
need three positions for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..cuda.modules import as_kind
from ..errors import UnsupportedModelError
from ..prompts.images import PlacedImage
from .layers import calling, layers_of, with_layers

#: How frequencies are shared out among the three axes: in one piece each, or in turns.
Sections = Literal["chunked", "interleaved"]


@dataclass
class RowPositions:
    """How positions in the next forward differ from the rows' offsets.

    Args:
        shift: what is added to each row's offset, shape (B,); ``None``: nothing.
        axes: positions of each token, shape (3, B, S), for rows where ``whole`` is
            true; ``None``: no row's.
        whole: shape (B,).
    """

    shift: mx.array | None = None
    axes: mx.array | None = None
    whole: mx.array | None = None

    def clear(self) -> None:
        """Let the next forward use the offsets."""
        self.shift = self.axes = self.whole = None


def positions_of(
    length: int, images: Sequence[PlacedImage]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The positions of a prompt's tokens and of the token after it, (3, length + 1).

    Args:
        length: tokens of the prompt; images may lie beyond it in part.
    """
    axes = np.zeros((3, length + 1), np.int32)
    at = following = 0
    for image in images:
        assert image.grid is not None
        height, width = image.grid
        first = image.places[0]
        text = np.arange(following, following + first - at)
        cells = np.arange(height * width)
        inside = np.stack([0 * cells, cells // width, cells % width]) + text.size
        inside += following
        for start, block in ((at, np.broadcast_to(text, (3, text.size))), (first, inside)):
            end = min(start + block.shape[1], length + 1)
            if end > start:
                axes[:, start:end] = block[:, : end - start]
        at, following = first + cells.size, following + text.size + max(height, width)
    if at <= length:
        axes[:, at:] = np.arange(following, following + length + 1 - at)
    return axes


def with_image_positions(
    model: nn.Module, config: Mapping[str, Any], sections: Sections, name: str
) -> tuple[nn.Module, RowPositions]:
    """A twin of a model that shares its weights, and the positions that it reads.

    The twin takes the rows' shift as a second argument, which compiled forwards pass.

    Raises:
        UnsupportedModelError: the rotary embedding is of another kind.
    """
    text = config.get("text_config") or config
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section = scaling.get("mrope_section")
    positions = RowPositions()
    layers = layers_of(model)
    for i, layer in enumerate(layers):
        attention = layer.get("self_attn")
        if attention is None:  # a recurrent layer
            continue
        rope = attention.get("rope")
        if type(rope) is not nn.RoPE or rope.scale != 1 or rope.traditional:
            raise UnsupportedModelError(f"{name}: its positions do not fit images")
        if not isinstance(section, list) or sum(section) != rope.dims // 2:
            raise UnsupportedModelError(
                f"{name}: mrope_section is {section}, and {rope.dims // 2} frequencies "
                "are to be shared out: leave images out"
            )
        layers[i] = layer = as_kind(layer, type(layer))
        layer["self_attn"] = attention = as_kind(attention, type(attention))
        attention["rope"] = _RowRoPE(rope, positions, _axis_of(section, sections))

    def shifted(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 2 and isinstance(args[1], mx.array):
            positions.shift, args = args[1], args[:1]
        try:
            return usual(*args, **kwargs)
        finally:
            positions.clear()

    return calling(with_layers(model, layers), shifted), positions


def _axis_of(section: Sequence[int], sections: Sections) -> list[int]:
    """For each frequency, whether it turns by time (0), height (1) or width (2)."""
    count = sum(section)
    if sections == "chunked":
        return [axis for axis, size in enumerate(section) for _ in range(size)]
    axes = [0] * count
    for axis in (1, 2):
        for i in range(axis, min(3 * section[axis], count), 3):
            axes[i] = axis
    return axes


class _RowRoPE(nn.Module):
    """A rotary embedding whose positions may differ from the cache's offset."""

    def __init__(self, rope: nn.RoPE, positions: RowPositions, axis_of: list[int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.rope = rope
        vars(self)["positions"] = positions
        vars(self)["axis_of"] = axis_of

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        positions: RowPositions = vars(self)["positions"]
        if positions.shift is not None:
            offset = offset + positions.shift
        usual: mx.array = self.rope(x, offset=offset)
        if positions.axes is None or positions.whole is None:
            return usual
        dims: int = self.rope.dims  # type: ignore[assignment]
        base: float = self.rope.base  # type: ignore[assignment]
        speed = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / -dims)
        at = positions.axes[mx.array(vars(self)["axis_of"])]  # (dims / 2, B, S)
        angle = at.transpose(1, 2, 0).astype(mx.float32)[:, None] * speed
        cos, sin = mx.cos(angle), mx.sin(angle)
        a, b, rest = mx.split(x, [dims // 2, dims], axis=-1)
        turned = [a * cos - b * sin, b * cos + a * sin, rest]
        each = mx.concatenate([part.astype(x.dtype) for part in turned], axis=-1)
        return mx.where(positions.whole[:, None, None, None], each, usual)
