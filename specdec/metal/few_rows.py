"""Products of 2 to 16 rows with packed weights, by a Metal kernel of our own.

MLX's kernels read each weight for up to 5 rows at once, or compute tiles of 32 rows
(docs/apple-silicon.md). This one reads each weight once for up to 16 rows, and computes
tiles of 8.

The product is W (N, K) times x (M, K) transposed, in matrices of 8 x 8 that the lanes
of a SIMD group hold together, with weights on the left. Lanes load whole words: a
lane's part of K is 8 numbers in a row, and matrix t takes the numbers t and t + 4 of
each part. Products are of x and of the packed integers themselves, which are exact; a
group's scale and bias are applied once: y += scale * (q . x) + bias * sum(x). A
threadgroup computes ``8 * COLUMNS`` columns. Its PIECES SIMD groups share K, and their
sums are added in order.

A row's sums run in an order that only the matrix decides, and what is fused is written
out. So a row has the same bits whatever is computed beside it. No speed was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..cuda.to_metal import metal_kernel

#: What the kernel supports: bits of a number, numbers that share a scale, and rows.
BITS, GROUPS, MOST_ROWS = (4, 8), (32, 64, 128), 16
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
#: The numbers of rows of which each is on or off, by :mod:`.trial`.
BANDS = ((2, 4), (5, 8), (9, 16))
# SIMD groups that share K; columns of a threadgroup, in eights.
PIECES, COLUMNS = 4, 2
# MLX hands arrays of fewer elements to a kernel in another address space.
_FEWEST_ELEMENTS = 8

HEADER = """
// Four elements in a row, as the matrices' type.
template <typename F, typename T>
METAL_FUNC metal::vec<F, 4> four_of(const device T* at) {
  const metal::vec<T, 4> v = *reinterpret_cast<const device metal::vec<T, 4>*>(at);
  return metal::vec<F, 4>(F(v[0]), F(v[1]), F(v[2]), F(v[3]));
}

// The numbers t and t + 4 of eight packed ones.
template <typename F, int BITS>
METAL_FUNC metal::vec<F, 2> pair_of(const thread uint32_t* words, int t) {
  const uint32_t last = words[BITS == 8 ? 1 : 0] >> (BITS == 8 ? 0 : 16);
  const uint32_t mask = (1u << BITS) - 1;
  return metal::vec<F, 2>(F((words[0] >> (BITS * t)) & mask),
                          F((last >> (BITS * t)) & mask));
}
"""
SOURCE = """
  constexpr int TURN = GROUP < 64 ? GROUP : 64;  // numbers of K in a turn
  constexpr int PARTS = TURN / 32;               // of 8 numbers that a lane loads
  constexpr int WORDS = BITS / 4;                // of 32 bits in a part
  const int M = x_shape[0], K = x_shape[1], N = w_shape[0];
  const int lane = thread_index_in_simdgroup, piece = simdgroup_index_in_threadgroup;
  // What a lane holds of a matrix: two neighbours, at (row, column).
  const int row = (lane & 16) / 4 + ((lane / 2) & 3);
  const int column = (lane & 8) / 2 + (lane & 1) * 2;
  const int first = threadgroup_position_in_grid.x * (8 * CT);
  const int groups = K / GROUP;

  // Rows and columns that there are not are computed as the last one, and not written.
  const device uint32_t* words[CT];
  const device T* scale_of[CT];
  const device T* bias_of[CT];
  for (int c = 0; c < CT; ++c) {
    const int n = metal::min(first + 8 * c + row, N - 1);
    words[c] = w + n * (K / 8 * WORDS) + column / 2 * (PARTS * WORDS);
    scale_of[c] = scales + n * groups;
    bias_of[c] = biases + n * groups;
  }
  const device T* xs[MT][2];
  for (int r = 0; r < MT; ++r)
    for (int i = 0; i < 2; ++i)
      xs[r][i] = x + metal::min(8 * r + column + i, M - 1) * K +
                 (row >> 1) * (TURN / 4) + (row & 1) * 4;

  float sums[CT][MT][2] = {};
  const int end = (piece + 1) * groups / P;
  for (int g = piece * groups / P; g < end; ++g) {
    metal::simdgroup_matrix<float, 8, 8> dots[CT][MT];
    for (int c = 0; c < CT; ++c)
      for (int r = 0; r < MT; ++r)
        dots[c][r] = metal::simdgroup_matrix<float, 8, 8>(0.0f);
    float totals[MT][2] = {};
    for (int k = g * GROUP; k < (g + 1) * GROUP; k += TURN) {
      for (int i = 0; i < PARTS; ++i) {
        uint32_t packed[CT][WORDS];
        for (int c = 0; c < CT; ++c)
          for (int j = 0; j < WORDS; ++j)
            packed[c][j] = words[c][(k / 8 + i) * WORDS + j];
        metal::vec<F, 4> part[MT][2];
        for (int r = 0; r < MT; ++r)
          for (int j = 0; j < 2; ++j) {
            const metal::vec<F, 4> four = four_of<F>(xs[r][j] + k + 8 * i);
            part[r][j] = four;
            totals[r][j] +=
                (float(four[0]) + float(four[1])) + (float(four[2]) + float(four[3]));
          }
        for (int t = 0; t < 4; ++t) {
          metal::simdgroup_matrix<F, 8, 8> a[CT], b;
          for (int c = 0; c < CT; ++c)
            reinterpret_cast<thread metal::vec<F, 2>&>(a[c].thread_elements()) =
                pair_of<F, BITS>(packed[c], t);
          for (int r = 0; r < MT; ++r) {
            reinterpret_cast<thread metal::vec<F, 2>&>(b.thread_elements()) =
                metal::vec<F, 2>(part[r][0][t], part[r][1][t]);
            for (int c = 0; c < CT; ++c)
              metal::simdgroup_multiply_accumulate(dots[c][r], a[c], b, dots[c][r]);
          }
        }
      }
    }
    for (int r = 0; r < MT; ++r)
      for (int j = 0; j < 2; ++j) {
        // Over the eight lanes that hold other parts of K of this row of x.
        float total = totals[r][j];
        total += metal::simd_shuffle_xor(total, 2);
        total += metal::simd_shuffle_xor(total, 4);
        total += metal::simd_shuffle_xor(total, 16);
        for (int c = 0; c < CT; ++c) {
          thread auto& pair = dots[c][r].thread_elements();
          const float dot = reinterpret_cast<thread metal::vec<float, 2>&>(pair)[j];
          sums[c][r][j] =
              metal::fma(float(scale_of[c][g]), dot,
                         metal::fma(float(bias_of[c][g]), total, sums[c][r][j]));
        }
      }
  }

  threadgroup float parts[P][8 * MT][8 * CT];
  for (int c = 0; c < CT; ++c)
    for (int r = 0; r < MT; ++r)
      for (int j = 0; j < 2; ++j)
        parts[piece][8 * r + column + j][8 * c + row] = sums[c][r][j];
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int at = 32 * piece + lane; at < 64 * CT * MT; at += 32 * P) {
    const int m = at / (8 * CT), n = at % (8 * CT);
    float sum = parts[0][m][n];
    for (int p = 1; p < P; ++p) sum += parts[p][m][n];
    if (m < M && first + n < N) y[m * N + first + n] = T(sum);
  }
