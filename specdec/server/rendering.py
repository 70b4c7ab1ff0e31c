"""From events to bytes: what every protocol's rendering has in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from .job import Begun, Event, Job, Outcome, Usage
from .refusal import Refusal


def sse(payload: object, event: str | None = None) -> bytes:
    """One server-sent event."""
    data = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {data}\n\n".encode()


class Rendering(ABC):
    """One request on its way: the job, and its answer in one protocol.

    Args:
        job: what is asked for.
        model: its name in the response.
        streamed: the answer comes as server-sent events.
    """

    def __init__(self, job: Job, model: str, *, streamed: bool):
        self.job = job
        self.model = model
        self.streamed = streamed
        self.outcomes: list[Outcome] = []

    def take(self, event: Event) -> None:
        """Note what is new."""
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
        """The response, where it is not streamed."""

    @abstractmethod
    def stream(self, event: Event) -> Iterator[bytes]:
        """What an event, which was taken, adds to the stream."""

    @abstractmethod
    def end(self) -> Iterator[bytes]:
        """What ends the stream, after all events."""

    @abstractmethod
    def error(self, refusal: Refusal) -> dict[str, Any]:
        """The error object of the protocol."""

    def failed(self, refusal: Refusal) -> bytes:
        """What ends a stream that began well."""
        return sse(self.error(refusal))

    def alive(self) -> bytes:
        """What keeps a stream open while nothing happens."""
        return b": keep-alive\n\n"


class OpenAIRendering(Rendering):
    """Errors as OpenAI has them."""

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return refusal.openai()
