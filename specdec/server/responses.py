"""OpenAI's ``/v1/responses``, with text and tools; no response is stored."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..utils.printable import quoted
from .conversation import (
    CALL_PARTS,
    TOOL_PARTS,
    arguments_of,
    check_format,
    logprobs_of,
    text_of,
    tools_of,
    variables,
)
from .job import Begun, Call, Chat, End, Event, Job, Message, Piece, Tokens
from .parameters import Parameter, Table, check_parts, read, shaped
from .refusal import Refusal
from .rendering import Rendering, sse
from .sampling import DOCUMENTED, SAMPLING, STREAM, constraint, sampling, wants_usage
from .service import Service

_STORED = "nothing is stored here: send the whole conversation as input"
_AS_IT_IS = "reasoning comes as it is"
TABLE: Table = {
    "model": Parameter(str),
    "input": Parameter((str, [dict]), required=True),
    "instructions": Parameter(str),
    "max_output_tokens": Parameter(int),
    "tools": Parameter([dict], default=[], high=1024),
    "tool_choice": Parameter((str, dict)),
    "parallel_tool_calls": Parameter(bool, default=True),
    "text": Parameter(
        dict,
        parts={
            "format": Parameter(dict),
            "verbosity": Parameter(
                str, only=("medium",), refused="ask for it in the prompt"
            ),
        },
    ),
    "reasoning": Parameter(
        dict,
        parts={
            "effort": Parameter(str),
            "summary": Parameter(str, only=("auto",), refused=_AS_IT_IS),
            "generate_summary": Parameter(str, only=("auto",), refused=_AS_IT_IS),
            "context": Parameter(
                str,
                only=("auto", "all_turns"),
                refused="the template chooses what it shows",
            ),
            "mode": Parameter(str, only=("standard",), refused="there is one mode"),
        },
    ),
    "top_logprobs": Parameter(int, default=0, low=0, high=20),
    "include": Parameter([str], default=[]),
    "truncation": Parameter(
        str, only=("disabled",), refused="prompts are not shortened here"
    ),
    "chat_template_kwargs": Parameter(dict, default={}),
    "store": Parameter(bool, only=(False,), refused=_STORED),
    "previous_response_id": Parameter(str, refused=_STORED),
    "conversation": Parameter(object, refused=_STORED),
    "background": Parameter(bool, only=(False,), refused=_STORED),
    "prompt": Parameter(dict, refused=_STORED),
    "context_management": Parameter(
        list, only=([],), refused="contexts are not shortened here"
    ),
    "background_options": Parameter(dict, refused=_STORED),
    "image": Parameter(dict, refused="text is all that goes in and comes out"),
    "access_programs": Parameter(dict, refused="there are none: leave it out"),
    "max_tool_calls": Parameter(int, refused="nothing is called from here"),
    **SAMPLING,
    **STREAM,
    **DOCUMENTED,
}
NAMES = {"grammar": "text.format", "prompt": "input", "max_tokens": "max_output_tokens",
         "top_logprobs": "top_logprobs"}  # fmt: skip
#: Values of ``include`` that are accepted; reasoning is sent in clear, not encrypted.
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_TEXTS = ("input_text", "output_text", "text", "refusal")


def parse(body: Any, service: Service) -> ResponseRendering:
    """Parse a request's body."""
    values = read(body, TABLE)
    model = service.check_model(values["model"])
    text = values["text"] or {}
    top = values["top_logprobs"]
    for item in values["include"]:
        if item not in _INCLUDED:
            raise Refusal.unsupported(
                "include",
                f"include cannot have {quoted(item)}: nothing is called from here",
            )
    asked = _INCLUDED[0] in values["include"]
    if wants_usage(values):
        raise Refusal(
            "stream_options.include_usage is not supported: streams end with it",
            param="stream_options",
        )
    params = sampling(
        values,
        service.config,
        NAMES,
        max_tokens=values["max_output_tokens"],
        logprobs=asked or top > 0,
        **constraint(text.get("format"), "text.format"),
    )
    tools = _tools(values["tools"], values["tool_choice"])
    chat = Chat(
        _messages(values["instructions"], values["input"]),
        replace(tools, parallel=values["parallel_tool_calls"]),
        formatted=params.grammar is not None,
        variables=variables(
            service,
            values["chat_template_kwargs"],
            (values["reasoning"] or {}).get("effort"),
            where="reasoning.effort",
        ),
    )
    check_format(params, tools, "text.format")
    job = Job([chat], params, 1, NAMES)
    return ResponseRendering(service, job, model, values)


