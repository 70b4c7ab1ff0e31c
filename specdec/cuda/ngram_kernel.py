"""Prompt lookup as two CUDA kernels: a search, and a write of the kept tokens.

Their references are some sixty operations on small arrays, whose launches take a
millisecond of every round, whatever they compute. Each kernel is one launch.

A row keeps its tokens in a ring. Slot ``p % capacity`` holds the token of position
``p``, and slots without a token hold -1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx

from .kernels import cuda_kernel
from .proofs import holds

THREADS = 256
# A block searches a row. Each thread searches its share of the slots for the longest,
# then newest match, and the threads then compare their matches. Numbers come as an
# array, not as part of the source, so that there is one kernel to compile.
_SEARCH = """
  const int capacity = ring_shape[1];
  const int k = numbers[0], max_ngram = numbers[1], min_ngram = numbers[2];
  const int row = blockIdx.x, last = lengths[row] - 1;
  const int* own = ring + static_cast<size_t>(row) * capacity;
  const int newest = recent[row * recent_shape[1] + recent_shape[1] - 1];
  const int oldest = max(last - (capacity - 1), 0);

  int best = -1;
  for (int slot = threadIdx.x; slot < capacity; slot += blockDim.x) {
    // The newest position in this slot; before 0 where none was written.
    const int behind = ((last - slot) % capacity + capacity) % capacity;
    const int position = last - behind;
    if (position < oldest || behind == 0) continue;
    int size = 0;
    while (size < max_ngram && position - size >= oldest) {
      const int at = last - size;
      const int wanted = at == last ? newest : own[at % capacity];
      if (own[(position - size) % capacity] != wanted) break;
      ++size;
    }
    if (size >= min_ngram) best = max(best, size * capacity + (position - oldest));
  }
  __shared__ int found[THREADS];
  found[threadIdx.x] = best;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      found[threadIdx.x] = max(found[threadIdx.x], found[threadIdx.x + half]);
    __syncthreads();
  }
  best = found[0];

  const int size = best < 0 ? 0 : best / capacity;
  const int end = best < 0 ? 0 : oldest + best % capacity;
  const int period = max(last - end, 1);
  for (int j = threadIdx.x; j < k; j += blockDim.x) {
    const int at = end + 1 + j % period;
    const int token = at == last ? newest : own[at % capacity];
    // What stands in empty slots is no token, and a model may have to embed it.
    inputs[row * (k + 1) + 1 + j] = size ? max(token, 0) : 0;
  }
  if (threadIdx.x == 0) {
    inputs[row * (k + 1)] = newest;
    found_lengths[row] = size ? k : 0;
  }
"""
_KEEP = """
  const int capacity = ring_shape[1], rows = ring_shape[0];
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= rows * capacity) return;
  const int row = at / capacity, slot = at % capacity;
  const int first = lengths[row] - 1;
  const int behind = ((slot - first) % capacity + capacity) % capacity;
  int token = ring[at];
  if (behind == 0) token = recent[row * recent_shape[1] + recent_shape[1] - 1];
  else if (behind <= kept[row] && behind <= chosen_shape[1])
    token = chosen[row * chosen_shape[1] + behind - 1];
  out[at] = token;
"""


@cache
def _numbers(*numbers: int) -> mx.array:
    return mx.array(numbers, mx.int32)


def search(
    ring: mx.array,
    lengths: mx.array,
    recent: mx.array,
    k: int,
    *,
    max_ngram: int,
    min_ngram: int,
) -> tuple[mx.array, mx.array]:
    """What ``specdec.spec_decode.ngram_search.search`` computes, its reference."""
    rows = ring.shape[0]
    names = ("ring", "lengths", "recent", "numbers")
    outputs = ("inputs", "found_lengths")
    inputs, lengths_found = cuda_kernel("lookup", _SEARCH, names, outputs)(
        inputs=[ring, lengths, recent, _numbers(k, max_ngram, min_ngram)],
        template=[("THREADS", THREADS)],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, k + 1), (rows,)],
        output_dtypes=[mx.int32, mx.int32],
    )
    return inputs, lengths_found


def keep(
    ring: mx.array,
    lengths: mx.array,
    recent: mx.array,
    chosen: mx.array,
    kept: mx.array,
) -> mx.array:
    """What ``specdec.spec_decode.ngram_search.keep`` computes, its reference."""
    names = ("ring", "lengths", "recent", "chosen", "kept")
    written: mx.array = cuda_kernel("lookup_keep", _KEEP, names, ("out",))(
        inputs=[ring, lengths, recent, chosen, kept],
        grid=(-(-ring.size // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[ring.shape],
        output_dtypes=[ring.dtype],
    )[0]
    return written


@cache
def proven(
    as_searched: Callable[..., tuple[mx.array, mx.array]],
    as_kept: Callable[..., mx.array],
) -> bool:
    """Whether the kernels run on this device, and find what the references do."""
    return holds("lookup", partial(_agree, as_searched, as_kept))


def _agree(
    as_searched: Callable[..., tuple[mx.array, mx.array]],
    as_kept: Callable[..., mx.array],
) -> bool:
    texts = [5, 6, 7, 5, 6, 7, 5], [1, 2, 3], [4] * 256
    ring = mx.array([text + [-1] * (256 - len(text)) for text in texts])
    # The last row is longer than the ring.
    lengths, recent = mx.array([8, 4, 301]), mx.array([[5, 6], [3, 9], [4, 4]])
    chosen, kept = mx.arange(9).reshape(3, 3), mx.array([2, 0, 3])
    options = {"max_ngram": 4, "min_ngram": 2}
    results = search(ring, lengths, recent, 3, **options)
    written = keep(ring, lengths, recent, chosen, kept)
    with mx.stream(mx.cpu):  # where MLX's operations are compiled already
        wanted = as_searched(ring, lengths, recent, 3, **options)
        as_wanted = as_kept(ring, lengths, recent, chosen, kept)
    both = zip((*results, written), (*wanted, as_wanted), strict=True)
    return all(mx.array_equal(a, b).item() for a, b in both)
