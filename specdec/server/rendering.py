"""Turns events into bytes: the part that all protocols share."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from .errors import RequestError
from .job import Client, Delta, End, Event, Job, Outcome, Started, Usage
from .sampling import OpenAISampling, Sampling, chat_job
from .schema import Notes, read
from .service import Service


def sse(payload: object, event: str | None = None) -> bytes:
    """One server-sent event."""
    data = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {data}\n\n".encode()


class Rendering(ABC):
    """A job, and its answer in one protocol.

    Attributes:
        record: the form of a request's body.

    Args:
        job: the job to answer.
        model: the model's name in the response.
        request: the request's body.
        notes: what its sender should know.
    """

    record: ClassVar[type[Sampling]]

    @classmethod
    def parse(
        cls,
        body: Any,
        service: Service,
        notes: Notes | None = None,
        client: Client = Client(),  # noqa: B008 - it is frozen
    ) -> Self:
        """Parse a request's body.

        Raises:
            RequestError: it cannot be served.
        """
        notes = notes or service.notes()
        request: Any = read(cls.record, body, notes)
        model = service.check_model(request.model)
        job = cls.job_of(request, service, notes, client)
        return cls(service, job, model, request, notes)

    @classmethod
    def job_of(
        cls, request: Any, service: Service, notes: Notes, client: Client
    ) -> Job:
        """What a request asks for.

        Raises:
            RequestError: it cannot be served.
        """
        asked = cls.asked(request, service, notes)
        return chat_job(request, service, notes, client=client, **asked)

    @classmethod
    def asked(cls, request: Any, service: Service, notes: Notes) -> dict[str, Any]:
        """What a request of a chat protocol asks for: arguments of ``chat_job``.

        Raises:
            RequestError: it cannot be served.
        """
        raise NotImplementedError

    def __init__(
        self, service: Service, job: Job, model: str, request: Sampling, notes: Notes
    ):
        self.service = service
        self.job = job
        self.model = model
        self.request: Any = request
        self.notes = notes
        self.outcomes: list[Outcome] = []

    @property
    def streamed(self) -> bool:
        """Whether the answer comes as server-sent events."""
        return bool(self.request.stream)

    def take(self, event: Event) -> None:
        """Add an event to the answer."""
        if isinstance(event, Started):
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

    def failed(self, error: RequestError) -> bytes:
        """The end of a stream that failed after it had begun."""
        return sse(error.openai())

    def alive(self) -> bytes:
        """What to send while nothing happens, to keep a stream open."""
        return b": keep-alive\n\n"


class CompletionRendering(Rendering):
    """A completion of either of OpenAI's two kinds: an object, or chunks."""

    prefix: ClassVar[str]
    #: The objects' names: of the whole answer, and of a chunk.
    names: ClassVar[tuple[str, str]]

    def __init__(
        self,
        service: Service,
        job: Job,
        model: str,
        request: OpenAISampling,
        notes: Notes,
    ):
        usage = request.usage()
        if usage.continuous_usage_stats:
            job = replace(job, token_ids=True)
        super().__init__(service, job, model, request, notes)
        self.usage_options = usage
        self.lengths: dict[int, int] = {}  # of each choice's text so far
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
            {
                "index": i,
                **self.choice(i, outcome),
                **_ending(outcome.end),
                **self._ids(outcome.start, outcome.end.result.token_ids),
            }
            for i, outcome in enumerate(self.outcomes)
        ]
        body = {**self._head, "object": self.names[0], "choices": choices}
        return {**body, "usage": self._tokens()}

    def _ids(self, start: Started | None, tokens: Sequence[int]) -> dict[str, Any]:
        """Token ids, if they were asked for."""
        if not self.request.return_token_ids:
            return {}
        prompt = {} if start is None else {"prompt_token_ids": start.prompt_token_ids}
        return {**prompt, "token_ids": list(tokens)}

    def chunk(self, event: Event, **fields: Any) -> bytes:
        """A part of a choice; the last part says how the choice ended."""
        ending = _ending(event) if isinstance(event, End) else {"finish_reason": None}
        tokens = event.token_ids if isinstance(event, Delta) else ()
        ids = self._ids(event if isinstance(event, Started) else None, tokens)
        choices = [{"index": event.choice, **fields, **ending, **ids}]
        body = {**self._head, "object": self.names[1], "choices": choices}
        options = self.usage_options
        if options.continuous_usage_stats:
            return sse({**body, "usage": self._tokens()})
        return sse({**body, "usage": None} if options.include_usage else body)

    def end(self) -> Iterator[bytes]:
        if self.usage_options.include_usage:
            body = {**self._head, "object": self.names[1], "choices": []}
            yield sse({**body, "usage": self._tokens()})
        yield b"data: [DONE]\n\n"

    def _tokens(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.generated,
            "total_tokens": usage.prompt + usage.generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {
                "reasoning_tokens": usage.reasoning,
                "drafted_tokens": usage.drafted,
                "accepted_prediction_tokens": usage.accepted,
                "rejected_prediction_tokens": usage.drafted - usage.accepted,
            },
        }


def _ending(end: End) -> dict[str, Any]:
    """How a choice ended, and the seed of its draws."""
    ending: dict[str, Any] = {"finish_reason": end.reason}
    if end.result.seed is not None:
        ending["seed"] = end.result.seed
    if end.cut is not None:
        ending["cut"] = end.cut
    if end.stop is not None:
        ending["stop_reason"] = end.stop
    return ending
