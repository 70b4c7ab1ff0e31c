"""Images of the rows of a batch: their embeddings, positions, and names in prefixes.

In Qwen's models an image of h x w tokens takes max(h, w) positions: its tokens have
three positions each, of time, height and width, and the text after it goes on from the
largest one (Qwen2-VL, arXiv 2409.12191, section 2.1). So after a prompt a row needs one
number, by which its positions differ from its offset (M-RoPE). Only chunks that hold an
image need three positions for each token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..cuda.modules import as_kind
from ..errors import UnsupportedModelError
from ..prompts.images import PlacedImage
from .layers import Called, calling, layers_of, path_to_trunk, with_layers

if TYPE_CHECKING:
    from .vision import ImageEncoder

#: How frequencies are shared out among the three axes: in one piece each, or in turns.
Sections = Literal["chunked", "interleaved"]
#: In which layers the tokens of an image see each other both ways: in all, in those
#: with a sliding window, or in none.
Sees = Literal["all", "windows", "none"]


@dataclass
class RowInputs:
    """What layers read in the next forward, besides the hidden states.

    Args:
        shift: what is added to each row's offset, shape (B,); ``None``: nothing.
        axes: positions of each token, shape (3, B, S), for rows where ``whole`` is
            true; ``None``: no row's.
        whole: shape (B,).
        added: for each of the first layers, what is added to its output, shape
            (B, S, D); empty: nothing.
    """

    shift: mx.array | None = None
    axes: mx.array | None = None
    whole: mx.array | None = None
    added: Sequence[mx.array] = ()

    def clear(self) -> None:
        """Let the next forward use the offsets."""
        self.shift = self.axes = self.whole = None
        self.added = ()


class RowImages:
    """The images of some rows of a model, which follow the rows.

    Args:
        encoder: embeds the images; ``None`` if there are none.
        inputs: what the model's layers read; ``None``: images are embeddings only, and
            stand where their tokens lie.
        prompts: the rows' tokens.
        images: those of each row; empty: there are none.
    """

    def __init__(
        self,
        encoder: ImageEncoder | None,
        inputs: RowInputs | None,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Sequence[PlacedImage]],
    ):
        self._encoder = encoder
        self._inputs = inputs
        self._images = images
        #: Embeddings of the next chunk's images, by their digests: the encoder may keep
        #: fewer.
        self._embeddings: dict[str, mx.array] = {}
        #: Positions of the prompts that have images, by row.
        self._axes: dict[int, np.ndarray[Any, np.dtype[np.int32]]] = {}
        #: By how much positions differ from offsets once rows are decoded: one array
        #: of shape (B,), as a further argument of a forward; or nothing.
        self.shift: tuple[mx.array, ...] = ()
        shifts = self._shifts = [0] * len(prompts)
        if inputs is not None:
            for i, placed in enumerate(images):
                if placed:
                    self._axes[i] = positions_of(len(prompts[i]), placed)
                    shifts[i] = int(self._axes[i][0, -1]) - len(prompts[i])
        self._move(shifts)

    def blank(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The prompts, with token 0 for each embedding of an image.

        Layers of Gemma 4 read embeddings of tokens besides hidden states; those of
        images are of this token.
        """
        if not any(self._images):
            return prompts
        blank = [list(prompt) for prompt in prompts]
        for prompt, placed in zip(blank, self._images, strict=True):
            for place in (place for image in placed for place in image.places):
                if place < len(prompt):
                    prompt[place] = 0
        return blank

    def named(
        self, prompts: Sequence[Sequence[int]], vocab_size: int
    ) -> Sequence[Sequence[int]]:
        """The prompts, with a number for each embedding of an image.

        The number says which image it is, by its content, and which of its embeddings.
        No token has such a number.
        """
        if not any(self._images):
            return prompts
        assert self._encoder is not None
        named = [list(prompt) for prompt in prompts]
        for prompt, placed in zip(named, self._images, strict=True):
            for image in placed:
                content = f"{self._encoder.signature}:{image.image.digest}".encode()
                digest = int.from_bytes(hashlib.sha256(content).digest()[:16], "big")
                for i, place in enumerate(image.places):
                    if place < len(prompt):
                        prompt[place] = vocab_size + (digest << 24) + i
        return named

    def _within(
        self, done: Sequence[int], valid: Sequence[int]
    ) -> list[tuple[int, PlacedImage]]:
        """The images of a chunk, each with its row."""
        return [
            (i, image)
            for i, placed in enumerate(self._images)
            for image in placed
            if image.start < done[i] + valid[i] and image.stop > done[i]
        ]

    @property
    def ends(self) -> list[int]:
        """Where the last image of each row ends: another question may follow there."""
        return [placed[-1].stop if placed else 0 for placed in self._images]

    @property
    def longest(self) -> int:
        """The tokens of the longest image that a chunk must hold as a whole."""
        if self._encoder is None or self._encoder.sees == "none":
            return 0
        each = (image for placed in self._images for image in placed)
        return max((image.stop - image.start for image in each), default=0)

    def whole(self, done: Sequence[int], valid: Sequence[int]) -> list[int]:
        """How many tokens of each row the next chunk takes, with whole images only.

        An image that does not fit is left to the next chunk; one that is longer than a
        chunk makes it longer.
        """
        counts = list(valid)
        if not self.longest:
            return counts
        for row, image in self._within(done, valid):
            end = done[row] + counts[row]
            if image.start < end < image.stop:
                at = image.start if image.start > done[row] else image.stop
                counts[row] = at - done[row]
        return counts

    def until(
        self, done: Sequence[int], valid: Sequence[int], width: int
    ) -> tuple[mx.array | None, bool]:
        """The last position that each token of a chunk sees, shape (B, width).

        ``None``: every token sees up to itself. Then whether it is so only in layers
        with a sliding window.
        """
        within = self._within(done, valid) if self.longest else []
        if not within or self._encoder is None:
            return None, False
        each = np.array(done)[:, None] + np.arange(width)
        for row, image in within:
            places = np.array(image.places) - done[row]
            inside = places[(places >= 0) & (places < valid[row])]
            each[row, inside] = image.stop - 1
        return mx.array(each.astype(np.int32)), self._encoder.sees == "windows"

    def encode(self, done: Sequence[int], valid: Sequence[int]) -> Iterator[None]:
        """Embed the images of the next chunk, yielding at times and after each one.

        Args:
            done, valid: tokens of each row before the chunk, and in it.
        """
        self._embeddings = {}
        for row, image in self._within(done, valid):
            if not _inside(image, done[row], valid[row]):
                continue  # only marks of rows and ends
            assert self._encoder is not None
            yield from self._encoder.embed(image.image)
            rows = self._encoder.embeddings_of(image.image)
            self._embeddings[image.image.digest] = rows
            yield

    def inputs(
        self,
        model: nn.Module,
        tokens: mx.array,
        done: Sequence[int],
        valid: Sequence[int],
    ) -> dict[str, mx.array]:
        """What a forward of a chunk takes besides its tokens, of shape (B, S).

        :meth:`encode` has embedded its images.
        """
        within = self._within(done, valid)
        each = self._embedded(model, tokens, done, valid, within) if within else []
        self._embeddings = {}
        # What layers read is set last: after an error, other rows would read it.
        self._set_positions(done, tokens.shape[1], within)
        if not each:
            return {}
        if self._inputs is not None:
            self._inputs.added = each[1:]
        return {"input_embeddings": each[0]}

    def _embedded(
        self,
        model: nn.Module,
        tokens: mx.array,
        done: Sequence[int],
        valid: Sequence[int],
        within: Sequence[tuple[int, PlacedImage]],
    ) -> list[mx.array]:
        """The input of the first layer, and what is added to outputs of layers."""
        trunk: Any = model
        for name in path_to_trunk(model, "the target", "reading images"):
            trunk = trunk[name]
        embedded: mx.array = trunk.embed_tokens(tokens)
        each = [embedded]
        for row, image in within:
            if inside := _inside(image, done[row], valid[row]):
                places, columns = zip(*inside, strict=True)
                rows = self._embeddings[image.image.digest][:, mx.array(places)]
                while len(each) < rows.shape[0]:
                    each.append(mx.zeros_like(embedded))
                for into, part in zip(each, rows, strict=True):
                    into[row, mx.array(columns)] = part.astype(into.dtype)
        return each

    def _set_positions(
        self,
        done: Sequence[int],
        width: int,
        within: Sequence[tuple[int, PlacedImage]],
    ) -> None:
        if self._inputs is None or not self._axes:
            return
        shift = [0] * len(done)
        for i, axes in self._axes.items():
            shift[i] = int(axes[0, min(done[i], axes.shape[1] - 1)]) - done[i]
        self._inputs.shift = mx.array(shift, mx.int32)
        if not within:
            return
        whole = {row for row, _ in within}
        each = np.zeros((3, len(done), width), np.int32)
        for i in whole:
            part = self._axes[i][:, done[i] : done[i] + width]
            each[:, i, : part.shape[1]] = part
        self._inputs.axes = mx.array(each)
        self._inputs.whole = mx.array([i in whole for i in range(len(done))])

    def _move(self, shifts: list[int]) -> None:
        self._shifts = shifts
        self.shift = (mx.array(shifts, mx.int32),) if any(shifts) else ()

    def filter(self, rows: Sequence[int]) -> None:
        """Keep only the given rows, in that order."""
        self._move([self._shifts[i] for i in rows])

    def place(self, rows: Sequence[int], other: RowImages) -> None:
        """Put the first rows of ``other`` into ``rows``."""
        shifts = list(self._shifts)
        for row, shift in zip(rows, other._shifts, strict=False):
            shifts[row] = shift
        self._move(shifts)

    def reset(self, rows: Sequence[int]) -> None:
        """Empty the given rows."""
        self._move([0 if i in rows else n for i, n in enumerate(self._shifts)])

    def extend(self, other: RowImages) -> None:
        """Append the rows of ``other``."""
        self._move([*self._shifts, *other._shifts])


