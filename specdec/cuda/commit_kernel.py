"""Computes what every row keeps of a round, by one CUDA kernel.

Its reference is some twenty operations on small arrays. Where launches bound a round,
each of them takes as long as this kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx

from .kernels import cuda_kernel
from .proofs import holds

THREADS = 32
_INPUTS = ("inputs", "chosen", "limit", "meant", "recent", "lengths", "peaks")
_OUTPUTS = ("kept", "allowed", "rejected", "packed", "next_recent", "next_lengths")
# A block commits a row. All of its threads count accepted tokens, and they share the
# copying.
_SETTLE = """
  const int width = chosen_shape[1], k = width - 1, window = recent_shape[1];
  const int row = blockIdx.x;
  const int* drafts = inputs + row * width + 1;
  const int* own = chosen + row * width;
  const int* before = recent + row * window;
  int most = min(limit[row], meant[row]);
  for (int j = 0; j < width; ++j) {
    if (!(static_cast<float>(peaks[row * width + j]) < INFINITY)) most = -1;
  }

  int accepted = 0;
  while (accepted < min(k, most) && drafts[accepted] == own[accepted]) ++accepted;
  // Less than 0 is a row that has ended, which keeps nothing.
  const int count = most < 0 ? 0 : accepted + 1;

  for (int j = threadIdx.x; j < window; j += blockDim.x) {
    const int at = count + j;
    next_recent[row * window + j] = at < window ? before[at] : own[at - window];
  }
  int* reported = packed + row * (width + 2);
  for (int j = threadIdx.x; j < width; j += blockDim.x) reported[2 + j] = own[j];
  if (threadIdx.x == 0) {
    reported[0] = kept[row] = count;
    reported[1] = allowed[row] = most;
    rejected[row] = width - count;
    next_lengths[row] = lengths[row] + count;
  }
"""


def commit(
    inputs: mx.array,
    chosen: mx.array,
    limit: mx.array,
    meant: mx.array | None,
    recent: mx.array,
    lengths: mx.array,
    peaks: mx.array | None = None,
) -> tuple[mx.array, ...]:
    """What ``specdec.spec_decode.commit.commit`` computes, its reference."""
    rows, width = chosen.shape
    peaks = chosen if peaks is None else peaks  # a whole number is finite
    outputs: list[mx.array] = cuda_kernel("commit", _SETTLE, _INPUTS, _OUTPUTS)(
        inputs=[
            # In a round without draft tokens, ``inputs`` are a view, which would be
            # copied; the kernel does not read them then.
            inputs.astype(mx.int32) if width > 1 else chosen,
            chosen,
            limit,
            limit if meant is None else meant.astype(mx.int32),
            recent,
            lengths,
            peaks,
        ],
        template=[("T", peaks.dtype)],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[
            (rows,),
            (rows,),
            (rows,),
            (rows, width + 2),
            recent.shape,
            (rows,),
        ],
        output_dtypes=[mx.int32] * len(_OUTPUTS),
    )
    return tuple(outputs)


@cache
def proven(reference: Callable[..., tuple[mx.array, ...]]) -> bool:
    """Whether the kernel runs on this device, and finds what ``reference`` does."""
    return holds("commit", partial(_agrees, reference))


def _agrees(reference: Callable[..., tuple[mx.array, ...]]) -> bool:
    inputs = mx.array([[9, 1, 2], [9, 1, 2], [9, 1, 5], [9, 1, 2]])
    chosen = mx.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [4, 5, 6]])
    limit, meant = mx.array([2, -1, 2, 2]), mx.array([1, 2, 2, 0])
    recent = mx.array([[-1, 8, 9], [-1, -1, 9], [7, 8, 9], [7, 8, 9]])
    lengths = mx.array([2, 1, 3, 4])
    peaks = mx.zeros((4, 3))
    peaks[2:, 1] = mx.array([mx.inf, mx.nan])
    for n, some, top in ((3, meant, None), (3, None, peaks), (1, None, None)):
        most = mx.minimum(limit, n - 1)
        asked = inputs[:, :n], chosen[:, :n], most, some, recent, lengths, top
        with mx.stream(mx.cpu):  # where MLX's operations are compiled already
            wanted = _read(reference(*asked))
        both = zip(_read(commit(*asked)), wanted, strict=True)
        if not all(mx.array_equal(a, b).item() for a, b in both):
            return False
    return True


def _read(outputs: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """The results that callers read: without the newest tokens of ended rows."""
    kept, limit, rejected, packed, recent, lengths = outputs
    recent = mx.where(kept[:, None] > 0, recent, -1)
    return kept, limit, rejected, packed, recent, lengths
