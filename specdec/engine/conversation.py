"""Concurrent conversations: a turn begins when the answer before it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecdecError
from ..outputs import GenerationResult, StreamEvent
from ..prompts import Encoding, Prompt
from ..sampling_params import SamplingParams
from .session import Session


def user(text: str) -> list[Mapping[str, Any]]:
    """A turn of the user."""
    return [{"role": "user", "content": text}]


@dataclass
class Conversation:
    """A conversation so far, and the turns of the user that are still to come.

    Args:
        number: the conversation's index in events and results.
        prompt: the prompt added to the session last; chat messages if turns follow.
        left: the turns to come.
        params: how to decode every turn.
        turn: number of the turn that is being answered, from 0.
    """

    number: int
    prompt: Prompt
    left: list[str]
    params: SamplingParams
    turn: int = 0


def converse(
    session: Session, talks: dict[int, Conversation], encoding: Encoding
) -> Iterator[StreamEvent]:
    """Decode conversations to their end, yielding events by conversation and turn.

    Args:
        session: has the first turn of each conversation.
        talks: the conversations by the index of their request; conversations that end
            are removed.
        encoding: how to encode every turn.
    """
    prefilled = encoding.get("prefill_response") or ""
    while session.busy:
        for event in session.step():
            talk, result = talks[event.index], event.result
            yield event.renumbered(talk.number, talk.turn)
            if result is None:
                continue
            del talks[event.index]
            if not talk.left:
                continue
            if result.finish_reason not in ("stop", "length"):
                talk.left.clear()
                continue
            answer = {"role": "assistant", "content": prefilled + result.text}
            said = talk.left.pop(0)
            talk.prompt = [*talk.prompt, answer, *user(said)]
            talk.turn += 1
            try:
                talks[session.add(talk.prompt, talk.params, **encoding)] = talk
            except SpecdecError as error:
                talk.left.clear()
                why = f"turn {talk.turn + 1}: {error}"
                failed = GenerationResult.refused(talk.number, said, why)
                event = StreamEvent(index=0, text="", token_ids=[], result=failed)
                yield event.renumbered(talk.number, talk.turn)
