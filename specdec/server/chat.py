"""OpenAI's ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..utils.printable import quoted
from .conversation import (
    arguments_of,
    check_format,
    logprobs_of,
    text_of,
    tools_of,
    variables,
)
from .job import (
    Begun,
    Call,
    Chat,
    Event,
    Job,
    Message,
    Outcome,
    Piece,
    Tokens,
    Tools,
)
from .parameters import Parameter, Table, check_parts, read, shaped
from .refusal import Refusal
from .rendering import CompletionRendering
from .sampling import (
    DOCUMENTED,
    SAMPLING,
    STREAM,
    constraint,
    sampling,
    stops,
    wants_usage,
)
from .service import Service

_NO_MEDIA = "text is all that goes in and comes out: leave it out"
TABLE: Table = {
    "model": Parameter(str),
    "messages": Parameter([dict], required=True, low=1),
    "max_tokens": Parameter(int),
    "max_completion_tokens": Parameter(int),
    "n": Parameter(int, default=1, low=1, high=128),
    "stop": Parameter((str, [str])),
    "logprobs": Parameter(bool, default=False),
    "top_logprobs": Parameter(int, default=0, low=0, high=20),
    "tools": Parameter([dict], default=[], high=1024),
    "tool_choice": Parameter((str, dict)),
    "parallel_tool_calls": Parameter(bool, default=True),
    "response_format": Parameter({"type": str}),
    "reasoning_effort": Parameter(
        str, only=("none", "minimal", "low", "medium", "high", "xhigh", "max")
    ),
    "chat_template_kwargs": Parameter(dict, default={}),
    "continue_final_message": Parameter(bool, default=False),
    "modalities": Parameter([str], only=(["text"],), refused=_NO_MEDIA),
    "audio": Parameter(dict, refused=_NO_MEDIA),
    "web_search_options": Parameter(
        dict, refused="nothing is searched here: use a tool"
    ),
    "functions": Parameter(list, only=([],), refused="it is deprecated: use tools"),
    "function_call": Parameter(object, refused="it is deprecated: use tool_choice"),
    "store": Parameter(bool, only=(False,), refused="nothing is stored here"),
    "prediction": Parameter(
        dict, refused="drafts are made by the server: leave it out"
    ),
    "verbosity": Parameter(str, only=("medium",), refused="ask for it in the prompt"),
    **SAMPLING,
    **STREAM,
    **DOCUMENTED,
}
_ASSISTANT: Table = {
    "audio": Parameter(dict, refused=_NO_MEDIA),
    "function_call": Parameter(dict, refused="it is deprecated: use tool_calls"),
}
NAMES = {
    "prompt": "messages",
    "max_tokens": "max_completion_tokens",
    "stop": "stop",
    "top_logprobs": "top_logprobs",
    "n": "n",
    "grammar": "response_format",
}


def parse(body: Any, service: Service) -> ChatRendering:
    """Parse a request's body."""
    values = read(body, TABLE)
    model = service.check_model(values["model"])
    if values["top_logprobs"] and not values["logprobs"]:
        raise Refusal("top_logprobs needs logprobs: add it", param="top_logprobs")
    usage = wants_usage(values)
    most = values["max_completion_tokens"]
    if most is not None and values["max_tokens"] not in (None, most):
        raise Refusal.invalid(
            "max_tokens",
            "max_tokens and max_completion_tokens are the same: leave max_tokens out",
        )
    names = NAMES if most is not None else {**NAMES, "max_tokens": "max_tokens"}
    params = sampling(
        values,
        service.config,
        names,
        max_tokens=values["max_tokens"] if most is None else most,
        stop=stops(values["stop"], "stop"),
        logprobs=values["logprobs"],
        top_logprobs=values["top_logprobs"],
        **constraint(values["response_format"], "response_format"),
    )
    tools = tools_of(values["tools"], values["tool_choice"], "tool_choice")
    chat = Chat(
        messages_of(values["messages"]),
        Tools(
            tools.functions, tools.required, tools.name, values["parallel_tool_calls"]
        ),
        continue_final=values["continue_final_message"],
        formatted=params.grammar is not None,
        variables=variables(
            service, values["chat_template_kwargs"], values["reasoning_effort"]
        ),
    )
    if chat.continue_final and chat.messages[-1]["role"] != "assistant":
        raise Refusal(
            "continue_final_message needs a last message of the assistant",
            param="continue_final_message",
        )
    check_format(params, tools, "response_format")
    job = Job([chat], params, values["n"], names)
    return ChatRendering(service, job, model, streamed=values["stream"], usage=usage)


