"""Attention of few queries: who computes what, and on a GPU the kernel itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from specdec import EngineConfig, SamplingParams, SpecDecoder, backend
from specdec.cuda import attention_patch, cache_write, decode_attention
from specdec.cuda.attention_patch import take_few_queries
from specdec.cuda.kernels import TYPES
from specdec.models import precision
from specdec.tools.decoding import token_level
from tests.cuda.emulation.cuda import needs_cuda

TinyModel = Callable[..., nn.Module]


def reference(q: Any, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
    """What the kernel computes, in float32 and rounded once."""
    q32, k32, v32 = (x.astype(mx.float32) for x in (q, k, v))
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        mask = mask.astype(mx.float32)
    found = mx.fast.scaled_dot_product_attention(q32, k32, v32, scale=scale, mask=mask)
    return found.astype(q.dtype)


def right(sizes: Iterable[int]) -> dict[tuple[int, mx.Dtype], bool]:
    """As if the kernel had been tried for these sizes of heads."""
    return dict.fromkeys(product(sizes, TYPES), True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A stand-in for the kernel: rows, queries and columns of each attention."""
    calls: list[tuple[int, ...]] = []

    def stand_in(q: Any, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
        calls.append((q.shape[0], q.shape[2], k.shape[2]))
        return reference(q, k, v, scale, mask)

    monkeypatch.setattr(decode_attention, "attention", stand_in)
    monkeypatch.setattr(decode_attention.proven, "verdicts", right((8, 16, 64)))
    monkeypatch.setattr(decode_attention, "SIZES", (8, 16, 64))
    return calls


def model_of(tiny_model: TinyModel, kind: str = "llama") -> nn.Module:
    model = tiny_model(kind)
    precision.cast(model, mx.bfloat16)
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_models_attention_is_asked_for_few_queries_alone(
    tiny_model: TinyModel, asked: list[tuple[int, ...]], kind: str
) -> None:
    model = model_of(tiny_model, kind)
    cache, usual = make_prompt_cache(model), make_prompt_cache(model)
    prompt, more = mx.arange(20)[None], mx.array([[5, 6, 7]])
    expected = [model(prompt, cache=usual), model(more, cache=usual)]
    take_few_queries(model)
    found = [model(prompt, cache=cache)]
    assert not asked  # a prompt's queries are many
    found.append(model(more, cache=cache))
    assert len(asked) == len(model.layers)
    for one, other in zip(found, expected, strict=True):
        scale: Any = mx.abs(other).max().item()
        np.testing.assert_allclose(
            one.astype(mx.float32), other.astype(mx.float32), atol=0.03 * scale
        )


def test_what_trains_or_has_no_cache_is_left_to_mlx(
    tiny_model: TinyModel, asked: list[tuple[int, ...]]
) -> None:
    model = model_of(tiny_model)
    take_few_queries(model)
    tokens = mx.array([[1, 2, 3]])
    grads = nn.value_and_grad(model, lambda x: model(x).sum())(tokens)[1]
    mx.eval(grads)
    assert not asked


def test_nothing_is_tried_while_attention_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that is being built would evaluate its arrays."""
    monkeypatch.setattr(decode_attention.proven, "verdicts", {})
    monkeypatch.setattr(decode_attention.proven, "_agrees", lambda form: True)
    assert not decode_attention.takes(**arrays())
    assert decode_attention.proven((64, mx.bfloat16))
    assert decode_attention.takes(**arrays())
    assert not decode_attention.takes(**arrays(dtype=mx.float16))


def arrays(**changes: Any) -> dict[str, Any]:
    """Arguments of :func:`few_queries.takes` that it accepts, but for ``changes``."""
    sizes = {"rows": 2, "heads": 6, "tokens": 3, "size": 64, "kv": 2, "columns": 40}
    sizes |= {k: v for k, v in changes.items() if k in sizes}
    b, h, s, d, kv, held = sizes.values()
    kind = changes.get("dtype", mx.bfloat16)
    made: dict[str, Any] = {
        "queries": mx.zeros((b, h, s, d), kind),
        "keys": mx.zeros((b, kv, held, d), kind),
        "values": mx.zeros((b, kv, held, d), kind),
        "mask": mx.zeros((b, 1, s, held), kind),
    }
    return made | {k: v for k, v in changes.items() if k in made}


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"dtype": mx.float16}, True),
        ({"mask": "causal"}, True),
        ({"mask": mx.ones((2, 1, 3, 40), mx.bool_)}, True),
        ({"mask": mx.ones((1, 1, 3, 40), mx.bool_)}, True),
        ({"tokens": decode_attention.MOST_TOKENS}, True),
        ({"tokens": decode_attention.MOST_TOKENS + 1}, False),
        ({"columns": 5000}, True),
        ({"size": 256, "columns": 9000}, True),
        ({"dtype": mx.float32}, False),
        ({"size": 80}, False),
        ({"heads": 7}, False),
        ({"mask": None}, False),
        ({"mask": mx.ones((2, 6, 3, 40), mx.bool_)}, False),
        ({"mask": mx.ones((3, 1, 3, 40), mx.bool_)}, False),
        ({"mask": mx.ones((3, 40), mx.bool_)}, False),
        ({"mask": mx.zeros((2, 1, 3, 40), mx.float32)}, False),
        ({"values": mx.zeros((2, 2, 40, 128), mx.bfloat16)}, False),
        (
            dict.fromkeys(("keys", "values"), mx.zeros((1, 2, 40, 64), mx.bfloat16)),
            False,
        ),
        ({"keys": (mx.zeros((2, 2, 40, 8)),) * 3}, False),
        ({"tokens": 1, "mask": "causal"}, False),
        ({"tokens": 1, "mask": None, "size": 256}, True),
        ({"size": 256, "mask": None}, False),
    ],
)
def test_what_the_kernel_takes(
    changes: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        decode_attention.proven, "verdicts", right(decode_attention.SIZES)
    )
    assert decode_attention.takes(**arrays(**changes)) is taken


def test_attention_sinks_are_left_to_mlx(asked: list[tuple[int, ...]]) -> None:
    a = arrays(mask="causal")
    sinks = mx.zeros((6,), mx.bfloat16)
    names = ("queries", "keys", "values")
    q, k, v = (a[name] for name in names)
    attention_patch.attend(q, k, v, object(), 0.1, "causal", sinks=sinks)
    assert not asked
    attention_patch.attend(q, k, v, object(), 0.1, "causal")
    assert len(asked) == 1


def test_decoding_asks_for_it_and_says_the_same(
    tiny_model: TinyModel,
    asked: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of different lengths, in buckets of columns, as where shapes repeat."""
    made = replace(
        backend.defaults(),
        read_bucket=32,
        static_shapes=True,
        costs_by_token=False,
        pad_single_token=True,
    )
    monkeypatch.setattr(backend, "defaults", lambda: made)
    model = tiny_model("llama").eval()
    # In float32 the stand-in rounds nothing, so that tokens are the same.
    for module in (decode_attention, attention_patch):
        monkeypatch.setattr(module, "TYPES", {mx.float32: "f32"})
    monkeypatch.setattr(decode_attention.proven, "verdicts", {(8, mx.float32): True})
    monkeypatch.setattr(cache_write.proven, "verdicts", {(8, mx.float32): False})
    config = EngineConfig(batch_size=3, num_draft_tokens=2)
    prompts, params = [[1, 2, 3], [4, 5], [6] * 30], SamplingParams(max_tokens=20)

    def texts() -> list[list[int]]:
        decoder = SpecDecoder(token_level(model), drafter="ngram", config=config)
        return [r.token_ids for r in decoder.generate(prompts, params)]

    expected = texts()
    take_few_queries(model)
    assert texts() == expected
    assert {tokens for _, tokens, _ in asked} >= {2, 3}
    assert all(columns % 32 == 0 for *_, columns in asked if columns > 30)


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", decode_attention.SIZES)
@pytest.mark.parametrize(("heads", "kv"), [(9, 3), (12, 2), (4, 4), (32, 1)])
def test_the_kernel_computes_attention(
    size: int, heads: int, kv: int, dtype: mx.Dtype
) -> None:
    for rows, tokens, held in ((1, 2, 5), (3, 5, 256), (2, 16, 300), (2, 1, 700)):
        q, k, v = drawn(rows, heads, kv, tokens, held, size, dtype)
        seen = visible(rows, tokens, held)
        added = mx.where(seen, 0.0, -mx.inf).astype(dtype)
        for mask in (seen, added, "causal"):
            exact = reference(q, k, v, 0.1, mask).astype(mx.float32)
            found = decode_attention.attention(q, k, v, 0.1, mask).astype(mx.float32)
            off = mx.abs(found - exact).max() / mx.abs(exact).max()
            assert (off < 0.02).item(), (rows, tokens, held, mask)


def drawn(
    rows: int, heads: int, kv: int, tokens: int, held: int, size: int, dtype: mx.Dtype
) -> list[mx.array]:
    """Queries, and the keys and values that are read of a longer cache."""
    q = mx.random.normal((rows, tokens, heads, size), key=mx.random.key(0))
    k, v = (
        mx.random.normal((rows, kv, held + 7, size), key=mx.random.key(i))
        for i in (1, 2)
    )
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return [q.transpose(0, 2, 1, 3), k[:, :, :held], v[:, :, :held]]


def visible(rows: int, tokens: int, held: int) -> mx.array:
    """Rows of different lengths, boolean, shape (rows, 1, tokens, held)."""
    last = mx.maximum(held - tokens - 3 * mx.arange(rows), 0)[:, None, None, None]
    return mx.arange(held) <= last + mx.arange(tokens)[:, None]


def alone_the_same(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    seen: mx.array,
    whole: mx.array,
    row: int,
    token: int,
) -> bool:
    """Whether a query has its bits of ``whole`` with its first 256 columns alone."""
    rows, tokens = slice(row, row + 1), slice(token, token + 1)
    keys, values = k[rows, :, :256], v[rows, :, :256]
    mask = seen[rows, :, tokens, :256]
    one = decode_attention.attention(q[rows, :, tokens], keys, values, 0.1, mask)
    return bool(mx.array_equal(one, whole[rows, :, tokens]).item())