def _tools(given: Sequence[dict[str, Any]], choice: Any) -> Any:
    made = []
    for i, tool in enumerate(given):
        if tool.get("type") != "function":
            made.append(tool)  # refused later, with its position
            continue
        shape = {"name": str, "description?": (str, None), "parameters?": (dict, None),
                 "strict?": (bool, None)}  # fmt: skip
        shaped(tool, shape, f"tools[{i}]")
        check_parts(tool, TOOL_PARTS, f"tools[{i}]")
        function = {
            key: tool[key]
            for key in ("name", "description", "parameters", "strict")
            if tool.get(key) is not None
        }
        made.append({"type": "function", "function": function})
    if isinstance(choice, dict):
        shaped(choice, {"type": str, "name?": (str, None)}, "tool_choice")
        if choice["type"] == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
    return tools_of(made, choice, "tool_choice")


def _messages(
    instructions: str | None, given: str | Sequence[dict[str, Any]]
) -> list[Message]:
    made: list[Message] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*made, {"role": "user", "content": given}]
    called: dict[str, str] = {}
    for i, item in enumerate(given):
        _item(item, f"input[{i}]", made, called)
    if not made:
        raise Refusal("input is empty: give it an item", param="input")
    return made


def _item(
    item: dict[str, Any], where: str, made: list[Message], called: dict[str, str]
) -> None:
    """Add an item of the input to the messages."""
    kind = item.get("type", "message")
    last = made[-1] if made and made[-1]["role"] == "assistant" else None
    if kind == "message":
        shaped(item, {"role": str, "content": (str, [dict])}, where)
        role = {"developer": "system"}.get(item["role"], item["role"])
        if role not in ("system", "user", "assistant"):
            raise Refusal(
                f"{where}.role is {quoted(role)}: it must be system, developer, user "
                "or assistant",
                param=f"{where}.role",
            )
        text = text_of(item["content"], f"{where}.content", _TEXTS)
        if role == "assistant" and last is not None and not last["content"]:
            last["content"] = text
        else:
            made.append({"role": role, "content": text})
    elif kind == "function_call":
        shaped(item, {"call_id": str, "name": str, "arguments": str}, where)
        check_parts(item, CALL_PARTS, where)
        called[item["call_id"]] = item["name"]
        arguments = arguments_of(item["arguments"], f"{where}.arguments")
        function = {"name": item["name"], "arguments": arguments}
        call = {"type": "function", "id": item["call_id"], "function": function}
        if last is None:
            last = {"role": "assistant", "content": ""}
            made.append(last)
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        shaped(item, {"call_id": str, "output": (str, [dict])}, where)
        check_parts(item, CALL_PARTS, where)
        message = {"role": "tool", "tool_call_id": item["call_id"]}
        message["content"] = text_of(item["output"], f"{where}.output", _TEXTS)
        if name := called.get(item["call_id"]):
            message["name"] = name
        made.append(message)
    elif kind == "reasoning":
        parts = shaped(item.get("content") or [], [dict], f"{where}.content")
        text = text_of(parts, f"{where}.content", ("reasoning_text",))
        if text and last is not None:
            earlier = last.get("reasoning_content")
            last["reasoning_content"] = f"{earlier}\n\n{text}" if earlier else text
        elif text:
            message = {"role": "assistant", "content": "", "reasoning_content": text}
            made.append(message)
    else:
        raise Refusal(
            f"{where} of type {quoted(kind)} is not supported: messages, function "
            "calls and their outputs are",
            param=f"{where}.type",
            code="unsupported_content",
        )


