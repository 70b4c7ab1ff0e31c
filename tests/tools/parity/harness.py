"""Small random models with a decoder around them, and machines that round."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama

from specdec import EngineConfig, SpecDecoder
from specdec.models import LoadedModel
from tests.test_decoder import Tokenizer

VOCAB = 97
# How far one shape's logits are off another's in a Rounding model.
ROUNDING = 0.1

TinyModel = Callable[..., Any]


class Rounding(llama.Model):
    """A model whose logits depend a little on the shape of the forward.

    As 16-bit arithmetic has it on most machines; MLX's CPU backend rounds models
    of this size almost alike in every shape.
    """

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: Any = None
    ) -> mx.array:
        logits: mx.array = super().__call__(inputs, cache, input_embeddings)
        rows, width = inputs.shape
        key = mx.random.key(1000 * rows + width)
        off = mx.random.uniform(-1, 1, logits.shape[-1:], key=key)
        return (logits + ROUNDING / 2 * off).astype(logits.dtype)


def make_decoder(
    tiny_model: TinyModel,
    *,
    dtype: mx.Dtype = mx.float32,
    rounding: bool = False,
    draft: str = "near",
    vocab_size: int = VOCAB,
    ends: frozenset[int] = frozenset(),
    config: dict[str, Any] | None = None,
    **options: Any,
) -> SpecDecoder:
    """A target and a draft that agrees with it often."""
    target = tiny_model("llama", seed=0, vocab_size=vocab_size, **options)
    near = tiny_model("llama", seed=0, vocab_size=vocab_size, **options)
    weight = near.model.embed_tokens.weight
    noise = mx.random.normal(weight.shape, key=mx.random.key(1))
    near.model.embed_tokens.weight = weight + 0.1 * noise
    if rounding:
        target.__class__ = Rounding
    for model in (target, near):
        model.set_dtype(dtype)
        mx.eval(model.parameters())
    tokenizer: Any = Tokenizer(
        {chr(i + 30): i for i in range(vocab_size)}, eos_token_ids=ends
    )
    return SpecDecoder(
        LoadedModel(target, tokenizer, {}, "target"),
        LoadedModel(near, tokenizer, {}, "draft") if draft == "near" else None,
        config=EngineConfig(
            **{"batch_size": 4, "num_draft_tokens": 3, **(config or {})}
        ),
    )


def make_prompts(n: int = 6, vocab_size: int = VOCAB) -> list[list[int]]:
    rng = random.Random(0)
    lengths = (1, 2, 7, 20, 33, 5)
    return [
        [rng.randrange(vocab_size) for _ in range(lengths[i % len(lengths)])]
        for i in range(n)
    ]
