"""How models write tool calls: markers, the form between them, and reading it.

A format is looked up by the name of mlx-lm's parser, or by marks of the chat template
that mlx-lm has no parser for. Calls with JSON arguments are read here, since a call
that was cut must be told from a whole one. mlx-lm's parsers read the others.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count, pairwise
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import reason_of
from ..prompts.templates import template_of
from ..utils.data_files import DataError, parse_json
from .job import Message

log = logging.getLogger("specdec.server")

Functions = Sequence[Mapping[str, Any]]
#: Forms of call ids: nine letters and digits, ``functions.NAME:INDEX``, or any text.
IdForm = Literal["nine", "numbered", "any"]


@dataclass(frozen=True)
class Written:
    """A call as the model wrote it.

    Args:
        arguments: a JSON object as text; its beginning if the call was cut.
        id: the id that the model gave it.
        cut: what was written of it, if the answer ended within the arguments.
    """

    name: str
    arguments: str
    id: str | None = None
    cut: str = ""


@dataclass(frozen=True)
class CallFormat:
    """A model's form of calls.

    Args:
        name: mlx-lm's name of its parser, or a name of this module.
        start: the marker before one or more calls.
        end: the marker after them; empty: calls end with the answer.
        opening: how a call of function ``$`` begins after ``start``; ``None``: a
            function cannot be named in advance.
        closing: what follows a call's JSON arguments up to ``end``.
        head: what stands before JSON arguments, with groups ``name`` and ``id``;
            ``None``: each call is a JSON object that has a name.
        last: ends each of several calls between the markers; mlx-lm's formats only.
        parse: mlx-lm's parser; ``None``: arguments are JSON and are read here.
        bare: beginnings of an answer that is a call without a marker.
        ids: the form of ids that the template accepts.
    """

    name: str
    start: str
    end: str = ""
    opening: str | None = None
    closing: str = ""
    head: re.Pattern[str] | None = None
    last: str = ""
    parse: Callable[[str, list[Any]], Any] | None = None
    bare: tuple[str, ...] = ()
    ids: IdForm = "any"

    @property
    def is_json(self) -> bool:
        """Whether arguments are written as a JSON object."""
        return self.parse is None

    def read(
        self, text: str, functions: Functions, *, cut: bool
    ) -> tuple[list[Written], str]:
        """The calls in a text between the markers, and what is left as text.

        Args:
            cut: the answer was ended within the text, by a limit.
        """
        if self.parse is None:
            calls, rest = self._read_json(text, cut=cut)
            if not calls and ("Ġ" in text or "Ċ" in text):
                # Some converted tokenizers leave the byte alphabet in the text.
                plain = text.replace("Ġ", " ").replace("Ċ", "\n")
                calls, rest = self._read_json(plain, cut=cut)
        else:
            calls, rest = self._read_parsed(text, functions, cut=cut)
        if not calls and not cut and "[" in self.bare:  # Llama 4 writes either
            calls, rest = _parsed(_pythonic, text, functions), ""
        return (calls, rest) if calls else ([], text)

    def _read_parsed(
        self, text: str, functions: Functions, *, cut: bool
    ) -> tuple[list[Written], str]:
        assert self.parse is not None
        ends = [0, len(text)]
        if self.last:
            marks = re.finditer(f"{_VALUE.pattern}|{re.escape(self.last)}", text, re.S)
            ends[1:] = [mark.end() for mark in marks if mark[0] == self.last]
        elif cut:
            return [], text
        calls: list[Written] = []
        for at, end in pairwise(ends):
            more = _parsed(self.parse, text[at:end], functions)
            if not more or self._loses(text[at:end], more):
                return [], text
            calls += more
        return calls, text[ends[-1] :].lstrip()

    def _loses(self, text: str, calls: Sequence[Written]) -> bool:
        """Whether a parser of mlx-lm has left values out, or parts of one."""
        if self.parse is _pythonic:
            return False
        values = [*_VALUE.finditer(text)]
        count = sum(value["tag"] not in (None, "json") for value in values)
        read = sum(len(json.loads(call.arguments)) for call in calls)
        return read < count or bool(_TAG.search(_VALUE.sub(_if_open, text)))

    def in_value(self, text: str) -> bool:
        """Whether the text of a call ends within a value, where markers are text."""
        if self.is_json:
            return len(_QUOTE.findall(text)) % 2 == 1
        pattern = _LITERAL if self.parse is _pythonic else _VALUE
        return any(value["open"] is not None for value in pattern.finditer(text))

    def _read_json(self, text: str, *, cut: bool) -> tuple[list[Written], str]:
        # Where calls have no end of their own, the next one's marker follows.
        again = re.escape(self.start) or "(?!)"
        separators = re.compile(f"(?:{again}|{_SEPARATOR})*")
        calls: list[Written] = []
        at = 0
        while True:
            begin = separators.match(text, at).end()  # type: ignore[union-attr]
            if begin == len(text):
                return calls, ""
            call, end = self._one(text, begin, cut=cut)
            if call is None:
                return calls, text[at if cut else begin :].lstrip()
            calls.append(call)
            at = end

    def _one(self, text: str, at: int, *, cut: bool) -> tuple[Written | None, int]:
        """The call at a position, and where it ends."""
        head = self.head and self.head.match(text, at)
        if not head:
            value, end = _value(text, at)
            if value is not _NONE or not cut:
                return _from_object(value), end
            if not (head := _OBJECT_HEAD.match(text, at)):
                return None, at
        value, end = _value(text, head.end())
        id_ = head.groupdict().get("id")
        name = head["name"]
        name = _value(name, 0)[0] if name.startswith('"') else name
        if value is not _NONE:
            return _call(name, value, id_), end
        # A call with no argument written yet could be taken for one without arguments.
        if not cut or not name or not text.startswith("{", head.end()):
            return None, at
        return Written(name, text[head.end() :], id_, cut=text[at:]), len(text)

    def valid_id(self, id_: str | None) -> str | None:
        """The id, if the template accepts it."""
        form = {"nine": _NINE, "numbered": _NUMBERED}.get(self.ids)
        return id_ if id_ and (form is None or form.fullmatch(id_)) else None

    def new_id(self, name: str, index: int) -> str:
        """An id for a call of a function that the model gave none."""
        if self.ids == "nine":
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        if self.ids == "numbered":
            return f"functions.{name}:{index}"
        return f"call_{uuid.uuid4().hex}"

    def fit_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Messages whose ids the template accepts; different ids stay different."""
        if self.ids == "any":
            return list(messages)
        numbers = count()
        ids: dict[str, str] = {}

        def fitting(id_: str, name: str) -> str:
            if id_ not in ids:
                ids[id_] = self._fitting(id_, name, next(numbers), set(ids.values()))
            return ids[id_]

        fitted = []
        for message in messages:
            more: dict[str, Any] = {}
            if calls := message.get("tool_calls"):
                more["tool_calls"] = [
                    {**c, "id": fitting(c.get("id") or "", c["function"]["name"])}
                    for c in calls
                ]
            if (id_ := message.get("tool_call_id")) is not None:
                more["tool_call_id"] = fitting(id_, message.get("name") or "tool")
            fitted.append({**message, **more})
        return fitted

    def fitted(
        self, messages: Sequence[Message], functions: Functions
    ) -> Sequence[Message]:
        """Messages with what this form's templates read of them, and nothing else."""
        if self.name == "phi4" and functions:
            # Its template shows the tools that a system turn brings.
            has_system = bool(messages) and messages[0]["role"] == "system"
            first = messages[0] if has_system else {"role": "system", **_WITH_TOOLS}
            shown = json.dumps([tool["function"] for tool in functions])
            return [{**first, "tools": shown}, *messages[has_system:]]
        if self.name == "harmony":
            # Its template calls them so, and refuses both in a turn that calls.
            return [
                {**message, "thinking": message["reasoning_content"]}
                if message.get("reasoning_content") and not message["content"]
                else message
                for message in messages
            ]
        return messages

    def _fitting(self, id_: str, name: str, number: int, taken: set[str]) -> str:
        if self.valid_id(id_) and id_ not in taken:
            return id_
        for salt in count(number if self.ids == "numbered" else 0):
            new_id = f"functions.{name}:{salt}"
            if self.ids == "nine":
                new_id = _nine(f"{id_}:{salt}" if salt else id_)
            if new_id not in taken:
                return new_id
        raise AssertionError


