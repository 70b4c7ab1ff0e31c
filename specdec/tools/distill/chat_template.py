"""A chat template taken apart: what stands around a user's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...prompts.templates import render_chat

_MARK = "specdec-user-text"


@dataclass(frozen=True)
class UserTurn:
    """Where a user turn begins, and what ends it.

    Args:
        before: the template's text in front of the user's.
        ends: tokens that end the user's text, if the model writes it.
    """

    before: str
    ends: frozenset[int]


def user_turn(tokenizer: Any) -> UserTurn | None:
    """The user turn of a tokenizer's chat template; ``None`` where it has none."""
    if not tokenizer.has_chat_template:
        return None
    try:
        rendered = render_chat(tokenizer, [{"role": "user", "content": _MARK}])
    except Exception:  # a template raises what its author chose
        return None
    before, found, after = rendered.partition(_MARK)
    if not found:
        return None
    ends = set(tokenizer.eos_token_ids)
    ends.update(tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1])
    return UserTurn(before, frozenset(ends))


def begin_of_turn(tokenizer: Any, turn: UserTurn | None, text: str) -> list[int]:
    """Tokens that a user turn which begins with ``text`` is to be continued from."""
    if turn is not None:
        tokens = tokenizer.encode(turn.before + text, add_special_tokens=False)
        return [int(token) for token in tokens]
    tokens = [int(token) for token in tokenizer.encode(text)] if text else []
    bos = getattr(tokenizer, "bos_token_id", None)
    if not tokens:
        tokens = [int(bos) if bos is not None else min(tokenizer.eos_token_ids)]
    return tokens
