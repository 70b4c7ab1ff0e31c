"""Calls of every form: whole, cut, odd, and next to text about markers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from llguidance import LLMatcher

from specdec import Grammar, SpecDecoder
from specdec.prompts import EncodedPrompt
from specdec.server import chat, messages, responses
from specdec.server.config import ServerConfig
from specdec.server.encoding import Encoded
from specdec.server.job import Call, Tools
from specdec.server.parts import Parts
from specdec.server.service import Service
from specdec.server.tool_calls import CallFormat
from tests.models.gguf_files import byte_level, random_model, write_model
from tests.server.harness import (
    TEMPLATE,
    Scripted,
    post,
    running,
    tiny_decoder,
    tokenizer,
)

PROPERTIES = {
    "path": {"type": "string"},
    "content": {"type": "string"},
    "n": {"type": "integer"},
    "o": {"type": "object"},
}
FUNCTION = {
    "name": "write_file",
    "description": "w",
    "parameters": {"type": "object", "properties": PROPERTIES},
}
TOOL: Any = {"type": "function", "function": FUNCTION}
ARGUMENTS = {"path": "a.txt", "content": "hello world", "n": 12}
JSON = json.dumps(ARGUMENTS)
OBJECT = f'{{"name": "write_file", "arguments": {JSON}}}'
SEP = "<\uff5ctool\u2581sep\uff5c>"
ONE, ALL = (
    [f"<\uff5ctool\u2581{what}\u2581{side}\uff5c>" for side in ("begin", "end")]
    for what in ("call", "calls")
)
DEEPSEEK = f"{ALL[0]}{ONE[0]}write_file{SEP}{JSON}{ONE[1]}{ALL[1]}"
R1 = f"{ALL[0]}{ONE[0]}function{SEP}write_file\n```json\n{JSON}\n```{ONE[1]}{ALL[1]}"
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.write_file <|constrain|>json<|message|>{JSON}<|call|>"
)
#: Whole answers by the name of mlx-lm's parser, each with one call.
ANSWERS = {
    "json_tools": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n"
    "</parameter>\n<parameter=content>\nhello world\n</parameter>\n<parameter=n>\n12\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a.txt"
    "</arg_value>\n<arg_key>content</arg_key>\n<arg_value>hello world</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
    "mistral": f"[TOOL_CALLS]write_file[ARGS]{JSON}",
    "pythonic": '<|tool_call_start|>[write_file(path="a.txt", content="hello world", '
    "n=12)]<|tool_call_end|>",
    "function_gemma": "<start_function_call>call:write_file{path:<escape>a.txt<escape>,"
    "content:<escape>hello world<escape>,n:12}<end_function_call>",
    "gemma4": '<|tool_call>call:write_file{path:<|"|>a.txt<|"|>,content:<|"|>hello '
    'world<|"|>,n:12}<tool_call|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="write_file">\n<parameter '
    'name="path">a.txt</parameter>\n<parameter name="content">hello world</parameter>\n'
    '<parameter name="n">12</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "longcat": "<longcat_tool_call>write_file\n"
    "<longcat_arg_key>path</longcat_arg_key>\n<longcat_arg_value>a.txt</longcat_arg_value>\n<longcat_arg_key>content"
    "</longcat_arg_key>\n<longcat_arg_value>hello world</longcat_arg_value>\n"
    "<longcat_arg_key>n</longcat_arg_key>\n<longcat_arg_value>12</longcat_arg_value>\n"
    "</longcat_tool_call>",
    "minicpm5": '<function name="write_file"><param name="path">a.txt</param><param '
    'name="content">hello world</param><param name="n">12</param></function>',
    "muse_spark": 'to=commentary<|message|><atem:function_calls><atem:invoke name='
    '"write_file"><atem:parameter name="path">a.txt</atem:parameter><atem:parameter '
    'name="content">hello world</atem:parameter><atem:parameter name="n">12'
    "</atem:parameter></atem:invoke></atem:function_calls>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="write_file" index="1"<|sep|>'
    f'<|open|>json type="object"<|sep|>{JSON}<|close|>json<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
}  # fmt: skip
#: The same for formats without a parser in mlx-lm: a mark of the template, an answer.
MORE = {
    "llama3": ('<|start_header_id|>{"name": f, "parameters": p}',
               OBJECT.replace("arguments", "parameters")),
    "llama3-tag": ("<|python_tag|>", "<|python_tag|>" + OBJECT),
    "llama4": ("<|header_start|> parameters",
               OBJECT.replace("arguments", "parameters")),
    "deepseek": (ALL[0], DEEPSEEK),
    "deepseek-r1": (ALL[0], R1),
    "phi4": ("<|tool|><|/tool|>", f"<|tool_call|>[{OBJECT}]<|/tool_call|>"),
    "phi4-functools": ("<|tool|><|/tool|>", f"functools[{OBJECT}]"),
    "granite": ("<|tool_call|>", f"<|tool_call|>[{OBJECT}]"),
    "hunyuan": ("<tool_calls>", f"<tool_calls>[{OBJECT}]</tool_calls>"),
    "harmony": ("<|channel|><|message|>functions.", HARMONY),
}  # fmt: skip
FORMS = (*ANSWERS, *MORE)
#: Of which forms the arguments are JSON, so that a beginning of them can be shown.
JSON_FORMS = {"json_tools", "mistral", "kimi_k2", *MORE}


def parts_of(words: Any, text: str, *, cut: bool, size: int = 3) -> list[Any]:
    """What one answer becomes."""
    parts = Parts(0, words, Encoded(EncodedPrompt("", (1,))), Tools([TOOL]))
    made: list[Any] = []
    for i in range(0, len(text), size):
        made += parts.feed(text[i : i + size])
    return made + list(parts.finish(cut=cut))


def words_of(form: str, folder: Path) -> Any:
    if form in MORE:
        template = f"{TEMPLATE}{{# tools {MORE[form][0]} #}}"
        return tokenizer(folder, template, parser=None)
    return tokenizer(folder, parser=form)


def answer_of(form: str) -> str:
    return MORE[form][1] if form in MORE else ANSWERS[form]


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_call_is_never_whole(form: str, tmp_path: Path) -> None:
    """A call whose arguments were cut and passed for whole; a name that was cut.

    The answer is cut at every character. Nothing of it is lost or invented.
    """
    words, text = words_of(form, tmp_path), answer_of(form)
    (whole,) = (p for p in parts_of(words, text, cut=False) if isinstance(p, Call))
    assert (whole.name, json.loads(whole.arguments)) == ("write_file", ARGUMENTS)
    assert not whole.cut
    partial = 0
    for end in range(len(text)):
        written = text[:end]
        parts = parts_of(words, written, cut=True)
        shown = "".join(p.text for p in parts if not isinstance(p, Call))
        calls = [p for p in parts if isinstance(p, Call)]
        for call in calls:
            assert call.name == "write_file", (end, call)
            if call.cut:
                partial += 1
                assert JSON.startswith(call.arguments)
                assert call.arguments
            else:
                assert json.loads(call.arguments) == ARGUMENTS, (end, call)
        if not calls and "channel" not in text and "message" not in text:
            assert shown == written, end
    assert (partial > 20) == (form in JSON_FORMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


def bodies() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    user = [{"role": "user", "content": "hi"}]
    flat = {"type": "function", **FUNCTION}
    named = {"name": "write_file", "input_schema": FUNCTION["parameters"]}
    yield "chat", chat.parse, {"messages": user, "tools": [TOOL]}
    yield "responses", responses.parse, {"input": "hi", "tools": [flat]}
    yield "messages", messages.parse, {
        "model": "tiny", "max_tokens": 99, "messages": user, "tools": [named],
    }  # fmt: skip


Ask = Callable[[str, Any], dict[str, Any]]


def calls_and_end(protocol: str, made: dict[str, Any]) -> tuple[list[Any], str]:
    """Name and arguments of each call of a whole answer, and how it ended."""
    if protocol == "chat":
        (choice,) = made["choices"]
        calls = [c["function"] for c in choice["message"].get("tool_calls") or []]
        return [(c["name"], c["arguments"]) for c in calls], choice["finish_reason"]
    if protocol == "responses":
        items = [i for i in made["output"] if i["type"] == "function_call"]
        return [(i["name"], i["arguments"]) for i in items], made["status"]
    blocks = [b for b in made["content"] if b["type"] == "tool_use"]
    return [(b["name"], json.dumps(b["input"])) for b in blocks], made["stop_reason"]


def streamed(protocol: str, data: bytes) -> tuple[list[Any], str]:
    """The same of a stream."""
    events = [
        json.loads(line[6:])
        for line in data.decode().splitlines()
        if line.startswith("data: {")
    ]
    if protocol == "responses":
        return calls_and_end(protocol, events[-1]["response"])
    calls: list[Any] = []
    end = ""
    for event in events:
        if protocol == "chat":
            (choice,) = event["choices"]
            end = choice["finish_reason"] or end
            for call in choice["delta"].get("tool_calls", ()):
                function = call["function"]
                if "name" in function:
                    calls.append((function["name"], ""))
                calls[-1] = (calls[-1][0], calls[-1][1] + function["arguments"])
        elif event["type"] == "content_block_start":
            block = event["content_block"]
            if block["type"] == "tool_use":
                calls.append((block["name"], ""))
        elif event["type"] == "content_block_delta":
            more = event["delta"].get("partial_json", "")
            if more:
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
        elif event["type"] == "message_delta":
            end = event["delta"]["stop_reason"]
    return calls, end


LIMITS = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}
WHOLE = {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}


@pytest.mark.parametrize("form", FORMS)
def test_the_limit_is_told_in_all_protocols(form: str, folder: Path) -> None:
    """A call, whole or cut, that hides that ``max_tokens`` ended the answer."""
    asyncio.run(_limits(form, folder))


async def _limits(form: str, folder: Path) -> None:
    template, parser = TEMPLATE, None if form in MORE else form
    if form in MORE:
        template = f"{TEMPLATE}{{# tools {MORE[form][0]} #}}"
    decoder: Any = tiny_decoder(folder, template=template, parser=parser)
    scripted = Scripted(decoder, lambda prompt: "")
    stub: Any = scripted
    service = Service(stub, stub, ServerConfig())
    text = answer_of(form)
    for protocol, parse, body in bodies():
        for stream in (False, True):
            rendering = parse({**body, "stream": stream}, service)
            prepared = await service.prepare(rendering.job)
            for end in (*range(0, len(text), 4), len(text)):
                for reason in ("length", "cancelled") if end % 16 == 4 else ("length",):
                    scripted.answer = partial(_beginning, text[:end])
                    scripted.reason, scripted.size = reason, 7
                    rendering = parse({**body, "stream": stream}, service)
                    data = b""
                    async for event in service.events(prepared):
                        assert event is not None
                        rendering.take(event)
                        data += b"".join(rendering.stream(event) if stream else ())
                    if stream:
                        data += b"".join(rendering.end())
                        calls, told = streamed(protocol, data)
                    else:
                        calls, told = calls_and_end(protocol, rendering.whole())
                    assert told == LIMITS[protocol], (protocol, end, calls)
                    for name, arguments in calls:
                        assert name == "write_file"
                        if protocol == "messages":
                            assert json.loads(arguments) == ARGUMENTS
                        else:
                            whole = JSON.startswith(arguments) and arguments
                            assert whole or json.loads(arguments) == ARGUMENTS
            scripted.reason = "stop"
            scripted.answer = lambda _: text
            rendering = parse({**body, "stream": False}, service)
            async for event in service.events(prepared):
                rendering.take(event)
            if not stream:
                calls, told = calls_and_end(protocol, rendering.whole())
                assert [json.loads(a) for _, a in calls] == [ARGUMENTS]
                assert told == WHOLE[protocol]


def _beginning(text: str, prompt: str) -> str:
    return text


def test_a_whole_call_before_a_cut_one(tmp_path: Path) -> None:
    """The second call is lost, or taken for whole, because the first one was."""
    for form, second in (
        ("json_tools", '\n<tool_call>{"name": "write_file", "arguments": {"pa'),
        ("mistral", 'write_file[ARGS]{"pa'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions."
                    'write_file:1<|tool_call_argument_begin|>{"pa'),
    ):  # fmt: skip
        words = words_of(form, tmp_path)
        parts = parts_of(words, answer_of(form) + second, cut=True)
        calls = [part for part in parts if isinstance(part, Call)]
        assert [bool(call.cut) for call in calls] == [False, True]
        assert calls[1].arguments == '{"pa'
        assert [call.index for call in calls] == [0, 1]
    # One section with a whole and a cut call, whose arguments are no JSON.
    text = ANSWERS["minimax_m2"].partition("\n</minimax")[0]
    more = '\n<invoke name="write_file">\n<parameter name="path">b'
    parts = parts_of(words_of("minimax_m2", tmp_path), text + more, cut=True)
    assert [json.loads(p.arguments) for p in parts if isinstance(p, Call)] == [
        ARGUMENTS
    ]
    assert parts[-1].text == more.lstrip()
    for form, inside in (
        ("minimax_m2", "say </invoke>"), ("qwen3_coder", "say </function>"),
    ):  # fmt: skip
        text = ANSWERS[form].partition("hello")[0] + inside
        parts = parts_of(words_of(form, tmp_path), text, cut=True)
        assert "".join(part.text for part in parts) == text


@pytest.mark.parametrize(
    "arguments",
    ['{"content": "\\ud83d"}', '{"n": NaN}', '{"n": 1e999}', "[1]", '"text"', "5",
     '{"o": %s}' % ("[" * 200 + "]" * 200)],
)  # fmt: skip
def test_arguments_that_are_no_json_object(arguments: str, tmp_path: Path) -> None:
    """A 500 that loses the answer, JSON that no client reads, a replay that fails."""
    words = words_of("json_tools", tmp_path)
    text = f'<tool_call>{{"name": "write_file", "arguments": {arguments}}}</tool_call>'
    parts = parts_of(words, text, cut=False)
    assert "".join(part.text for part in parts) == text


def test_arguments_that_python_reads(tmp_path: Path) -> None:
    """Sets, bytes and tuples as keys, which mlx-lm's parsers make of some texts."""
    for value in ("{1, 2}", "b'x'", "{(1, 2): 3}", "[{1}]"):
        text = (
            "<tool_call>\n<function=write_file>\n<parameter=o>\n"
            f"{value}\n</parameter>\n</function>\n</tool_call>"
        )
        parts = parts_of(words_of("qwen3_coder", tmp_path), text, cut=False)
        assert "".join(part.text for part in parts) == text
    words = words_of("json_tools", tmp_path)
    for nothing in ("null", '""', "{}"):
        text = (
            f'<tool_call>{{"name": "write_file", "arguments": {nothing}}}</tool_call>'
        )
        (call,) = parts_of(words, text, cut=False)
        assert call.arguments == "{}"


