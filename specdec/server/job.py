"""A job and the events that answer it, the same for all protocols.

A protocol makes a :class:`Job` from a body. The service answers it with events. Each
choice's events come in the order Started, Delta and Call, End; those of different
choices mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..grammar import Grammar
from ..outputs import GenerationResult
from ..request import TokenLogprobs
from ..sampling_params import SamplingParams

Message: TypeAlias = dict[str, Any]
EndReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Tokens: TypeAlias = list[tuple[int, TokenLogprobs]]


@dataclass(frozen=True)
class Tools:
    """The functions that the model may call, in OpenAI's form, and whether it must.

    Args:
        functions: dicts of the form ``{"type": "function", "function": {...}}``.
        required: the model has to call a function.
        name: the model has to call this function.
        parallel: the model may call several functions at once.
    """

    functions: Sequence[Mapping[str, Any]] = ()
    required: bool = False
    name: str | None = None
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Whether the answer begins with a call."""
        return self.required or self.name is not None

    @property
    def single(self) -> bool:
        """Whether the answer ends with its first call."""
        return self.name is not None or not self.parallel


@dataclass(frozen=True)
class Chat:
    """Messages for the chat template, in mlx-lm's form.

    Args:
        continued: the last message is the beginning of the answer.
        variables: variables of the template, in addition to messages and tools.
        formatted: the answer has a format from its first token on.
    """

    messages: Sequence[Message]
    tools: Tools = field(default_factory=Tools)
    continued: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    formatted: bool = False


@dataclass(frozen=True)
class Text:
    """A text or token ids to continue; with ``suffix``, the middle is filled."""

    prompt: str | tuple[int, ...]
    suffix: str | None = None


@dataclass(frozen=True)
class Client:
    """Who asks.

    Args:
        name: its key, or its address if there are no keys.
        alone: the server is one person's, so that answers need not be kept apart.
    """

    name: str = ""
    alone: bool = True


@dataclass(frozen=True)
class Job:
    """What one request asks for.

    Args:
        sources: the prompts.
        params: how to decode them. Choice ``i`` draws with seed ``params.seed + i``.
        n: choices per prompt.
        names: names of the protocol's parameters, by the fields that they fill.
        stop: the client's stop texts, without those that end a call.
        grammar_required: a grammar that cannot be compiled is an error.
        grammar_parts: forms that are part of it, after the parameters that ask for
            them; if it cannot be compiled, one of them may be at fault.
        token_ids: pieces of the answer name their tokens.
        hides_special: special tokens are left out of the text.
    """

    sources: Sequence[Chat | Text]
    params: SamplingParams
    n: int = 1
    names: Mapping[str, str] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    grammar_required: bool = True
    grammar_parts: Sequence[tuple[str, Grammar]] = ()
    token_ids: bool = False
    hides_special: bool = False

    @property
    def choices(self) -> int:
        """How many answers the job asks for; each takes a row."""
        return len(self.sources) * self.n


@dataclass(frozen=True)
class Started:
    """A choice waits for its first token.

    Args:
        prompt: the prompt's text, as the tokenizer received it.
        counts: whether the prompt's tokens are counted for this choice: choices of one
            prompt count them once.
    """

    choice: int
    prompt: str
    prompt_tokens: int
    counts: bool
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Delta:
    """New text of a choice.

    Args:
        tokens: with their log-probabilities, if these were asked for.
        token_ids: the new tokens, if they were asked for.
    """

    choice: int
    kind: Literal["text", "reasoning"]
    text: str
    tokens: Tokens | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """A tool call of a choice.

    Args:
        arguments: a JSON object as text; its beginning if the call was cut.
        cut: what was written of it, if the answer ended within the arguments.
    """

    choice: int
    index: int
    id: str
    name: str
    arguments: str
    cut: str = ""


@dataclass(frozen=True)
class End:
    """A choice has ended.

    Args:
        stop: the client's stop text that ended it.
        cut: what cut it short: ``time limit`` or ``shutdown``.
        reasoning_tokens: how many tokens its thoughts have.
    """

    choice: int
    reason: EndReason
    result: GenerationResult
    stop: str | None = None
    cut: str | None = None
    reasoning_tokens: int = 0


Event: TypeAlias = Started | Delta | Call | End


@dataclass
class Outcome:
    """What a choice has produced so far."""

    start: Started
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: Tokens = field(default_factory=list)
    num_tokens: int = 0
    ended: End | None = None

    @property
    def end(self) -> End:
        """How the choice ended."""
        assert self.ended is not None
        return self.ended

    def take(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, Delta):
            if event.kind == "text":
                self.text += event.text
            else:
                self.reasoning += event.text
            self.tokens += event.tokens or ()
            self.num_tokens += len(event.token_ids)
        elif isinstance(event, Call):
            self.calls.append(event)
        elif isinstance(event, End):
            self.ended = event
            self.num_tokens = event.result.generated_tokens


@dataclass(frozen=True)
class Usage:
    """Tokens of all choices of a job."""

    prompt: int
    cached: int
    generated: int
    reasoning: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Usage:
        """The sum over choices; a prompt of several choices counts once."""
        counted = [o for o in outcomes if o.start.counts]
        results = [o.ended.result for o in outcomes if o.ended]
        return cls(
            prompt=sum(o.start.prompt_tokens for o in counted),
            cached=sum(o.ended.result.prefix_tokens for o in counted if o.ended),
            generated=sum(o.num_tokens for o in outcomes),
            reasoning=sum(o.ended.reasoning_tokens for o in outcomes if o.ended),
            drafted=sum(r.drafted for r in results),
            accepted=sum(r.accepted for r in results),
        )
