"""What the protocols share: tools, texts, calls and log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import PromptError
from ..prompts import OWN_VARIABLES
from ..prompts.images import holds_image, source_in
from ..prompts.templates import template_of
from ..request import TokenLogprobs
from ..utils.data_files import DataError, parse_json
from ..utils.printable import quoted
from .errors import RequestError
from .job import Tokens, Tools
from .schema import Notes, Record, Refused, read
from .service import Service
from .tool_calls import format_of

_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_ACCEPTED = frozenset(
    {"cache_control", "prompt_cache_breakpoint", "annotations", "citations", "logprobs",
     "id", "status", "phase", "signature", "type", "index", "encrypted_content",
     "summary", "thoughtSignature", "extra_content"}
)  # fmt: skip
_ONLY_THE_MODEL = "nothing but the model calls them"


class Part(Record):
    """A part of a request that has fields which no chat template shows."""

    accepted = _ACCEPTED
    guesses = False


class ContentPart(Part):
    """A part of a message: a text, or an image in OpenAI's forms or Anthropic's."""

    accepted = _ACCEPTED | {"detail"}
    place = "content"
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    source: Any = None
    file_id: Any = None


class CallPart(Part):
    """A call, or its result."""

    place = "call"
    refused: ClassVar[Mapping[str, Refused]] = {
        "async": Refused("calls are the client's to make", (False,)),
        "caller": Refused(_ONLY_THE_MODEL, ({"type": "direct"},)),
        "namespace": Refused("functions have none here"),
        "toolset_name": Refused("there are no toolsets here"),
    }


class ToolPart(Part):
    """A tool's definition."""

    place = "tools"
    accepted = _ACCEPTED | {"defer_loading", "eager_input_streaming"}
    refused: ClassVar[Mapping[str, Refused]] = {
        "async": CallPart.refused["async"],
        "allowed_callers": Refused(_ONLY_THE_MODEL, (["direct"],)),
        "input_examples": Refused("write them into the description", ([],)),
        "output_schema": Refused("results are text"),
    }


class Function(ToolPart):
    """A function that the model may call."""

    place = "tools.function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def variables(
    service: Service, asked: Mapping[str, Any], effort: str | None, notes: Notes
) -> dict[str, Any]:
    """Variables for the chat template, in addition to messages and tools.

    A note says if they ask for thoughts and the template has no setting for them.

    Args:
        effort: how much to think; ``none`` is not at all.
    """
    for name in asked:
        if name in OWN_VARIABLES or name == "tools":
            raise RequestError.invalid(
                "chat_template_kwargs",
                f"chat_template_kwargs cannot have {name}: leave it out",
            )
    template = template_of(service.decoder.tokenizer) or ""
    known = [name for name in ("reasoning_effort", "enable_thinking")
             if name in template]  # fmt: skip
    setting: dict[str, Any] = {}
    if effort is not None:
        setting = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        setting = {name: setting[name] for name in known[:1]}
    wanted = [effort, asked.get("reasoning_effort"), asked.get("enable_thinking")]
    if not known and any(value not in (None, False, "none") for value in wanted):
        notes.add("the chat template of this model has no setting for thoughts")
    return {**service.config.chat_template_config, **setting, **asked}


@dataclass(frozen=True)
class Choice:
    """What ``tool_choice`` asks for.

    Args:
        kind: ``auto``, ``none``, ``required`` or ``named``.
        name: the tool that is named.
        allowed: names of the tools that may be called; ``None``: all.
        word: the protocol's word for ``required``.
    """

    kind: str
    name: str | None = None
    allowed: frozenset[str] | None = None
    word: str = "required"


def choice_of(value: str | Mapping[str, Any] | None) -> Choice:
    """What ``tool_choice`` of OpenAI's protocols asks for."""
    if not value or isinstance(value, str):
        choice = str(value or "auto")
        plain = choice in ("auto", "none", "required")
        return Choice(choice) if plain else Choice("named", choice)
    if value.get("type") != "allowed_tools":
        return Choice("named", _tool_named(value, "tool_choice"))
    inner = value.get("allowed_tools", value)
    mode, tools = (inner.get(key) if isinstance(inner, Mapping) else None
                   for key in ("mode", "tools"))  # fmt: skip
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise RequestError.invalid(
            "tool_choice",
            "tool_choice of type allowed_tools needs mode, auto or required, and tools",
        )
    names = (_tool_named(tool, "tool_choice.tools") for tool in tools)
    return Choice(str(mode), allowed=frozenset(names))


def _tool_named(value: Any, where: str) -> str:
    """The tool that an object names.

    A function is named within an object of its kind, or beside its kind; a hosted tool
    by its kind.
    """
    value = value if isinstance(value, Mapping) else {}
    kind = value.get("type", "function")
    inner = value.get(kind) if isinstance(kind, str) else None
    name = (inner if isinstance(inner, Mapping) else value).get("name")
    if name is None and kind not in ("function", "custom"):
        name = kind
    if not isinstance(name, str):
        raise RequestError.unsupported(
            "tool_choice",
            f"{where} of type {quoted(kind)} is not supported: name a function",
        )
    return name


