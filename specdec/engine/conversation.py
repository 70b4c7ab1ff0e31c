"""Conversations, side by side: a turn begins when the answer before it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import SpecdecError
from ..outputs import GenerationResult, StreamEvent
from ..sampling_params import SamplingParams
from .session import Session

Message = dict[str, str]


def user(text: str) -> list[Message]:
    """A turn of the user."""
    return [{"role": "user", "content": text}]


@dataclass
class Conversation:
    """What was said so far, and what the user will say.

    Args:
        messages: the first of them was added to the session.
        left: turns of the user that are still to come.
    """

    messages: list[Message]
    left: list[str]
    params: SamplingParams
    turn: int = 0


def converse(
    session: Session, talks: Sequence[Conversation], system_prompt: str | None
) -> Iterator[StreamEvent]:
    """What the rows of conversations emit, by conversation and turn.

    Args:
        session: with the first turn of each, in their order, as requests 0, 1, ...
    """
    owners = dict(enumerate(range(len(talks))))
    while session.busy:
        for event in session.step():
            number = owners[event.index]
            talk = talks[number]
            yield _of(event, number, talk.turn)
            result = event.result
            if result is None or not talk.left:
                continue
            if result.finish_reason not in ("stop", "length"):
                talk.left.clear()
                continue
            answer = {"role": "assistant", "content": result.text}
            talk.messages += [answer, *user(talk.left.pop(0))]
            talk.turn += 1
            try:
                index = session.add(
                    talk.messages, talk.params, system_prompt=system_prompt
                )
            except SpecdecError as error:
                talk.left.clear()
                yield _of(_failed(talk, error), number, talk.turn)
            else:
                owners[index] = number


def _of(event: StreamEvent, number: int, turn: int) -> StreamEvent:
    result = event.result and replace(event.result, index=number, turn=turn)
    return replace(event, index=number, turn=turn, result=result)


def _failed(talk: Conversation, error: SpecdecError) -> StreamEvent:
    """The end of a turn that cannot begin."""
    result = GenerationResult(
        index=0,
        prompt=talk.messages[-1]["content"],
        text="",
        token_ids=[],
        finish_reason="error",
        prompt_tokens=0,
        rounds=0,
        drafted=0,
        accepted=0,
        error=f"turn {talk.turn + 1}: {error}",
    )
    return StreamEvent(index=0, text="", token_ids=[], result=result)
