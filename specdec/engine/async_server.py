"""Decodes requests of asyncio tasks together, in one thread.

The thread owns the session, since MLX's streams belong to the thread that made them,
and a round would block the event loop. Requests and cancels reach it through a queue;
events go back to the loop once a step. Prompts are tokenized in another thread, in the
order they came, so that a long prompt blocks neither rows nor loop. Grammars are
compiled in several more threads, so that nothing waits for a slow grammar.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import traceback
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
from .turns import idle_streams, mine, take_stream, turns

# Seconds that a process waits at its end for a server that was not closed.
_PATIENCE = 10.0
# Seconds between two readings of the engine's load.
_LOOKS = 0.1
# Stands for a prompt that need not be tokenized.
_UNREAD = EncodedPrompt("", ())

OpenSession = Callable[[], AbstractContextManager[Session]]
T = TypeVar("T")


@dataclass(eq=False)
class _Ticket:
    """A request's state that the threads share until the session has the request.

    The event loop reads ``inbox`` and sets ``left``. The tokenizing thread calls
    ``encode``, a compiling thread sets ``grammar``, the session's thread ``index``.
    """

    encode: Callable[[], EncodedPrompt]
    params: SamplingParams
    inbox: asyncio.Queue[StreamEvent | Exception] = field(default_factory=asyncio.Queue)
    left: bool = False
    cut: bool = False  # to end as it is, with a result
    grammar: GrammarState | None = None
    checked: bool = False
    index: int | None = None


_Messages = list[tuple[_Ticket, StreamEvent | Exception]]


class _Lane:
    """A queue of work with threads of its own; work begins in order.

    Args:
        name: the threads' name. They start with the first work.
        ended: called after the last work.
        width: the most threads.
    """

    def __init__(self, name: str, ended: Callable[[], None], width: int = 1):
        self._name, self._ended, self._width = name, ended, width
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._begun, self._over = 0, False

    def put(self, work: Callable[[], None]) -> None:
        """Queue ``work``; after :meth:`end` it is never done."""
        with self._lock:
            if self._begun < self._width and not self._over:
                self._begun += 1
                # A daemon, as Python waits for other threads without a bound.
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._works.put(work)

    def end(self) -> None:
        """Accept no more work."""
        with self._lock:
            first, self._over = not self._over, True
        if self._begun:
            self._works.put(None)
        elif first:
            self._ended()

    def _run(self) -> None:
        for work in iter(self._works.get, None):
            with suppress(RuntimeError):  # the loop has ended, and its readers
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
        loop: the event loop of the requests' readers.
        receive: called in the loop with events and errors of requests.
        receive_end: called in the loop at the end, with the engine's error, if there
            was one.
        grammars: compiles grammars; ``None``: they are compiled in the session's
            thread.
    """

    def __init__(
        self,
        open_session: OpenSession,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[_Messages], None],
        receive_end: Callable[[BaseException | None], None],
        grammars: GrammarCompiler | None,
    ):
        # A daemon: a loop that died without closing the server must not keep Python
        # alive.
        super().__init__(name="specdec server", daemon=True)
        self.stats = RunStats()
        self.load = EngineLoad()
        self._looked = 0.0  # when the load was read
        self._open_session = open_session
        self._loop = loop
        self._receive = receive
        self._receive_end = receive_end
        self._grammars = grammars
        self._commands: SimpleQueue[Callable[[Session], None]] = SimpleQueue()
        self._requests: dict[int, _Ticket] = {}
        self._compilations = _Lane("specdec compiler", self._all_compiled, AT_ONCE)
        self._prompts = _Lane("specdec tokenizer", self._compilations.end)
        self._closing = False  # set by any thread
        self._all_came = False

    # -- called by the loop ------------------------------------------------

    def add(self, request: _Ticket) -> None:
        """Tokenize a request's prompt in its turn, then decode it."""
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
        """Compile a grammar in a compiling thread, in its turn."""
        if self._grammars is None or self._grammars.kept(grammar) is not None:
            future.set_result(None)
            return

        def work() -> None:
            assert self._grammars is not None
            self._grammars.compile(grammar)

        self._compilations.put(partial(self._call, work, future))

    def cut(self, request: _Ticket) -> None:
        """End a request with the tokens it has; the next step gives its last event."""
        request.cut = True
        self._commands.put(partial(self._cancel, request))

    def cancel(self, request: _Ticket) -> None:
        """End a request, whether it has begun or not."""
        request.left = True
        self._commands.put(partial(self._cancel, request))

    def close(self) -> None:
        """End all requests, then the thread; waiting prompts are not tokenized."""
        self._closing = True
        self._commands.put(self._cancel_all)
        self._prompts.end()

    def give_up(self, failure: BaseException | None) -> None:
        """Tell the loop that nothing more will come; called by any thread."""
        with suppress(RuntimeError):  # the loop has ended, and its readers
            self._loop.call_soon_threadsafe(self._receive_end, failure)

    # -- in the tokenizing and the compiling thread ------------------------

    def _all_compiled(self) -> None:
        self._commands.put(self._end_of_prompts)

    def _encode(self, request: _Ticket) -> None:
        """Encode a request's prompt, and pass it on to the session."""
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
        """Compile a request's grammar, and pass the request on to the session."""
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
        """Call ``work``, unless nobody waits for its result."""
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
        except BaseException as error:  # readers must learn of any error
            failure = error
        self.close()  # after a failure, the tokenizing thread still runs
        if failure is not None:
            # Its frames would keep the caches alive as long as the error.
            traceback.clear_frames(failure.__traceback__)
        if not isinstance(failure, RankError):
            # A process that ends while a thread has streams aborts.
            mx.clear_streams()
        atexit.unregister(self._end)
        self.give_up(failure)

    def _end(self) -> None:
        """End the thread when the process ends."""
        self.close()
        self._commands.put(self._end_of_prompts)  # the last prompts have no readers
        self.join(_PATIENCE)

    def _serve(self) -> None:
        with self._open_session() as session:
            self.stats = session.stats
            session.warm_up(lambda: not self._closing)
            self._work(session)

    def _work(self, session: Session) -> None:
        while session.busy or not self._all_came:
            self._obey(session, wait=not session.busy)
            try:
                self._report(session.step())
                self._look(session)
            except BaseException:
                with suppress(Exception):  # requests that ended in the failed step
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
        """Run the commands in the queue; with ``wait``, wait for the first one."""
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
            params = replace(params, grammar=None)  # it was not compiled
        try:
            request.index = session.add_encoded(
                prompt, params, grammar, checked=request.checked
            )
        except Exception as error:  # only this request fails
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


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


