"""mlx-lm's cache protocol: what it is, that ours speak it, and its generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import scaled_dot_product_attention

from specdec.cache import (
    BatchCacheList,
    BatchChunkedKVCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheOptions,
    make_batch_caches,
)
from specdec.errors import CacheError

TinyModel = Callable[..., nn.Module]

OURS: dict[str, Callable[[int], Any]] = {
    "linear": BatchKVCache,
    "linear-4bit": lambda b: BatchKVCache(b, bits=4, group_size=32),
    "ring": lambda b: BatchRotatingKVCache(b, max_size=8, keep=1),
    "ring-4bit": lambda b: BatchRotatingKVCache(b, max_size=8, bits=4, group_size=32),
    "chunked": lambda b: BatchChunkedKVCache(b, chunk_size=8),
    "chunked-4bit": lambda b: BatchChunkedKVCache(
        b, chunk_size=8, bits=4, group_size=32
    ),
    "list": lambda b: BatchCacheList(BatchKVCache(b), BatchKVCache(b)),
}


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize("name", OURS)
def test_what_models_and_the_generator_ask_of_a_cache(name: str) -> None:
    """A method that mlx-lm's caches have is lacking, or an empty one counts as none."""
    cache = OURS[name](0)
    needed = public(mlx_lm_cache.CacheList) - {"from_state"}
    if name != "list":
        # `step` is an implementation detail: the block that it grows by.
        needed = public(mlx_lm_cache.BatchKVCache) - {"step"} | {"offset"}
    assert needed <= public(cache)
    assert bool(cache) is True  # models say `if cache and hasattr(...)`
    assert not hasattr(cache, "__len__")
    members = getattr(cache, "caches", [cache])
    assert {bool(each.packing) for each in members} == {"4bit" in name}
    assert hasattr(cache, "bits") is ("4bit" in name and not cache.unpacks)
    cache.extend(OURS[name](2))
    mx.eval([cache.state])
    assert cache.offset.tolist() == [0, 0]
    cache.filter([1])
    assert cache.empty()
    assert cache.nbytes == 0


def script(cache: Any, x: mx.array, prompts: list[int], wide: int) -> list[Any]:
    """Right-padded prompt, decode, trim, filter, extract; what attention gave."""
    outputs = []

    def attend(part: mx.array) -> None:
        mask = cache.make_mask(part.shape[2])
        k, v = cache.update_and_fetch(part, part)
        out = scaled_dot_product_attention(
            part, k, v, cache=cache, scale=0.3, mask=mask
        )
        outputs.append(np.array(out))

    longest = max(prompts)
    cache.prepare(lengths=prompts, right_padding=[longest - n for n in prompts])
    mask = cache.make_mask(longest)
    cache.update_and_fetch(x[:, :, :longest], x[:, :, :longest])
    del mask
    cache.finalize()
    for i in range(longest, longest + 3):
        attend(x[:, :, i : i + 1])
    if cache.is_trimmable():
        assert cache.trim(2) == 2
    attend(x[:, :, -wide:])
    rows = [2, 0]
    cache.filter(rows)
    outputs.append(np.array(cache.offset))
    attend(x[:2, :, :1])
    other = type(cache).merge([cache.extract(0), cache.extract(1)])
    cache.extend(other)
    attend(mx.concatenate([x[:2, :, :wide]] * 2))
    outputs.append(np.array(cache.offset))
    single = cache.extract(0)
    outputs.append(np.array(single.keys[:, :, : single.offset]))
    assert not cache.empty()
    assert cache.nbytes > 0
    return outputs


@pytest.mark.parametrize("window", [None, 64, 8])
def test_the_same_script_on_mlx_lm(window: int | None) -> None:
    prompts = [7, 3, 5]
    x = mx.random.normal((3, 2, 20, 8), key=mx.random.key(0))
    if window is None:
        theirs: Any = mlx_lm_cache.BatchKVCache([0, 0, 0])
        ours: Any = BatchKVCache(3)
    else:
        theirs = mlx_lm_cache.BatchRotatingKVCache(window, [0, 0, 0])
        ours = BatchRotatingKVCache(3, max_size=window, max_write=16)
    wide = 3
    if window == 8:
        # Once full, mlx-lm's ring cannot be trimmed at all; and its mask is wrong
        # for several tokens at once after it has rotated over padded rows.
        ours.is_trimmable = lambda: False
        wide = 1
    results = [script(cache, x, prompts, wide) for cache in (ours, theirs)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


SLIDING = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}