def test_line_breaks_and_the_byte_alphabet(tmp_path: Path) -> None:
    """JSON with raw line breaks is no call; Devstral's blanks stay ``Ġ``."""
    raw = f"<tool_call>{OBJECT}</tool_call>".replace(JSON, '{"content": "a\nb"}')
    (call,) = parts_of(words_of("json_tools", tmp_path), raw, cut=False)
    assert json.loads(call.arguments) == {"content": "a\nb"}
    words = words_of("mistral", tmp_path)
    devstral = '[TOOL_CALLS]write_fileĠ[ARGS]{"content":Ġ"aĠb"}'
    (call,) = parts_of(words, devstral, cut=False)
    assert json.loads(call.arguments) == {"content": "a b"}
    (call,) = parts_of(words, '[TOOL_CALLS]write_file[ARGS]{"path": "Ġ"}', cut=False)
    assert json.loads(call.arguments) == {"path": "Ġ"}
    text = f"[TOOL_CALLS]write_file[CALL_ID]abcdefgh1[ARGS]{JSON} And text."
    call, after = parts_of(words, text, cut=False)
    assert (call.id, after.text) == ("abcdefgh1", "And text.")


#: The marker that ends a form's calls.
ENDS = {
    "json_tools": "</tool_call>", "qwen3_coder": "</tool_call>",
    "glm47": "</tool_call>", "pythonic": "<|tool_call_end|>",
    "function_gemma": "<end_function_call>", "gemma4": "<tool_call|>",
    "minimax_m2": "</minimax:tool_call>", "longcat": "</longcat_tool_call>",
    "muse_spark": "</atem:function_calls>", "kimi_k3": "<|close|>tools<|sep|>",
    "kimi_k2": "<|tool_calls_section_end|>", "deepseek": ALL[1],
    "minicpm5": "</function>", "llama4": "<|python_end|>",
    "phi4": "<|/tool_call|>", "hunyuan": "</tool_calls>",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_marks_within_values(form: str, tmp_path: Path) -> None:
    """A value ends at a marker in it, and its call is delivered without the rest."""
    words = words_of(form, tmp_path)
    for value in (
        f"say {ENDS.get(form, '')} now",
        "a } b) ] c",
        "<p> \u2028 \U0001f600",
        *(["<![CDATA[a] ]> b"] if form != "minicpm5" else []),
    ):
        text = answer_of(form).replace("hello world", value)
        for size in (1, 4, 1000):
            parts = parts_of(words, text, cut=False, size=size)
            (call,) = (part for part in parts if isinstance(part, Call))
            assert json.loads(call.arguments) == {**ARGUMENTS, "content": value}


@pytest.mark.parametrize(
    "value",
    ["say </function> now", "<a></param></a>", "</param></function>", "a & b\n <c/>",
     '<param name="n">3</param>', "]] > ]>", "\ufdd0", "", "<![CDATA["],
)  # fmt: skip
def test_values_in_cdata(value: str, tmp_path: Path) -> None:
    """A value that ends at a mark in it, or whose call is shown as text.

    The template asks for CDATA around values that have marks or line breaks.
    """
    words = words_of("minicpm5", tmp_path)
    one = ANSWERS["minicpm5"].replace("hello world", f"<![CDATA[{value}]]>")
    text = one + "\n" + one
    for size in (1, 5, 1000):
        parts = parts_of(words, text, cut=False, size=size)
        assert all(isinstance(part, Call) for part in parts), parts
        expected = {**ARGUMENTS, "content": value}
        assert [json.loads(part.arguments) for part in parts] == [expected] * 2
    for end in range(len(one)):
        parts = parts_of(words, one[:end], cut=True)
        assert "".join(part.text for part in parts) == one[:end]


def _with(form: str, value: str, instead_of: str = "hello world") -> tuple[str, str]:
    return form, ANSWERS[form].replace(instead_of, value)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        # What a parser would read only in part.
        _with("qwen3_coder", "use </parameter> here"),
        _with("qwen3_coder", "", "\n</parameter>\n<parameter=n>\n12\n</parameter>"),
        _with("minimax_m2", "say </invoke> x"),
        _with("minimax_m2", "say </parameter> x"),
        _with("minicpm5", "<![CDATA[<a>"),
        _with("minicpm5", "<![CDATA[a]]> b"),
        _with("minicpm5", "say </param> x"),
        _with("muse_spark", "</atem:parameter>"),
        _with("glm47", "a</arg_value>b"),
        _with("glm47", "", "<arg_value>12</arg_value>"),
        _with("longcat", "", "</longcat_arg_value>\n</longcat_tool_call>"),
        # What a parser would guess at.
        _with("pythonic", "", '", n=12'),
        _with("pythonic", '"a.txt"', 'path="a.txt"'),
        _with("pythonic", '"a.txt"', '"a.txt",'),
        _with("pythonic", "n=1+2", "n=12"),
        _with("function_gemma", "o:{a:1", "n:12"),
    ],
)  # fmt: skip
def test_a_call_is_read_whole_or_not_at_all(
    form: str, text: str, tmp_path: Path
) -> None:
    """A call without some of its arguments, or with arguments that nobody wrote."""
    parts = parts_of(words_of(form, tmp_path), text + "\nend", cut=False)
    assert "".join(part.text for part in parts) == text + "\nend"