def tools_of(
    service: Service,
    functions: Sequence[tuple[str, Function]],
    others: Mapping[str, str],
    choice: Choice,
    *,
    parallel: bool,
    notes: Notes,
    where: str = "tool_choice",
) -> Tools:
    """The tools of a request.

    Args:
        functions: the functions, each after its place in the request.
        others: kinds of tools that only another server could run, by their names.
        parallel: whether several may be called at once.
    """
    for at, function in functions:
        if not _NAME.fullmatch(function.name):
            raise RequestError.invalid(
                f"{at}.name",
                f"{at}.name must be 1 to 128 letters, digits, dashes, dots or "
                "underscores",
            )
    names = {function.name for _, function in functions}
    for name in sorted((choice.allowed or set()) - names - others.keys()):
        raise RequestError.invalid(
            where, f"{where} allows {quoted(name)}, which is none of the tools"
        )
    functions = [
        (at, function)
        for at, function in functions
        if choice.allowed is None or function.name in choice.allowed
    ]
    if choice.kind == "named" and choice.name not in names:
        kind = others.get(str(choice.name))
        if kind is not None:
            raise RequestError.unsupported(
                where,
                f"{where} names a tool of type {quoted(kind)}, which is not supported: "
                "functions are all that can be called",
            )
        raise RequestError.invalid(
            where,
            f"{where} must be auto, none, {choice.word} or one of the tools, not "
            f"{quoted(choice.name)}",
        )
    if choice.kind == "required" and not functions:
        kinds = ", ".join(sorted(set(others.values())))
        text = f"{where} is {choice.word}"
        if others:
            text += f", and tools of type {kinds} are not supported"
        raise RequestError.invalid(where, f"{text}: give functions")
    for kind in sorted(set(others.values())):
        notes.add(f"tools of type {kind[:60]} are left out")
    schemas = [_openai(function) for _, function in functions]
    if choice.kind == "none" or not schemas:
        return Tools(parallel=parallel)
    tokenizer = service.decoder.tokenizer
    template = template_of(tokenizer, tools=schemas)
    shown = template is None or "tools" in template
    calls = format_of(tokenizer)
    if calls is None or not shown:
        if choice.kind != "auto":
            raise RequestError.unsupported(
                where,
                f"{where} can only be auto: the chat template of this model knows no "
                "tools, or no calls; use auto, or another model",
            )
        notes.add("the chat template of this model knows no tools: calls are text")
    elif choice.kind == "named" and calls.opening is None:
        raise RequestError.unsupported(
            where,
            f"{where} names a function, and calls of this model ({calls.name}) can "
            f"only be required: use {choice.word}",
        )
    return Tools(
        schemas,
        required=choice.kind == "required",
        name=choice.name if choice.kind == "named" else None,
        parallel=parallel,
    )


def _openai(function: Function) -> dict[str, Any]:
    shown = function.model_dump(exclude_none=True)
    return {"type": "function", "function": shown}


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments in the form that chat templates need.

    What is no JSON object, as of a call that was cut, stands under ``arguments``.
    """
    try:
        value = parse_json(text) if text.strip() else None
    except DataError:
        value = text
    value = {} if value is None else value
    return value if isinstance(value, dict) else {"arguments": text}


def text_of(
    content: str | Sequence[Any] | None,
    where: str,
    notes: Notes,
    kinds: Sequence[str] = ("text", "refusal"),
) -> str:
    """The text of a message's content, which may be a text or parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, value in enumerate(content):
        at = f"{where}[{i}]"
        part = value
        if not isinstance(value, ContentPart):
            part = read(ContentPart, value, notes, at)
        texts.append(part_text(part, at, kinds))
    return "".join(texts)


def content_of(
    content: str | Sequence[Any] | None,
    where: str,
    notes: Notes,
    kinds: Sequence[str] = ("text", "refusal"),
) -> str | list[dict[str, Any]]:
    """The text of a message's content, or its parts if there are images among them.

    Raises:
        RequestError: an image is not in the request itself.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for i, value in enumerate(content):
        at, part = f"{where}[{i}]", value
        if not isinstance(value, ContentPart):
            part = read(ContentPart, value, notes, at)
        item = part.model_dump(exclude_none=True)
        try:
            if holds_image(item):
                # It is decoded with the prompt, where it keeps nobody waiting.
                source = source_in(item, local=False)
                parts.append({"type": "image", "image": source})
                continue
        except PromptError as error:
            raise RequestError.content(at, f"{at}: {error}") from error
        parts.append({"type": "text", "text": part_text(part, at, kinds)})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def part_text(
    part: ContentPart, at: str, kinds: Sequence[str] = ("text", "refusal")
) -> str:
    """The text of a part."""
    if part.type not in kinds:
        kind = f"{at} of type {quoted(part.type)}"
        text = f"{kind} is not supported: texts and images are"
        raise RequestError.content(at, text)
    key = "refusal" if part.type == "refusal" else "text"
    value: str | None = getattr(part, key)
    if value is None:
        raise RequestError.missing(f"{at}.{key}")
    return value


def logprobs_of(service: Service, tokens: Tokens, most: int) -> list[dict[str, Any]]:
    """Log-probabilities in the form of chat completions.

    The token itself is among the likeliest ones, if there are any.
    """
    entries = []
    for token, entry in tokens:
        top = with_own(token, entry, most)
        named = [_named(service, other, logprob) for other, logprob in top]
        entries.append({**_named(service, token, entry.logprob), "top_logprobs": named})
    return entries


def with_own(token: int, entry: TokenLogprobs, most: int) -> list[tuple[int, float]]:
    """The likeliest tokens, if any were asked for, with the token that was drawn."""
    top = list(entry.top)
    if most and all(other != token for other, _ in top):
        top.append((token, entry.logprob))
    return top


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
