"""The gated delta rule by products, against a loop in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.models import chunked_delta
from specdec.models.chunked_delta import CHUNK, gated_delta_chunks

#: The largest error, relative to the largest number: what the docstring says.
BOUND = 1e-5
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
HEADS, REPEATS, SIZE = 2, 2, 32
Arrays = dict[str, Any]
#: How alike keys are: their cosine, or how many different ones there are.
KEYS = ["random", "one", "two", 0.5, 0.8, 0.99]


def loop(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """Token by token, in float64: the definition."""
    repeats, outputs = v.shape[2] // k.shape[2], []
    q, k = (np.repeat(a, repeats, axis=2) for a in (q, k))
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None]
        known = np.einsum("bhvk,bhk->bhv", state, k[:, t])
        delta = (v[:, t] - known) * beta[:, t, :, None]
        state = state + delta[..., None] * k[:, t, :, None, :]
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return np.stack(outputs, axis=1), state


def drawn(
    tokens: int, keys: str | float = "random", top: float = 1.0, gates: str = "all"
) -> Arrays:
    """Two rows; float64 numbers that float32 has exactly."""
    rng = np.random.default_rng(tokens)

    def unit(*shape: int) -> Any:
        a = rng.normal(size=shape)
        return a / np.linalg.norm(a, axis=-1, keepdims=True)

    heads = HEADS * REPEATS
    k = unit(2, tokens, HEADS, SIZE)
    if keys == "one":
        k[:] = k[:, :1]
    elif keys == "two":
        k[:] = k[:, np.arange(tokens) % min(2, tokens)]
    elif isinstance(keys, float):
        k = np.sqrt(keys) * unit(2, 1, HEADS, SIZE) + np.sqrt(1 - keys) * k
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = {
        "all": rng.uniform(0, 1, (2, tokens, heads)),
        "long": np.exp(-rng.uniform(0, 0.02, (2, tokens, heads))),
        "one": np.ones((2, tokens, heads)),
        "zeros": np.where(rng.random((2, tokens, heads)) < 0.1, 0.0, 0.99),
    }[gates]
    arrays = {
        "q": unit(2, tokens, HEADS, SIZE) / np.sqrt(SIZE),
        "k": k,
        "v": rng.normal(size=(2, tokens, heads, SIZE)),
        "g": g,
        "beta": rng.uniform(0.5, 1, (2, tokens, heads)) * top,
        "state": 0.1 * rng.normal(size=(2, heads, SIZE, SIZE)),
    }
    return {name: a.astype(np.float32).astype(float) for name, a in arrays.items()}


def mlx(arrays: Arrays) -> dict[str, mx.array]:
    return {name: mx.array(a.astype(np.float32)) for name, a in arrays.items()}


def error(found: Any, wanted: Any) -> float:
    """The largest of outputs and states, relative to the largest number; NaN: inf."""
    errors = []
    for one, other in zip(found, wanted, strict=True):
        off = np.abs(np.array(one, dtype=float) - other).max()
        errors.append(off / np.abs(other).max() if np.isfinite(off) else np.inf)
    return float(max(errors))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_it_is_the_rule_at_every_length(tokens: int) -> None:
    """A token at a chunk's border that is left out, or counted twice."""
    arrays = drawn(tokens)
    assert error(gated_delta_chunks(**mlx(arrays)), loop(**arrays)) < BOUND


@pytest.mark.parametrize("gates", ["all", "long", "one", "zeros"])
@pytest.mark.parametrize("top", [1.0, 2.0])
@pytest.mark.parametrize("keys", KEYS)
def test_alike_keys_and_all_gates(keys: str | float, top: float, gates: str) -> None:
    """In real text keys are alike: an inverse by powers loses everything there.

    Differences of summed logarithms are NaN where a gate is 0.
    """
    arrays = drawn(500, keys, top, gates)
    assert error(gated_delta_chunks(**mlx(arrays)), loop(**arrays)) < BOUND


def test_padding_is_inert() -> None:
    """Whatever it holds: NaN times 0 is NaN."""
    arrays = mlx(drawn(70))
    for lengths in ([70, 33], [0, 32], [1, 69]):
        mask = mx.arange(70) < mx.array(lengths)[:, None]
        spoilt = dict(arrays)
        for name in ("k", "v", "g", "beta"):
            counts = mask.reshape(2, 70, *[1] * (arrays[name].ndim - 2))
            spoilt[name] = mx.where(counts, arrays[name], float("nan"))
        y, after = gated_delta_chunks(**spoilt, mask=mask)
        assert not mx.any(mx.where(mask[..., None, None], 0, y)).item()
        for row, length in enumerate(lengths):
            own = {
                name: a[row : row + 1] if name == "state" else a[row : row + 1, :length]
                for name, a in arrays.items()
            }
            if not length:
                assert mx.array_equal(after[row : row + 1], own["state"])
                continue
            alone = gated_delta_chunks(**own)
            assert mx.array_equal(y[row, :length], alone[0][0])
            assert mx.array_equal(after[row], alone[1][0])


def test_a_row_has_the_same_bits_in_steps_of_whole_chunks() -> None:
    """Alone or beside others; other steps are within the bound."""
    arrays = mlx(drawn(3 * CHUNK + 5))
    y, after = gated_delta_chunks(**arrays)
    for steps in ([CHUNK, 2 * CHUNK, 5], [7, CHUNK, 2 * CHUNK - 2]):
        state, begin, outputs = arrays["state"], 0, []
        for step in steps:
            part = {n: a[:, begin : begin + step] for n, a in arrays.items()}
            output, state = gated_delta_chunks(**{**part, "state": state})
            outputs.append(output)
            begin += step
        joined = mx.concatenate(outputs, axis=1)
        if steps[0] == CHUNK:
            assert mx.array_equal(joined, y)
            assert mx.array_equal(state, after)
        assert error((joined, state), (np.array(y), np.array(after))) < BOUND


FAULTS = {
    "the state is not carried": ("held = held * left[:, i] +", "held ="),
    "decays in another order": ("g[..., None], 1.0)", "g[..., None, :], 1.0)"),
    "gates of another head": ("g = folded(g, ", "g = folded(g[..., ::-1], "),
    "padding decays": ("mx.where(counts, g, 1)", "g"),
    "padding of a chunk decays": ("folded(g, repeats, 1.0)", "folded(g, repeats, 0.0)"),
    "a token sees itself": ("mx.bool_), -1)", "mx.bool_), 0)"),
    "no substitution": ("mx.linalg.tri_inv(system)", "2 * mx.eye(CHUNK) - system"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    """By these tests, whose inputs could be too kind."""
    source = inspect.getsource(chunked_delta)
    assert source.count(FAULTS[name][0]) == 1
    spoilt: dict[str, Any] = {}
    exec(source.replace(*FAULTS[name]), spoilt)
    rule: Callable[..., Any] = spoilt["gated_delta_chunks"]
    arrays = drawn(70, 0.8)
    mask = np.arange(70) < np.array([70, 45])[:, None]
    y, after = rule(**mlx(arrays), mask=mx.array(mask))
    errors = []
    for row, length in enumerate((70, 45)):
        own = {n: a[row : row + 1, :length] for n, a in arrays.items() if n != "state"}
        wanted = loop(**own, state=arrays["state"][row : row + 1])
        errors.append(error((y[row : row + 1, :length], after[row : row + 1]), wanted))
    assert max(errors) > 100 * BOUND
