"""Trains the toy targets and heads: ``python -m tests.toys.make [NAME ...]``.

The language has words of letters that they share, so that a letter alone does not say
how a text goes on. Losses follow the papers: which tokens a slot, a pair or a step sees
and which one it predicts is written here once more, without the code that drafts.
Each takes about a minute on one core.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from specdec.cache import CacheOptions, make_batch_caches
from specdec.models.layers import record_layers
from specdec.tools.distill.block_student import block_states
from tests.toys.kinds import (
    EAGLE_READS,
    HEADS,
    HERE,
    READS,
    TARGETS,
    load_toy,
    published_arrays,
    random_weights,
    target_model,
    target_of,
)

LENGTH, ROWS, K = 40, 16, 4
LETTERS, WORDS = 12, 18


def texts(rng: np.random.Generator, rows: int, length: int) -> mx.array:
    """Random texts (B, L); words are the same in each call."""
    fixed = np.random.default_rng(7)
    words = [
        fixed.integers(0, LETTERS, size=fixed.integers(3, 6)) for _ in range(WORDS)
    ]
    following = fixed.integers(0, WORDS, size=(WORDS, 2))
    made = []
    for _ in range(rows):
        word, text = int(rng.integers(WORDS)), list[int]()
        while len(text) < length + 6:
            text += words[word].tolist()
            word = int(following[word, int(rng.random() < 0.2)])
        first = int(rng.integers(6))
        made.append(text[first : first + length])
    return mx.array(made, mx.int32)


def cross_entropy(logits: mx.array, tokens: mx.array) -> mx.array:
    found: mx.array = nn.losses.cross_entropy(logits.astype(mx.float32), tokens)
    return found


def train(
    model: nn.Module, loss: Callable[[np.random.Generator], mx.array], steps: int
) -> None:
    rng, rate = np.random.default_rng(0), optim.cosine_decay(4e-3, steps)
    optimizer = optim.Adam(rate)
    both = nn.value_and_grad(model, lambda: loss(rng))
    for step in range(steps):
        value, gradients = both()
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if step % 200 == 0 or step == steps - 1:
            print(f"  {step:5} {float(value):.3f}", flush=True)


def store(arrays: Mapping[str, mx.array], name: str) -> None:
    half = {n: a.astype(mx.float16) for n, a in arrays.items()}
    mx.save_safetensors(str(HERE / f"{name}.safetensors"), half)


def train_target(name: str) -> None:
    model = target_model(name, trained=False)

    def loss(rng: np.random.Generator) -> mx.array:
        tokens = texts(rng, ROWS, LENGTH)
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    train(model, loss, 500)
    leaves: Any = tree_flatten(model.parameters())
    store(dict(leaves), name)


class Seen:
    """What a target computes for texts."""

    def __init__(self, model: Any, tokens: mx.array, reads: Sequence[int]):
        recorded, heard = record_layers(model, [*reads, len(model.layers) - 1], "toy")
        self.tokens, self.cache = tokens, make_prompt_cache(model)
        recorded(tokens, cache=self.cache)
        every = heard.take()
        width = every.shape[-1] // (len(reads) + 1)
        self.features, self.last = (
            every[..., :-width],
            model.model.norm(every[..., -width:]),
        )


def block_loss(head: Any, seen: Seen, rng: np.random.Generator) -> mx.array:
    """Blocks after random anchors see what is before, and predict what is after."""
    size, count = head.args.block_size, 5
    drawn = [
        rng.choice(np.arange(2, LENGTH - size - 1), count, False) for _ in range(ROWS)
    ]
    anchors = mx.array(np.sort(np.array(drawn), axis=1).astype(np.int32))
    first = mx.take_along_axis(seen.tokens, anchors, axis=1).reshape(-1, 1)
    states = block_states(
        head, seen.features, head.slots(head.inputs(first, size)), anchors
    )
    predicting = states if head.args.from_anchor else states[:, 1:]
    slots = predicting.shape[1]
    at = (anchors[..., None] + mx.arange(1, slots + 1)).reshape(ROWS, -1)
    labels = mx.take_along_axis(seen.tokens, at, axis=1).reshape(-1, slots)
    before = mx.concatenate([first, labels[:, :-1]], axis=1)
    if head.args.kind == "DFlash 2":
        # All tokens are scored, as in training with speculators.
        part = head.candidate_selector
        mixed = part.predecessor_codebook[before] * part.hidden_projection(predicting)
        logits = head.logits(predicting) + mixed @ part.successor_codebook.T
    else:
        walk = head.walk(predicting, first)
        each = [labels[:, j : j + 1] for j in range(slots)]
        logits = mx.concatenate([walk(each[:j]) for j in range(slots)], axis=1)
    decay = mx.exp(-mx.arange(slots) / 4)
    return (cross_entropy(logits, labels) * decay).mean()


def caches_of(head: Any) -> list[Any]:
    return make_batch_caches(head, ROWS, CacheOptions(max_write=LENGTH))


def eagle_loss(head: Any, seen: Seen, rng: np.random.Generator) -> mx.array:
    """Pairs of a state and the token after it predict the token after that.

    Then the same with the head's own outputs as states (training-time test).
    """
    feature, total = head.feature(seen.features), mx.array(0.0)
    following, labels = seen.tokens[:, 1:-1], seen.tokens[:, 2:]
    feature = feature[:, :-2]
    for _ in range(3):
        h = head.step(following, feature, caches_of(head))
        total = total + cross_entropy(head.predict(h), labels).mean()
        feature = mx.concatenate([feature[:, :1], h[:, :-1]], axis=1)
    return total


def peagle_loss(head: Any, seen: Seen, rng: np.random.Generator) -> mx.array:
    """Learned pairs after the real ones predict the tokens further on."""
    n, caches = int(rng.integers(6, LENGTH - K - 2)), caches_of(head)
    h = head.absorb(seen.features[:, :n], seen.tokens[:, 1 : n + 1], caches)
    more = head.states(mx.full((ROWS, K - 1), head.args.mask_token, mx.int32), caches)
    logits = head.predict(mx.concatenate([h, more], axis=1))
    labels = seen.tokens[:, 2 : n + 1 + K]
    each = cross_entropy(logits, labels)
    return each[:, : n - 1].mean() + 3 * each[:, n - 1 :].mean()


def mtp_loss(head: Any, seen: Seen, rng: np.random.Generator) -> mx.array:
    """Pairs of the target's normed state and the next token predict the one after.

    One step, as most published heads were trained: they were never fed their own
    output.
    """
    h = head.step(seen.tokens[:, 1:-1], seen.last[:, :-2], caches_of(head))
    return cross_entropy(head.predict(h), seen.tokens[:, 2:]).mean()


def assistant_loss(head: Any, seen: Seen, rng: np.random.Generator) -> mx.array:
    """Steps after n tokens attend to the n keys of the target, all at one position."""
    n = int(rng.integers(4, LENGTH - K - 1))
    attends = []
    for (kind, _), place in zip(head.args.layers, head.places, strict=True):
        first = max(n - 8, 0) if kind == "sliding_attention" else 0
        arrays = (seen.cache[place].keys, seen.cache[place].values)
        keys, values = (a[:, :, first:n] for a in arrays)

        def attend(
            attention: Any,
            x: mx.array,
            q: mx.array,
            keys: Any = keys,
            values: Any = values,
        ) -> mx.array:
            found: mx.array = attention.attend(x, q, keys, values, None)
            return found

        attends.append(attend)
    state, total = seen.last[:, n - 1 : n], mx.array(0.0)
    for j in range(K):
        o = head.output(seen.tokens[:, n + j : n + j + 1], state, n - 1, attends)
        label = seen.tokens[:, n + j + 1 : n + j + 2]
        total = total + cross_entropy(head.predict(o), label).mean()
        state = head.following_state(o)
    return total


def train_head(name: str) -> None:
    model = target_model(target_of(name))
    with tempfile.TemporaryDirectory() as folder:
        head = load_toy(name, Path(folder), model, random_weights(name))
        mx.eval(head.parameters())
    head.train()
    kinds: dict[str, Any] = {
        "EAGLE-3": eagle_loss,
        "P-EAGLE": peagle_loss,
        "MTP": mtp_loss,
        "assistant": assistant_loss,
    }
    reads = EAGLE_READS if "eagle" in name else READS
    of_kind = kinds.get(name) or kinds.get(head.args.kind, block_loss)

    def loss(rng: np.random.Generator) -> mx.array:
        seen = Seen(model, texts(rng, ROWS, LENGTH), reads)
        value: mx.array = of_kind(head, seen, rng)
        return value

    if name == "dflash2":
        head.begin_as_dflash()
    if name == "mtp":  # both read the same output head
        head.heads[0].norm.weight = model.model.norm.weight
    train(head, loss, 500)
    store(published_arrays(name, head, model), name)


def main(names: Sequence[str]) -> None:
    for name in names or (*TARGETS, *HEADS):
        print(name, flush=True)
        (train_target if name in TARGETS else train_head)(name)


if __name__ == "__main__":
    main(sys.argv[1:])