_WITH_TOOLS = {"content": "You are a helpful assistant with some tools."}
_ALPHABET = string.ascii_letters + string.digits
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_NUMBERED = re.compile(r"functions\.[\w.-]+:\d+")
#: What may stand between calls that are JSON, and around them.
_SEPARATOR = (
    r"[\s\[\],;]|```|functools|</?tool_call>|<\|tool_call_end\|>"
    r"|<\uff5ctool\u2581call\u2581end\uff5c>"
)
#: The beginning of a call that is a JSON object, up to its arguments.
_OBJECT_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
#: No JSON value, which ``None`` is.
_NONE = object()
#: A value between marks, up to the first mark that ends it, which is none in CDATA;
#: ``open``: nothing does.
_VALUE = re.compile(
    r"(?:<(?:longcat_)?arg_key>[^<]*</(?:longcat_)?arg_key>\s*)?"
    r"(?:<(?:\|open\|>)?"
    r"(?P<tag>(?P<cdata>param\b)|(?:atem:)?param(?:eter)?|(?:longcat_)?arg_value"
    r"|argument|json)\b"
    r'|(?P<quote><escape>|<\|"\|>))'
    r"(?:(?(cdata)[^<>]*>\s*<!\[CDATA\[.*?\]\]>\s*</(?P=tag)>|(?!))"
    r"|(?(cdata)(?![^<>]*>\s*<!\[CDATA\[)).*?(?:<(?:/|\|close\|>)(?P=tag)(?:>|<\|sep\|>)|(?P=quote))|(?P<open>.*))",
    re.DOTALL,
)
#: A mark that belongs to no value.
_TAG = re.compile(
    r"</?(?:(?:atem:)?param(?:eter)?|(?:longcat_)?arg_(?:key|value))\b"
    r"|<\|(?:open|close)\|>argument\b"
)
#: A text of Python; line breaks may be raw.
_LITERAL = re.compile(
    r"""(?P<quote>\"{3}|'{3}|"|')"""
    r"(?:(?:\\.|(?!(?P=quote))[^\\])*(?P=quote)|(?P<open>.*))",
    re.DOTALL,
)
#: A hyphen in a call's name, where Python reads a minus, outside texts.
_HYPHEN = re.compile(rf"{_LITERAL.pattern}|-(?=[\w.-]*\()", re.DOTALL)
_LETTER = "\u1173"  # stands for it: no name of a tool has it
_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*"')
_DECODER = json.JSONDecoder(strict=False)  # models write raw line breaks in texts


