"""Prompts of every form become token ids; what cannot be used is named."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.errors import ConfigError, PromptError, PromptFileError
from specdec.prompts import (
    PromptRecord,
    encode,
    encode_all,
    read_prompts,
    read_records,
    read_text,
)

if TYPE_CHECKING:
    from specdec.models import LoadedModel
from specdec.models.tokenizer import set_chat_template


class FakeTokenizer:
    """One id per character; BOS is id 0, written ``^`` by the template."""

    bos_token: str | None = "^"

    def __init__(self, *, template: bool = True) -> None:
        self.has_chat_template = template

    def __len__(self) -> int:
        return 128

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [0 if char == "^" else ord(char) for char in text]
        return [0, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("^" if i == 0 else chr(i) for i in ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        if messages[-1]["role"] == "robot":
            raise ValueError("only user and\nassistant roles")
        return "^" + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<a>"


USER = {"role": "user", "content": "Hi"}


def test_a_string_is_a_user_turn() -> None:
    """The text stays the caller's; the template's BOS is not doubled."""
    tokenizer = FakeTokenizer()
    encoded = encode(tokenizer, "Hi")
    assert encoded.text == "Hi"
    assert tokenizer.decode(encoded.token_ids) == "^<user>Hi<a>"


@pytest.mark.parametrize(
    ("template", "options"), [(False, {}), (True, {"ignore_chat_template": True})]
)
@pytest.mark.parametrize("text", ["Hi", "^Hi"])
def test_a_raw_string_has_one_bos(
    template: bool, options: dict[str, Any], text: str
) -> None:
    tokenizer = FakeTokenizer(template=template)
    encoded = encode(tokenizer, text, **options)
    assert encoded.text == text
    assert tokenizer.decode(encoded.token_ids) == "^Hi"


def test_a_tokenizer_without_bos_gets_its_special_tokens() -> None:
    tokenizer = FakeTokenizer(template=False)
    tokenizer.bos_token = None
    assert encode(tokenizer, "^Hi").token_ids == (0, 0, ord("H"), ord("i"))


def test_messages_go_through_the_template() -> None:
    tokenizer = FakeTokenizer()
    encoded = encode(tokenizer, [USER, {"role": "assistant", "content": "Yo"}, USER])
    assert encoded.text == "^<user>Hi<assistant>Yo<user>Hi<a>"
    assert tokenizer.decode(encoded.token_ids) == encoded.text


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_that_calls_tools_has_an_empty_text(content: dict[str, Any]) -> None:
    """Catches templates that join texts, and refuse None or a text that is missing."""
    calls: dict[str, Any] = {"role": "assistant", "tool_calls": [{"function": {}}]}
    encoded = encode(FakeTokenizer(), [USER, {**calls, **content}, USER])
    assert encoded.text == "^<user>Hi<assistant><user>Hi<a>"


def test_a_system_prompt_is_for_prompts_that_have_none() -> None:
    tokenizer = FakeTokenizer()
    own = [{"role": "system", "content": "own"}, USER]
    texts = [
        tokenizer.decode(encode(tokenizer, prompt, system_prompt="S").token_ids)
        for prompt in ("Hi", [USER], own)
    ]
    assert texts == [
        "^<system>S<user>Hi<a>",
        "^<system>S<user>Hi<a>",
        "^<system>own<user>Hi<a>",
    ]


@pytest.mark.parametrize("ids", [[5, 127, 0], (5,), range(3)])
def test_token_ids_are_taken_as_they_are(ids: Sequence[int]) -> None:
    encoded = encode(FakeTokenizer(), ids)
    assert encoded.token_ids == tuple(ids)
    assert encoded.text == FakeTokenizer().decode(ids)


def test_a_tokenizer_of_transformers_says_by_its_template() -> None:
    """It has ``chat_template``, and no ``has_chat_template``."""
    fake = FakeTokenizer()
    plain = SimpleNamespace(
        chat_template=None, bos_token=fake.bos_token, encode=fake.encode
    )
    assert fake.decode(encode(plain, "Hi").token_ids) == "^Hi"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ([], "it is empty"),
        ("a\ud800", "character 1 is half of a surrogate pair"),
        ([128], "a token id is a whole number from 0 to 127, not 128"),
        ([3, -1], "not -1"),
        ([3, 1.0], "not 1.0"),
        ([True], "not True"),
        (["Hi"], "not 'Hi'"),
        (5, "expected a string, a list of chat messages or a list of token ids"),
        (None, "not NoneType"),
        (USER, "not dict: pass [message]"),
        (b"Hi", "not bytes"),
        ([USER, "Hi"], "a chat message is"),
        ([{"role": "user"}], "a chat message is"),
        ([{"role": "user", "content": None}], "a chat message is"),
        ([{"content": "Hi"}], "a chat message is"),
        ([{"role": "user", "content": " "}], "it is empty"),
        (
            [{"role": "robot", "content": "Hi"}],
            "the chat template refuses these messages: only user and assistant roles",
        ),
    ],
)
def test_prompts_that_cannot_be_used(prompt: Any, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        encode_all(FakeTokenizer(), ["fine", prompt])
    assert str(caught.value).startswith("prompt 1: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "prompt", "options", "message"),
    [
        (False, [USER], {}, "this tokenizer has none"),
        (True, [USER], {"ignore_chat_template": True}, "it is ignored"),
        (False, "Hi", {"system_prompt": "S"}, "a system prompt needs a chat template"),
        (
            True,
            "Hi",
            {"system_prompt": "S", "ignore_chat_template": True},
            "do not ignore the template",
        ),
        (True, [5], {"system_prompt": "S"}, "cannot be added to token ids"),
    ],
)
def test_no_option_is_dropped_silently(
    template: bool, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        encode(FakeTokenizer(template=template), prompt, **options)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("Hi", "prompts is of type str: pass a list of prompts, [prompt]"),
        (b"Hi", "prompts is of type bytes: pass a list of prompts, [prompt]"),
        (USER, "prompts is of type dict: pass a list of prompts, [[message]]"),
        (None, "prompts is of type NoneType: pass a list of prompts, [prompt]"),
        (5, "prompts is of type int: pass a list of prompts, [prompt]"),
        ([USER], "prompt 0: expected a string, a list of chat messages or"),
        ([5], "prompt 0: expected a string, a list of chat messages or"),
    ],
)
def test_one_prompt_is_not_a_list_of_prompts(prompts: Any, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        encode_all(FakeTokenizer(), prompts)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_prompts_come_in_any_iterable() -> None:
    encoded = encode_all(FakeTokenizer(), (text for text in ("a", "b")))
    assert [e.text for e in encoded] == ["a", "b"]


def test_smollm2_gets_the_tokens_that_mlx_lm_gives_it(smollm2: LoadedModel) -> None:
    """Template on and off, against mlx-lm's own steps for the same prompt."""
    tokenizer = smollm2.tokenizer
    messages = [{"role": "user", "content": "What is 6 x 7?"}]
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer.encode(rendered, add_special_tokens=False)
    assert encode(tokenizer, "What is 6 x 7?").token_ids == tuple(expected)
    assert encode(tokenizer, messages).token_ids == tuple(expected)
    assert encode(tokenizer, expected).token_ids == tuple(expected)
    raw = encode(tokenizer, "What is 6 x 7?", ignore_chat_template=True)
    assert raw.token_ids == tuple(tokenizer.encode("What is 6 x 7?"))


