"""Which caches a model gets, and which models are refused, by name and in one line."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from specdec.cache import (
    BatchKVCache,
    CacheOptions,
    check_caches,
    extend_caches,
    factory,
    make_batch_caches,
    maybe_quantize,
)
from specdec.errors import CacheError, UnsupportedModelError
from specdec.models.row_positions import with_row_positions

from .small_models import (
    AFM7,
    LLAMA4,
    MINIMAX_M3,
    MODELS,
)

TinyModel = Callable[..., nn.Module]
OPTIONS = CacheOptions(max_write=16, read_bucket=4, max_length=500)


def names(model: Any, options: CacheOptions = OPTIONS) -> list[str]:
    return [type(c).__name__ for c in make_batch_caches(model, 2, options)]


def refusal(model: Any, options: CacheOptions | None = None) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_caches(model, "some/model", options)
    message = str(caught.value)
    assert message.startswith(("some/model: ", "some/model has "))
    assert "\n" not in message
    return message


class Asking(nn.Module):
    """A model that asks for the given caches."""

    def __init__(self, *caches: Any):
        super().__init__()  # type: ignore[no-untyped-call]
        self._caches = caches

    def make_cache(self) -> list[Any]:
        return list(self._caches)


LINEAR, RING, LIST = "BatchKVCache", "BatchRotatingKVCache", "BatchCacheList"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("full", [LINEAR, LINEAR]),
        ("sliding", [RING, LINEAR]),
        ("gemma3", [RING, RING, LINEAR]),
        ("gpt-oss", [RING, LINEAR]),
        ("mistral", [RING, LINEAR]),
        ("latent", [LINEAR, LINEAR]),
        ("list", [LIST, LIST]),
        ("shared-kv", [RING, LINEAR]),  # of four layers
        ("shared-kv-3n", [RING, LINEAR]),
    ],
)
def test_layer_by_layer(name: str, kinds: list[str], tiny_model: TinyModel) -> None:
    arch, arguments = MODELS[name]
    assert names(tiny_model(arch, **arguments)) == kinds


def test_settings_reach_the_caches() -> None:
    model = Asking(
        mlx_lm_cache.KVCache(),
        mlx_lm_cache.RotatingKVCache(32, keep=3),
        mlx_lm_cache.ChunkedKVCache(64),
        mlx_lm_cache.QuantizedKVCache(group_size=32, bits=4),
        mlx_lm_cache.CacheList(mlx_lm_cache.KVCache(), mlx_lm_cache.KVCache()),
    )
    full, ring, chunked, quantized, several = make_batch_caches(model, 2, OPTIONS)
    assert (full.max_length, full.read_bucket, full.batch_size) == (500, 4, 2)
    assert (ring.ring.window, ring.ring.keep, ring.ring.max_write) == (29, 3, 16)
    assert (chunked.ring.window, chunked.ring.max_write) == (64, 16)
    assert quantized.packing == {"bits": 4, "group_size": 32}
    assert [type(c).__name__ for c in several.caches] == [LINEAR, LINEAR]
    assert full.offset is ring.offset is several.offset


def test_kv_bits_from_the_start() -> None:
    options = CacheOptions(max_write=4, kv_bits=4, kv_group_size=32)
    model = Asking(
        mlx_lm_cache.KVCache(),
        mlx_lm_cache.RotatingKVCache(32),
        mlx_lm_cache.ChunkedKVCache(64),
        mlx_lm_cache.QuantizedKVCache(group_size=64, bits=8),
    )
    assert names(model, options) == [LINEAR, RING, "BatchChunkedKVCache", LINEAR]
    caches = make_batch_caches(model, 2, options)
    assert [tuple(c.packing.values()) for c in caches] == [(4, 32)] * 3 + [(8, 64)]


@pytest.mark.parametrize("late", ["batch", "newcomer", "both", "neither"])
def test_rows_join_whichever_side_is_quantized(late: str) -> None:
    several = mlx_lm_cache.CacheList(mlx_lm_cache.KVCache(), mlx_lm_cache.KVCache())
    model = Asking(mlx_lm_cache.KVCache(), mlx_lm_cache.RotatingKVCache(8), several)
    options = CacheOptions(
        max_write=4, kv_bits=8, kv_group_size=32, quantized_kv_start=5
    )
    sides = {}
    for name in ("batch", "newcomer"):
        sides[name] = caches = make_batch_caches(model, 2, options)
        x = mx.ones((2, 1, 3 if late in (name, "both") else 6, 32))
        for cache in caches:
            for member in getattr(cache, "caches", [cache]):
                member.update_and_fetch(x, x)
        maybe_quantize(caches, options)
    batch = sides["batch"]
    extend_caches(batch, sides["newcomer"])
    members = [*batch[:2], *batch[2].caches]
    assert {bool(c.packing) for c in members} == {late != "both"}
    assert {tuple(c.offset.tolist()) for c in members} == {
        {
            "batch": (3, 3, 6, 6),
            "newcomer": (6, 6, 3, 3),
            "both": (3, 3, 3, 3),
            "neither": (6, 6, 6, 6),
        }[late]
    }
    extend_caches(batch, make_batch_caches(model, 1, options))
    batch[0].filter([])
    extend_caches(batch[:1], make_batch_caches(model, 1, options)[:1])


class Odd(mlx_lm_cache.KVCache):
    """A subclass, which may behave differently."""


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "arguments", "reason"),
        [
            ("llama4", LLAMA4, "start_position"),  # one position for all rows
            ("gemma2", {"query_pre_attn_scalar": 8}, ""),  # no mask for each row
            # Right for the longest row alone, and without any error.
            ("afm7", AFM7, "that take the number of columns"),
            ("minimax_m3_vl", MINIMAX_M3, ""),
            *((name, None, None) for name in MODELS),
        ],
    )
    def test_layers_that_do_not_know_their_rows_positions(
        self, name: str, arguments: Any, reason: str | None, tiny_model: TinyModel
    ) -> None:
        """A good model is refused, a bad one let in, or a bad one's twin refused."""
        arch, arguments = MODELS.get(name, (name, arguments))
        model = tiny_model(arch, **arguments)
        if reason is None:
            check_caches(model, name)
            return
        message = refusal(model)
        assert f"mlx_lm.models.{name}" in message
        assert reason in message
        check_caches(with_row_positions(model), "twin")

    @pytest.mark.parametrize(
        ("cache", "name"),
        [
            (mlx_lm_cache.ConcatenateKVCache(), "ConcatenateKVCache"),
            (SimpleNamespace(), "SimpleNamespace"),
            (Odd(), "Odd"),  # type: ignore[no-untyped-call]
            (
                mlx_lm_cache.CacheList(
                    mlx_lm_cache.KVCache(), mlx_lm_cache.ConcatenateKVCache()
                ),
                "ConcatenateKVCache",
            ),
        ],
    )
    def test_classes_without_counterpart(self, cache: Any, name: str) -> None:
        model = Asking(mlx_lm_cache.KVCache(), cache)
        assert f"has {name} layers, from layer 1 on," in refusal(model)
        with pytest.raises(UnsupportedModelError, match=name):
            make_batch_caches(model, 1, OPTIONS)

    @pytest.mark.parametrize(
        ("head_size", "group_size", "reason"),
        [
            (64, 128, "group size 128 does not divide its head size 64: use 32 or 64"),
            (32, 64, "group size 64 does not divide its head size 32: use 32"),
            (40, 64, "its head size 40 cannot be quantized in groups of 32, 64 or 128"),
            (16, 32, "its head size 16 cannot be quantized in groups of 32, 64 or 128"),
        ],
    )
    def test_head_sizes_that_the_group_does_not_divide(
        self, head_size: int, group_size: int, reason: str, tiny_model: TinyModel
    ) -> None:
        model = tiny_model("llama", head_dim=head_size)
        options = CacheOptions(max_write=4, kv_bits=4, kv_group_size=group_size)
        if reason.startswith("its"):
            expected = f"some/model: {reason}: leave out kv_bits"
        else:
            expected = f"some/model: kv {reason}"
        assert refusal(model, options) == expected
        check_caches(model, "llama", CacheOptions(max_write=4))

    def test_keys_and_values_of_different_head_sizes(self) -> None:
        cache = BatchKVCache(1, bits=4, group_size=128)
        keys, values = mx.zeros((1, 1, 2, 192)), mx.zeros((1, 1, 2, 128))
        with pytest.raises(CacheError) as caught:
            cache.update_and_fetch(keys, values)
        assert str(caught.value) == (
            "kv group size 128 does not divide its head sizes 192 and 128: use 32 or 64"
        )

    @pytest.mark.parametrize("start", [0, 1000])
    def test_code_that_takes_no_packed_keys_gets_them_unpacked(
        self, start: int, tiny_model: TinyModel
    ) -> None:
        """Known before any work, even where quantization would start later."""
        arch, arguments = MODELS["gpt-oss"]
        sinks = tiny_model(arch, **{**arguments, "head_dim": 32})
        options = CacheOptions(
            max_write=4,
            kv_bits=8,
            kv_group_size=32,
            quantized_kv_start=start,
            unpacks=False,
        )
        unpacking = replace(options, unpacks=True)
        assert check_caches(sinks, "sinks", options) == unpacking
        usual = tiny_model("llama", head_dim=32)
        assert check_caches(usual, "usual", options) == options
        # Of a model that fails with dense keys too, nothing else is said.
        dense = replace(options, kv_bits=None)
        assert "kv bits" not in refusal(tiny_model("llama4", **LLAMA4), dense)

    def test_nothing_is_computed(self, tiny_model: TinyModel) -> None:
        model = tiny_model("llama")
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        check_caches(model, "llama")
        assert mx.get_peak_memory() - before < 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_write": 0}, "max_write is 0: it must be 1 or more"),
        ({"max_write": "x"}, "max_write is 'x': it must be a whole number"),
        ({"read_bucket": 0}, "read_bucket is 0: it must be 1 or more"),
        ({"max_length": 0}, "max_length is 0: it must be 1 or more"),
        ({"kv_bits": 3}, "kv bits is 3: it must be 4 or 8"),
        ({"kv_bits": 4, "kv_group_size": 16}, "kv group size is 16: it must be 32, "),
        ({"quantized_kv_start": -1}, "quantized_kv_start is -1: it must be 0 or more"),
        ({"max_kv_size": 4}, "max_kv_size is 4: it must be more than the first 4"),
    ],
)
def test_options_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError) as caught:
        CacheOptions(**{"max_write": 4, **arguments})
    assert str(caught.value).startswith(message)


