"""Reads prompts from files: plain text, one per line, or JSON."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PromptError, PromptFileError
from ..utils.data_files import DataError, parse_json
from ..utils.files import read_plain
from ..utils.printable import quoted
from .encode import Prompt, check_messages, check_text

_PROMPT_KEYS = ("prompt", "question", "messages", "turns")
_ID_KEYS = ("id", "custom_id", "task_id", "question_id")
_EXPECTED = "one object per line (JSON Lines) with one of " + ", ".join(
    f'"{key}"' for key in _PROMPT_KEYS
)


@dataclass(frozen=True)
class PromptRecord:
    """A prompt of a file.

    Args:
        prompt: the prompt.
        where: file and line, for messages; ``None``: the prompt came from elsewhere.
        id: the value of a JSON line's ``id``, ``custom_id``, ``task_id`` or
            ``question_id``; ``None``: the line has no such field.
        fields: the line's other fields.
        turns: further user turns, each after the answer to the turn before it.
    """

    prompt: Prompt
    where: str | None = None
    id: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    turns: tuple[str, ...] = ()


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of :func:`read_records`, which lists the errors."""
    return [record.prompt for record in read_records(path)]


def read_records(path: str | Path) -> list[PromptRecord]:
    """Read prompts from a file, or from standard input for ``-``.

    Plain text holds one prompt per line. JSON lines (recognized by the suffix, or by a
    first line that is a JSON object) have the prompt under the first of these keys:
    ``prompt``, ``question``, ``messages``, ``turns``. The first of ``turns``
    (Spec-Bench, MT-Bench) is the prompt. Lines of OpenAI's batch files have these keys
    in ``body``. Blank lines are skipped. A JSON line after a first line of plain text
    is refused. A JSON array of such objects, or of texts in a ``.json`` file, is read
    like lines.

    Raises:
        PromptFileError: there is no such file, it cannot be read, holds no prompt, or
            has an invalid line (which the message names).
    """
    name = _name(path)
    text = read_text(path)
    array = _array_of(text, Path(path).suffix.lower(), name)
    if array is not None:
        return [_record_of(row, f"{name}[{i}]") for i, row in enumerate(array)]
    # Not splitlines(): a JSON string may contain U+2028 and similar, unescaped.
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
        PromptFileError: the file does not exist, cannot be read, or is not UTF-8.
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


def _read(path: str | Path, name: str) -> bytes:
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read()
        if _is_descriptor(path):
            return Path(path).read_bytes()
        return read_plain(path)
    except ValueError as error:  # the name has a byte 0
        raise PromptFileError(f"{name}: no file can have that name") from error
    except FileNotFoundError as error:
        raise PromptFileError(f"{name}: no such file: check the path") from error
    except IsADirectoryError as error:
        raise PromptFileError(f"{name}: is a folder: name a file in it") from error
    except OSError as error:
        raise PromptFileError(
            f"{name}: cannot be read: {error.strerror}: name a file of text"
        ) from error


def _is_descriptor(path: str | Path) -> bool:
    """Whether the path is a stream of this process, such as ``<(command)``."""
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
    """The elements of a file that is one JSON array of prompts, else ``None``."""
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
    # Plain text may begin with a bracket, too.
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
    """The prompt from the value of one of ``_PROMPT_KEYS``."""
    if key == "messages":
        if not isinstance(prompt, list) or not prompt:
            raise PromptError("expected a list of chat messages")
        return check_messages(prompt)
    turns = prompt if key == "turns" else [prompt]
    valid = isinstance(turns, list) and turns
    if not valid or not all(isinstance(turn, str) for turn in turns):
        kind = "a list of strings" if key == "turns" else "a string"
        raise PromptError(f"expected {kind}")
    for turn in turns:
        check_text(turn)
    return str(turns[0])