def test_templates_get_their_configuration_and_the_beginning_of_the_answer(
    smollm2: LoadedModel,
) -> None:
    """Against mlx-lm's own steps: one is dropped, or the answer's turn is closed."""
    tokenizer = smollm2.tokenizer
    own = tokenizer.chat_template
    turns = [
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": "The river"},
    ]
    begun = tokenizer.apply_chat_template(
        turns, tokenize=False, continue_final_message=True
    )
    assert begun.endswith("The river")
    expected = tuple(tokenizer.encode(begun, add_special_tokens=False))
    for prompt in ("Name a river.", turns[:1]):
        found = encode(tokenizer, prompt, prefill_response="The river")
        assert found.token_ids == expected
    try:
        set_chat_template(tokenizer, "{{ think }}|{{ messages[0].content }}")
        found = encode(tokenizer, "Hi", chat_template_config={"think": "no"})
        assert found.token_ids == tuple(
            tokenizer.encode("no|Hi", add_special_tokens=False)
        )
    finally:
        tokenizer.chat_template = own
    config: Any
    for config in ({"messages": []}, [], {5: 1}):
        with pytest.raises(PromptError, match="holds variables of the chat template"):
            encode(tokenizer, "Hi", chat_template_config=config)
    with pytest.raises(
        PromptError, match="a prefilled response cannot be added to tok"
    ):
        encode(tokenizer, [5, 6], prefill_response="x")
    with pytest.raises(PromptError, match="a prefilled response needs a chat template"):
        encode(FakeTokenizer(template=False), "Hi", prefill_response="x")
    with pytest.raises(ConfigError, match="chat_template is empty"):
        set_chat_template(tokenizer, " ")


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes, name: str = "prompts.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("one\ntwo", ["one", "two"]),
        ("\none\n\n  \ntwo\n", ["one", "two"]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("one\rtwo\r\rthree\r", ["one", "two", "three"]),
        ("one\rtwo\r\nthree\nfour", ["one", "two", "three", "four"]),
        ("\ufeffone\n", ["one"]),
        ("  indented\n", ["  indented"]),
        ("{not json}\n", ["{not json}"]),
        ('"quoted"\n', ['"quoted"']),
        ("5\n", ["5"]),
        ('one\n{"answer": 42}\n', ["one", '{"answer": 42}']),
        ('one\n["prompt"]\n', ["one", '["prompt"]']),
        ('one\n{"prompt": \n', ["one", '{"prompt": ']),
        ("a\u2028b\n", ["a\u2028b"]),
    ],
)
def test_text_lines(write: Write, content: str, prompts: list[str]) -> None:
    assert read_prompts(write(content)) == prompts


