"""Requests as JSON lines: a line's settings, and its result in OpenAI's form."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from uuid import uuid4

from ..errors import ConfigError, PromptFileError
from ..grammar import Grammar, check_grammar
from ..outputs import GenerationResult
from ..prompts import PromptRecord
from ..sampling_params import FILTERS, JSON_SETTINGS, SamplingParams
from ..utils.names import nearest
from ..utils.printable import shorten

# Keys for the grammar that the output has to follow; a line may have one of them.
_GRAMMARS = frozenset({"grammar", "json_schema", "regex", "response_format"})
# Other programs' names of settings.
_ALIASES = {
    "temp": "temperature",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
}
# Keys of OpenAI's requests that are not settings and do not change the text.
_NO_SETTINGS = frozenset(
    {"metadata", "model", "service_tier", "store", "stream", "stream_options", "user"}
)
# The least similarity of a misspelt key to the key that was meant.
_NEAR = 0.8


def requests_of(
    records: Sequence[PromptRecord], params: SamplingParams
) -> SamplingParams | list[SamplingParams]:
    """The parameters of each line: ``params``, changed by the line's own settings.

    A line without its own seed draws with the seed of ``params`` plus its index.
    """
    each = [_settings_of(record) for record in records]
    if not any(each):
        return params
    each_params = []
    for record, settings in zip(records, each, strict=True):
        at_zero = settings.get("temperature") == 0
        # At temperature 0 they would be refused.
        reset = {name: _default(name) for name in FILTERS if at_zero}
        try:
            each_params.append(params.updated(reset | settings))
        except ConfigError as error:
            raise PromptFileError(f"{record.where}: {error}") from error
    # One random seed for all lines that sample and have none.
    unseeded = (p for p, s in zip(each_params, each, strict=True) if _needs_seed(p, s))
    first = next(unseeded, params).seeded().seed
    return [
        replace(p, seed=first + i) if _needs_seed(p, s) and first is not None else p
        for i, (p, s) in enumerate(zip(each_params, each, strict=True))
    ]


def _needs_seed(params: SamplingParams, settings: Mapping[str, Any]) -> bool:
    return params.draws and settings.get("seed") is None


def ignored_keys(records: Iterable[PromptRecord]) -> list[str]:
    """Keys of lines that have no effect, with the setting that may have been meant."""
    keys = {key for record in records for key in record.fields}
    known = JSON_SETTINGS | _ALIASES.keys() | _GRAMMARS | _NO_SETTINGS | {"n"}
    unknown = []
    for key in sorted(keys - known):
        meant = nearest(key, known, cutoff=_NEAR)
        unknown.append(key if meant is None else f"{key} (did you mean {meant}?)")
    return unknown


def _default(name: str) -> Any:
    return SamplingParams.__dataclass_fields__[name].default


def _settings_of(record: PromptRecord) -> dict[str, Any]:
    """The settings in a line, by the names of their fields; null means not set."""
    settings: dict[str, Any] = {}
    for key in sorted(_GRAMMARS & record.fields.keys()):
        if record.fields[key] is None:
            continue
        if settings:
            raise PromptFileError(f"{record.where}: {key} is one grammar too many")
        try:
            grammar = _grammar_of(key, record.fields[key])
            if grammar is not None:
                _check(grammar)
        except (ConfigError, LookupError, TypeError) as error:
            why = error if isinstance(error, ConfigError) else "it is incomplete"
            raise PromptFileError(f"{record.where}: {key}: {why}") from error
        if grammar is not None:
            settings["grammar"] = grammar
    for key, value in record.fields.items():
        name = _ALIASES.get(key, key)
        if value is None:
            continue
        if name != key and record.fields.get(name) is not None:
            raise PromptFileError(
                f"{record.where}: {key} is {name}, which is there, too: leave one out"
            )
        if name == "n" and value != 1:
            raise PromptFileError(
                f"{record.where}: n is {shorten(value)}: one output is generated for a "
                "line; repeat the line for more"
            )
        if name not in JSON_SETTINGS:
            continue
        if name == "logit_bias" and isinstance(value, dict):
            value = {_token(token): bias for token, bias in value.items()}
        if name == "logprobs" and type(value) is int:  # the form of /v1/completions
            settings["top_logprobs"], value = value, True
        settings[name] = value
    return settings


def _grammar_of(key: str, value: Any) -> Grammar | None:
    """The grammar that the output has to follow, as in the options of these names."""
    if key == "response_format":  # OpenAI's form
        if value["type"] == "text":
            return None
        if value["type"] == "json_object":
            return Grammar.json_object()
        if value["type"] != "json_schema":
            raise ConfigError("its type is not text, json_object or json_schema")
        return Grammar.json_schema(value["json_schema"]["schema"])
    if key == "json_schema":
        return Grammar.json_schema(value)
    return Grammar.regex(value) if key == "regex" else Grammar.lark(value)


# Most lines have the same grammar.
_check = lru_cache(maxsize=64)(check_grammar)


def _token(text: str) -> int | str:
    """A JSON key as a token id; any other key is left as it is, and refused later."""
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else text


# -- results in OpenAI's form -------------------------------------------------------


def openai_line(
    result: GenerationResult, record: PromptRecord, model: str
) -> dict[str, object]:
    """A line of OpenAI's batch output files, for one result.

    Args:
        result: what was generated.
        record: the line that asked for it.
        model: the name to report.
    """
    named = record.id if record.id is not None else f"request-{result.index}"
    line: dict[str, object] = {"id": f"batch_req_{uuid4().hex}", "custom_id": named}
    if result.finish_reason == "error":
        error = {"code": "invalid_request", "message": result.error}
        if result.prompt_tokens:  # the prompt was accepted
            error["code"] = "server_error"
        return {**line, "response": None, "error": error}
    of_prompt = {}
    if result.prompt_logprobs is not None:
        of_prompt["prompt_logprobs"] = result.to_dict()["prompt_logprobs"]
    body = {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": result.text},
                "finish_reason": result.finish_reason,
                "logprobs": _openai_logprobs(result),
                **of_prompt,
            }
        ],
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": result.generated_tokens,
            "total_tokens": result.prompt_tokens + result.generated_tokens,
        },
    }
    response = {"status_code": 200, "request_id": uuid4().hex, "body": body}
    return {**line, "response": response, "error": None}


def _openai_logprobs(result: GenerationResult) -> dict[str, object] | None:
    if result.logprobs is None:
        return None
    return {
        "content": [
            {
                **_openai_token(entry.text, entry.logprob),
                "top_logprobs": [
                    _openai_token(text, logprob)
                    for text, (_, logprob) in zip(
                        entry.top_texts, entry.top, strict=True
                    )
                ],
            }
            for entry in result.logprobs
        ]
    }


def _openai_token(text: str, logprob: float) -> dict[str, object]:
    data = list(text.encode(errors="replace"))
    return {"token": text, "logprob": logprob, "bytes": data}
