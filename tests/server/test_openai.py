"""OpenAI's own client, and LangChain's, against a server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import mlx.core as mx
import openai
import pytest
from langchain_openai import ChatOpenAI

from specdec import Grammar, SamplingParams, SpecDecoder
from tests.server.harness import Running, Scripted, running

MESSAGES: Any = [{"role": "user", "content": "Name a river that is long, please."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_chat_is_what_generate_gives(
    decoder: SpecDecoder, client: openai.OpenAI
) -> None:
    """A lost piece, another prompt or other sampling shows; so does wrong usage."""
    for more in ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        params: Any = {**more, "max_tokens": 20}
        (expected,) = decoder.generate([MESSAGES], SamplingParams(**params))
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, **params
        )
        (choice,) = answer.choices
        assert choice.message.content == expected.text
        assert choice.finish_reason == expected.finish_reason
        assert getattr(choice, "seed", None) == more.get("seed")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == expected.prompt_tokens
        assert answer.usage.completion_tokens == expected.generated_tokens
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                stream=True,
                stream_options={"include_usage": True},
                **params,
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == expected.text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == expected.finish_reason
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens == expected.generated_tokens
        details = usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens is not None
        assert details.rejected_prediction_tokens is not None
        drafted = getattr(details, "drafted_tokens", 0)
        assert drafted > details.accepted_prediction_tokens >= 0
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens


def test_choices_stops_and_logprobs(
    decoder: SpecDecoder, client: openai.OpenAI
) -> None:
    """Choices differ by their seeds alone; logprobs are those of generate."""
    params: Any = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=3,
        logprobs=True,
        top_logprobs=2,
        stop=["zz", "\n"],
        **params,
    )
    for i, choice in enumerate(answer.choices):
        options = {**params, "seed": 3 + i, "logprobs": True, "top_logprobs": 2}
        given = SamplingParams(**options, stop=("zz", "\n"))
        (expected,) = decoder.generate([MESSAGES], given)
        assert choice.message.content == expected.text
        assert getattr(choice, "seed", None) == 3 + i
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert expected.logprobs is not None
        logprobs = [[t.logprob, *(p.logprob for p in t.top_logprobs)] for t in content]
        # The token that was drawn is named, too, if it is not among the likeliest.
        wanted = [
            [t.logprob, *(p for _, p in t.top), *[t.logprob] * (n not in dict(t.top))]
            for n, t in zip(expected.token_ids, expected.logprobs, strict=True)
        ]
        # Three rows are rounded otherwise than one.
        assert logprobs == [pytest.approx(each, abs=1e-5) for each in wanted]
    assert len({choice.message.content for choice in answer.choices}) > 1
    # Streamed, every token's entry comes once.
    chunks = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, stream=True, max_tokens=9
    )
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert len(entries) == 9


def test_completions(decoder: SpecDecoder, client: openai.OpenAI) -> None:
    """Several prompts, token ids, echo, a gap to fill, and the old logprobs."""
    prompts = ["Once upon a time", "The end is"]
    params = SamplingParams(max_tokens=16, logprobs=True, top_logprobs=2)
    expected = decoder.generate(prompts, params, ignore_chat_template=True)
    answer = client.completions.create(
        model="tiny", prompt=prompts, echo=True, n=2, max_tokens=16
    )
    texts = [choice.text for choice in answer.choices]
    assert texts == [p + e.text for p, e in zip(prompts, expected, strict=True)
                     for _ in range(2)]  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(e.prompt_tokens for e in expected)
    tokens = decoder.tokenizer.encode(prompts[0], add_special_tokens=False)
    chunks = list(
        client.completions.create(
            model="tiny", prompt=tokens, logprobs=2, max_tokens=16, stream=True
        )
    )
    (alone,) = decoder.generate([tokens], params)
    assert "".join(c.choices[0].text for c in chunks) == alone.text
    logprobs = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert alone.logprobs is not None
    given = [p for each in logprobs for p in each.token_logprobs or []]
    assert given == [t.logprob for t in alone.logprobs]
    offsets = [o for each in logprobs for o in each.text_offset or []]
    assert offsets == sorted(offsets)
    vocabulary = decoder.tokenizer.get_vocab()
    marks = [vocabulary[f"<|fim_{name}|>"] for name in ("prefix", "suffix", "middle")]
    encode = decoder.tokenizer.encode
    ids = [marks[0], *encode("a = "), marks[1], *encode("\nb"), marks[2]]
    ends = (*marks, vocabulary["<|endoftext|>"])
    (filled,) = decoder.generate(
        [ids], SamplingParams(max_tokens=5, stop_token_ids=ends)
    )
    gap = client.completions.create(
        model="tiny", prompt="a = ", suffix="\nb", max_tokens=5
    )
    assert gap.choices[0].text == filled.text
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", best_of=2)
    assert refused.value.param == "best_of"


def test_a_prompt_is_scored(decoder: SpecDecoder, client: openai.OpenAI) -> None:
    """As evaluations ask: echo with logprobs, and no token or one after the prompt."""
    text = "Once upon a time"
    tokens = decoder.tokenizer.encode(text, add_special_tokens=False)
    (alone,) = decoder.generate(
        [tokens], SamplingParams(max_tokens=1, logprobs=True, prompt_logprobs=2)
    )
    assert alone.prompt_logprobs is not None
    assert alone.logprobs is not None
    of_prompt = [entry and entry.logprob for entry in alone.prompt_logprobs]
    for n in (0, 1):
        answer = client.completions.create(
            model="tiny",
            prompt=[tokens, tokens[:3]],
            echo=True,
            logprobs=2,
            max_tokens=n,
        )
        scored = answer.choices[0].logprobs
        assert scored is not None
        assert scored.token_logprobs is not None
        expected = of_prompt + [entry.logprob for entry in alone.logprobs][:n]
        assert scored.token_logprobs[0] is None
        assert scored.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
        assert "".join(scored.tokens or [])[: len(text)] == text
        assert answer.choices[1].logprobs is not None
        assert len(answer.choices[1].logprobs.token_logprobs or []) == 3 + n
    by_id = client.completions.create(
        model="tiny", prompt=tokens, max_tokens=0, extra_body={"prompt_logprobs": 1}
    )
    entries: Any = by_id.choices[0].model_extra
    first, *others = entries["prompt_logprobs"]
    assert first is None
    assert [
        str(token) in entry for token, entry in zip(tokens[1:], others, strict=True)
    ]
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        client.completions.create(
            model="tiny", prompt=text, echo=True, logprobs=1, stream=True
        )


def test_items_of_evaluations(decoder: SpecDecoder, client: openai.OpenAI) -> None:
    """As lm-eval asks and reads: its items are cut at the end by one generated token.

    A token that ends the answer, has no text of its own, or shares its text with others
    must not shift the items' entries, nor make an item likeliest that is not.
    """
    encode, model = decoder.tokenizer.encode, decoder.target.model
    (end, *_) = decoder.tokenizer.eos_token_ids
    special = decoder.tokenizer.get_vocab()["<|fim_prefix|>"]
    parts = [encode(text, add_special_tokens=False) for text in ("é日", "🙂 a", "Köln")]
    items = [[a[0], *b, *a] for a in parts for b in parts]
    # Positions where the likeliest token and the item's own are parts of characters.
    items += [[first, parts[0][0]] for first in range(200)]
    for ending in (end, special, parts[0][0], 65):
        answer = client.completions.create(
            model="tiny",
            prompt=items if ending == end else items[:9],
            temperature=0,
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
            logit_bias={str(ending): 1000},
        )
        for choice in answer.choices:
            item, scored = items[choice.index], choice.logprobs
            assert scored is not None
            assert scored.token_logprobs is not None
            assert scored.top_logprobs is not None
            logits = model(mx.array([item]))[0]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            expected = [logprobs[i, token].item() for i, token in enumerate(item[1:])]
            assert scored.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
            likeliest = [
                own == max(top.values())
                for own, top in zip(
                    scored.token_logprobs[1:-1], scored.top_logprobs[1:-1], strict=True
                )
            ]
            best: Any = mx.argmax(logits, axis=-1).tolist()
            assert likeliest == [a == b for a, b in zip(best, item[1:], strict=False)]


def answers(prompt: str) -> str:
    """What a model with tools may say."""
    if "answer was 21" in prompt:
        return "It is 21 degrees."
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
    if prompt.endswith('"arguments": '):
        return '{"city": "Rom"}}\n</tool_call> and more'
    if prompt.endswith("<tool_call>"):
        return (call % "Bonn").removeprefix("<tool_call>")
    if "broken" in prompt:
        return "<tool_call>\n{no JSON\n</tool_call>"
    thoughts = "<think>\nI need\n two.</think>\n\n"
    return thoughts + "Let me see. " + call % "Paris" + "\n" + call % "Oslo"


@pytest.fixture(scope="module")
def scripted(decoder: SpecDecoder) -> Scripted:
    return Scripted(decoder, answers)


@pytest.fixture(scope="module")
def tools_server(scripted: Scripted) -> Iterator[Running]:
    with running(scripted) as server:
        yield server


@pytest.fixture
def tools_client(tools_server: Running) -> Iterator[openai.OpenAI]:
    url = f"{tools_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as openai_client:
        yield openai_client


def test_tools(scripted: Scripted, tools_client: openai.OpenAI) -> None:
    """Calls come whole, in order, with thoughts and text apart; streamed, by index."""
    create: Any = tools_client.chat.completions.create
    common: Any = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]}
    answer = create(**common)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see. "
    assert choice.message.reasoning_content == "I need\n two."
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert calls == [("weather", '{"city": "Paris"}'), ("weather", '{"city": "Oslo"}')]
    with tools_client.chat.completions.stream(**common) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert [
        (c.function.name, c.function.arguments) for c in message.tool_calls or []
    ] == calls
    assert message.content == "Let me see. "
    # One after the other: the answer ends with the first.
    one = create(**common, parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1
    assert scripted.params[-1].stop == ("</tool_call>",)
    # Forced, in the prompt.
    for wanted, city in (
        ("required", "Bonn"),
        ({"type": "function", "function": {"name": "weather"}}, "Rom"),
    ):
        forced = create(**common, tool_choice=wanted).choices[0]
        (call,) = forced.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": city}
        assert forced.finish_reason == "tool_calls"
        assert forced.message.content is None
    # None: the model does not see them, and what looks like a call is text.
    none = create(**common, tool_choice="none").choices[0]
    assert none.message.tool_calls is None
    assert "<tool_call>" in none.message.content
    assert "The weather of a city" not in scripted.prompts[-1]
    # What cannot be parsed is not lost.
    broken = [{"role": "user", "content": "broken"}]
    text = create(**{**common, "messages": broken}).choices[0]
    assert text.message.content == "<tool_call>\n{no JSON\n</tool_call>"
    assert text.finish_reason == "stop"
    # And the way back: the result reaches the template with the call's name.
    history = [
        *MESSAGES,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls and choice.message.tool_calls[0].id,
         "content": [{"type": "text", "text": "the answer was 21"}]},
    ]  # fmt: skip
    back = create(model="tiny", messages=history, tools=[TOOL])
    assert back.choices[0].message.content == "It is 21 degrees."
    assert '"arguments": {"city": "Paris"}}</tool_call>' in scripted.prompts[-1]
    assert "<think>I need\n two.</think>" in scripted.prompts[-1]


def test_langchain(tools_server: Running) -> None:
    """Its own parsing of usage and tool calls, whole and streamed."""
    url = f"{tools_server.url}/v1"
    make: Any = ChatOpenAI
    model = make(model="tiny", base_url=url, api_key="x", stream_usage=True).bind_tools(
        [TOOL]
    )
    said = model.invoke("Name a river.")
    assert [call["args"] for call in said.tool_calls] == [
        {"city": "Paris"},
        {"city": "Oslo"},
    ]
    total = None
    for chunk in model.stream("Name a river."):
        total = chunk if total is None else total + chunk
    assert total is not None
    assert [call["args"] for call in total.tool_calls] == [
        {"city": "Paris"},
        {"city": "Oslo"},
    ]
    assert total.content == "Let me see. "
    assert total.usage_metadata["input_token_details"]["cache_read"] == 3
    assert said.usage_metadata["output_tokens"] > 0


def test_chat_template_config_and_thoughts(
    scripted: Scripted, tools_client: openai.OpenAI
) -> None:
    """A prompt that ends in a thought makes the answer begin with one."""
    create: Any = tools_client.chat.completions.create
    scripted_answer = scripted.answer
    scripted.answer = lambda prompt: "Hm.\n</think>\n\nYes."
    try:
        answer = create(
            model="tiny",
            messages=MESSAGES,
            extra_body={"chat_template_kwargs": {"think": True}},
        ).choices[0]
    finally:
        scripted.answer = scripted_answer
    assert answer.message.reasoning_content == "Hm.\n"
    assert answer.message.content == "Yes."
    for own in ("chat_template", "messages", "add_generation_prompt"):
        with pytest.raises(openai.BadRequestError) as refused:
            create(
                model="tiny",
                messages=MESSAGES,
                extra_body={"chat_template_kwargs": {own: "{{ 1 }}"}},
            )
        assert refused.value.param == "chat_template_kwargs"


SCHEMA: Any = {
    "type": "object",
    "properties": {"kind": {"enum": ["river", "lake"]}, "deep": {"type": "boolean"}},
    "required": ["kind", "deep"],
    "additionalProperties": False,
}


def test_answers_of_a_schema(decoder: SpecDecoder, client: Any) -> None:
    """By every endpoint the text of generate with that grammar."""
    format_: Any = {"name": "water", "schema": SCHEMA, "strict": True}
    params = SamplingParams(max_tokens=99, grammar=Grammar.json_schema(SCHEMA))
    (expected,) = decoder.generate([MESSAGES], params)
    made = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=99,
        response_format={"type": "json_schema", "json_schema": format_},
    )
    text = made.choices[0].message.content
    assert text == expected.text
    assert set(json.loads(text or "")) == {"kind", "deep"}
    said = client.responses.create(
        model="tiny",
        input=MESSAGES,
        text={"format": {"type": "json_schema", **format_}},
        max_output_tokens=99,
    )
    assert said.output_text == expected.text
    with httpx.Client(base_url=str(client.base_url)) as plain:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 99}
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = plain.post("messages", json={**body, "output_config": config}).json()
        assert answer["content"] == [{"type": "text", "text": expected.text}]
    for more in (
        {"response_format": {"type": "other"}},
        {"tools": [TOOL], "response_format": {"type": "grammar",
                                              "grammar": 'start: "a"'}},
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="tiny", messages=MESSAGES, **more)
        assert error.value.param == "response_format"


def test_responses(
    scripted: Scripted, tools_client: Any, client: Any, decoder: Any
) -> None:
    """Items in their order, as one object and as events that build the same one."""
    (expected,) = decoder.generate([MESSAGES], SamplingParams(max_tokens=20))
    plain = client.responses.create(
        model="tiny", input=MESSAGES[0]["content"], max_output_tokens=20
    )
    assert plain.output_text == expected.text
    assert plain.usage is not None
    assert plain.usage.output_tokens == expected.generated_tokens
    assert plain.status == ("completed" if expected.finish_reason == "stop" else
                            "incomplete")  # fmt: skip
    tool = {"type": "function", **TOOL["function"], "strict": False}
    params: Any = {"model": "tiny", "input": MESSAGES, "tools": [tool]}
    whole = tools_client.responses.create(**params)
    with tools_client.responses.stream(**params) as stream:
        events = list(stream)
        final = stream.get_final_response()
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))
    for answer in (whole, final):
        kinds = [item.type for item in answer.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        calls = [i.arguments for i in answer.output if i.type == "function_call"]
        assert calls == ['{"city": "Paris"}', '{"city": "Oslo"}']
        assert answer.output_text == "Let me see. "
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "was 21"}
        for item in whole.output
        if item.type == "function_call"
    ]
    back = [
        *MESSAGES,
        *(i.model_dump(exclude_none=True) for i in whole.output),
        *outputs,
    ]
    tools_client.responses.create(**{**params, "input": back}, instructions="Be kind")
    prompt = scripted.prompts[-1]
    assert "<|im_start|>system\nBe kind" in prompt
    assert "<think>I need\n two.</think>Let me see. <tool_call>" in prompt
    assert prompt.count("<|im_start|>tool\nwas 21") == 2
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="a", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
