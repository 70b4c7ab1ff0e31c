"""Parts of conversations that the protocols share: tools, texts, template variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..prompts import OWN_VARIABLES
from ..prompts.templates import template_of
from ..sampling_params import SamplingParams
from ..utils.data_files import DataError, parse_json
from ..utils.printable import quoted
from .job import Tokens, Tools
from .parameters import Parameter, Table, shaped
from .refusal import Refusal
from .service import Service

#: Parts of tools and tool calls that protocols document and this server cannot use.
TOOL_PARTS: Table = {
    "allowed_callers": Parameter(
        [str], only=(["direct"],), refused="nothing but the model calls them"
    ),
    "async": Parameter(bool, only=(False,), refused="calls are the client's to make"),
    "defer_loading": Parameter(bool, only=(False,), refused="all are in the prompt"),
    "input_examples": Parameter(
        list, only=([],), refused="write them into the description"
    ),
    "output_schema": Parameter(dict, refused="results are text"),
}
CALL_PARTS: Table = {
    "async": TOOL_PARTS["async"],
    "caller": Parameter(
        dict, only=({"type": "direct"},), refused="nothing but the model calls"
    ),
    "namespace": Parameter(str, refused="functions have none here"),
    "toolset_name": Parameter(str, refused="there are no toolsets here"),
}
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


def variables(
    service: Service,
    given: Mapping[str, Any],
    effort: str | None,
    *,
    where: str = "reasoning_effort",
) -> dict[str, Any]:
    """Variables for the chat template, in addition to messages and tools."""
    for name in given:
        if name in OWN_VARIABLES or name == "tools":
            raise Refusal.invalid(
                "chat_template_kwargs",
                f"chat_template_kwargs cannot have {name}: leave it out",
            )
    made = {**service.config.chat_template_config, **given}
    if effort is None:
        return made
    template = template_of(service.decoder.tokenizer) or ""
    if "reasoning_effort" in template:
        made["reasoning_effort"] = effort
    elif "enable_thinking" in template:
        made["enable_thinking"] = effort != "none"
    elif effort != "none":
        raise Refusal.unsupported(
            where,
            f"{where} is not supported: this model's chat template has no such setting",
        )
    return made


def tools_of(given: Sequence[dict[str, Any]], choice: Any, where: str) -> Tools:
    """The tools in OpenAI's form, and whether one must be called."""
    for i, tool in enumerate(given):
        at = f"tools[{i}]"
        shaped(tool, {"type": str}, at)
        if tool["type"] != "function":
            raise Refusal.unsupported(
                f"{at}.type",
                f"{at} of type {quoted(tool['type'])} is not supported: functions are "
                "all that can be called",
            )
        shape = {
            "name": str,
            "description?": (str, None),
            "parameters?": (dict, None),
            "strict?": (bool, None),
        }
        shaped(tool, {"function": shape}, at)
        check_name(tool["function"]["name"], f"{at}.function.name")
    names = [tool["function"]["name"] for tool in given]
    if choice in (None, "auto"):
        for i, tool in enumerate(given):
            if tool["function"].get("strict"):
                raise Refusal.unsupported(
                    f"tools[{i}].function.strict",
                    "strict is not supported while the model may call nothing: use "
                    f"{where} required, or leave strict out",
                )
    if choice is None or choice in ("auto", "none", "required"):
        if choice == "required" and not given:
            raise Refusal(f"{where} is required: give tools", param=where)
        return Tools([] if choice == "none" else given, required=choice == "required")
    name = choice
    if isinstance(choice, dict):
        if choice.get("type") not in (None, "function"):
            raise Refusal.unsupported(
                where,
                f"{where} of type {quoted(choice['type'])} is not supported: name a "
                "function",
            )
        shaped(choice, {"type": str, "function": {"name": str}}, where)
        name = choice["function"]["name"]
    if not isinstance(choice, dict) or name not in names:
        raise Refusal.invalid(
            where,
            f"{where} must be auto, none, required or one of the tools, not "
            f"{quoted(name)}",
        )
    return Tools(given, name=name)


def check_format(params: SamplingParams, tools: Tools, where: str) -> None:
    """Refuse a format together with tools: a tool call would not follow the format."""
    if params.grammar is not None and tools.functions:
        raise Refusal.invalid(
            where,
            f"{where} does not go with tools that may be called: leave one of them out",
        )


def check_name(name: str, where: str) -> None:
    """Refuse function names that cannot be written in a call."""
    if not _NAME.fullmatch(name):
        raise Refusal.invalid(
            where,
            f"{where} must be 1 to 128 letters, digits, dashes, dots or underscores",
        )


def arguments_of(text: str, where: str) -> dict[str, Any]:
    """A call's arguments in the form that chat templates need."""
    try:
        value = parse_json(text) if text.strip() else None
    except DataError as error:
        raise Refusal(f"{where}: {error}", param=where) from error
    arguments: dict[str, Any] = shaped({} if value is None else value, dict, where)
    return arguments


def text_of(
    content: Any, where: str, kinds: Sequence[str] = ("text", "refusal")
) -> str:
    """The text of a message's content, which may be a text or parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        shaped(part, {"type": str}, at)
        if part["type"] not in kinds:
            raise Refusal(
                f"{at} of type {quoted(part['type'])} is not supported: this model "
                "reads text",
                param=at,
                code="unsupported_content",
            )
        key = "refusal" if part["type"] == "refusal" else "text"
        texts.append(shaped(part, {key: str}, at)[key])
    return "".join(texts)


def logprobs_of(service: Service, tokens: Tokens) -> list[dict[str, Any]]:
    """Log-probabilities in the form of chat completions."""
    return [
        {
            **_named(service, token, entry.logprob),
            "top_logprobs": [_named(service, t, p) for t, p in entry.top],
        }
        for token, entry in tokens
    ]


def _named(service: Service, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(service, token)
    whole = "\ufffd" not in text
    return {
        "token": text,
        # JSON has no infinity; OpenAI writes -9999 for tokens of probability 0.
        "logprob": max(logprob, -9999.0),
        "bytes": list(text.encode()) if whole else None,
    }


def token_text(service: Service, token: int) -> str:
    """The text of one token; U+FFFD for a part of a character."""
    return str(service.decoder.tokenizer.decode([token]))