@pytest.mark.parametrize("key", ["prompt", "question", "messages", "turns"])
def test_a_json_line_after_plain_text_is_refused(write: Write, key: str) -> None:
    """It would be decoded as text, braces and all."""
    path = write(f"# my prompts\n\n  {json.dumps({'id': 1, key: 'a'})}\nthree\n")
    with pytest.raises(PromptError) as caught:
        read_prompts(path)
    assert str(caught.value) == (
        f"{path}:3: a JSON line in a file that began as plain text: "
        "make every line JSON, or none"
    )


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.JSONL", "prompts.txt"])
def test_json_lines_are_known_by_suffix_and_by_content(write: Write, name: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "one\nline", "question": "not this"},
        {"question": "two", "answer": "2"},
        {"messages": [USER]},
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"prompt": "a\u2028b"},
    ]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert read_prompts(write(text, name)) == [
        "one\nline",
        "two",
        [USER],
        "first",
        "a\u2028b",
    ]


def test_an_array_of_prompts(write: Write) -> None:
    """The commonest file that is not JSON Lines; text may begin with a bracket."""
    path = write('\n[\n "a",\n {"id": 7, "question": "b"}]\n', "prompts.json")
    assert read_records(path) == [
        PromptRecord("a", f"{path}[0]"),
        PromptRecord("b", f"{path}[1]", 7),
    ]
    assert read_prompts(write('[{"prompt": "a"},\n{"prompt": "b"}]')) == ["a", "b"]
    for text in ("[INST] Hi", '["a"]', "[5]"):
        assert read_prompts(write(text)) == [text]


def test_lines_of_a_batch_of_openai(write: Write) -> None:
    """Their request stands in ``body``; content may come in parts."""
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    body = {"model": "m", "messages": [message], "max_tokens": 5, "seed": 1}
    row: dict[str, Any] = {
        "custom_id": "r-1",
        "method": "POST",
        "url": "/v1/chat/completions",
    }
    path = write(json.dumps({**row, "body": body}), "batch.jsonl")
    (record,) = read_records(path)
    assert record == PromptRecord(
        [{"role": "user", "content": "one two"}], f"{path}:1", "r-1"
    )
    assert record.fields == {"model": "m", "max_tokens": 5, "seed": 1}
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "user", "content": image}]
    (record,) = read_records(write(json.dumps({"messages": messages}), "images.jsonl"))
    assert record.prompt == messages
    messages = [{"role": "user", "content": [{"type": "input_audio"}]}]
    with pytest.raises(PromptFileError, match="sounds are not supported"):
        read_records(write(json.dumps({"messages": messages}), "sounds.jsonl"))


