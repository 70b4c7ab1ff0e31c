"""The norms and rotations of queries and keys by one CUDA kernel.

Attention of Qwen3, Qwen3-Next, Qwen3.5 and of most draft heads norms queries and keys
head by head, and rotates them by their positions: four launches of mlx-lm's code, which
are one here. Llama's and Qwen2's rotate them without a norm: two launches, and the
kernel has the bits of MLX's.

A token's queries and keys do not depend on what is beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import log2
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .attention_patch import attend, size_of
from .fused_linear import joined
from .kernels import TYPES, cuda_kernel
from .modules import derived, modules_of
from .proofs import Proofs, close

# Attention modules by name, so that only models that have them import their modules.
_KINDS = {
    ("mlx_lm.models.llama", "Attention"),
    ("mlx_lm.models.qwen2", "Attention"),
    ("mlx_lm.models.qwen3", "Attention"),
    ("mlx_lm.models.qwen3_moe", "Attention"),
    ("mlx_lm.models.qwen3_next", "Qwen3NextAttention"),
    ("specdec.models.draft_heads.layers", "HeadAttention"),
}
_NORMS = "q_norm", "k_norm"
MOST_SIZE = 256

# A warp has a head of a token: each 32nd number a thread. Numbers that rotate together
# are HALF apart, and so in one thread. Where neighbours rotate together (PAIRS), a
# thread has both. Results are rounded where MLX's are.
SOURCE = """
  constexpr int EACH = D / 32, APART = HALF / 32;
  const int B = q_shape[0], S = q_shape[1], lane = threadIdx.x;
  const int all = WHOLE ? H + 2 * KV : H + KV, head = blockIdx.x % all;
  const int token = blockIdx.x / all % S, row = blockIdx.x / all / S;
  const bool of_query = head < H, of_value = head >= H + KV;
  auto rounded = [](float v) { return static_cast<float>(static_cast<T>(v)); };
  const T* from = WHOLE
      ? q + row * q_strides[0] + token * q_strides[1] + head * D * q_strides[2]
      : of_query
      ? q + row * q_strides[0] + token * q_strides[1] + head * q_strides[2]
      : k + row * k_strides[0] + token * k_strides[1] + (head - H) * k_strides[2];
  const size_t step = WHOLE ? q_strides[2] : of_query ? q_strides[3] : k_strides[3];
  // All queries lie before all keys, and these before all values: (B, H, S, D) each.
  const int first = of_query ? 0 : of_value ? H + KV : H, count = of_query ? H : KV;
  const size_t place = (static_cast<size_t>(B) * first +
                        static_cast<size_t>(row) * count + head - first) * S;
  if (of_value) {
    #pragma unroll
    for (int i = 0; i < EACH; ++i)
      out[(place + token) * D + i * 32 + lane] = from[(i * 32 + lane) * step];
    return;
  }
  auto place_of = [&](int i) {
    if (!PAIRS || i >= 2 * APART) return i * 32 + lane;
    return 2 * (i % APART * 32 + lane) + i / APART;
  };
  float x[EACH], sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    x[i] = static_cast<float>(from[place_of(i) * step]);
    sum = fmaf(x[i], x[i], sum);
  }
  if (NORMS) {
    #pragma unroll
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    const float by = rsqrtf(sum / D + static_cast<float>(@EPS@));
    const T* const norm = of_query ? q_norm : k_norm;
    #pragma unroll
    for (int i = 0; i < EACH; ++i)
      x[i] = rounded(rounded(x[i] * by) * static_cast<float>(norm[place_of(i)]));
  }
  const float position =
      static_cast<float>(@SCALE@) * static_cast<float>(offset[row] + token);
  #pragma unroll
  for (int i = 0; i < APART; ++i) {
    const float share = static_cast<float>(i * 32 + lane) / HALF;
    const float angle =
        position * exp2f(-share * static_cast<float>(@LOG_BASE@));
    const float c = cosf(angle), s = sinf(angle), first = x[i], second = x[i + APART];
    x[i] = first * c - second * s;
    x[i + APART] = first * s + second * c;
  }
  #pragma unroll
  for (int i = 0; i < EACH; ++i)
    out[(place + token) * D + place_of(i)] = static_cast<T>(x[i]);