class ResponseRendering(Rendering):
    """A response, whole or as a sequence of events."""

    def __init__(self, service: Service, job: Job, model: str, values: dict[str, Any]):
        super().__init__(job, model, streamed=values["stream"])
        self._service = service
        self._values = values
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open = False  # the last item is being written
        self._sent = 0

    # -- items, in both forms of the answer --------------------------------

    def _take(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add an event to the items; yield the stream's events for it."""
        if isinstance(event, Piece):
            if event.text or event.tokens:
                yield from self._text(event)
        elif isinstance(event, Call):
            yield from self._close()
            yield from self._call(event)
        elif isinstance(event, End):
            yield from self._close(event)

    def _text(self, piece: Piece) -> Iterator[tuple[str, dict[str, Any]]]:
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
            entries = _logprobs(self._service, piece.tokens or [])
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
            made = {"text": part["text"], "logprobs": part["logprobs"]}
            yield "response.output_text.done", {**place, **made}
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
        said = {"delta": call.arguments}
        yield "response.function_call_arguments.delta", {**self._place(), **said}
        written = {"arguments": call.arguments, "name": call.name}
        yield "response.function_call_arguments.done", {**self._place(), **written}
        status = "incomplete" if call.cut else "completed"
        self._items[-1] |= {"arguments": call.arguments, "status": status}
        yield self._item("done")

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    # -- the response ------------------------------------------------------

    def _response(self, status: str, error: Refusal | None = None) -> dict[str, Any]:
        values = self._values
        end = self.outcomes[0].ended if self.outcomes else None
        why = None
        if status == "incomplete":
            why = {"reason": "max_output_tokens"}
        made: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "instructions": values["instructions"],
            "max_output_tokens": values["max_output_tokens"],
            "metadata": values["metadata"] or {},
            "model": self.model,
            "output": [_copy(item) for item in self._items],
            "parallel_tool_calls": values["parallel_tool_calls"],
            "previous_response_id": None,
            "reasoning": values["reasoning"] or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self.job.params.temperature,
            "text": values["text"] or {"format": {"type": "text"}},
            "tool_choice": values["tool_choice"] or "auto",
            "tools": [{"strict": False, **tool} for tool in values["tools"]],
            "top_logprobs": values["top_logprobs"],
            "top_p": self.job.params.top_p,
            "truncation": "disabled",
            "usage": None if end is None else self._usage(),
            "user": values["user"],
        }
        if error is not None:
            made["error"] = {"code": "server_error", "message": str(error)}
        if end is not None and end.result.seed is not None:
            made["seed"] = end.result.seed
        if end is not None and end.cut is not None:
            made["cut"] = end.cut
        return made

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
                "reasoning_tokens": 0,
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
        if isinstance(event, Begun):
            begun = {"response": self._response("in_progress")}
            yield self._event("response.created", begun)
            yield self._event("response.in_progress", begun)
            return
        for kind, fields in self._take(event):
            yield self._event(kind, fields)

    def end(self) -> Iterator[bytes]:
        status = self._status
        yield self._event(f"response.{status}", {"response": self._response(status)})

    def failed(self, refusal: Refusal) -> bytes:
        failed = {"response": self._response("failed", refusal)}
        return self._event("response.failed", failed)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        made = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return sse(made, kind)


def _logprobs(service: Service, tokens: Tokens) -> list[dict[str, Any]]:
    return [
        {**entry, "bytes": entry["bytes"] or []}
        for entry in logprobs_of(service, tokens)
    ]


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(item))
    return copied