def test_where_prompts_stand_and_what_they_are_called(write: Write) -> None:
    text = write("\none\n\ntwo\n", "prompts.txt")
    assert read_records(text) == [
        PromptRecord("one", f"{text}:2"),
        PromptRecord("two", f"{text}:4"),
    ]
    rows: list[dict[str, Any]] = [
        {"id": 0, "task_id": "not this", "prompt": "a"},
        {"task_id": "t", "question_id": 5, "question": "b"},
        {"id": None, "question_id": 5, "turns": ["c"]},
    ]
    lines = write("\n\n".join(map(json.dumps, rows)), "prompts.jsonl")
    assert read_records(lines) == [
        PromptRecord("a", f"{lines}:1", 0),
        PromptRecord("b", f"{lines}:3", "t"),
        PromptRecord("c", f"{lines}:5", 5),
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text().filter(lambda text: text.strip()), min_size=1))
def test_any_text_survives_json_lines(write: Write, texts: list[str]) -> None:
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    assert read_prompts(write(lines)) == texts


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "empty.txt", "empty.txt: no prompts in it: give one on each line"),
        (" \n\n", "blank.jsonl", "blank.jsonl: no prompts in it"),
        ("Hi\n", "text.jsonl", "text.jsonl:1: not JSON (Expecting value"),
        ('{"prompt": "a"}\nHi\n', "mixed.txt", "mixed.txt:2: not JSON"),
        ('[\n {"prompt": "a"},\n', "array.json", "array.json: not JSON (Expecting"),
        ('[{"prompt": "a"}', "array.json", "one object per line (JSON Lines)"),
        ('["a", {"text": "b"}]', "array.json", "array.json[1]: expected one object"),
        ('["a", 5]', "array.json", "array.json[1]: expected one object per line"),
        ("[]", "array.json", "array.json: no prompts in it: the array is empty"),
        ('{\n "prompt": "a"\n}\n', "pretty.json", "pretty.json:1: not JSON"),
        ("[" * 200_000, "deep.jsonl", "deep.jsonl:1: it is nested too deep"),
        ('{\n "prompt": "a"\n}\n', "p.json", "one object per line (JSON Lines)"),
        ('\n{"text": "a"}\n', "a.jsonl", "a.jsonl:2: expected one object per line"),
        ('\n{"text": "a"}\n', "a.jsonl", ' with one of "prompt", "question", "mess'),
        ('["a"]\n', "a.jsonl", "a.jsonl:1: expected one object per line"),
        ('{"prompt": 5}\n', "a.jsonl", 'a.jsonl:1: "prompt": expected a string'),
        ('{"prompt": ""}\n', "a.jsonl", 'a.jsonl:1: "prompt": it is empty'),
        ('{"question": null}\n', "a.jsonl", '"question": expected a string'),
        ('{"prompt": "\\ud800"}\n', "a.jsonl", "half of a surrogate pair"),
        ('{"turns": []}\n', "a.jsonl", '"turns": expected a list of strings'),
        ('{"turns": "Hi"}\n', "a.jsonl", '"turns": expected a list of strings'),
        ('{"messages": []}\n', "a.jsonl", '"messages": expected a list of chat'),
        ('{"messages": ["Hi"]}\n', "a.jsonl", '"messages": a chat message is'),
        (b"caf\xe9\n", "latin.txt", "latin.txt:1: not UTF-8 text (byte 0xe9)"),
        (b"ok\n\xff\xfeh\x00", "utf16.txt", "utf16.txt:2: not UTF-8 text"),
        (b"ok\rok\r\ncaf\xe9\r", "cr.txt", "cr.txt:3: not UTF-8 text (byte 0xe9)"),
    ],
)
def test_files_that_cannot_be_used(
    write: Write, content: str | bytes, name: str, message: str
) -> None:
    path = write(content, name)
    with pytest.raises(PromptFileError) as caught:
        read_prompts(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="no such file: check the path"):
        read_prompts(tmp_path / "missing.txt")
    with pytest.raises(PromptFileError, match="is a folder: name a file in it"):
        read_prompts(tmp_path)


def test_unreadable_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("specdec.prompts.files.read_plain", refuse)
    with pytest.raises(PromptFileError, match="cannot be read: Permission denied"):
        read_prompts(write("Hi\n"))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    give('{"prompt": "café"}\n'.encode())
    assert read_prompts("-") == ["café"]
    give(b"")
    with pytest.raises(PromptFileError, match="standard input: no prompts in it"):
        read_prompts("-")
    give(b"\xff")
    with pytest.raises(PromptFileError, match="standard input:1: not UTF-8"):
        read_prompts("-")


@pytest.mark.parametrize("half", ["\ud800", "a\udfffb"])
def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(half: str) -> None:
    """The tokenizer raises a TypeError that says nothing of it."""
    refused = "half of a surrogate pair"
    tokenizer = FakeTokenizer(template=True)
    with pytest.raises(PromptError, match=f"the system prompt: character .* {refused}"):
        encode(tokenizer, "Hi", system_prompt=half)
    for message in ({**USER, "role": half}, {**USER, "content": half}):
        with pytest.raises(PromptError, match=refused):
            encode(tokenizer, [message])
    tokenizer.apply_chat_template = lambda *_, **__: half  # type: ignore[method-assign]
    with pytest.raises(PromptError, match=refused):
        encode(tokenizer, [USER])


class BrokenTokenizer:
    """What a tokenizer_config.json with a text for a number makes of a tokenizer."""

    bos_token = None
    chat_template = None
    has_chat_template = False

    def encode(self, text: str, **options: Any) -> list[int]:
        raise TypeError("'>' not supported between instances of 'int' and 'str'")


def test_a_tokenizer_that_fails_ends_in_a_sentence() -> None:
    with pytest.raises(PromptError, match=r"the tokenizer fails \(TypeError: '>' not"):
        encode(BrokenTokenizer(), "Hi", ignore_chat_template=True)


def test_a_named_pipe_is_no_file_of_prompts(tmp_path: Path) -> None:
    """It is waited for without an end; a stream of this process is read."""
    os.mkfifo(tmp_path / "p.txt")
    with pytest.raises(PromptFileError, match="not a plain file"):
        read_text(tmp_path / "p.txt")
    ours, theirs = os.pipe()
    os.write(theirs, b"Hi")
    os.close(theirs)
    assert read_text(f"/dev/fd/{ours}") == "Hi"
    os.close(ours)