"""


class Form(NamedTuple):
    """All that the kernel is compiled for.

    Args:
        heads, key_heads: of queries and of keys.
        size: of a head.
        rotated: how many of a head's numbers rotate.
        eps: of both norms; ``None``: there are none.
        scale, base: of positions.
        traditional: whether neighbours rotate together.
    """

    dtype: mx.Dtype
    heads: int
    key_heads: int
    size: int
    rotated: int
    eps: float | None
    scale: float
    base: float
    traditional: bool = False

    @property
    def width(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + 2 * self.key_heads) * self.size

    @property
    def known(self) -> bool:
        """Whether the kernel supports this form."""
        return (
            self.dtype in TYPES
            and self.size % 32 == 0
            and self.size <= MOST_SIZE
            and self.rotated % 64 == 0
            and 0 < self.rotated <= self.size
            and self.base > 0
        )


@cache
def _kernel(dtype: mx.Dtype, eps: float | None, scale: float, base: float) -> Any:
    source = SOURCE.replace("@EPS@", f"{eps or 0.0!r}")
    source = source.replace("@SCALE@", f"{scale!r}")
    return cuda_kernel(
        f"rotated_heads_{TYPES[dtype]}",
        source.replace("@LOG_BASE@", f"{log2(base)!r}"),
        ("q", "k", "q_norm", "k_norm", "offset"),
        ("out",),
        copies_views=False,
    )


def rotated(
    form: Form,
    q: mx.array,
    k: mx.array | None,
    norms: Sequence[mx.array],
    offset: mx.array,
) -> list[mx.array]:
    """Queries and keys, normed and rotated.

    Args:
        q, k: shape (B, S, H, D) and (B, S, KV, D). Without ``k``, ``q`` has queries,
            keys and values: (B, S, (H + 2 KV) D).
        norms: weights of the norms of queries and keys, shape (D,) each, if any.
        offset: the position of each row's first token, shape (B,), int32.

    Returns:
        Shape (B, H, S, D), (B, KV, S, D) and, without ``k``, values as they are,
        (B, KV, S, D).
    """
    rows, tokens = q.shape[:2]
    size, whole = form.size, k is None
    heads = form.heads if whole else q.shape[2]
    numbers = [heads, form.key_heads, form.key_heads][: 3 if whole else 2]
    (out,) = _kernel(form.dtype, form.eps, form.scale, form.base)(
        inputs=[q, q if k is None else k, *(norms or (q, q)), offset],
        template=[
            ("T", form.dtype),
            ("H", heads),
            ("KV", form.key_heads),
            ("D", size),
            ("HALF", form.rotated // 2),
            ("PAIRS", int(form.traditional)),
            ("NORMS", int(form.eps is not None)),
            ("WHOLE", int(whole)),
        ],
        grid=(rows * tokens * sum(numbers) * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(rows * tokens * sum(numbers) * size,)],
        output_dtypes=[form.dtype],
    )
    return [
        mx.as_strided(
            out,
            (rows, number, tokens, size),
            (number * tokens * size, tokens * size, size, 1),
            rows * tokens * size * before,
        )
        for number, before in zip(numbers, accumulate([0, *numbers]), strict=False)
    ]


class _OneKernel:
    """Attention whose queries and keys are normed and rotated by one kernel."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        layer: Any = self
        form, offset = form_of(layer), getattr(cache, "offset", None)
        if (
            form is None
            or layer.training
            or x.dtype != form.dtype
            or not isinstance(offset, mx.array)
            or offset.shape != x.shape[:1]
            or not x.size
            or not proven.reached(form)
        ):
            usual: Any = super()
            computed: mx.array = usual.__call__(x, mask, cache)
            return computed
        rows, tokens = x.shape[:2]
        norms = [layer[name].weight for name in _NORMS if name in layer]
        offset, gate = offset.astype(mx.int32), None
        every = joined(x, (layer.q_proj, layer.k_proj, layer.v_proj), form.width)
        if every is not None:
            queries, keys, values = rotated(form, every, None, norms, offset)
        else:
            q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
            q = q.reshape(rows, tokens, form.heads, -1)
            k, v = (a.reshape(rows, tokens, form.key_heads, -1) for a in (k, v))
            if q.shape[-1] > form.size:  # each head's queries, then its gate
                q, gate = mx.split(q, 2, axis=-1)
            queries, keys = rotated(form, q, k, norms, offset)
            values = v.transpose(0, 2, 1, 3)
        keys, values = cache.update_and_fetch(keys, values)
        output = attend(
            queries, keys, values, cache=cache, scale=layer.scale, mask=mask
        )
        output = output.transpose(0, 2, 1, 3).reshape(rows, tokens, -1)
        if gate is not None:
            output = output * mx.sigmoid(gate.reshape(rows, tokens, -1))
        projected: mx.array = layer.o_proj(output)
        return projected


