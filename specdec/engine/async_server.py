"""Requests from asyncio tasks, decoded together by one thread.

The thread owns the session: MLX's streams belong to the thread that made them, and
a round would hold the event loop up. Requests and cancels reach it through a queue,
events go back to the loop, once a step. Prompts are tokenized in another thread, in
the order in which they came: a long one holds up neither the rows nor the loop. In
several others grammars are compiled, so that neither prompts nor other grammars wait
for one that takes long.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import mlx.core as mx

from ..errors import PromptError, RankError, ServerError, reason_of
from ..grammar import AT_ONCE, Grammar, GrammarCompiler, GrammarState
from ..outputs import EngineLoad, GenerationResult, RunStats, StreamEvent
from ..prompts import EncodedPrompt, Encoding, Prompt
from ..sampling_params import SamplingParams, require_params
from ..utils.output_text import stop_texts
from .session import Session

# Streams that no thread uses. MLX keeps a thread for each stream until the process
# ends, so that they are used again; by name, as equal devices have several hashes.
_idle_streams: defaultdict[str, list[mx.Stream]] = defaultdict(list)
# Seconds that the end of the process waits for a server that nobody closed.
_PATIENCE = 10.0
# Seconds between two looks at what the engine is busy with.
_LOOKS = 0.1
# Stands for a prompt that is not tokenized any more.
_UNREAD = EncodedPrompt("", ())

OpenSession = Callable[[], AbstractContextManager[Session]]
T = TypeVar("T")


@dataclass(eq=False)
class _Ticket:
    """What the threads share of a request, until it is one of the session's.

    The event loop reads ``inbox`` and sets ``left``. The tokenizing thread calls
    ``encode``, a compiling thread sets ``grammar``, the session's thread ``index``.
    """

    encode: Callable[[], EncodedPrompt]
    params: SamplingParams
    inbox: asyncio.Queue[StreamEvent | Exception] = field(default_factory=asyncio.Queue)
    left: bool = False
    cut: bool = False  # to end as it is, with a result
    grammar: GrammarState | None = None
    index: int | None = None


_Messages = list[tuple[_Ticket, StreamEvent | Exception]]


class _Lane:
    """Does what it is given in threads of its own, and begins it in order.

    Args:
        name: of the threads, which begin with the first works.
        ended: called after the last one.
        width: most threads.
    """

    def __init__(self, name: str, ended: Callable[[], None], width: int = 1):
        self._name, self._ended, self._width = name, ended, width
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._begun, self._over = 0, False

    def put(self, work: Callable[[], None]) -> None:
        """Have it done in its turn; never, after the end."""
        with self._lock:
            if self._begun < self._width and not self._over:
                self._begun += 1
                # A daemon, as Python waits for other threads without a bound.
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._works.put(work)

    def end(self) -> None:
        """Let nothing more come."""
        with self._lock:
            first, self._over = not self._over, True
        if self._begun:
            self._works.put(None)
        elif first:
            self._ended()

    def _run(self) -> None:
        for work in iter(self._works.get, None):
            with suppress(RuntimeError):  # the loop has gone, and all who could hear
                work()
        self._works.put(None)  # for the next thread
        with self._lock:
            self._begun -= 1
            last = not self._begun
        if last:
            self._ended()


class _Worker(threading.Thread):
    """Steps the session while there is something to do, and sleeps otherwise.

    Args:
        open_session: called in the thread.
        loop: that of the requests' readers.
        receive: called in the loop, with what is for the requests.
        receive_end: called in the loop, last, with what went wrong in the engine, if
            anything did.
        grammars: compiles what outputs have to follow; ``None``: they are compiled in
            the session's thread.
    """

    def __init__(
        self,
        open_session: OpenSession,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[_Messages], None],
        receive_end: Callable[[BaseException | None], None],
        grammars: GrammarCompiler | None,
    ):
        # A loop that died without closing the server must not keep Python alive.
        super().__init__(name="specdec server", daemon=True)
        self.stats = RunStats()
        self.load = EngineLoad()
        self._looked = 0.0  # when that was
        self._open_session = open_session
        self._loop = loop
        self._receive = receive
        self._receive_end = receive_end
        self._grammars = grammars
        self._commands: SimpleQueue[Callable[[Session], None]] = SimpleQueue()
        self._requests: dict[int, _Ticket] = {}
        self._compilations = _Lane("specdec compiler", self._all_compiled, AT_ONCE)
        self._prompts = _Lane("specdec tokenizer", self._compilations.end)
        self._closing = False  # as any thread may say
        self._all_came = False

    # -- called by the loop ------------------------------------------------

    def add(self, request: _Ticket) -> None:
        """Tokenize a request's prompt in its turn, and decode it."""
        self._prompts.put(partial(self._encode, request))

    def add_encoded(self, request: _Ticket, prompt: EncodedPrompt) -> None:
        """Decode a request whose prompt is tokenized, with its grammar compiled."""
        grammar = request.params.grammar
        if grammar is not None and self._grammars is not None:
            request.grammar = self._grammars.kept(grammar)
            if request.grammar is None:
                self._compilations.put(partial(self._compile, request, prompt))
                return
        self._commands.put(partial(self._add, request, prompt))

    def call(self, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        """Call ``work`` in the tokenizing thread, in its turn."""
        self._prompts.put(partial(self._call, work, future))

    def compile(self, grammar: Grammar, future: asyncio.Future[None]) -> None:
        """Compile a grammar in the thread that does, in its turn."""
        if self._grammars is None or self._grammars.kept(grammar) is not None:
            future.set_result(None)
            return

        def work() -> None:
            assert self._grammars is not None
            self._grammars.compile(grammar)

        self._compilations.put(partial(self._call, work, future))

    def cut(self, request: _Ticket) -> None:
        """End a request as it is: its last event comes with the next step."""
        request.cut = True
        self._commands.put(partial(self._cancel, request))

    def cancel(self, request: _Ticket) -> None:
        """End a request, whether it has begun or not."""
        request.left = True
        self._commands.put(partial(self._cancel, request))

    def close(self) -> None:
        """End all requests, then the thread; prompts not begun are not tokenized."""
        self._closing = True
        self._commands.put(self._cancel_all)
        self._prompts.end()

    def give_up(self, failure: BaseException | None) -> None:
        """Let the loop know that nothing comes any more; called by any thread."""
        with suppress(RuntimeError):  # the loop has gone, and all who could hear
            self._loop.call_soon_threadsafe(self._receive_end, failure)

    # -- in the tokenizing and the compiling thread ------------------------

    def _all_compiled(self) -> None:
        self._commands.put(self._end_of_prompts)

    def _encode(self, request: _Ticket) -> None:
        """Encode a request's prompt, and let the session have it."""
        if request.left:
            return
        try:
            unread = self._closing or request.cut
            prompt = _UNREAD if unread else request.encode()
            stop_texts(request.params.stop)  # kept for the session's thread
        except Exception as error:
            self._send([(request, error)])
        except BaseException as error:  # a prompt's own code may raise anything
            self._send([(request, PromptError(f"it fails ({reason_of(error)})"))])
        else:
            self.add_encoded(request, prompt)

    def _compile(self, request: _Ticket, prompt: EncodedPrompt) -> None:
        """Compile a request's grammar, and let the session have it."""
        grammar = request.params.grammar
        if request.left:
            return
        try:
            if not (self._closing or request.cut):
                assert grammar is not None
                assert self._grammars is not None
                request.grammar = self._grammars.compile(grammar)
        except Exception as error:
            self._send([(request, error)])
        else:
            self._commands.put(partial(self._add, request, prompt))

    def _call(self, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        """Call ``work``, unless nobody waits for what it returns."""
        if future.done():
            return
        try:
            if self._closing:
                raise ServerError("the server is closed: make another one")
            settle = partial(_settle, future, work())
        except Exception as error:
            settle = partial(_fail, future, error)
        except BaseException as error:  # a prompt's own code may raise anything
            failed = PromptError(f"it fails ({reason_of(error)})")
            settle = partial(_fail, future, failed)
        self._loop.call_soon_threadsafe(settle)

    # -- in the thread -----------------------------------------------------

    def run(self) -> None:
        failure: BaseException | None = None
        atexit.register(self._end)
        try:
            with _stream():
                self._serve()
        except BaseException as error:  # whatever it is, somebody waits
            failure = error
        self.close()  # where it failed, the tokenizing thread goes on
        if failure is not None:
            # Its frames would keep the caches alive for as long as the error.
            traceback.clear_frames(failure.__traceback__)
        if not isinstance(failure, RankError):
            # A process that ends while a thread has any aborts.
            mx.clear_streams()
        atexit.unregister(self._end)
        self.give_up(failure)

    def _end(self) -> None:
        """End the thread, in the last moments of the process."""
        self.close()
        self._commands.put(self._end_of_prompts)  # nobody hears of the last ones
        self.join(_PATIENCE)

    def _serve(self) -> None:
        with self._open_session() as session:
            self.stats = session.stats
            self._work(session)

    def _work(self, session: Session) -> None:
        while session.busy or not self._all_came:
            self._obey(session, wait=not session.busy)
            try:
                self._report(session.step())
                self._look(session)
            except BaseException:
                with suppress(Exception):  # what had ended in the step that failed
                    self._report(session.step())
                raise

    def _look(self, session: Session) -> None:
        now = time.monotonic()
        if now - self._looked > _LOOKS or not session.busy:
            self._looked, self.load = now, session.load

    def _report(self, events: list[StreamEvent]) -> None:
        if events:
            self._send([(self._requests[e.index], e) for e in events])
        for event in events:
            if event.result is not None:
                del self._requests[event.index]

    def _send(self, messages: _Messages) -> None:
        self._loop.call_soon_threadsafe(self._receive, messages)

    def _obey(self, session: Session, *, wait: bool) -> None:
        """Do what was asked for; with ``wait``, until something is."""
        try:
            while True:
                self._commands.get(block=wait)(session)
                wait = False
        except Empty:
            pass

    def _add(self, request: _Ticket, prompt: EncodedPrompt, session: Session) -> None:
        if request.left:
            return
        params, grammar = request.params, request.grammar
        ends = self._closing or request.cut
        if ends and grammar is None and params.grammar is not None:
            params = replace(params, grammar=None)  # it has not been compiled
        try:
            request.index = session.add_encoded(prompt, params, grammar)
        except Exception as error:  # the request's own fault: nobody else's loss
            self._send([(request, error)])
        else:
            self._requests[request.index] = request
            if ends:
                session.cancel(request.index)

    def _cancel(self, request: _Ticket, session: Session) -> None:
        if request.index is not None:
            session.cancel(request.index)

    def _cancel_all(self, session: Session) -> None:
        for index in self._requests:
            session.cancel(index)

    def _end_of_prompts(self, session: Session) -> None:
        self._all_came = True


def _settle(future: asyncio.Future[T], found: T) -> None:
    if not future.done():
        future.set_result(found)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


@contextmanager
def _stream() -> Iterator[None]:
    """A stream of its own for what this thread computes."""
    device = mx.default_device()
    idle = _idle_streams[str(device)]
    try:
        stream = idle.pop()
    except IndexError:
        stream = mx.new_thread_unsafe_stream(device)
    mx.set_default_stream(stream)
    try:
        yield
    except RankError:
        raise  # what waits for a rank that has ended may never be done
    except BaseException:
        _settle_stream(stream)
        raise
    _settle_stream(stream)


def _settle_stream(stream: mx.Stream) -> None:
    """Wait for what a thread has computed; then another one may use its stream."""
    with suppress(Exception):  # of a device that failed, which was reported
        mx.synchronize(stream)
    _idle_streams[str(stream.device)].append(stream)


class Server:
    """Serves requests of one event loop; made by :meth:`specdec.SpecDecoder.serve`.

    Each request is a row of its own, whoever decodes beside it::

        async with decoder.serve() as server:
            results = await asyncio.gather(
                server.generate("What is MLX?"),
                server.generate("Name a river.", SamplingParams(temperature=0.7)),
            )
            async for event in server.stream("Name a lake."):
                print(event.text, end="")

    To be used from the event loop that entered it. Its memory is bounded by what
    its requests are: a running row by the engine's own bounds, a waiting one by its
    prompt, events that nobody has read by ``max_tokens`` of their request. How many
    requests there are is for the caller to limit (:attr:`pending`).

    Args:
        open_session: makes the session, in the thread that steps it.
        encode: makes token ids of a prompt, with the options of :meth:`stream`.
        grammars: compiles the grammars of requests beside all others; ``None``: each
            is compiled when the session gets its request.
    """

    def __init__(
        self,
        open_session: OpenSession,
        encode: Callable[..., EncodedPrompt],
        grammars: GrammarCompiler | None = None,
    ):
        self._open_session = open_session
        self._encode = encode
        self._grammars = grammars
        self._worker: _Worker | None = None
        self._open: set[_Ticket] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._ended = asyncio.Event()
        self._closed = False
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        if self._worker is not None:
            raise ServerError("a server is entered once: make another one")
        loop = asyncio.get_running_loop()
        self._worker = _Worker(
            self._open_session, loop, self._receive, self._receive_end, self._grammars
        )
        self._worker.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel all requests, report their results, and end the thread.

        It waits for the step that is running (a chunk of prefill or a round), and for
        the prompt that is being tokenized and the grammar that is being compiled.
        Prompts after it are not tokenized: their results have no prompt.
        """
        if self._worker is None:
            return
        if not self._closed:
            self._closed = True
            self._worker.close()
        await self._ended.wait()
        self._worker.join()

    @property
    def pending(self) -> int:
        """Requests that have not ended and whose readers have not left."""
        return len(self._open)

    @property
    def stats(self) -> RunStats:
        """What was counted and measured until now."""
        return RunStats() if self._worker is None else copy(self._worker.stats)

    @property
    def load(self) -> EngineLoad:
        """What the engine was busy with a moment ago."""
        return EngineLoad() if self._worker is None else self._worker.load

    @property
    def failure(self) -> BaseException | None:
        """What went wrong in the engine, if it failed."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Give up, as any thread may say: the engine's own does not come back."""
        if self._worker is not None:
            self._worker.give_up(error)

    async def tokenize(self, work: Callable[[], T]) -> T:
        """Call ``work``, which tokenizes something, in the thread that does.

        It comes after the prompts that were given before.

        Raises:
            ServerError: the server is not open, or closes meanwhile.
            Exception: what ``work`` raises.
        """
        worker = self._checked_worker()
        future: asyncio.Future[T] = self._future()
        worker.call(work, future)
        return await future

    async def compile(self, grammar: Grammar) -> None:
        """Have a grammar compiled, for requests that come with it soon.

        Beside prompts and rows, after the grammars that were given before.

        Raises:
            ConfigError: it cannot be used.
            ServerError: the server is not open, or closes meanwhile.
        """
        worker = self._checked_worker()
        future: asyncio.Future[None] = self._future()
        worker.compile(grammar, future)
        await future

    def _future(self) -> asyncio.Future[Any]:
        """One that fails when the server ends."""
        future = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    async def stream(
        self,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **encoding: Unpack[Encoding],
    ) -> AsyncGenerator[StreamEvent, None]:
        """Decode a prompt, yielding what it emits; the last event has its result.

        Leaving the loop, or cancelling the task, cancels the request: when the
        generator is closed, which :func:`contextlib.aclosing` does at once and
        Python as soon as nobody holds it.

        Args:
            prompt: a string, chat messages or token ids, as for
                :meth:`specdec.SpecDecoder.generate`, or what is encoded already.
            timeout: seconds after which it ends as it is: its result's
                ``finish_reason`` is ``cancelled``.
            params: how to decode it, as for
                :meth:`specdec.engine.session.Session.add`. A sampler and logits
                processors are called in the server's thread:
                arrays that they hold must have been evaluated (``mx.eval``) where
                they were made.
            encoding: ``system_prompt`` and its like, as for
                :meth:`specdec.SpecDecoder.generate`.

        Raises:
            PromptError: the prompt cannot be encoded, or is longer than the
                target's context.
            ConfigError: a token id is none of the target's, or ``params`` are no
                :class:`SamplingParams`.
            ServerError: the server is not open, or its engine failed; what went
                wrong there is its ``__cause__``.
        """
        worker = self._checked_worker()
        params = SamplingParams() if params is None else require_params(params)
        encoded = prompt if isinstance(prompt, EncodedPrompt) else None
        request = _Ticket(partial(self._encode, prompt, **encoding), params)
        self._open.add(request)
        if encoded is not None:
            worker.add_encoded(request, encoded)
        else:
            worker.add(request)
        timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout, worker.cut, request)
        try:
            while True:
                event = await request.inbox.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.result is not None:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            if request in self._open:
                self._open.remove(request)
                worker.cancel(request)

    async def generate(
        self,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> GenerationResult:
        """As :meth:`stream`, with the result alone.

        Cancelling the task cancels the request. Closing the server does as well:
        then the result's ``finish_reason`` is ``cancelled``.
        """
        async with aclosing(self.stream(prompt, params, **options)) as events:
            async for event in events:
                if event.result is not None:
                    return event.result
        raise AssertionError("the last event has the result")

    # -- what the thread sends, in the loop --------------------------------

    def _receive(self, messages: _Messages) -> None:
        for request, event in messages:
            if request not in self._open:  # its reader has left
                continue
            if isinstance(event, Exception) or event.result is not None:
                self._open.remove(request)
            request.inbox.put_nowait(event)

    def _receive_end(self, failure: BaseException | None) -> None:
        self._failure = failure
        for request in self._open:
            request.inbox.put_nowait(self._refusal())
        self._open.clear()
        for future in list(self._calls):
            _fail(future, self._refusal())
        self._ended.set()

    def _checked_worker(self) -> _Worker:
        if self._worker is None or self._closed or self._ended.is_set():
            raise self._refusal()
        return self._worker

    def _refusal(self) -> ServerError:
        if self._failure is not None:
            what = f"{type(self._failure).__name__}: {self._failure}"
            error = ServerError(f"the server is broken: its engine failed with {what}")
            error.__cause__ = self._failure
            return error
        if self._worker is None:
            return ServerError("the server is not open yet: use `async with`")
        return ServerError("the server is closed: make another one")
