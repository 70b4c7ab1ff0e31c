"""Every quantization is read as MLX, or the gguf package, reads it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from specdec.errors import UnsupportedModelError
from specdec.models.gguf import tensors
from specdec.models.gguf.header import TENSOR_TYPES, GGUFFile, read_header
from specdec.models.gguf.tensors import (
    PACKED_BITS,
    packed_zeros,
    read_float,
    read_float_rows,
    read_packed,
    repack,
)

KIND = gguf.GGMLQuantizationType
KINDS = {kind.name: kind for kind in KIND}
ROWS, COLUMNS = 48, 256


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read ten rows at a time, so that 48 rows are four whole chunks and a rest."""
    monkeypatch.setattr(tensors, "CHUNK", 10 * COLUMNS)


def stored_bytes(kind: KIND) -> Any:
    """A random matrix as the file holds it: uint8, or floats."""
    rng = np.random.default_rng(int(kind))
    values = rng.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)
    try:
        return quantize(values, kind)
    except NotImplementedError:
        # Random blocks whose scales, wherever they are, are finite float16.
        _, size = gguf.GGML_QUANT_SIZES[kind]
        width = size * (COLUMNS // gguf.GGML_QUANT_SIZES[kind][0])
        return rng.integers(0, 0x38, (ROWS, width)).astype(np.uint8)


def write(path: Path, kind: KIND) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("before", np.ones(5, np.float32))
    writer.add_tensor("matrix.weight", stored_bytes(kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path)


def test_the_table_of_types_is_right() -> None:
    for number, (name, elements, size) in TENSOR_TYPES.items():
        assert KIND(number).name == name
        assert gguf.GGML_QUANT_SIZES[KIND(number)] == (elements, size)


@pytest.mark.parametrize("kind", [KIND.Q4_0, KIND.Q4_1, KIND.Q8_0])
def test_packed_is_what_mlx_loads(kind: KIND, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", kind)
    theirs: Any = mx.load(str(tmp_path / "m.gguf"))
    ours = read_packed(file, file.tensors["matrix.weight"], mx.float16)
    for part, array in zip(("weight", "scales", "biases"), ours, strict=True):
        assert mx.array_equal(array, theirs[f"matrix.{part}"])


@pytest.mark.parametrize(
    "kind",
    [
        *(KIND.F32, KIND.F16, KIND.BF16, KIND.Q4_0, KIND.Q4_1, KIND.Q8_0),
        *(KIND.Q5_0, KIND.Q5_1, KIND.Q2_K, KIND.Q3_K, KIND.Q4_K, KIND.Q5_K, KIND.Q6_K),
        *(KIND.IQ4_NL, KIND.IQ4_XS, KIND.MXFP4),
    ],
    ids=lambda kind: kind.name,
)
def test_floats_are_what_gguf_dequantizes(kind: KIND, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", kind)
    info = file.tensors["matrix.weight"]
    assert info.shape == (ROWS, COLUMNS)
    expected = dequantize(stored_bytes(kind), kind)
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    np.testing.assert_allclose(
        read_float_rows(file, info, 7, 29), expected[7:29], rtol=1e-6, atol=1e-6
    )
    whole = read_float(file, info, mx.float32)
    assert whole.shape == (ROWS, COLUMNS)
    np.testing.assert_allclose(np.array(whole), expected, rtol=1e-6, atol=1e-6)


SAME = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "MXFP4")
# Most that repacking adds, of the values' size.
ADDED = {"Q2_K": 0.09, "Q3_K": 0.05, "Q6_K": 0.01, "IQ4_NL": 0.03, "IQ4_XS": 0.03,
         "IQ1_S": 0.1, "IQ1_M": 0.1, "IQ2_XXS": 0.1, "IQ2_XS": 0.1, "IQ2_S": 0.1,
         "IQ3_XXS": 0.06, "IQ3_S": 0.06}  # fmt: skip


@pytest.mark.parametrize("name", PACKED_BITS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
def test_packed_is_what_gguf_dequantizes(
    name: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    """Nibbles, high bits, or the scales of two groups change places."""
    kind = KINDS[name]
    file = write(tmp_path / "m.gguf", kind)
    info = file.tensors["matrix.weight"]
    packed = read_packed(file, info, dtype)
    lazy = packed_zeros(file, info, dtype)
    assert [(a.shape, a.dtype) for a in packed] == [(a.shape, a.dtype) for a in lazy]
    weight, scales, biases = packed
    assert scales.dtype == biases.dtype == dtype
    found = mx.dequantize(
        weight,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=32,
        bits=PACKED_BITS[name],
    )
    expected = dequantize(stored_bytes(kind), kind)
    error = np.sqrt(np.mean((np.array(found) - expected) ** 2) / np.mean(expected**2))
    rounding = 0.0 if dtype == mx.float32 else 2**-7
    assert (name in SAME) == (name not in ADDED)
    assert error <= ADDED.get(name, 1e-6) + rounding
    if name in SAME and dtype == mx.float32:
        np.testing.assert_allclose(np.array(found), expected, rtol=1e-6, atol=1e-6)


def test_groups_that_cannot_be_repacked_stay_finite() -> None:
    """A group of one value; a damaged file."""
    values = np.zeros((3, 64), np.float32)
    values[1], values[2, :32], values[2, 33] = 5.0, np.nan, np.inf
    codes, scales, biases = repack(values, 5, mx.float16)
    packed = mx.dequantize(
        mx.array(tensors._words(codes, 5)), scales, biases, group_size=32, bits=5
    )
    assert np.array_equal(np.array(packed)[:2], values[:2])


def test_add_happens_before_rounding(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", KIND.F32)
    read = read_float(file, file.tensors["before"], mx.bfloat16, add=0.001953125)
    # bfloat16 has no 1 + 2**-9; added afterwards or before, it rounds to 1.
    assert read.tolist() == [1.0] * 5
    read = read_float(file, file.tensors["before"], mx.bfloat16, add=-1 + 2**-20)
    assert read.tolist() == [2**-20] * 5


def test_the_gguf_package_is_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "m.gguf", KIND.Q6_K)
    for name in ("gguf", "gguf.quants"):
        monkeypatch.setitem(sys.modules, name, None)
    way_out = r"Q6_K.*pip install '\.\[gguf\]' in a checkout$"
    with pytest.raises(UnsupportedModelError, match=way_out) as caught:
        read_float(file, file.tensors["matrix.weight"], mx.float32)
    assert "\n" not in str(caught.value)
    # What is affine in the file is read without it.
    for kind in (KIND.Q8_0, KIND.Q4_K, KIND.Q5_K):
        file = write(tmp_path / "p.gguf", kind)
        read_float(file, file.tensors["matrix.weight"], mx.float32)
