"""A request: what was asked for, and what was generated so far. No mlx here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Literal

from .grammar import GrammarState, ThinkingBudget
from .prompts.images import PlacedImage
from .sampling_params import SamplingParams
from .utils.output_text import OutputText

FinishReason = Literal["stop", "length", "cancelled", "error"]
_Ending = tuple[FinishReason, int | None]


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and the likeliest tokens at its position.

    Args:
        logprob: the log-probability of the token itself.
        top: pairs (token id, log-probability), the likeliest first.
        text: the token decoded alone; a token that is part of a character gives the
            replacement character.
        top_texts: the texts of the tokens in ``top``.
    """

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    text: str = ""
    top_texts: list[str] = field(default_factory=list)

    def with_texts(self, token: int, text_of: Callable[[int], str]) -> TokenLogprobs:
        """A copy with the texts of ``token`` and of the likeliest tokens."""
        texts = [text_of(other) for other, _ in self.top]
        return replace(self, text=text_of(token), top_texts=texts)

    def to_dict(self, token: int) -> dict[str, object]:
        """The entry of ``token`` as JSON."""
        texts = self.top_texts or [""] * len(self.top)
        return {
            "token_id": token,
            "text": self.text,
            "logprob": self.logprob,
            "top": [
                {"token_id": other, "text": text, "logprob": logprob}
                for (other, logprob), text in zip(self.top, texts, strict=True)
            ],
        }


_numbers = count()


