"""Anthropic's own client against a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from specdec import SamplingParams, SpecDecoder
from tests.server.harness import Running, Scripted, running
from tests.server.test_openai import answers

TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": "A river?"}]}]
HISTORY: Any = [{"role": "user", "content": "A river?"}]


def client_of(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with client_of(server) as anthropic_client:
        yield anthropic_client


def test_messages_are_what_generate_gives(decoder: SpecDecoder, client: Any) -> None:
    """Whole and streamed, with a system prompt and a beginning of the answer."""
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=%s;"},
        {"type": "text", "text": "You know rivers, all of them, by heart.",
         "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    plain: Any = [
        {"role": "system", "content": "You know rivers, all of them, by heart."},
        *HISTORY,
    ]
    (expected,) = decoder.generate([plain], SamplingParams(max_tokens=20))
    for i in range(2):
        system[0]["text"] = f"x-anthropic-billing-header: cc_version=1; cch={i};"
        body: Any = {"model": "tiny", "max_tokens": 20, "messages": MESSAGES}
        answer = client.messages.create(system=system, **body)
        assert answer.content[0].type == "text"
        assert answer.content[0].text == expected.text
        assert answer.stop_reason == "max_tokens"
        usage = answer.usage
        cached = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached == expected.prompt_tokens
        assert usage.output_tokens == expected.generated_tokens
    # The line that changes with every request is not in the prompt.
    assert cached
    with client.messages.stream(system=system, **body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].type == "text"
    assert final.content[0].text == expected.text
    assert final.usage.output_tokens == expected.generated_tokens
    count = client.messages.count_tokens(
        model="tiny", messages=MESSAGES, system=system[1]["text"]
    )
    assert count.input_tokens == expected.prompt_tokens
    compared = client.messages.create(
        **body, diagnostics={"previous_message_id": answer.id}
    )
    assert compared.diagnostics.cache_miss_reason.type == "unavailable"
    turns = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    (whole,) = decoder.generate([plain[1:]], SamplingParams(max_tokens=1))
    answer = client.messages.create(model="tiny", max_tokens=2, messages=turns)
    tokens = decoder.tokenizer.encode("It is", add_special_tokens=False)
    assert answer.usage.input_tokens == whole.prompt_tokens + len(tokens)


def test_a_sequence_that_stops(decoder: SpecDecoder, client: Any) -> None:
    """The text of the client's that ended the answer is named."""
    (expected,) = decoder.generate([HISTORY], SamplingParams(max_tokens=20))
    stop = expected.text[8:10]
    answer = client.messages.create(
        model="tiny", max_tokens=20, messages=MESSAGES, stop_sequences=[stop]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].type == "text"
    assert answer.content[0].text == expected.text[: expected.text.index(stop)]


def test_tools_and_thoughts(decoder: SpecDecoder) -> None:
    """Blocks come one after the other: what was thought, said, called."""
    scripted = Scripted(decoder, answers)
    with running(scripted) as server, client_of(server) as client:
        body: Any = {
            "model": "tiny",
            "max_tokens": 99,
            "messages": MESSAGES,
            "tools": [TOOL],
        }
        answer = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        for message in (answer, final):
            assert message.stop_reason == "tool_use"
            assert [block.type for block in message.content] == [
                "thinking",
                "text",
                "tool_use",
                "tool_use",
            ]
            calls = [b.input for b in message.content if b.type == "tool_use"]
            assert calls == [{"city": "Paris"}, {"city": "Oslo"}]
        assert kinds.count("content_block_start") == 4
        assert kinds.count("content_block_stop") == 4
        one = client.messages.create(
            **body, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        assert [b.type for b in one.content].count("tool_use") == 1
        thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
        with client.messages.stream(**body, thinking=thinking) as stream:
            omitted = [client.messages.create(**body, thinking=thinking),
                       stream.get_final_message()]  # fmt: skip
        for message in omitted:
            assert (message.content[0].type, message.content[0].thinking) == (
                "thinking", "")  # fmt: skip
            assert message.content[1].text == answer.content[1].text
        named = client.messages.create(
            **body, tool_choice={"type": "tool", "name": "weather"}
        )
        assert [b.input for b in named.content if b.type == "tool_use"] == [
            {"city": "Rom"}
        ]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "was 21"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        history = [
            *MESSAGES,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
        ]
        client.messages.create(**{**body, "messages": history})
        prompt = scripted.prompts[-1]
        assert "<think>I need\n two.</think>Let me see. <tool_call>" in prompt
        assert prompt.count("<|im_start|>tool\nwas 21") == 2
        assert prompt.endswith("user\nAnd?<|im_end|>\n<|im_start|>assistant\n")


def test_errors_have_anthropics_form(client: Any) -> None:
    given: Any = {"model": "tiny", "max_tokens": 4, "messages": MESSAGES}
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        client.messages.create(**{**given, "model": "other"})
    image = [{"type": "image", "source": {"type": "url", "url": "http://x"}}]
    with pytest.raises(anthropic.BadRequestError, match="images are not fetched"):
        client.messages.create(**{**given, "messages": [
            {"role": "user", "content": image}]})  # fmt: skip
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    client.messages.create(**given, tools=[search])
    chosen: Any = {"type": "tool", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        client.messages.create(**given, tools=[search], tool_choice=chosen)
    with pytest.raises(anthropic.BadRequestError, match="nothing is stored") as error:
        client.messages.create(**given, extra_body={"thread": {"type": "new"}})
    body: Any = error.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
