"""Runs jobs of all protocols on one engine: queue, tokens, time limits, shutdown."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ..decoder import SpecDecoder
from ..engine.async_server import Server as Engine
from ..model_names import short
from ..outputs import GenerationResult, StreamEvent
from ..sampling_params import SamplingParams
from ..utils.output_text import stop_texts
from .config import ServerConfig
from .encoding import Encoded, call_grammar, encode_source
from .job import Begun, Chat, End, EndReason, Event, Job, Text, Tokens, Tools
from .metrics import Metrics
from .parts import Parts
from .refusal import Refusal, refusal_of
from .tool_calls import format_of

#: Weight of the row that ended last in the mean time that a row takes.
_NEWEST = 0.1
_MOST_RETRY_AFTER = 60


# Events of all choices of a job, as they come.
_Inbox = asyncio.Queue[Event | Exception]


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be decoded.

    Args:
        began: when the job arrived.
        choices: prompt, parameters and tools of each choice.
    """

    job: Job
    began: float
    choices: Sequence[tuple[Encoded, SamplingParams, Tools]]


class Service:
    """Answers jobs; used from one event loop.

    Args:
        decoder: the loaded decoder.
        engine: the decoder's server, which is open.
        config: limits.
    """

    def __init__(self, decoder: SpecDecoder, engine: Engine, config: ServerConfig):
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

    def check_model(self, name: str | None) -> str:
        """The model's name in a response, if the request names it ``name``."""
        if name is None or "*" in self.config.names or name in self.names:
            return name or self.names[0]
        raise Refusal(
            f"no model {name!r} is served here: use {self.names[0]}",
            status=404,
            param="model",
            code="model_not_found",
        )

    @contextmanager
    def places(self, rows: int) -> Iterator[None]:
        """Reserve ``rows`` rows, running or waiting."""
        most = self.batch_size + self.config.max_waiting
        if self._draining:
            raise Refusal.stopping()
        if rows > most:
            raise Refusal.invalid(
                "n",
                f"{rows} choices are asked for and {most} is the most: ask for fewer",
            )
        if self._rows + rows > most:
            raise Refusal(
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
            PromptError, Refusal: a prompt cannot be used.
        """
        work = partial(_encode_all, self.decoder, sources)
        return await self.engine.tokenize(work)

    async def prepare(self, job: Job) -> Prepared:
        """Check everything about a job before its answer begins.

        Raises:
            Refusal: the job cannot be served.
        """
        began = time.monotonic()
        work = partial(self._choices, job)
        try:
            async with asyncio.timeout(self.config.request_timeout):
                choices = await self.engine.tokenize(work)
                for grammar in {params.grammar for _, params, _ in choices}:
                    if grammar is not None:
                        await self.engine.compile(grammar)
        except TimeoutError as error:
            raise _too_late() from error
        except Exception as error:
            raise refusal_of(error, job.names) from error
        return Prepared(job, began, choices)

    def _choices(self, job: Job) -> list[tuple[Encoded, SamplingParams, Tools]]:
        """Prompts and parameters of all choices; runs in the tokenizing thread."""
        encoded = _encode_all(self.decoder, job.sources)
        choices = []
        seed = job.params.seed
        if seed is None and job.params.draws:
            seed = secrets.randbits(32)
        for i in range(job.choices):
            source, prompt = job.sources[i // job.n], encoded[i // job.n]
            tools = source.tools if isinstance(source, Chat) else Tools()
            params = replace(
                job.params,
                grammar=job.params.grammar
                or call_grammar(self.decoder.tokenizer, tools),
                seed=None if seed is None else seed + i,
                stop=(*job.params.stop, *self._ends(tools)),
                stop_token_ids=(*job.params.stop_token_ids, *prompt.stop_token_ids),
            )
            self._check_size(prompt, job)
            stop_texts(params.stop)  # kept
            params = self.decoder.bounds.check(prompt.prompt, params)
            choices.append((prompt, params, tools))
        return choices

    def _ends(self, tools: Tools) -> tuple[str, ...]:
        """The text that ends an answer with its first call."""
        if not (tools.functions and tools.single):
            return ()
        calls = format_of(self.decoder.tokenizer)
        return (calls.end,) if calls and calls.end else ()

    def _check_size(self, encoded: Encoded, job: Job) -> None:
        most, size = self.config.max_prompt_tokens, len(encoded.prompt.token_ids)
        if most is not None and size > most:
            raise Refusal(
                f"the prompt has {size} tokens and {most} are allowed: shorten it",
                param=job.names.get("prompt"),
                code="context_length_exceeded",
            )

    async def events(self, prepared: Prepared) -> AsyncGenerator[Event | None, None]:
        """Decode a job; closing the generator cancels the rest of it.

        The generator yields ``None`` after ``keep_alive`` seconds without an event.

        Raises:
            Refusal: the engine or a row failed.
        """
        for i, (encoded, _, _) in enumerate(prepared.choices):
            text, tokens = encoded.prompt.text, len(encoded.prompt.token_ids)
            yield Begun(i, text, tokens, counts=i % prepared.job.n == 0)
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
                    raise refusal_of(event, prepared.job.names) from event
                left -= isinstance(event, End)
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, prepared: Prepared, choice: int, inbox: _Inbox) -> None:
        """Put the events of one choice into the inbox."""
        encoded, params, tools = prepared.choices[choice]
        parts = Parts(choice, self.decoder.tokenizer, encoded, tools)
        spent = time.monotonic() - prepared.began
        timeout = max(0.0, self.config.request_timeout - spent)
        first = True
        try:
            stream = self.engine.stream(encoded.prompt, params, timeout=timeout)
            async with aclosing(stream) as events:
                async for event in events:
                    if first and event.token_ids:
                        first = False
                        spent = time.monotonic() - prepared.began
                        self.metrics.first_token(spent)
                    for part in parts.feed(event.text, _tokens(event)):
                        inbox.put_nowait(part)
                    if event.result is not None:
                        self._end(prepared, choice, parts, event.result, inbox)
        except Exception as error:
            inbox.put_nowait(error)

    def _end(
        self,
        prepared: Prepared,
        choice: int,
        parts: Parts,
        result: GenerationResult,
        inbox: _Inbox,
    ) -> None:
        self.metrics.ended(result)
        spent = time.monotonic() - prepared.began
        self._row_seconds += _NEWEST * (spent - self._row_seconds)
        if result.finish_reason == "error":
            raise Refusal(
                f"the request failed: {result.error}", status=500, code="row_failed"
            )
        cut = None
        if result.finish_reason == "cancelled":
            cut = "shutdown" if self._draining else "time limit"
            if not result.token_ids and cut == "time limit":
                raise _too_late()
        stop = result.stop_reason
        asked = isinstance(stop, str) and stop in prepared.job.params.stop
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
            )
        )

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


def _too_late() -> Refusal:
    why = "the time limit of a request ended before its first token: try again later"
    return Refusal.later("timeout", why)
