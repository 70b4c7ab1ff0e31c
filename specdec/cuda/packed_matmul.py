"""Products of few rows with packed weights, by a CUDA kernel of our own.

For several rows, MLX's kernels take that many times as long as for one, or take half a
minute to compile. This kernel reads each weight once for up to 64 rows, on Hopper for
up to 160, with tensor cores; see :mod:`.packed_matmul_source`. A single row is left to
MLX where MLX is faster.

Each row is summed in float32 in an order that depends on the matrix alone. So the
kernel's product of a row has the same bits alone, in a batch, or as one of the tokens
of a verification.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import product as product_of
from math import inf
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from . import choices
from . import packed_matmul_source as text
from .kernel_files import architecture
from .kernels import (
    CELL,
    COLUMN,
    TYPES,
    WRITE,
    cuda_kernel,
    last_columns,
    parts_of,
    tensor_cores,
    whole_shape,
)
from .proofs import Proofs, close

#: What the kernel supports: bits of a number, and numbers that share a scale.
BITS, GROUPS = (4, 8), (32, 64, 128)
# The most rows of a product that the kernel computes, where it was not timed beside
# unpacking; for more rows the matrix is unpacked, if it has at most MOST_UNPACKED
# numbers. Both are timed with some of TIMED_ROWS rows. Of fewer, the kernel takes two
# thirds of the time or less (benchmarks/results/packed-h200.md).
MOST_ROWS, MOST_UNPACKED = 192, 2**27
TIMED_ROWS, MOST_HELD = (128, 192, 256), 4
# For one row, MLX's kernel, which is compiled already, is faster with fewer than
# FEWEST_ALONE numbers of 4 bits, and about as fast with 8 bits (one H100).
FEWEST_ALONE = 2**23
# On Hopper, MLX takes that kernel only if no side of the matrix is longer (its
# quantized.cpp). Otherwise it compiles another one, for half a minute.
LONGEST_ALONE = 16384
# A tensor core's product takes TILE rows of x. A block takes WIDEST times as many, or
# TILE where there are no more; each is its own kernel. A block has at most WARPS warps,
# each for COLUMNS columns of the result.
TILE, WIDEST, COLUMNS, WARPS = 8, 8, 32, 8
# Of more than MOST_APART rows, a block takes one of MANY times TILE on Hopper, where
# four warps can multiply together.
MOST_APART, MANY, HOPPER = 64, (12, 16, 20), "sm_90a"
# K is split into pieces until there are ALL_WARPS warps: eight for each of an H200's
# multiprocessors. A piece has at least two turns.
ALL_WARPS = 1056
# Threads of a block that adds up the sums of pieces.
THREADS = 128
#: The most pairs of a token and an expert in one product with experts. A block has at
#: most EXPERT_WARPS warps, since there are many blocks (one H100: 4 take a tenth more
#: time, 8 a half).
MOST_PAIRS, EXPERT_WARPS = 8192, 2
# With more than FEW_PAIRS of each expert, a block takes EXPERT_WIDE times TILE of them
# at once, by WIDE_WARPS warps.
FEW_PAIRS, EXPERT_WIDE, WIDE_WARPS = 12, 4, 4


@cache
def _kernel(dtype: mx.Dtype, bits: int) -> Any:
    return cuda_kernel(
        f"packed_{bits}_{TYPES[dtype]}",
        _source(text.ROWS, CELL, text.BY_WARPS, column=COLUMN),
        ("x", "weight", "scales", "biases", "bias", "ends"),
        ("out",),
        header=_header(dtype, bits),
    )


@cache
def _many_kernel(dtype: mx.Dtype, bits: int, wide: int) -> Any:
    header = _header(dtype, bits) + text.together(TYPES[dtype], wide)
    return cuda_kernel(
        f"packed_many_{bits}_{TYPES[dtype]}",
        _source(text.ROWS, CELL, text.BY_FOUR_WARPS, column=COLUMN),
        ("x", "arranged", "weight", "scales", "biases", "bias", "ends"),
        ("out",),
        header=header,
    )


@cache
def _arranging(dtype: mx.Dtype, bits: int) -> Any:
    return cuda_kernel(
        f"packed_arrange_{bits}_{TYPES[dtype]}",
        text.ARRANGE,
        ("x",),
        ("out",),
        header=_header(dtype, bits),
    )


@cache
def _expert_kernel(dtype: mx.Dtype, bits: int, gated: bool, shared: bool) -> Any:
    arrays = ["weight", "scales", "biases"]
    if gated:
        arrays += [f"up_{name}" for name in arrays]
    if shared:
        arrays += [f"shared_{name}" for name in arrays]
    matrices = text.TWO_MATRICES if gated else text.ONE_MATRIX
    either = r"(of_shared ? shared_\1 : \1)" if shared else r"\1"
    matrices = re.sub(r"SHARED_OF\((\w+)\)", either, matrices)
    write = text.GATED_WRITE if gated else text.EXPERT_WRITE
    rows = text.EXPERT_ROWS.replace("@MATRICES@", matrices)
    name = "packed_experts" + "_gated" * gated + "_shared" * shared
    return cuda_kernel(
        f"{name}_{bits}_{TYPES[dtype]}",
        _source(rows, write, text.BY_WARPS, gated=gated, shared=shared),
        ("x", "indices", *arrays),
        ("out",),
        header=_header(dtype, bits),
    )


def _source(
    rows: str,
    cell: str,
    products: str,
    *,
    column: str = "",
    gated: bool = False,
    shared: bool = False,
) -> str:
    source = text.SOURCE.replace("@PRODUCTS@", products)
    sums = text.SUMS.replace("@COLUMN@", column).replace("@CELL@", cell)
    source = source.replace("@SUMS@", sums)
    source = source.replace("@ROWS@", rows).replace("@WRITE@", column + cell)
    source = source.replace("@GATED@", str(int(gated)))
    source = source.replace("@SHARED@", str(int(shared)))
    return source.replace("@MOST_PAIRS@", str(MOST_PAIRS))


def _header(dtype: mx.Dtype, bits: int) -> str:
    unpacking = text.unpacking(bits, half=dtype == mx.float16)
    return tensor_cores(dtype) + unpacking + text.HEADER


@cache
def _gathering(dtype: mx.Dtype) -> Any:
    return cuda_kernel(
        f"packed_gather_{TYPES[dtype]}",
        text.GATHER.replace("@WRITE@", WRITE),
        ("pieces", "bias", "ends"),
        ("out",),
    )


def product(
    x: mx.array,
    packed: Sequence[mx.array],
    bias: mx.array | None = None,
    *,
    bits: int,
    group_size: int,
    ends: tuple[int, ...] = (),
    pieces: int | None = None,
    together: bool | None = None,
) -> list[mx.array]:
    """x (..., K) times packed weights (N, K) transposed, plus bias (N,).

    Each weight is rounded to x's type, as when the matrix is unpacked. Each sum, bias
    included, is in float32 and rounded once.

    Args:
        x: bfloat16 or float16, like all other arrays except the packed numbers.
        packed: numbers, scales and biases of :func:`mx.quantize`, shapes
            (N, K * bits / 32) and (N, K / group_size).
        ends: the row of ``weight`` after which each stacked matrix ends.
        pieces: of K, at most WARPS, and as many as K has turns; ``None``:
            :func:`num_pieces`.
        together: whether four warps multiply together; ``None``: for more than
            MOST_APART rows, where that was found right. The bits are the same.

    Returns:
        One array (..., N), or one for each matrix, without gaps between its rows.
    """
    weight, scales, biases = packed
    columns, length = weight.shape[0], x.shape[-1]
    rows = x.size // length
    if pieces is None:
        pieces = num_pieces(columns, length, bits)
    else:
        pieces = min(pieces, num_turns(length, bits), WARPS)
    few = rows <= TILE
    # Of few rows, a block's warps take the pieces; of more, each block has one piece.
    warps, across, blocks = (pieces, 1, 1) if few else (WARPS, WARPS, pieces)
    tiles = _tiles(rows)
    if together is None:
        form = Form(x.dtype, bits, group_size, eights=False, tiles=tiles)
        together = rows > MOST_APART and proven.reached(form)
    wide = tiles if together else 1 if few else WIDEST
    ends = ends or (columns,)
    shape = whole_shape(x.shape, ends)
    # A matrix in place of the bias stands for no bias, which saves compiling a kernel.
    added = scales if bias is None else bias
    limits = last_columns(ends)
    inputs = [x, weight, scales, biases, added, limits]
    if together:
        inputs.insert(1, _arranged(x, bits, wide))
        kernel = _many_kernel(x.dtype, bits, wide)
    else:
        kernel = _kernel(x.dtype, bits)
    (out,) = kernel(
        inputs=inputs,
        template=[
            ("T", x.dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            ("WIDE", wide),
            ("WARPS", WARPS),
            ("IN_TURN", 0),
            ("EIGHTS", not together and _by_eights(scales.shape[1])),
        ],
        grid=(
            -(-columns // (COLUMNS * across)) * 32 * warps,
            blocks,
            -(-rows // (TILE * wide)),
        ),
        threadgroup=(32 * warps, 1, 1),
        # A number of 32 bits takes the place of two.
        output_shapes=[(blocks, rows, columns, 2) if blocks > 1 else shape],
        output_dtypes=[x.dtype],
    )
    if blocks > 1:
        (out,) = _gathering(x.dtype)(
            inputs=[out, added, limits],
            template=[("T", x.dtype)],
            grid=(-(-columns // THREADS) * THREADS, rows, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[shape],
            output_dtypes=[x.dtype],
        )
    return parts_of(out, x.shape, ends)


def _tiles(rows: int) -> int:
    """Tiles of x that a block takes where four warps multiply together."""
    blocks = -(-rows // (TILE * MANY[-1]))
    return next(wide for wide in MANY if TILE * wide * blocks >= rows)


def _arranged(x: mx.array, bits: int, wide: int) -> mx.array:
    """x in the order in which :data:`text.BY_FOUR_WARPS` reads it."""
    length, height = x.shape[-1], TILE * wide
    blocks = -(-x.size // length // height)
    steps = num_turns(length, bits) * (16 // bits)
    (out,) = _arranging(x.dtype, bits)(
        inputs=[x],
        template=[("BITS", bits), ("WIDE", wide)],
        grid=(wide * THREADS, -(-steps // (THREADS // TILE)), blocks),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(blocks, steps, 4, height, TILE)],
        output_dtypes=[x.dtype],
    )
    arranged: mx.array = out
    return arranged


def expert_product(
    x: mx.array,
    packed: Sequence[mx.array],
    indices: mx.array,
    *,
    bits: int,
    group_size: int,
    up: Sequence[mx.array] = (),
    shared: Sequence[mx.array] = (),
    pieces: int | None = None,
    wide: bool | None = None,
) -> mx.array:
    """x (..., 1, K) times the packed matrices (E, N, K), transposed, that indices name.

    Each matrix is read once for every eight of its pairs, or for EXPERT_WIDE times as
    many, in whatever order they come. A pair's sum has the same bits whatever is
    beside it.

    Args:
        x: a row for each of the indices (and of the shared expert), or for each of
            their rows; as in :func:`product`.
        packed: numbers, scales and biases of :func:`mx.quantize`, shapes
            (E, N, K * bits / 32) and (E, N, K / group_size).
        indices: of matrices that exist, at most MOST_PAIRS, one dimension or more.
        up: matrices like ``packed``: the result is silu(x packed) * (x up).
        shared: matrices like ``packed`` (and ``up``), of an expert that all rows of
            indices use as their last; (N, ...) each.
        pieces: of K; ``None``: by the matrices' shape.
        wide: whether a block takes many pairs at once; ``None``: by their number.

    Returns:
        An array (*indices.shape, 1, N); with a shared expert one more in the dimension
        before the last two.
    """
    if indices.size > MOST_PAIRS:
        raise ValueError(f"{indices.size} pairs: at most {MOST_PAIRS} are computed")
    experts, columns, groups = packed[1].shape
    length = groups * group_size
    if pieces is None:
        pieces = num_pieces(columns, length, bits)
    pieces = min(pieces, num_turns(length, bits), EXPERT_WARPS)
    if wide is None:
        wide = indices.size > FEW_PAIRS * experts
    tiles, warps = (EXPERT_WIDE, WIDE_WARPS) if wide else (1, pieces)
    of_block = COLUMNS // (2 if up else 1) * (WIDE_WARPS if wide else 1)
    *rows, used = indices.shape
    blocks = min(indices.size, experts)
    if shared:
        blocks += -(-indices.size // used // (TILE * tiles))
    (out,) = _expert_kernel(x.dtype, bits, bool(up), bool(shared))(
        # MLX finds compiled kernels by name, whatever the inputs' types are.
        inputs=[x, indices.astype(mx.uint32), *packed, *up, *shared],
        template=[
            ("T", x.dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            ("WIDE", tiles),
            ("WARPS", WIDE_WARPS if wide else EXPERT_WARPS),
            ("IN_TURN", pieces if wide else 0),
            ("EIGHTS", _by_eights(groups)),
        ],
        grid=(-(-columns // of_block) * 32 * warps, 1, blocks),
        threadgroup=(32 * warps, 1, 1),
        output_shapes=[(*rows, used + bool(shared), 1, columns)],
        output_dtypes=[x.dtype],
    )
    product: mx.array = out
    return product


def _by_eights(groups: int) -> bool:
    """Whether the kernel loads eight scales of a row at once: its own variant."""
    return groups % 8 == 0


def num_turns(length: int, bits: int) -> int:
    """Turns of a whole row; in one, a warp loads 512 bits of each row."""
    return -(-length // (512 // bits))


def num_pieces(columns: int, length: int, bits: int) -> int:
    """Pieces of K. They depend on the matrix alone, as a row's sum must."""
    warps = -(-columns // COLUMNS)
    return max(1, min(ALL_WARPS // warps, num_turns(length, bits) // 2, WARPS))


def of_layer(
    layer: nn.Module, x: mx.array, ends: tuple[int, ...] = ()
) -> list[mx.array]:
    """The product of x (..., K) with a quantized layer, see :func:`product`.

    For many rows the matrix is unpacked first. MLX compiles a kernel for packed
    products when it first meets a layer's bits, groups and type, which takes half a
    minute; its dense products are compiled already.
    """
    packed = layer["weight"], layer["scales"], layer["biases"]
    bias, rows = layer.get("bias"), x.size // x.shape[-1]
    bits, group_size = layer.bits, layer.group_size
    if rows < TIMED_ROWS[0] or rows <= most_rows(layer):
        return product(x, packed, bias, bits=bits, group_size=group_size, ends=ends)
    whole = _unpacked(layer, x)
    return list(mx.split(whole, ends[:-1], axis=-1)) if len(ends) > 1 else [whole]


def _unpacked(layer: nn.Module, x: mx.array) -> mx.array:
    """The product of x with a quantized layer that is unpacked first."""
    packed, bias = (
        (layer["weight"], layer["scales"], layer["biases"]),
        layer.get("bias"),
    )
    dense = mx.dequantize(*packed, layer.group_size, layer.bits).T
    return x @ dense if bias is None else mx.addmm(bias, x, dense)


def most_rows(layer: Any) -> float:
    """The most rows whose product with a quantized layer the kernel computes."""
    kind = Kind.of(layer)
    if kind is None or kind.columns * kind.length > MOST_UNPACKED:
        return inf
    return _most_rows(lambda rows: choices.chosen(("packed rows", rows, *kind)))


def _most_rows(faster: Callable[[int], bool | None]) -> int:
    """The most rows of TIMED_ROWS at which the kernel is faster, by halving.

    ``None``: it is not known.
    """
    few, many = 0, len(TIMED_ROWS)
    while few < many:
        middle = (few + many) // 2
        ours = faster(TIMED_ROWS[middle])
        if ours is None:
            return MOST_ROWS
        few, many = (middle + 1, many) if ours else (few, middle)
    return TIMED_ROWS[few - 1] if few else TIMED_ROWS[0] - 1


class Form(NamedTuple):
    """All that the kernels are compiled for, besides the rows."""

    dtype: mx.Dtype
    bits: int
    group_size: int
    eights: bool  # see :func:`_by_eights`
    experts: bool = False
    tiles: int = 0  # of MANY; 0: the kernels for few rows


class Kind(NamedTuple):
    """All that decides how fast a layer's product is, besides the rows."""

    dtype: mx.Dtype
    bits: int
    group_size: int
    columns: int
    length: int
    experts: bool = False

    @classmethod
    def of(cls, layer: Any) -> Kind | None:
        """The kind of a quantized layer; ``None``: the kernel does not support it."""
        scales, biases = layer["scales"], layer.get("biases")
        bits, group_size = layer.bits, layer.group_size
        if (
            layer.mode != "affine"
            or bits not in BITS
            or group_size not in GROUPS
            or biases is None
            or scales.dtype not in TYPES
            or any(
                layer[name].dtype != scales.dtype
                for name in ("biases", "bias")
                if name in layer
            )
        ):
            return None
        *experts, columns, groups = scales.shape
        sizes = columns, groups * group_size
        return cls(scales.dtype, bits, group_size, *sizes, experts=bool(experts))

    @property
    def long(self) -> bool:
        """Whether MLX would compile another kernel for one row."""
        return max(self.columns, self.length) > LONGEST_ALONE

    @property
    def form(self) -> Form:
        eights = _by_eights(self.length // self.group_size)
        return Form(self.dtype, self.bits, self.group_size, eights, self.experts)

    @property
    def forms(self) -> list[Form]:
        """All that products of such layers are tried for."""
        many = Form(self.dtype, self.bits, self.group_size, eights=False)
        if self.experts or architecture() != HOPPER:
            return [self.form]
        return [self.form, *(many._replace(tiles=tiles) for tiles in MANY)]


def computes(layer: Any, x: mx.array) -> bool:
    """Whether :func:`of_layer` is to compute the layer's product with x (..., K).

    While a layer trains, MLX's product is used, which has a gradient.
    """
    if layer.training or not x.size:
        return False
    kind = Kind.of(layer)
    return (
        kind is not None
        and (x.size > kind.length or _alone(kind))
        and x.dtype == kind.dtype
        and x.shape[-1] == kind.length
        and proven.reached(kind.form)
    )


def known(layer: Any) -> bool:
    """Whether a kernel has been found right for a quantized layer."""
    kind = Kind.of(layer)
    return kind is not None and proven.reached(kind.form)


def computes_experts(layer: Any, x: mx.array, indices: mx.array) -> bool:
    """Whether :func:`expert_product` is to compute x (..., 1, K) times some experts.

    More than MOST_PAIRS pairs have to be computed in pieces.
    """
    if layer.training or not indices.size or not indices.ndim or x.shape[-2] != 1:
        return False
    kind, shape = Kind.of(layer), indices.shape
    return (
        kind is not None
        and x.shape[:-2] in (shape, (*shape[:-1], 1))
        and x.dtype == kind.dtype
        and x.shape[-1] == kind.length
        and proven.reached(kind.form)
    )


def _alone(kind: Kind) -> bool:
    """Whether one row is left to the kernel."""
    ours = choices.chosen(("packed row", *kind))
    return _usual_alone(kind) if ours is None else ours


def _usual_alone(kind: Kind) -> bool:
    if kind.long:
        return True
    return kind.bits == 4 and kind.columns * kind.length >= FEWEST_ALONE


def choose(layers: Sequence[Any]) -> None:
    """Time products by the kernel and in MLX's ways, for layers of one kind.

    MLX's product with packed weights is timed for one row alone: for more, compiling
    its kernel takes half a minute. Of many rows, the kernel is timed beside unpacking.
    """
    kind = Kind.of(layers[0])
    if kind is None or not proven.reached(kind.form):
        return
    some = layers[: choices.MATRICES]

    def ours(layer: Any, x: mx.array) -> mx.array:
        packed = layer["weight"], layer["scales"], layer["biases"]
        of = {"bits": layer.bits, "group_size": layer.group_size}
        return product(x, packed, layer.get("bias"), **of)[0]

    def theirs(layer: Any, x: mx.array) -> mx.array:
        return mx.quantized_matmul(
            x,
            layer["weight"],
            layer["scales"],
            layer["biases"],
            group_size=kind.group_size,
            bits=kind.bits,
        )

    def compare(
        name: choices.Kind, rows: int, other: Any, *, usual: bool
    ) -> bool | None:
        x = mx.ones((rows, kind.length), kind.dtype)
        # MLX may hold all that a chain unpacks, and unpacks a matrix once for a graph.
        count = choices.PRODUCTS if rows == 1 else min(MOST_HELD, len(some))
        by_ours, by_other = (
            choices.chained([partial(each, layer) for layer in some], x, count)
            for each in (ours, other)
        )
        choices.choose((*name, *kind), [(by_ours, by_other)], usual=usual)
        return choices.chosen((*name, *kind))

    if not kind.long:
        compare(("packed row",), 1, theirs, usual=_usual_alone(kind))
    if kind.columns * kind.length <= MOST_UNPACKED:
        _most_rows(
            lambda rows: compare(
                ("packed rows", rows), rows, _unpacked, usual=rows <= MOST_ROWS
            )
        )


def proofs_of(layers: Iterable[Any]) -> list[Callable[[], bool]]:
    """The proofs that :func:`tried` asks for: one for each form of packed weights."""
    kinds = filter(None, map(Kind.of, layers))
    return proven.of(form for kind in kinds for form in kind.forms)


def tried(layer: Any) -> bool:
    """Whether the kernel computes a quantized layer's products; it is tried here."""
    kind = Kind.of(layer)
    if kind is None:
        return False
    first, *_ = [proven(form) for form in kind.forms]
    return first


def _agree(form: Form) -> bool:
    """Whether the kernels compute what they should.

    Each kernel that can be launched is tried: with few rows and many, with K shared
    among blocks and not, with and without a bias, whole and in parts, and for an array
    that begins where 16 bytes cannot be loaded at once.
    """
    if form.experts:
        return _experts_agree(form)
    heights = (TILE * form.tiles - 3,) if form.tiles else (0, 1, 5, 20)
    return all(
        _agrees(columns, rows, pieces, form)
        for (columns, pieces), rows in product_of(_SIZES, heights)
    )


# Columns of the result, and pieces of K.
_SIZES = ((72, 3), (200, 1), (40, WARPS))


def _agrees(columns: int, rows: int, pieces: int, form: Form) -> bool:
    """Whether a product equals the product with the unpacked numbers.

    Where four warps multiply together, a row has the same bits as of fewer rows. No
    rows stand for one row that begins anywhere.
    """
    anywhere, rows = rows == 0, max(rows, 1)
    dtype, bits, group_size, eights, _, tiles = form
    # With one group more, K may end within a turn.
    length = group_size * (24 if eights else 25)
    x, dense, bias = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
        for i, shape in enumerate([(rows, length), (columns, length), (columns,)])
    )
    packed = mx.quantize(dense, group_size, bits)
    scales, biases = (p.astype(mx.float32) for p in packed[1:])
    unpacked = mx.dequantize(packed[0], scales, biases, group_size, bits)
    exact = x.astype(mx.float32) @ unpacked.T
    if anywhere:
        x = mx.concatenate([x[:, :1], x], axis=1)[:, 1:]
    compute = partial(
        product,
        x,
        packed,
        bits=bits,
        group_size=group_size,
        pieces=pieces,
        together=tiles > 0,
    )
    whole, parts = compute(), compute(bias, ends=(8, 11, columns))
    if tiles and not mx.array_equal(whole[0], compute(together=False)[0]).item():
        return False
    both = (
        (whole[0], exact),
        (mx.concatenate(parts, axis=-1), exact + bias.astype(mx.float32)),
    )
    return all(close(found, right, 0.01) for found, right in both)


def _experts_agree(form: Form) -> bool:
    """Whether the kernel with experts computes what it should.

    With fewer pairs than experts and with more, and with more of one expert than a
    warp lists at once; for a row of x for each pair, or for each token.
    """
    dtype, bits, group_size, eights, *_ = form
    length, columns, experts = group_size * (24 if eights else 25), 72, 3
    shapes = ((40, 1, 1, length), (experts, columns, length))
    x, dense = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
        for i, shape in enumerate(shapes)
    )
    packed = mx.quantize(dense, group_size, bits)
    scales, biases = (p.astype(mx.float32) for p in packed[1:])
    matrices = mx.dequantize(packed[0], scales, biases, group_size, bits)
    chosen = mx.array([[2, 0]] + [[1, i % 2] for i in range(39)], mx.uint32)
    for tokens, pieces in ((1, 2), (40, 1)):
        some = chosen[:tokens]
        for rows in (x[:tokens], mx.concatenate([x[:tokens]] * 2, axis=1)):
            ours = expert_product(
                rows, packed, some, bits=bits, group_size=group_size, pieces=pieces
            )
            with mx.stream(mx.cpu):  # where indexing is compiled already
                exact = rows.astype(mx.float32) @ matrices[some].swapaxes(-1, -2)
            if not close(ours, exact, 0.01):
                return False
    return True


proven = Proofs[Form](
    "packed",
    _agree,
    lambda f: f.dtype in TYPES and f.bits in BITS and f.group_size in GROUPS,
)
