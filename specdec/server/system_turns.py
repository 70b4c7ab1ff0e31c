"""Puts system turns where a chat template takes them.

Many templates refuse a system turn that is not the first, or drop it. Some refuse all.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..prompts.templates import render_chat, template_of
from .job import Message

#: Whether a tokenizer's template takes turns of these roles, by the template's text.
_TAKES: weakref.WeakKeyDictionary[Any, dict[tuple[str | None, tuple[str, ...]], bool]]
_TAKES = weakref.WeakKeyDictionary()
_FIRST, _LATER = ("system", "user"), ("user", "assistant", "system", "user")


def arranged(tokenizer: TokenizerWrapper, messages: Sequence[Message]) -> list[Message]:
    """Messages whose system turns the template takes, in the order of the conversation.

    System turns before all others become one. A later one stays where it is. If the
    template does not take one where it is, it becomes text of a turn of the user, so
    that the prompt before it does not change.
    """
    turns = [m for m in messages if m["role"] != "system" or m["content"].strip()]
    leading = list(takewhile(lambda m: m["role"] == "system", turns))
    turns = turns[len(leading) :]
    if leading:
        text = "\n\n".join(message["content"] for message in leading)
        leading = [{**leading[0], "content": text}]
        if not _takes(tokenizer, _FIRST):
            leading, turns = [], [*leading, *turns]
    if not any(m["role"] == "system" for m in turns) or _takes(tokenizer, _LATER):
        return [*leading, *turns]
    placed: list[Message] = []
    marked = False  # the last turn has text of a system turn
    for turn in turns:
        is_system = turn["role"] == "system"
        content = turn["content"]
        if is_system:
            content = f"<system>\n{content}\n</system>"
        after_user = bool(placed) and placed[-1]["role"] == "user"
        if after_user and (is_system or (marked and turn["role"] == "user")):
            content = _joined(placed[-1]["content"], content)
            placed[-1] = {**placed[-1], "content": content}
        elif is_system:
            placed.append({"role": "user", "content": content})
        else:
            placed.append(turn)
        marked = is_system or (marked and turn["role"] == "user")
    return [*leading, *placed]


def _joined(*contents: Any) -> Any:
    """Contents of one turn: a text, or parts if there are images."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[Any] = []
    for content in contents:
        text = isinstance(content, str)
        parts += [{"type": "text", "text": content}] if text else content
    return parts


def _takes(tokenizer: TokenizerWrapper, roles: tuple[str, ...]) -> bool:
    """Whether the template shows turns of these roles, in their places."""
    known = _TAKES.setdefault(tokenizer, {})
    template = template_of(tokenizer)
    if (template, roles) not in known:
        texts = [f"{role.upper()}-PROBE-{i}" for i, role in enumerate(roles)]
        turns = [
            {"role": role, "content": text}
            for role, text in zip(roles, texts, strict=True)
        ]
        try:
            places = [render_chat(tokenizer, turns).find(text) for text in texts]
        except Exception:  # a template may raise anything
            places = [-1]
        known[template, roles] = -1 not in places and places == sorted(places)
    return known[template, roles]
