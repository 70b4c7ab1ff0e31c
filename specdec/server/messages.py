"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from .conversation import (
    CallPart,
    Choice,
    ContentPart,
    Function,
    Part,
    ToolPart,
    content_of,
    part_text,
    tools_of,
    variables,
)
from .errors import RequestError
from .job import (
    Call,
    Chat,
    Delta,
    End,
    Event,
    Message,
    Outcome,
    Started,
    Tools,
)
from .rendering import Rendering, sse
from .routing import BILLING
from .sampling import Sampling, stops
from .schema import Notes, Record, Refused, read
from .service import Service


class _Message(Part):
    place = "messages"
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class _Thinking(Record):
    place = "thinking"
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class _OutputConfig(Record):
    place = "output_config"
    accepted = frozenset({"task_budget"})
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class _ToolChoice(Record):
    place = "tool_choice"
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Diagnostics(Record):
    place = "diagnostics"
    previous_message_id: str | None = None


class _Tool(ToolPart):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class PromptRequest(Record):
    """The parameters that describe a prompt."""

    accepted = frozenset({
        "cache_control", "user_profile_id", "workspace_id", "betas", "speed",
        "service_tier",
    })  # fmt: skip
    refused: ClassVar[Mapping[str, Refused]] = {
        "mcp_servers": Refused("nothing is called from here: use tools", ([],)),
        "billing_policy": Refused("nothing is billed here"),
        "compaction": Refused("nothing is compacted here"),
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        "prompt": "messages", "input": "messages",
    }  # fmt: skip
    model: str
    messages: list[_Message] = Field(min_length=1)
    system: str | list[ContentPart] | None = None
    tools: list[dict[str, Any]] = Field([], max_length=1024)
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig = _OutputConfig()
    context_management: dict[str, Any] = Field({})


class MessageRequest(PromptRequest, Sampling):
    """A request's body."""

    accepted = PromptRequest.accepted | Sampling.accepted
    elsewhere: ClassVar[Mapping[str, str]] = {
        **PromptRequest.elsewhere, **Sampling.elsewhere, "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
    }  # fmt: skip
    refused: ClassVar[Mapping[str, Refused]] = {
        **PromptRequest.refused,
        **Sampling.refused,
        "fallbacks": Refused("there is one model", ([],)),
        "fallback_credit_token": Refused("there is one model"),
        "thread": Refused(
            "nothing is stored here: send all messages",
            code="thread_unsupported_request",
        ),
        "container": Refused("nothing is executed here: leave it out"),
        "inference_geo": Refused("the answer is made here: leave it out"),
    }
    max_tokens: int
    stop_sequences: list[str] = Field([])
    temperature: float | None = Field(None, ge=0, le=1)
    metadata: dict[str, Any] | None = None
    diagnostics: _Diagnostics = _Diagnostics()
    output_format: dict[str, Any] | None = None

    def user(self) -> list[Any]:
        return [(self.metadata or {}).get("user_id"), self.cache_salt, None, None]


class CountRequest(PromptRequest):
    """The body of a request to count tokens; how they are decoded does not matter."""

    accepted = MessageRequest.known() - PromptRequest.known() | PromptRequest.accepted


NAMES = {"prompt": "messages", "max_tokens": "max_tokens", "stop": "stop_sequences",
         "grammar": "output_config.format"}  # fmt: skip


def parse_count(body: Any, service: Service, notes: Notes | None = None) -> Chat:
    """Parse a request to count the tokens of a prompt.

    Raises:
        RequestError: it has none.
    """
    notes = notes or service.notes()
    request = read(CountRequest, body, notes)
    service.check_model(request.model)
    messages = _messages(request.system, request.messages, notes)
    return Chat(
        messages,
        _tools(request, service, notes),
        messages[-1]["role"] == "assistant",
        _variables(request, service, notes),
    )


def _variables(
    request: PromptRequest, service: Service, notes: Notes
) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if request.thinking is not None:
        asked["enable_thinking"] = request.thinking.type != "disabled"
    if effort := request.output_config.effort:
        asked["reasoning_effort"] = effort
    for edit in request.context_management.get("edits") or []:
        known = isinstance(edit, dict) and edit.get("type") == "clear_thinking_20251015"
        if not known or edit.get("keep", "all") != "all":
            raise RequestError.unsupported(
                "context_management",
                "context_management edits nothing here: leave it out",
            )
    return variables(service, asked, None, notes)


