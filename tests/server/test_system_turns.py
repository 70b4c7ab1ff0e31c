"""System turns anywhere in a conversation, over all three chat protocols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import TEMPLATE, running, tiny_decoder

#: Refuses a system turn after the first, as many templates do.
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "{% endfor %}" + TEMPLATE
)
#: Drops it.
DROPS = TEMPLATE.replace(
    "<|im_start|>{{ m.role }}",
    "{% if m.role != 'system' or loop.first %}<|im_start|>{{ m.role }}",
).replace("<|im_end|>\n", "<|im_end|>\n{% endif %}")
TEMPLATES = {"takes": TEMPLATE, "first": FIRST, "drops": DROPS}
#: Refuses all, as Gemma 2's does.
REFUSES = FIRST.replace(" and not loop.first", "")
#: Puts all system turns first.
HOISTS = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    + TEMPLATE.replace("in messages", "in messages if m.role != 'system'")
)
TEMPLATES["hoists"] = HOISTS


def conversation(turns: int, last: str = "user") -> list[dict[str, str]]:
    """``turns`` questions with answers between, and with a system turn before each."""
    made = [{"role": "system", "content": "You are terse and know all of the rivers."}]
    for i in range(turns):
        if i:
            made.append({"role": "assistant", "content": f"Answer {i} in some words."})
        made.append({"role": "user", "content": f"Question {i} that is quite long?"})
        if i or last == "system":
            made.append({"role": "system", "content": f"The time is now {i} o'clock."})
    return made


def ask(server: Any, path: str, turns: list[dict[str, str]]) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached."""
    bodies: dict[str, Any] = {
        "chat/completions": {"messages": turns, "max_tokens": 1},
        "responses": {"input": turns, "max_output_tokens": 1},
        "messages": {"model": "tiny", "messages": turns, "max_tokens": 1},
    }
    url = f"{server.url}/v1/{path}"
    answer = httpx.post(url, json=bodies[path], timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "messages":
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    total = usage.get("prompt_tokens") or usage["input_tokens"]
    return total, details["cached_tokens"]


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, FIRST, DROPS, HOISTS, REFUSES],
    ids=["takes", "first", "drops", "hoists", "refuses"],
)
def test_ten_turns_hit_the_prefix_cache(template: str, tmp_path: Path) -> None:
    """A later system turn that is refused, or moved, so that no prefix is found."""
    with running(tiny_decoder(tmp_path, template=template)) as server:
        for path in ("chat/completions", "responses", "messages"):
            before = 0
            for turn in range(1, 11):
                total, cached = ask(server, path, conversation(turn))
                # All but the end of the earlier prompt, up to a block of the cache.
                assert cached >= before - 48, (path, turn)
                assert total > before
                before = total


def test_nothing_of_a_system_turn_is_lost(tmp_path: Path) -> None:
    """Its text, its place, or the turns of the user on both sides of it."""
    from specdec.server.system_turns import arranged
    from tests.server.harness import tokenizer

    turns = [
        {"role": "system", "content": "A"},
        {"role": "system", "content": "B"},
        {"role": "system", "content": " "},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "D"},
        {"role": "assistant", "content": "e"},
        {"role": "system", "content": "F"},
        {"role": "user", "content": "g"},
    ]
    (tmp_path / "takes").mkdir()
    taken = arranged(tokenizer(tmp_path / "takes"), turns)
    assert [m["content"] for m in taken] == ["A\n\nB", "c", "D", "e", "F", "g"]
    for kind in ("first", "drops", "hoists"):
        (tmp_path / kind).mkdir()
        words = tokenizer(tmp_path / kind, TEMPLATES[kind])
        marked = arranged(words, turns)
        assert [m["role"] for m in marked] == ["system", "user", "assistant", "user"]
        texts = [m["content"] for m in marked]
        assert texts[1] == "c\n\n<system>\nD\n</system>"
        assert texts[3] == "<system>\nF\n</system>\n\ng"
    (tmp_path / "refuses").mkdir()
    none = arranged(tokenizer(tmp_path / "refuses", REFUSES), turns)
    assert none[0] == {
        "role": "user", "content": "<system>\nA\n\nB\n</system>\n\n" + texts[1]
    }  # fmt: skip
    assert none[1:] == marked[2:]
    # Turns of the user that the client keeps apart stay apart.
    apart = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert arranged(words, [*apart, turns[4], turns[5]])[0] == apart[0]


