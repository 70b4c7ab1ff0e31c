"""Bytes of caches and weights, from their shapes alone.

Each formula counts the arrays that are allocated. Keys and values are held per layer,
row, head and slot (specdec/cache/storage.py). Packed ones have the layout of
``mx.quantize``, with a scale and a bias for each group.
"""

from __future__ import annotations

from ..errors import ConfigError

GIB = 1 << 30
# Bits per weight that a model is usually published in, best first.
WEIGHT_BITS = (16, 8, 4)
# Free memory to leave for keys and values when their size is not known.
DEFAULT_KV_HEADROOM = 2 * GIB


def quantized_elem_bytes(
    bits: int, group_size: int = 64, *, scale_bytes: int = 2
) -> float:
    """Bytes of one quantized element, including its share of a scale and a bias.

    ``(bits + 2 * 8 * scale_bytes / group_size) / 8``: 4 bits in groups of 64 with
    16-bit scales take 0.5625, 8 bits 1.0625.

    Args:
        scale_bytes: bytes of one scale or bias, which is the size of a dense element.
    """
    return bits / 8 + 2 * scale_bytes / group_size


def logits_bytes(
    batch: int, num_draft_tokens: int, vocab_size: int, elem_bytes: int
) -> int:
    """Logits of one verification: ``batch * (k + 1) * vocabulary * elem_bytes``."""
    return batch * (num_draft_tokens + 1) * vocab_size * elem_bytes


def weight_bytes(num_parameters: float, bits: int, group_size: int = 64) -> int:
    """Bytes of weights in ``bits`` bits; below 16, with 16-bit scales and biases."""
    if bits >= 16:
        return round(num_parameters * bits / 8)
    return round(num_parameters * quantized_elem_bytes(bits, group_size))


def recommend_quantization(
    num_parameters: float,
    memory_bytes: int,
    kv_bytes: int | None = None,
    *,
    group_size: int = 64,
) -> int | None:
    """The most bits per weight, of 16, 8 and 4, that fit beside keys and values.

    Args:
        num_parameters: parameters of the model.
        memory_bytes: bytes that the device has for weights, keys and values.
        kv_bytes: bytes of keys and values for the wanted context and batch; ``None``,
            if unknown, counts as 2 GiB.
        group_size: weights that share a scale.

    Returns:
        ``None`` when not even 4 bits fit.

    Raises:
        ConfigError: a size is negative.
    """
    headroom = DEFAULT_KV_HEADROOM if kv_bytes is None else kv_bytes
    for name, value in (("memory", memory_bytes), ("the KV cache", headroom)):
        if value < 0:
            raise ConfigError(f"{name} has {value} bytes: it must be 0 or more")
    for bits in WEIGHT_BITS:
        if weight_bytes(num_parameters, bits, group_size) + headroom <= memory_bytes:
            return bits
    return None
