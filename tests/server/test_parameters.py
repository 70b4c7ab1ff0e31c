"""Every field that the clients' own types document is honoured, a label, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest
from anthropic.types import (
    TextBlockParam,
    ThinkingBlockParam,
    ThinkingConfigEnabledParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    message_count_tokens_params,
    message_create_params,
)
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseOutputMessageParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
    response_create_params,
)
from openai.types.responses.response_input_item_param import FunctionCallOutput
from openai.types.shared_params import FunctionDefinition, Reasoning
from openai.types.shared_params.response_format_json_schema import JSONSchema

from specdec.server import chat, completions, messages, responses
from specdec.server.errors import RequestError
from specdec.server.job import Chat, Text
from specdec.server.schema import Record
from tests.server.harness import Running

USER = {"role": "user", "content": "Hello there"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
FLAT = {"type": "function", "name": "f", "parameters": {}}
CUSTOM = {"name": "f", "input_schema": {}}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@dataclass
class Used:
    """A field that is honoured: ``get`` of the rendering is ``expected``."""

    value: Any
    get: Callable[[Any], Any]
    expected: Any = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Refused:
    """A field that is refused by its name."""

    value: Any
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Label:
    """A field that changes nothing, as docs/server.md says of it."""

    value: Any


def param(name: str, value: Any, expected: Any = None, **more: Any) -> Used:
    """A field that becomes one of ``SamplingParams``."""
    return Used(value, lambda r: getattr(r.job.params, name), expected, more)


def source(name: str, value: Any, expected: Any = None, **more: Any) -> Used:
    """A field that becomes one of the source."""

    def get(rendering: Any) -> Any:
        (made,) = (
            [rendering] if isinstance(rendering, Chat | Text) else rendering.job.sources
        )
        for part in name.split("."):
            made = getattr(made, part)
        return made

    return Used(value, get, expected, more)


def attribute(name: str, value: Any, expected: Any = None, **more: Any) -> Used:
    return Used(value, lambda r: getattr(r, name), expected, more)


def form(value: Any, text: str) -> Used:
    """A form that the answer has to have."""
    return Used(value, lambda r: r.job.params.grammar.text, text)


Cases = dict[str, Used | Refused | Label]
MORE: Cases = {
    "top_k": param("top_k", 3, temperature=1),
    "min_p": param("min_p", 0.1, temperature=1),
    "xtc_probability": param("xtc_probability", 0.5, temperature=1),
    "xtc_threshold": param("xtc_threshold", 0.2, xtc_probability=1, temperature=1),
    "repetition_penalty": param("repetition_penalty", 1.5),
    "repetition_context_size": param("repetition_context_size", 7),
    "presence_context_size": param("presence_context_size", 7),
    "frequency_context_size": param("frequency_context_size", 7),
    "min_tokens": param("min_tokens", 2),
    "stop_token_ids": param("stop_token_ids", [5], (5,)),
    "num_draft_tokens": param("num_draft_tokens", 1),
    "cache_salt": param("cache_salt", "mine"),
    "adapters": Refused("a folder"),
    "role_mapping": Refused({"user": "x"}),
    "verification": param("verification", "block"),
    "seed": param("seed", 7),
    "temperature": param("temperature", 0.5),
    "top_p": param("top_p", 0.5, temperature=1),
    "stream": attribute("streamed", True),
    "model": attribute("model", "tiny"),
    "max_thinking_tokens": param("max_thinking_tokens", 9),
    "ignore_eos": param("min_tokens", True, 24),
    "skip_special_tokens": Used(True, lambda r: r.job.hides_special),
    "return_token_ids": Used(True, lambda r: r.job.token_ids),
    "structured_outputs": form({"regex": "a+"}, "a+"),
    "guided_json": form({"type": "object"}, '{"type": "object"}'),
    "guided_regex": form("a+", "a+"),
    "guided_choice": form(["a", "b"], 'start: "a" | "b"'),
    "guided_grammar": form('start: "a"', 'start: "a"'),
    "draft_model": Refused("x"),
    "options": Refused({"num_ctx": 1}),
    "think": Refused(True),
    "include_stop_str_in_output": Refused(True),
    "use_beam_search": Refused(True),
    "bad_words": Refused(["a"]),
    "prompt_logprobs": Refused(1),
    "truncate_prompt_tokens": Refused(1),
    "allowed_token_ids": Refused([5]),
    "chat_template": Refused("{{ messages }}"),
    "detokenize": Refused(False),
    "documents": Refused([{"text": "a"}]),
    "include_reasoning": Refused(False),
    "json_schema": Refused({"type": "object"}),
    "length_penalty": Refused(0.5),
    "logits_processors": Refused(["a"]),
    "dry_multiplier": Refused(0.8),
    "dynatemp_range": Refused(0.5),
    "mirostat": Refused(2),
    "n_probs": Refused(3),
    "tfs_z": Refused(0.9),
    "typical_p": Refused(0.9),
    "repeat_penalty": Refused(1.1),
    "repeat_last_n": Refused(32),
    "best_of": Refused(2),
    "grammar": Refused("a"),
    "min_keep": Refused(1),
    "top_n_sigma": Refused(1.0),
    "reasoning_format": Refused("none"),
    "return_tokens": Refused(True),
    "return_tokens_as_token_ids": Refused(True),
    **dict.fromkeys(
        (
            "cache_prompt",
            "keep_alive",
            "priority",
            "request_id",
            "id_slot",
            "spaces_between_special_tokens",
            "guided_decoding_backend",
            "guided_whitespace_pattern",
            "timings_per_token",
            "n_keep",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "dynatemp_exponent",
            "mirostat_tau",
            "mirostat_eta",
        ),
        Label("x"),
    ),
}
OPENAI: Cases = {
    **MORE,
    "presence_penalty": param("presence_penalty", 0.5),
    "frequency_penalty": param("frequency_penalty", 0.5),
    "logit_bias": param("logit_bias", {"5": 1}, {5: 1}),
    "user": Label("anna"),
    "safety_identifier": Label("anna"),
    "metadata": Label({"a": "b"}),
    "prompt_cache_key": Label("key"),
    "service_tier": Label("flex"),
    "store": Label(True),
    "client_metadata": Label({"a": "b"}),
    "prompt_cache_retention": Label("24h"),
    "prompt_cache_options": Label({"mode": "explicit"}),
    "moderation": Refused({}),
    "stream_options": Used(
        {"include_usage": True},
        lambda r: r.request.stream_options.include_usage,
        True,
        {"stream": True},
    ),
}
THINKING = {"type": "enabled", "budget_tokens": 2000}
NO_SETTING = "the chat template of this model has no setting for thoughts"
PROMPT: Cases = {
    "messages": source("messages", [USER], [USER]),
    "system": Used("Be kind", lambda r: _chat(r).messages[0]["content"]),
    "tools": Used([CUSTOM], lambda r: len(_chat(r).tools.functions), 1),
    "tool_choice": source("tools.required", {"type": "any"}, True, tools=[CUSTOM]),
    "thinking": Used(
        {"type": "disabled"}, lambda r: _chat(r).variables["enable_thinking"], False
    ),
    "output_config": Used(
        {"effort": "low"}, lambda r: _chat(r).variables["reasoning_effort"], "low"
    ),
    "cache_control": Label({"type": "ephemeral"}),
    "context_management": Refused({"edits": [{"type": "clear_tool_uses_20250919"}]}),
    "user_profile_id": Label("x"),
    "workspace_id": Label("x"),
    "speed": Label("fast"),
    "service_tier": Label("priority"),
    "mcp_servers": Refused([{"type": "url"}]),
    "betas": Label(["context-1m-2025-08-07"]),
    "billing_policy": Refused({}),
    "compaction": Refused({}),
    "model": Refused("other"),
}
COUNTED = {name: case for name, case in MORE.items() if name not in PROMPT}
CASES: dict[str, tuple[Callable[..., Any], type[Record], dict[str, Any], Cases]] = {
    "chat": (chat.parse, chat.ChatRequest, {"messages": [USER]}, {
        **OPENAI,
        "messages": source("messages", [USER], [USER]),
        "max_tokens": param("max_tokens", 7),
        "max_completion_tokens": param("max_tokens", 7),
        "n": Used(3, lambda r: r.job.n),
        "stop": param("stop", "a", ("a",)),
        "logprobs": param("logprobs", True),
        "top_logprobs": param("top_logprobs", 2, logprobs=True),
        "tools": source("tools.functions", [TOOL], [TOOL]),
        "tool_choice": source("tools.required", "required", True, tools=[TOOL]),
        "parallel_tool_calls": source("tools.parallel", False),
        "response_format": Used(JSON, lambda r: r.job.params.grammar.text, "{}"),
        "reasoning_effort": Used("high", lambda r: r.notes.texts, [NO_SETTING]),
        "chat_template_kwargs": source("variables", {"think": True}),
        "continue_final_message": source(
            "continued", True, messages=[USER, {**USER, "role": "assistant"}]
        ),
        "modalities": Refused(["audio"]),
        "audio": Refused({"voice": "x", "format": "wav"}),
        "web_search_options": Refused({}),
        "functions": Refused([{"name": "f"}]),
        "function_call": Refused({"name": "f"}),
        "prediction": Label({"type": "content", "content": "x"}),
        "verbosity": Label("low"),
        "add_generation_prompt": Label(True),
    }),
    "completions": (
        completions.parse, completions.CompletionRequest, {"prompt": "Hello"}, {
        **OPENAI,
        "prompt": source("prompt", "Hi", "Hi"),
        "suffix": source("suffix", "end"),
        "max_tokens": param("max_tokens", 7),
        "ignore_eos": param("min_tokens", True, 16),
        "n": Used(3, lambda r: r.job.n),
        "echo": Used(True, lambda r: r.request.echo),
        "logprobs": param("top_logprobs", 2),
        "prompt_logprobs": param("prompt_logprobs", 2),
        "stop": param("stop", ["a", "b"], ("a", "b")),
        "response_format": Used(JSON, lambda r: r.job.params.grammar.text, "{}"),
        "add_special_tokens": Label(True),
    }),
    "responses": (responses.parse, responses.ResponseRequest, {"input": "Hello"}, {
        **OPENAI,
        "input": source("messages", "Hi", [{**USER, "content": "Hi"}]),
        "instructions": Used("Be kind", lambda r: _chat(r).messages[0]["content"]),
        "max_output_tokens": param("max_tokens", 7),
        "tools": Used([FLAT], lambda r: len(_chat(r).tools.functions), 1),
        "tool_choice": source("tools.required", "required", True, tools=[FLAT]),
        "parallel_tool_calls": source("tools.parallel", False),
        "text": Used({"format": SCHEMA}, lambda r: r.job.params.grammar.text,
                     '{"type": "object"}'),
        "reasoning": Used({"effort": "high"}, lambda r: r.notes.texts, [NO_SETTING]),
        "top_logprobs": param("logprobs", 2, True),
        "include": param("logprobs", [
            "reasoning.encrypted_content", "message.output_text.logprobs"], True),
        "truncation": Refused("auto"),
        "chat_template_kwargs": source("variables", {"think": True}),
        "previous_response_id": Refused("resp_1"),
        "conversation": Refused("conv_1"),
        "background": Refused(True),
        "prompt": Refused({"id": "x"}),
        "context_management": Refused([{"type": "compaction"}]),
        "background_options": Label({}),
        "image": Refused({}),
        "access_programs": Refused({}),
        "max_tool_calls": Label(3),
    }),
    "messages": (
        messages.parse,
        messages.MessageRequest,
        {"model": "tiny", "messages": [USER], "max_tokens": 9},
        {
            **PROMPT, **MORE,
            "max_tokens": param("max_tokens", 7),
            "ignore_eos": param("min_tokens", True, 9),
            "stop_sequences": param("stop", ["a"], ("a",)),
            "metadata": Label({"user_id": "anna"}),
            "diagnostics": Used(
                {"previous_message_id": "x"},
                lambda r: r.request.diagnostics.previous_message_id, "x"),
            "fallbacks": Refused([{"model": "x"}]),
            "fallback_credit_token": Refused("x"),
            "thread": Refused({}),
            "container": Refused("x"),
            "inference_geo": Refused("eu"),
            "output_format": Used({"type": "json_schema", "schema": {}},
                                  lambda r: r.job.params.grammar.text, "{}"),
        },
    ),
    "count_tokens": (
        messages.parse_count, messages.CountRequest,
        {"model": "tiny", "messages": [USER]},
        {**{name: Label("x") for name in messages.CountRequest.accepted}, **PROMPT},
    ),
}  # fmt: skip
DOCUMENTED: tuple[tuple[str, Any], ...] = (
    ("chat", chat_params.CompletionCreateParamsStreaming),
    ("completions", completion_create_params.CompletionCreateParamsStreaming),
    ("responses", response_create_params.ResponseCreateParamsStreaming),
    ("messages", message_create_params.MessageCreateParamsStreaming),
    ("messages", beta_params.MessageCreateParamsStreaming),
    ("count_tokens", message_count_tokens_params.MessageCountTokensParams),
    ("count_tokens", beta_count_params.MessageCountTokensParams),
)


def _chat(rendering: Any) -> Chat:
    made = rendering if isinstance(rendering, Chat) else rendering.job.sources[0]
    assert isinstance(made, Chat)
    return made


def test_every_documented_parameter_is_tried() -> None:
    """A field of a new version of a client that nobody has thought of, by its name."""
    for endpoint, kind in DOCUMENTED:
        cases = CASES[endpoint][3]
        new = sorted(get_type_hints(kind).keys() - cases.keys())
        assert not new, f"{endpoint}: what becomes of {', '.join(new)}?"
    for endpoint, (_, kind, _, cases) in CASES.items():
        assert kind.known() == cases.keys(), endpoint


@pytest.mark.parametrize("endpoint", CASES)
def test_no_parameter_is_silently_ignored(endpoint: str, server: Running) -> None:
    """One that is read and dropped, or refused under another name."""
    parse, _, good, cases = CASES[endpoint]
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    plain = parse(good, server.service)
    for name, case in cases.items():
        more = {} if isinstance(case, Label) else case.more
        body = {**good, **more, name: case.value}
        if isinstance(case, Refused):
            with pytest.raises(RequestError) as refused:
                parse(body, server.service)
            where = f"{refused.value.field} {refused.value}"
            assert where.partition(".")[0].partition(" ")[0] == name, (name, where)
            continue
        rendering = parse(body, server.service)
        if isinstance(case, Label):
            assert _same(rendering, plain), name
            assert f"`{name}" in page or endpoint == "count_tokens", name
            continue
        expected = case.value if case.expected is None else case.expected
        assert case.get(rendering) == expected, name


#: What other servers' clients send for settings that are off.
NEUTRAL: dict[str, list[dict[str, Any]]] = {
    "": [
        {"logprobs": False, "top_logprobs": -1}, {"top_logprobs": 0},
        {"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}, {"seed": -1},
        {"repetition_penalty": 0.0}, {"repetition_penalty": 1},
        {"xtc_probability": 0.0, "xtc_threshold": 0.0}, {"min_tokens": 0},
        {"max_thinking_tokens": -1}, {"thinking_token_budget": -1},
        {"best_of": 1}, {"use_beam_search": False}, {"length_penalty": 1.0},
        {"repeat_penalty": 1.0, "repeat_last_n": 64}, {"typical_p": 1.0},
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        {"dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2},
        {"dynatemp_range": 0.0, "dynatemp_exponent": 1.0}, {"top_n_sigma": -1.0},
        {"min_keep": 0, "n_keep": 0, "n_probs": 0, "grammar": ""},
        {"return_tokens": False, "return_tokens_as_token_ids": False},
        {"reasoning_format": "auto", "options": {}, "draft_model": "default_model"},
        {"truncate_prompt_tokens": None, "vllm_xargs": None, "temprature": None},
        {"detokenize": True, "documents": [], "allowed_token_ids": None},
    ],
    "openai": [
        {"presence_penalty": 0, "frequency_penalty": 0.0}, {"logit_bias": []},
        {"model": "default_model"},
    ],
    "chat": [
        {"logprobs": -1}, {"n": 1}, {"max_tokens": -1}, {"function_call": "none"},
    ],
    "completions": [
        {"echo": False, "suffix": ""}, {"n": 1},
    ],
    "responses": [{"max_output_tokens": -1}],
    "messages": [],
}  # fmt: skip


@pytest.mark.parametrize("endpoint", list(CASES)[:4])
def test_settings_that_are_off_elsewhere(endpoint: str, server: Running) -> None:
    """A client's default is refused, noted, or taken for a setting."""
    parse, _, good, _ = CASES[endpoint]
    good = {"temperature": 0, **good}
    plain = parse(good, server.service)
    openai = NEUTRAL["openai"] if endpoint != "messages" else []
    for off in (*NEUTRAL[""], *openai, *NEUTRAL[endpoint]):
        rendering = parse({**good, **off}, server.service)
        assert _same(rendering, plain), off
        assert rendering.model == plain.model, off
        assert rendering.notes.ignored == rendering.notes.texts == [], off
    drawn = [
        parse({**good, "temperature": 1, "seed": -1}, server.service).job.params.seed
        for _ in range(2)
    ]
    assert drawn[0] != drawn[1]