def test_consecutive_turns_are_one_in_messages(tmp_path: Path) -> None:
    """Templates that ask for alternating turns refuse two of the user's in a row."""
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
        + TEMPLATE
    )
    with running(tiny_decoder(tmp_path, template=strict)) as server:
        turns = [
            {"role": role, "content": text}
            for role, text in (("user", "a"), ("user", "b"), ("assistant", "c"),
                               ("assistant", "d"), ("user", "e"))
        ]  # fmt: skip
        ask(server, "messages", turns)


def test_all_thoughts_of_a_turn_are_kept(tmp_path: Path) -> None:
    """Only the last of several thinking blocks reached the prompt."""
    from specdec.server import messages, responses

    blocks = [
        {"type": "thinking", "thinking": "FIRST", "signature": ""},
        {"type": "text", "text": "t"},
        {"type": "thinking", "thinking": "SECOND", "signature": ""},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ]
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "FIRST"}]},
        {"role": "assistant", "content": "t"},
        {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "SECOND"}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blocks}]
    with running(tiny_decoder(tmp_path)) as server:
        made: list[Any] = [
            messages.parse_count({"model": "tiny", "messages": said}, server.service),
            responses.parse({"input": items}, server.service).job.sources[0],
        ]
    for turn in (chat.messages[-1] for chat in made):
        assert turn["reasoning_content"] == "FIRST\n\nSECOND"
        assert turn["content"] == "t"
        assert len(turn["tool_calls"]) == 1


def test_calls_of_any_history_reach_the_prompt(tmp_path: Path) -> None:
    """A call that was cut, or a custom tool's, ends the conversation with 400."""
    from specdec.server import chat, responses

    with running(tiny_decoder(tmp_path)) as server:
        for written, shown in (
            ('{"a": 1}', {"a": 1}), ("", {}), ("null", {}),
            ('{"a": "cut', {"arguments": '{"a": "cut'}), ("[1]", {"arguments": "[1]"}),
            ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ):  # fmt: skip
            function = {"name": "f", "arguments": written}
            call = {"id": "c", "type": "function", "function": function}
            turns: list[Any] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ]
            items: list[Any] = [
                {"role": "user", "content": "a"},
                {"type": "function_call", "call_id": "c", **function},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ]
            made: list[Any] = [
                chat.parse({"messages": turns}, server.service).job.sources[0],
                responses.parse({"input": items}, server.service).job.sources[0],
            ]
            for parsed in made:
                (said,) = parsed.messages[1]["tool_calls"]
                assert said["function"] == {"name": "f", "arguments": shown}
            ask(server, "chat/completions", turns)
        items[1:] = [
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "***"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "r"},
        ]
        made = [responses.parse({"input": items}, server.service).job.sources[0]]
        (said,) = made[0].messages[1]["tool_calls"]
        assert said["function"] == {"name": "f", "arguments": {"input": "***"}}
        assert made[0].messages[2]["content"] == "r"


def test_messages_without_content(tmp_path: Path) -> None:
    """Turns without blocks leave no message, which ended in a 500."""
    with running(tiny_decoder(tmp_path)) as server:
        for path in ("messages", "messages/count_tokens"):
            body = {"model": "tiny", "max_tokens": 1, "messages": [
                {"role": "user", "content": []}]}  # fmt: skip
            made = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
            assert made.status_code == 400
            assert "no content" in made.text