def form_of(layer: Any) -> Form | None:
    """The form of an attention module; ``None``: its positions are of another kind."""
    rope, norms = layer.rope, [layer[name] for name in _NORMS if name in layer]
    # Those of draft heads may have no norms, sinks, or gates apart from the queries.
    more = "attention_sink_bias" in layer or "g_proj" in layer
    if type(rope) is not nn.RoPE or len(norms) == 1 or more:
        return None
    if len({(norm.eps, norm["weight"].dtype) for norm in norms}) > 1:
        return None
    heads, key_heads = (
        (layer.n_heads, layer.n_kv_heads)
        if "n_heads" in vars(layer)
        else (layer.num_attention_heads, layer.num_key_value_heads)
    )
    eps, weight = (norms[0].eps, norms[0]["weight"]) if norms else (None, None)
    sizes = (size_of(layer),) if weight is None else weight.shape
    arrays: Any = tree_flatten(layer.parameters() if weight is None else [weight])
    dtypes = {a.dtype for _, a in arrays if mx.issubdtype(a.dtype, mx.floating)}
    if len(dtypes) != 1 or len(sizes) != 1 or not sizes[0]:
        return None
    numbers = eps and float(eps), float(rope.scale), float(rope.base)
    each = heads, key_heads, sizes[0], rope.dims
    return Form(dtypes.pop(), *each, *numbers, bool(rope.traditional))


def take_heads(model: nn.Module) -> None:
    """Let the kernel norm and rotate the model's queries and keys, in place.

    This tries the kernel for the heads that the model has.
    """
    for layer in _layers(model):
        form = form_of(layer)
        if form is not None and proven(form):
            kind: Any = type(layer)
            layer.__class__ = derived(_OneKernel, kind)


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that :func:`take_heads` asks for."""
    return proven.of(map(form_of, _layers(model)))


def _layers(model: nn.Module) -> Iterator[Any]:
    for _, module in modules_of(model):
        known = (type(module).__module__, type(module).__name__) in _KINDS
        if known and not isinstance(module, _OneKernel):
            yield module


def _agrees(form: Form) -> bool:
    """Whether the kernel computes what MLX's norms and rotation do, in float32.

    Without norms, it has to have the bits of MLX's rotation.
    """

    def drawn(*shape: int) -> mx.array:
        normal = mx.random.normal(shape, key=mx.random.key(sum(shape)))
        return normal.astype(form.dtype)

    # As a projection with gates puts queries out.
    q = mx.split(drawn(3, 2, form.heads, 2 * form.size), 2, axis=-1)[1]
    k = drawn(3, 2, form.key_heads, form.size)
    norms = drawn(form.size), 1 + drawn(form.size)
    offset = mx.array([0, 7, 1000], mx.int32)
    given = norms if form.eps is not None else ()
    both = rotated(form, q, k, given, offset)
    every = mx.concatenate([a.flatten(2) for a in (q, k, k)], axis=2)
    wanted = [*both, k.transpose(0, 2, 1, 3)]
    for ours, same in zip(
        rotated(form, every, None, given, offset), wanted, strict=True
    ):
        if not mx.array_equal(ours, same).item():
            return False
    for ours, heads, norm in zip(both, (q, k), norms, strict=True):
        if form.eps is not None:
            heads, norm = heads.astype(mx.float32), norm.astype(mx.float32)
            heads = mx.fast.rms_norm(heads, norm, form.eps)
        exact = mx.fast.rope(
            heads.transpose(0, 2, 1, 3),
            form.rotated,
            traditional=form.traditional,
            base=form.base,
            scale=form.scale,
            offset=offset,
        )
        equal = mx.array_equal(ours, exact).item()
        if not (equal or (form.eps is not None and close(ours, exact, 0.02))):
            return False
    return True


proven = Proofs("rotated heads", _agrees, attrgetter("known"))
