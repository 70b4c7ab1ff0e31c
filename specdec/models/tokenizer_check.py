"""Refuses tokenizers that take too much memory or time, or fail, whatever they read.

A tokenizer comes with a model and is a program, too: it may make a text a million times
as long, and its library ends with a panic where its tables are wrong. What is rare in
one is tried in a child with limits before it is loaded. Expressions that may be slow at
some text encode every prompt there.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from ..errors import ModelError, PromptError
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
#: Real ones have up to twenty parts.
_MOST_PARTS = 64
#: What an expression is made of, and how often: texts, classes, characters.
_ITEM = re.compile(
    r"(?P<atom>(?P<group>\((?:\?i?:)?(?:[^\\()\[*+?{]|\[(?:\\.|[^]\\])+\])+\))"
    r"|\[(?:\\.|[^]\\])+\]|\\[pP]\{\w+\}|\\[sSdDwWrnt]|\\\W|[^\\()\[\]{}*+?|^$])"
    r"(?P<times>\*|\+|\?|\{(?P<least>\d{1,2})(?:,(?P<most>\d{0,2}))?\}|)(?![*+?{])"
)
#: Ends a run of spaces, and leaves one of them.
_NO_SPACE = r"(?!\S)"
#: In how many ways an alternative may begin.
_MOST_WAYS = 8
#: Characters that a slow tokenizer reads in a second at least.
_PACE = 50_000


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
        if not _is_linear(_expression(part)):
            raise ModelError(
                f"{file}: its decoder looks for an expression that may take time "
                "without end: use another model"
            )
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
    if _all_are(_is_usual, parts):
        return
    try:
        _CHILD.ask({"file": str(file.resolve())}, SECONDS)
    except ChildError as error:
        raise ModelError(
            f"{file} cannot be used ({_reason(error)}): download the model again, or "
            "use another one"
        ) from error


def check_tokenizer(tokenizer: Any, source: str) -> None:
    """Refuse a tokenizer that makes texts too long, whichever files it came from.

    Raises:
        ModelError: it does.
    """
    for name, spec in _parts_of(tokenizer).items():
        _check_growth(spec, f"{source}: its tokenizer's {name}")


def _parts_of(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = {}
    for name in _PARTS:
        part: Any = getattr(backend, name, None)
        if hasattr(part, "__getstate__"):
            with suppress(TypeError, ValueError):  # made in Python: not of a file
                parts[name] = json.loads(part.__getstate__())
    return parts


class LimitedEncoder:
    """Encodes texts in a child, within a time that grows with the text.

    Args:
        backend: a tokenizer of the library ``tokenizers``.
    """

    def __init__(self, backend: Any):
        self._backend = backend
        self._name = uuid4().hex

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """An encoder; ``None``: no text can take the tokenizer long."""
        parts = _parts_of(tokenizer)
        if _all_are(lambda part: _is_linear(_expression(part)), parts):
            return None
        return cls(tokenizer.backend_tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            PromptError: it takes too long or too much memory, or the tokenizer fails.
        """
        request = {
            "name": self._name,
            "text": text,
            "add_special_tokens": add_special_tokens,
            "split": self._backend.encode_special_tokens,
        }
        seconds = SECONDS + len(text) // _PACE
        try:
            ids = _CHILD.ask(request, seconds)
            if ids is None:  # a new process
                request["tokenizer"] = self._backend.to_str()
                ids = _CHILD.ask(request, seconds)
        except ChildError as error:
            raise PromptError(
                f"the tokenizer cannot encode it ({_reason(error)}): change the "
                "prompt, or use another model"
            ) from error
        return list(ids)


def _reason(error: ChildError) -> str:
    return shorten("it fails" if error.kind == "ended" else str(error))


def _all_are(
    allowed: Callable[[Mapping[str, Any]], bool], parts: Mapping[str, Any]
) -> bool:
    """Whether a tokenizer has not too many parts, and all are allowed."""
    members = [*_members([*parts.values()])]
    return len(members) <= _MOST_PARTS and all(map(allowed, members))


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
    expression = _expression(part)
    if part["type"] == "Replace" and expression:
        return False  # the library panics where one matches nothing
    if part["type"] == "Split" or expression:
        return _is_linear(expression)
    return part["type"] in _USUAL


def _expression(part: Mapping[str, Any]) -> str:
    pattern = part.get("pattern")
    return str(pattern.get("Regex", "")) if isinstance(pattern, Mapping) else ""


def _is_linear(expression: str) -> bool:
    """Whether an expression surely takes a time in proportion to the text.

    It has alternatives without nested repetition. One that has read a run of characters
    takes it, or another one does.
    """
    alternatives: list[list[re.Match[str]]] = [[]]
    at = 0
    while at < len(expression) < 1000:
        last = alternatives[-1]
        if expression[at] == "|":
            alternatives.append([])
            at += 1
        elif expression.startswith(_NO_SPACE, at) and last and last[-1][0] == r"\s+":
            at += len(_NO_SPACE)
        elif (item := _ITEM.match(expression, at)) is None:
            return False
        else:
            last.append(item)
            at = item.end()
    return at == len(expression) and all(
        _takes_runs(items, alternatives) for items in alternatives
    )


def _takes_runs(
    items: Sequence[re.Match[str]], alternatives: Sequence[Sequence[re.Match[str]]]
) -> bool:
    ways, run = 1, len(items)
    for i, item in enumerate(items):
        if item["times"] in ("*", "+") or item["most"] == "":
            run = i
            break
        ways *= 2 if item["times"] == "?" else 1
        ways *= int(item["most"] or item["least"] or 0) - int(item["least"] or 0) + 1
    texts = any(item["group"] and item["times"] not in ("", "?") for item in items)
    if texts or ways > _MOST_WAYS:
        return False
    rest = items[run + 1 :]
    if _cannot_fail(rest):
        return True
    # Where X*Y+ finds no Y, an alternative with X+ takes what it has read.
    taken = [*(item[0] for item in items[:run]), items[run]["atom"] + "+"]
    return (
        items[run]["times"] == "*"
        and rest[0]["times"] == "+"
        and _cannot_fail(rest[1:])
        and any(
            [item[0] for item in other[: run + 1]] == taken
            and _cannot_fail(other[run + 1 :])
            for other in alternatives
        )
    )


def _cannot_fail(items: Sequence[re.Match[str]]) -> bool:
    return all(item["times"] in ("*", "?") for item in items)


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
