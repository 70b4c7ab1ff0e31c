"""Options, as frozen dataclasses that raise :class:`ConfigError` when built wrong."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

DEFAULT_BATCH_SIZE = 8
DEFAULT_NUM_DRAFT_TOKENS = 3
DEFAULT_PREFILL_STEP_SIZE = 512
DEFAULT_MAX_TOKENS = 256

# Drafts that are made from the target's own weights.
SELF_DRAFTS = ("self:2bit", "self:3bit", "self:4bit", "self:8bit")
# Beyond any use, and small enough for float32 arithmetic on logits.
MAX_TEMPERATURE = 1e6


def check_draft_name(source: str) -> None:
    """Refuse a draft ``self...`` that is none; other names are a loader's question.

    Raises:
        ConfigError: it is not one of ``SELF_DRAFTS``.
    """
    is_self = source == "self" or source.startswith("self:")
    if is_self and source not in SELF_DRAFTS:
        raise ConfigError(
            f"draft {source!r} is not known: use {', '.join(SELF_DRAFTS)}, "
            "a folder, a .gguf file or a hub id"
        )


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}: it must be {rule}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_int(name: str, value: object, low: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    rule = "a whole number" if low is None else f"a whole number, {low} or more"
    _require(whole and (low is None or value >= low), name, value, rule)  # type: ignore[operator]


def _require_one_of(name: str, value: object, allowed: tuple[int, ...]) -> None:
    # 4.0 == 4: what asks for a number of bits or columns needs an int.
    *others, last = map(str, allowed)
    rule = f"{', '.join(others)} or {last}"
    _require(isinstance(value, int) and value in allowed, name, value, rule)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs; the same for every request.

    Args:
        batch_size: rows that decode together.
        num_draft_tokens: tokens proposed per round; 0 decodes plainly.
        prefill_step_size: prompt tokens per row in one prefill forward.
        read_bucket: cache columns handed to attention are rounded up to a
            multiple of this; ``None`` takes the backend's default
            (:func:`specdec.backend.defaults`).
        kv_bits: 4 or 8 stores keys and values quantized; ``None`` as they are.
        kv_group_size: 32, 64 or 128 elements share a scale; it must divide the
            models' head size.
        quantized_kv_start: quantize once the longest row of a batch holds this
            many tokens.
        max_kv_size: full-attention layers see each row's first 4 tokens and its
            newest ``max_kv_size - 4``; ``None`` sees everything.

    Raises:
        ConfigError: a value is out of range.
    """

    batch_size: int = DEFAULT_BATCH_SIZE
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE
    read_bucket: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    max_kv_size: int | None = None

    def __post_init__(self) -> None:
        _require_int("batch_size", self.batch_size, 1)
        _require_int("num_draft_tokens", self.num_draft_tokens, 0)
        _require_int("prefill_step_size", self.prefill_step_size, 1)
        if self.read_bucket is not None:
            _require_int("read_bucket", self.read_bucket, 1)
        if self.kv_bits is not None:
            _require_one_of("kv_bits", self.kv_bits, (4, 8))
        _require_one_of("kv_group_size", self.kv_group_size, (32, 64, 128))
        _require_int("quantized_kv_start", self.quantized_kv_start, 0)
        if self.max_kv_size is not None:
            _require_int("max_kv_size", self.max_kv_size, 5)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded.

    Args:
        max_tokens: most tokens to generate, 1 or more.
        temperature: 0 is greedy; above 0, to 1e6, the target's distribution is
            ``softmax(logits / temperature)``.
        seed: of the request's random draws (taken modulo 2**32); the draw at
            a position depends on the seed and the position alone.
        top_p: draw from the most likely tokens that together have this much
            probability at temperature 1; 1 keeps all.
        min_p: draw from tokens with at least this share of the likeliest one's
            probability at temperature 1; 0 keeps all.
        top_k: draw from that many most likely tokens; 0 keeps all.

    As in mlx-lm, ``top_p``, ``min_p`` and ``top_k`` apply in this order, before
    the temperature, and not at all at temperature 0.

    Raises:
        ConfigError: a value is out of range.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    seed: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0

    def __post_init__(self) -> None:
        _require_int("max_tokens", self.max_tokens, 1)
        t, top = self.temperature, MAX_TEMPERATURE
        rule = f"a number from 0 to {top:.0f}"
        _require(_is_number(t) and 0 <= t <= top, "temperature", t, rule)
        _require_int("seed", self.seed)
        p, rule = self.top_p, "a number above 0, at most 1 (1 keeps all)"
        _require(_is_number(p) and 0 < p <= 1, "top_p", p, rule)
        p, rule = self.min_p, "a number from 0 to 1 (0 keeps all)"
        _require(_is_number(p) and 0 <= p <= 1, "min_p", p, rule)
        _require_int("top_k", self.top_k, 0)
