"""Compiles grammars for a tokenizer with llguidance, and keeps the latest ones."""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, SpecdecError
from ..utils.extras import install
from ..utils.printable import shorten
from .spec import Grammar
from .state import GrammarState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")

# How many compiled grammars are kept.
_KEPT = 64
# Seconds that compiling a grammar may take; most take milliseconds.
COMPILE_SECONDS = 10.0
#: How many grammars are compiled at a time. One that takes too long goes on, since a
#: thread cannot be ended; with several slots, others need not wait for it.
AT_ONCE = 4
# llguidance handles nesting by recursion, and a stack overflow would end the process.
# As measured, the longest text takes less than a third of this.
_STACK_BYTES = 1 << 29
# A lexer's state takes 1 to 2 kB.
_MAX_LEXER_STATES = 50_000
# Without this limit JSON could have endless blanks, which some models do write.
_JSON_BLANKS = r" |\n[ \t]{0,20}"


def check_grammar(grammar: Grammar) -> None:
    """Check that a grammar can be used at all, before there is a tokenizer.

    Raises:
        ConfigError: the grammar cannot be used, or llguidance is not installed.
    """
    library = _library()

    def checked() -> str:
        text, limits = _text(grammar), _limits()
        said: str = library.LLMatcher.validate_grammar(text, None, limits=limits)
        return said

    seconds = COMPILE_SECONDS
    said = _awaited(_begun((None, grammar), checked, seconds), grammar, seconds)
    if said and not said.startswith("WARNING"):
        raise _refusal(grammar, said)


class GrammarCompiler:
    """Makes the states of rows that follow grammars.

    Several threads may call it. Compiling takes milliseconds, and the first time half a
    second more for the tokenizer. Compiled grammars are kept.

    Args:
        tokenizer: mlx-lm's wrapper.
        vocab_size: the target's number of logits.
        bounded: refuse grammars that take too long. Ranks other than 0 do not: rank 0
            has already compiled the grammars that they receive.
        announce: called with a grammar before it is compiled.
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
        if (kept := self.kept(grammar)) is not None:
            return kept
        if self._announce is not None:
            self._announce(grammar)
        fresh = _awaited(self._under_way(grammar), grammar, self._seconds)
        if fresh.is_error():
            raise _refusal(grammar, fresh.get_error())
        return self._begun(fresh)

    def begin(self, grammar: Grammar) -> None:
        """Begin to compile a grammar that will probably be needed later.

        This does nothing while ``AT_ONCE`` grammars are being compiled: this one may
        never be needed, and grammars that are needed would wait for it.
        """
        if self.kept(grammar) is None and len(_begun_so_far) < AT_ONCE:
            self._under_way(grammar)

    def kept(self, grammar: Grammar) -> GrammarState | None:
        """As :meth:`compile`, but at once; ``None`` if the grammar is not compiled."""
        with self._lock:
            if (fresh := self._kept.get(grammar)) is None:
                return None
            self._kept.move_to_end(grammar)
        return self._begun(fresh)

    def _begun(self, fresh: LLMatcher) -> GrammarState:
        assert self._tokenizer is not None
        return GrammarState(fresh, (self._tokenizer.vocab_size + 31) // 32)

    def _under_way(self, grammar: Grammar) -> Future[LLMatcher]:
        work = partial(self._compiled, grammar)
        return _begun((self, grammar), work, self._seconds)

    @property
    def _seconds(self) -> float | None:
        return COMPILE_SECONDS if self._bounded else None

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(self._source, self._vocab_size)
        fresh: LLMatcher = _library().LLMatcher(
            self._tokenizer, _text(grammar), log_level=0, limits=_limits()
        )
        if not fresh.is_error():
            trial = fresh.deep_copy()
            if not any(trial.compute_bitmask()) or trial.is_error():
                return trial
            with self._lock:
                self._kept[grammar] = fresh
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return fresh


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ConfigError(
            f"a grammar needs the package llguidance: {install('structured')}"
        ) from error


def _limits() -> LLParserLimits:
    limits: LLParserLimits = _library().LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )
    return limits


def _text(grammar: Grammar) -> str:
    """The grammar in llguidance's own format."""
    make = _library().LLMatcher
    if grammar.kind == "regex":
        text: str = make.grammar_from_regex(grammar.text)
    elif grammar.kind == "lark":
        text = make.grammar_from_lark(grammar.text)
    else:
        blanks = {"whitespace_pattern": _JSON_BLANKS}
        text = make.grammar_from_json_schema(grammar.text, defaults=blanks)
    return text


def _tokenizer_of(tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """llguidance's tokenizer.

    Raises:
        ConfigError: llguidance does not support that kind, or no token ends a text.
    """
    library, ends = _library(), sorted(tokenizer.eos_token_ids)
    if not ends:
        raise ConfigError(
            "a grammar needs a tokenizer with an end-of-sequence token: "
            "this one has none"
        )
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "to_str"):
        raise ConfigError(
            "a grammar needs a fast tokenizer (tokenizer.json): this one is a "
            f"{type(tokenizer).__name__} without"
        )
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    # Logits beyond the vocabulary are padding; a vocabulary may go beyond them, too.
    n = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
    try:
        made: LLTokenizer = library.LLTokenizer(
            backend.to_str(), n_vocab=n, eos_token=ends
        )
    except Exception as error:
        raise ConfigError(
            "a grammar cannot be used with this tokenizer: llguidance refuses it "
            f"({shorten(error)})"
        ) from error
    return made


# Compilations under way: a second caller waits for the same one. The lock also guards
# the stack size of new threads, which is global to the process.
_begun_so_far: dict[object, Future[Any]] = {}
_beginning = threading.Lock()
_slots = threading.BoundedSemaphore(AT_ONCE)


def _begun(key: object, work: Callable[[], T], seconds: float | None) -> Future[T]:
    """Compile in a thread with a deep stack, unless this compilation has begun.

    Args:
        seconds: the longest wait for others to end; after it, this one is cancelled.
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
            del _begun_so_far[key]

    with _beginning:
        if (found := _begun_so_far.get(key)) is not None:
            return found
        future: Future[T] = Future()
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="specdec grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
        _begun_so_far[key] = future
    return future


def _awaited(future: Future[T], grammar: Grammar, seconds: float | None) -> T:
    """The result of a compilation that was begun.

    Raises:
        ConfigError: the compilation fails, or takes too long (it then goes on).
    """
    try:
        error = future.exception(seconds)
    except (TimeoutError, CancelledError):
        if future.cancel():
            raise ConfigError(
                f"the {grammar.name} was not compiled: others have taken longer than "
                f"{COMPILE_SECONDS:.0f} s, and still do: try again later"
            ) from None
        raise ConfigError(
            f"the {grammar.name} takes longer than {COMPILE_SECONDS:.0f} s to compile: "
            "give a simpler one"
        ) from None
    if isinstance(error, SpecdecError):
        raise error
    if error is not None:
        raise _refusal(grammar, str(error)) from error
    return future.result()


def _refusal(grammar: Grammar, said: str) -> ConfigError:
    # Leave out the matcher's internal state.
    said = said.replace("<non-verbose/>", "").replace("NoExtensionBias", "")
    said = said.strip() or "no text can follow it"
    return ConfigError(f"the {grammar.name} cannot be used: {shorten(said)}")
