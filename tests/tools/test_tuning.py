"""The search for layers: finds what is there to find, within its bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from specdec.models.layer_skip import SkippingModel
from specdec.tools.tuning import Agreement, Candidate, search_layers
from tests.plain import greedy
from tests.test_decoder import PROMPTS, loaded


class Harm:
    """Every layer left out takes its own share of the agreement."""

    def __init__(self, num_layers: int, seed: int):
        rng = random.Random(seed)
        self.of = [rng.random() / num_layers for _ in range(num_layers)]
        self.calls = 0

    def __call__(self, layers: tuple[int, ...]) -> float:
        self.calls += 1
        assert list(layers) == sorted(set(layers))
        return 1 - sum(h for i, h in enumerate(self.of) if i not in layers)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("keep", [1, 7, 15])
def test_the_layers_that_matter_are_kept(keep: int, seed: int) -> None:
    harm = Harm(16, seed)
    found = search_layers(harm, 16, keep=keep, max_evaluations=96)
    best = sorted(range(16), key=lambda i: -harm.of[i])[:keep]
    assert found[0].layers == tuple(sorted(best))
    assert harm.calls <= 96


def test_without_a_number_the_best_prediction_wins() -> None:
    """Four layers in eight do nothing: those are left out, no others."""
    useless = {1, 2, 5, 6}

    def agreement(layers: tuple[int, ...]) -> float:
        missing = set(range(8)) - set(layers) - useless
        return float(0.99 * 0.3 ** len(missing))

    found = search_layers(agreement, 8, max_evaluations=48)
    assert found[0].layers == (0, 3, 4, 7)
    assert found[0].name == "layers:0,3-4,7"
    assert len({len(c.layers) for c in found}) == len(found)


def test_exchanges_find_what_leaving_out_does_not() -> None:
    """Layer 0 looks useless as long as 1 is there, and the two replace each other."""

    def agreement(layers: tuple[int, ...]) -> float:
        kept = set(layers)
        value = 0.5 + 0.1 * len(kept & {2, 3})
        value += 0.25 if 0 in kept else (0.2 if 1 in kept else 0.0)
        return value + (0.01 if {0, 1} <= kept else 0.04 if 1 in kept else 0.0)

    found = search_layers(agreement, 5, keep=3, max_evaluations=40)
    assert found[0].layers == (0, 2, 3)


@pytest.mark.parametrize("budget", [2, 5, 9, 17])
def test_a_small_budget_is_kept_and_still_gives_an_answer(budget: int) -> None:
    harm = Harm(12, 0)
    found = search_layers(harm, 12, keep=6, max_evaluations=budget)
    assert len(found[0].layers) == 6
    # One more where nothing of the wanted size had been tried yet.
    assert harm.calls <= budget + 1


def test_predictions() -> None:
    """All tokens right at a quarter of the cost; and a draft that is always wrong."""
    sure = Candidate((0, 1), 1.0, 8)
    assert sure.speed_up(4) == 5 / 2
    assert sure.best_k == 16
    wrong = Candidate((0, 1), 0.0, 8)
    assert wrong.speed_up(2) == 1 / 1.5
    assert wrong.best_k == 1


def test_agreement_is_that_of_plain_choices(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    texts = [(p, greedy(model, p, 12)) for p in PROMPTS]
    agreement = Agreement(loaded(model), [*texts, ([1, 2], [])])
    assert agreement.num_tokens == 48
    assert agreement((0, 1, 2, 3)) == 1.0
    skipping = SkippingModel(model, (0, 2))
    right = 0
    for prompt, chosen in texts:
        for i, token in enumerate(chosen):
            logits = skipping(mx.array([[*prompt, *chosen[:i]]]))[0, -1]
            right += int(mx.argmax(logits).item() == token)
    assert agreement((0, 2)) == right / 48
    assert 0 < right < 48
