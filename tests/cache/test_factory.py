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
    BatchCacheList,
    BatchKVCache,
    CacheOptions,
    check_caches,
    extend_caches,
    factory,
    make_batch_caches,
    maybe_quantize,
)
from specdec.cache.columns import counts_columns
from specdec.errors import CacheError, UnsupportedModelError
from specdec.models.row_positions import with_row_positions

from .small_models import (
    AFM7,
    LLAMA4,
    MINIMAX_M3,
    MODELS,
    ChunkedModel,
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
    made = make_batch_caches(model, 2, options)
    assert [tuple(c.packing.values()) for c in made] == [(4, 32)] * 3 + [(8, 64)]


def test_kv_bits_later() -> None:
    options = CacheOptions(
        max_write=4, kv_bits=8, kv_group_size=32, quantized_kv_start=6
    )
    several = mlx_lm_cache.CacheList(mlx_lm_cache.KVCache(), mlx_lm_cache.KVCache())
    caches = make_batch_caches(Asking(mlx_lm_cache.KVCache(), several), 1, options)
    x = mx.ones((1, 1, 3, 32))

    def write() -> None:
        for cache in caches:
            for member in getattr(cache, "caches", [cache]):
                member.update_and_fetch(x, x)

    write()
    assert not maybe_quantize(caches, options)
    write()
    assert maybe_quantize(caches, options)
    assert isinstance(caches[1], BatchCacheList)
    assert [c.packing["bits"] for c in (caches[0], *caches[1].caches)] == [8, 8, 8]
    assert caches[0].offset is caches[1].offset
    write()
    assert not maybe_quantize(caches, options)


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


def test_max_kv_size_bounds_full_layers() -> None:
    options = CacheOptions(max_write=4, max_kv_size=20)
    model = Asking(mlx_lm_cache.KVCache(), mlx_lm_cache.RotatingKVCache(8))
    bounded, own = make_batch_caches(model, 1, options)
    assert (bounded.ring.window, bounded.ring.keep) == (16, 4)
    assert (own.ring.window, own.ring.keep) == (8, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("cache", "name"),
        [
            (mlx_lm_cache.ConcatenateKVCache(), "ConcatenateKVCache"),
            (SimpleNamespace(), "SimpleNamespace"),
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

    def test_subclasses_may_behave_differently(self) -> None:
        class Odd(mlx_lm_cache.KVCache):
            pass

        assert "has Odd layers" in refusal(Asking(Odd()))  # type: ignore[no-untyped-call]

    def test_llama4_takes_one_position_for_all_rows(
        self, tiny_model: TinyModel
    ) -> None:
        message = refusal(tiny_model("llama4", **LLAMA4))
        assert "mlx_lm.models.llama4" in message
        assert "start_position" in message
        check_caches(with_row_positions(tiny_model("llama4", **LLAMA4)), "twin")

    def test_gemma2_does_not_batch(self, tiny_model: TinyModel) -> None:
        """Its code takes no mask per row: mlx-lm's own batch caches fail too."""
        model: Any = tiny_model("gemma2", query_pre_attn_scalar=8)
        assert "mlx_lm.models.gemma2" in refusal(model)
        tokens = mx.zeros((3, 2), mx.int32)
        caches = [mlx_lm_cache.BatchKVCache([0, 1, 0]) for _ in range(2)]
        with pytest.raises(ValueError, match="broadcast"):
            model(tokens, cache=caches)
        check_caches(with_row_positions(model), "twin")

    def test_positions_by_the_columns_that_are_read(
        self, tiny_model: TinyModel
    ) -> None:
        """Right for the longest row alone, and without any error."""
        model = tiny_model("afm7", **AFM7)
        assert "(mlx_lm.models.afm7) that take the number of col" in refusal(model)
        check_caches(with_row_positions(model), "twin")
        sparse = tiny_model("minimax_m3_vl", **MINIMAX_M3)
        assert "mlx_lm.models.minimax_m3_vl" in refusal(sparse)
        check_caches(with_row_positions(sparse), "twin")

    @pytest.mark.parametrize("name", ["afm7", "minimax_m3_vl", *MODELS])
    def test_columns_are_known_from_positions(
        self, name: str, tiny_model: TinyModel
    ) -> None:
        """No good model is refused; one that chooses keys by columns is not let in."""
        wrong: dict[str, dict[str, Any]] = {"afm7": AFM7, "minimax_m3_vl": MINIMAX_M3}
        arch, arguments = MODELS.get(name, (name, wrong.get(name, {})))
        model = tiny_model(arch, **arguments)
        caches = make_batch_caches(model, 3, CacheOptions(max_write=2))
        assert counts_columns(model, caches) is (name in wrong)

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

    def test_chunked_models_of_ones_own_work(self) -> None:
        check_caches(ChunkedModel(), "chunked")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_write": 0}, "max_write is 0: it must be 1 or more"),
        ({"max_write": 2.5}, "max_write is 2.5: it must be a whole number"),
        ({"max_write": "x"}, "max_write is 'x': it must be a whole number"),
        ({"max_write": None}, "max_write is None: it must be a whole number"),
        ({"read_bucket": 0}, "read_bucket is 0: it must be 1 or more"),
        ({"read_bucket": 1.0}, "read_bucket is 1.0: it must be a whole number"),
        ({"max_length": 0}, "max_length is 0: it must be 1 or more"),
        ({"max_length": "9"}, "max_length is '9': it must be a whole number"),
        ({"kv_bits": 0}, "kv bits is 0: it must be 4 or 8"),
        ({"kv_bits": 3}, "kv bits is 3: it must be 4 or 8"),
        ({"kv_bits": 4.0}, "kv bits is 4.0: it must be a whole number"),
        ({"kv_bits": 4, "kv_group_size": 16}, "kv group size is 16: it must be 32, "),
        ({"kv_bits": 4, "kv_group_size": "32"}, "kv group size is '32': it must be a"),
        ({"quantized_kv_start": -1}, "quantized_kv_start is -1: it must be 0 or more"),
        ({"quantized_kv_start": 0.5}, "quantized_kv_start is 0.5: it must be a whole"),
        ({"max_kv_size": 4}, "max_kv_size is 4: it must be more than the first 4"),
        ({"max_kv_size": 9.5}, "max_kv_size is 9.5: it must be a whole number"),
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
        found = set()
        for info in pkgutil.iter_modules(mlx_lm.models.__path__):
            spec = importlib.util.find_spec(f"mlx_lm.models.{info.name}")
            assert spec is not None
            assert spec.origin is not None
            with open(spec.origin, encoding="utf-8") as file:
                source = file.read()
            if factory._BOOLEAN_USE.search(source):
                found.add(info.name)
        assert {
            "bailing_hybrid", "deepseek_v3", "deepseek_v32", "gemma2",
            "glm4_moe_lite", "kimi_linear", "longcat_flash", "mistral4",
        } <= found  # fmt: skip
        assert not found & {
            "gemma3_text", "gemma3n", "gemma4_text", "gpt_oss", "llama",
            "ministral3", "mixtral", "phi3", "qwen2", "qwen3", "smollm3",
        }  # fmt: skip

    def test_a_model_without_source_gets_boolean_masks(self) -> None:
        scope: dict[str, Any] = {"nn": nn, "__name__": "nowhere"}
        exec("class Hidden(nn.Module): pass", scope)
        assert factory.reads_boolean_masks(scope["Hidden"]())
