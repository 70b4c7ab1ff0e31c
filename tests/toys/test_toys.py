"""Toy heads of each kind, trained until a toy target accepts them.

A wrong wiring that a reference shares with the code shows here: what a slot, a pair or
a step predicts was learned by a training that has its own rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.config import EngineConfig
from specdec.models.draft_heads import load_head
from specdec.models.runner import ModelRunner
from specdec.spec_decode.head_drafter import HeadDrafter
from tests.plain import AT_ONCE, BEHIND, drafts_of, exact
from tests.toys.kinds import (
    HEADS,
    HERE,
    VOCAB,
    loaded,
    random_weights,
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
    arrays: Any = {n: mx.array(a) for n, a in random_weights(name).items()}
    if trained:
        stored: Any = mx.load(str(HERE / f"{name}.safetensors"))
        arrays = {n: a.astype(mx.float32) for n, a in stored.items()}
    (path / "config.json").write_text(json.dumps(HEADS[name]), "utf-8")
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    head = load_head(path, HEADS[name], name, loaded(model, name)).model
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


@pytest.mark.parametrize(
    ("name", "change"),
    [
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
