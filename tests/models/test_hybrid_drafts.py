"""Drafts with recurrent layers: what they propose is what they would say alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from mlx.utils import tree_map

from specdec.models.layer_skip import SkippingModel
from specdec.models.precision import quantized_copy
from specdec.sampling_params import SamplingParams

from ..plain import BEHIND, greedy, run_rows
from .architectures import VOCABULARY, build

# Recurrent and attention layers in turn; layers without a cache among them.
HYBRIDS = ("qwen3_5", "lfm2", "granitemoehybrid", "nemotron_h")
K, NEW_TOKENS = 3, 8
PROMPTS = [
    [(5 * i + 3 * j + i * j) % VOCABULARY for j in range(n)]
    for i, n in enumerate((11, 3, 1))
]
PADDED = replace(BEHIND, compile_after=None)


def faint(model: Any, first: int) -> Any:
    """The model, its layers from the first of these on changing little."""
    for layer in model.layers[first:]:
        small = tree_map(lambda a: a * 0.4 if a.ndim > 1 else a, layer.parameters())
        layer.update(small)
    return model


@cache
def target_of(arch: str) -> Any:
    """A model whose last layers are good to skip."""
    return faint(build(arch, num_hidden_layers=4), 2)


def proposed(
    draft: Any, prompt: Sequence[int], text: Sequence[int]
) -> set[tuple[int, int]]:
    """Tokens drafted and accepted where the draft says what mlx-lm makes it say.

    Nothing is drafted for the last token, unless the round before it
    brought more than was sure when its own was planned.
    """
    drafted = accepted = 0
    done = 1  # the first token comes without a draft
    counts = set()
    while done < NEW_TOKENS:
        if done == NEW_TOKENS - 1:
            counts.add((drafted, accepted))
        said = greedy(draft, [*prompt, *text[:done]], K)
        wrong = (i for i in range(K) if said[i] != text[done + i])
        agreed = next(wrong, K)
        used = min(agreed + 1, NEW_TOKENS - done)
        # Nothing is counted after the end.
        drafted += min(used, K) if done + used == NEW_TOKENS else K
        accepted += min(used, agreed)
        done += used
    return {*counts, (drafted, accepted)}


def check(target: Any, draft: Any, step: int) -> float:
    """Decode; the share that was accepted."""
    got = run_rows(
        target,
        draft,
        PROMPTS,
        [SamplingParams(max_tokens=NEW_TOKENS)] * len(PROMPTS),
        batch_size=2,
        num_draft_tokens=K,
        backend=PADDED,
        prefill_step_size=step,
    )
    texts = [greedy(target, p, NEW_TOKENS + K + 1) for p in PROMPTS]
    assert [row.tokens for row in got] == [t[:NEW_TOKENS] for t in texts]
    found = [(row.drafted, row.accepted) for row in got]
    each = zip(PROMPTS, texts, strict=True)
    for counts, (prompt, text) in zip(found, each, strict=True):
        assert counts in proposed(draft, prompt, text)
    return sum(a for _, a in found) / sum(d for d, _ in found)


@pytest.mark.parametrize("arch", HYBRIDS)
def test_layers_of_a_hybrid(arch: str) -> None:
    """Masks or caches of layers that are skipped; states of tokens that were rejected.

    A draft that went on from those would propose something else from then on.
    """
    target = target_of(arch)
    assert 0.1 < check(target, SkippingModel(target, (0, 1)), 4) <= 1


@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_hybrid_quantized(arch: str) -> None:
    """Packed projections beside convolutions that are not, and states in floats."""
    target = target_of(arch)
    draft, _ = quantized_copy(target, 4)
    assert 0.1 < check(target, draft, 16) < 1


def alike(first: str, second: str) -> tuple[Any, Any]:
    """Models of two architectures that begin and end in the same way."""
    models = [faint(build(arch), 0) for arch in (first, second)]
    one, other = (m.get("language_model", m) for m in models)
    embedding = one["model"]["embed_tokens"]
    embedding.weight = 4 * embedding.weight  # the newest token decides most
    other["model"]["embed_tokens"] = embedding
    other["model"]["norm"] = one["model"]["norm"]
    other["lm_head"] = one["lm_head"]
    return models[0], models[1]


@pytest.mark.parametrize(
    ("target", "draft"), [("llama", "qwen3_5"), ("qwen3_5", "granitemoehybrid")]
)
def test_a_hybrid_drafts_for_others(target: str, draft: str) -> None:
    """A transformer's keys go back by an offset, the draft's states do not."""
    assert 0.05 < check(*alike(target, draft), 5) < 1
