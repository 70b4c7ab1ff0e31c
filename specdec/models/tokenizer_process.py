"""The process in which rare tokenizers are tried, and encode."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from ..utils.child import serve

#: Bytes that the process may allocate after its start.
_MEMORY = 1 << 30
_LINE = (
    "A line of text, naïve and 日本語: don't {0.5} \t(a+b)**2 \ufb01\u00ad "
    + "ab" * 9
    + "a" * 40
    + "!"
)
#: Slow expressions are slow at long runs that do not end as they should.
_RUNS = [f"{character * 4000}? b0!\n" for character in "aA 0\né日!-_"]


def _try(file: str) -> int:
    """Load a tokenizer, encode lines, and decode what comes of the first.

    Returns:
        How many tokens the first line has.
    """
    tokenizer = Tokenizer.from_file(file)
    ids = tokenizer.encode(_LINE).ids
    tokenizer.encode_batch(_RUNS)
    tokenizer.decode(ids)
    for token in set(ids):
        tokenizer.decode([token])
    return len(ids)


_TOKENIZERS: dict[str, Tokenizer] = {}


def _encode(
    name: str,
    text: str,
    add_special_tokens: bool,
    split: bool,
    tokenizer: str | None = None,
) -> list[int] | None:
    """Encode a text; ``None``: this process has no tokenizer of that name."""
    if tokenizer is not None:
        _TOKENIZERS[name] = Tokenizer.from_str(tokenizer)
        _TOKENIZERS[name].no_truncation()
        _TOKENIZERS[name].no_padding()
    if name not in _TOKENIZERS:
        return None
    _TOKENIZERS[name].encode_special_tokens = split
    encoding = _TOKENIZERS[name].encode(text, add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _answer(request: dict[str, Any]) -> int | list[int] | None:
    return _try(**request) if "file" in request else _encode(**request)


if __name__ == "__main__":
    serve(_answer, memory=_MEMORY)
