"""OpenAI's ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from ..utils.printable import quoted
from .conversation import (
    CallPart,
    ContentPart,
    Function,
    Part,
    ToolPart,
    arguments_of,
    choice_of,
    content_of,
    logprobs_of,
    text_of,
    tools_of,
    variables,
)
from .errors import RequestError
from .job import Call, Delta, Event, Message, Outcome, Started, Tokens, Tools
from .rendering import CompletionRendering
from .sampling import OpenAISampling, stops
from .schema import Notes, Refused, read
from .service import Service

_NO_MEDIA = "text is all that goes in and comes out: leave it out"


class _CalledFunction(Part):
    place = "tool_calls.function"
    accepted = Part.accepted | {"parsed_arguments"}  # the client's own
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(CallPart):
    place = "tool_calls"
    id: str = ""
    function: _CalledFunction


class _Message(Part):
    place = "messages"
    accepted = Part.accepted | {"parsed", "provider_specific_fields"}  # the client's
    refused: ClassVar[Mapping[str, Refused]] = {
        "audio": Refused(_NO_MEDIA),
        "function_call": Refused("it is deprecated: use tool_calls"),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] = Field([], max_length=1024)
    tool_call_id: str | None = None


class ChatRequest(OpenAISampling):
    """A request's body."""

    noted: ClassVar[Mapping[str, str]] = {"verbosity": "", "prediction": ""}
    refused: ClassVar[Mapping[str, Refused]] = {
        **OpenAISampling.refused,
        "modalities": Refused(_NO_MEDIA, (["text"],)),
        "audio": Refused(_NO_MEDIA),
        "web_search_options": Refused("nothing is searched here: use a tool"),
        "functions": Refused("it is deprecated: use tools", ([],)),
        "function_call": Refused("it is deprecated: use tool_choice", ("none", "auto")),
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        **OpenAISampling.elsewhere, "prompt": "messages", "input": "messages",
    }  # fmt: skip
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = Field([], max_length=1024)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: (
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    ) = None
    chat_template_kwargs: dict[str, Any] = Field({})
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None


NAMES = {
    "prompt": "messages",
    "max_tokens": "max_completion_tokens",
    "stop": "stop",
    "top_logprobs": "top_logprobs",
    "n": "n",
    "grammar": "response_format",
}


def _tools(request: ChatRequest, service: Service, notes: Notes) -> Tools:
    functions, others = [], {}
    for i, tool in enumerate(request.tools):
        at = f"tools[{i}]"
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise RequestError(
                f"{at}.type is {quoted(kind)}, not a text",
                field=f"{at}.type",
                code="invalid_type",
            )
        if kind == "function":
            functions.append((f"{at}.function", read(_Tool, tool, notes, at).function))
        else:
            inner = tool.get(kind)
            name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
            others[str(name or kind)] = kind
    return tools_of(service, functions, others, choice_of(request.tool_choice),
                    parallel=request.parallel_tool_calls, notes=notes)  # fmt: skip


class _Tool(ToolPart):
    type: str
    function: Function


def messages_of(items: Sequence[_Message], notes: Notes) -> list[Message]:
    """Messages for the chat template.

    Raises:
        RequestError: a message has a part that is not text.
    """
    called: dict[str, str] = {}
    messages = [
        _message(m, f"messages[{i}]", called, notes) for i, m in enumerate(items)
    ]
    return [m for m in messages if m["role"] != "system" or m["content"]]


