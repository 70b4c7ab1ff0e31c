"""Refuses tokenizers that take too much memory or time, or fail, whatever they read.

A tokenizer comes with a model and is a program, too: it may make a text a million times
as long, and its library ends with a panic where its tables are wrong. What is rare in
one is tried in a child with limits before it is loaded.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..utils.child import Child, ChildError
from ..utils.data_files import DataError, read_table
from ..utils.printable import shorten

#: Seconds that a tokenizer may take to be loaded and to read a line.
SECONDS = 10
#: How many times as long a text may become. Real ones write a few characters for one.
_GROWTH = 200
#: Characters that a decoder may strip of a token; real ones strip one.
_MOST_STRIPPED = 4
#: WordPiece takes a time that grows with the square of a word; real ones stop at 100.
_LONGEST_WORD = 1000
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
#: How many times as long parts make a text that they made before.
_GROWTHS = {"ByteLevel": 2.0, "Metaspace": 2.0, "BertNormalizer": 3.0}
#: Parts that take a time and a memory by their text, and that fail on none.
_USUAL = frozenset(
    {"BPEDecoder", "BertNormalizer", "BertPreTokenizer", "BertProcessing",
     "ByteFallback",
     "ByteLevel", "Digits", "Fuse", "Lowercase", "Metaspace", "NFC", "NFD", "NFKC",
     "NFKD", "Prepend", "Punctuation", "Replace", "RobertaProcessing", "Sequence",
     "StripAccents", "TemplateProcessing", "Whitespace", "WhitespaceSplit", "WordPiece"}
)  # fmt: skip
#: What no expression of a well-known tokenizer has, and what may take time without
#: end: repeated groups that repeat or choose, the same repeated twice, and references.
_REPEATED = re.compile(
    r"(?P<same>\[[^]]*\]|\\p\{\w+\}|\\?[^()])(?:[*+]|\{\d*,\d*\})(?P=same)[*+{]"
    r"|\\[gk1-9]|\(\?[&R0-9(]"
)


def check_tokenizer_file(file: Path) -> None:
    """Refuse a ``tokenizer.json`` that cannot be used, or only with too much.

    Raises:
        ModelError: its parts can make a text too long, or it was tried and failed.
    """
    try:
        spec = read_table(file)
    except (FileNotFoundError, DataError):
        return  # loading will report it
    parts = {name: spec.get(name) for name in _PARTS}
    for name in _PARTS:
        _check_growth(parts[name], f"{file}: its {name}")
    for part in _members(parts["decoder"]):
        # The library panics on tokens that are shorter.
        most = max((v for v in part.values() if type(v) is int), default=0)
        if part["type"] == "Strip" and most > _MOST_STRIPPED:
            raise ModelError(
                f"{file}: its decoder strips {most} characters of a token, and "
                f"{_MOST_STRIPPED} are allowed: use another model"
            )
    model = spec.get("model")
    longest = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(longest, int) and longest > _LONGEST_WORD:
        raise ModelError(
            f"{file}: its model looks for parts of words of {longest} characters, and "
            f"{_LONGEST_WORD} are allowed: use another model"
        )
    if all(map(_is_usual, _members(list(parts.values())))):
        return
    try:
        _CHILD.ask(str(file.resolve()), SECONDS)
    except ChildError as error:
        text = "it fails" if error.kind == "ended" else str(error)
        raise ModelError(
            f"{file} cannot be used ({shorten(text)}): download the model again, or "
            "use another one"
        ) from error


def check_tokenizer(tokenizer: Any, source: str) -> None:
    """Refuse a tokenizer that makes texts too long, whichever files it came from.

    Raises:
        ModelError: it does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in _PARTS:
        part: Any = getattr(backend, name, None)
        if hasattr(part, "__getstate__"):
            try:
                spec = json.loads(part.__getstate__())
            except (TypeError, ValueError):  # made in Python: not of a file
                continue
            _check_growth(spec, f"{source}: its tokenizer's {name}")


def _members(value: Any) -> Iterator[Mapping[str, Any]]:
    """The parts in a value, at any depth."""
    if isinstance(value, Mapping):
        if "type" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _members(each)


def _is_usual(part: Mapping[str, Any]) -> bool:
    pattern = part.get("pattern")
    expression = pattern.get("Regex", "") if isinstance(pattern, Mapping) else ""
    if part["type"] == "Replace" and expression:
        return False  # the library panics where one matches nothing
    if part["type"] == "Split" or expression:
        return len(str(expression)) < 1000 and not _may_repeat(str(expression))
    return part["type"] in _USUAL


def _may_repeat(expression: str) -> bool:
    """Whether an expression may take a time that no power of a text's length bounds."""
    plain = re.sub(r"\\[()|*+{]|\[(?:\\.|[^]\\])+\]", "x", expression)
    repeats = [False]  # of each open group
    for at, character in enumerate(plain):
        if character == "(":
            repeats.append(False)
        elif character in "|*+{":
            repeats[-1] = True
        elif character == ")" and len(repeats) > 1:
            inner = repeats.pop()
            if inner and plain[at + 1 : at + 2] in ("*", "+", "{"):
                return True
            repeats[-1] |= inner
    return bool(_REPEATED.search(expression))


def _check_growth(spec: Any, where: str) -> None:
    growth = prod(map(_growth, _members(spec)))
    if growth > _GROWTH:
        raise ModelError(
            f"{where} can make a text {growth:.3g} times as long, and {_GROWTH} times "
            "is allowed: use another model"
        )


def _growth(part: Mapping[str, Any]) -> float:
    """How many times as long a part may make a text."""
    if part["type"] == "Replace":
        pattern, content = part.get("pattern"), str(part.get("content", ""))
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        # An expression may match nothing, between any two characters.
        return max(1.0, len(content) / len(text) if text else len(content) + 1.0)
    if part["type"] in _GROWTHS:
        return _GROWTHS[part["type"]]
    if part["type"] == "Prepend":
        return 1.0 + len(str(part.get("prepend", ""))) / 16
    if part["type"] == "TemplateProcessing":
        try:
            shown = [next(iter(each.items())) for each in part["single"]]
            special = [
                part["special_tokens"][v["id"]] for k, v in shown if k != "Sequence"
            ]
            tokens = sum(len(each["ids"]) for each in special)
        except (AttributeError, KeyError, TypeError, StopIteration):
            return 1.0  # loading will report it
        return max(1.0, len(shown) - len(special) + tokens / 16)
    if part["type"] == "Precompiled":
        try:
            data = base64.b64decode(part["precompiled_charsmap"])
        except (KeyError, TypeError, ValueError):
            return 1.0  # loading will report it
        texts = data[4 + int.from_bytes(data[:4], "little") :]
        return max(1.0, float(max(map(len, texts.split(b"\0")))))
    return 1.0


_CHILD = Child(f"{__package__}.tokenizer_process", again=False)