def _tools(request: PromptRequest, service: Service, notes: Notes) -> Tools:
    functions, others = [], {}
    for i, tool in enumerate(request.tools):
        at, kind = f"tools[{i}]", tool.get("type") or "custom"
        if kind != "custom":
            others[str(tool.get("name", kind))] = str(kind)
            continue
        record = read(_Tool, tool, notes, at)
        function = Function(
            name=record.name,
            description=record.description or None,
            parameters=record.input_schema,
            strict=record.strict or None,
        )
        functions.append((at, function))
    choice = request.tool_choice or _ToolChoice(type="auto")
    kinds = {"any": "required", "tool": "named"}
    kind = kinds.get(choice.type, choice.type)
    return tools_of(service, functions, others, Choice(kind, choice.name, word="any"),
                    parallel=not choice.disable_parallel_tool_use,
                    notes=notes)  # fmt: skip


def _messages(
    system: str | Sequence[ContentPart] | None, items: Sequence[_Message], notes: Notes
) -> list[Message]:
    messages: list[Message] = []
    if isinstance(system, str) or system is None:
        text = system or ""
    else:
        parts = (part_text(part, f"system[{i}]") for i, part in enumerate(system))
        text = "\n\n".join(filter(None, (BILLING.sub("", part, 1) for part in parts)))
    if text := BILLING.sub("", text, 1):
        messages.append({"role": "system", "content": text})
    # Turns of one role in a row are one turn, as Anthropic documents.
    turns: list[tuple[str, list[_Block]]] = []
    for i, message in enumerate(items):
        content: list[dict[str, Any]]
        if isinstance(message.content, str):
            content = [{"type": "text", "text": message.content}]
        else:
            content = message.content
        at = f"messages[{i}].content"
        blocks = [(f"{at}[{j}]", block) for j, block in enumerate(content)]
        if message.role != "system" and turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    called: dict[str, str] = {}
    for role, turn in turns:
        if role == "system":
            text = "".join(_text(block, at, notes) for at, block in turn)
            messages.append({"role": "system", "content": text})
        else:
            take = _user if role == "user" else _assistant
            messages += take(turn, called, notes)
    if not messages:
        raise RequestError.invalid("messages", "messages have no content: add a text")
    return messages


#: A block of a message's content, after its place in the request.
_Block: TypeAlias = tuple[str, dict[str, Any]]


class _Result(CallPart):
    tool_use_id: str
    content: str | list[ContentPart] | None = None
    is_error: bool = False


class _Use(CallPart):
    id: str
    name: str
    input: dict[str, Any]


class _Thought(Part):
    place = "content"
    thinking: str


def _text(block: dict[str, Any], at: str, notes: Notes) -> str:
    return part_text(read(ContentPart, block, notes, at), at)


def _user(
    blocks: Sequence[_Block], called: dict[str, str], notes: Notes
) -> Iterator[Message]:
    """A turn of the user: results of tools, then texts and images."""
    parts: list[dict[str, Any]] = []
    for at, block in blocks:
        if block.get("type") == "image":
            image = content_of([block], at, notes)
            assert not isinstance(image, str)
            parts += image
            continue
        if block.get("type") != "tool_result":
            parts.append({"type": "text", "text": _text(block, at, notes)})
            continue
        result = read(_Result, block, notes, at)
        body: Message = {
            "role": "tool",
            "tool_call_id": result.tool_use_id,
            "content": content_of(result.content, f"{at}.content", notes),
        }
        if name := called.get(result.tool_use_id):
            body["name"] = name
        if result.is_error:
            body["is_error"] = True
        yield body
    shown = [part for part in parts if part.get("text") != ""]
    if any(part["type"] == "image" for part in parts):
        yield {"role": "user", "content": shown}
    elif parts:
        yield {"role": "user", "content": "\n\n".join(p["text"] for p in shown)}


