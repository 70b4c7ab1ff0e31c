"""System turns anywhere in a conversation, over all three chat protocols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.server import chat, messages, responses
from specdec.server.system_turns import arranged
from tests.server.harness import TEMPLATE, post, running, tiny_decoder, tokenizer

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
#: Refuses all, as Gemma 2's does.
REFUSES = FIRST.replace(" and not loop.first", "")
#: Puts all system turns first.
HOISTS = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    + TEMPLATE.replace("in messages", "in messages if m.role != 'system'")
)
TEMPLATES = {"takes": TEMPLATE, "first": FIRST, "drops": DROPS, "hoists": HOISTS,
             "refuses": REFUSES}  # fmt: skip


def turns_of(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def conversation(turns: int) -> list[dict[str, str]]:
    """``turns`` questions with answers between, and with a system turn before each."""
    pairs = [("system", "You are terse and know all of the rivers.")]
    for i in range(turns):
        if i:
            pairs.append(("assistant", f"Answer {i} in some words."))
        pairs.append(("user", f"Question {i} that is quite long?"))
        if i:
            pairs.append(("system", f"The time is now {i} o'clock."))
    return turns_of(*pairs)


def ask(server: Any, path: str, turns: list[dict[str, str]]) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached."""
    field = "input" if path == "responses" else "messages"
    most = "max_output_tokens" if path == "responses" else "max_tokens"
    answer = post(server, path, **{field: turns, most: 1})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "messages":
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    total = usage.get("prompt_tokens") or usage["input_tokens"]
    return total, details["cached_tokens"]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_six_turns_hit_the_prefix_cache(template: str, tmp_path: Path) -> None:
    """A later system turn that is refused, or moved, so that no prefix is found."""
    with running(tiny_decoder(tmp_path, template=template)) as server:
        for path in ("chat/completions", "responses", "messages"):
            before = 0
            for turn in range(1, 7):
                total, cached = ask(server, path, conversation(turn))
                # All but the end of the earlier prompt, up to a block of the cache.
                assert cached >= before - 48, (path, turn)
                assert total > before
                before = total


def test_nothing_of_a_system_turn_is_lost(tmp_path: Path) -> None:
    """Its text, its place, or the turns of the user on both sides of it."""
    turns = turns_of(
        ("system", "A"), ("system", "B"), ("system", " "), ("user", "c"),
        ("system", "D"), ("assistant", "e"), ("system", "F"), ("user", "g"),
    )  # fmt: skip
    words = {}
    for kind, template in TEMPLATES.items():
        (tmp_path / kind).mkdir()
        words[kind] = tokenizer(tmp_path / kind, template)
    c, g = "c\n\n<system>\nD\n</system>", "<system>\nF\n</system>\n\ng"
    marked = turns_of(
        ("system", "A\n\nB"), ("user", c), ("assistant", "e"), ("user", g)
    )
    for kind in ("first", "drops", "hoists"):
        assert arranged(words[kind], turns) == marked, kind
    contents = [m["content"] for m in arranged(words["takes"], turns)]
    assert contents == ["A\n\nB", "c", "D", "e", "F", "g"]
    alone = turns_of(("user", f"<system>\nA\n\nB\n</system>\n\n{c}"))
    assert arranged(words["refuses"], turns) == alone + marked[2:]
    # Whatever follows the text of a system turn is in its turn.
    around = turns_of(("user", "a"), ("system", "B"), ("user", "c"), ("user", "d"))
    whole = "a\n\n<system>\nB\n</system>\n\nc\n\nd"
    assert arranged(words["first"], around) == turns_of(("user", whole))
    # Turns of the user that the client keeps apart stay apart.
    apart = turns_of(("user", "a"), ("user", "b"))
    assert arranged(words["hoists"], [*apart, turns[4], turns[5]])[0] == apart[0]


def test_consecutive_turns_are_one_in_messages(tmp_path: Path) -> None:
    """Templates that ask for alternating turns refuse two of the user's in a row."""
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
        + TEMPLATE
    )
    with running(tiny_decoder(tmp_path, template=strict)) as server:
        roles = ("user", "user", "assistant", "assistant", "user")
        ask(server, "messages", turns_of(*zip(roles, "abcde", strict=True)))


def test_all_thoughts_of_a_turn_are_kept(tmp_path: Path) -> None:
    """Only the last of several thinking blocks reached the prompt."""
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
        {"type": "reasoning", "content": [{"type": "reasoning_text",
                                           "text": "SECOND"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    said = turns_of(("user", "a"), ("assistant", blocks))
    with running(tiny_decoder(tmp_path)) as server:
        sources: list[Any] = [
            messages.parse_count({"model": "tiny", "messages": said}, server.service),
            responses.parse({"input": items}, server.service).job.sources[0],
        ]
    for turn in (parsed.messages[-1] for parsed in sources):
        assert turn["reasoning_content"] == "FIRST\n\nSECOND"
        assert turn["content"] == "t"
        assert len(turn["tool_calls"]) == 1


def test_calls_of_any_history_reach_the_prompt(tmp_path: Path) -> None:
    """A call that was cut, or a custom tool's, ends the conversation with 400."""
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
            sources: list[Any] = [
                chat.parse({"messages": turns}, server.service).job.sources[0],
                responses.parse({"input": items}, server.service).job.sources[0],
            ]
            for parsed in sources:
                (said,) = parsed.messages[1]["tool_calls"]
                assert said["function"] == {"name": "f", "arguments": shown}
            ask(server, "chat/completions", turns)
        items[1:] = [
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "***"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "r"},
        ]
        sources = [responses.parse({"input": items}, server.service).job.sources[0]]
        (said,) = sources[0].messages[1]["tool_calls"]
        assert said["function"] == {"name": "f", "arguments": {"input": "***"}}
        assert sources[0].messages[2]["content"] == "r"


def test_messages_without_content(tmp_path: Path) -> None:
    """Turns without blocks leave no message, which ended in a 500."""
    with running(tiny_decoder(tmp_path)) as server:
        for path in ("messages", "messages/count_tokens"):
            body = {"model": "tiny", "max_tokens": 1, "messages": [
                {"role": "user", "content": []}]}  # fmt: skip
            answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
            assert answer.status_code == 400
            assert "no content" in answer.text