def messages_of(given: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages for the chat template.

    Raises:
        Refusal: a message has a part that is not text.
    """
    called: dict[str, str] = {}
    made = [_message(m, f"messages[{i}]", called) for i, m in enumerate(given)]
    return [m for m in made if m["role"] != "system" or m["content"]]


_MESSAGE = {"role": str, "content?": (str, [dict], None), "name?": (str, None)}
_CALL = {"id?": (str, None), "function": {"name": str, "arguments": str}}


def _message(given: dict[str, Any], where: str, called: dict[str, str]) -> Message:
    shaped(given, _MESSAGE, where)
    role = given["role"]
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refusal.invalid(
            f"{where}.role",
            f"{where}.role is {quoted(role)}: it must be system, developer, user, "
            "assistant or tool",
        )
    content = text_of(given.get("content"), f"{where}.content")
    made: Message = {"role": "system" if role == "developer" else role}
    made["content"] = content
    if given.get("name") is not None:
        made["name"] = given["name"]
    if role == "assistant":
        _assistant(given, where, made, called)
    if role == "tool":
        shaped(given, {"tool_call_id": str}, where)
        made["tool_call_id"] = given["tool_call_id"]
        if name := called.get(given["tool_call_id"]):
            made["name"] = name
    return made


def _assistant(
    given: dict[str, Any], where: str, made: Message, called: dict[str, str]
) -> None:
    check_parts(given, _ASSISTANT, where)
    if given.get("refusal") is not None and not made["content"]:
        made["content"] = shaped(given["refusal"], str, f"{where}.refusal")
    for key in ("reasoning_content", "reasoning"):
        if given.get(key) is not None:
            made["reasoning_content"] = shaped(given[key], str, f"{where}.{key}")
    calls = []
    for i, call in enumerate(
        shaped(given.get("tool_calls") or [], [dict], f"{where}.tool_calls")
    ):
        at = f"{where}.tool_calls[{i}]"
        shaped(call, _CALL, at)
        function = call["function"]
        name = function["name"]
        called[call.get("id") or ""] = name
        made_call: dict[str, Any] = {"type": "function"}
        if call.get("id"):
            made_call["id"] = call["id"]
        arguments = arguments_of(function["arguments"], f"{at}.function.arguments")
        calls.append({**made_call, "function": {"name": name, "arguments": arguments}})
    if calls:
        made["tool_calls"] = calls


class ChatRendering(CompletionRendering):
    """A chat completion, whole or in chunks."""

    prefix = "chatcmpl"
    names = ("chat.completion", "chat.completion.chunk")

    def __init__(self, service: Service, job: Job, model: str, **how: bool):
        super().__init__(job, model, **how)
        self._service = service

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        empty = outcome.calls and not outcome.text
        message["content"] = None if empty else outcome.text
        if outcome.reasoning:
            message["reasoning_content"] = outcome.reasoning
        if outcome.calls:
            message["tool_calls"] = [_call(call) for call in outcome.calls]
        logprobs = None
        if self.job.params.logprobs:
            logprobs = self._logprobs(outcome.tokens)
        return {"message": message, "logprobs": logprobs}

    def _logprobs(self, tokens: Tokens) -> dict[str, Any]:
        return {"content": logprobs_of(self._service, tokens), "refusal": None}

    def stream(self, event: Event) -> Iterator[bytes]:
        delta: dict[str, Any] = {}
        logprobs: dict[str, Any] | None = None
        if isinstance(event, Begun):
            delta = {"role": "assistant", "content": ""}
        elif isinstance(event, Piece):
            key = "content" if event.kind == "text" else "reasoning_content"
            delta = {key: event.text}
            logprobs = self._logprobs(event.tokens) if event.tokens else None
        elif isinstance(event, Call):
            begun = {"index": event.index, **_call(event)}
            begun["function"] = {"name": event.name, "arguments": ""}
            yield self.chunk(event, delta={"tool_calls": [begun]}, logprobs=None)
            arguments = {"arguments": event.arguments}
            delta = {"tool_calls": [{"index": event.index, "function": arguments}]}
        yield self.chunk(event, delta=delta, logprobs=logprobs)


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