def _assistant(
    blocks: Sequence[_Block], called: dict[str, str], notes: Notes
) -> Iterator[Message]:
    """A turn of the model: thoughts, text and calls."""
    answer: Message = {"role": "assistant", "content": ""}
    calls, thoughts = [], []
    for at, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(read(_Thought, block, notes, at).thinking)
        elif kind == "redacted_thinking":
            continue  # its content is encrypted
        elif kind == "tool_use":
            use = read(_Use, block, notes, at)
            called[use.id] = use.name
            function = {"name": use.name, "arguments": use.input}
            calls.append({"type": "function", "id": use.id, "function": function})
        else:
            answer["content"] += _text(block, at, notes)
    if thoughts := list(filter(None, thoughts)):
        answer["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    yield answer


_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageRendering(Rendering):
    """A message, whole or as Anthropic's sequence of events."""

    record = MessageRequest

    @classmethod
    def asked(
        cls, request: MessageRequest, service: Service, notes: Notes
    ) -> dict[str, Any]:
        names, format_ = NAMES, request.output_config.format
        if request.output_format is not None:
            format_ = request.output_format
            names = {**NAMES, "grammar": "output_format"}
        messages = _messages(request.system, request.messages, notes)
        budget = request.thinking and request.thinking.budget_tokens
        return {
            "names": names,
            "messages": messages,
            "tools": _tools(request, service, notes),
            "format_": format_,
            "variables": _variables(request, service, notes),
            "continued": messages[-1]["role"] == "assistant",
            "max_tokens": request.max_tokens,
            "stop": stops(request.stop_sequences),
            **({"max_thinking_tokens": budget} if budget else {}),
        }

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = 0
        self._open: str | None = None  # the kind of the block that is being written

    @property
    def omits_thinking(self) -> bool:
        """Whether blocks of thinking are sent, but empty."""
        thinking = self.request.thinking
        return thinking is not None and thinking.display == "omitted"

    def failed(self, error: RequestError) -> bytes:
        return sse(error.anthropic(), "error")

    def alive(self) -> bytes:
        return sse({"type": "ping"}, "ping")

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.generated,
            "output_tokens_details": {"thinking_tokens": usage.reasoning},
            "drafted_tokens": usage.drafted,
            "accepted_tokens": usage.accepted,
        }

    def _message(self, content: list[Any], end: End | None) -> dict[str, Any]:
        body = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        if self.request.diagnostics.previous_message_id:  # they are not stored
            body["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}
        return body if end is None else {**body, **_ending(end)}

    def whole(self) -> dict[str, Any]:
        (outcome,) = self.outcomes
        content = _content(outcome, omits_thinking=self.omits_thinking)
        return self._message(content, outcome.end)

    def stream(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Started):
            message = self._message([], None)
            start = {"type": "message_start", "message": message}
            yield sse(start, "message_start")
        elif isinstance(event, Delta):
            yield from self._text(event)
        elif isinstance(event, Call) and event.cut:
            yield from self._text(_cut_call(event))
        elif isinstance(event, Call):
            yield from self._close()
            block = {"type": "tool_use", "id": event.id, "name": event.name}
            yield self._begin("tool_use", {**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": event.arguments}
            yield self._delta(delta)
            yield from self._close()
        else:
            yield from self._close()
            body = {
                "type": "message_delta",
                "delta": _ending(event),
                "usage": self._usage(),
            }
            yield sse(body, "message_delta")

    def _text(self, piece: Delta) -> Iterator[bytes]:
        if not piece.text:
            return
        kind = "text" if piece.kind == "text" else "thinking"
        if self._open != kind:
            yield from self._close()
            more = {"signature": ""} if kind == "thinking" else {}
            yield self._begin(kind, {"type": kind, kind: "", **more})
        if kind == "text" or not self.omits_thinking:
            yield self._delta({"type": f"{kind}_delta", kind: piece.text})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        body = {"index": self._blocks, "content_block": block}
        return sse({"type": "content_block_start", **body}, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        body = {"type": "content_block_delta", "index": self._blocks, "delta": delta}
        return sse(body, "content_block_delta")

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        body = {"type": "content_block_stop", "index": self._blocks}
        yield sse(body, "content_block_stop")
        self._open = None
        self._blocks += 1

    def end(self) -> Iterator[bytes]:
        yield sse({"type": "message_stop"}, "message_stop")


def _cut_call(call: Call) -> Delta:
    """A call that was cut, as text: its arguments are no object yet."""
    return Delta(call.choice, "text", call.cut)


def _ending(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop is not None else _ENDS[end.reason]
    ending: dict[str, Any] = {"stop_reason": reason, "stop_sequence": end.stop}
    if end.result.seed is not None:
        ending["seed"] = end.result.seed
    if end.cut is not None:
        ending["cut"] = end.cut
    return ending


def _content(outcome: Outcome, *, omits_thinking: bool) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    if outcome.reasoning:
        thinking = "" if omits_thinking else outcome.reasoning
        content.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if outcome.text:
        content.append({"type": "text", "text": outcome.text})
    for call in outcome.calls:
        if call.cut:
            content.append({"type": "text", "text": _cut_call(call).text})
            continue
        body = {"type": "tool_use", "id": call.id, "name": call.name}
        content.append({**body, "input": json.loads(call.arguments)})
    return content


parse = MessageRendering.parse
