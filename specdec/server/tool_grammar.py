"""The grammar of an answer in which calls follow their functions' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import ConfigError
from ..grammar import Grammar
from ..utils.printable import quoted
from .errors import RequestError
from .job import Tools
from .schema import Notes
from .tool_calls import CallFormat, format_of

#: Blanks between tokens of JSON, as in the grammars of plain schemas.
_BLANKS = {"whitespace_pattern": r" |\n[ \t]{0,20}"}


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammar of an answer.

    Args:
        where: the parameter at fault if it cannot be compiled.
        required: that is an error.
        parts: the forms that are part of it, after the parameters that ask for them.
    """

    grammar: Grammar | None
    where: str = "tools"
    required: bool = True
    parts: Sequence[tuple[str, Grammar]] = ()


def call_grammar(
    tokenizer: TokenizerWrapper,
    tools: Tools,
    answer: Grammar | None,
    where: str,
    notes: Notes,
) -> AnswerGrammar:
    """The grammar of text and calls.

    A call that is forced follows its function's schema, and any call of a strict
    function. With a grammar of the text, an answer is such a text, or calls.

    Args:
        answer: the text's grammar; ``None``: any text.
        where: the parameter that asks for it.

    Raises:
        RequestError: the two do not go together.
    """
    functions = [
        tool["function"]
        for tool in tools.functions
        if tools.name in (None, tool["function"]["name"])
    ]
    strict = [f for f in functions if f.get("strict")]
    calls = format_of(tokenizer)
    if not functions or calls is None or not (strict or tools.forced or answer):
        return AnswerGrammar(answer, where)
    readable = calls.is_json and calls.opening is not None
    if not readable and answer is None:
        if strict:
            notes.add("calls of this model are no JSON: strict is not enforced")
        return AnswerGrammar(None)
    at = "tools"
    try:
        followed = functions if tools.forced else strict
        parts = [(at, _schema(each)) for each in followed if readable]
        if answer is not None:
            at = where
            parts.append((at, answer))
        rules = _Rules(tokenizer, calls, tools, readable=readable)
        text = rules.text(functions, answer)
        grammar = Grammar("lark", text, "form of answers and calls together")
    except ConfigError as error:
        if strict or answer is not None:
            raise RequestError.invalid(at, f"{at}: {error}") from error
        notes.add(f"calls do not follow their schemas: {error}")
        return AnswerGrammar(None)
    required = bool(strict) or answer is not None
    return AnswerGrammar(grammar, at, required, parts)


def _schema(function: Mapping[str, Any]) -> Grammar:
    """The form of a function's arguments."""
    schema = function.get("parameters") or {"type": "object"}
    return Grammar.json_schema(schema, f"schema of function {quoted(function['name'])}")


def call_ends(tokenizer: TokenizerWrapper, tools: Tools) -> tuple[str, ...]:
    """The text that ends an answer with its first call."""
    calls = format_of(tokenizer) if tools.functions and tools.single else None
    return (calls.end,) if calls is not None and calls.end else ()


