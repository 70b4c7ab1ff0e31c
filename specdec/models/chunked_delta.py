"""The gated delta rule of many tokens by products of matrices.

Token by token, the rule passes over the whole state for every token. In chunks, as in
"Gated Delta Networks" (arXiv 2412.06464, section 3.3), it passes over the state once a
chunk. All that does not depend on the state is computed for all chunks together. The
result is that of the loop, rounded otherwise.
"""

from __future__ import annotations

import mlx.core as mx

#: Tokens of a chunk.
CHUNK = 32


def gated_delta_chunks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """What ``mlx_lm.models.gated_delta.gated_delta_ops`` computes, on a CPU.

    With keys of length 1 and ``beta`` up to 2, outputs and states differ from a loop in
    float64 by less than 1e-5 of the largest number.

    Arguments and results are those of :class:`specdec.cuda.delta_rule.Inputs` and
    :func:`specdec.cuda.delta_rule.scan`, with a decay for each head.
    """
    rows, tokens, key_heads = q.shape[:3]
    heads = v.shape[2]
    repeats, dtype = heads // key_heads, v.dtype
    if mask is not None:
        counts = mask[..., None]
        k, v = (mx.where(counts[..., None], a, 0) for a in (k, v))
        g, beta = mx.where(counts, g, 1), mx.where(counts, beta, 0)
    padding = -tokens % CHUNK
    chunks = (tokens + padding) // CHUNK

    def folded(a: mx.array, per_key: int, fill: float = 0.0) -> mx.array:
        """By chunk and head, in float32: (B, N, HK, R or 1, C, ...)."""
        width = [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2)
        a = mx.pad(a.astype(mx.float32), width, constant_values=fill)
        a = a.reshape(rows, chunks, CHUNK, key_heads, per_key, *a.shape[3:])
        return mx.moveaxis(a, 2, 4)

    q, k = folded(q, 1), folded(k, 1)
    v, beta = folded(v, repeats), folded(beta, repeats)[..., None]
    g = folded(g, repeats, 1.0)
    # Products of decays over (s, t], and from the chunk's beginning: quotients or
    # differences of logarithms would fail where a decay is 0.
    later = mx.tril(mx.ones((CHUNK, CHUNK), mx.bool_), -1)
    decays = mx.cumprod(mx.where(later, g[..., None], 1.0), axis=-2)
    decays = mx.tril(decays)
    since = mx.cumprod(g, axis=-1)[..., None]
    transposed = k.swapaxes(-1, -2)
    # Within a chunk: every token's value, less what the earlier ones have stored under
    # its key. That is a triangular system, solved by substitution.
    system = mx.where(later, beta * (k @ transposed) * decays, 0.0) + mx.eye(CHUNK)
    inverse = mx.linalg.tri_inv(system)
    stored = inverse @ (beta * v)
    known = inverse @ (beta * since * k)
    scores = (q @ transposed) * decays
    asked = q * since
    kept = (k * decays[..., -1, :, None]).swapaxes(-1, -2)
    left = since[..., -1:, :]
    held = state.reshape(rows, key_heads, repeats, *state.shape[2:]).swapaxes(-1, -2)
    outputs = []
    for i in range(chunks):
        added = stored[:, i] - known[:, i] @ held
        outputs.append(asked[:, i] @ held + scores[:, i] @ added)
        held = held * left[:, i] + kept[:, i] @ added
    y = mx.moveaxis(mx.stack(outputs, axis=1), 4, 2)
    y = y.reshape(rows, chunks * CHUNK, heads, -1)[:, :tokens]
    if mask is not None:
        y = mx.where(counts[..., None], y, 0)
    after = held.swapaxes(-1, -2).reshape(state.shape)
    return y.astype(dtype), after
