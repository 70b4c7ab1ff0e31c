"""Grammars made ready for one tokenizer, by llguidance; the latest ones are kept."""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, SpecdecError
from ..utils.printable import shorten
from .spec import Grammar
from .state import GrammarState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")

# Compiled grammars that are kept.
_KEPT = 64
# Seconds that compiling one may take; most take milliseconds.
COMPILE_SECONDS = 10.0
# llguidance goes through what is nested by recursion, and its overflow would end the
# process: by what was measured, the longest text takes less than a third of this.
_STACK_BYTES = 1 << 29
# A lexer's state takes 1 to 2 kB.
_MAX_LEXER_STATES = 50_000
# Without it, JSON could have blanks without end, and some models write them.
_JSON_BLANKS = r" |\n[ \t]{0,20}"


def check_grammar(grammar: Grammar) -> None:
    """See that a grammar can be used at all, before there is a tokenizer.

    Raises:
        ConfigError: it cannot, or llguidance is not installed.
    """
    library = _library()

    def checked() -> str:
        text, limits = _text(grammar), _limits()
        said: str = library.LLMatcher.validate_grammar(text, None, limits=limits)
        return said

    said = _apart(checked, grammar)
    if said and not said.startswith("WARNING"):
        raise _refusal(grammar, said)


class GrammarCompiler:
    """Makes the states of rows that follow grammars.

    Safe to be called from several threads. Compiling takes milliseconds, the first time
    half a second for the tokenizer; what was compiled before is kept.

    Args:
        tokenizer: mlx-lm's wrapper.
        vocab_size: the target's number of logits.
        bounded: refuse what takes too long. A rank that follows does not: rank 0 has
            compiled what it is given.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, *, bounded: bool = True):
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._bounded = bounded
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def compile(self, grammar: Grammar) -> GrammarState:
        """The state of a row that has generated nothing.

        Raises:
            ConfigError: the grammar cannot be used, allows nothing or takes too long;
                llguidance is not installed; or the tokenizer is of a kind that it
                does not take.
        """
        if (kept := self.kept(grammar)) is not None:
            return kept
        self._make_tokenizer()
        # Without the lock: who asks for one that is kept does not wait.
        work = partial(self._compiled, grammar)
        fresh = _apart(work, grammar, bounded=self._bounded)
        if fresh.is_error():
            raise _refusal(grammar, fresh.get_error())
        with self._lock:
            self._kept[grammar] = fresh
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._begun(fresh)

    def kept(self, grammar: Grammar) -> GrammarState | None:
        """As :meth:`compile`, of one that was compiled before; at once."""
        with self._lock:
            if (fresh := self._kept.get(grammar)) is None:
                return None
            self._kept.move_to_end(grammar)
        return self._begun(fresh)

    def _begun(self, fresh: LLMatcher) -> GrammarState:
        assert self._tokenizer is not None
        return GrammarState(fresh, (self._tokenizer.vocab_size + 31) // 32)

    def _make_tokenizer(self) -> None:
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(self._source, self._vocab_size)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        assert self._tokenizer is not None
        fresh: LLMatcher = _library().LLMatcher(
            self._tokenizer, _text(grammar), log_level=0, limits=_limits()
        )
        if not fresh.is_error():
            trial = fresh.deep_copy()
            if not any(trial.compute_bitmask()) or trial.is_error():
                return trial
        return fresh


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ConfigError(
            "a grammar needs the package llguidance: "
            "pip install '.[structured]' in a checkout"
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
        ConfigError: it takes none of that kind, or nothing ends its texts.
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


_compiling = threading.Lock()


def _apart(work: Callable[[], T], grammar: Grammar, *, bounded: bool = True) -> T:
    """Do it in a thread with a deep stack, one at a time.

    Raises:
        ConfigError: it takes too long. It goes on, and others wait for it.
    """
    seconds = COMPILE_SECONDS if bounded else threading.TIMEOUT_MAX
    done: list[T | BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # a library's panic is no Exception
            done.append(error)
        finally:
            _compiling.release()

    if not _compiling.acquire(timeout=seconds):
        raise _too_long(grammar)
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="specdec grammar", daemon=True)
        thread.start()
    except BaseException:
        _compiling.release()
        raise
    finally:
        threading.stack_size(before)
    thread.join(seconds)
    if not done:
        raise _too_long(grammar)
    found = done[0]
    if isinstance(found, SpecdecError):
        raise found
    if isinstance(found, BaseException):
        raise _refusal(grammar, str(found)) from found
    return found


def _too_long(grammar: Grammar) -> ConfigError:
    return ConfigError(
        f"the {grammar.name} takes longer than {COMPILE_SECONDS:.0f} s to compile: "
        "give a simpler one"
    )


def _refusal(grammar: Grammar, said: str) -> ConfigError:
    # Of a matcher's own state nothing is shown.
    said = said.replace("<non-verbose/>", "").replace("NoExtensionBias", "")
    said = said.strip() or "no text can follow it"
    return ConfigError(f"the {grammar.name} cannot be used: {shorten(said)}")
