"""Compiles grammars for a tokenizer with llguidance, and keeps the latest ones.

A grammar may take minutes, gigabytes or a stack of any depth, and neither a thread nor
a stack overflow can be stopped. A compiled one cannot be passed between processes. So
each is compiled twice: first in a child with limits, and, if that went well, here.
"""

from __future__ import annotations

import atexit
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, SpecdecError
from ..utils.child import Child, ChildError
from ..utils.printable import shorten
from .library import Words, error_of, llguidance, matcher_of, tokenizer_of, words_of
from .spec import Grammar
from .state import GrammarState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# How many compiled grammars are kept.
_KEPT = 64
# Seconds that compiling a grammar may take; most take milliseconds.
COMPILE_SECONDS = 10.0
#: How many grammars are compiled at a time: others need not wait for a slow one.
AT_ONCE = 4
# llguidance handles nesting by recursion. As measured, a byte of a grammar takes up to
# 1.3 kB of stack. The child gets less than this process, which then has enough.
_STACK_BYTES, _STACK_BYTES_EACH = 16 << 20, 4096


def _stack_bytes(grammar: Grammar) -> int:
    return _STACK_BYTES + _STACK_BYTES_EACH * len(grammar.text)


class _Checkers:
    """Children that try grammars; each has the tokenizer that it needed last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Child] = []
        self._idle: list[Child] = []
        self._closed = False

    def check(
        self, grammar: Grammar, key: str = "", words: Words | None = None
    ) -> None:
        """Try a grammar, without a tokenizer or with one that is named by a key.

        Raises:
            ConfigError: it cannot be used.
        """
        request = {
            "key": key,
            "grammar": [grammar.kind, grammar.text],
            "stack": _stack_bytes(grammar) * 3 // 4,
        }
        child = self._take()
        try:
            reason = child.ask(request, COMPILE_SECONDS)
            if reason is None:
                self._give(child, key, words)
                reason = child.ask(request, COMPILE_SECONDS)
        except ChildError as error:
            raise _child_failed(grammar, error) from error
        finally:
            with self._lock:
                self._idle.append(child)
        if reason:
            raise _unusable(grammar, reason)

    def _give(self, child: Child, key: str, words: Words | None) -> None:
        """Give a child the tokenizer.

        Raises:
            ConfigError: llguidance refuses it.
        """
        try:
            child.ask({"key": key, "words": words}, COMPILE_SECONDS)
        except ChildError as error:
            raise ConfigError(
                "a grammar cannot be used with this tokenizer: llguidance refuses it "
                f"({shorten(error)})"
            ) from error

    def _take(self) -> Child:
        with self._lock:
            if self._closed:
                raise ConfigError("the process ends, and compiles no more grammars")
            if not self._idle:
                self._all.append(Child(f"{__package__}.checker", again=False))
                self._idle.append(self._all[-1])
            return self._idle.pop()

    def close(self) -> None:
        """End what is being tried, and try no more."""
        with self._lock:
            self._closed = True
            for child in self._all:
                child.kill()


_CHECKERS = _Checkers()


def check_grammar(grammar: Grammar) -> None:
    """Check that a grammar can be used at all, before there is a tokenizer.

    Raises:
        ConfigError: the grammar cannot be used, or llguidance is not installed.
    """
    llguidance()
    _CHECKERS.check(grammar)


class GrammarCompiler:
    """Makes the states of rows that follow grammars.

    Several threads may call it. Compiling takes milliseconds, and the first time half a
    second more for the tokenizer. Compiled grammars are kept.

    Args:
        tokenizer: mlx-lm's wrapper.
        vocab_size: the target's number of logits.
        bounded: refuse grammars that take too much. Ranks other than 0 do not: rank 0
            has tried the grammars that they receive.
        announce: called with a grammar that can be compiled, before it is.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        *,
        bounded: bool = True,
        announce: Callable[[Grammar], None] | None = None,
    ):
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._bounded = bounded
        self._announce = announce
        self._key = uuid.uuid4().hex
        self._words: Words | None = None
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def compile(self, grammar: Grammar) -> GrammarState:
        """The state of a row that has generated nothing.

        Raises:
            ConfigError: the grammar cannot be used, allows nothing or takes too long;
                llguidance is not installed, or does not support this kind of
                tokenizer.
        """
        if (state := self.kept(grammar)) is not None:
            return state
        return self._state(_awaited(self._under_way(grammar), grammar))

    def begin(self, grammar: Grammar) -> None:
        """Begin to compile a grammar that will probably be needed later.

        This does nothing while ``AT_ONCE`` grammars are being compiled: this one may
        never be needed, and grammars that are needed would wait for it.
        """
        if self.kept(grammar) is None and len(_running) < AT_ONCE:
            self._under_way(grammar)

    def kept(self, grammar: Grammar) -> GrammarState | None:
        """As :meth:`compile`, but at once; ``None`` if the grammar is not compiled."""
        with self._lock:
            if (fresh := self._kept.get(grammar)) is None:
                return None
            self._kept.move_to_end(grammar)
        return self._state(fresh)

    def _state(self, fresh: LLMatcher) -> GrammarState:
        assert self._tokenizer is not None
        return GrammarState(fresh, (self._tokenizer.vocab_size + 31) // 32)

    def _under_way(self, grammar: Grammar) -> Future[LLMatcher]:
        seconds = COMPILE_SECONDS if self._bounded else None
        work = partial(self._compiled, grammar)
        return _start((self, grammar), work, _stack_bytes(grammar), seconds)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        llguidance()
        with self._making:
            if self._words is None:
                self._words = words_of(self._source, self._vocab_size)
        if self._bounded:
            _CHECKERS.check(grammar, self._key, self._words)
        if self._announce is not None:
            self._announce(grammar)
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_of(self._words)
        fresh = matcher_of(self._tokenizer, grammar.kind, grammar.text)
        if reason := error_of(fresh):
            raise _unusable(grammar, reason)
        with self._lock:
            self._kept[grammar] = fresh
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return fresh


# Compilations under way: a second caller waits for the same one. The lock also guards
# the stack size of new threads, which is global to the process.
_running: dict[object, Future[Any]] = {}
_threads: set[threading.Thread] = set()
_beginning = threading.Lock()
_slots = threading.BoundedSemaphore(AT_ONCE)


def _start(
    key: object, work: Callable[[], LLMatcher], stack: int, seconds: float | None
) -> Future[LLMatcher]:
    """Compile in a thread with a deep stack, unless this compilation has begun.

    Args:
        seconds: the longest wait for others to end; after it, this one is cancelled.

    Raises:
        ConfigError: there is no memory for a thread.
    """

    def run() -> None:
        if not _slots.acquire(timeout=seconds):
            future.cancel()
        else:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # a library's panic is no Exception
                    future.set_exception(error)
            _slots.release()
        with _beginning:
            del _running[key]
            _threads.discard(thread)

    with _beginning:
        if (earlier := _running.get(key)) is not None:
            return earlier
        future: Future[LLMatcher] = Future()
        before = threading.stack_size(stack)
        thread = threading.Thread(target=run, name="specdec grammar", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ConfigError(
                f"a grammar needs {stack >> 20} MB of memory for its compiler, which "
                "this process cannot have: give a shorter one"
            ) from error
        finally:
            threading.stack_size(before)
        _threads.add(thread)
        _running[key] = future
    return future


@atexit.register
def _end() -> None:
    """Let no thread be in llguidance when Python ends: that would crash."""
    _CHECKERS.close()
    for thread in list(_threads):
        thread.join()


def _awaited(future: Future[LLMatcher], grammar: Grammar) -> LLMatcher:
    """The result of a compilation that was begun.

    Raises:
        ConfigError: the compilation fails, or takes too much.
    """
    try:
        error = future.exception()
    except CancelledError:
        raise ConfigError(
            f"the {grammar.name} was not compiled: others have taken longer than "
            f"{COMPILE_SECONDS:.0f} s, and still do: try again later"
        ) from None
    if isinstance(error, SpecdecError):
        raise error
    if error is not None:
        raise _unusable(grammar, str(error)) from error
    return future.result()


def _child_failed(grammar: Grammar, error: ChildError) -> ConfigError:
    """The error for a grammar that a child could not try."""
    simpler = "give a simpler one"
    match error.kind:
        case "late":
            reason = f"takes longer than {COMPILE_SECONDS:g} s to compile: {simpler}"
        case "memory" | "ended":
            reason = f"takes too much memory, or is nested too deeply: {simpler}"
        case "start":
            reason = f"cannot be tried: {error}"
        case "error":
            return _unusable(grammar, str(error))
    return ConfigError(f"the {grammar.name} {reason}")


#: Places in a grammar and its lines, in messages of llguidance.
_QUOTED = re.compile(r"^(at )?\d+\(\d+\): |\s+\d+ \| .*", re.DOTALL)


def _unusable(grammar: Grammar, reason: str) -> ConfigError:
    # Leave out the matcher's internal state.
    reason = reason.replace("<non-verbose/>", "").replace("NoExtensionBias", "")
    reason = reason.strip() or "no text can follow it"
    if grammar.label and grammar.kind == "lark":
        reason = _QUOTED.sub("", reason)
    return ConfigError(f"the {grammar.name} cannot be used: {shorten(reason)}")
