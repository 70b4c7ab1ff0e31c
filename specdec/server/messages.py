"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ..utils.printable import quoted
from .conversation import (
    CALL_PARTS,
    TOOL_PARTS,
    check_format,
    check_name,
    text_of,
    tools_of,
    variables,
)
from .job import Begun, Call, Chat, End, Event, Job, Message, Outcome, Piece, Tools
from .parameters import Parameter, Table, check_parts, read, shaped
from .refusal import Refusal
from .rendering import Rendering, sse
from .routing import BILLING
from .sampling import MORE, constraint, sampling, stops
from .service import Service

#: The parameters that describe a prompt.
PROMPT: Table = {
    "model": Parameter(str, required=True),
    "messages": Parameter([dict], required=True, low=1),
    "system": Parameter((str, [dict])),
    "tools": Parameter([dict], default=[], high=1024),
    "tool_choice": Parameter({"type": str}),
    "thinking": Parameter(
        dict,
        parts={
            "type": Parameter(
                str,
                only=("enabled", "adaptive", "between_tools", "disabled"),
                required=True,
            ),
            "budget_tokens": Parameter(int),
            "display": Parameter(str, only=("summarized", "omitted")),
        },
    ),
    "cache_control": Parameter(dict),
    "output_config": Parameter(
        dict,
        parts={
            "effort": Parameter(str, only=("low", "medium", "high", "xhigh", "max")),
            "format": Parameter({"type": str}),
        },
    ),
    "context_management": Parameter(dict),
    "user_profile_id": Parameter(str),
    "workspace_id": Parameter(str),
    "speed": Parameter(str, only=("standard",), refused="there is one speed"),
    "mcp_servers": Parameter(
        list, only=([],), refused="nothing is called from here: use tools"
    ),
    "betas": Parameter([str]),
    "billing_policy": Parameter(object, refused="nothing is billed here"),
    "compaction": Parameter(object, refused="nothing is compacted here"),
}
TABLE: Table = {
    **PROMPT,
    "max_tokens": Parameter(int, required=True),
    "stop_sequences": Parameter([str], default=[]),
    "stream": Parameter(bool, default=False),
    "temperature": Parameter(float, low=0, high=1),
    "top_p": Parameter(float),
    "seed": Parameter(int),
    "metadata": Parameter({"user_id?": (str, None)}),
    "service_tier": Parameter(
        str, only=("auto", "standard_only"), refused="there is one tier: leave it out"
    ),
    "diagnostics": Parameter({"previous_message_id?": (str, None)}),
    "fallbacks": Parameter(object, refused="there is one model"),
    "fallback_credit_token": Parameter(object, refused="there is one model"),
    "thread": Parameter(object, refused="nothing is stored here: send all messages"),
    "container": Parameter(str, refused="nothing is executed here: leave it out"),
    "inference_geo": Parameter(str, refused="the answer is made here: leave it out"),
    "output_format": Parameter({"type": str}),
    **MORE,
}
NAMES = {"prompt": "messages", "max_tokens": "max_tokens", "stop": "stop_sequences",
         "grammar": "output_config.format"}  # fmt: skip


def parse(body: Any, service: Service) -> MessageRendering:
    """Parse a request's body.

    Raises:
        Refusal: a parameter cannot be used.
    """
    values = read(body, TABLE)
    model = service.check_model(values["model"])
    params = sampling(
        values,
        service.config,
        NAMES,
        max_tokens=values["max_tokens"],
        stop=stops(values["stop_sequences"], "stop_sequences"),
        **_format(values),
    )
    chat = chat_of(values, service)
    check_format(params, chat.tools, NAMES["grammar"])
    chat = replace(chat, formatted=params.grammar is not None)
    job = Job([chat], params, 1, NAMES)
    made = MessageRendering(job, model, streamed=values["stream"])
    made.omits_thinking = (values["thinking"] or {}).get("display") == "omitted"
    made.diagnoses = bool((values["diagnostics"] or {}).get("previous_message_id"))
    return made


