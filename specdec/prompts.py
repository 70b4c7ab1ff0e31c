"""Prompts: what a caller or a file gives, turned into token ids. No mlx here."""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

from .errors import PromptError, PromptFileError
from .templates import render_chat
from .utils.data_files import DataError, parse_json
from .utils.files import read_plain
from .utils.printable import quoted, shorten

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]

# Of a prompt for a model whose context is not known.
MAX_PROMPT_BYTES = 64 * 2**20

_PROMPT_KEYS = ("prompt", "question", "messages", "turns")
#: What a chat template is given by us, and options of the function that renders it.
OWN_VARIABLES = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message",
     "conversations", "max_length", "messages", "padding", "return_tensors",
     "return_assistant_tokens_mask", "return_dict", "tokenize", "tokenizer_kwargs",
     "truncation"}
)  # fmt: skip
_ID_KEYS = ("id", "custom_id", "task_id", "question_id")
_EXPECTED = "one object per line (JSON Lines) with one of " + ", ".join(
    f'"{key}"' for key in _PROMPT_KEYS
)


class Encoding(TypedDict, total=False):
    """How a prompt becomes token ids; see :func:`encode`."""

    system_prompt: str | None
    ignore_chat_template: bool
    chat_template_config: Mapping[str, Any] | None
    prefill_response: str | None


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt ready for the model.

    ``text`` is a string prompt as it was given, messages as the chat template
    renders them, and a token list as the tokenizer decodes it.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptRecord:
    """A prompt of a file.

    Args:
        prompt: the prompt.
        where: file and line, as messages name it; ``None``: it came from elsewhere.
        id: what a JSON line calls it, by ``id``, ``custom_id``, ``task_id`` or
            ``question_id``; ``None``: it has no such field.
        fields: what else the line says.
        turns: of the user, after the answer to the prompt and to each other.
    """

    prompt: Prompt
    where: str | None = None
    id: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class PromptLimit:
    """The size beyond which a prompt cannot fit, known before any work on it.

    Args:
        tokenizer: of the target.
        context_length: tokens that the target serves; ``None``: not known, so that
            only :data:`MAX_PROMPT_BYTES` counts.
    """

    tokenizer: Any = None
    context_length: int | None = None

    @cached_property
    def max_bytes(self) -> int:
        """Bytes that no prompt of ``context_length`` tokens exceeds."""
        if self.context_length is None:
            return MAX_PROMPT_BYTES
        vocabulary = self.tokenizer.get_vocab()
        longest = max((len(str(token).encode()) for token in vocabulary), default=1)
        return self.context_length * longest

    def check(self, *texts: str) -> None:
        """Refuse texts that have too many bytes together.

        Raises:
            PromptError: with both numbers.
        """
        # A character has 1 to 4 bytes; a token has 1 or more.
        few = 4 * sum(map(len, texts)) <= (self.context_length or MAX_PROMPT_BYTES)
        if few or (size := sum(map(_num_bytes, texts))) <= self.max_bytes:
            return
        context = ""
        if self.context_length is not None:
            context = f" in the target's context of {self.context_length} tokens"
        raise PromptError(
            f"it has {size} bytes and at most {self.max_bytes} fit{context}: shorten it"
        )

    def check_count(self, count: int, what: str = "tokens") -> None:
        """Refuse too many token ids, or other parts of a token or more.

        Raises:
            PromptError: with both numbers.
        """
        if self.context_length is not None and count > self.context_length:
            unit = "" if what == "tokens" else " tokens"
            raise PromptError(
                f"it has {count} {what} and the target's context is "
                f"{self.context_length}{unit}: shorten it"
            )


NO_CONTEXT = PromptLimit()


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def encode_all(
    tokenizer: Any,
    prompts: Iterable[Prompt],
    *,
    limit: PromptLimit = NO_CONTEXT,
    **encoding: Unpack[Encoding],
) -> list[EncodedPrompt]:
    """Encode several prompts; an error names the index of the prompt that has it."""
    single = isinstance(prompts, str | bytes | Mapping)
    if single or not isinstance(prompts, Iterable):
        way_out = "[[message]]" if isinstance(prompts, Mapping) else "[prompt]"
        raise PromptError(
            f"prompts is of type {type(prompts).__name__}: pass a list of prompts, "
            + way_out
        )
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(encode(tokenizer, prompt, limit=limit, **encoding))
        except PromptError as error:
            raise PromptError(f"prompt {index}: {error}") from error
    return encoded