"""


class Kind(NamedTuple):
    """What a product is compiled and timed for; 0 bits: a matrix that is not packed."""

    bits: int
    group_size: int
    dtype: mx.Dtype
    columns: int
    length: int

    @classmethod
    def of(cls, layer: Any) -> Kind | None:
        """The kind of a quantized layer's matrix; ``None``: not for this kernel."""
        if getattr(layer, "mode", None) != "affine" or layer["weight"].ndim != 2:
            return None
        scales = layer["scales"]
        columns, groups = scales.shape
        length = groups * layer.group_size
        kind = cls(layer.bits, layer.group_size, scales.dtype, columns, length)
        return kind if kind.fits else None

    @classmethod
    def read(cls, wire: Sequence[Any]) -> Kind:
        """The kind that :meth:`wire` described."""
        bits, group_size, dtype, columns, length = wire
        return cls(bits, group_size, getattr(mx, dtype), columns, length)

    def wire(self) -> list[int | str]:
        """The kind in values for JSON."""
        dtype = str(self.dtype).rpartition(".")[2]
        return [self.bits, self.group_size, dtype, self.columns, self.length]

    @property
    def fits(self) -> bool:
        """Whether the kernel computes such products."""
        return (
            self.bits in BITS
            and self.group_size in GROUPS
            and self.dtype in DTYPES
            and self.columns * self.length // self.group_size >= _FEWEST_ELEMENTS
            and self.columns * self.length * self.bits // 32 < 2**31
        )

    @property
    def name(self) -> str:
        """A name for verdicts and reports."""
        bits, group_size, dtype, columns, length = self.wire()
        packed = f"{bits} bits by {group_size}, " if bits else ""
        return f"{packed}{dtype}, {columns} x {length}"


@cache
def _kernel() -> Any:
    arrays = "w", "scales", "biases", "x"
    return metal_kernel("few_rows", SOURCE, arrays, ("y",), header=HEADER)