class _Rules:
    """Rules of llguidance's Lark for the calls of one format."""

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        calls: CallFormat,
        tools: Tools,
        *,
        readable: bool,
    ):
        self._calls, self._tools, self._readable = calls, tools, readable
        added = getattr(tokenizer, "added_tokens_decoder", {}) or {}
        ends = set(tokenizer.eos_token_ids)
        # llguidance takes these tokens by their number only, never as text.
        self._special: Mapping[str, int] = {
            str(token): number
            for number, token in added.items()
            if number not in ends
            and (token.special or (str(token)[:1], str(token)[-1:]) == ("<", ">"))
        }
        marks = (getattr(tokenizer, "think_start", None),
                 getattr(tokenizer, "think_end", None), calls.end)  # fmt: skip
        self._marks = [mark for mark in marks if mark in self._special]

    def text(
        self, functions: Sequence[Mapping[str, Any]], answer: Grammar | None
    ) -> str:
        """The whole grammar."""
        calls, tools = self._calls, self._tools
        names = range(len(functions))
        rules = [f"call: {' | '.join(f'call{i}' for i in names)}"]
        for i, function in enumerate(functions):
            rules += self._call(i, function)
        end = self._literal(calls.end) if calls.end else '""'
        start = self._literal(calls.start)
        opening = f"({start})?" if calls.bare else start
        # Several calls come one after the other, each between its own markers.
        more = "" if tools.single else f" (end_ {start} call)*"
        close = f"({end})?" if calls.end and not tools.single else ""
        rules += ["TEXT: /(.|\\n)*/", f'end_: "\\n"? {end} "\\n"?']
        if tools.forced:
            # The prompt has the marker, and the opening of a named call.
            first = "rest0" if tools.name else "call"
            rules.append(f'start: {first}{more} ("\\n"? {close})?')
        elif answer is not None:
            rules.append(f'start: answer | {opening} call{more} ("\\n"? {close})?')
            rules.append(f"answer: {self._answer(answer)}")
        elif calls.bare:
            # Other text does not begin as a call does.
            plain = "".join(f"\\{bare}" for bare in calls.bare if len(bare) == 1)
            rules += [
                f"start: call | PLAIN | begun call (lead call)* {self._free('TEXT')}",
                f"PLAIN: /([^{plain}](.|\\n)*)?/",
                *self._lead("begun", "PLAIN", marks=False),
                *self._lead("lead", "TEXT"),
            ]
        else:
            rules += [
                f"start: (lead call)* {self._free('TEXT')}",
                *self._lead("lead", "TEXT"),
            ]
        return "\n".join(["%llguidance {}", *rules])

    def _call(self, i: int, function: Mapping[str, Any]) -> Iterator[str]:
        calls = self._calls
        if not self._readable:
            yield f"call{i}: TEXT"
            return
        assert calls.opening is not None
        schema = dict(function.get("parameters") or {"type": "object"})
        schema["x-guidance"] = _BLANKS
        if not (function.get("strict") or self._tools.forced):
            schema = {"type": "object", "x-guidance": _BLANKS}
        yield f"call{i}: {self._literal(calls.opening, function['name'])} rest{i}"
        yield f"rest{i}: arguments{i} {self._literal(calls.closing)}"
        yield f"arguments{i}: %json {json.dumps(schema)}"

    def _lead(self, rule: str, text: str, *, marks: bool = True) -> list[str]:
        """A rule of text up to a call's marker, and with it."""
        start, free = self._calls.start, self._free if marks else str
        if start in self._special:
            return [f"{rule}: {free(text)} {self._literal(start)}"]
        trigger = f"{rule}_end[lazy]: {text} {json.dumps(start)}"
        return [f"{rule}: {free(f'{rule}_end')}", trigger]

    def _free(self, last: str) -> str:
        """Any text that ends with ``last``; markers that are tokens may be in it."""
        if not self._marks:
            return last
        marks = " | ".join(self._literal(mark) for mark in self._marks)
        return f"(TEXT ({marks}))* {last}"

    def _answer(self, answer: Grammar) -> str:
        if answer.kind == "json_schema":
            schema = {**json.loads(answer.text), "x-guidance": _BLANKS}
            return f"%json {json.dumps(schema)}"
        if answer.kind == "regex":
            escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", answer.text)
            return f"/{escaped}/"
        raise ConfigError(
            f"the {answer.name} does not go with tools that may be called: leave one "
            "of them out"
        )

    def _literal(self, text: str, name: str = "") -> str:
        """A text of a rule; special tokens are written by their numbers."""
        pattern = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        pieces = []
        for part in filter(None, parts):
            if part in self._special:
                pieces.append(f"<[{self._special[part]}]>")
            else:
                pieces.append(json.dumps(part.replace("$", name)))
        return " ".join(pieces) or '""'