def _nine(text: str) -> str:
    """Nine letters and digits that depend on the text alone."""
    number = int.from_bytes(uuid.uuid5(uuid.NAMESPACE_OID, text).bytes, "big")
    characters = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    return "".join(characters)


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a position, and its end; ``_NONE``: none is complete there."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return _NONE, at


def _from_object(value: Any) -> Written | None:
    """The call that a JSON object describes."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    value = inner if isinstance(inner, dict) else value
    keys = [key for key in ("arguments", "parameters") if key in value]
    arguments = value[keys[0]] if keys else {}
    return _call(value.get("name"), arguments, value.get("id"))


def _call(name: object, arguments: Any, id_: object = None) -> Written | None:
    """A whole call, if the arguments are a JSON object that can be sent back."""
    if not isinstance(name, str) or not name.strip():
        return None
    if isinstance(arguments, str):
        arguments = _value(arguments.strip(), 0)[0] if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        parse_json(text)
        parse_json(json.dumps(name))
    except (TypeError, ValueError, RecursionError, DataError) as error:
        log.info("a tool call has no JSON arguments: %s", reason_of(error))
        return None
    return Written(name.strip(), text, id_ if isinstance(id_, str) and id_ else None)


def _parsed(
    parse: Callable[[str, list[Any]], Any], text: str, functions: Functions
) -> list[Written]:
    """The calls that a parser of mlx-lm finds; none if one of them is no call."""
    try:
        parsed = parse(text, list(functions))
    except Exception as error:  # the text is a model's
        log.info("a tool call cannot be parsed: %s", reason_of(error))
        return []
    calls = []
    for each in parsed if isinstance(parsed, list) else [parsed]:
        arguments = each.get("arguments", {}) if isinstance(each, dict) else None
        # What the parsers of GLM make of a text that is no call.
        guess = isinstance(arguments, dict) and [*arguments] == ["raw"]
        guess = guess and "raw" not in text
        call = _call(each.get("name"), arguments, each.get("id")) if (
            isinstance(each, dict) and not guess) else None  # fmt: skip
        if call is None or not _NAME.fullmatch(call.name):
            return []
        calls.append(call)
    return calls


_NAME = re.compile(r"[\w.:/-]{1,128}")


def _if_open(value: re.Match[str]) -> str:
    return "" if value["open"] is None else value[0]


class _JSONNames(ast.NodeTransformer):
    """JSON's constants within values of Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _pythonic(text: str, functions: Functions) -> list[dict[str, Any]]:
    """Calls as Python writes them. mlx-lm's parser guesses at what Python refuses."""
    text = _LITERAL.sub(lambda literal: literal[0].replace("\n", "\\n"), text)
    text = _HYPHEN.sub(lambda one: _LETTER if one[0] == "-" else one[0], text)
    body = ast.parse(text.strip(), mode="eval").body
    calls = []
    for call in body.elts if isinstance(body, ast.List) else [body]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("it is no call with named arguments")
        values = {
            keyword.arg: ast.literal_eval(_JSONNames().visit(keyword.value))
            for keyword in call.keywords
        }
        name = ast.unparse(call.func).replace(_LETTER, "-")
        calls.append({"name": name, "arguments": values})
    return calls