def product(
    x: mx.array,
    packed: Sequence[mx.array],
    *,
    bits: int,
    group_size: int,
    pieces: int = PIECES,
    columns: int = COLUMNS,
) -> mx.array:
    """x (..., K) times packed weights (N, K) transposed, for up to 16 rows of x.

    Args:
        x: float32, bfloat16 or float16, as scales and biases.
        packed: numbers, scales and biases of :func:`mx.quantize`, shapes
            (N, K * bits / 32) and (N, K / group_size).
        pieces: SIMD groups of a threadgroup, which share K.
        columns: of a threadgroup, in eights.

    Returns:
        An array (..., N) of x's type; sums are in float32 and rounded once.
    """
    weight, scales, biases = packed
    flat = x.reshape(-1, x.shape[-1])
    rows, width = flat.shape[0], weight.shape[0]
    matrices = mx.float16 if x.dtype == mx.float16 else mx.float32
    (out,) = _kernel()(
        inputs=[weight, scales, biases, flat],
        template=[
            ("T", x.dtype),
            ("F", matrices),
            ("BITS", bits),
            ("GROUP", group_size),
            ("MT", -(-rows // 8)),
            ("CT", columns),
            ("P", pieces),
        ],
        grid=(-(-width // (8 * columns)) * 32 * pieces, 1, 1),
        threadgroup=(32 * pieces, 1, 1),
        output_shapes=[(rows, width)],
        output_dtypes=[x.dtype],
    )
    shaped: mx.array = out.reshape(*x.shape[:-1], width)
    return shaped


def faults(kind: Kind, rows: Sequence[int]) -> str:
    """What is wrong with the kernel's products on this device; empty: nothing.

    Products of random numbers are compared with those of the unpacked matrix, in
    float32, and each row with the same row alone, bit by bit.
    """
    shapes = (MOST_ROWS, kind.length), (min(kind.columns, 520), kind.length)
    x, dense = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(kind.dtype)
        for i, shape in enumerate(shapes)
    )
    packed = mx.quantize(dense, kind.group_size, kind.bits)
    scales, biases = (p.astype(mx.float32) for p in packed[1:])
    unpacked = mx.dequantize(packed[0], scales, biases, kind.group_size, kind.bits)
    with mx.stream(mx.cpu):
        right = x.astype(mx.float32) @ unpacked.T
        most = mx.abs(right).max()

    def computed(some: mx.array) -> mx.array:
        return product(some, packed, bits=kind.bits, group_size=kind.group_size)

    alone = mx.concatenate([computed(x[i : i + 1]) for i in range(MOST_ROWS)])
    # A rounding of the result, and of float32 sums of K numbers.
    allowed = {mx.bfloat16: 2**-8, mx.float16: 2**-10, mx.float32: 2**-18}[kind.dtype]
    for number in rows:
        some = computed(x[:number])
        off = mx.abs(some.astype(mx.float32) - right[:number]).max() / most
        # Compared this way round, NaN is no agreement.
        if not (off <= allowed).item():
            return f"{number} rows are off by {off.item():.1e}"
        if not mx.array_equal(some, alone[:number]).item():
            return f"a row has other bits among {number} rows"
    return ""


#: The numbers of rows that the kernel computes, of kinds that were proven and timed.
rows_of: dict[Kind, frozenset[int]] = {}


def _computes(layer: Any, x: mx.array) -> bool:
    if layer.training or x.dtype != layer["scales"].dtype:
        return False  # the kernel has no gradient
    kind = Kind.of(layer)
    return kind is not None and x.size // x.shape[-1] in rows_of.get(kind, ())


def _of_layer(layer: Any, x: mx.array) -> mx.array:
    packed = layer["weight"], layer["scales"], layer["biases"]
    out = product(x, packed, bits=layer.bits, group_size=layer.group_size)
    return out + layer["bias"] if "bias" in layer else out


def _derived(name: str, plain: Any, method: str) -> Any:
    """A quantized layer's class whose product of few rows the kernel computes.

    Args:
        plain: mlx-lm's class of such layers, its attribute ``plain``.
        method: the name of its method for products.
    """
    usual = getattr(plain, method)

    def call(self: Any, x: mx.array) -> mx.array:
        product_of: Any = _of_layer if _computes(self, x) else usual
        out: mx.array = product_of(self, x)
        return out

    return type(name, (plain,), {"plain": plain, method: call, "__module__": __name__})


FewRowsLinear = _derived("FewRowsLinear", nn.QuantizedLinear, "__call__")
FewRowsEmbedding = _derived("FewRowsEmbedding", nn.QuantizedEmbedding, "as_linear")
KINDS: dict[type, Any] = {
    nn.QuantizedLinear: FewRowsLinear,
    nn.QuantizedEmbedding: FewRowsEmbedding,
}
