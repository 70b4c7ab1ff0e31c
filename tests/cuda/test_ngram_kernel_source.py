"""The sources of prompt lookup's kernels, run on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from specdec.cuda import kernels, ngram_kernel
from specdec.spec_decode import ngram_search
from tests.cuda.emulation.cuda import (
    emulated,
    needs_compiler,
)

pytestmark = needs_compiler

REFERENCES = ngram_search.search, ngram_search.keep


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from emulated(monkeypatch, kernels.cuda_kernel)


State = tuple[mx.array, mx.array, mx.array]


def drawn(choices: random.Random) -> State:
    """Rows of few different tokens: none, fewer than the ring holds, and more.

    Of each, the newest token is not in the ring yet.
    """
    capacity = choices.choice([8, 37, 256, 300])
    prompts = [
        [choices.randrange(3) for _ in range(choices.choice(lengths))]
        for lengths in choices.choices(
            [[0], [1, 2], [capacity - 1, capacity], range(3 * capacity)],
            weights=[1, 1, 2, 6],
            k=choices.randint(1, 5),
        )
    ]
    ring = ngram_search.ring_of(prompts, capacity)
    lengths = mx.array([len(p) + 1 for p in prompts])
    recent = mx.array([[p[-1] if p else 9, choices.randrange(3)] for p in prompts])
    return ring, lengths, recent


def searched_alike(state: State, choices: random.Random) -> bool:
    k, most = choices.randint(1, 8), choices.randint(1, 6)
    options: Any = {"max_ngram": most, "min_ngram": choices.randint(1, most)}
    found = ngram_kernel.search(*state, k, **options)
    wanted = ngram_search.search(*state, k, **options)
    same = map(mx.array_equal, found, wanted)
    return all(each.item() for each in same)


def kept_alike(state: State, choices: random.Random) -> bool:
    rows, s = state[0].shape[0], choices.randint(1, 7)
    chosen = mx.array([[choices.randrange(9) for _ in range(s)] for _ in range(rows)])
    kept = mx.array(
        [choices.choice([0, s, choices.randint(0, s)]) for _ in range(rows)]
    )
    arrays = *state, chosen, kept
    found, wanted = ngram_kernel.keep(*arrays), ngram_search.keep(*arrays)
    return bool(mx.array_equal(found, wanted).item())


def alike(check: Any, times: int, seed: int = 0) -> bool:
    choices = random.Random(seed)
    return all(check(drawn(choices), choices) for _ in range(times))


def test_the_same_is_found() -> None:
    assert alike(searched_alike, 120)


def test_the_same_is_kept() -> None:
    assert alike(kept_alike, 120)


def test_matches_reach_across_the_end_of_the_ring() -> None:
    """The whole ring repeats: the longest match ends at the ring's last slot."""
    for length in range(8, 24):
        prompt = [i % 4 for i in range(length)]
        ring, lengths = ngram_search.ring_of([prompt], 8), mx.array([length + 1])
        state = ring, lengths, mx.array([[prompt[-1], length % 4]])
        # The eight newest are held: four of them have an equal one four before.
        for least, there in ((4, True), (5, False)):
            options: Any = {"max_ngram": 5, "min_ngram": least}
            tokens, found = ngram_kernel.search(*state, 6, **options)
            assert found.tolist() == [6 * there]
            after = [(length + 1 + i) % 4 * there for i in range(6)]
            assert tokens.tolist() == [[length % 4, *after]]


def test_proven() -> None:
    assert ngram_kernel.proven.__wrapped__(*REFERENCES)
