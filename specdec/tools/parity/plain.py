"""The reference: the target alone, through mlx-lm's own generation and caches.

This module uses none of the engine's rounds, caches or sampling, since the reference
must not share the engine's faults. It should not share the engine's layers either. If
loading fitted them to the backend (:func:`specdec.models.loading.fit`), the reference
gets mlx-lm's layers over the same weights
(:func:`specdec.cuda.fused_linear.separated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ...errors import ConfigError


@dataclass(frozen=True)
class PlainTokens:
    """Plain decoding of one prompt.

    Args:
        tokens: the generated tokens, including the one that ended the row.
        logprobs: log-probability of each token, at temperature 1, in float32.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class _Unpacking:
    """One of mlx-lm's quantized caches, which unpacks keys and values for attention.

    The engine's caches do so too on some backends, and the rounding depends on it.
    """

    def __init__(self, cache: Any, *, bits: int, group_size: int):
        self._cache, self._packing = cache, (group_size, bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, ...]:
        group_size, bits = self._packing
        packed = self._cache.update_and_fetch(keys, values)
        return tuple(
            mx.dequantize(array, scales, biases, group_size=group_size, bits=bits)
            for array, scales, biases in packed
        )

    def __getattr__(self, name: str) -> Any:
        if name == "bits":  # mlx-lm's attention takes a cache with bits for packed
            raise AttributeError(name)
        return getattr(self._cache, name)


class PlainTarget:
    """Plain decoding of the target by mlx-lm.

    Args:
        model: an mlx-lm model.
        kv_bits, kv_group_size: quantize keys and values from the first token on.
        unpacks: unpack keys and values for attention, as the engine's caches do on some
            backends. If the model's code cannot take packed ones, they are always
            unpacked.

    Raises:
        ConfigError: mlx-lm cannot quantize one of the caches that the model needs.
    """

    def __init__(
        self,
        model: Any,
        *,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        unpacks: bool = False,
    ):
        self._model = model
        self._unpacks = unpacks
        self._quantization = kv_bits, kv_group_size
        caches = self._caches()
        if kv_bits is not None and not unpacks:
            try:
                model(mx.zeros((1, 2), mx.int32), cache=caches)
            except Exception:  # a model's code may raise anything
                self._unpacks = True

    def _caches(self) -> list[Any]:
        caches = make_prompt_cache(self._model)
        bits, group_size = self._quantization
        if bits is None:
            return caches
        packing = {"group_size": group_size, "bits": bits}
        try:
            packed: list[Any] = [c.to_quantized(**packing) for c in caches]
        except (AttributeError, NotImplementedError):
            raise ConfigError(
                "kv_bits cannot be verified for this target: mlx-lm cannot quantize "
                "all of its caches; leave kv_bits out"
            ) from None
        return [_Unpacking(c, **packing) for c in packed] if self._unpacks else packed

    def decode(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        ends: AbstractSet[int],
        temperature: float = 0.0,
        seed: int = 0,
    ) -> PlainTokens:
        """Decode one prompt with mlx-lm's ``generate_step``.

        Args:
            ends: tokens that end the row.
            temperature, seed: at a temperature above 0, a position's token is the
                arg-max of logits plus temperature times Gumbel noise of the key (seed,
                position).
        """
        position = len(prompt) - 1

        def choose(logprobs: mx.array) -> mx.array:
            nonlocal position
            position += 1
            return mx.argmax(
                scores(logprobs, temperature=temperature, seed=seed, position=position),
                axis=-1,
            )

        steps = generate_step(
            mx.array(list(prompt)),
            self._model,
            max_tokens=max_tokens,
            sampler=choose,
            # In 16 bits, subtracting the logsumexp would tie logits that differ.
            logits_processors=[lambda _, logits: logits.astype(mx.float32)],
            prompt_cache=self._caches(),
        )
        tokens, token_logprobs = [], []
        for token, logprobs in steps:
            tokens.append(int(token))
            token_logprobs.append(float(logprobs[token]))
            if token in ends:
                break
        return PlainTokens(tuple(tokens), tuple(token_logprobs))

    def logits(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int] = (),
        *,
        batch_size: int = 1,
        width: int = 1,
        prefill_step_size: int = 2048,
    ) -> mx.array:
        """Logits after ``prompt`` and ``tokens``, by forwards of one shape.

        As in every decoding, all but the prompt's last token are prefilled, and that
        token is a step of its own. The tokens follow, ``width`` at a time. All rows
        have the same text, so there is no padding and only the causal mask.

        Args:
            prefill_step_size: as in ``generate_step``, which has the same default.

        Returns:
            Logits of the first row, shape (V,), float32.
        """
        caches = self._caches()
        *prefill, last = prompt
        for first in range(0, len(prefill), prefill_step_size):
            self._forward(
                prefill[first : first + prefill_step_size], caches, batch_size
            )
            mx.eval([c.state for c in caches])
        logits = self._forward([last], caches, batch_size)[0, -1]
        for first in range(0, len(tokens), width):
            block = list(tokens[first : first + width])
            query = len(block) - 1
            # Tokens after the query only fill the shape; the query does not see them.
            block += [block[-1]] * (width - len(block))
            logits = self._forward(block, caches, batch_size)[0, query]
            mx.eval(logits)
        return logits.astype(mx.float32)

    def _forward(
        self, tokens: Sequence[int], caches: list[Any], batch_size: int
    ) -> mx.array:
        rows = mx.broadcast_to(mx.array(list(tokens)), (batch_size, len(tokens)))
        logits: mx.array = self._model(rows, cache=caches)
        return logits


def scores(
    logits: mx.array, *, temperature: float, seed: int, position: int
) -> mx.array:
    """Scores whose arg-max is chosen, (..., V), float32; see docs/exactness.md."""
    logits = logits.astype(mx.float32)
    if not temperature:
        return logits
    key = mx.array([seed % 2**32, position], mx.uint32)
    return logits + temperature * mx.random.gumbel((logits.shape[-1],), key=key)
