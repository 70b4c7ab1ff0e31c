"""The sum of a residual connection and its norm by one CUDA kernel.

Decoder layers add what a sublayer puts out to its input, and norm the sum for the next
sublayer: two launches, which are one here::

    h = x + r    y = norm(h)

The norm may belong to the layer after, or to the model. So it computes the sum, keeps
its own result, and is then called with the sum.

Sum and norm have the bits of MLX's kernels, whose order of additions this one follows
(``rms_norm_small`` in MLX's ``rms_norm.cu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .kernels import TYPES, cuda_kernel
from .modules import as_kind, derived, modules_of
from .proofs import Proofs

# Numbers that a thread reads at once, and how many a row may have.
READS, MOST_SIZE = 8, 8192
# A block has a row.
SOURCE = """
  const size_t row = static_cast<size_t>(blockIdx.x) * D;
  const int lane = threadIdx.x % 32;
  __shared__ float of_warps[THREADS / 32];
  float kept[CHUNKS * 8], sum = 0.0f;
  #pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int begin = (c * THREADS + threadIdx.x) * 8;
    uint4 one = {}, other = {}, both;
    if (begin < D) {
      one = *reinterpret_cast<const uint4*>(x + row + begin);
      other = *reinterpret_cast<const uint4*>(r + row + begin);
    }
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const T added = static_cast<T>(
          static_cast<float>(reinterpret_cast<const T*>(&one)[j]) +
          static_cast<float>(reinterpret_cast<const T*>(&other)[j]));
      reinterpret_cast<T*>(&both)[j] = added;
      const float value = static_cast<float>(added);
      kept[c * 8 + j] = value;
      sum = fmaf(value, value, sum);
    }
    if (begin < D) *reinterpret_cast<uint4*>(h + row + begin) = both;
  }
  #pragma unroll
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  if (lane == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = lane < THREADS / 32 ? of_warps[lane] : 0.0f;
  #pragma unroll
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  const float by = rsqrtf(sum / D + static_cast<float>(@EPS@));
  #pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int begin = (c * THREADS + threadIdx.x) * 8;
    if (begin >= D) continue;
    const uint4 weights = *reinterpret_cast<const uint4*>(weight + begin);
    uint4 normed;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float rounded = static_cast<float>(static_cast<T>(kept[c * 8 + j] * by));
      reinterpret_cast<T*>(&normed)[j] = static_cast<T>(
          static_cast<float>(reinterpret_cast<const T*>(&weights)[j]) * rounded);
    }
    *reinterpret_cast<uint4*>(y + row + begin) = normed;
  }
