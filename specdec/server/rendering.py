"""Turns events into bytes: the part that all protocols share."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from .job import Begun, End, Event, Job, Outcome, Usage
from .refusal import Refusal


def sse(payload: object, event: str | None = None) -> bytes:
    """One server-sent event."""
    data = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {data}\n\n".encode()


class Rendering(ABC):
    """A job, and its answer in one protocol.

    Args:
        job: the job to answer.
        model: the model's name in the response.
        streamed: the answer comes as server-sent events.
    """

    def __init__(self, job: Job, model: str, *, streamed: bool):
        self.job = job
        self.model = model
        self.streamed = streamed
        self.outcomes: list[Outcome] = []

    def take(self, event: Event) -> None:
        """Add an event to the answer."""
        if isinstance(event, Begun):
            self.outcomes.append(Outcome(event))
        else:
            self.outcomes[event.choice].take(event)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage.of(self.outcomes)

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The response, if it is not streamed."""

    @abstractmethod
    def stream(self, event: Event) -> Iterator[bytes]:
        """The bytes that an event adds to the stream, after :meth:`take`."""

    @abstractmethod
    def end(self) -> Iterator[bytes]:
        """The end of the stream, after all events."""

    def failed(self, refusal: Refusal) -> bytes:
        """The end of a stream that failed after it had begun."""
        return sse(refusal.openai())

    def alive(self) -> bytes:
        """What to send while nothing happens, to keep a stream open."""
        return b": keep-alive\n\n"


class CompletionRendering(Rendering):
    """A completion of either of OpenAI's two kinds: an object with choices, or chunks.

    Args:
        usage: whether a stream ends with the numbers of tokens.
    """

    prefix: ClassVar[str]
    #: The objects' names: of the whole answer, and of a chunk.
    names: ClassVar[tuple[str, str]]

    def __init__(self, job: Job, model: str, *, streamed: bool, usage: bool):
        super().__init__(job, model, streamed=streamed)
        self._usage = usage
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": "specdec",
        }

    @abstractmethod
    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        """A choice of the whole answer, without its index and finish reason."""

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": i, **self.choice(i, outcome), **_ending(outcome.end)}
            for i, outcome in enumerate(self.outcomes)
        ]
        made = {**self._head, "object": self.names[0], "choices": choices}
        return {**made, "usage": self._tokens()}

    def chunk(self, event: Event, **fields: Any) -> bytes:
        """A part of a choice; the last part says how the choice ended."""
        ending = _ending(event) if isinstance(event, End) else {"finish_reason": None}
        choices = [{"index": event.choice, **fields, **ending}]
        made = {**self._head, "object": self.names[1], "choices": choices}
        return sse({**made, "usage": None} if self._usage else made)

    def end(self) -> Iterator[bytes]:
        if self._usage:
            made = {**self._head, "object": self.names[1], "choices": []}
            yield sse({**made, "usage": self._tokens()})
        yield b"data: [DONE]\n\n"

    def _tokens(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.generated,
            "total_tokens": usage.prompt + usage.generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {
                "drafted_tokens": usage.drafted,
                "accepted_prediction_tokens": usage.accepted,
                "rejected_prediction_tokens": usage.drafted - usage.accepted,
            },
        }


def _ending(end: End) -> dict[str, Any]:
    """How a choice ended, and the seed of its draws."""
    made: dict[str, Any] = {"finish_reason": end.reason}
    if end.result.seed is not None:
        made["seed"] = end.result.seed
    if end.cut is not None:
        made["cut"] = end.cut
    if end.stop is not None:
        made["stop_reason"] = end.stop
    return made
