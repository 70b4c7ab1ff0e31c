"""Small arrays that the host makes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from specdec.cache import numbers


@pytest.mark.parametrize("values", [[], [3], [0, 2, 1], list(range(300))])
def test_numbers_hold_their_values(values: list[int]) -> None:
    """A wrong type would widen the offsets that it is added to."""
    array = numbers(values)
    assert array.dtype == mx.int32
    assert array.shape == (len(values),)
    assert array.tolist() == values


def test_equal_numbers_are_one_array() -> None:
    """Each part of a batch asks for the rows that stay; one copy serves all of them."""
    assert numbers([4, 7, 9]) is numbers(iter((4, 7, 9)))
    assert numbers([4, 7, 9]) is not numbers([4, 9, 7])
