"""Toy heads of each kind, trained until a toy target accepts them.

A wrong wiring that a reference shares with the code shows here: what a slot, a pair or
a step predicts was learned by a training that has its own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.models import LoadedModel
from specdec.models.draft_heads import load_head
from specdec.models.runner import ModelRunner
from specdec.spec_decode.head_drafter import HeadDrafter
from specdec.tools.parity import certify
from tests.plain import AT_ONCE, BEHIND, drafts_of, exact
from tests.test_decoder import Tokenizer
from tests.toys.kinds import (
    HEADS,
    VOCAB,
    load_toy,
    random_weights,
    stored,
    target_model,
    target_of,
)
from tests.toys.make import K, texts

TEXTS: Any = texts(np.random.default_rng(5), 4, 32).tolist()
PROMPTS = [row[: 6 + 5 * i] for i, row in enumerate(TEXTS)]


def acceptance_length(
    name: str,
    path: Path,
    *,
    trained: bool = True,
    change: Callable[[HeadDrafter], None] | None = None,
    backend: Any = AT_ONCE,
) -> float:
    """Tokens of a round, in runs whose texts are compared with plain decoding."""
    model = target_model(target_of(name))
    arrays = (stored if trained else random_weights)(name)
    head = load_toy(name, path, model, arrays)
    runner = ModelRunner(head, name, EngineConfig(), backend)
    drafter = HeadDrafter(runner, vocab_size=VOCAB, max_draft_tokens=K)
    if change is not None:
        change(drafter)
    rows = exact(
        model, None, PROMPTS, 40,
        batch_size=2, num_draft_tokens=K, drafter=drafter, backend=backend,
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    return 1 + K * accepted / drafted


@pytest.mark.parametrize("name", HEADS)
def test_a_trained_head_is_accepted(name: str, tmp_path: Path) -> None:
    """And one of random weights is not: else the language would be too easy."""
    assert acceptance_length(name, tmp_path) > 3
    assert acceptance_length(name, tmp_path, trained=False) < 1.6


def test_on_another_backend(tmp_path: Path) -> None:
    """Bucketed shapes, compiled forwards, rounds read a round late."""
    assert acceptance_length("assistant", tmp_path, backend=BEHIND) > 3


def other_anchor(drafter: HeadDrafter) -> None:
    head: Any = drafter.head
    head.args = replace(head.args, from_anchor=not head.args.from_anchor)


def turned_in_pairs(drafter: HeadDrafter) -> None:
    head: Any = drafter.head
    for layer in head.layers:
        layer.self_attn.rope.traditional = True


def embedded_twice(drafter: HeadDrafter) -> None:
    head: Any = drafter.head
    usual = head.embed
    head.embed = lambda tokens, **how: usual(tokens, **how) * 32**0.5


def fed_back_before_the_norm(drafter: HeadDrafter) -> None:
    head: Any = drafter.head
    (module,) = head.heads
    norm, module.norm = module.norm, nn.Identity()
    vars(head)["predict"] = lambda h: head.logits(norm(h))


def targets_state_before_the_norm(drafter: HeadDrafter) -> None:
    head: Any = drafter.head
    vars(head)["absorb"] = lambda h, after, caches: head.step(after, h, caches)


def test_what_an_mtp_head_is_fed_back(tmp_path: Path) -> None:
    """Its own output after its last norm, as the target's state is normed.

    It was trained for one step, and so never fed its own output: what is more like the
    target's normed states is accepted more often.
    """
    normed, plain, other = (
        acceptance_length("mtp", tmp_path, change=change)
        for change in (None, fed_back_before_the_norm, targets_state_before_the_norm)
    )
    assert normed > plain + 0.1
    assert plain > other + 0.3


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("muse", other_anchor),
        ("dspark", other_anchor),
        ("dspark-qwen35", turned_in_pairs),
        ("mtp", targets_state_before_the_norm),
        ("dflash2", other_anchor),
        ("dflash2", turned_in_pairs),
        ("dspark-rnn", other_anchor),
        ("dspark-sinks", other_anchor),
        ("dspark-gemma", turned_in_pairs),
        ("assistant", embedded_twice),
    ],
)
def test_what_is_wired_wrongly_is_not_accepted(
    name: str, change: Callable[[HeadDrafter], None], tmp_path: Path
) -> None:
    """The text is the target's in any case; only the acceptance length shows it."""
    assert acceptance_length(name, tmp_path, change=change) < 3


