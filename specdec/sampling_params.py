"""The settings of one request: a frozen dataclass that refuses wrong values."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from .errors import ConfigError
from .grammar import Grammar
from .utils.checks import (
    MIN_FLOAT32,
    is_float32,
    is_int,
    require,
    require_int,
    require_one_of,
    require_range,
)
from .utils.names import check_settings, settings
from .utils.printable import quoted

DEFAULT_MAX_TOKENS = 256
DEFAULT_CONTEXT_SIZE = 20
# Higher than any useful value, and low enough for float32 arithmetic on logits.
MAX_TEMPERATURE = 1e6
MAX_TOP_LOGPROBS = 1000
# The most stop texts of a request, and characters of one: the search costs memory.
MAX_STOPS = 128
MAX_STOP_LENGTH = 512

Verification = Literal["coupled", "rejection", "block"]
VERIFICATIONS: tuple[Verification, ...] = get_args(Verification)

# As in mlx-lm: a sampler takes log-probabilities (1, V) and returns a token; a
# processor takes all tokens so far and logits (1, V), and returns logits.
Sampler = Callable[[Any], Any]
LogitsProcessor = Callable[[Any, Any], Any]


@settings
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded.

    Args:
        max_tokens: generate at most this many tokens, 1 or more.
        min_tokens: tokens that end a row (``stop_token_ids`` too) are not chosen before
            this many tokens are generated.
        temperature: 0 is greedy; above 0, to 1e6, tokens are drawn from the target's
            distribution, ``softmax(logits / temperature)``.
        seed: seeds the request's random draws (taken modulo 2**32). The draw at a
            position depends on the seed and the position alone. With ``None``, a
            request that samples gets a random seed, which its result reports.
        top_p: draw from the most likely tokens that together have this much
            probability at temperature 1; 1 keeps all.
        min_p: draw from tokens with at least this share of the likeliest one's
            probability at temperature 1; 0 keeps all.
        xtc_probability: at each position, with this probability, only the least
            probable of the tokens above ``xtc_threshold`` is kept ("exclude top
            choices").
        xtc_threshold: the probability above which XTC leaves tokens out.
        xtc_special_tokens: token ids that XTC never leaves out; ``None``: the newline
            and the tokens that end a row.
        top_k: draw from this many most likely tokens; 0 keeps all.
        logit_bias: values to add to the logits, by token id, before anything else.
        repetition_penalty: logits of the newest 20 tokens (``repetition_context_size``;
            prompt included) are divided by it if positive, multiplied if negative; 1
            does nothing. ``None``: 1.
        presence_penalty: subtracted from the logits of the newest 20 tokens
            (``presence_context_size``). ``None``: 0.
        frequency_penalty: subtracted for each occurrence among the newest 20 tokens
            (``frequency_context_size``). ``None``: 0.
        repetition_context_size, presence_context_size, frequency_context_size: how
            many of the newest tokens each penalty looks at.
        logits_processors: one function or several, mlx-lm's or your own: ``f(tokens,
            logits)`` takes all tokens so far, shape (n,), and logits (1, V), and
            returns logits. Each is called once for every token of the row, in
            order, after the penalties.
        sampler: a function, mlx-lm's or your own, in place of temperature, top_p and
            the other filters: ``f(logprobs)`` takes shape (1, V) and returns a token.
            Before each call MLX's global random state is seeded by seed and position;
            it is not restored.
        stop: texts that end a row, up to 128 of up to 512 characters. The output's
            text ends before the first one found, and its tokens end with the last
            token that contributes to that text.
        stop_token_ids: tokens that end a row, as the end-of-sequence token does.
        logprobs: report the log-probability of every token, computed from the logits
            after bias, penalties and processors, at temperature 1, unfiltered.
        top_logprobs: also report this many of the likeliest tokens at every position.
        prompt_logprobs: report the log-probability of every token of the prompt but
            the first, and this many of the likeliest tokens at each position, by the
            target's plain logits. Then no stored prefix is reused, and ``max_tokens``
            may be 0. ``None``: nothing is reported.
        grammar: a grammar that the output must follow, see :class:`Grammar`. Tokens
            that it does not allow are never chosen, and the row ends only where the
            grammar allows it. ``None``: any text.
        max_thinking_tokens: the most tokens of the answer's thoughts, markers not
            counted. Then the thought is closed with the model's own marker. It has no
            effect where the model does not think; ``None``: any number.
        num_draft_tokens: the most tokens to draft for this row in a round. 0 does not
            speculate; ``None`` leaves the choice to the engine.
        cache_salt: stored prefixes are shared only among requests with the same salt,
            and so are finished answers, where n-grams are looked up in them.
            Others cannot find out by timing how this prompt begins. ``None``: shared
            among all requests without a salt.
        draft_corpus: where n-grams are looked up in finished answers, these are shared
            only among requests with the same name here, whatever their salt.
        verification: how draft tokens of a sampling row are accepted. All three keep
            the target's distribution. ``coupled`` accepts a token that equals the
            target's own choice under noise that the draft shares; the output is the
            same for every draft. ``rejection`` is the ratio test (Leviathan et al.
            2023), ``block`` is block verification (Sun et al. 2024).

    As in mlx-lm, ``top_p``, ``min_p``, XTC and ``top_k`` apply in this order, before
    the temperature. At temperature 0 they would have no effect, and are refused.

    Raises:
        ConfigError: a value is out of range, two values exclude each other, or one
            has no effect without another.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 0.0
    seed: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] | None = None
    top_k: int = 0
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = DEFAULT_CONTEXT_SIZE
    presence_penalty: float | None = None
    presence_context_size: int = DEFAULT_CONTEXT_SIZE
    frequency_penalty: float | None = None
    frequency_context_size: int = DEFAULT_CONTEXT_SIZE
    logits_processors: tuple[LogitsProcessor, ...] = ()
    sampler: Sampler | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    max_thinking_tokens: int | None = None
    num_draft_tokens: int | None = None
    cache_salt: str | None = None
    draft_corpus: str | None = None
    verification: Verification = "coupled"

    def __post_init__(self) -> None:
        self._tidy()
        self._check_lengths()
        self._check_distribution()
        self._check_penalties()
        self._check_together()

    @property
    def stepwise(self) -> bool:
        """Whether the user's own functions choose the tokens, one by one."""
        return bool(self.logits_processors) or self.sampler is not None

    @property
    def draws(self) -> bool:
        """Whether the tokens depend on random numbers."""
        return self.temperature > 0 or self.sampler is not None

    def updated(self, values: Mapping[str, Any]) -> SamplingParams:
        """A copy with other values for some fields.

        Raises:
            ConfigError: there is no such field, or it cannot have that value.
        """
        check_settings(values, type(self).__dataclass_fields__, "SamplingParams")
        return replace(self, **values) if values else self

    def seeded(self) -> SamplingParams:
        """A copy with a random seed, if it samples and has none."""
        if self.seed is not None or not self.draws:
            return self
        return replace(self, seed=secrets.randbits(32))

    @property
    def seed_key(self) -> int:
        """The key of the random draws: the seed in 32 bits; 0 if there is none."""
        return (self.seed or 0) % 2**32

    @property
    def context_size(self) -> int:
        """How many tokens the penalties look back at; 0 if there are none."""
        sizes = (
            (self.repetition_penalty not in (None, 1), self.repetition_context_size),
            (bool(self.presence_penalty), self.presence_context_size),
            (bool(self.frequency_penalty), self.frequency_context_size),
        )
        return max((size for used, size in sizes if used), default=0)

    def _tidy(self) -> None:
        """Copy values that the caller could change later; make single values tuples."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop))
        if callable(self.logits_processors):
            object.__setattr__(self, "logits_processors", (self.logits_processors,))
        for name in ("stop_token_ids", "xtc_special_tokens", "logits_processors"):
            if name != "xtc_special_tokens" or self.xtc_special_tokens is not None:
                object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        if self.logit_bias is not None:
            is_mapping = isinstance(self.logit_bias, Mapping)
            rule = "a mapping of token ids to numbers"
            require(is_mapping, "logit_bias", self.logit_bias, rule)
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_lengths(self) -> None:
        scored = self.prompt_logprobs is not None
        require_int("max_tokens", self.max_tokens, 0 if scored else 1)
        require_int("min_tokens", self.min_tokens, 0)
        few = self.min_tokens <= self.max_tokens
        rule = f"at most max_tokens ({self.max_tokens})"
        require(few, "min_tokens", self.min_tokens, rule)
        if self.max_thinking_tokens is not None:
            require_int("max_thinking_tokens", self.max_thinking_tokens, 0)
        if self.num_draft_tokens is not None:
            require_int("num_draft_tokens", self.num_draft_tokens, 0)
        for name in ("cache_salt", "draft_corpus"):
            text = getattr(self, name)
            valid = text is None or (isinstance(text, str) and text != "")
            require(valid, name, text, "a text, not empty")
        self._check_stop()
        for name in ("stop_token_ids", "xtc_special_tokens"):
            for token in getattr(self, name) or ():
                require_int(name, token, 0)
        require(isinstance(self.logprobs, bool), "logprobs", self.logprobs, "a bool")
        require_int("top_logprobs", self.top_logprobs, 0)
        if self.prompt_logprobs is not None:
            require_int("prompt_logprobs", self.prompt_logprobs, 0)
        for name in ("top_logprobs", "prompt_logprobs"):
            most, n = MAX_TOP_LOGPROBS, getattr(self, name) or 0
            require(n <= most, name, n, f"at most {most}")

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise ConfigError(
                f"stop has {len(self.stop)} texts: give at most {MAX_STOPS}",
                field="stop",
            )
        for text in self.stop:
            valid = isinstance(text, str) and text != ""
            require(valid, "stop", text, "one text or several, none of them empty")
            if len(text) > MAX_STOP_LENGTH:
                raise ConfigError(
                    f"a stop text has {len(text)} characters: "
                    f"give at most {MAX_STOP_LENGTH}",
                    field="stop",
                )

    def _check_distribution(self) -> None:
        require_range("temperature", self.temperature, 0, MAX_TEMPERATURE)
        if self.seed is not None:
            require_int("seed", self.seed)
        note = "1 keeps all"
        require_range("top_p", self.top_p, 0, 1, note=note, open_low=True)
        require_range("min_p", self.min_p, 0, 1, note="0 keeps all")
        require_int("top_k", self.top_k, 0)
        require_range("xtc_probability", self.xtc_probability, 0, 1)
        require_range("xtc_threshold", self.xtc_threshold, 0, 0.5)
        require_one_of("verification", self.verification, VERIFICATIONS)

    def _check_penalties(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            rule = (
                "of token ids (0 or more) to numbers that float32 holds, "
                "minus infinity included"
            )
            number = is_float32(bias) or bias == float("-inf")
            valid = is_int(token) and token >= 0 and number
            require(valid, "logit_bias", {token: bias}, rule)
        repetition = self.repetition_penalty
        if repetition is not None:
            valid = is_float32(repetition) and repetition >= MIN_FLOAT32
            rule = "a number above 0 that float32 holds (1 does nothing)"
            require(valid, "repetition_penalty", repetition, rule)
        for name in ("presence", "frequency"):
            value = getattr(self, f"{name}_penalty")
            rule = "a number that float32 holds (0 does nothing)"
            require(value is None or is_float32(value), f"{name}_penalty", value, rule)
        for name in ("repetition", "presence", "frequency"):
            size = f"{name}_context_size"
            require_int(size, getattr(self, size), 1)
        for function in (*self.logits_processors, self.sampler):
            if function is not None and not callable(function):
                raise ConfigError(
                    f"{quoted(function)} is no sampler or logits processor: pass a "
                    "function"
                )

    def _is_set(self, name: str) -> bool:
        """Whether a field differs from its default."""
        default = type(self).__dataclass_fields__[name].default
        return bool(getattr(self, name) != default)

    def _check_together(self) -> None:
        filters = ("top_p", "min_p", "top_k", "xtc_probability")
        for name in ("temperature", *filters):
            if self.sampler is not None and self._is_set(name):
                raise ConfigError(
                    f"sampler replaces {name}: leave one of them out "
                    "(mlx-lm's make_sampler takes the same options)"
                )
        for name in filters:
            if self.temperature == 0 and self._is_set(name):
                raise ConfigError(
                    f"{name} needs a temperature above 0: at 0 nothing is drawn",
                    field=name,
                )
        if self.grammar is not None:
            self._check_grammar()
        if self.max_thinking_tokens is not None and self.stepwise:
            raise ConfigError(
                "max_thinking_tokens does not go with a sampler or logits processors, "
                "which could choose what it forbids: leave one of them out",
                field="max_thinking_tokens",
            )
        if self._is_set("xtc_threshold") and not self.xtc_probability:
            raise ConfigError(
                "xtc_threshold needs xtc_probability: add it", field="xtc_threshold"
            )
        if self.stepwise and self.verification != "coupled":
            raise ConfigError(
                f"verification {self.verification!r} needs the whole distribution, "
                "which a sampler or a logits processor does not give: use 'coupled'"
            )

    def _check_grammar(self) -> None:
        rule = "a Grammar, such as Grammar.json_schema({...})"
        require(isinstance(self.grammar, Grammar), "grammar", self.grammar, rule)
        if self.stepwise:
            raise ConfigError(
                "a grammar does not go with a sampler or logits processors, which "
                "could choose what it forbids: leave one of them out"
            )
        if self.min_tokens:
            raise ConfigError(
                "min_tokens does not go with a grammar, which says where an output may "
                "end (minLength, minItems): leave it out",
                field="min_tokens",
            )


#: Settings that JSON can express.
JSON_SETTINGS = frozenset(each.name for each in fields(SamplingParams)) - {
    "grammar",
    "logits_processors",
    "sampler",
}
#: Settings without effect at temperature 0: all of them keep the likeliest token.
FILTERS = ("top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    valid = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    require(valid, name, value, "a list or a tuple")
    return tuple(value)  # type: ignore[arg-type]


def require_params(params: object, more: str = "") -> SamplingParams:
    """Return ``params``, which must be :class:`SamplingParams`.

    Args:
        more: what else the caller accepts, for the message.

    Raises:
        ConfigError: ``params`` is something else.
    """
    if not isinstance(params, SamplingParams):
        raise ConfigError(
            f"params are of type {type(params).__name__}: give SamplingParams(...)"
            f"{more}"
        )
    return params


def per_prompt(
    params: SamplingParams | Iterable[SamplingParams] | None,
    n: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[SamplingParams]:
    """The settings of each prompt; prompts that share them get consecutive seeds."""
    if params is None or isinstance(params, SamplingParams):
        shared = (params or SamplingParams()).updated(settings).seeded()
        if shared.seed is None:
            return [shared] * n
        return [replace(shared, seed=shared.seed + i) for i in range(n)]
    one = isinstance(params, dict) or not isinstance(params, Iterable)
    each: list[Any] = [params] if one else list(params)
    for p in each:
        require_params(p, ", one, or one for each prompt")
    if len(each) != n:
        raise ConfigError(
            f"{len(each)} SamplingParams for {n} prompts: give one, or one for each"
        )
    return [p.updated(settings) for p in each]
