"""OpenAI's ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from .conversation import token_text
from .job import Begun, Event, Job, Outcome, Piece, Text, Tokens
from .parameters import Parameter, Table, read
from .refusal import Refusal
from .rendering import CompletionRendering
from .sampling import (
    LABELS,
    SAMPLING,
    STREAM,
    constraint,
    sampling,
    stops,
    wants_usage,
)
from .service import Service

#: OpenAI's default, for requests without ``max_tokens``.
_MAX_TOKENS = 16
TABLE: Table = {
    "model": Parameter(str),
    "prompt": Parameter((str, list), required=True),
    "suffix": Parameter(str),
    "max_tokens": Parameter(int, default=_MAX_TOKENS),
    "n": Parameter(int, default=1, low=1, high=128),
    "best_of": Parameter(
        int, only=(1,), refused="candidates are not ranked here: ask for n and choose"
    ),
    "echo": Parameter(bool, default=False),
    "logprobs": Parameter(int, low=0, high=20),
    "stop": Parameter((str, [str])),
    "response_format": Parameter({"type": str}),
    **SAMPLING,
    **STREAM,
    **LABELS,
}
NAMES = {"prompt": "prompt", "max_tokens": "max_tokens", "stop": "stop", "n": "n",
         "top_logprobs": "logprobs", "grammar": "response_format"}  # fmt: skip


def parse(body: Any, service: Service) -> TextRendering:
    """Parse a request's body."""
    values = read(body, TABLE)
    model = service.check_model(values["model"])
    usage = wants_usage(values)
    top, echo = values["logprobs"], values["echo"]
    if top is not None and echo:
        raise Refusal.unsupported(
            "echo",
            "echo with logprobs is not supported: prompts have no logprobs here; leave "
            "one of them out",
        )
    if echo and values["suffix"] is not None:
        raise Refusal("echo does not go with suffix: leave it out", param="echo")
    values["logprobs"] = None
    params = sampling(
        values,
        service.config,
        NAMES,
        max_tokens=values["max_tokens"],
        stop=stops(values["stop"], "stop"),
        logprobs=top is not None,
        top_logprobs=top or 0,
        **constraint(values["response_format"], "response_format"),
    )
    prompts = _prompts(values["prompt"])
    sources = [Text(prompt, values["suffix"]) for prompt in prompts]
    job = Job(sources, params, values["n"], NAMES)
    how = {"streamed": values["stream"], "usage": usage}
    return TextRendering(service, job, model, echo=echo, **how)


def _prompts(given: Any) -> list[str | tuple[int, ...]]:
    """The prompts of a request, one or several, each a text or token ids."""
    several = isinstance(given, list) and not all(_is_token(x) for x in given)
    prompts = given if several else [given]
    if given and len(prompts) <= 2048:
        if all(isinstance(each, str) for each in prompts):
            return list(prompts)
        if all(
            isinstance(each, list) and all(map(_is_token, each)) for each in prompts
        ):
            return [tuple(each) for each in prompts]
    raise Refusal.invalid(
        "prompt",
        "prompt must be a text, a list of token ids, or a list of up to 2048 of these, "
        "and not empty",
    )


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class TextRendering(CompletionRendering):
    """A completion, whole or in chunks."""

    prefix = "cmpl"
    names = ("text_completion", "text_completion")

    def __init__(
        self, service: Service, job: Job, model: str, *, echo: bool, **how: bool
    ):
        super().__init__(job, model, **how)
        self._service, self.echo = service, echo
        self._lengths: dict[int, int] = {}  # of each choice's text so far

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        text = outcome.begun.prompt + outcome.text if self.echo else outcome.text
        logprobs = None
        if self.job.params.logprobs:
            logprobs = self._logprobs(index, outcome.tokens)
        return {"text": text, "logprobs": logprobs}

    def _logprobs(self, choice: int, tokens: Tokens) -> dict[str, Any]:
        texts = [token_text(self._service, token) for token, _ in tokens]
        begin = self._lengths.get(choice, 0)
        *offsets, self._lengths[choice] = accumulate(map(len, texts), initial=begin)
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.logprob, -9999.0) for _, entry in tokens],
            "top_logprobs": [
                {token_text(self._service, t): max(p, -9999.0) for t, p in entry.top}
                for _, entry in tokens
            ],
            "text_offset": offsets,
        }

    def stream(self, event: Event) -> Iterator[bytes]:
        text, logprobs = "", None
        if isinstance(event, Begun):
            if not self.echo:
                return
            text = event.prompt
        elif isinstance(event, Piece):
            text = event.text
            if event.tokens:
                logprobs = self._logprobs(event.choice, event.tokens)
        yield self.chunk(event, text=text, logprobs=logprobs)
