"""Sampling parameters of requests, for all protocols."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..errors import ConfigError
from ..grammar import Grammar
from ..sampling_params import FILTERS, VERIFICATIONS, SamplingParams
from ..utils.printable import quoted
from .config import ServerConfig
from .parameters import Parameter, Table, shaped
from .refusal import Refusal, refusal_of

#: mlx-lm's parameters: every endpoint takes them, in addition to its protocol's own.
MORE: Table = {
    "top_k": Parameter(int),
    "min_p": Parameter(float),
    "xtc_probability": Parameter(float),
    "xtc_threshold": Parameter(float),
    "repetition_penalty": Parameter(float),
    "repetition_context_size": Parameter(int),
    "presence_context_size": Parameter(int),
    "frequency_context_size": Parameter(int),
    "min_tokens": Parameter(int),
    "stop_token_ids": Parameter([int], high=128),
    "num_draft_tokens": Parameter(int),
    "cache_salt": Parameter(str),
    "verification": Parameter(str, only=VERIFICATIONS),
}
#: OpenAI's parameters.
SAMPLING: Table = {
    "temperature": Parameter(float, low=0),
    "top_p": Parameter(float),
    "presence_penalty": Parameter(float, low=-2, high=2),
    "frequency_penalty": Parameter(float, low=-2, high=2),
    "logit_bias": Parameter(dict, high=1024),
    "seed": Parameter(int),
    **MORE,
}
#: Labels, which do not change the output. A user's labels can keep prefixes apart.
LABELS: Table = {
    "user": Parameter(str),
    "safety_identifier": Parameter(str),
    "metadata": Parameter(dict),
    "prompt_cache_key": Parameter(str),
    "service_tier": Parameter(
        str, only=("auto", "default"), refused="there is one tier: leave it out"
    ),
}
#: Parameters that OpenAI documents for conversations: labels, and some that are mostly
#: refused here.
DOCUMENTED: Table = {
    **LABELS,
    "prompt_cache_retention": Parameter(
        str, only=("in_memory", "in-memory"), refused="the server's options say it"
    ),
    "prompt_cache_options": Parameter(
        dict, refused="common beginnings are kept by themselves"
    ),
    "moderation": Parameter(dict, refused="nothing is moderated here"),
}
#: Parameters of streams; Anthropic's protocol has no ``stream_options``.
STREAM: Table = {
    "stream": Parameter(bool, default=False),
    "stream_options": Parameter(
        dict,
        parts={
            "include_usage": Parameter(bool),
            "include_obfuscation": Parameter(
                bool,
                only=(False,),
                refused="nothing is added to hide how long events are",
            ),
        },
    ),
}
_FIELDS = {field.name for field in fields(SamplingParams)}


def wants_usage(values: Mapping[str, Any]) -> bool:
    """Whether a stream ends with the usage."""
    options = values["stream_options"]
    if options is None:
        return False
    if not values["stream"]:
        raise Refusal("stream_options needs stream: add it", param="stream_options")
    return bool(options.get("include_usage"))


def constraint(response_format: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """The fields of ``SamplingParams`` for a requested format."""
    if response_format is None or response_format.get("type") == "text":
        return {}
    kind = response_format.get("type")
    try:
        if kind == "json_object":
            made = Grammar.json_object()
        elif kind == "json_schema":
            # Chat completions have the schema one level deeper than other endpoints.
            inner = response_format.get("json_schema", response_format)
            place = where + ".json_schema" * (where == "response_format")
            shape = {"schema": dict, "strict?": (bool, None)}
            made = Grammar.json_schema(shaped(inner, shape, place)["schema"])
        elif kind == "regex":
            made = Grammar.regex(
                shaped(response_format, {"pattern": str}, where)["pattern"]
            )
        elif kind == "grammar":
            made = Grammar.lark(
                shaped(response_format, {"grammar": str}, where)["grammar"]
            )
        else:
            raise Refusal.invalid(
                where,
                f"{where}.type is {quoted(kind)}: it must be text, json_object, "
                "json_schema, regex or grammar",
            )
    except ConfigError as error:
        raise Refusal.invalid(where, f"{where}: {error}") from error
    return {"grammar": made}


def sampling(
    values: Mapping[str, Any],
    config: ServerConfig,
    names: Mapping[str, str],
    *,
    max_tokens: int | None,
    **more: Any,
) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        values: the request's values, by the names in the tables above; ``None`` means
            not given.
        names: names of parameters, by the fields that they fill.
        max_tokens: the number that the request asks for.
        more: fields that the protocol has filled itself.
    """
    limit, given = config.max_output_tokens, max_tokens
    wanted = config.max_tokens if given is None else given
    if limit is not None and wanted > limit:
        param = names.get("max_tokens", "max_tokens")
        raise Refusal.invalid(param, f"{param} is {wanted}: this server allows {limit}")
    found = {
        name: value
        for name, value in values.items()
        if name in _FIELDS and value is not None
    }
    if "logit_bias" in found:
        found["logit_bias"] = _biases(found["logit_bias"])
    if config.prefix_sharing == "client":
        found["cache_salt"] = _salt(values)
    if found.get("top_k") == -1:  # vLLM and others keep all tokens with -1
        found["top_k"] = 0
    if "stop_token_ids" in found:
        found["stop_token_ids"] = tuple(found["stop_token_ids"])
    found = {"temperature": config.temperature, **found, "max_tokens": wanted, **more}
    try:
        if found["temperature"] == 0:
            # Filters have no effect at temperature 0; their values are still checked.
            SamplingParams(**{**found, "temperature": 1.0})
            found = {k: v for k, v in found.items() if k not in FILTERS}
        return SamplingParams(**found)
    except Exception as error:
        raise refusal_of(error, names) from error


def _salt(values: Mapping[str, Any]) -> str:
    """The names by which a request identifies its user."""
    user = (values.get("metadata") or {}).get("user_id")
    names = ("cache_salt", "user", "safety_identifier")
    return json.dumps([user, *(values.get(name) for name in names)])


def _biases(given: Mapping[str, Any]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not (token.isascii() and token.isdigit()) or len(token) > 10:
            raise Refusal.invalid(
                "logit_bias",
                'logit_bias must map token ids to numbers, as in {"1234": -5}',
            )
        biases[int(token)] = bias
    return biases


def stops(given: str | list[Any] | None, where: str) -> tuple[str, ...]:
    """Stop texts, from one text or several."""
    if given is None:
        return ()
    texts = [given] if isinstance(given, str) else given
    if not all(isinstance(text, str) and text for text in texts):
        raise Refusal.invalid(
            where, f"{where} must be one text or several, none of them empty"
        )
    return tuple(texts)
