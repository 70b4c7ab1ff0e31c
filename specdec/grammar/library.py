"""What is asked of llguidance, by the process that decodes and by its child."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, TypedDict

from ..errors import ConfigError
from ..utils.extras import install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A lexer's state takes 1 to 2 kB.
_MAX_LEXER_STATES = 50_000
#: How many schemas within one are tried, to say where the fault of the whole is.
_MOST_PLACES = 200
#: Keys of a schema whose values have schemas by their names.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
# Without this limit JSON could have endless blanks, which some models do write.
_JSON_BLANKS = r" |\n[ \t]{0,20}"


class Words(TypedDict):
    """A tokenizer, as llguidance takes it."""

    backend: str
    n_vocab: int
    ends: list[int]


def llguidance() -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ConfigError(
            f"a grammar needs the package llguidance: {install('structured')}"
        ) from error


def _limits() -> Any:
    return llguidance().LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
    )


def _source(kind: str, text: str) -> str:
    """The grammar in llguidance's own format."""
    make = llguidance().LLMatcher
    if kind == "regex":
        source = make.grammar_from_regex(text)
    elif kind == "lark":
        source = make.grammar_from_lark(text)
    else:
        blanks = {"whitespace_pattern": _JSON_BLANKS}
        source = make.grammar_from_json_schema(text, defaults=blanks)
    return str(source)


def matcher_of(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """A grammar compiled for a tokenizer; its error says what is wrong with it."""
    matcher: LLMatcher = llguidance().LLMatcher(
        tokenizer, _source(kind, text), log_level=0, limits=_limits()
    )
    return matcher


def error_of(matcher: LLMatcher) -> str:
    """Why a new matcher cannot be used; ``""`` if it can. It computes a mask."""
    if not matcher.is_error():
        matcher = matcher.deep_copy()
        if any(matcher.compute_bitmask()) and not matcher.is_error():
            return ""
    return str(matcher.get_error()) or "no text can follow it"


def validate(kind: str, text: str) -> str:
    """Why a grammar cannot be used with any tokenizer; ``""`` if it can."""
    make = llguidance().LLMatcher
    reason = make.validate_grammar(_source(kind, text), None, limits=_limits())
    return "" if reason.startswith("WARNING") else str(reason)


def located(text: str, reason: str) -> str:
    """Why a JSON schema cannot be used, with the place of the fault in it.

    The place is the innermost schema within it that fails for the same reason by
    itself.
    """
    schema = json.loads(text)
    why = validate("json_schema", text)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    place, left = "", _MOST_PLACES
    inner = _schemas_in(schema) if why else []
    while inner and left:
        left -= 1
        path, part = inner.pop(0)
        whole = json.dumps({**shared, **part})
        if validate("json_schema", whole) == why:
            place = f"{place}.{path}".lstrip(".")
            inner = _schemas_in(part)
    return f"at {place}: {reason}" if place else reason


def _schemas_in(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The schemas right within a schema, after their places."""
    schemas = []
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            schemas += [(f"{key}.{name}", part) for name, part in value.items()]
        elif isinstance(value, list):
            schemas += [(f"{key}[{i}]", part) for i, part in enumerate(value)]
        elif key not in ("const", "default", "example"):
            schemas.append((key, value))
    return [(path, part) for path, part in schemas if isinstance(part, dict)]


def words_of(tokenizer: Any, vocab_size: int) -> Words:
    """A tokenizer of mlx-lm, for :func:`tokenizer_of`.

    Raises:
        ConfigError: llguidance does not support that kind, or no token ends a text.
    """
    ends = sorted(tokenizer.eos_token_ids)
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
    return Words(backend=backend.to_str(), n_vocab=n, ends=ends)


def tokenizer_of(words: Words) -> LLTokenizer:
    """llguidance's tokenizer.

    Raises:
        Exception: it refuses this one.
    """
    tokenizer: LLTokenizer = llguidance().LLTokenizer(
        words["backend"], n_vocab=words["n_vocab"], eos_token=words["ends"]
    )
    return tokenizer