def _inside(image: PlacedImage, done: int, valid: int) -> list[tuple[int, int]]:
    """The embeddings of an image in a chunk of its row, and their columns."""
    columns = enumerate(place - done for place in image.places)
    return [(i, column) for i, column in columns if 0 <= column < valid]


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
        for start, block in (
            (at, np.broadcast_to(text, (3, text.size))),
            (first, inside),
        ):
            end = min(start + block.shape[1], length + 1)
            if end > start:
                axes[:, start:end] = block[:, : end - start]
        at, following = first + cells.size, following + text.size + max(height, width)
    if at <= length:
        axes[:, at:] = np.arange(following, following + length + 1 - at)
    return axes


def with_row_inputs(
    model: nn.Module, config: Mapping[str, Any], sections: Sections, name: str
) -> tuple[nn.Module, RowInputs]:
    """A twin of a model that shares its weights, and what its layers read.

    The twin takes the rows' shift as a second argument, which compiled forwards pass.

    Raises:
        UnsupportedModelError: the rotary embedding is of another kind.
    """
    text = config.get("text_config") or config
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section = scaling.get("mrope_section")
    inputs = RowInputs()
    layers = layers_of(model)
    deep = len(
        (config.get("vision_config") or {}).get("deepstack_visual_indexes") or ()
    )
    for i, layer in enumerate(layers):
        if i < deep:
            layers[i] = layer = calling(layer, _adding(inputs, i))
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
        if i >= deep:
            layers[i] = layer = as_kind(layer, type(layer))
        layer["self_attn"] = attention = as_kind(attention, type(attention))
        attention["rope"] = _RowRoPE(rope, inputs, _axis_of(section, sections))

    def shifted(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 2 and isinstance(args[1], mx.array):
            inputs.shift, args = args[1], args[:1]
        try:
            return usual(*args, **kwargs)
        finally:
            inputs.clear()

    return calling(with_layers(model, layers), shifted), inputs


def _adding(inputs: RowInputs, i: int) -> Called:
    """A layer's call that adds to its output (DeepStack, arXiv 2406.04334)."""

    def called(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = usual(*args, **kwargs)
        return output + inputs.added[i] if inputs.added else output

    return called


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

    def __init__(self, rope: nn.RoPE, inputs: RowInputs, axis_of: list[int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.rope = rope
        vars(self)["inputs"] = inputs
        vars(self)["axis_of"] = axis_of

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        inputs: RowInputs = vars(self)["inputs"]
        if inputs.shift is not None:
            offset = offset + inputs.shift
        usual: mx.array = self.rope(x, offset=offset)
        if inputs.axes is None or inputs.whole is None:
            return usual
        dims: Any = self.rope.dims
        base: Any = self.rope.base
        speed = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / -dims)
        at = inputs.axes[mx.array(vars(self)["axis_of"])]  # (dims / 2, B, S)
        angle = at.transpose(1, 2, 0).astype(mx.float32)[:, None] * speed
        cos, sin = mx.cos(angle), mx.sin(angle)
        a, b, rest = mx.split(x, [dims // 2, dims], axis=-1)
        turned = [a * cos - b * sin, b * cos + a * sin, rest]
        each = mx.concatenate([part.astype(x.dtype) for part in turned], axis=-1)
        return mx.where(inputs.whole[:, None, None, None], each, usual)