def _function_gemma(text: str, functions: Functions) -> Any:
    """Gemma 4's form with other quotes; mlx-lm's own parser cannot nest."""
    gemma4 = import_module("mlx_lm.tool_parsers.gemma4")
    return gemma4.parse_tool_call(text.replace("<escape>", '<|"|>'))


def _minicpm5(text: str, functions: Functions) -> Any:
    """Its own form; mlx-lm's parser ends values at any mark, also in CDATA."""
    minicpm5 = import_module("mlx_lm.tool_parsers.minicpm5")
    # Marks within values are hidden from it.
    hidden = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)
    inner = re.compile(r"(?<!^)<(?!!\[CDATA\[|/param>$)")
    shown = _VALUE.sub(lambda value: inner.sub(hidden, value[0]), text)
    parsed = minicpm5.parse_tool_call(shown, functions)
    return json.loads(json.dumps(parsed, ensure_ascii=False).replace(hidden, "<"))


_PARSERS = {"pythonic": _pythonic, "function_gemma": _function_gemma,
            "minicpm5": _minicpm5}  # fmt: skip
_OBJECT = '{"name": "$", "arguments": '
_LLAMA = '{"name": "$", "parameters": '
_DEEPSEEK_HEAD = re.compile(
    r"(?:<\uff5ctool\u2581call\u2581begin\uff5c>)?\s*(?:function<\uff5ctool\u2581sep\uff5c>)?"
    r"(?P<name>[\w.-]+)(?:<\uff5ctool\u2581sep\uff5c>|\s*\n)\s*(?:```json\s*)?"
)
#: Formats that are read here, and what mlx-lm's modules do not say of theirs.
_FORMATS = {
    each.name: each
    for each in (
        CallFormat("json_tools", "<tool_call>", "</tool_call>", "\n" + _OBJECT, "}"),
        CallFormat(
            "mistral",
            "[TOOL_CALLS]",
            opening="$[ARGS]",
            head=re.compile(
                r"(?P<name>[\w.-]+)[\sĠ]*(?:\[CALL_ID\][\sĠ]*(?P<id>\w+)[\sĠ]*)?\[ARGS\]\s*"
            ),
            ids="nine",
        ),
        CallFormat(
            "kimi_k2",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>functions.$:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            re.compile(
                r"(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)"
                r":\d+)\s*<\|tool_call_argument_begin\|>\s*"
            ),
            ids="numbered",
        ),
        CallFormat(
            "deepseek",
            "<\uff5ctool\u2581calls\u2581begin\uff5c>",
            "<\uff5ctool\u2581calls\u2581end\uff5c>",
            head=_DEEPSEEK_HEAD,
        ),
        CallFormat(
            "llama3", "<|python_tag|>", opening=_LLAMA, closing="}", bare=("{",)
        ),
        CallFormat(
            "llama4", "<|python_start|>", "<|python_end|>", _LLAMA, "}", bare=("{", "[")
        ),
        CallFormat("granite", "<|tool_call|>", opening="[" + _OBJECT, closing="}]"),
        CallFormat(
            "phi4",
            "<|tool_call|>",
            "<|/tool_call|>",
            "[" + _OBJECT,
            "}]",
            bare=("functools[", "["),
        ),
        CallFormat(
            "hunyuan",
            "<tool_calls>",
            "</tool_calls>",
            "[" + _OBJECT,
            "}]",
            re.compile(r"(?P<name>[\w.-]+)\s*```json\s*"),
        ),
        CallFormat("harmony", "", "<|call|>"),
        CallFormat("qwen3_coder", "", opening="\n<function=$>\n", last="</function>"),
        CallFormat("pythonic", "", opening="[$("),
        CallFormat("function_gemma", "", opening="call:${"),
        CallFormat("gemma4", "", opening="call:${"),
        CallFormat("minimax_m2", "", opening='\n<invoke name="$">\n', last="</invoke>"),
        CallFormat("muse_spark", "", last="</atem:invoke>"),
        CallFormat("kimi_k3", "", last="<|close|>call<|sep|>"),
    )
}
#: Formats by marks of chat templates: all marks of a line are in the template.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("qwen3_coder", ("<function=",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek", ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("harmony", ("<|channel|>", "<|message|>", "functions.")),
    ("hunyuan", ("<tool_calls>",)),
    ("phi4", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("llama4", ("<|header_start|>", "parameters", "tools")),
    ("llama3", ("<|start_header_id|>", '"parameters"', "tools")),
    ("llama3", ("<|python_tag|>", "tools")),
    ("json_tools", ("<tool_call>",)),
)


def format_of(tokenizer: TokenizerWrapper) -> CallFormat | None:
    """How a model writes calls; ``None``: it is not known that it can."""
    if getattr(tokenizer, "has_tool_calling", False):
        parse = tokenizer.tool_parser
        name = parse.__module__.rpartition(".")[2]
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    else:
        inner = getattr(tokenizer, "chat_template", None)
        template = template_of(tokenizer) or (inner if isinstance(inner, str) else "")
        name = next((n for n, marks in _MARKS if all(m in template for m in marks)), "")
        if not name:
            return None
        if name in _FORMATS and _FORMATS[name].start:
            return _FORMATS[name]
        if name == "harmony":
            return _FORMATS[name]
        module = import_module(f"mlx_lm.tool_parsers.{name}")
        parse, start = module.parse_tool_call, module.tool_call_start
        end = module.tool_call_end
    known = _FORMATS.get(name) or CallFormat(name, "")
    reads = None if known.start else _PARSERS.get(name, parse)
    return replace(known, start=start, end=end or "", parse=reads)
