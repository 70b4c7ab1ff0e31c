"""OpenAI's ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

from pydantic import Field

from ..request import TokenLogprobs
from .conversation import token_text, with_own
from .errors import RequestError
from .job import Client, Delta, Event, Job, Outcome, Started, Text
from .rendering import CompletionRendering
from .sampling import OpenAISampling, grammar_of, sampling, stops
from .schema import Notes
from .service import Service
from .web import MOST_PROMPTS

#: OpenAI's default, for requests without ``max_tokens``.
_MAX_TOKENS = 16

# A token with its log-probability; the first of a prompt has none.
_Entry: TypeAlias = tuple[int, TokenLogprobs | None]
_Entries: TypeAlias = list[_Entry]


class CompletionRequest(OpenAISampling):
    """A request's body."""

    accepted = OpenAISampling.accepted | {"add_special_tokens"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OpenAISampling.neutral,
        "logprobs": (False,),  # -1 means all tokens in vLLM
        "suffix": ("",),
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
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None


NAMES = {"prompt": "prompt", "max_tokens": "max_tokens", "stop": "stop", "n": "n",
         "top_logprobs": "logprobs", "grammar": "response_format"}  # fmt: skip


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    """The prompts of a request, one or several, each a text or token ids."""
    several = isinstance(value, list) and not all(_is_token(x) for x in value)
    prompts = value if several else [value]
    if value and len(prompts) <= MOST_PROMPTS:
        if all(isinstance(each, str) for each in prompts):
            return list(prompts)
        if all(
            isinstance(each, list) and all(map(_is_token, each)) for each in prompts
        ):
            return [tuple(each) for each in prompts]
    raise RequestError.invalid(
        "prompt",
        f"prompt must be a text, a list of token ids, or a list of up to "
        f"{MOST_PROMPTS} of these, and not empty",
    )


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class TextRendering(CompletionRendering):
    """A completion, whole or in chunks."""

    record = CompletionRequest
    prefix = "cmpl"
    names = ("text_completion", "text_completion")
    request: CompletionRequest

    @classmethod
    def job_of(
        cls, request: CompletionRequest, service: Service, notes: Notes, client: Client
    ) -> Job:
        top, echo = request.logprobs, request.echo
        scored = top if echo else request.prompt_logprobs
        if scored is not None and request.stream:
            raise RequestError.unsupported(
                "stream",
                "log-probabilities of a prompt do not come in chunks: leave stream out",
            )
        if echo and request.suffix is not None:
            text = "echo does not go with suffix: leave it out"
            raise RequestError.invalid("echo", text)
        form, stop = request.response_format, stops(request.stop)
        where, grammar = grammar_of(request, form, "response_format", notes)
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
            prompt_logprobs=scored,
            grammar=grammar,
        )
        return Job(
            [Text(prompt, request.suffix) for prompt in _prompts(request.prompt)],
            params,
            request.n,
            names,
            stop=stop,
            token_ids=request.return_token_ids,
            hides_special=request.skip_special_tokens,
        )

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        text, scored = outcome.text, self._scored(outcome)
        tokens: _Entries = [*outcome.tokens]
        result = outcome.end.result
        if self.request.echo:
            text = outcome.start.prompt + text
            tokens = scored + tokens
            if result.stop_token is not None and result.stop_logprob is not None:
                # Evaluations count on an entry for every token that was generated.
                tokens.append((result.stop_token, result.stop_logprob))
        logprobs = None
        if self.job.params.logprobs:
            logprobs = self._logprobs(index, tokens)
        body: dict[str, Any] = {"text": text, "logprobs": logprobs}
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = [
                entry and self._by_token(token, entry) for token, entry in scored
            ]
        return body

    def _scored(self, outcome: Outcome) -> _Entries:
        """The prompt's tokens with their log-probabilities, once they are known."""
        result = outcome.end.result
        if result.prompt_logprobs is None or result.prompt_token_ids is None:
            return []
        pairs = zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)
        return list(pairs)

    def _by_token(self, token: int, entry: TokenLogprobs) -> dict[str, Any]:
        """An entry in vLLM's form: likeliest tokens and the token itself, by id."""
        return {
            str(other): {
                "logprob": max(logprob, -9999.0),
                "decoded_token": token_text(self.service, other),
            }
            for other, logprob in with_own(token, entry, 1)
        }

    def _by_text(self, likeliest: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by text; of tokens with the same text, the highest."""
        by_text: dict[str, float] = {}
        for token, logprob in likeliest:
            by_text.setdefault(token_text(self.service, token), max(logprob, -9999.0))
        return by_text

    def _logprobs(self, choice: int, tokens: Sequence[_Entry]) -> dict[str, Any]:
        texts = [token_text(self.service, token) for token, _ in tokens]
        begin = self.lengths.get(choice, 0)
        *offsets, self.lengths[choice] = accumulate(map(len, texts), initial=begin)
        return {
            "tokens": texts,
            "token_logprobs": [
                entry and max(entry.logprob, -9999.0) for _, entry in tokens
            ],
            "top_logprobs": [
                entry and self._by_text(with_own(token, entry, len(entry.top)))
                for token, entry in tokens
            ],
            "text_offset": offsets,
        }

    def stream(self, event: Event) -> Iterator[bytes]:
        text, logprobs = "", None
        if isinstance(event, Started):
            if not self.request.echo:
                return
            text = event.prompt
        elif isinstance(event, Delta):
            text = event.text
            if event.tokens and self.job.params.logprobs:
                logprobs = self._logprobs(event.choice, event.tokens)
        yield self.chunk(event, text=text, logprobs=logprobs)


parse = TextRendering.parse
