"""Runs jobs of all protocols on one engine: queue, tokens, time limits, shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoder import SpecDecoder
from ..engine.async_server import Server
from ..errors import ConfigError, ServerError
from ..grammar import FAILED, Grammar
from ..model_names import short
from ..outputs import GenerationResult, StreamEvent
from ..sampling_params import SamplingParams
from ..utils.output_text import stop_texts
from .config import DEFAULT_NAME, ServerConfig
from .encoding import Encoded, encode_source
from .errors import RequestError, request_error
from .job import Chat, Delta, End, EndReason, Event, Job, Started, Text, Tokens, Tools
from .metrics import Metrics
from .parts import Parts
from .schema import Notes

log = logging.getLogger("specdec.server")

#: Weight of the row that ended last in the mean time that a row takes.
_NEWEST = 0.1
_MOST_RETRY_AFTER = 60
# A row of this many rounds, none of which drafted, shows that the draft idles.
_IDLE_ROUNDS = 32

#: Prompt, parameters and tools of one choice.
Choice: TypeAlias = tuple[Encoded, SamplingParams, Tools]
# Events of all choices of a job, as they come.
_Inbox = asyncio.Queue[Event | Exception]


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be decoded.

    Args:
        began: when the job arrived.
        choices: prompt, parameters and tools of each choice.

    Attributes:
        generated: how many tokens each choice has so far.
    """

    job: Job
    began: float
    choices: Sequence[Choice]
    generated: Counter[int] = field(default_factory=Counter)


