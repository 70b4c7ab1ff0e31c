"""OpenAI's ``/v1/responses``, with text and tools; no response is stored."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

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
from .job import Call, Delta, End, Event, Message, Started, Tokens, Tools
from .rendering import Rendering, sse
from .sampling import OpenAISampling
from .schema import Notes, Record, Refused, read
from .service import Service

_STORED = "nothing is stored here: send the whole conversation as input"


class _Text(Record):
    place = "text"
    noted: ClassVar[Mapping[str, str]] = {"verbosity": "medium"}
    format: dict[str, Any] | None = None


class _Reasoning(Record):
    place = "reasoning"
    accepted = frozenset({"summary", "generate_summary", "context", "mode"})
    effort: str | None = None


class ResponseRequest(OpenAISampling):
    """A request's body."""

    accepted = OpenAISampling.accepted | {"max_tool_calls", "background_options"}
    refused: ClassVar[Mapping[str, Refused]] = {
        **OpenAISampling.refused,
        "truncation": Refused("prompts are not shortened here", ("disabled",)),
        "previous_response_id": Refused(_STORED),
        "conversation": Refused(_STORED),
        "background": Refused(_STORED, (False,)),
        "prompt": Refused(_STORED),
        "context_management": Refused("contexts are not shortened here", ([],)),
        "image": Refused("text is all that goes in and comes out"),
        "access_programs": Refused("there are none: leave it out"),
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        "messages": "input", "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens", "response_format": "text",
        "reasoning_effort": "reasoning",
        **{name: meant.replace("max_tokens", "max_output_tokens")
           for name, meant in OpenAISampling.elsewhere.items()},
    }  # fmt: skip
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] = Field([], max_length=1024)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    top_logprobs: int = Field(0, ge=0, le=20)
    include: list[str] = Field([])
    chat_template_kwargs: dict[str, Any] = Field({})


NAMES = {"grammar": "text.format", "prompt": "input", "max_tokens": "max_output_tokens",
         "top_logprobs": "top_logprobs"}  # fmt: skip
_TEXTS = ("input_text", "output_text", "text", "refusal")


class _Tool(ToolPart):
    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _tools(request: ResponseRequest, service: Service, notes: Notes) -> Tools:
    functions, others = [], {}
    for i, tool in enumerate(request.tools):
        at, kind = f"tools[{i}]", tool.get("type")
        if kind != "function":
            others[str(tool.get("name", kind))] = str(kind)
            continue
        record = read(_Tool, tool, notes, at)
        fields = record.model_dump(exclude={"type"})
        functions.append((at, Function(**fields)))
    return tools_of(service, functions, others, choice_of(request.tool_choice),
                    parallel=request.parallel_tool_calls, notes=notes)  # fmt: skip


def _messages(
    instructions: str | None, items: str | Sequence[dict[str, Any]], notes: Notes
) -> list[Message]:
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    called: dict[str, str] = {}
    for i, item in enumerate(items):
        _item(item, f"input[{i}]", messages, called, notes)
    if not messages:
        raise RequestError.invalid("input", "input is empty: give it an item")
    return messages


class _Message(Part):
    place = "input"
    role: str
    content: str | list[ContentPart]


class _FunctionCall(CallPart):
    call_id: str
    name: str
    arguments: str


class _CustomCall(CallPart):
    call_id: str
    name: str
    input: str


class _Output(CallPart):
    call_id: str
    output: str | list[ContentPart]


class _Thoughts(Part):
    place = "input"
    content: list[ContentPart] = Field([])


