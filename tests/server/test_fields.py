"""What becomes of fields: honoured, accepted, ignored with a header, or refused."""

from __future__ import annotations

import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from specdec import SamplingParams, SpecDecoder
from specdec.server import guard, schema
from specdec.server.chat import ChatRequest
from specdec.server.errors import RequestError
from tests.server.harness import (
    BODIES,
    USER,
    Running,
    Scripted,
    post,
    running,
    tiny_decoder,
    until,
)
from tests.server.test_serving import endless

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}},
    "required": ["n"],
    "additionalProperties": False,
}
STRICT: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": SCHEMA, "strict": True},
}


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_told(
    path: str, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """A field that is dropped silently, or that ends a client's first request."""
    caplog.set_level(logging.INFO)
    for stream in (False, True):
        name = f"frobnicate_{stream}_{path.replace('/', '_')}"
        answer = post(server, path, stream=stream, **{name: 1})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-specdec-ignored"] == name
        assert caplog.text.count(name) == 1
        post(server, path, stream=stream, **{name: 1})
        assert caplog.text.count(name) == 1
    assert "x-specdec-ignored" not in post(server, path).headers
    most = "max_output_tokens" if path == "responses" else "max_tokens"
    for wrong, meant in (
        ("temprature", "temperature"), ("top_pp", "top_p"),
        # Names of other servers, for what would change the answer.
        ("repeat_penalty", "repetition_penalty"), ("num_predict", most),
        ("repeat_last_n", "repetition_context_size"),
        ("thinking_token_budget", "max_thinking_tokens"),
    ):  # fmt: skip
        answer = post(server, path, **{wrong: 2})
        assert answer.status_code == 400
        assert f"did you mean {meant}?" in answer.json()["error"]["message"]
    assert post(server, path, **{most.removesuffix("s"): 1}).status_code == 400


def test_strict_servers_refuse_unknown_fields(decoder: SpecDecoder) -> None:
    """The switch is read by nobody, or only for some endpoints and objects."""
    with running(decoder, strict=True) as server:
        for path in BODIES:
            answer = post(server, path, frobnicate=1)
            assert answer.status_code == 400
            if path != "messages":
                error = answer.json()["error"]
                assert error["param"] == "frobnicate"
                assert error["code"] == "unknown_parameter"
            assert post(server, path).status_code == 200
        answer = post(server, "chat/completions", messages=[{**USER, "frobnicate": 1}])
        assert answer.json()["error"]["param"] == "messages[0].frobnicate"


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"continue_final_message": True}, "continue_final_m"),
        ("chat/completions", {"stream_options": {}}, "stream_options"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("completions", {"echo": True, "suffix": "a"}, "echo"),
        ("completions", {"prompt": [1, 2], "suffix": "a"}, "suffix"),
        ("responses", {"input": []}, "input"),
    ],
)
def test_every_refusal_has_a_code(
    path: str, more: dict[str, Any], param: str, server: Running
) -> None:
    """Programs look at ``code``; it was null where fields do not go together."""
    refused = post(server, path, **more)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"][:16], error["code"]) == (param, "invalid_value")


def test_notes_are_in_a_header(server: Running) -> None:
    """A setting that is accepted and does nothing, or that others would refuse."""
    answer = post(server, "chat/completions", temperature=2.5, verbosity="low")
    assert "temperature is above 2" in answer.headers["x-specdec-note"]
    assert "verbosity changes nothing" in answer.headers["x-specdec-note"]
    hosted = {"type": "web_search"}
    answer = post(server, "responses", tools=[hosted, {"type": "custom", "name": "p"}])
    assert answer.status_code == 200
    assert answer.headers["x-specdec-note"] == (
        "tools of type custom are left out; tools of type web_search are left out"
    )
    for choice in ("required", {"type": "web_search"}):
        answer = post(server, "responses", tools=[hosted], tool_choice=choice)
        assert answer.status_code == 400, choice
        assert "web_search" in answer.json()["error"]["message"]


