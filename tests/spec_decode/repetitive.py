"""Prompts in which tokens come back, and a drafter that knows how rows go on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from specdec.backend import BackendDefaults
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import Drafter, DraftRows, Proposals, Round
from tests.plain import VOCAB, run_rows


def make_prompts(seed: int = 0) -> list[list[int]]:
    """Eight prompts of 1 to 70 tokens, the longer ones of repeated phrases."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(VOCAB) for _ in range(5)] for _ in range(3)]
    prompts = []
    for n in (1, 7, 30, 2, 70, 3, 16, 33):
        tokens: list[int] = []
        while len(tokens) < n:
            tokens += rng.choice(phrases)
        prompts.append(tokens[:n])
    return prompts


class Knowing(Drafter):
    """Proposes how rows go on, or what ``says`` makes of it.

    Args:
        whole: by prompt, the prompt and what follows it.
        says: what is proposed at a position, and the token there.
    """

    def __init__(
        self,
        whole: dict[tuple[int, ...], list[int]],
        says: Callable[[int, int], int] = lambda position, token: token,
    ):
        self.whole, self.says = whole, says

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> KnowingRows:
        return KnowingRows(self, [tuple(p) for p in prompts])


class KnowingRows(DraftRows):
    def __init__(self, drafter: Knowing, prompts: list[tuple[int, ...]]):
        self.knowing, self.prompts = drafter, prompts

    def propose(self, round_: Round) -> Proposals:
        k = round_.num_draft_tokens
        lengths: Any = round_.lengths.tolist()
        tokens = []
        for prompt, n in zip(self.prompts, lengths, strict=True):
            follows = self.knowing.whole.get(prompt, [])[n : n + k]
            padded = [*follows, *([0] * (k - len(follows)))]
            tokens.append([self.knowing.says(n + j, t) for j, t in enumerate(padded)])
        return Proposals(mx.array(tokens, mx.int32))

    def filter(self, rows: Sequence[int]) -> None:
        self.prompts = [self.prompts[i] for i in rows]

    def extend(self, other: KnowingRows) -> None:
        self.prompts = self.prompts + other.prompts


def check_distribution(
    model: Any,
    drafter: Drafter,
    params: SamplingParams,
    backend: BackendDefaults,
    *,
    prompt: Sequence[int],
    vocab_size: int,
    num_rows: int = 2048,
    num_tokens: int = 3,
) -> int:
    """Chi-square of the first tokens of many rows against exact enumeration.

    Fails wrongly once in 10^6 runs if the draws were independent of the fixed seeds.

    Returns:
        Draft tokens that were accepted.
    """
    rows = run_rows(
        model,
        None,
        [prompt] * num_rows,
        [
            SamplingParams(
                max_tokens=num_tokens,
                temperature=params.temperature,
                verification=params.verification,
                seed=i,
            )
            for i in range(num_rows)
        ],
        batch_size=512,
        num_draft_tokens=num_tokens - 1,
        backend=backend,
        drafter=drafter,
    )
    outcomes = list(product(range(vocab_size), repeat=num_tokens))
    inputs = mx.array([[*prompt, *o[:-1]] for o in outcomes])
    logits = model(inputs)[:, len(prompt) - 1 :] / params.temperature
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    of_tokens = mx.take_along_axis(logprobs, mx.array(outcomes)[..., None], axis=-1)
    expected = num_rows * np.exp(np.array(of_tokens[..., 0].sum(axis=1), np.float64))
    index = {o: i for i, o in enumerate(outcomes)}
    seen = np.zeros(len(outcomes))
    for row in rows:
        seen[index[tuple(row.tokens)]] += 1
    common = expected >= 5
    seen = np.array([*seen[common], seen[~common].sum()])
    expected = np.array([*expected[common], expected[~common].sum()])
    statistic = ((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = len(seen) - 1
    # Wilson and Hilferty's approximation of the quantile at 4.75 sigma.
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 4.75 * spread**0.5) ** 3
    return sum(r.accepted for r in rows)