class TestMasks:
    @pytest.mark.parametrize("name", MODELS)
    def test_additive_only_where_the_model_does_not_mind(
        self, name: str, tiny_model: TinyModel
    ) -> None:
        arch, arguments = MODELS[name]
        boolean = factory.reads_boolean_masks(tiny_model(arch, **arguments))
        assert boolean is (name in {"latent", "list"})

    def test_every_boolean_reader_of_mlx_lm_is_known(self) -> None:
        """Whoever hands a mask to more than attention is found in its source."""
        readers = set()
        for info in pkgutil.iter_modules(mlx_lm.models.__path__):
            spec = importlib.util.find_spec(f"mlx_lm.models.{info.name}")
            assert spec is not None
            assert spec.origin is not None
            with open(spec.origin, encoding="utf-8") as file:
                source = file.read()
            if factory._BOOLEAN_USE.search(source):
                readers.add(info.name)
        assert {
            "bailing_hybrid", "deepseek_v3", "deepseek_v32", "gemma2",
            "glm4_moe_lite", "kimi_linear", "longcat_flash", "mistral4",
        } <= readers  # fmt: skip
        assert not readers & {
            "gemma3_text", "gemma3n", "gemma4_text", "gpt_oss", "llama",
            "ministral3", "mixtral", "phi3", "qwen2", "qwen3", "smollm3",
        }  # fmt: skip

    def test_a_model_without_source_gets_boolean_masks(self) -> None:
        scope: dict[str, Any] = {"nn": nn, "__name__": "nowhere"}
        exec("class Hidden(nn.Module): pass", scope)
        assert factory.reads_boolean_masks(scope["Hidden"]())
