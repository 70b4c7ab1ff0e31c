"""Computes gated delta networks by one CUDA kernel.

Between its projections, such a layer (Qwen3-Next, Qwen3.5) is a short convolution, the
norms of queries and keys, two gates, the delta rule token by token, and a gated norm:
some thirty operations, six more for every token. MLX's CUDA backend launches each of
them. The kernel is one launch, for a token or a part of a prompt. It first repeats the
previous round for the tokens that each row has kept of it, so that a verification
includes the rollback.

Every token's arithmetic is the same whatever else is in a launch: a row has the bits
that one token at a time gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta
from mlx_lm.models.activations import precise_swiglu

from . import gated_delta_source as text
from .kernels import cuda_kernel
from .modules import modules_of
from .proofs import Proofs, close, unfused
from .to_metal import in_metal, metal_kernel, translated

# Limits of the kernel: heads up to these sizes. Each block computes a head of values.
# LANES threads share a few rows of its state (Form.state_rows), in registers: a key
# that is read from shared memory serves all of these rows. A block handles up to TILE
# tokens at a time, and its convolution loads the inputs of FEW.
LANES, TILE, FEW = 8, 16, 4
MOST_KEY_SIZE, MOST_VALUE_SIZE = 192, 128
# Indices of a row's inputs are whole numbers of 32 bits.
MOST_INPUTS = 2**31 - 2**20
_TYPES = (mx.bfloat16, mx.float16, mx.float32)
# Bytes of a threadgroup on Metal.
_GROUP_MEMORY = 32 * 2**10


@dataclass(frozen=True)
class Form:
    """All that a kernel is compiled for.

    Args:
        dtype: type of the inputs and the convolution.
        key_heads: heads of queries and keys.
        repeats: heads of values for each head of keys.
        key_size, value_size: sizes of a head.
        kernel_size: size of the convolution.
        eps: epsilon of the gated norm.
        grouped: whether projections put out head after head, each with its queries,
            keys, values and gates (Qwen3-Next); else all queries, then all keys, then
            all values (Qwen3.5).
        types: types of ``A_log``, ``dt_bias`` and the norm.
    """

    dtype: mx.Dtype
    key_heads: int
    repeats: int
    key_size: int
    value_size: int
    kernel_size: int
    eps: float
    grouped: bool
    types: tuple[mx.Dtype, mx.Dtype, mx.Dtype]

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.repeats

    @property
    def state_rows(self) -> int:
        """Rows of the state that a thread computes.

        With two, a prompt takes 0.76 of the time of four (one H200); threads with
        longer rows would have too few registers. On Metal, two were not timed.
        """
        return 2 if self.key_size <= 128 and not mx.metal.is_available() else 4

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        keys = 2 * self.key_heads * self.key_size
        return keys + self.value_heads * self.value_size

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Widths of the inputs, for each token."""
        wide = self.value_heads * self.value_size
        if self.grouped:
            return (self.channels + wide,) * 2 + (2 * self.value_heads,) * 2
        return self.channels, wide, self.value_heads, self.value_heads

    @property
    def known(self) -> bool:
        """Whether the kernel supports this form."""
        memory = (2 * self.key_size + self.value_size + 2) * 4 * TILE
        return (
            not (mx.metal.is_available() and memory > _GROUP_MEMORY)
            and self.dtype in _TYPES
            and self.key_size % (4 * LANES) == 0
            and self.value_size % (32 // LANES * self.state_rows) == 0
            and self.key_size <= MOST_KEY_SIZE
            and self.value_size <= MOST_VALUE_SIZE
            and self.kernel_size > 1
            and all(dtype in _TYPES for dtype in self.types)
        )


class Weights(NamedTuple):
    """The weights of a layer, without its projections."""

    conv: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array


class Inputs(NamedTuple):
    """The outputs of a layer's projections, shape (B, S, ...) each.

    Grouped projections have two arrays: z is in x, and a is in b.
    """

    x: mx.array
    z: mx.array
    b: mx.array
    a: mx.array


class Log(NamedTuple):
    """The arrays that repeating a call needs.

    Args:
        joined: the window before the call and its inputs, shape (B, K - 1 + S, C).
        gates: gates of its tokens, shape (B, S, HV, 2), float32: decay, and beta.
    """

    joined: mx.array
    gates: mx.array


class Results(NamedTuple):
    """The results of a call.

    Args:
        y: the input of the output projection, shape (B, S, HV * DV).
        before: the state before its tokens, after the tokens kept of the previous call.
        after: the state after its tokens.
        log: what repeating the call needs.
    """

    y: mx.array
    before: mx.array
    after: mx.array
    log: Log


@cache
def _kernel(name: str, eps: float, again: bool, ragged: bool) -> Any:
    source = text.SOURCE.replace("@EPS@", f"{eps!r}")
    source = source.replace("@KEPT@", text.KEPT if again else "const int kept = 0;")
    source = source.replace("@OWN@", text.OWN if ragged else text.ALL)
    source = source.replace("@GATES@", text.NOTED if again else "")
    source = source.replace("@MIDDLE@", text.MIDDLE if again else "")
    inputs: tuple[str, ...] = (*Inputs._fields, *Weights._fields, "taped", "state")
    outputs: tuple[str, ...] = ("y", "joined", "gates", "after")
    if again:
        inputs, outputs = (*inputs, "noted", "kept_of"), (*outputs, "middle")
    if ragged:
        inputs = (*inputs, "lengths")
    make: Any = cuda_kernel
    header = text.HEADER
    if mx.metal.is_available():
        make, source, header = metal_kernel, translated(source), in_metal(header)
    return make(name, source, inputs, outputs, header=header, copies_views=False)


def scan(
    form: Form,
    weights: Weights,
    inputs: Inputs,
    past: mx.array | Log,
    state: mx.array,
    kept: mx.array | None = None,
    lengths: mx.array | None = None,
) -> Results:
    """Process the tokens of every row, after those kept of the previous call.

    Args:
        past: the window (B, K - 1, C), or the log of the previous call.
        state: the state before this call, or with a log before the previous call; shape
            (B, HV, DV, DK), float32.
        kept: with a log, how many of its tokens each row has kept, shape (B,), int32.
        lengths: how many of the tokens are a row's own, shape (B,), int32; ``None``:
            all. Outputs of the others are 0; the log has nothing of them.
    """
    rows, tokens = inputs.x.shape[:2]
    again = isinstance(past, Log)
    taped = past.joined if isinstance(past, Log) else past
    state = mx.contiguous(state)
    arrays = [*inputs, *weights, taped, state]
    shapes: list[tuple[int, ...]] = [
        (rows, tokens, form.value_heads * form.value_size),
        (rows, form.kernel_size - 1 + tokens, form.channels),
        (rows, tokens, form.value_heads, 2),
        state.shape,
    ]
    dtypes = [form.dtype, form.dtype, mx.float32, mx.float32]
    if isinstance(past, Log):
        assert kept is not None
        arrays += [past.gates, kept]
        shapes.append(state.shape)
        dtypes.append(mx.float32)
    if lengths is not None:
        arrays.append(lengths)
    threads = form.value_size // form.state_rows * LANES
    a_log, dt_bias, norm = form.types
    name = "gated_delta" + again * "_again" + (lengths is not None) * "_ragged"
    outputs = _kernel(name, form.eps, again, lengths is not None)(
        inputs=arrays,
        template=[
            ("T", form.dtype),
            ("G", form.dtype if dt_bias == form.dtype else mx.float32),
            # MLX distinguishes kernels by these, so they include the types of all
            # inputs.
            *zip(("TA", "TD", "TN"), (a_log, dt_bias, norm), strict=True),
            ("HK", form.key_heads),
            ("R", form.repeats),
            ("Dk", form.key_size),
            ("Dv", form.value_size),
            ("K", form.kernel_size),
            ("GROUPED", form.grouped),
            ("LANES", LANES),
            ("ROWS", form.state_rows),
            ("TILE", TILE),
            ("FEW", FEW),
        ],
        grid=(rows * form.value_heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
    )
    y, joined, gates, after = outputs[:4]
    return Results(y, outputs[4] if again else state, after, Log(joined, gates))


def again(
    form: Form, weights: Weights, log: Log, state: mx.array, kept: mx.array
) -> tuple[mx.array, mx.array]:
    """The window and the state after the tokens that each row has kept of a call.

    Args: as for :func:`scan`.
    """
    # Later tokens change neither the window nor the state.
    rows = log.joined.shape[0]
    nothing = Inputs(*(mx.zeros((rows, 1, n), form.dtype) for n in form.widths))
    results = scan(form, weights, nothing, log, state, kept)
    return results.log.joined[:, : form.kernel_size - 1], results.before


def reference(
    form: Form,
    weights: Weights,
    inputs: Inputs,
    past: mx.array | Log,
    state: mx.array,
    kept: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    rule: Callable[..., tuple[mx.array, mx.array]] = gated_delta.gated_delta_ops,
) -> Results:
    """Compute what :func:`scan` computes, by mlx-lm's operations.

    Args:
        rule: computes the delta rule, as ``gated_delta_ops`` does.
    """
    new, z, b, a = _in_order(form, inputs)
    if not isinstance(past, Log):
        window = past
    else:
        assert kept is not None
        num_before = past.gates.shape[1]
        kept = mx.clip(kept, 0, num_before)
        mask = mx.arange(num_before) < kept[:, None]
        q, k, v = _convolved(form, weights, past.joined)
        decay, beta = past.gates[..., 0], past.gates[..., 1]
        state = gated_delta.gated_delta_ops(q, k, v, decay, beta, state, mask)[1]
        places = kept[:, None] + mx.arange(form.kernel_size - 1)
        window = mx.take_along_axis(past.joined, places[..., None], axis=1)
    joined = mx.concatenate([window, new], axis=1)
    decay = gated_delta.compute_g(weights.a_log, a, weights.dt_bias)
    beta = mx.sigmoid(b)
    q, k, v = _convolved(form, weights, joined)
    valid = None
    if lengths is not None:
        valid = mx.arange(new.shape[1]) < lengths[:, None]
    attended, after = rule(q, k, v, decay, beta, state, valid)
    normed = mx.fast.rms_norm(attended, weights.norm, form.eps)
    y = precise_swiglu(attended, z, normed).reshape(*new.shape[:2], -1)
    if valid is not None:
        y = mx.where(valid[..., None], y, 0)
    gates = mx.stack([decay, beta.astype(mx.float32)], axis=-1)
    return Results(y, state, after, Log(joined, gates))


def _in_order(form: Form, inputs: Inputs) -> list[mx.array]:
    """Inputs of the convolution (B, S, C), z (B, S, HV, DV), b and a (B, S, HV)."""
    x, z, b, a = inputs
    if form.grouped:
        size, values = form.key_size, form.repeats * form.value_size
        x = x.reshape(*x.shape[:2], form.key_heads, -1)
        b = b.reshape(*b.shape[:2], form.key_heads, -1)
        *qkv, z = mx.split(x, [size, 2 * size, 2 * size + values], axis=-1)
        x = mx.concatenate([p.reshape(*p.shape[:2], -1) for p in qkv], axis=-1)
        b, a = (p.reshape(*x.shape[:2], -1) for p in mx.split(b, 2, axis=-1))
    return [x, z.reshape(*x.shape[:2], form.value_heads, form.value_size), b, a]


def _convolved(form: Form, weights: Weights, joined: mx.array) -> list[mx.array]:
    """Queries, keys and values."""
    out = nn.silu(mx.conv1d(joined, weights.conv, groups=form.channels))
    keys = form.key_heads * form.key_size
    q, k, v = (
        part.reshape(*out.shape[:2], heads, -1)
        for part, heads in zip(
            mx.split(out, [keys, 2 * keys], axis=-1),
            (form.key_heads, form.key_heads, form.value_heads),
            strict=True,
        )
    )
    scale = form.key_size**-0.5
    return [*gated_delta.normalize_qk(q, k, inv_scale=scale, eps=1e-6), v]


# -- layers ------------------------------------------------------------------

# By name, so that only models that have them import their modules.
_LAYERS = {
    ("mlx_lm.models.qwen3_5", "GatedDeltaNet"),
    ("mlx_lm.models.qwen3_next", "Qwen3NextGatedDeltaNet"),
}


def is_layer(kind: type) -> bool:
    """Whether a class, or one that it derives from, is of mlx-lm's layers above."""
    return any((k.__module__, k.__name__) in _LAYERS for k in kind.__mro__)


def form_of(layer: Any) -> Form | None:
    """The form of a layer; ``None``: the layer is of another kind."""
    if not is_layer(type(layer)) or "bias" in layer.conv1d:
        return None
    weights = weights_of(layer)
    form = Form(
        dtype=weights.conv.dtype,
        key_heads=layer.num_k_heads,
        repeats=layer.num_v_heads // layer.num_k_heads,
        key_size=layer.head_k_dim,
        value_size=layer.head_v_dim,
        kernel_size=layer.conv_kernel_size,
        eps=layer.norm.eps,
        grouped="in_proj_qkvz" in layer,
        types=(weights.a_log.dtype, weights.dt_bias.dtype, weights.norm.dtype),
    )
    shape = (form.channels, form.kernel_size, 1)
    return form if weights.conv.shape == shape else None


def weights_of(layer: Any) -> Weights:
    """The weights of a layer that has a form."""
    conv = layer.conv1d["weight"]
    return Weights(conv, layer.A_log, layer.dt_bias, layer.norm.weight)


def projected(layer: Any, hidden: mx.array) -> Inputs:
    """The outputs of the projections of a layer that has a form."""
    if "in_proj_qkvz" in layer:
        x, b = layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
        return Inputs(x, x, b, b)
    return Inputs(
        layer.in_proj_qkv(hidden),
        layer.in_proj_z(hidden),
        layer.in_proj_b(hidden),
        layer.in_proj_a(hidden),
    )


def takes(form: Form | None, hidden: mx.array, tokens: int) -> bool:
    """Whether ``tokens`` tokens of every row are left to :func:`scan`.

    On Metal, prompts are MLX's: it has a kernel for them.
    """
    if mx.metal.is_available() and tokens > TILE:
        return False
    return (
        form is not None
        and proven.reached(form)
        and 0 < tokens <= MOST_INPUTS // form.channels
        and hidden.dtype == form.dtype
    )


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """A proof for each form of layers that the model has."""
    return proven.of(
        form_of(module) for _, module in modules_of(model) if is_layer(type(module))
    )


def drawn(
    form: Form, rows: int, tokens: int, seed: int = 0
) -> tuple[Weights, Inputs, mx.array, mx.array]:
    """Random weights, inputs, a window and a state."""
    keys = iter(mx.random.split(mx.random.key(seed), 10))

    def some(*shape: int, dtype: mx.Dtype = form.dtype, scale: float = 1.0) -> mx.array:
        return (mx.random.normal(shape, key=next(keys)) * scale).astype(dtype)

    heads = form.value_heads
    a_log, dt_bias, norm = form.types
    weights = Weights(
        some(form.channels, form.kernel_size, 1, scale=0.5),
        some(heads, dtype=a_log),
        some(heads, dtype=dt_bias),
        some(form.value_size, dtype=norm),
    )
    inputs = Inputs(*(some(rows, tokens, n) for n in form.widths))
    if form.grouped:
        inputs = inputs._replace(z=inputs.x, a=inputs.b)
    window = some(rows, form.kernel_size - 1, form.channels)
    size = (rows, heads, form.value_size, form.key_size)
    return weights, inputs, window, some(*size, dtype=mx.float32, scale=0.1)


def _agrees(form: Form) -> bool:
    """Whether rounds, and a prompt of rows of any length, agree with the reference."""
    kept = mx.array([3, 0, 1])
    weights, first, window, state = drawn(form, 3, 3)
    second = drawn(form, 3, 2, seed=1)[1]
    prompt = (
        drawn(form, 3, TILE + 4, seed=2)[1],
        window,
        state,
        None,
        mx.array([20, 7, 0]),
    )
    # On a GPU MLX would compile a kernel for each of the reference's fused functions,
    # and on a CPU it would need a compiler for them.
    with unfused(), mx.stream(mx.cpu):
        began = reference(form, weights, first, window, state)
        wanted = reference(form, weights, second, began.log, state, kept)
        whole = reference(form, weights, *prompt)
        mx.eval(began, wanted, whole)
    ours = scan(form, weights, first, window, state)
    ended = scan(form, weights, second, ours.log, state, kept)
    return (
        alike(form, ours, began)
        and alike(form, ended, wanted)
        and alike(form, scan(form, weights, *prompt), whole, log=False)
    )


proven = Proofs("gated delta", _agrees, attrgetter("known"))


def alike(form: Form, results: Results, expected: Results, *, log: bool = True) -> bool:
    """Whether two results differ by no more than their numbers' rounding.

    Args:
        log: compare what repeating the call needs, too.
    """
    most = 1e-4 if form.dtype == mx.float32 else 0.03
    logs = [(*each.log,) if log else () for each in (results, expected)]
    both = zip((*results[:3], *logs[0]), (*expected[:3], *logs[1]), strict=True)
    return all(close(one, other, most) for one, other in both)
