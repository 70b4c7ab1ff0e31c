"""What follows from a round, by one CUDA kernel.

:mod:`.operations` says the same in some twenty operations on small arrays; where
launches bound a round, each takes as long as this one does.
"""

from __future__ import annotations

import logging
from functools import cache

import mlx.core as mx

from ..spec_decode.commit import operations
from ..spec_decode.commit.committed import Committed
from ..spec_decode.commit.operations import Settled
from ..spec_decode.rejection_sampler import Verdict
from .compile import cuda_kernel

logger = logging.getLogger(__name__)

THREADS = 32
_INPUTS = ("inputs", "chosen", "limit", "meant", "recent", "lengths")
_OUTPUTS = ("kept", "allowed", "rejected", "packed", "next_recent", "next_lengths")
# A block settles a row: its threads all count, and share what is to be copied.
_SETTLE = """
  const int width = chosen_shape[1], k = width - 1, window = recent_shape[1];
  const int row = blockIdx.x;
  const int* drafts = inputs + row * width + 1;
  const int* own = chosen + row * width;
  const int* before = recent + row * window;
  const int most = min(limit[row], meant[row]);

  int accepted = 0;
  while (accepted < min(k, most) && drafts[accepted] == own[accepted]) ++accepted;
  // Less than 0 is a row that has ended, which keeps nothing.
  const int count = most < 0 ? 0 : accepted + 1;

  for (int j = threadIdx.x; j < window; j += blockDim.x) {
    const int at = count + j;
    next_recent[row * window + j] = at < window ? before[at] : own[at - window];
  }
  int* told = packed + row * (width + 2);
  for (int j = threadIdx.x; j < width; j += blockDim.x) told[2 + j] = own[j];
  if (threadIdx.x == 0) {
    told[0] = kept[row] = count;
    told[1] = allowed[row] = most;
    rejected[row] = width - count;
    next_lengths[row] = lengths[row] + count;
  }
"""


def settle(
    inputs: mx.array,
    chosen: mx.array,
    limit: mx.array,
    meant: mx.array | None,
    committed: Committed,
) -> Settled:
    """What :func:`.operations.settle` computes."""
    rows, width = chosen.shape
    recent, lengths = committed.recent, committed.lengths
    kept, allowed, rejected, packed, next_recent, next_lengths = cuda_kernel(
        "settle", _SETTLE, _INPUTS, _OUTPUTS
    )(
        inputs=[
            # Of a round without draft tokens they are a view, which would be copied;
            # they are not looked at.
            inputs.astype(mx.int32) if width > 1 else chosen,
            chosen,
            limit,
            limit if meant is None else meant.astype(mx.int32),
            recent,
            lengths,
        ],
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
    return Settled(
        Verdict(chosen, kept),
        allowed,
        rejected,
        packed,
        Committed(next_recent, next_lengths),
    )


@cache
def proven() -> bool:
    """Whether the kernel runs on this device, and finds what the operations do."""
    inputs = mx.array([[9, 1, 2], [9, 1, 2], [9, 1, 5], [9, 1, 2]])
    chosen = mx.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [4, 5, 6]])
    limit, meant = mx.array([2, -1, 2, 2]), mx.array([1, 2, 2, 0])
    committed = Committed.of([[8, 9], [9], [7, 8, 9], [6, 7, 8, 9]], 3)
    try:
        for n, some in ((3, meant), (3, None), (1, None)):
            most = mx.minimum(limit, n - 1)
            asked = inputs[:, :n], chosen[:, :n], most, some, committed
            found, wanted = settle(*asked), operations.settle(*asked)
            pairs = zip(_arrays(found), _arrays(wanted), strict=True)
            if not all(mx.array_equal(a, b).item() for a, b in pairs):
                return False
        return True
    except (RuntimeError, ValueError) as error:
        logger.debug("no kernel that settles rounds: %s", error)
        return False


def _arrays(settled: Settled) -> tuple[mx.array, ...]:
    after = settled.committed
    return (
        settled.verdict.kept,
        settled.limit,
        settled.rejected,
        settled.packed,
        # Of rows that have ended they mean nothing.
        mx.where(settled.verdict.kept[:, None] > 0, after.recent, -1),
        after.lengths,
    )