class Service:
    """Answers jobs; used from one event loop.

    Args:
        decoder: the loaded decoder.
        engine: the decoder's server, which is open.
        config: limits.
    """

    def __init__(self, decoder: SpecDecoder, engine: Server, config: ServerConfig):
        self.decoder = decoder
        self.engine = engine
        self.config = config
        self.created = int(time.time())
        store = decoder.prefix_store
        self.metrics = Metrics(
            engine, lambda: self.waiting, lambda: 0 if store is None else store.nbytes
        )
        names = [name for name in config.names if name != "*"]
        self.names = tuple(names) or (short(decoder.target_name),)
        self._rows = 0  # of accepted requests that have not been answered
        self._row_seconds = 1.0
        self._draining = False
        self._draft_idles = False  # and the log says so
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def batch_size(self) -> int:
        """How many rows decode together at most."""
        return self.decoder.config.batch_size

    @property
    def waiting(self) -> int:
        """How many rows wait to decode."""
        return max(0, self._rows - self.batch_size)

    @property
    def healthy(self) -> bool:
        """Whether requests are answered."""
        return self.failure is None and not self._draining

    @property
    def failure(self) -> BaseException | None:
        """The engine's error, if it failed."""
        return self.engine.failure

    @property
    def pending(self) -> int:
        """How many answers have not ended."""
        return self.engine.pending

    def notes(self) -> Notes:
        """Notes of a new request."""
        return Notes(strict=self.config.strict)

    def check_model(self, name: str | None) -> str:
        """The model's name in a response, if the request names it ``name``."""
        if "*" in self.config.names or name in self.names:
            return name or self.names[0]
        if name in (None, DEFAULT_NAME):
            return self.names[0]
        raise RequestError.no_model(name, self.names[:1])

    @contextmanager
    def places(self, rows: int) -> Iterator[None]:
        """Reserve ``rows`` rows, running or waiting."""
        most = self.batch_size + self.config.max_waiting
        if self._draining:
            raise RequestError.stopping()
        if rows > most:
            raise RequestError.invalid(
                "n",
                f"{rows} choices are asked for and {most} is the most: ask for fewer",
            )
        if self._rows + rows > most:
            raise RequestError(
                f"{self._rows} requests run or wait, which is the limit: try again "
                "later",
                status=429,
                code="queue_full",
                retry_after=self._retry_after(),
            )
        self._rows += rows
        self._idle.clear()
        try:
            yield
        finally:
            self._rows -= rows
            if not self._rows:
                self._idle.set()

    def _retry_after(self) -> int:
        """Seconds until a row should be free, by the mean time of earlier rows."""
        seconds = self._row_seconds / self.batch_size
        return min(_MOST_RETRY_AFTER, max(1, math.ceil(seconds)))

    async def encode(self, sources: Sequence[Chat | Text]) -> list[Encoded]:
        """Encode prompts as token ids, in another thread.

        Raises:
            PromptError, RequestError: a prompt cannot be used.
        """
        work = partial(_encode_all, self.decoder, sources)
        return await self.engine.tokenize(work)

    async def prepare(self, job: Job, notes: Notes | None = None) -> Prepared:
        """Check everything about a job before its answer begins.

        Raises:
            RequestError: the job cannot be served.
        """
        began = time.monotonic()
        work = partial(self._choices, job)
        try:
            async with asyncio.timeout(self.config.request_timeout):
                choices = await self.engine.tokenize(work)
                choices = await self._compiled(job, choices, notes)
        except TimeoutError as error:
            raise _too_late() from error
        except asyncio.CancelledError as error:
            if not self._draining:
                raise
            # The server ends before a grammar is compiled: its client is told.
            raise RequestError.stopping() from error
        except Exception as error:
            raise self._refusal(error, job) from error
        return Prepared(job, began, choices)

    def _refusal(self, error: Exception, job: Job) -> RequestError:
        """What to answer for an error."""
        closed = isinstance(error, ServerError) and self.failure is None
        if closed and self._draining:
            return RequestError.stopping()
        return request_error(error, job.names)

    async def _compiled(
        self, job: Job, choices: list[Choice], notes: Notes | None
    ) -> list[Choice]:
        """The choices, once their grammar is compiled."""
        grammar = job.params.grammar
        if grammar is None:
            return choices
        where, fault = await self._fault(job.names["grammar"], grammar)
        if fault is None:
            return choices
        for part in job.grammar_parts:
            at, inner = await self._fault(*part)
            if inner is not None:
                where, fault = at, inner
                break
        if job.grammar_required:
            raise RequestError.invalid(where, f"{where}: {fault}") from fault
        if notes is not None:
            notes.add(f"calls do not follow their schemas: {fault}")
        return [(e, replace(p, grammar=None), tools) for e, p, tools in choices]

    async def _fault(
        self, where: str, grammar: Grammar
    ) -> tuple[str, ConfigError | None]:
        """Why the form that a parameter asks for cannot be used, after its name."""
        try:
            await self.engine.compile(grammar)
        except ConfigError as error:
            return where, error
        return where, None

    def _choices(self, job: Job) -> list[Choice]:
        """Prompts and parameters of all choices; runs in the tokenizing thread."""
        encoded = _encode_all(self.decoder, job.sources)
        choices = []
        stop_texts(job.params.stop)  # kept
        for i in range(job.choices):
            source, prompt = job.sources[i // job.n], encoded[i // job.n]
            tools = source.tools if isinstance(source, Chat) else Tools()
            params = job.params
            if i and params.seed is not None:
                params = replace(params, seed=params.seed + i)
            if prompt.stop_token_ids:
                ends = (*params.stop_token_ids, *prompt.stop_token_ids)
                params = replace(params, stop_token_ids=ends)
            self._check_size(prompt, job)
            params = self.decoder.bounds.check(prompt.prompt, params)
            choices.append((prompt, params, tools))
        return choices

    def _check_size(self, encoded: Encoded, job: Job) -> None:
        most, size = self.config.max_prompt_tokens, len(encoded.prompt.token_ids)
        if most is not None and size > most:
            raise RequestError(
                f"the prompt has {size} tokens and {most} are allowed: shorten it",
                field=job.names.get("prompt"),
                code="context_length_exceeded",
            )

    async def events(self, prepared: Prepared) -> AsyncGenerator[Event | None, None]:
        """Decode a job; closing the generator cancels the rest of it.

        The generator yields ``None`` after ``keep_alive`` seconds without an event.

        Raises:
            RequestError: the engine or a row failed.
        """
        for i, (encoded, _, _) in enumerate(prepared.choices):
            text, tokens = encoded.prompt.text, len(encoded.prompt.token_ids)
            counts = i % prepared.job.n == 0
            ids = encoded.prompt.token_ids if prepared.job.token_ids else ()
            yield Started(i, text, tokens, counts, ids)
        inbox: _Inbox = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._decode(prepared, i, inbox))
            for i in range(len(prepared.choices))
        ]
        left = len(tasks)
        try:
            while left:
                try:
                    async with asyncio.timeout(self.config.keep_alive):
                        event = await inbox.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, Exception):
                    raise self._refusal(event, prepared.job) from event
                left -= isinstance(event, End)
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, prepared: Prepared, choice: int, inbox: _Inbox) -> None:
        """Put the events of one choice into the inbox."""
        encoded, params, tools = prepared.choices[choice]
        parts = Parts(
            choice, self.decoder.tokenizer, encoded, tools, prepared.job.hides_special
        )
        spent = time.monotonic() - prepared.began
        timeout = max(0.0, self.config.request_timeout - spent)
        newest: float | None = None
        try:
            stream = self.engine.stream(
                encoded.prompt, params, timeout=timeout, checked=True
            )
            async with aclosing(stream) as events:
                async for event in events:
                    prepared.generated[choice] += len(event.token_ids)
                    if event.token_ids:
                        before, newest = newest, time.monotonic()
                        if before is None:
                            self.metrics.first_token(newest - prepared.began)
                        else:
                            self.metrics.next_tokens(newest - before)
                    for part in parts.feed(event.text):
                        inbox.put_nowait(part)
                    tokens = _tokens(event)
                    ids = tuple(event.token_ids) if prepared.job.token_ids else ()
                    if tokens or ids:
                        inbox.put_nowait(Delta(choice, "text", "", tokens, ids))
                    if event.result is not None:
                        self._end(encoded, prepared, choice, parts, event.result, inbox)
        except Exception as error:
            inbox.put_nowait(error)

    def _end(
        self,
        encoded: Encoded,
        prepared: Prepared,
        choice: int,
        parts: Parts,
        result: GenerationResult,
        inbox: _Inbox,
    ) -> None:
        self.metrics.ended(result)
        self._note_idle_draft(result, prepared.choices[choice][1])
        prepared.generated[choice] = result.generated_tokens
        spent = time.monotonic() - prepared.began
        self._row_seconds += _NEWEST * (spent - self._row_seconds)
        if (result.error or "").startswith(FAILED):
            where = prepared.job.names["grammar"]
            text = f"{where}: {result.error}: give a simpler one"
            raise RequestError.invalid(where, text)
        if result.finish_reason == "error":
            raise RequestError(
                f"the request failed: {result.error}", status=500, code="row_failed"
            )
        cut = None
        if result.finish_reason == "cancelled":
            cut = "shutdown" if self._draining else "time limit"
            if not result.token_ids and cut == "time limit":
                raise _too_late()
        stop = result.stop_reason
        asked = isinstance(stop, str) and stop in prepared.job.stop
        ended = result.finish_reason == "stop"
        closed = stop if ended and isinstance(stop, str) and not asked else ""
        for part in (*parts.feed(closed), *parts.finish(cut=asked or not ended)):
            inbox.put_nowait(part)
        reason: EndReason = "length"
        if ended:
            reason = "tool_calls" if parts.calls and not parts.cut else "stop"
        inbox.put_nowait(
            End(
                choice,
                reason,
                result,
                stop=str(stop) if asked else None,
                cut=cut,
                reasoning_tokens=self._reasoning_tokens(encoded, result),
            )
        )

    def _note_idle_draft(
        self, result: GenerationResult, params: SamplingParams
    ) -> None:
        """Say once why nothing is drafted, where the number of tokens is chosen."""
        free = params.num_draft_tokens is None and not params.stepwise
        idle = free and not result.drafted and result.rounds >= _IDLE_ROUNDS
        reason = self.decoder.draft_length_reason
        if idle and reason is not None and not self._draft_idles:
            self._draft_idles = True
            log.info("the draft idles: %s", reason)

    def _reasoning_tokens(self, encoded: Encoded, result: GenerationResult) -> int:
        """How many tokens an answer's first thought has, its markers included."""
        tokenizer: TokenizerWrapper = self.decoder.tokenizer
        tokens = result.token_ids
        if not getattr(tokenizer, "has_thinking", False) or not tokens:
            return 0
        if not encoded.thinks and tokenizer.find_think_start(tokens) != 0:
            return 0
        end = tokenizer.find_think_end(tokens)
        return len(tokens) if end < 0 else end + len(tokenizer.think_end_tokens)

    async def drain(self) -> None:
        """Accept no more requests; let running ones end, or cut them after a while.

        The engine is closed afterwards.
        """
        self._draining = True
        try:
            async with asyncio.timeout(self.config.stop_timeout):
                await self._idle.wait()
        except TimeoutError:
            pass
        await self.engine.aclose()


def _encode_all(decoder: SpecDecoder, sources: Sequence[Chat | Text]) -> list[Encoded]:
    return [encode_source(decoder, source) for source in sources]


def _tokens(event: StreamEvent) -> Tokens | None:
    if event.logprobs is None:
        return None
    return list(zip(event.token_ids, event.logprobs, strict=True))


def _too_late() -> RequestError:
    why = "the time limit of a request ended before its first token: try again later"
    return RequestError.later("timeout", why)