def test_no_limit_for_a_completion(server: Running) -> None:
    """It has the 16 tokens of one that does not say; or 0 entries are taken for off."""
    rendering = completions.parse(
        {"prompt": "Hi", "max_tokens": -1, "logprobs": 0}, server.service
    )
    assert rendering.job.params.max_tokens == server.service.config.max_tokens
    assert rendering.job.params.logprobs


def _same(made: Any, plain: Any) -> bool:
    if isinstance(made, Chat):
        return bool(made == plain)
    return bool(made.job == plain.job and made.streamed == plain.streamed)


ASSISTANT = {"role": "assistant", "content": "a"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
USED = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
PROGRAM = {"type": "program", "caller_id": "x"}
TOOLS = {"allowed_callers": ["programmatic"]}
#: Of each documented object that is taken: how to send one, what of it is refused, and
#: what is honoured or, as the documentation says, changes nothing.
PARTS: tuple[tuple[Any, str, Callable[[Any], Any], dict[str, Any], str], ...] = (
    (ChatCompletionUserMessageParam, "chat", lambda p: {"messages": [{**USER, **p}]},
     {}, "content name role"),
    (ChatCompletionAssistantMessageParam, "chat",
     lambda p: {"messages": [USER, {**ASSISTANT, **p}]},
     {"audio": {"id": "x"}, "function_call": {"name": "f", "arguments": ""}},
     "content name refusal role tool_calls"),
    (ChatCompletionToolMessageParam, "chat",
     lambda p: {"messages": [USER, {"role": "tool", "tool_call_id": "c", **p}]},
     {"content": [{"type": "image_url"}]}, "role tool_call_id"),
    (ChatCompletionContentPartTextParam, "chat",
     lambda p: {"messages": [{**USER, "content": [
         {"type": "text", "text": "a", **p}]}]},
     {}, "prompt_cache_breakpoint text type"),
    (ChatCompletionStreamOptionsParam, "chat",
     lambda p: {"messages": [USER], "stream": True, "stream_options": p},
     {}, "include_usage include_obfuscation"),
    (FunctionDefinition, "chat",
     lambda p: {"messages": [USER], "tools": [
         {"type": "function", "function": {"name": "f", **p}}]},
     {}, "description name parameters strict"),
    (JSONSchema, "chat",
     lambda p: {"messages": [USER], "response_format": {
         "type": "json_schema", "json_schema": {"name": "x", "schema": {}, **p}}},
     {}, "description name schema strict"),
    (EasyInputMessageParam, "responses", lambda p: {"input": [{**USER, **p}]},
     {}, "content phase role type"),
    (ResponseOutputMessageParam, "responses",
     lambda p: {"input": [{**ASSISTANT, "type": "message", **p}]},
     {}, "content id phase role status type"),
    (ResponseOutputTextParam, "responses",
     lambda p: {"input": [{**USER, "content": [
         {"type": "output_text", "text": "a", **p}]}]},
     {}, "annotations logprobs text type"),
    (ResponseFunctionToolCallParam, "responses", lambda p: {"input": [{**CALL, **p}]},
     {"async": True, "caller": PROGRAM, "namespace": "x"},
     "arguments call_id id name status type"),
    (FunctionCallOutput, "responses", lambda p: {"input": [CALL, {**RESULT, **p}]},
     {"caller": PROGRAM, "namespace": "x"}, "call_id id name output status type"),
    (ResponseReasoningItemParam, "responses",
     lambda p: {"input": [{"type": "reasoning", "summary": [], **p}, USER]},
     {"content": [{"type": "x"}]}, "encrypted_content id status summary type"),
    (FunctionToolParam, "responses",
     lambda p: {"input": "a", "tools": [{**FLAT, **p}]},
     {**TOOLS, "async": True, "output_schema": {}},
     "defer_loading description name parameters strict type"),
    (Reasoning, "responses", lambda p: {"input": "a", "reasoning": p},
     {}, "context effort generate_summary mode summary"),
    (ResponseTextConfigParam, "responses", lambda p: {"input": "a", "text": p},
     {}, "format verbosity"),
    (TextBlockParam, "messages",
     lambda p: _said([{"type": "text", "text": "a", **p}]),
     {}, "cache_control citations text type"),
    (ThinkingBlockParam, "messages",
     lambda p: _said([{"type": "thinking", "thinking": "a", "signature": "", **p}],
                     "assistant"),
     {}, "signature thinking type"),
    (ToolUseBlockParam, "messages", lambda p: _said([{**USE, **p}], "assistant"),
     {"caller": PROGRAM, "toolset_name": "x"}, "cache_control id input name type"),
    (ToolResultBlockParam, "messages", lambda p: _said([{**USED, **p}]),
     {"toolset_name": "x", "content": [{"type": "image"}]},
     "cache_control is_error tool_use_id type"),
    (ToolParam, "messages", lambda p: {**_said("a"), "tools": [{**CUSTOM, **p}]},
     {**TOOLS, "input_examples": [{}]},
     "cache_control defer_loading description eager_input_streaming input_schema "
     "name strict type"),
    (ThinkingConfigEnabledParam, "messages",
     lambda p: {**_said("a"), "thinking": {**THINKING, **p}},
     {"display": "x"}, "budget_tokens type"),
)  # fmt: skip


def _said(content: Any, role: str = "user") -> dict[str, Any]:
    said = [USER, {"role": role, "content": content}]
    return {"model": "tiny", "max_tokens": 9, "messages": said}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0].__name__)
def test_no_part_of_an_object_is_silently_ignored(part: Any, server: Running) -> None:
    """A documented field of a message, a tool or an item, read by nobody."""
    kind, endpoint, body_of, refused, taken = part
    parse = CASES[endpoint][0]
    new = sorted(get_type_hints(kind).keys() - refused.keys() - set(taken.split()))
    assert not new, f"what becomes of {', '.join(new)}?"
    if "content" not in refused or kind is ResponseReasoningItemParam:
        parse(body_of({}), server.service)
    for name, value in refused.items():
        with pytest.raises(RequestError, match=rf"\b{name}\b"):
            parse(body_of({name: value}), server.service)


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {"99999": 1}), ("stop_token_ids", [99999])]
)
def test_what_only_the_model_refuses_is_named(
    name: str, value: Any, server: Running
) -> None:
    """Programs look at ``param``; it would be null."""
    body = {"messages": [{"role": "user", "content": "a"}], name: value}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