class TestBatchGenerator:
    """mlx-lm's own generator, handed our caches, gives its own tokens."""

    def generate(
        self, model: Any, prompts: list[list[int]], caches: Any, **options: Any
    ) -> dict[int, list[int]]:
        generator = BatchGenerator(model, max_tokens=30, stop_tokens=[], **options)
        uids = generator.insert(
            prompts, [30 - 3 * (i % 4) for i in range(len(prompts))], caches=caches
        )
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                tokens[response.uid].append(response.token)
        generator.close()
        return tokens

    @pytest.mark.parametrize("overrides", [{}, SLIDING], ids=["full", "ring"])
    @pytest.mark.parametrize("step", [4, 64])
    def test_same_tokens(
        self, tiny_model: TinyModel, overrides: Any, step: int
    ) -> None:
        model = tiny_model("llama", **overrides)
        rng = np.random.default_rng(1)
        prompts = [rng.integers(0, 97, n).tolist() for n in (5, 21, 1, 12, 9, 3)]
        options = {
            "prefill_step_size": step,
            "prefill_batch_size": 2,
            "completion_batch_size": 4,
        }
        cache_options = CacheOptions(max_write=max(step, 8))
        ours = [make_batch_caches(model, 1, cache_options) for _ in prompts]
        assert self.generate(model, prompts, ours, **options) == self.generate(
            model, prompts, None, **options
        )


X = mx.zeros((2, 1, 3, 4))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda _: BatchKVCache("x"), "batch_size is 'x': it must be a whole number"),  # type: ignore[arg-type]
        (lambda _: BatchKVCache(-1), "batch_size is -1: it must be 0 or more"),
        (lambda _: BatchKVCache(max_length=0), "max_length is 0: it must be 1 or more"),
        (lambda _: BatchRotatingKVCache(max_size="x"), "max_size is 'x': it must be"),  # type: ignore[arg-type]
        (lambda _: BatchChunkedKVCache(chunk_size=1.5), "chunk_size is 1.5: it must"),  # type: ignore[arg-type]
        (
            lambda c: c.trim_per_sequence([1.5, 1]),
            "a count of tokens to trim is 1.5: it must be a whole number",
        ),
        (lambda c: c.trim_per_sequence([1, -1]), "tokens to trim is -1: it must be"),
        (lambda c: c.trim_per_sequence([1]), "trim_per_sequence got shape (1,)"),
        (lambda c: c.trim_per_sequence(mx.array([[1, 1]])), "trim_per_sequence got sh"),
        (lambda c: c.extract(7), "extract got row 7: the batch has 2"),
        (lambda c: c.extract(-1), "extract got row -1: the batch has 2"),
        (lambda c: c.filter([0, 2]), "filter got rows [0, 2]: the batch has 2"),
        (lambda c: c.filter([0.5]), "a row is 0.5: it must be a whole number"),
        (lambda c: c.prepare(lengths=[1.5, 1]), "a length is 1.5: it must be a whole"),
        (lambda c: c.prepare(right_padding=[1, "x"]), "a padding is 'x': it must be"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(
    ask: Callable[[Any], Any], message: str
) -> None:
    cache = BatchKVCache(2)
    cache.update_and_fetch(X, X)
    with pytest.raises(CacheError) as caught:
        ask(cache)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert cache.offset.tolist() == [3, 3]


def test_counts_of_numpy_and_mlx_are_whole_numbers() -> None:
    cache = BatchKVCache(2)
    cache.update_and_fetch(X, X)
    counts: list[Any] = [np.int64(1), mx.array(2)]
    cache.trim_per_sequence(counts)
    assert cache.offset.tolist() == [2, 1]
