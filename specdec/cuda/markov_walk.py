"""Chooses a block's tokens one after the other, by one CUDA kernel a token.

The logits of a slot get a bias W2 W1[p] that depends on the token p before it. In MLX a
token takes a look-up, a product, a sum and a search for the largest: four launches, and
as many again to put the tokens together.

A launch finishes the search of the one before, since blocks cannot wait for each other:

    launch j     p = the largest of what launch j - 1 found in each part
                 in each part of the vocabulary, the largest of logits[j] + W2 W1[p]

What a launch leaves is the tokens so far, and for each part a logit's bits and a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .kernels import TYPES, cuda_kernel
from .modules import modules_of
from .proofs import Proofs

# The most rows for which it is used: each reads W2 by itself.
MOST_ROWS, MOST_RANK = 8, 256
THREADS = 128
# Tokens of a part: one of few parts would take as long as all launches that are saved.
PART = 512

_STEP = """
  const int V = weights_shape[0], parts = (V + PART - 1) / PART;
  const int row = blockIdx.y, slots = logits_shape[1], width = before_shape[1];
  const int* given = before + row * before_strides[0];
  // The first launch is given the token before the first slot, and nothing else.
  const int slot = width == 1 ? 0 : width - 2 * parts;
  __shared__ float best_of[THREADS];
  __shared__ int token_of[THREADS];

  // The largest of all threads; of equal ones the first token.
  auto largest = [&](float best, int token) {
    best_of[threadIdx.x] = best;
    token_of[threadIdx.x] = token;
    __syncthreads();
    for (int i = THREADS / 2; i; i /= 2) {
      if (threadIdx.x < i) {
        const float other = best_of[threadIdx.x + i];
        const int its = token_of[threadIdx.x + i];
        const float mine = best_of[threadIdx.x];
        if (other > mine || (other == mine && its < token_of[threadIdx.x])) {
          best_of[threadIdx.x] = other;
          token_of[threadIdx.x] = its;
        }
      }
      __syncthreads();
    }
    const int found = token_of[0];
    __syncthreads();
    return found;
  };

  int newest = given[0];
  if (slot) {
    float best = -INFINITY;
    int token = V;
    for (int i = threadIdx.x; i < parts; i += THREADS) {
      const float value = __int_as_float(given[slot + 2 * i]);
      if (value > best || token == V) {
        best = value;
        token = given[slot + 2 * i + 1];
      }
    }
    newest = largest(best, token);
  }
  const bool last = slot == slots;
  int* left = out + row * (slot + 1 + (last ? 0 : 2 * parts));
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < slot; i += THREADS) left[i] = given[i];
    if (threadIdx.x == 0) left[slot] = newest;
  }
  if (last) return;

  __shared__ float before_it[R];
  for (int i = threadIdx.x; i < R; i += THREADS)
    before_it[i] = static_cast<float>(embedding[static_cast<size_t>(newest) * R + i]);
  __syncthreads();
  const T* logit = logits + row * logits_strides[0] + slot * logits_strides[1];
  float best = -INFINITY;
  int token = V;
  const int end = min(V, static_cast<int>(blockIdx.x + 1) * PART);
  for (int v = blockIdx.x * PART + threadIdx.x; v < end; v += THREADS) {
    const T* weight = weights + static_cast<size_t>(v) * R;
    float bias = 0.0f;
    #pragma unroll 8
    for (int i = 0; i < R; i += 8) {
      const uint4 eight = *reinterpret_cast<const uint4*>(weight + i);
      const T* each = reinterpret_cast<const T*>(&eight);
      #pragma unroll
      for (int n = 0; n < 8; ++n)
        bias = fmaf(static_cast<float>(each[n]), before_it[i + n], bias);
    }
    // Rounded where MLX's results are.
    const float rounded = static_cast<float>(static_cast<T>(bias));
    const float value = static_cast<float>(
        static_cast<T>(static_cast<float>(logit[v]) + rounded));
    if (value > best || token == V) {
      best = value;
      token = v;
    }
  }
  token = largest(best, token);
  if (threadIdx.x == 0) {
    left[slot + 1 + 2 * blockIdx.x] = __float_as_int(best_of[0]);
    left[slot + 2 + 2 * blockIdx.x] = token;
  }
"""


class Form(NamedTuple):
    """What the kernel is compiled for: a type, and the bias's rank."""

    dtype: mx.Dtype
    rank: int


def walk(
    logits: mx.array, embedding: mx.array, weights: mx.array, anchor: mx.array
) -> mx.array:
    """The anchors and the tokens of the largest biased logits, (B, k + 1), int32.

    Args:
        logits: of slots, without the bias, shape (B, k, V).
        embedding, weights: W1 and W2, shape (V, r).
        anchor: the token before the first slot, shape (B, 1), int32.
    """
    rows, slots, size = logits.shape
    parts = -(-size // PART)
    kernel = cuda_kernel(
        "markov_walk",
        _STEP,
        ("logits", "embedding", "weights", "before"),
        ("out",),
        copies_views=False,
    )
    template = [
        ("T", logits.dtype),
        ("R", embedding.shape[1]),
        ("PART", PART),
        ("THREADS", THREADS),
    ]
    before = anchor
    for slot in range(slots + 1):
        more = 2 * parts if slot < slots else 0
        (before,) = kernel(
            inputs=[logits, embedding, weights, before],
            template=template,
            grid=((parts if more else 1) * THREADS, rows, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(rows, slot + 1 + more)],
            output_dtypes=[mx.int32],
        )
    return before


def reference(
    logits: mx.array, embedding: mx.array, weights: mx.array, anchor: mx.array
) -> mx.array:
    """The same, by MLX's operations."""
    tokens = [anchor]
    for slot in range(logits.shape[1]):
        bias = embedding[tokens[-1]] @ weights.T
        biased = logits[:, slot : slot + 1] + bias
        tokens.append(mx.argmax(biased, axis=-1).view(mx.int32))
    return mx.concatenate(tokens, axis=1)


def _agrees(form: Form) -> bool:
    """Small whole numbers, which every order of additions sums to the same."""
    key, size = mx.random.key(0), 3 * PART + 5
    matrices = mx.random.randint(-1, 2, (2, size, form.rank), key=key)
    logits = mx.random.randint(-9, 10, (3, 4, size), key=key).astype(form.dtype)
    embedding, weights = matrices.astype(form.dtype)
    anchor = mx.array([[0], [size - 1], [PART]], mx.int32)
    ours = walk(logits, embedding, weights, anchor)
    with mx.stream(mx.cpu):
        wanted = reference(logits, embedding, weights, anchor)
        mx.eval(wanted)
    return bool(mx.array_equal(ours, wanted).item())


proven = Proofs("markov_walk", _agrees)


def form_of(embedding: nn.Module, weights: nn.Module) -> Form | None:
    """The kernel's form for layers W1 and W2; ``None``: it does not compute them."""
    arrays = [dict(layer) for layer in (embedding, weights)]
    if any(each.keys() != {"weight"} for each in arrays):
        return None  # packed, or with a bias
    one, other = (each["weight"] for each in arrays)
    rank = one.shape[1]
    fits = one.shape == other.shape and rank % 8 == 0 and rank <= MOST_RANK
    return Form(one.dtype, rank) if fits and one.dtype == other.dtype in TYPES else None


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that heads of ``model`` ask for."""
    return proven.of(
        getattr(module, "walk_form", None) for _, module in modules_of(model)
    )
