"""The kernels on a real device, as ``specdec probe`` proves them; needs Metal."""

from __future__ import annotations

import mlx.core as mx
import pytest

from specdec.cuda import gated_delta
from specdec.metal import attention, few_rows
from specdec.metal.attention import Form
from specdec.metal.few_rows import Kind
from tests.cuda.test_gated_delta import HALF, PLAIN

pytestmark = pytest.mark.skipif(not mx.metal.is_available(), reason="needs Metal")


@pytest.mark.parametrize("dtype", few_rows.DTYPES)
@pytest.mark.parametrize("bits", few_rows.BITS)
def test_products_of_few_rows(dtype: mx.Dtype, bits: int) -> None:
    """Catches what Apple's compiler refuses, and where lanes hold other elements."""
    for group_size in few_rows.GROUPS:
        kind = Kind(bits, group_size, dtype, 520, group_size * 9)
        assert few_rows.faults(kind, (2, 4, 8, 9, 16)) == ""


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", attention.SIZES)
def test_attention_of_few_queries(size: int, dtype: mx.Dtype) -> None:
    assert attention.faults(Form(size, 6, 2, dtype)) == ""


@pytest.mark.parametrize("form", [PLAIN, HALF])
def test_gated_delta_layers(form: gated_delta.Form) -> None:
    assert gated_delta._agrees(form)
