"""Requests that come and go: add, cancel, step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import ConfigError, MemoryLimitError, PromptError, SessionError
from ..grammar import (
    Grammar,
    GrammarCompiler,
    GrammarState,
    ThinkingBudget,
    ThinkingMarks,
)
from ..outputs import EngineLoad, GenerationResult, RunStats, StreamEvent
from ..prompts import NO_CONTEXT, EncodedPrompt, Encoding, Prompt, PromptLimit, encode
from ..request import Request
from ..sampling_params import SamplingParams, require_params
from ..utils.output_text import token_text
from .admission import Preflight
from .engine import Engine
from .round import StepOutput
from .turns import turns


@dataclass(frozen=True)
class Bounds:
    """The limits that every request is checked against.

    Args:
        vocab_size: the target's number of logits.
        context_length: positions that the target can serve; ``None``: unknown.
        preflight: knows what fits in memory; ``None``: memory is not checked.
        grammars: compiles grammars; ``None``: requests with a grammar are refused.
        unscored: says why prompts have no log-probabilities, or "".
    """

    vocab_size: int
    context_length: int | None = None
    preflight: Preflight | None = None
    grammars: GrammarCompiler | None = None
    unscored: Callable[[], str] = str

    def check(self, prompt: EncodedPrompt, params: SamplingParams) -> SamplingParams:
        """The parameters, with ``max_tokens`` cut to what the context leaves.

        Raises:
            PromptError: the prompt is longer than the context.
            ConfigError: a token id is not in the target's vocabulary.
            MemoryLimitError: the request does not fit in memory even alone.
        """
        if params.prompt_logprobs is not None and (reason := self.unscored()):
            raise ConfigError(
                f"prompt_logprobs is not supported ({reason}): leave it out",
                field="prompt_logprobs",
            )
        named = (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("xtc_special_tokens", params.xtc_special_tokens or ()),
        )
        for name, tokens in named:
            if any(token >= self.vocab_size for token in tokens):
                raise ConfigError(
                    f"{name} names token {max(tokens)}: "
                    f"the target's last is {self.vocab_size - 1}",
                    field=name,
                )
        params = self._cut(prompt, params)
        if self.preflight is not None:
            self.preflight.check(len(prompt.token_ids), params, prompt.images)
        return params

    def grammar(self, params: SamplingParams) -> GrammarState | None:
        """The first state of a request's grammar; ``None`` if it has none.

        Raises:
            ConfigError: the grammar cannot be used.
        """
        if params.grammar is None:
            return None
        if self.grammars is None:
            raise ConfigError("grammars cannot be compiled here: leave grammar out")
        return self.grammars.compile(params.grammar)

    def prepare(self, grammar: Grammar) -> None:
        """Begin to compile a grammar that a request will need soon."""
        if self.grammars is not None:
            self.grammars.begin(grammar)

    def _cut(self, prompt: EncodedPrompt, params: SamplingParams) -> SamplingParams:
        if self.context_length is None:
            return params
        PromptLimit(None, self.context_length).check_count(len(prompt.token_ids))
        room = self.context_length - len(prompt.token_ids)
        # The last token is never fed, so a full context still gives one token.
        max_tokens = min(params.max_tokens, max(room, 1))
        min_tokens = min(params.min_tokens, max_tokens)
        if max_tokens == params.max_tokens:
            return params
        return replace(params, max_tokens=max_tokens, min_tokens=min_tokens)


class Session:
    """Requests that are added while others run, and cancelled at any time.

    Made by :meth:`specdec.SpecDecoder.session`. It decodes only while :meth:`step`
    runs::

        session = decoder.session()
        first = session.add("What is MLX?")
        while session.busy:
            for event in session.step():
                print(event.index, event.text)

    It belongs to the thread that made it, as MLX's streams do. Other threads may step
    other sessions, of the same decoder or of another: their steps take turns.

    After a step that was interrupted (by Ctrl-C, or an error of the engine) it decodes
    no more: the next step reports which requests had ended, and everything after that
    raises :class:`SessionError`.

    Args:
        engine: decodes the requests.
        tokenizer: encodes prompts.
        bounds: the limits of every request.
        limit: the longest prompt.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerWrapper,
        bounds: Bounds,
        limit: PromptLimit = NO_CONTEXT,
    ):
        self._engine = engine
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._limit = limit
        self._next_index = 0
        self._broken = False  # a step was interrupted
        self._thread = threading.get_ident()

    @property
    def busy(self) -> bool:
        """Whether a request has not ended, or its end has not been reported."""
        return self._engine.busy or bool(self._engine.unreported)

    @property
    def load(self) -> EngineLoad:
        """The engine's current load."""
        return self._engine.load

    @property
    def stats(self) -> RunStats:
        """Counts and times since the session began."""
        return self._engine.stats

    def warm_up(self, needed: Callable[[], bool] = lambda: True) -> None:
        """Compile the kernels that requests will need, on a GPU that compiles any.

        Otherwise the first request waits for it. It ends early once ``needed`` says no.
        """
        with turns.hold():
            self._engine.warm_up(needed)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **encoding: Unpack[Encoding],
    ) -> int:
        """Queue a prompt: first come, first served.

        Args:
            prompt: a string, chat messages or token ids, as for
                :meth:`specdec.SpecDecoder.generate`.
            params: how to decode it. The seed is used as given; a request that samples
                without one gets a random one, which its result reports.
            encoding: ``system_prompt`` and the like, as for
                :meth:`specdec.SpecDecoder.generate`.

        Returns:
            The index by which its events and its result name it.

        Raises:
            PromptError: the prompt cannot be encoded, or is longer than the
                target's context.
            ConfigError: a token id is not in the target's vocabulary, the grammar
                cannot be used, or ``params`` is not a :class:`SamplingParams`.
            SessionError: a step was interrupted, or another thread made the session.
        """
        params = SamplingParams() if params is None else require_params(params)
        encoded = encode(self._tokenizer, prompt, limit=self._limit, **encoding)
        return self.add_encoded(encoded, params)

    def add_encoded(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        grammar: GrammarState | None = None,
        *,
        checked: bool = False,
    ) -> int:
        """As :meth:`add`, for a prompt that is encoded already.

        Args:
            grammar: the grammar of ``params``, if it is compiled already.
            checked: :meth:`Bounds.check` has returned ``params``.
        """
        self._check_whole()
        params = self._completed(params)
        if not checked:
            params = self._bounds.check(prompt, params)
        return self._queue(prompt, params, grammar or self._bounds.grammar(params))

    def _queue(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        grammar: GrammarState | None,
    ) -> int:
        """Queue a request that was checked, with all defaults filled in."""
        marks = self._thinking(prompt)
        state: GrammarState | ThinkingBudget | None = grammar
        if params.max_thinking_tokens is not None and marks is not None:
            words = -(-self._bounds.vocab_size // 32)
            budget = params.max_thinking_tokens
            state = ThinkingBudget(marks, budget, words, grammar)
        index = self._next_index
        request = Request(
            index,
            prompt.text,
            prompt.token_ids,
            params,
            grammar=state,
            images=prompt.images,
        )
        self._next_index += 1
        self._engine.add(request)
        return index

    def _thinking(self, prompt: EncodedPrompt) -> ThinkingMarks | None:
        """The tokens around thoughts, if the model has any."""
        if not getattr(self._tokenizer, "has_thinking", False):
            return None
        start = tuple(self._tokenizer.think_start_tokens)
        return ThinkingMarks(
            start, tuple(self._tokenizer.think_end_tokens), prompt.thinks
        )

    def _completed(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with a seed and other defaults filled in for the request."""
        if params.xtc_probability > 0 and params.xtc_special_tokens is None:
            # As in mlx-lm's command line: a text must be able to break lines and end.
            newline = self._tokenizer.encode("\n", add_special_tokens=False)
            special = (*newline, *sorted(self._tokenizer.eos_token_ids))
            special = tuple(t for t in special if t < self._bounds.vocab_size)
            params = replace(params, xtc_special_tokens=special)
        return params.seeded()

    def add_all(
        self, prompts: Iterable[EncodedPrompt], params: Iterable[SamplingParams]
    ) -> list[int]:
        """Add several prompts: all of them, or none if one is refused."""
        checked = []
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                p = self._bounds.check(prompt, p)
                checked.append((prompt, p, self._bounds.grammar(p)))
            except (PromptError, ConfigError, MemoryLimitError) as error:
                raise error.of_prompt(i) from error
        return [self.add_encoded(*each, checked=True) for each in checked]

    def cancel(self, index: int) -> bool:
        """End a request with the tokens it has; the next step gives its last event.

        Returns:
            Whether there was something to cancel: ``False`` if the request had ended,
            or no request has that index.

        Raises:
            SessionError: a step was interrupted.
        """
        self._check_whole()
        self._broken = True
        cancelled = self._engine.cancel(index)
        self._broken = False
        return cancelled

    def step(self) -> list[StreamEvent]:
        """Run one chunk of prefill, one round, or both; return what requests emitted.

        The list is empty until the first tokens can be read, and when nothing is left
        to do.

        Raises:
            SessionError: an earlier step was interrupted, and the requests that had
                ended were reported.
        """
        self._check_thread()
        if self._broken:
            events = list(map(self._event, self._engine.abandon()))
            if not events:
                self._check_whole()
            self._engine.reported()
            return events
        self._broken = True
        with turns.hold():
            events = list(map(self._event, self._engine.step()))
        self._engine.reported()
        self._broken = False
        return events

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise SessionError(
                "a session belongs to the thread that made it: make one in each "
                "thread, or use decoder.serve()"
            )

    def _check_whole(self) -> None:
        self._check_thread()
        if self._broken:
            raise SessionError(
                "a step of this session did not end, so it decodes no more: "
                "begin another session"
            )

    def _event(self, output: StepOutput) -> StreamEvent:
        result = None
        if output.ended:
            text_of = partial(token_text, self._tokenizer)
            result = GenerationResult.of(output.request, text_of)
        return StreamEvent(
            index=output.request.index,
            text=output.text,
            token_ids=output.token_ids,
            result=result,
            logprobs=output.logprobs,
        )