PACKINGS: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4, "group_size": 32, "mode": "affine"},
    "8 bits": {"bits": 8, "group_size": 32, "mode": "affine"},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


def packed_arrays(arrays: dict[str, mx.array], form: str) -> dict[str, mx.array]:
    """A head's matrices packed, or all of it in another type."""
    if form not in PACKINGS:
        return {n: a.astype(getattr(mx, form)) for n, a in arrays.items()}
    packed = dict(arrays)
    for name, array in arrays.items():
        fits = array.ndim == 2 and array.shape[1] % 32 == 0
        if fits and name.endswith("weight"):
            stem, parts = name.removesuffix("weight"), ("weight", "scales", "biases")
            each = mx.quantize(array, **PACKINGS[form])
            packed |= {stem + p: a for p, a in zip(parts, each, strict=False)}
    return packed


OTHER_TYPES = [
    *(
        (name, "bfloat16", "8 bits")
        for name in (
            "dflash2",
            "dspark-rnn",
            "dspark-gemma",
            "muse",
            "peagle",
            "assistant",
        )
    ),
    ("eagle3", "4 bits", "float16"),
    ("assistant", "8 bits", "bfloat16"),
    ("mtp", "float16", "bfloat16"),
    ("mtp", "bfloat16", "bfloat16"),
    ("mtp", "bfloat16", "4 bits"),
    ("mtp", "4 bits", "float32"),
    ("mtp", "8 bits", "mxfp4"),
    ("mtp", "mxfp4", "4 bits"),
]


@pytest.mark.parametrize(("name", "target", "head"), OTHER_TYPES)
def test_other_types(name: str, target: str, head: str, tmp_path: Path) -> None:
    """Texts are those of plain decoding in the target's type, by the rule of verify.

    A head may be packed in another way than its target, or have another 16-bit type.
    """
    model = target_model(target_of(name))
    if target in PACKINGS:
        fits = (nn.Linear, nn.Embedding)
        nn.quantize(
            model,
            **PACKINGS[target],
            class_predicate=lambda _, m: (
                isinstance(m, fits) and m.weight.shape[-1] % 32 == 0
            ),
        )
    else:
        model.set_dtype(getattr(mx, target))
    load_toy(name, tmp_path, model, packed_arrays(stored(name), head))
    tokenizer: Any = Tokenizer({chr(i + 40): i for i in range(VOCAB)})
    loaded = LoadedModel(model, tokenizer, {}, "target")
    decoder = SpecDecoder(
        loaded,
        load_head(tmp_path, HEADS[name], name, loaded),
        config=EngineConfig(num_draft_tokens=K, batch_size=2, prefill_step_size=8),
    )
    certificate = certify(decoder, PROMPTS, SamplingParams(max_tokens=24))
    assert certificate.passed, certificate
    decoder.generate(PROMPTS, max_tokens=24)
    assert decoder.stats.acceptance_rate > 0.3


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark-rnn", "peagle"])
def test_a_head_forgets_nan_in_its_context(name: str, tmp_path: Path) -> None:
    """Catches rows of which a head accepts nothing any more once it has met NaN."""

    def overflowing(drafter: HeadDrafter) -> None:
        head: Any = drafter.head
        usual, calls = head.absorb, count()

        def absorb(hidden: mx.array, *more: Any) -> Any:
            first = next(calls) == 0
            return usual(hidden * mx.nan if first else hidden, *more)

        head.absorb = absorb

    # The rows of the first chunk accept nothing in their first 16 rounds.
    assert acceptance_length(name, tmp_path, change=overflowing) > 1.7