def _format(values: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters for the requested format."""
    if values["output_format"] is not None:
        return constraint(values["output_format"], "output_format")
    return constraint((values["output_config"] or {}).get("format"), NAMES["grammar"])


def parse_count(body: Any, service: Service) -> Chat:
    """Parse a request to count the tokens of a prompt.

    Raises:
        Refusal: a parameter cannot be used.
    """
    values = read(body, PROMPT)
    service.check_model(values["model"])
    return chat_of(values, service)


def chat_of(values: dict[str, Any], service: Service) -> Chat:
    """The prompt of a request."""
    tools = _tools(values["tools"], values["tool_choice"])
    messages = _messages(values["system"], values["messages"])
    return Chat(
        messages,
        tools,
        continue_final=messages[-1]["role"] == "assistant",
        variables=_variables(values, service),
    )


def _variables(values: dict[str, Any], service: Service) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if (thinking := values["thinking"]) is not None:
        given["enable_thinking"] = thinking["type"] != "disabled"
    if effort := (values["output_config"] or {}).get("effort"):
        # A hint, which may be given to every model.
        given["reasoning_effort"] = effort
    management = values["context_management"] or {}
    edits = shaped(management.get("edits") or [], [dict], "context_management.edits")
    for edit in edits:
        if edit.get("type") != "clear_thinking_20251015" or edit.get("keep") != "all":
            raise Refusal.unsupported(
                "context_management",
                "context_management edits nothing here: leave it out",
            )
    return variables(service, given, None)


def _tools(given: Sequence[dict[str, Any]], choice: dict[str, Any] | None) -> Tools:
    made = []
    for i, tool in enumerate(given):
        at = f"tools[{i}]"
        if tool.get("type") not in (None, "custom"):
            raise Refusal.unsupported(
                f"{at}.type",
                f"{at} of type {quoted(tool['type'])} is not supported: nothing is "
                "executed here",
            )
        shape = {"name": str, "description?": (str, None), "input_schema": dict}
        shaped(tool, shape, at)
        check_parts(tool, TOOL_PARTS, at)
        check_name(tool["name"], f"{at}.name")
        function: dict[str, Any] = {
            "name": tool["name"],
            "parameters": tool["input_schema"],
        }
        if tool.get("strict") is True:
            function["strict"] = True
        if tool.get("description"):
            function["description"] = tool["description"]
        made.append({"type": "function", "function": function})
    kind = "auto" if choice is None else choice["type"]
    kinds = {"auto": "auto", "any": "required", "none": "none"}
    wanted: Any = kinds.get(kind)
    if kind == "tool":
        assert choice is not None
        shaped(choice, {"name": str}, "tool_choice")
        wanted = {"type": "function", "function": {"name": choice["name"]}}
    if wanted is None:
        raise Refusal(
            "tool_choice.type must be auto, any, tool or none",
            param="tool_choice.type",
        )
    tools = tools_of(made, wanted, "tool_choice")
    alone = choice is not None and choice.get("disable_parallel_tool_use") is True
    return replace(tools, parallel=not alone)


def _messages(system: Any, given: Sequence[dict[str, Any]]) -> list[Message]:
    made: list[Message] = []
    text = system if isinstance(system, str) else ""
    if isinstance(system, list):
        parts = (text_of([part], f"system[{i}]") for i, part in enumerate(system))
        text = "\n\n".join(filter(None, (BILLING.sub("", part, 1) for part in parts)))
    if text := BILLING.sub("", text, 1):
        made.append({"role": "system", "content": text})
    # Turns of one role in a row are one turn, as Anthropic documents.
    turns: list[tuple[str, list[_Block]]] = []
    for i, message in enumerate(given):
        at = f"messages[{i}]"
        shaped(message, {"role": str, "content": (str, [dict])}, at)
        role, content = message["role"], message["content"]
        if role not in ("user", "assistant", "system"):
            raise Refusal(
                f"{at}.role is {quoted(role)}: it must be user, assistant or system",
                param=f"{at}.role",
            )
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = [(f"{at}.content[{j}]", block) for j, block in enumerate(content)]
        if role != "system" and turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    called: dict[str, str] = {}
    for role, blocks in turns:
        if role == "system":
            text = "".join(text_of([block], at) for at, block in blocks)
            made.append({"role": "system", "content": text})
        else:
            made += (_user if role == "user" else _assistant)(blocks, called)
    if not made:
        raise Refusal("messages is empty: add one", param="messages")
    return made


#: A block of a message's content, after its place in the request.
_Block: TypeAlias = tuple[str, dict[str, Any]]


def _user(blocks: Sequence[_Block], called: dict[str, str]) -> Iterator[Message]:
    """A turn of the user: results of tools, then text."""
    texts = []
    for at, block in blocks:
        if block.get("type") == "tool_result":
            shape = {"tool_use_id": str, "content?": (str, [dict], None),
                     "is_error?": (bool, None)}  # fmt: skip
            shaped(block, shape, at)
            check_parts(block, CALL_PARTS, at)
            made: Message = {
                "role": "tool",
                "tool_call_id": block["tool_use_id"],
                "content": text_of(block.get("content"), f"{at}.content"),
            }
            if name := called.get(block["tool_use_id"]):
                made["name"] = name
            if block.get("is_error"):
                made["is_error"] = True
            yield made
        else:
            texts.append(text_of([block], at))
    if texts:
        yield {"role": "user", "content": "\n\n".join(filter(None, texts))}


def _assistant(blocks: Sequence[_Block], called: dict[str, str]) -> Iterator[Message]:
    """A turn of the model: thoughts, text and calls."""
    made: Message = {"role": "assistant", "content": ""}
    calls, thoughts = [], []
    for at, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(shaped(block, {"thinking": str}, at)["thinking"])
        elif kind == "redacted_thinking":
            continue  # its content is encrypted
        elif kind == "tool_use":
            shaped(block, {"id": str, "name": str, "input": dict}, at)
            check_parts(block, CALL_PARTS, at)
            called[block["id"]] = block["name"]
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"type": "function", "id": block["id"], "function": function})
        else:
            made["content"] += text_of([block], at)
    if thoughts := list(filter(None, thoughts)):
        made["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    yield made


_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageRendering(Rendering):
    """A message, whole or as Anthropic's sequence of events.

    Attributes:
        diagnoses: the request asks for a comparison with an earlier message. Earlier
            messages are not kept.
        omits_thinking: blocks of thinking are sent, but empty.
    """

    diagnoses = False
    omits_thinking = False

    def __init__(self, job: Job, model: str, *, streamed: bool):
        super().__init__(job, model, streamed=streamed)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = 0
        self._open: str | None = None  # the kind of the block that is being written

    def failed(self, refusal: Refusal) -> bytes:
        return sse(refusal.anthropic(), "error")

    def alive(self) -> bytes:
        return sse({"type": "ping"}, "ping")

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.generated,
            "drafted_tokens": usage.drafted,
            "accepted_tokens": usage.accepted,
        }

    def _message(self, content: list[Any], end: End | None) -> dict[str, Any]:
        made = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        if self.diagnoses:
            made["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}
        return made if end is None else {**made, **_ending(end)}

    def whole(self) -> dict[str, Any]:
        (outcome,) = self.outcomes
        content = _content(outcome, omits_thinking=self.omits_thinking)
        return self._message(content, outcome.end)

    def stream(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Begun):
            message = self._message([], None)
            start = {"type": "message_start", "message": message}
            yield sse(start, "message_start")
        elif isinstance(event, Piece):
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
            made = {
                "type": "message_delta",
                "delta": _ending(event),
                "usage": self._usage(),
            }
            yield sse(made, "message_delta")

    def _text(self, piece: Piece) -> Iterator[bytes]:
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
        made = {"index": self._blocks, "content_block": block}
        return sse({"type": "content_block_start", **made}, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        made = {"type": "content_block_delta", "index": self._blocks, "delta": delta}
        return sse(made, "content_block_delta")

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        made = {"type": "content_block_stop", "index": self._blocks}
        yield sse(made, "content_block_stop")
        self._open = None
        self._blocks += 1

    def end(self) -> Iterator[bytes]:
        yield sse({"type": "message_stop"}, "message_stop")


def _cut_call(call: Call) -> Piece:
    """A call that was cut, as text: its arguments are no object yet."""
    return Piece(call.choice, "text", call.cut)


def _ending(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop is not None else _ENDS[end.reason]
    made: dict[str, Any] = {"stop_reason": reason, "stop_sequence": end.stop}
    if end.result.seed is not None:
        made["seed"] = end.result.seed
    if end.cut is not None:
        made["cut"] = end.cut
    return made


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
        made = {"type": "tool_use", "id": call.id, "name": call.name}
        content.append({**made, "input": json.loads(call.arguments)})
    return content