def test_tools_without_a_form_of_calls(tmp_path: Path) -> None:
    """``auto`` is refused, or the request goes on without a word."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tool = {"type": "function", "function": {"name": "f"}}
    decoder = tiny_decoder(tmp_path, template=plain, parser=None)
    with running(decoder) as server:
        answer = post(server, "chat/completions", tools=[tool])
        assert answer.status_code == 200
        assert "knows no tools" in answer.headers["x-specdec-note"]
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            answer = post(server, "chat/completions", tools=[tool], tool_choice=choice)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tool_choice"


def test_vllm_fields(decoder: SpecDecoder, server: Running) -> None:
    """Fields of vLLM's clients and benchmarks."""
    (expected,) = decoder.generate([[USER]], SamplingParams(max_tokens=4, min_tokens=4))
    answer = post(server, "chat/completions", ignore_eos=True, return_token_ids=True)
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == list(expected.token_ids)
    prompt = decoder.tokenizer.encode(expected.prompt, add_special_tokens=False)
    assert choice["prompt_token_ids"] == prompt
    # A grammar ends where it ends.
    answer = post(server, "completions", ignore_eos=True, guided_regex="a")
    assert answer.json()["choices"][0]["text"] == "a", answer.text
    answer = post(
        server,
        "completions",
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    chunks = [
        json.loads(line[6:])
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    ids = [i for c in chunks for choice in c["choices"] for i in choice["token_ids"]]
    (alone,) = decoder.generate(
        ["Hello"], SamplingParams(max_tokens=4), ignore_chat_template=True
    )
    assert ids == list(alone.token_ids)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    both = {"guided_regex": "a", "structured_outputs": {"regex": "b"}}
    assert post(server, "completions", **both).status_code == 400


def test_special_tokens_can_be_hidden(decoder: SpecDecoder) -> None:
    """The option is accepted, and the text has them."""
    scripted = Scripted(decoder, lambda prompt: "a<|im_end|>b")
    scripted.size = 100  # as an engine does, which gives each token's text whole
    with running(scripted) as server:
        for hides, text in ((True, "ab"), (False, "a<|im_end|>b")):
            answer = post(server, "chat/completions", skip_special_tokens=hides)
            assert answer.json()["choices"][0]["message"]["content"] == text


def test_thoughts_are_counted(decoder: SpecDecoder) -> None:
    """Clients show ``reasoning_tokens``, and read either name of the thoughts."""
    with running(decoder) as server:
        asked: Any = {
            "chat_template_kwargs": {"think": True},
            "max_thinking_tokens": 3,
            "max_tokens": 9,
        }
        answer = post(server, "chat/completions", **asked).json()
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == 4  # and the marker
        message = answer["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"]
        streamed = post(server, "chat/completions", stream=True, **asked).text
        assert '"reasoning":' in streamed


def test_prompts_that_are_too_long(server: Running) -> None:
    """Clients look for numbers in the text, and then shorten the conversation."""
    long = [{"role": "user", "content": "word " * 5000}]
    for path in ("chat/completions", "messages"):
        error = post(server, path, messages=long).json()["error"]
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith(" tokens > 4096 maximum")
        if path != "messages":
            assert error["code"] == "context_length_exceeded"


def test_strict_calls_with_auto(decoder: SpecDecoder, server: Running) -> None:
    """Agents send ``strict`` with ``auto``; a call has to follow the schema.

    A bias makes the random model open a call, which it would not do by itself.
    """
    (opening,) = decoder.tokenizer.encode("<tool_call>", add_special_tokens=False)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for bias, more in (
        (100, {}),
        (100, {"response_format": {"type": "json_object"}}),
        (-100, {"response_format": form}),
    ):
        answer = post(server, "chat/completions", tools=[STRICT], max_tokens=200,
                    logit_bias={str(opening): bias}, parallel_tool_calls=False,
                    **more).json()["choices"][0]["message"]  # fmt: skip
        text = answer["content"]
        if bias > 0:
            (call,) = answer["tool_calls"]
            assert call["function"]["name"] == "f"
            text = call["function"]["arguments"]
        assert json.loads(text).keys() == {"n"}


def test_forced_calls_follow_their_schema(server: Running) -> None:
    """Without ``strict``, too; a schema that cannot be compiled counts only with it."""
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        for strict in (False, True):
            for parameters in (SCHEMA, {"type": "x"}):
                function = {"name": "f", "parameters": parameters, "strict": strict}
                tools = [{"type": "function", "function": function}]
                answer = post(server, "chat/completions", tools=tools, max_tokens=200,
                            tool_choice=choice).json()  # fmt: skip
                if strict and parameters is not SCHEMA:
                    assert answer["error"]["param"] == "tools"
                    said = answer["error"]["message"]
                    assert "schema of function 'f' cannot be used" in said
                    continue
                (call,) = answer["choices"][0]["message"].get("tool_calls") or [None]
                if parameters is SCHEMA:
                    assert json.loads(call["function"]["arguments"]).keys() == {"n"}


def test_what_is_wrong_with_a_form_is_said_of_what_was_sent(server: Running) -> None:
    """A message quotes a grammar that the server has made, and no field of the body."""
    good: Any = STRICT["function"]
    wrong = {"type": "object", "properties": {"a": {"not": {}}}}
    bad = {**good, "name": "g", "parameters": wrong}
    function = [{"type": "function", "function": each} for each in (good, bad)]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
    place = 'cannot be used: at properties.a: Unimplemented keys: ["not"]'
    loose = [{"type": "function", "function": {**bad, "strict": False}}]
    fine = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for more, param, said in (
        ({"tools": function}, "tools", f"tools: the schema of function 'g' {place}"),
        ({"tools": function, "response_format": fine}, "tools", f"'g' {place}"),
        ({"tools": loose, "response_format": form}, "response_format",
         f"response_format: the JSON schema {place}"),
        ({"response_format": form}, "response_format", place),
        ({"guided_choice": ["a" * 200_000]}, "guided_choice", "list of choices has"),
        ({"guided_choice": ["a"], "tools": loose}, "guided_choice",
         "the list of choices does not go with tools"),
    ):  # fmt: skip
        answer = post(server, "chat/completions", **more)
        assert answer.status_code == 400, (more, answer.text)
        error = answer.json()["error"]
        assert (error["param"], said in error["message"]) == (param, True), error
        assert "Lark" not in error["message"]
    answer = post(server, "chat/completions", tools=loose, tool_choice="required")
    assert answer.status_code == 200
    assert (
        f"schemas: the schema of function 'g' {place}"
        in answer.headers["x-specdec-note"]
    )


def test_tools_that_are_allowed(server: Running) -> None:
    """A client that names several tools is refused, or calls others than these."""
    f = {"type": "function", "name": "f"}
    flat = [{**f, "parameters": SCHEMA}, {**f, "name": "g", "parameters": SCHEMA}]
    nested = [{"type": "function", "function": each} for each in flat]
    chat = {"mode": "required", "tools": [{"type": "function", "function": f}]}
    for path, tools, more in (
        ("responses", flat, {"mode": "required", "tools": [f]}),
        ("chat/completions", nested, {"allowed_tools": chat}),
    ):
        size = "max_output_tokens" if path == "responses" else "max_tokens"
        body = {"tools": tools, size: 200}
        answer = post(
            server, path, **body, tool_choice={"type": "allowed_tools", **more}
        )
        assert answer.status_code == 200, answer.text
        assert '"name":"f"' in answer.text
        assert '"arguments":"{' in answer.text
        inner: Any = more.get("allowed_tools", more)
        for wrong in (
            {**inner, "mode": "x"}, {**inner, "tools": []}, {**inner, "tools": "f"},
            {**inner, "tools": [{**f, "name": "h"}]}, {"mode": "auto"},
        ):  # fmt: skip
            choice = {"allowed_tools": wrong} if "allowed_tools" in more else wrong
            choice = {"type": "allowed_tools", **choice}
            answer = post(server, path, **body, tool_choice=choice)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tool_choice"


def test_words_of_the_protocol(server: Running) -> None:
    """An answer about ``any``, of which Anthropic speaks, is about ``required``."""
    answer = post(server, "messages", tool_choice={"type": "any"})
    assert answer.json()["error"]["message"] == "tool_choice is any: give functions"
    tool = {"name": "f", "input_schema": SCHEMA}
    choice = {"type": "tool", "name": "g"}
    answer = post(server, "messages", tools=[tool], tool_choice=choice)
    assert "auto, none, any or one of the tools" in answer.json()["error"]["message"]
    answer = post(server, "responses", tools=[{"type": "web_search"}])
    assert answer.json()["tools"] == [{"type": "web_search"}]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of requests that have ended."""
    records = caplog.records
    return [r.getMessage() for r in records if r.name == "specdec.requests"]


def test_the_access_log(decoder: SpecDecoder, caplog: pytest.LogCaptureFixture) -> None:
    """A request that is not logged, or a line without its numbers.

    Of warnings, a server shows five of a kind in a minute.
    """
    guard.limit_log()
    with running(decoder, log_requests=True, api_keys=("k",)) as server:
        with httpx.Client(base_url=server.url, headers={"x-api-key": "k"}) as client:
            for path in BODIES:
                for _ in range(7):
                    client.post(f"/v1/{path}", json=BODIES[path], timeout=60)
            client.post("/v1/completions", json={"prompt": []})
            client.post("/v1/completions", json={"prompt": "x" * 9999})
            client.post("/v1/completions", content=b"{")
            client.get("/v1/models")
            client.get("/v1/a%0Ab", headers={"x-api-key": "wrong"})
        until(lambda: len(logged(caplog)) >= 33)
    lines = logged(caplog)
    answered = (
        r"\d+\.\d\d s: answered, \d+ prompt tokens .* 4 generated, \d of \d draft"
    )
    said = [
        *(f"POST /v1/{path} 200 in {answered}" for path in BODIES for _ in range(7)),
        "POST /v1/completions 400 in .* s: refused: prompt must be",
        "POST /v1/completions 400 in .* s: refused: prompt is too long",
        "POST /v1/completions 415 in .*",
        "GET /v1/models 200 in .*s$",
        "GET /v1/a b 401 in .* s: refused: the API key is missing",
    ]
    assert len(lines) == len(said)
    for expected in said:  # a line is written after its answer, maybe after the next
        line = next((each for each in lines if re.match(expected, each)), None)
        assert line is not None, (expected, lines)
        lines.remove(line)


def test_the_access_log_of_clients_that_leave(
    decoder: SpecDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that nobody waited for seems to have cost nothing."""
    with running(decoder, log_requests=True, max_tokens=4000) as server:

        def generated() -> int:
            return server.service.engine.stats.generated_tokens

        for streamed in (False, True):
            most = generated() + 9
            with endless(server, stream=streamed):
                until(partial(lambda most: generated() > most, most))
            until(partial(lambda lines: len(logged(caplog)) > lines, int(streamed)))
    alone, streamed_line = logged(caplog)
    cost = r"left, \d+ prompt tokens, [1-9]\d* generated"
    assert re.search(f" 499 in .* s: {cost}$", alone), alone
    assert re.search(f" 200 in .* s: {cost}, streamed$", streamed_line), streamed_line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({f"zq{i}": 0 for i in range(20_000)}, "one of too many unknown fields"),
        ({"messages": [0] * 100_000}, "messages[0] is 0, not an object"),
        ({"messages": [{**USER, "content": [0] * 100_000}]}, "content[0] is 0"),
        ({"stop": [0] * 100_000}, "stop[0] is 0, not a text"),
    ],
)
def test_wrong_fields_in_great_number(
    more: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with 250 kB takes seconds to say, in which nobody is answered."""
    compared: list[int] = []
    monkeypatch.setattr(schema, "nearest", lambda *_, **__: compared.append(1))
    body = {**BODIES["chat/completions"], **more}
    with pytest.raises(RequestError, match=re.escape(message)) as refused:
        schema.read(ChatRequest, body, schema.Notes())
    cause = refused.value.__cause__
    assert isinstance(cause, ValidationError)
    assert len(compared) + cause.error_count() < 1000


def test_a_schema_that_fails_late(server: Running) -> None:
    """A fault of the request that is told as one of the server, to be tried again.

    llguidance takes the schema, and gives up when it reaches what is too ambiguous.
    """
    objects = [
        {"type": "object", "properties": {f"k{i}": {"type": "integer"}}}
        for i in range(600)
    ]
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": objects}},
        "required": ["a"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    answer = post(server, "completions", max_tokens=99, guided_json=schema)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("guided_json", "invalid_value")
    assert "give a simpler one" in error["message"]
    answer = post(server, "completions", stream=True, max_tokens=99, guided_json=schema)
    (*_, last) = (line for line in answer.text.splitlines() if line)
    assert json.loads(last.removeprefix("data: "))["error"] == error
    form = {"type": "json_schema", "schema": schema}
    answer = post(server, "messages", max_tokens=99, output_config={"format": form})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (
        "output_config.format: its grammar failed" in answer.json()["error"]["message"]
    )


def test_both_names_of_one_form(server: Running) -> None:
    """guidance sends a grammar under the names of two versions of vLLM."""
    forms = {"grammar": 'start: "ab"', "json": {"const": "ab"}, "choice": ["ab"]}
    for kind, form in forms.items():
        both = {f"guided_{kind}": form, "structured_outputs": {kind: form}}
        answer = post(server, "chat/completions", max_tokens=9, **both)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"].strip('"') == "ab"
        other = {**both, "guided_regex": "ab"}
        assert post(server, "chat/completions", **other).status_code == 400


def test_no_refused_field_is_suggested(server: Running) -> None:
    """A client that follows a suggestion meets the next refusal."""
    answer = post(server, "chat/completions", thinking={"type": "enabled"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-specdec-ignored"] == "thinking"