"""


class Form(NamedTuple):
    """What the kernel is compiled for: a type, a row's width, and the norm's eps."""

    dtype: mx.Dtype
    size: int
    eps: float

    @property
    def known(self) -> bool:
        """Whether the kernel supports this form."""
        fits = self.size % READS == 0 and 0 < self.size <= MOST_SIZE
        return self.dtype in TYPES and fits

    @property
    def threads(self) -> int:
        """Threads of a row, as many as MLX's norm has."""
        each, rest = divmod(self.size // READS, 128)
        if self.size <= 64 * READS or (rest == 64 and 2 * each + 1 <= 8):
            return 64
        return 128


def summed(
    form: Form, x: mx.array, r: mx.array, weight: mx.array
) -> tuple[mx.array, mx.array]:
    """``x + r``, and its norm.

    Args:
        x, r: shape (..., D).
        weight: of the norm, shape (D,).
    """
    source = SOURCE.replace("@EPS@", f"{form.eps!r}")
    name = f"residual_norm_{TYPES[form.dtype]}_{form.eps.hex()}"
    kernel = cuda_kernel(
        "".join(c if c.isalnum() else "_" for c in name),
        source,
        ("x", "r", "weight"),
        ("h", "y"),
    )
    threads = form.threads
    h, y = kernel(
        inputs=[x, r, weight],
        template=[
            ("T", form.dtype),
            ("D", form.size),
            ("THREADS", threads),
            ("CHUNKS", -(-form.size // (READS * threads))),
        ],
        grid=(x.size // form.size * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape] * 2,
        output_dtypes=[form.dtype] * 2,
    )
    return h, y


def reference(
    form: Form, x: mx.array, r: mx.array, weight: mx.array
) -> tuple[mx.array, mx.array]:
    """The same, by MLX's operations."""
    h = x + r
    return h, mx.fast.rms_norm(h, weight, form.eps)


def _agrees(form: Form) -> bool:
    """Whether every bit is that of MLX's kernels."""
    shapes = (5, form.size), (5, form.size), (form.size,)
    x, r, weight = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(form.dtype)
        for i, shape in enumerate(shapes)
    )
    scale = mx.array([[1], [100], [0.001], [3], [0]], form.dtype)
    x, r = x * scale, r * scale
    both = zip(summed(form, x, r, weight), reference(form, x, r, weight), strict=True)
    return all(mx.array_equal(ours, theirs).item() for ours, theirs in both)


proven = Proofs("residual norm", _agrees, attrgetter("known"))


class _Slot:
    """The one sum of a model whose norm is not asked for yet."""

    ready: tuple[mx.array, SummingNorm, mx.array] | None = None


class SummingNorm(nn.RMSNorm):
    """A norm that adds its inputs, too, if a layer asks for that before."""

    plain = nn.RMSNorm
    _slot: _Slot

    def sum(self, x: mx.array, r: mx.array) -> mx.array:
        """``x + r``, whose norm is computed with it."""
        form = form_of(self)
        if (
            self.training
            or not proven.reached(form)
            or x.shape != r.shape
            or not x.dtype == r.dtype == form.dtype
            or not x.size
        ):
            return x + r
        h, y = summed(form, x, r, self.weight)
        # Another thread's sum is another array.
        self._slot.ready = h, self, y
        return h

    def __call__(self, x: mx.array) -> mx.array:
        ready = self._slot.ready
        if ready is not None and ready[0] is x and ready[1] is self:
            self._slot.ready = None
            return ready[2]
        usual: Any = super()
        normed: mx.array = usual.__call__(x)
        return normed


def added(x: mx.array, r: mx.array, norm: Any) -> mx.array:
    """``x + r``, of which ``norm`` is called next; ``None``: nobody knows which is."""
    return norm.sum(x, r) if isinstance(norm, SummingNorm) else x + r


def following(layer: nn.Module) -> Any:
    """The norm that is called after a layer, as far as that is known."""
    return vars(layer).get("_following")


class _SummingLayer:
    """A decoder layer whose sums are computed by the norms after them."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        layer: Any = self
        r = layer.self_attn(layer.input_layernorm(x), mask, cache)
        h = added(x, r, layer.post_attention_layernorm)
        r = layer.mlp(layer.post_attention_layernorm(h))
        return added(h, r, following(layer))


def _usual(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    """The call of mlx-lm's layers that :class:`_SummingLayer` computes."""
    r = self.self_attn(self.input_layernorm(x), mask, cache)
    h = x + r
    r = self.mlp(self.post_attention_layernorm(h))
    out = h + r
    return out  # noqa: RET504 - the bytecode of mlx-lm's is compared


def _is_usual(layer: nn.Module) -> bool:
    """Whether a layer's code is what :func:`_usual` is."""
    code, usual = getattr(type(layer).__call__, "__code__", None), _usual.__code__
    return code is not None and all(
        getattr(code, part) == getattr(usual, part)
        for part in ("co_code", "co_names", "co_varnames")
    )


def form_of(norm: nn.RMSNorm) -> Form:
    """The kernel's form for a norm."""
    return Form(norm.weight.dtype, norm.weight.shape[0], float(norm.eps))


def take_sums(model: nn.Module) -> None:
    """Let norms compute the sums before them, in place.

    This tries the kernel for the norms that the model has.
    """
    slot = _Slot()
    for owner, layers in _stacks(model):
        if not all(proven(form_of(n)) for n in _norms(owner, layers)):
            continue
        for part, name in [
            *((layer, "input_layernorm") for layer in layers),
            *((layer, "post_attention_layernorm") for layer in layers),
            (owner, "norm"),
        ]:
            part[name] = as_kind(part[name], SummingNorm)
            part[name]._slot = slot
        after = [*(layer.input_layernorm for layer in layers[1:]), owner.norm]
        for layer, norm in zip(layers, after, strict=True):
            # Among the attributes, it is no part of the layer.
            vars(layer)["_following"] = norm
            if _is_usual(layer):
                kind: Any = type(layer)
                layer.__class__ = derived(_SummingLayer, kind)


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that :func:`take_sums` asks for."""
    stacks = _stacks(model)
    return proven.of(form_of(n) for stack in stacks for n in _norms(*stack))


def _norms(owner: Any, layers: list[Any]) -> list[Any]:
    names = "input_layernorm", "post_attention_layernorm"
    return [*(layer[name] for layer in layers for name in names), owner.norm]


def _stacks(model: nn.Module) -> Iterator[tuple[Any, list[Any]]]:
    """Modules that norm what their last layer puts out, and these layers."""
    for _, module in modules_of(model):
        layers = module.get("layers")
        if not isinstance(layers, list) or not layers or "norm" not in module:
            continue
        if all(_is_usual(each) or hasattr(each, "after_attention") for each in layers):
            norms = _norms(module, layers)
            if all(type(norm) is nn.RMSNorm for norm in norms):
                yield module, layers
