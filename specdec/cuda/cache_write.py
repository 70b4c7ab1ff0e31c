"""Writes new keys and values into a cache that commands in flight still read.

MLX copies an array that something in flight holds, and attention of the forward before
holds every cache. This kernel writes into its inputs. MLX does not know that. It knows
that the kernel reads what the write comes after, and copies the queries, and runs what
reads the copy afterwards. So keys and values may be read by attention of these queries,
by what depends on it, and by what is handed to the device later. The next write reads
the result of this attention, so it comes after it.
:class:`specdec.cache.storage.Storage` keeps this order.

Metal is left out, because MLX runs command buffers there at the same time unless one
reads what it knows another to write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import mlx.core as mx

from . import decode_attention
from .decode_attention import Form
from .kernels import TYPES, cuda_kernel
from .proofs import Proofs

Arrays = tuple[mx.array, ...]
THREADS = 256
_INPUTS = ("q", "k", "v", "new_k", "new_v", "slots", "after")
# A thread copies an element of the queries, (B, H, S, D). Those of the first heads
# write an element of the keys and one of the values, too.
SOURCE = """
  const int H = q_shape[1], S = q_shape[2], D = q_shape[3];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= q_shape[0] * H * S * D) return;
  const int d = i % D, s = i / D % S, h = i / D / S % H;
  const size_t b = i / D / S / H;
  out[i] = q[b * q_strides[0] + h * q_strides[1] + s * q_strides[2] + d * q_strides[3]];
  if (h >= k_shape[1]) return;
  const size_t slot = slots[b * slots_strides[0] + s * slots_strides[1]];
  const_cast<T*>(k)[b * k_strides[0] + h * k_strides[1] + slot * k_strides[2] +
                    d * k_strides[3]] =
      new_k[b * new_k_strides[0] + h * new_k_strides[1] + s * new_k_strides[2] +
            d * new_k_strides[3]];
  const_cast<T*>(v)[b * v_strides[0] + h * v_strides[1] + slot * v_strides[2] +
                    d * v_strides[3]] =
      new_v[b * new_v_strides[0] + h * new_v_strides[1] + s * new_v_strides[2] +
            d * new_v_strides[3]];
"""


def write(
    queries: mx.array,
    cache: Arrays,
    new: Arrays,
    slots: mx.array,
    after: mx.array | None = None,
) -> tuple[mx.array, Arrays]:
    """Write ``new`` keys and values into ``slots`` of ``cache``.

    Args:
        queries: shape (B, H, S, D).
        cache: keys and values, (B, KV, L, D) each, contiguous; nothing else holds them.
        new: keys and values, (B, KV, S, D) each.
        slots: shape (B, S), int32.
        after: what the write comes after, of any shape.

    Returns:
        The queries that attention has to read, and the same arrays as ``cache``.
    """
    dtype = queries.dtype
    (out,) = cuda_kernel(
        f"cache_write_{TYPES[dtype]}", SOURCE, _INPUTS, ("out",), copies_views=False
    )(
        inputs=[queries, *cache, *new, slots, queries if after is None else after],
        template=[("T", dtype)],
        grid=(-(-queries.size // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[dtype],
    )
    # Whoever waits for the cache waits for the write.
    return out, tuple(mx.depends(list(cache), [out]))


def writes_in_place(arrays: Arrays) -> bool:
    """Whether :func:`write` was proven for such keys and values."""
    keys, values = arrays
    return (
        proven.reached((keys.shape[3], keys.dtype))
        and keys.dtype == values.dtype
        and keys.shape == values.shape
    )


def takes(queries: mx.array, cache: Arrays, new: Arrays) -> bool:
    """Whether :func:`write` can write ``new`` for these queries."""
    keys = new[0]
    return (
        all(a.dtype == queries.dtype for a in (*cache, *new))
        and queries.shape[0] == keys.shape[0]
        and queries.shape[1] >= keys.shape[1]
        and queries.shape[2:] == keys.shape[2:]
    )


def _agrees(form: Form) -> bool:
    """Whether writes and attention, in turns in one graph, agree with MLX's writes.

    Each stage is computed before the next: a device that waits for the host in a graph
    may wait forever.
    """
    size, dtype = form
    seen, scale = mx.ones((2, 1, 2, 40), mx.bool_), size**-0.5
    y, *drawn = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
        for i, shape in enumerate([(2, 4, 2, size), *[(2, 2, 40, size)] * 2])
    )
    all_slots = [mx.array([[2 * i, 2 * i + 1], [20 + i, 21 + i]]) for i in range(8)]
    mx.eval(y, drawn)
    with mx.stream(mx.cpu):  # where MLX's operations are compiled already
        caches = [[array + 0 for array in drawn]]
        mx.eval(caches)

    asked, cache = [y], tuple(drawn)
    for slots in all_slots:
        out, cache = write(
            asked[-1], cache, (asked[-1][:, :2], asked[-1][:, 2:]), slots, asked[-1]
        )
        asked.append(decode_attention.attention(out, cache[0], cache[1], scale, seen))
    mx.eval(asked, cache)

    with mx.stream(mx.cpu):
        for y, slots in zip(asked, all_slots, strict=False):
            index = slots[:, None, :, None]
            new = zip(caches[-1], (y[:, :2], y[:, 2:]), strict=True)
            caches.append([mx.put_along_axis(a, index, b, axis=2) for a, b in new])
        mx.eval(caches)
    wanted = [
        decode_attention.attention(y, keys, values, scale, seen)
        for y, (keys, values) in zip(asked, caches[1:], strict=False)
    ]
    mx.eval(wanted)
    with mx.stream(mx.cpu):
        pairs = zip([*wanted, *caches[-1]], [*asked[1:], *cache], strict=True)
        return all(mx.array_equal(a, b).item() for a, b in pairs)


proven = Proofs("cache write", _agrees, decode_attention.proven.supports)


@dataclass(frozen=True, eq=False)
class Unwritten:
    """Keys and values of a cache whose write may wait for attention's queries.

    Args:
        storage: a :class:`specdec.cache.storage.Storage` of dense keys and values.
        extent: the columns that attention reads.
        update: new keys and values, and their slots, if the write waits.
    """

    storage: Any
    extent: int
    update: tuple[Arrays, mx.array] | None = None

    def written(self, queries: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values for attention; the first call writes."""
        storage, update = self.storage, self.update
        if update is not None and storage.waiting is update:
            queries, storage.asked = storage.write_waiting(queries), ref(self)
        elif update is not None and storage.asked() is not self:
            storage.settled()  # it was written without these queries
        keys, values = storage.read(self.extent)
        return queries, keys, values

    def read_by(self, result: mx.array) -> None:
        """Let the next write come after attention with this result."""
        self.storage.after = result
