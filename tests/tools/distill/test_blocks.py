"""Blocks: everything is learnt once an epoch, at the right position and weight."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specdec.errors import ConfigError
from specdec.tools.distill.blocks import LONGEST_ROW, block_order, make_blocks
from specdec.tools.distill.corpus import GREEDY, SAMPLED, TEXT, Document
from specdec.tools.distill.options import Budget
from specdec.tools.distill.train import learning_rate

BLOCK_TOKENS, CHUNK = 1536, 64


def documents(seed: int = 0) -> list[Document]:
    """Prompts that begin alike, each answered twice, and texts."""
    rng = random.Random(seed)
    documents = []
    for i in range(40):
        more = (rng.randrange(10, 99) for _ in range(rng.randrange(2, 30)))
        prompt = (1, 2, 3, *more)
        for kind in (GREEDY, SAMPLED):
            answer = tuple(rng.randrange(99) for _ in range(rng.randrange(1, 400)))
            documents.append(
                Document((*prompt, 1000 + i, *answer), len(prompt) + 1, kind)
            )
    for _ in range(5):
        text = tuple(rng.randrange(99) for _ in range(rng.randrange(2, 600)))
        documents.append(Document(text, 1, TEXT))
    return documents


def test_every_position_is_in_one_block() -> None:
    blocks = make_blocks(documents(), BLOCK_TOKENS, CHUNK, seed=1, prompt_weight=0.25)
    rows: dict[tuple[int, ...], list[float]] = {}
    for block in blocks:
        assert block.tokens.shape[1] % 128 == 0
        assert block.tokens.size == BLOCK_TOKENS
        assert len(block.positions) % CHUNK == 0
        weights = np.zeros(block.tokens.size, np.float32)
        np.add.at(weights, block.positions, block.weights)
        by_row = weights.reshape(block.tokens.shape)
        for tokens, row in zip(block.tokens, by_row, strict=True):
            rows[tuple(tokens.tolist())] = row.tolist()
    for document in documents():
        inputs = document.tokens[:-1][:LONGEST_ROW]
        row = next(r for t, r in rows.items() if t[: len(inputs)] == inputs and any(r))
        first = document.prompt_length - 1
        assert row[first : len(inputs)] == [1.0] * (len(inputs) - first)
        assert not any(row[len(inputs) :])
        prompt = row[:first]
        # All chats begin with 1, 2, 3: what comes after 3 is the first to differ.
        learnt = 0.25 if document.kind == GREEDY else 0.0
        assert prompt[2:] == [learnt] * len(prompt[2:])
        assert not any(prompt[:2])
    assert sum(b.num_tokens for b in blocks) == sum(
        min(len(d.tokens) - 1, LONGEST_ROW) for d in documents()
    )


def test_an_epoch_has_each_block_once_in_an_order_of_its_own() -> None:
    orders = [
        [block_order(7, step, seed=3) for step in range(7 * epoch, 7 * epoch + 7)]
        for epoch in range(4)
    ]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_the_budget_and_the_rate() -> None:
    assert Budget(tokens=200).share(seconds=9.0, tokens=50) == 0.25
    assert Budget(minutes=2).share(seconds=30.0, tokens=50) == 0.25
    assert Budget(minutes=2).share(seconds=300.0, tokens=0) == 1.0
    for wrong in ({}, {"minutes": 1.0, "tokens": 1}, {"tokens": 0}, {"minutes": -1.0}):
        with pytest.raises(ConfigError):
            Budget(**wrong)
    rates = [learning_rate(1.0, share / 100, warmup=0.1) for share in range(101)]
    assert rates.index(max(rates)) == 10
    assert max(rates) == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[0] < 0.1
    assert rates[100] == pytest.approx(0.0)