def _item(
    item: dict[str, Any],
    where: str,
    messages: list[Message],
    called: dict[str, str],
    notes: Notes,
) -> None:
    """Add an item of the input to the messages."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        message = read(_Message, item, notes, where)
        role = {"developer": "system"}.get(message.role, message.role)
        if role not in ("system", "user", "assistant"):
            raise RequestError.invalid(
                f"{where}.role",
                f"{where}.role is {quoted(role)}: it must be system, developer, user "
                "or assistant",
            )
        read_as = content_of if role == "user" else text_of
        content = read_as(message.content, f"{where}.content", notes, _TEXTS)
        if role == "assistant" and last is not None and not last["content"]:
            last["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind in ("function_call", "custom_tool_call"):
        call: _FunctionCall | _CustomCall
        if kind == "function_call":
            call = read(_FunctionCall, item, notes, where)
            arguments = arguments_of(call.arguments)
        else:
            call = read(_CustomCall, item, notes, where)
            arguments = {"input": call.input}
        called[call.call_id] = call.name
        function = {"name": call.name, "arguments": arguments}
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        written = {"type": "function", "id": call.call_id, "function": function}
        last.setdefault("tool_calls", []).append(written)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = read(_Output, item, notes, where)
        content = content_of(output.output, f"{where}.output", notes, _TEXTS)
        result = {"role": "tool", "tool_call_id": output.call_id, "content": content}
        if name := called.get(output.call_id):
            result["name"] = name
        messages.append(result)
    elif kind == "reasoning":
        parts = read(_Thoughts, item, notes, where).content
        text = text_of(parts, f"{where}.content", notes, ("reasoning_text",))
        if text and last is not None:
            earlier = last.get("reasoning_content")
            last["reasoning_content"] = f"{earlier}\n\n{text}" if earlier else text
        elif text:
            messages.append(
                {"role": "assistant", "content": "", "reasoning_content": text}
            )
    else:
        raise RequestError.content(
            f"{where}.type",
            f"{where} of type {quoted(kind)} is not supported: messages, function "
            "calls and their outputs are",
        )


class ResponseRendering(Rendering):
    """A response, whole or as a sequence of events."""

    record = ResponseRequest

    @classmethod
    def asked(
        cls, request: ResponseRequest, service: Service, notes: Notes
    ) -> dict[str, Any]:
        request.usage()  # a response always ends with it
        top, effort = request.top_logprobs, request.reasoning.effort
        kwargs = request.chat_template_kwargs
        return {
            "names": NAMES,
            "messages": _messages(request.instructions, request.input, notes),
            "tools": _tools(request, service, notes),
            "format_": request.text.format,
            "variables": variables(service, kwargs, effort, notes),
            "max_tokens": request.max_output_tokens,
            "logprobs": "message.output_text.logprobs" in request.include or top > 0,
            "top_logprobs": top,
        }

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open = False  # the last item is being written
        self._sent = 0

    # -- items, in both forms of the answer --------------------------------

    def _take(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add an event to the items; yield the stream's events for it."""
        if isinstance(event, Delta):
            if event.text or event.tokens:
                yield from self._text(event)
        elif isinstance(event, Call):
            yield from self._close()
            yield from self._call(event)
        elif isinstance(event, End):
            yield from self._close(event)

    def _text(self, piece: Delta) -> Iterator[tuple[str, dict[str, Any]]]:
        kind = "message" if piece.kind == "text" else "reasoning"
        if not self._open or self._items[-1]["type"] != kind:
            if not piece.text.strip() and self._items and kind == "message":
                return  # white space between two calls
            yield from self._close()
            yield from self._begin(kind)
        part = self._items[-1]["content"][0]
        part["text"] += piece.text
        more: dict[str, Any] = {}
        if kind == "message":
            entries = self._logprobs(piece.tokens or [])
            part["logprobs"] += entries
            more["logprobs"] = entries
        if piece.text or more.get("logprobs"):
            name = "output_text" if kind == "message" else "reasoning_text"
            yield f"response.{name}.delta", {
                **self._place(), "content_index": 0, "delta": piece.text, **more,
            }  # fmt: skip

    def _begin(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        self._open = True
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "",
                                    "annotations": [], "logprobs": []}  # fmt: skip
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message",
                    "status": "in_progress", "role": "assistant"}  # fmt: skip
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning"}
            item["status"] = "in_progress"
            item |= {"summary": []}  # type: ignore[dict-item]
        self._items.append({**item, "content": []})
        yield self._item("added")
        self._items[-1]["content"].append(part)
        yield "response.content_part.added", {
            **self._place(), "content_index": 0, "part": dict(part),
        }  # fmt: skip

    def _close(self, end: End | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        cut = end is not None and end.reason == "length"
        item["status"] = "incomplete" if cut else "completed"
        part, place = item["content"][0], {**self._place(), "content_index": 0}
        if item["type"] == "message":
            body = {"text": part["text"], "logprobs": part["logprobs"]}
            yield "response.output_text.done", {**place, **body}
        else:
            yield "response.reasoning_text.done", {**place, "text": part["text"]}
        yield "response.content_part.done", {**place, "part": dict(part)}
        yield self._item("done")

    def _item(self, what: str) -> tuple[str, dict[str, Any]]:
        at = {"output_index": len(self._items) - 1, "item": _copy(self._items[-1])}
        return f"response.output_item.{what}", at

    def _call(self, call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call",
                "call_id": call.id, "name": call.name}  # fmt: skip
        self._items.append({**item, "arguments": "", "status": "in_progress"})
        yield self._item("added")
        delta = {"delta": call.arguments}
        yield "response.function_call_arguments.delta", {**self._place(), **delta}
        written = {"arguments": call.arguments, "name": call.name}
        yield "response.function_call_arguments.done", {**self._place(), **written}
        status = "incomplete" if call.cut else "completed"
        self._items[-1] |= {"arguments": call.arguments, "status": status}
        yield self._item("done")

    def _logprobs(self, tokens: Tokens) -> list[dict[str, Any]]:
        if not self.job.params.logprobs:
            return []
        entries = logprobs_of(self.service, tokens, self.job.params.top_logprobs)
        return [{**entry, "bytes": entry["bytes"] or []} for entry in entries]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    # -- the response ------------------------------------------------------

    def _response(
        self, status: str, error: RequestError | None = None
    ) -> dict[str, Any]:
        request: ResponseRequest = self.request
        format_ = request.text.format or {"type": "text"}
        end = self.outcomes[0].ended if self.outcomes else None
        why = None
        if status == "incomplete":
            why = {"reason": "max_output_tokens"}
        body: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [_copy(item) for item in self._items],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self.job.params.temperature,
            "text": {"format": format_},
            "tool_choice": request.tool_choice or "auto",
            "tools": [
                {
                    **({"strict": False} if tool.get("type") == "function" else {}),
                    **tool,
                }
                for tool in request.tools
            ],
            "top_logprobs": request.top_logprobs,
            "top_p": self.job.params.top_p,
            "truncation": "disabled",
            "usage": None if end is None else self._usage(),
            "user": request.user_,
        }
        if error is not None:
            body["error"] = {"code": "server_error", "message": str(error)}
        if end is not None and end.result.seed is not None:
            body["seed"] = end.result.seed
        if end is not None and end.cut is not None:
            body["cut"] = end.cut
        return body

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.generated,
            "output_tokens_details": {
                "reasoning_tokens": usage.reasoning,
                "drafted_tokens": usage.drafted,
                "accepted_tokens": usage.accepted,
            },
            "total_tokens": usage.prompt + usage.generated,
        }

    @property
    def _status(self) -> str:
        end = self.outcomes[0].end
        return "incomplete" if end.reason == "length" else "completed"

    def whole(self) -> dict[str, Any]:
        return self._response(self._status)

    def take(self, event: Event) -> None:
        super().take(event)
        if not self.streamed:
            for _ in self._take(event):
                pass

    def stream(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Started):
            body = {"response": self._response("in_progress")}
            yield self._event("response.created", body)
            yield self._event("response.in_progress", body)
            return
        for kind, fields in self._take(event):
            yield self._event(kind, fields)

    def end(self) -> Iterator[bytes]:
        status = self._status
        yield self._event(f"response.{status}", {"response": self._response(status)})

    def failed(self, error: RequestError) -> bytes:
        failed = {"response": self._response("failed", error)}
        return self._event("response.failed", failed)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return sse(body, kind)


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(item))
    return copied


parse = ResponseRendering.parse