@contextmanager
def _stream() -> Iterator[None]:
    """Make a stream of this thread's own the default within the block."""
    mine.has_stream = True  # so that a turn lends none
    with turns.hold():
        stream = take_stream(mx.default_device())
        mx.set_default_stream(stream)
    try:
        yield
    except RankError:
        raise  # waiting for a rank that has ended could take for ever
    except BaseException:
        _settle_stream(stream)
        raise
    _settle_stream(stream)


def _settle_stream(stream: mx.Stream) -> None:
    """Wait for a thread's work; then another thread may use its stream."""
    with suppress(Exception):  # a device's failure was reported before
        mx.synchronize(stream)
    idle_streams[str(stream.device)].append(stream)


class Server:
    """Serves requests of one event loop; made by :meth:`specdec.SpecDecoder.serve`.

    All requests decode together; each has its own row::

        async with decoder.serve() as server:
            results = await asyncio.gather(
                server.generate("What is MLX?"),
                server.generate("Name a river.", SamplingParams(temperature=0.7)),
            )
            async for event in server.stream("Name a lake."):
                print(event.text, end="")

    To be used only from the event loop that entered it. Its memory depends on its
    requests: the engine bounds running rows, a waiting request takes the size of its
    prompt, and events that nobody has read are bounded by ``max_tokens``. The caller
    must limit the number of requests (:attr:`pending`).

    Args:
        open_session: makes the session, in the thread that steps it.
        encode: turns a prompt into token ids, with the options of :meth:`stream`.
        grammars: compiles grammars in threads of their own; ``None``: each is compiled
            when the session gets its request.
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

        It waits for the running step (a prefill chunk or a round), and for the prompt
        that is being tokenized and the grammar that is being compiled. Waiting prompts
        are not tokenized, and their results have no prompt.
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
        """How many requests have not ended and still have readers."""
        return len(self._open)

    @property
    def stats(self) -> RunStats:
        """Counts and times until now."""
        return RunStats() if self._worker is None else copy(self._worker.stats)

    @property
    def load(self) -> EngineLoad:
        """The engine's load a moment ago."""
        return EngineLoad() if self._worker is None else self._worker.load

    @property
    def failure(self) -> BaseException | None:
        """The engine's error, if it failed."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Fail all requests: the engine's thread is stuck. Any thread may call it."""
        if self._worker is not None:
            self._worker.give_up(error)

    async def tokenize(self, work: Callable[[], T]) -> T:
        """Call ``work``, which tokenizes something, in the tokenizing thread.

        It waits for the prompts before it.

        Raises:
            ServerError: the server is not open, or closes meanwhile.
            Exception: whatever ``work`` raises.
        """
        worker = self._checked_worker()
        future: asyncio.Future[T] = self._future()
        worker.call(work, future)
        return await future

    async def compile(self, grammar: Grammar) -> None:
        """Compile a grammar that requests will bring soon.

        It waits for the grammars before it, not for prompts or rows.

        Raises:
            ConfigError: the grammar cannot be used.
            ServerError: the server is not open, or closes meanwhile.
        """
        worker = self._checked_worker()
        future: asyncio.Future[None] = self._future()
        worker.compile(grammar, future)
        await future

    def _future(self) -> asyncio.Future[Any]:
        """A future that fails when the server ends."""
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
        checked: bool = False,
        **encoding: Unpack[Encoding],
    ) -> AsyncGenerator[StreamEvent, None]:
        """Decode a prompt, yielding what it emits; the last event has its result.

        If the caller leaves its loop or its task is cancelled, the request is cancelled
        once the generator is closed. :func:`contextlib.aclosing` closes it at once;
        Python closes it as soon as nothing refers to it.

        Args:
            prompt: a string, chat messages or token ids, as for
                :meth:`specdec.SpecDecoder.generate`, or an encoded prompt.
            params: how to decode it, as for
                :meth:`specdec.engine.session.Session.add`. A sampler and logits
                processors are called in the server's thread: arrays that they hold must
                be evaluated (``mx.eval``) in the thread that made them.
            timeout: seconds after which the request is cancelled, with a result.
            checked: :meth:`specdec.engine.session.Bounds.check` has returned
                ``params`` for this prompt.
            encoding: ``system_prompt`` and the like, as for
                :meth:`specdec.SpecDecoder.generate`.

        Raises:
            PromptError: the prompt cannot be encoded, or is longer than the
                target's context.
            ConfigError: a token id is not in the target's vocabulary, or ``params`` is
                not a :class:`SamplingParams`.
            ServerError: the server is not open, or its engine failed (``__cause__``
                says why).
        """
        worker = self._checked_worker()
        params = SamplingParams() if params is None else require_params(params)
        encoded = prompt if isinstance(prompt, EncodedPrompt) else None
        encode = partial(self._encode, prompt, **encoding)
        request = _Ticket(encode, params, checked=checked)
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
        """As :meth:`stream`, returning only the result.

        Cancelling the task cancels the request. So does closing the server; the
        result's ``finish_reason`` is ``cancelled`` then.
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