def test_several_calls(tmp_path: Path) -> None:
    """Calls after the first are shown as text, or their arguments are merged."""
    one, two = '{"path": "a"}', '{"path": "b"}'
    first, second = (f'{{"name": "write_file", "arguments": {a}}}' for a in (one, two))
    function = (
        "\n<function=write_file>\n<parameter=path>\n{}\n</parameter>\n</function>\n"
    )
    for form, text in (
        ("mistral", f"[TOOL_CALLS]write_file[ARGS]{one}"
         f"[TOOL_CALLS]write_file[ARGS]{two}"),
        ("mistral", f"[TOOL_CALLS][{first}, {second}]"),
        ("granite", f"<|tool_call|>[{first}]\n<|tool_call|>[{second}]"),
        ("llama3-tag", f"<|python_tag|>{first}; <|python_tag|>{second}"),
        ("qwen3_coder",
         f"<tool_call>{function.format('a')}{function.format('b')}</tool_call>"),
        ("pythonic", "<|tool_call_start|>[write_file(path='a'), write_file(path=\"b\")]"
         "<|tool_call_end|>"),
    ):  # fmt: skip
        parts = parts_of(words_of(form, tmp_path), text, cut=False)
        assert all(isinstance(part, Call) for part in parts), parts
        assert [json.loads(call.arguments)["path"] for call in parts] == ["a", "b"]
    # Texts and values of Python and Gemma.
    for form, text, arguments in (
        ("pythonic", '[write_file(content="say \\"x, n=2\\"\nb", o={"a": true})]',
         {"content": 'say "x, n=2"\nb', "o": {"a": True}}),
        ("function_gemma", "call:write_file{o:{a:1,b:{c:<escape>}<escape>}},n:2}",
         {"o": {"a": 1, "b": {"c": "}"}}, "n": 2}),
    ):  # fmt: skip
        words = words_of(form, tmp_path)
        text = words.tool_call_start + text + words.tool_call_end
        (call,) = parts_of(words, text, cut=False)
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("form", ["pythonic", "gemma4", "function_gemma"])
def test_a_name_with_hyphens(form: str, tmp_path: Path) -> None:
    """Python reads a minus, and the call of a tool of most MCP servers is text."""
    text = answer_of(form).replace("write_file", "mcp-server__write-file")
    text = text.replace("hello world", "a-b(c-d) -e(")
    (call,) = parts_of(words_of(form, tmp_path), text, cut=False)
    assert call.name == "mcp-server__write-file"
    assert json.loads(call.arguments)["content"] == "a-b(c-d) -e("