def _message(
    item: _Message, where: str, called: dict[str, str], notes: Notes
) -> Message:
    role = "system" if item.role == "developer" else item.role
    read_as = content_of if role in ("user", "tool") else text_of
    content = read_as(item.content, f"{where}.content", notes)
    message: Message = {"role": role, "content": content}
    if item.name is not None:
        message["name"] = item.name
    if role == "assistant":
        if item.refusal is not None and not content:
            message["content"] = item.refusal
        if thoughts := item.reasoning or item.reasoning_content:
            message["reasoning_content"] = thoughts
        calls = []
        for call in item.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            called[call.id] = name
            if isinstance(arguments, str):
                arguments = arguments_of(arguments)
            named = {"id": call.id} if call.id else {}
            function = {"name": name, "arguments": arguments}
            calls.append({"type": "function", **named, "function": function})
        if calls:
            message["tool_calls"] = calls
    if role == "tool":
        if item.tool_call_id is None:
            raise RequestError.missing(f"{where}.tool_call_id")
        message["tool_call_id"] = item.tool_call_id
        if name := called.get(item.tool_call_id, ""):
            message["name"] = name
    return message


class ChatRendering(CompletionRendering):
    """A chat completion, whole or in chunks."""

    record = ChatRequest
    prefix = "chatcmpl"
    names = ("chat.completion", "chat.completion.chunk")

    @classmethod
    def asked(
        cls, request: ChatRequest, service: Service, notes: Notes
    ) -> dict[str, Any]:
        if request.top_logprobs and not request.logprobs:
            text = "top_logprobs needs logprobs: add it"
            raise RequestError.invalid("top_logprobs", text)
        most, names = request.max_completion_tokens, NAMES
        if most is None:
            most, names = request.max_tokens, {**NAMES, "max_tokens": "max_tokens"}
        elif request.max_tokens not in (None, most):
            raise RequestError.invalid(
                "max_tokens",
                "max_tokens and max_completion_tokens are the same: leave max_tokens "
                "out",
            )
        messages = messages_of(request.messages, notes)
        continued = request.continue_final_message
        if continued and (not messages or messages[-1]["role"] != "assistant"):
            raise RequestError.invalid(
                "continue_final_message",
                "continue_final_message needs a last message of the assistant",
            )
        kwargs, effort = request.chat_template_kwargs, request.reasoning_effort
        return {
            "names": names,
            "messages": messages,
            "tools": _tools(request, service, notes),
            "format_": request.response_format,
            "variables": variables(service, kwargs, effort, notes),
            "continued": continued,
            "max_tokens": most,
            "stop": stops(request.stop),
            "n": request.n,
            "logprobs": request.logprobs,
            "top_logprobs": request.top_logprobs,
        }

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        empty = outcome.calls and not outcome.text
        message["content"] = None if empty else outcome.text
        if outcome.reasoning:
            message["reasoning_content"] = message["reasoning"] = outcome.reasoning
        if outcome.calls:
            message["tool_calls"] = [_call(call) for call in outcome.calls]
        logprobs = None
        if self.job.params.logprobs:
            logprobs = self._logprobs(outcome.tokens)
        return {"message": message, "logprobs": logprobs}

    def _logprobs(self, tokens: Tokens) -> dict[str, Any]:
        most = self.job.params.top_logprobs
        content = logprobs_of(self.service, tokens, most)
        return {"content": content, "refusal": None}

    def stream(self, event: Event) -> Iterator[bytes]:
        delta: dict[str, Any] = {}
        logprobs: dict[str, Any] | None = None
        if isinstance(event, Started):
            delta = {"role": "assistant", "content": ""}
        elif isinstance(event, Delta):
            delta = {"content": event.text}
            if event.kind == "reasoning":
                delta = {"reasoning_content": event.text, "reasoning": event.text}
            if event.tokens and self.job.params.logprobs:
                logprobs = self._logprobs(event.tokens)
        elif isinstance(event, Call):
            call = {"index": event.index, **_call(event)}
            call["function"] = {"name": event.name, "arguments": ""}
            yield self.chunk(event, delta={"tool_calls": [call]}, logprobs=None)
            arguments = {"arguments": event.arguments}
            delta = {"tool_calls": [{"index": event.index, "function": arguments}]}
        yield self.chunk(event, delta=delta, logprobs=logprobs)


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


parse = ChatRendering.parse
