"""OpenAI's ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, ClassVar

from pydantic import Field

from .conversation import token_text, with_own
from .errors import RequestError
from .job import Begun, Client, Event, Job, Outcome, Piece, Text, Tokens
from .rendering import CompletionRendering
from .sampling import OpenAISampling, grammar_of, sampling, stops
from .schema import Notes, Refused, read
from .service import Service

#: OpenAI's default, for requests without ``max_tokens``.
_MAX_TOKENS = 16
_MOST_PROMPTS = 2048


class CompletionRequest(OpenAISampling):
    """A request's body."""

    accepted = OpenAISampling.accepted | {"add_special_tokens"}
    refused: ClassVar[Mapping[str, Refused]] = {
        **OpenAISampling.refused,
        "best_of": Refused(
            "candidates are not ranked here: ask for n and choose", (1,)
        ),
        "grammar": Refused("use response_format"),
    }
    elsewhere: ClassVar[Mapping[str, str]] = {
        **OpenAISampling.elsewhere, "messages": "prompt", "input": "prompt",
    }  # fmt: skip
    prompt: str | list[Any]
    suffix: str | None = None
    max_tokens: int = _MAX_TOKENS
    n: int = Field(1, ge=1, le=128)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None


NAMES = {"prompt": "prompt", "max_tokens": "max_tokens", "stop": "stop", "n": "n",
         "top_logprobs": "logprobs", "grammar": "response_format"}  # fmt: skip


def parse(
    body: Any,
    service: Service,
    notes: Notes | None = None,
    client: Client = Client(),  # noqa: B008 - it is frozen
) -> TextRendering:
    """Parse a request's body.

    Raises:
        RequestError: it cannot be served.
    """
    notes = notes or service.notes()
    request = read(CompletionRequest, body, notes)
    model = service.check_model(request.model)
    usage = request.usage()
    top, echo = request.logprobs, request.echo
    if top is not None and echo:
        raise RequestError.unsupported(
            "echo",
            "echo with logprobs is not supported: prompts have no logprobs here; leave "
            "one of them out",
        )
    if echo and request.suffix is not None:
        raise RequestError("echo does not go with suffix: leave it out", field="echo")
    stop = stops(request.stop)
    where, grammar = grammar_of(
        request, request.response_format, "response_format", notes
    )
    names = {**NAMES, "grammar": where}
    params = sampling(
        request,
        service,
        notes,
        names,
        client=client,
        max_tokens=request.max_tokens,
        stop=stop,
        logprobs=top is not None,
        top_logprobs=top or 0,
        grammar=grammar,
    )
    sources = [Text(prompt, request.suffix) for prompt in _prompts(request.prompt)]
    job = Job(
        sources,
        params,
        request.n,
        names,
        stop=stop,
        token_ids=request.return_token_ids,
        hides_special=request.skip_special_tokens,
    )
    return TextRendering(service, job, model, request, notes, usage=usage)


def _prompts(given: Any) -> list[str | tuple[int, ...]]:
    """The prompts of a request, one or several, each a text or token ids."""
    several = isinstance(given, list) and not all(_is_token(x) for x in given)
    prompts = given if several else [given]
    if given and len(prompts) <= _MOST_PROMPTS:
        if all(isinstance(each, str) for each in prompts):
            return list(prompts)
        if all(
            isinstance(each, list) and all(map(_is_token, each)) for each in prompts
        ):
            return [tuple(each) for each in prompts]
    raise RequestError.invalid(
        "prompt",
        f"prompt must be a text, a list of token ids, or a list of up to "
        f"{_MOST_PROMPTS} of these, and not empty",
    )


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class TextRendering(CompletionRendering):
    """A completion, whole or in chunks."""

    prefix = "cmpl"
    names = ("text_completion", "text_completion")
    request: CompletionRequest

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        text = outcome.text
        if self.request.echo:
            text = outcome.begun.prompt + text
        logprobs = None
        if self.job.params.logprobs:
            logprobs = self._logprobs(index, outcome.tokens)
        return {"text": text, "logprobs": logprobs}

    def _logprobs(self, choice: int, tokens: Tokens) -> dict[str, Any]:
        texts = [token_text(self.service, token) for token, _ in tokens]
        begin = self.lengths.get(choice, 0)
        *offsets, self.lengths[choice] = accumulate(map(len, texts), initial=begin)
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.logprob, -9999.0) for _, entry in tokens],
            "top_logprobs": [
                {
                    token_text(self.service, other): max(logprob, -9999.0)
                    for other, logprob in with_own(token, entry, len(entry.top))
                }
                for token, entry in tokens
            ],
            "text_offset": offsets,
        }

    def stream(self, event: Event) -> Iterator[bytes]:
        text, logprobs = "", None
        if isinstance(event, Begun):
            if not self.request.echo:
                return
            text = event.prompt
        elif isinstance(event, Piece):
            text = event.text
            if event.tokens and self.job.params.logprobs:
                logprobs = self._logprobs(event.choice, event.tokens)
        yield self.chunk(event, text=text, logprobs=logprobs)
