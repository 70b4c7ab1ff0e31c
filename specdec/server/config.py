"""Options of a server. No mlx here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..errors import ConfigError
from ..sampling_params import MAX_TEMPERATURE
from ..utils.checks import (
    require,
    require_bytes,
    require_int,
    require_one_of,
    require_range,
)
from ..utils.names import settings

#: What mlx-lm's clients call the server's own model.
DEFAULT_NAME = "default_model"
_MOST_SECONDS = 10**7

PrefixSharing = Literal["all", "client"]
PREFIX_SHARING: tuple[PrefixSharing, ...] = get_args(PrefixSharing)


@settings
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server treats its clients.

    Args:
        names: names by which clients ask for the model; ``*`` accepts every name.
            Responses have the first one, or the target's own if there is none.
        api_keys: keys, one of which clients have to send; without any, none is needed.
        cors: origins whose pages may call the server from a browser; ``*`` is any.
        max_waiting: how many requests may wait for a row; more are refused with 429.
        max_body_bytes: the most bytes of a request's body.
        max_prompt_tokens: the most tokens of a prompt. ``None``: as the context allows.
        max_tokens: the most tokens to generate if a request does not say.
        max_output_tokens: the most tokens that a request may ask for. ``None``: as the
            context allows.
        temperature: the sampling temperature if a request does not say; 0 is greedy.
        request_timeout: end a request after so many seconds, waiting included; its
            answer is cut there.
        stop_timeout: seconds that running requests have to end when the server stops.
        keep_alive: seconds without an event after which a stream gets a comment.
        chat_template_config: variables of the chat template.
        prefix_sharing: ``all`` clients share stored prefixes, or each ``client`` has
            its own. A client is identified by its key (or its address, if there are no
            keys) and by the user that its requests name.
        strict: refuse fields that no protocol has; without it they are ignored, and
            named in a header.
        log_requests: write a line for each request that ends.
    """

    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    max_waiting: int = 256
    max_body_bytes: int = 16 * 2**20
    max_prompt_tokens: int | None = None
    max_tokens: int = 2048
    max_output_tokens: int | None = None
    temperature: float = 1.0
    request_timeout: float = 600
    stop_timeout: float = 30
    keep_alive: float = 10
    chat_template_config: Mapping[str, Any] = field(default_factory=dict)
    prefix_sharing: PrefixSharing = "all"
    strict: bool = False
    log_requests: bool = False

    def __post_init__(self) -> None:
        for name in ("names", "api_keys", "cors"):
            value = getattr(self, name)
            texts = isinstance(value, tuple) and all(isinstance(v, str) for v in value)
            require(texts, name, value, "a tuple of texts")
        require_int("max_waiting", self.max_waiting, 0)
        require_bytes("max_body_bytes", self.max_body_bytes, 1)
        for name in ("max_prompt_tokens", "max_output_tokens"):
            if (value := getattr(self, name)) is not None:
                require_int(name, value, 1)
        require_int("max_tokens", self.max_tokens, 1)
        most = self.max_output_tokens
        if most is not None:
            rule = f"at most max_output_tokens ({most})"
            require(self.max_tokens <= most, "max_tokens", self.max_tokens, rule)
        require_range("temperature", self.temperature, 0, MAX_TEMPERATURE)
        require_range("stop_timeout", self.stop_timeout, 0, _MOST_SECONDS)
        for name in ("request_timeout", "keep_alive"):
            value = getattr(self, name)
            require_range(name, value, 0, _MOST_SECONDS, open_low=True)
        require_one_of("prefix_sharing", self.prefix_sharing, PREFIX_SHARING)
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty: name a key, or leave it out")
        if not all(name.strip() for name in self.names):
            raise ConfigError("a name of the model is empty: leave it out")