def test_a_tool_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Agents can answer a call of an unknown tool; they cannot answer its absence."""
    text = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    (call,) = parts_of(words_of("json_tools", tmp_path), text, cut=False)
    assert call.name == "other"
    assert "'other', which is no tool" in caplog.text
    for text in ("<tool_call>hello there you</tool_call>", "<tool_call></tool_call>"):
        parts = parts_of(words_of("glm47", tmp_path), text, cut=False)
        assert "".join(part.text for part in parts) == text


def split(made: list[Any]) -> tuple[str, str]:
    return tuple(  # type: ignore[return-value]
        "".join(p.text for p in made if not isinstance(p, Call) and p.kind == kind)
        for kind in ("reasoning", "text")
    )


@pytest.mark.parametrize(
    ("text", "thoughts", "shown"),
    [
        ("Use `<think>` to open and `</think>` to close. Done.", "",
         "Use `<think>` to open and `</think>` to close. Done."),
        ("Models write <think> before they answer.", "",
         "Models write <think> before they answer."),
        ("Models write <tool_call> before JSON.", "",
         "Models write <tool_call> before JSON."),
        ("<think>I could use <tool_call> here, but no need.</think>Answer",
         "I could use <tool_call> here, but no need.", "Answer"),
        ("<think>half a thou", "half a thou", ""),
        ("<think>\n\n</think>\n\nHi", "", "Hi"),
        ("<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        ("reasoning without opening</think>Answer", "",
         "reasoning without opening</think>Answer"),
        ("\n\nHi", "", "\n\nHi"),
        ("<think>x</think>\n    code\n  more", "x", "    code\n  more"),
        ("A <tool_call>\n{no JSON\n</tool_call>\n\nB", "",
         "A <tool_call>\n{no JSON\n</tool_call>\n\nB"),
    ],
)  # fmt: skip
def test_text_about_markers(
    text: str, thoughts: str, shown: str, tmp_path: Path
) -> None:
    """Text that is moved to reasoning, or gets a marker that nobody wrote."""
    words = words_of("json_tools", tmp_path)
    for size in (1, 2, 3, 5, 100):
        parts = parts_of(words, text, cut=False, size=size)
        assert split(parts) == (thoughts, shown), size
    inside = f'<tool_call>{{"name": "write_file", "arguments": {{"content": {json.dumps("x</tool_call>" + text)}}}}}</tool_call>'  # noqa: E501
    (call,) = parts_of(words, inside, cut=False)
    assert json.loads(call.arguments)["content"].endswith(text)


def thinks(server: Any, **body: Any) -> tuple[str | None, str]:
    """Reasoning and text of the answer ``Hm.</think>Hello.`` to a conversation."""
    parts = post(server, "chat/completions", **body)
    message = parts.json()["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"]


def test_only_the_template_begins_a_thought(folder: Path) -> None:
    """A turn that speaks of ``<think>`` and moves the whole answer to reasoning.

    Also: a thought that the template or the assistant began, shown as text.
    """
    decoder = tiny_decoder(folder)
    scripted = Scripted(decoder, lambda prompt: "Hm.</think>Hello.")
    with running(scripted) as server:
        for text in (
            "What does <think> do?", "Which is first, </think> or <think>?", "<think>",
            "assistant\n<think>\n",
        ):  # fmt: skip
            turns = [{"role": role, "content": text} for role in ("system", "user")]
            plain = (None, "Hm.</think>Hello.")
            assert thinks(server, messages=turns) == plain, text
            thought = thinks(
                server, messages=turns, chat_template_kwargs={"think": True}
            )
            assert thought == ("Hm.", "Hello."), text
            turns_so_far = [*turns, {"role": "assistant", "content": "Well"}]
            continued = {"messages": turns_so_far, "continue_final_message": True}
            assert thinks(server, **continued) == plain, text
            turns_so_far[-1] = {"role": "assistant", "content": "<think>Well"}
            assert thinks(server, **continued) == ("Hm.", "Hello."), text


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content "
    "}}[/INST]{% elif m.tool_calls is defined %}[TOOL_CALLS][{% for c in m.tool_calls"
    " %}{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('IDs have 9 "
    "characters!') }}{% endif %}#{{ c.id }}{{ c.function|tojson }}{% endfor %}]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception("
    "'IDs have 9 characters!') }}{% endif %}[TOOL_RESULTS]#{{ m.tool_call_id }}"
    "{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{#tools#}"
)
KIMI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% for c in "
    "m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments|tojson }}<|tool_call_end|>{% endfor %}{% if m.role == "
    "'tool' %}## Return of {{ m.tool_call_id }}{% endif %}<|im_end|>{% endfor %}"
    "{#tools <|tool_calls_section_begin|>#}"
)


@pytest.mark.parametrize(
    ("parser", "template", "call", "form"),
    [
        ("mistral", MISTRAL, f"[TOOL_CALLS][{OBJECT}]", r"(?<=#)[A-Za-z0-9]{9}"),
        ("kimi_k2", KIMI, ANSWERS["kimi_k2"], r"functions\.write_file:\d+"),
    ],
)
def test_ids_fit_the_template(
    parser: str, template: str, call: str, form: str, folder: Path
) -> None:
    """A second turn that the template refuses, or from which the name is lost."""
    decoder = tiny_decoder(folder, template=template, parser=parser)
    scripted = Scripted(decoder, lambda p: "done" if "ok" in p else call)
    with (
        running(scripted) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
    ):
        create: Any = client.chat.completions.create
        turns: list[Any] = [{"role": "user", "content": "q"}]
        message = create(model="tiny", messages=turns, tools=[TOOL]).choices[0].message
        (parts,) = message.tool_calls
        assert re.search(form, f"#{parts.id}")
        result = {"role": "tool", "tool_call_id": parts.id, "content": "ok"}
        turns += [message.model_dump(exclude_none=True), result]
        done = create(model="tiny", messages=turns, tools=[TOOL]).choices[0].message
        assert done.content == "done"
        # A history from elsewhere: the same ids every time, and a different one each.
        text = json.dumps(turns)
        foreign = json.loads(text.replace(parts.id, "call_0f3a"))
        other = json.loads(text.replace(parts.id, "call_77bc"))
        prompts = []
        for _ in range(2):
            create(model="tiny", messages=[*foreign, *other], tools=[TOOL])
            prompts.append(scripted.prompts[-1])
        assert prompts[0] == prompts[1]
        ids = re.findall(form, prompts[0])
        assert len(set(ids)) == 2
        assert all(ids.count(each) == 2 for each in set(ids))


def test_ids_fit_the_template_in_all_protocols(folder: Path) -> None:
    """Results in another order than their calls, and ids of Anthropic's or OpenAI's."""
    call = f"[TOOL_CALLS][{OBJECT}, {OBJECT}]"
    decoder = tiny_decoder(folder, template=MISTRAL, parser="mistral")
    scripted = Scripted(decoder, lambda p: "done" if "ok" in p else call)
    ask = {"role": "user", "content": "q"}
    used = [{"name": "write_file", "input_schema": FUNCTION["parameters"]}]
    functions = [{"type": "function", **FUNCTION}]

    def check(path: str, body: dict[str, Any], ids: list[str], other: str) -> None:
        assert len(set(ids)) == 2
        text = json.dumps(body)
        for first, second in (ids, [f"{other}_1", f"{other}_2"]):
            sent = json.loads(text.replace(ids[0], first).replace(ids[1], second))
            assert post(server, path, **sent).status_code == 200
            one, two, *results = re.findall(
                r"(?<=#)[A-Za-z0-9]{9}", scripted.prompts[-1]
            )
            assert one != two
            assert results == [two, one]

    with running(scripted) as server:
        common = {"max_tokens": 99, "tools": used}
        said = post(server, "messages", messages=[ask], **common).json()["content"]
        ids = [block["id"] for block in said]
        results = [
            {"type": "tool_result", "tool_use_id": each, "content": "ok"}
            for each in reversed(ids)
        ]
        turns = [ask, {"role": "assistant", "content": said},
                 {"role": "user", "content": results}]  # fmt: skip
        check("messages", {"messages": turns, **common}, ids, "toolu_01A09q90qw")
        common = {"max_output_tokens": 999, "tools": functions}
        items = post(server, "responses", input=[ask], **common).json()["output"]
        ids = [item["call_id"] for item in items]
        outputs = [
            {"type": "function_call_output", "call_id": each, "output": "ok"}
            for each in reversed(ids)
        ]
        body = {"input": [ask, *items, *outputs], **common}
        check("responses", body, ids, "call_" + "x" * 60)


@pytest.mark.parametrize(
    ("template", "answer", "form"),
    [
        (f"{TEMPLATE}{{# <tool_call> #}}", ANSWERS["json_tools"], "call_"),
        (MISTRAL, f"[TOOL_CALLS][{OBJECT}]", "[A-Za-z0-9]{9}$"),
        (KIMI, ANSWERS["kimi_k2"], r"functions\.write_file:0"),
    ],
)
def test_tools_of_a_gguf_target(
    template: str, answer: str, form: str, folder: Path
) -> None:
    """mlx-lm infers no parser for it, and its tools were refused."""
    words = byte_level(**{"tokenizer.chat_template": template})
    file = folder / "target.gguf"
    write_model(file, "llama", random_model("llama"), vocabulary=words)
    decoder = SpecDecoder.from_pretrained(str(file))
    with running(Scripted(decoder, lambda p: answer)) as server:
        for choice in ("auto", "required"):
            turns = [{"role": "user", "content": "q"}]
            parts = post(server, "chat/completions", messages=turns, tools=[TOOL],
                        tool_choice=choice, max_tokens=99)  # fmt: skip
            assert parts.status_code == 200, parts.text
            (said,) = parts.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(said["function"]["arguments"]) == ARGUMENTS
            assert re.match(form, said["id"])


def test_templates_that_read_other_names(folder: Path) -> None:
    """Phi-4's shows tools of a system turn; gpt-oss' calls thoughts thinking."""
    phi = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% if m.tools %}<|tool|>"
        "{{ m.tools }}<|/tool|>{% endif %}{% endfor %}"
    )
    oss = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>{{ m.thinking }}"
        "<|message|>{{ m.content }}{% for c in m.tool_calls or [] %} functions."
        "{{ c.function.name }}{% endfor %}{% endfor %}{# tools #}"
    )
    turns: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "THOUGHT",
         "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]  # fmt: skip
    for template, shown in ((phi, '<|tool|>[{"name": "write_file"'), (oss, "THOUGHT")):
        scripted = Scripted(
            tiny_decoder(folder, template=template, parser=None), lambda p: "x"
        )
        with running(scripted) as server:
            parts = post(server, "chat/completions", messages=turns, tools=[TOOL])
            assert parts.status_code == 200, parts.text
            assert "x-specdec-note" not in parts.headers
        assert shown in scripted.prompts[-1]


@pytest.mark.parametrize(
    "form", ["json_tools", "mistral", "kimi_k2", "llama3", "llama4", "phi4", "granite",
             "hunyuan"],
)  # fmt: skip
def test_strict_calls_of_every_json_form(form: str, tmp_path: Path) -> None:
    """A grammar that refuses the model's own form, or lets wrong arguments through."""
    from specdec.grammar.library import tokenizer_of
    from specdec.grammar.library import words_of as library_words
    from specdec.server.schema import Notes
    from specdec.server.tool_grammar import call_grammar

    words = words_of(form, tmp_path)
    library = tokenizer_of(library_words(words, 320))
    strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
    text = answer_of(form)
    for answer in (None, Grammar.regex("yes|no")):
        parts = call_grammar(words, Tools([strict]), answer, "x", Notes()).grammar
        assert parts is not None

        def takes(said: str, text: str = parts.text) -> bool:
            matcher = LLMatcher(library, text)
            assert not matcher.get_error()
            tokens = words.encode(said, add_special_tokens=False)
            return matcher.validate_tokens(tokens) == len(tokens)

        assert takes(text)
        assert not takes(text.replace("12", '"twelve"'))
        assert not takes(text.replace("write_file", "other"))
        assert takes("yes")
        assert takes("Well, then.") == (answer is None)


def test_ids_of_different_calls_stay_different() -> None:
    """An answer is read as that of another call: one's new id is another's own."""
    calls = [
        {"id": id_, "function": {"name": "f"}}
        for id_ in ("functions.f:1", "x", "functions.f:2", "x")
    ]
    kimi = CallFormat("kimi_k2", "", ids="numbered")
    (fitted,) = kimi.fit_ids([{"role": "assistant", "tool_calls": calls}])
    one, two, three, again = (call["id"] for call in fitted["tool_calls"])
    assert one == "functions.f:1"
    assert len({one, two, three}) == 3
    assert again == two
    assert all(kimi.valid_id(each) for each in (one, two, three))