@dataclass(eq=False)
class Request:
    """A prompt, how to decode it, and what was generated for it so far.

    Args:
        index: names the request in results and events; nothing else depends on it.
        prompt: the prompt's text.
        prompt_tokens: the prompt as token ids.
        params: how to decode the request.
        eos_token_ids: tokens that end it, in addition to its own ``stop_token_ids``.
        output: its text as it grows; ``None`` if no text is wanted.
        grammar: the state of the grammar in ``params``, if there is one.
    """

    index: int
    prompt: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: AbstractSet[int] = frozenset()
    output: OutputText | None = None
    grammar: GrammarState | ThinkingBudget | None = None
    #: Images among the prompt's tokens, in order.
    images: tuple[PlacedImage, ...] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    #: Of the prompt's tokens, ``None`` for the first; empty if they were not asked for.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    #: The stop text that ended it.
    stop_reason: str | None = None
    #: The token that ended it, and its log-probability if these were asked for.
    stop_token: int | None = None
    stop_logprob: TokenLogprobs | None = None
    error: str | None = None
    #: Committed tokens that are no output: from a stop text on, and an end token, with
    #: what its last round committed after it.
    unshown: list[int] = field(default_factory=list)
    #: Tokens of the last round that committed any.
    newest: int = 0
    #: Bits in which its keys and values are stored; None: unquantized.
    kv_bits: int | None = None
    #: The most tokens of its prompt in a chunk; None: as of others.
    prefill_step: int | None = None
    #: Whether its prompt is prefilled alone, since together with others it has failed.
    joins_alone: bool = False
    #: The memory that its row needs, once computed (by engine.admission).
    needs: object = None
    #: Whether a draft, if there is one, proposes tokens for it.
    drafts: bool = True
    #: Rounds in a row that drafted for it, of which it accepted nothing.
    fruitless: int = 0
    #: Tokens of the prompt that were found in the prefix store.
    prefix_tokens: int = 0
    rounds: int = 0
    #: How many rounds drafted, and how many accepted, at least 1, 2, ... tokens.
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    #: When it was queued, got its first token, and ended: seconds on one clock.
    queued: float = 0.0
    began: float | None = None
    ended: float | None = None
    #: Unique in this process; other sessions may use the same index.
    number: int = field(default_factory=_numbers.__next__)
    #: Tokens that were taken, see :meth:`take`.
    shown: int = 0

    @cached_property
    def end_tokens(self) -> AbstractSet[int]:
        """Tokens that end it."""
        return self.eos_token_ids | frozenset(self.params.stop_token_ids)

    @property
    def drafted_as(self) -> str | None:
        """The client whose earlier answers may be proposed; ``None``: nobody's.

        With a ratio rule, the text depends on what is proposed. It must not depend on
        other requests.
        """
        params = self.params
        if params.verification != "coupled":
            return None
        return params.draft_corpus or params.cache_salt or ""

    @property
    def answered(self) -> bool:
        """Whether it has ended with a whole answer."""
        return self.finish_reason in ("stop", "length")

    @cached_property
    def reports_logprobs(self) -> bool:
        """Whether its log-probabilities were asked for."""
        return self.params.logprobs or self.params.top_logprobs > 0

    @property
    def max_length(self) -> int:
        """The most tokens that the row can ever hold."""
        return len(self.prompt_tokens) + self.params.max_tokens

    @property
    def length(self) -> int:
        """How many tokens the prompt and the output have so far."""
        return len(self.prompt_tokens) + len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that ``max_tokens`` still allows."""
        return self.params.max_tokens - len(self.tokens)

    @property
    def drafted(self) -> int:
        """Draft tokens proposed, up to its end."""
        return sum(self.num_draft_tokens_per_pos)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted, up to its end."""
        return sum(self.num_accepted_tokens_per_pos)

    def commit(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        num_draft_tokens: int | None = None,
    ) -> int:
        """Append ``tokens``, up to the end of the request.

        A request ends after ``max_tokens``; at an end token, which is not kept; or
        when a stop text is complete. In the last case, tokens that do not contribute
        to the text before the stop text are dropped, also those of earlier rounds. A
        request that has ended takes nothing.

        Args:
            num_draft_tokens: draft tokens that were proposed; all ``tokens`` but the
                last are accepted ones. Those after the end count neither as drafted
                nor as accepted; one that is the end counts as both. ``None``: not a
                round, and not counted.

        Returns:
            How many of ``tokens`` were used, the one that ended it included.
        """
        if self.finish_reason is not None:
            return 0
        used, left = 0, self.remaining
        # Without any left, only the prompt was to be scored.
        ending: _Ending | None = None if left else ("length", None)
        self.newest = len(tokens)
        for token in tokens if left else ():
            used += 1
            if token in self.end_tokens:
                ending = "stop", token
                break
            self.tokens.append(token)
            if self.output is not None and self.output.add(token):
                ending = "stop", None
            elif used == left:
                ending = "length", None
            if ending is not None:
                break
        self.logprobs += logprobs[:used]
        if num_draft_tokens is not None:
            self.rounds += 1
            drafted = num_draft_tokens
            drafted = drafted if ending is None else min(used, drafted)
            if len(tokens) > 1:
                self.fruitless = 0
            elif drafted:
                self.fruitless += 1
            if drafted:
                _count(self.num_draft_tokens_per_pos, drafted)
                accepted = min(used, len(tokens) - 1)
                _count(self.num_accepted_tokens_per_pos, accepted)
        if ending is not None:
            self._end(*ending, rest=tokens[used:])
        return used

    def _end(
        self,
        reason: FinishReason,
        token: int | None = None,
        rest: Sequence[int] = (),
    ) -> None:
        self.unshown = [*([] if token is None else [token]), *rest]
        if self.output is not None:
            self.output.finish(look=reason in ("stop", "length"))
            if self.output.matched is not None:
                reason, token = "stop", None
                self.stop_reason = self.output.matched
                self.unshown[:0] = self.tokens[self.output.num_tokens :]
                del self.tokens[self.output.num_tokens :]
        after = self.logprobs[len(self.tokens) :]
        if token is not None and after:
            self.stop_logprob = after[0]
        del self.logprobs[len(self.tokens) :]
        self.stop_token = token
        # Set last: an interrupt must not leave an ended request half updated.
        self.finish_reason = reason

    def cancel(self) -> None:
        """End it with the tokens it has; do nothing if it has ended."""
        if self.finish_reason is None:
            self._end("cancelled")

    def fail(self, error: str) -> None:
        """End it with an error; do nothing if it has ended."""
        if self.finish_reason is None:
            self.error = error
            self._end("error")

    def take(self) -> tuple[list[int], str, list[TokenLogprobs] | None]:
        """Take the tokens, text and log-probabilities that were not taken yet.

        Log-probabilities are ``None`` if they were not asked for. A part of a
        character or of a stop text is held back until it is complete.
        """
        text, shown = "", len(self.tokens)
        if self.output is not None:
            ended = self.finish_reason is not None
            text, shown = self.output.take(shown, ended=ended)
        span = slice(self.shown, shown)
        self.shown = max(self.shown, shown)
        logprobs = self.logprobs[span] if self.reports_logprobs else None
        return self.tokens[span], text, logprobs


def _count(at: list[int], n: int) -> None:
    """Count a round that reached positions 1, 2, ... ``n``."""
    at += [0] * (n - len(at))
    for i in range(n):
        at[i] += 1


def acceptance_rate(drafted: int, accepted: int) -> float:
    """Accepted draft tokens over drafted ones; 0 when nothing was drafted."""
    return accepted / drafted if drafted else 0.0


def acceptance_length(rounds: int, accepted: int) -> float:
    """Mean tokens per row and round, the round's extra token included."""
    return 1.0 + accepted / rounds if rounds else 1.0


def acceptance_by_position(
    num_draft_tokens_per_pos: list[int], num_accepted_tokens_per_pos: list[int]
) -> list[float]:
    """By position, the share of draft tokens there that were accepted."""
    accepted = [*num_accepted_tokens_per_pos, *([0] * len(num_draft_tokens_per_pos))]
    return [a / d for a, d in zip(accepted, num_draft_tokens_per_pos, strict=False)]
