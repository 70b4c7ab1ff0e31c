"""Formulas against reference points, and capacities against their definition."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cache.capacity import (
    cache_slots,
    grown_capacity,
    padded_length,
    round_up,
)
from specdec.errors import CacheError, ConfigError
from specdec.memory import (
    logits_bytes,
    quantized_elem_bytes,
    recommend_quantization,
    weight_bytes,
)
from specdec.utils.sizes import format_size, parse_size

GIB = 1 << 30
K = 1024


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_quantized_elements_are_as_mlx_packs_them(
    bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    """Scales or biases forgotten, or counted in another type."""
    keys = mx.zeros((2, 4, 8, 128), dtype)
    packed = sum(a.nbytes for a in mx.quantize(keys, group_size=group_size, bits=bits))
    each = quantized_elem_bytes(bits, group_size, scale_bytes=dtype.size)
    assert each * keys.size == packed


def test_figures_of_the_documentation() -> None:
    assert quantized_elem_bytes(4) == 4.5 / 8
    assert quantized_elem_bytes(8) == 8.5 / 8
    assert logits_bytes(8, 3, 151_936, 2) == 8 * 4 * 151_936 * 2
    assert weight_bytes(8e9, 16) == 16_000_000_000
    assert weight_bytes(8e9, 4) == 4_500_000_000


# -- recommendations -----------------------------------------------------------


def kv_of_8b(ctx_len: int) -> int:
    return 32 * 2 * 8 * 128 * 2 * ctx_len


@pytest.mark.parametrize(
    ("memory", "kv_bytes", "bits"),
    [
        ("24GB", kv_of_8b(8 * K), 16),
        ("24GB", kv_of_8b(128 * K), 4),
        ("24GB", None, 16),
        ("18GB", None, 8),  # 16 GB of weights and 2 GiB do not fit
        ("8GB", None, 4),
        ("6GB", None, None),
    ],
)
def test_weights_for_a_machine(
    memory: str, kv_bytes: int | None, bits: int | None
) -> None:
    assert recommend_quantization(8e9, parse_size(memory), kv_bytes) == bits


def test_what_exactly_fits_is_taken() -> None:
    assert recommend_quantization(1000, 2000, 0) == 16
    assert recommend_quantization(1000, 1999, 0) == 8
    with pytest.raises(ConfigError, match="it must be 0 or more"):
        recommend_quantization(1000, -1)


# -- capacities ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needed", "limit", "capacity"),
    [(0, None, 256), (1, None, 256), (257, None, 512), (513, 600, 600),
     (5000, None, 8192), (100, 100, 100), (300, 300, 300)],
)  # fmt: skip
def test_capacities(needed: int, limit: int | None, capacity: int) -> None:
    assert grown_capacity(needed, limit) == capacity


def test_a_limit_is_never_passed() -> None:
    with pytest.raises(CacheError, match="needs 301 cache slots"):
        grown_capacity(301, 300)


@given(n=st.integers(0, 999), multiple=st.integers(1, 99))
def test_round_up(n: int, multiple: int) -> None:
    up = round_up(n, multiple)
    assert up % multiple == 0
    assert 0 <= up - n < multiple


def test_a_ring_holds_its_window_and_a_write() -> None:
    assert cache_slots(0, window=512) == 0
    assert cache_slots(100, window=512, max_write=5) == 256
    assert cache_slots(9999, window=512, max_write=5) == 516
    assert cache_slots(9999, window=508, keep=4, max_write=1) == 512
    assert cache_slots(9999, window=4096, max_write=512, max_length=10_000) == 4607
    assert cache_slots(400, window=4096, max_write=512, max_length=500) == 500


def test_prefill_touches_whole_buckets() -> None:
    assert padded_length(700, 512, 256) == 768
    assert padded_length(512, 512, 256) == 512
    assert padded_length(700, 512, 1) == 700
    assert padded_length(0, 512, 256) == 0


# -- sizes as people write them ----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("6.5GiB", 6.5 * GIB), ("512 mb", 512e6), ("1KiB", 1024),
     ("123000000", 123e6), ("1tb", 1e12), ("10B", 10)],
)  # fmt: skip
def test_sizes(text: str, size: float) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1GB", "0", "8 apples", "1e9", "8GBs",
     "9" * 400 + "GB", "9" * 5000],
)  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size: write it as 8GB"):
        parse_size(text)
    if text != "0":
        with pytest.raises(ConfigError, match="is not a size: write it as 8GB"):
            parse_size(text, or_none=True)


@pytest.mark.parametrize("text", ["0", "0MB", "0.0GiB"])
def test_none_at_all(text: str) -> None:
    """A cache that cannot be turned off."""
    assert parse_size(text, or_none=True) == 0


@pytest.mark.parametrize("text", ["8", "6.5", "999999"])
def test_a_number_that_has_lost_its_unit(text: str) -> None:
    """Nobody means eight bytes."""
    with pytest.raises(ConfigError, match=f"write the unit, as in {text}GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 KB"), (5 * 10**9, "5.00 GB"),
     (10**9 - 1, "1.00 GB"), (2 * 10**11, "200.0 GB"), (3 * 10**15, "3000.0 TB")],
)  # fmt: skip
def test_sizes_are_shown_in_the_largest_unit(size: int, text: str) -> None:
    assert format_size(size) == text