def encode(
    tokenizer: Any,
    prompt: Prompt,
    *,
    system_prompt: str | None = None,
    ignore_chat_template: bool = False,
    chat_template_config: Mapping[str, Any] | None = None,
    prefill_response: str | None = None,
    limit: PromptLimit = NO_CONTEXT,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continued: bool = False,
) -> EncodedPrompt:
    """Encode one prompt.

    A string becomes a user turn of the tokenizer's chat template where there is
    one; with ``ignore_chat_template``, or without a template, it is encoded raw,
    with special tokens unless it begins with the BOS token already, as mlx-lm
    does. Chat messages need a template. Token ids are taken as they are.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``, or one of transformers.
        prompt: a string, chat messages, or token ids.
        system_prompt: system turn of prompts that bring none of their own.
        ignore_chat_template: encode strings raw.
        chat_template_config: variables for the chat template, such as
            ``{"enable_thinking": False}``.
        prefill_response: how the answer begins: the model continues it.
        limit: the largest prompt.
        tools: what chat messages may call, as the chat template shows them.
        continued: the last of the messages is the beginning of the answer.

    Raises:
        PromptError: the prompt is empty, too large, or cannot be encoded as asked.
    """
    has_template = not ignore_chat_template and _has_chat_template(tokenizer)
    of_template = {
        "a system prompt": system_prompt,
        "a configuration of the chat template": chat_template_config,
        "a prefilled response": prefill_response,
    }
    for what, value in of_template.items():
        if value is not None and not has_template:
            raise PromptError(
                f"{what} needs a chat template: leave it out"
                + (", or do not ignore the template" if ignore_chat_template else "")
            )
    for what, text in (
        ("system prompt", system_prompt),
        ("prefilled response", prefill_response),
    ):
        try:
            _check_unicode(text or "")
        except PromptError as error:
            raise PromptError(f"the {what}: {error}") from error
    _check_template_config(chat_template_config)

    def render(messages: list[Mapping[str, Any]]) -> EncodedPrompt:
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        if prefill_response is not None:
            messages = [*messages, {"role": "assistant", "content": prefill_response}]
        text = _render(
            tokenizer,
            messages,
            chat_template_config or {},
            tools=tools,
            continued=continued or prefill_response is not None,
        )
        return EncodedPrompt(text, _encode_rendered(tokenizer, text, limit))

    if isinstance(prompt, str):
        limit.check(prompt)
        _check_text(prompt)
        if not has_template:
            return EncodedPrompt(prompt, _encode_raw(tokenizer, prompt))
        rendered = render([{"role": "user", "content": prompt}])
        return replace(rendered, text=prompt)
    if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Sequence):
        raise PromptError(
            "expected a string, a list of chat messages or a list of token ids, "
            f"not {type(prompt).__name__}"
            + (": pass [message]" if isinstance(prompt, Mapping) else "")
        )
    if not prompt:
        raise PromptError("it is empty")
    if not isinstance(prompt[0], Mapping):
        for what, value in of_template.items():
            if value is not None:
                raise PromptError(f"{what} cannot be added to token ids: leave it out")
        limit.check_count(len(prompt))
        token_ids = _check_token_ids(prompt, len(tokenizer))
        return EncodedPrompt(tokenizer.decode(list(token_ids)), token_ids)
    if not has_template:
        raise PromptError(
            "chat messages need a chat template, and "
            + (
                "it is ignored: give the prompt as a string"
                if ignore_chat_template
                else "this tokenizer has none: give the prompt as a string"
            )
        )
    return render(_check_messages(prompt, limit))


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of :func:`read_records`, which says what can go wrong."""
    return [record.prompt for record in read_records(path)]


def read_records(path: str | Path) -> list[PromptRecord]:
    """Read prompts from a file, or from standard input for ``-``.

    Plain text holds one prompt a line. JSON lines (known by their suffix, or by
    a first line that is a JSON object) hold ``prompt``, ``question``,
    ``messages`` or ``turns``, the first of these that is there. Of ``turns``
    (Spec-Bench, MT-Bench) the first is the prompt. Lines of OpenAI's batch files
    are read, which hold these in ``body``. Blank lines are skipped.
    A line like that after a first line of plain text is refused. An array of such
    objects, or in a ``.json`` file of texts, is read like lines.

    Raises:
        PromptFileError: there is no such file, it cannot be read, holds no prompt,
            or has a line that is not what was expected (named).
    """
    name = _name(path)
    text = read_text(path)
    array = _array_of(text, Path(path).suffix.lower(), name)
    if array is not None:
        return [_record_of(row, f"{name}[{i}]") for i, row in enumerate(array)]
    # Not splitlines(): U+2028 and the like may stand in a JSON string, unescaped.
    lines = re.split(r"\r\n?|\n", text)
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptFileError(f"{name}: no prompts in it: give one on each line")
    json_lines = Path(path).suffix.lower() in {".jsonl", ".ndjson", ".json"}
    if json_lines or _is_json_object(numbered[0][1]):
        return [_record_of_line(line, f"{name}:{n}") for n, line in numbered]
    for n, line in numbered:
        if _is_json_object(line, _PROMPT_KEYS):
            raise PromptFileError(
                f"{name}:{n}: a JSON line in a file that began as plain text: "
                "make every line JSON, or none"
            )
    return [PromptRecord(line, f"{name}:{n}") for n, line in numbered]


def read_text(path: str | Path) -> str:
    """Read a UTF-8 file, or standard input for ``-``.

    Raises:
        PromptFileError: there is no such file, it cannot be read, or is not UTF-8.
    """
    name = _name(path)
    data = _read(path, name)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(re.split(rb"\r\n?|\n", data[: error.start]))
        raise PromptFileError(
            f"{name}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x}): "
            "save the file as UTF-8"
        ) from error


def _name(path: str | Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def _has_chat_template(tokenizer: Any) -> bool:
    # mlx-lm's wrapper also knows templates that are not on the tokenizer.
    if hasattr(tokenizer, "has_chat_template"):
        return bool(tokenizer.has_chat_template)
    return getattr(tokenizer, "chat_template", None) is not None


def _check_text(text: str) -> None:
    if not text.strip():
        raise PromptError("it is empty")
    _check_unicode(text)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start} is half of a surrogate pair, not Unicode text"
        ) from error


def _encode_raw(tokenizer: Any, text: str) -> tuple[int, ...]:
    bos = tokenizer.bos_token
    has_bos = bos is not None and text.startswith(bos)
    return _tokens(tokenizer, text, add_special_tokens=not has_bos)


def _tokens(tokenizer: Any, text: str, **options: bool) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, **options))
    except Exception as error:  # its files may say anything
        raise PromptError(
            f"the tokenizer fails ({type(error).__name__}: {shorten(error)}): if it "
            "fails on every prompt, download the model again"
        ) from error


def _encode_rendered(tokenizer: Any, text: str, limit: PromptLimit) -> tuple[int, ...]:
    limit.check(text)
    # The template has written the special tokens, BOS among them.
    return _tokens(tokenizer, text, add_special_tokens=False)


def _check_template_config(config: object) -> None:
    if config is None:
        return
    keys = list(config) if isinstance(config, Mapping) else [None]
    if any(not isinstance(key, str) or key in OWN_VARIABLES for key in keys):
        raise PromptError(
            "chat_template_config holds variables of the chat template, such as "
            f'{{"enable_thinking": false}}, not {quoted(config)}'
        )


def _render(
    tokenizer: Any,
    messages: list[Mapping[str, Any]],
    variables: Mapping[str, Any],
    **options: Any,
) -> str:
    try:
        rendered = render_chat(tokenizer, messages, variables, **options)
    except Exception as error:  # a template raises what its author chose
        raise PromptError(
            f"the chat template refuses these messages: {shorten(error)}"
        ) from error
    _check_unicode(rendered)  # other fields of a message stand in it, too
    return rendered


def _check_messages(
    messages: Sequence[Any], limit: PromptLimit = NO_CONTEXT
) -> list[Mapping[str, Any]]:
    limit.check_count(len(messages), "messages")  # a token or more each
    messages = [_with_text(message) for message in messages]
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not isinstance(_content(message), str)
        ):
            raise PromptError(
                'a chat message is {"role": "user", "content": "..."}, '
                f"not {quoted(message)}"
            )
        _check_unicode(message["role"])
        # A tool may return nothing, and a model may say nothing.
        if message["role"] in ("assistant", "tool"):
            _check_unicode(_content(message))
        else:
            _check_text(_content(message))
    limit.check(*map(_content, messages))
    return list(messages)


def _with_text(message: Any) -> Any:
    """The message; content in parts, as OpenAI has it, becomes one text."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not parts:
        return message
    texts = []
    for part in parts:
        known = isinstance(part, Mapping) and part.get("type") == "text"
        if not known or not isinstance(part.get("text"), str):
            raise PromptError(
                'a part of a message is {"type": "text", "text": "..."}, '
                f"not {quoted(part)}: images and sound are not supported"
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def _content(message: Mapping[str, Any]) -> Any:
    """The text of a message; one that calls tools may have none."""
    content = message.get("content")
    return "" if content is None and message.get("tool_calls") else content


def _check_token_ids(token_ids: Sequence[Any], vocabulary: int) -> tuple[int, ...]:
    for token in token_ids:
        try:
            valid = not isinstance(token, bool) and (
                0 <= operator.index(token) < vocabulary
            )
        except TypeError:
            valid = False
        if not valid:
            raise PromptError(
                f"a token id is a whole number from 0 to {vocabulary - 1}, "
                f"not {quoted(token)}"
            )
    return tuple(operator.index(token) for token in token_ids)


def _read(path: str | Path, name: str) -> bytes:
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read()
        if _is_descriptor(path):
            return Path(path).read_bytes()
        return read_plain(path)
    except ValueError as error:  # a byte 0 in it
        raise PromptFileError(f"{name}: no file can have that name") from error
    except FileNotFoundError as error:
        raise PromptFileError(f"{name}: no such file: check the path") from error
    except IsADirectoryError as error:
        raise PromptFileError(f"{name}: is a folder: name a file in it") from error
    except OSError as error:
        raise PromptFileError(f"{name}: cannot be read: {error.strerror}") from error


def _is_descriptor(path: str | Path) -> bool:
    """Whether it is a stream that this process was given, as by ``<(command)``."""
    return os.path.abspath(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/"))


def _is_json_object(line: str, with_any_of: Sequence[str] = ()) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        row = parse_json(line, surrogates=True)
    except DataError:
        return False
    return not with_any_of or any(key in row for key in with_any_of)


def _array_of(text: str, suffix: str, name: str) -> list[Any] | None:
    """The elements of a file that is one JSON array of prompts."""
    if not text.lstrip().startswith("[") or suffix in (".jsonl", ".ndjson"):
        return None
    try:
        rows = parse_json(text, surrogates=True)
    except DataError as error:
        if suffix != ".json":
            return None
        raise PromptFileError(
            f"{name}: {error}: expected a JSON array, or {_EXPECTED}"
        ) from error
    if suffix == ".json":
        if not rows:
            raise PromptFileError(f"{name}: no prompts in it: the array is empty")
        return list(rows)
    # Other text may begin with a bracket.
    objects = rows and all(isinstance(row, dict) for row in rows)
    return rows if objects and any(key in rows[0] for key in _PROMPT_KEYS) else None


def _record_of_line(line: str, where: str) -> PromptRecord:
    try:
        row = parse_json(line, surrogates=True)
    except DataError as error:
        raise PromptFileError(f"{where}: {error}: expected {_EXPECTED}") from error
    if not isinstance(row, dict):
        raise PromptFileError(f"{where}: expected {_EXPECTED}, not {quoted(row)}")
    return _record_of(row, where)


def _record_of(row: Any, where: str) -> PromptRecord:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise PromptFileError(f"{where}: expected {_EXPECTED}, not {quoted(row)}")
    body = row
    if isinstance(row.get("body"), dict) and not any(k in row for k in _PROMPT_KEYS):
        body = row["body"]  # a line of OpenAI's batch files
    key = next((k for k in _PROMPT_KEYS if k in body), None)
    if key is None:
        raise PromptFileError(f"{where}: expected {_EXPECTED}, not {quoted(row)}")
    try:
        prompt = _prompt_of(key, body[key])
    except PromptError as error:
        raise PromptFileError(f'{where}: "{key}": {error}') from error
    named = next((row[k] for k in _ID_KEYS if row.get(k) is not None), None)
    fields = {k: v for k, v in body.items() if k not in (key, *_ID_KEYS)}
    turns = tuple(body[key][1:]) if key == "turns" else ()
    return PromptRecord(prompt, where, named, fields, turns)


def _prompt_of(key: str, prompt: Any) -> Prompt:
    """The prompt that stands under one of ``_PROMPT_KEYS``."""
    if key == "messages":
        if not isinstance(prompt, list) or not prompt:
            raise PromptError("expected a list of chat messages")
        return _check_messages(prompt)
    turns = prompt if key == "turns" else [prompt]
    valid = isinstance(turns, list) and turns
    if not valid or not all(isinstance(turn, str) for turn in turns):
        kind = "a list of strings" if key == "turns" else "a string"
        raise PromptError(f"expected {kind}")
    for turn in turns:
        _check_text(turn)
    return str(turns[0])
