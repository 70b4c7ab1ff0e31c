"""Every restored row sees exactly the columns that it should (telltale.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import SamplingParams
from specdec.prefix_cache.store import PrefixStore
from tests.plain import AT_ONCE, BEHIND

from .harness import Prompt, decode
from .telltale import LAYERS, TellTale, decoded

NEW_TOKENS = 5
PARAMS = SamplingParams(max_tokens=NEW_TOKENS)

# Prompts of runs of two tokens: they share prefixes of all lengths.
RUNS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 12)), min_size=1, max_size=5
)
CALLS = st.lists(st.lists(RUNS, min_size=1, max_size=3), min_size=2, max_size=5)
SUBSETS = st.sampled_from(
    [LAYERS, ("full",), ("window",) * 2, ("full", "window"), ("sinks", "chunk", "full")]
)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_kv_size": 9},
    {"kv_bits": 8, "kv_group_size": 32},
    {"max_kv_size": 9, "kv_bits": 4, "kv_group_size": 32},
]
# Backend, and chunk of prompts. A ring's size follows from the chunk, and MLX builds
# kernels for each size where forwards are compiled: half a second for every one.
SHAPED = st.one_of(
    st.tuples(st.just(AT_ONCE), st.integers(1, 11)),
    st.tuples(st.just(BEHIND), st.just(5)),
)


def prompt_of(runs: list[tuple[int, int]]) -> Prompt:
    return [token for token, n in runs for _ in range(n)]


@settings(max_examples=20)
@given(
    layers=SUBSETS,
    calls=CALLS,
    options=st.sampled_from(OPTIONS),
    block=st.integers(1, 9),
    shaped=SHAPED,
    memory=st.sampled_from([0, 3_000, 20_000, 1 << 30]),
    disk=st.sampled_from([None, 20_000, 1 << 30]),
)
def test_any_history_of_prompts(
    layers: tuple[str, ...],
    calls: list[list[list[tuple[int, int]]]],
    options: dict[str, Any],
    block: int,
    shaped: tuple[Any, int],
    memory: int,
    disk: int | None,
) -> None:
    """Whatever was stored, evicted and found before, under any budget."""
    model, (backend, step) = TellTale(layers), shaped
    with tempfile.TemporaryDirectory() as folder:
        store = PrefixStore(
            memory=memory,
            folder=None if disk is None else Path(folder),
            disk=disk or 0,
            block_size=block,
        )
        for call in calls:
            prompts = [prompt_of(runs) for runs in call]
            tokens, reused, _ = decode(
                model, None, prompts, store, backend=backend, params=PARAMS,
                prefill_step_size=step, **options,
            )  # fmt: skip
            assert tokens == [
                decoded(layers, prompt, NEW_TOKENS, options.get("max_kv_size"))
                for prompt in prompts
            ]
            assert all(n < len(p) for n, p in zip(reused, prompts, strict=True))
            assert store.nbytes <= memory
        store.close()


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        *((layers, {}) for layers in (LAYERS, ("chunk",) * 2, ("sinks",) * 2)),
        *((("full", "full"), options) for options in OPTIONS),
        *((LAYERS, options) for options in OPTIONS[1:]),
    ],
)
def test_every_prefix_of_a_prompt(
    layers: tuple[str, ...], options: dict[str, Any]
) -> None:
    """One prompt is stored; then others that share 1, 2, 3, ... tokens with it."""
    model = TellTale(layers)
    stem = [(7 * i + i * i) % 97 for i in range(34)]
    found = []
    if options:
        every = [*range(1, len(stem), 3)]
    elif layers == LAYERS:
        every = [*range(1, len(stem))]
    else:
        every = [1, 5, 9, 14, 19, 23, *range(26, len(stem), 2)]
    for shared in every:
        store = PrefixStore(memory=1 << 30, block_size=8)
        decode(
            model, None, [stem], store, params=PARAMS, prefill_step_size=5, **options
        )
        prompt = [*stem[:shared], 96, 95, 94]
        tokens, reused, _ = decode(
            model, None, [prompt], store, params=PARAMS, prefill_step_size=5, **options
        )
        expected = decoded(layers, prompt, NEW_TOKENS, options.get("max_kv_size"))
        assert tokens == [expected], shared
        found.append(reused[0])
        # And once more, with what that one has left behind.
        tokens, reused, _ = decode(
            model, None, [[*prompt, 1], [*stem[:shared], 9]], store, params=PARAMS,
            prefill_step_size=5, **options,
        )  # fmt: skip
        assert tokens == [
            decoded(layers, p, NEW_TOKENS, options.get("max_kv_size"))
            for p in ([*prompt, 1], [*stem[:shared], 9])
        ]
        assert reused[1] == shared, "a ring was left where the two parted"
    if not options:
        rings = layers != ("full", "full")
        # What the last chunk of 5 leaves: the end at 33, and as many as it wrote.
        served = range(28, 34) if rings else range(34)
        assert found == [n if n in served else 0 for n in every]


@pytest.mark.parametrize(("layers", "step"), [(LAYERS, 5), (("window",) * 2, 9)])
def test_a_ring_of_a_restored_row_claims_no_more_than_it_holds(
    layers: tuple[str, ...], step: int
) -> None:
    """What was not restored cannot be stored again.

    A row starts at the oldest end that a stored ring serves, goes on a little, and
    leaves a ring of its own; then a prompt parts from it before it had started.
    """
    model = TellTale(layers)
    stem = [(7 * i + i * i) % 97 for i in range(34)]
    options: Any = {"params": PARAMS, "prefill_step_size": step}
    for start in (24, 26, 27, 30):
        for more in (2, 4):
            for back in range(4):
                store = PrefixStore(memory=1 << 30, block_size=8)
                second = [*stem[:start], *range(90, 90 + more)]
                third = [*stem[: start - back], 80, 81]
                for prompt in (stem, second, third):
                    tokens, _, _ = decode(model, None, [prompt], store, **options)
                    assert tokens == [decoded(layers, prompt, NEW_TOKENS)]
