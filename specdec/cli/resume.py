"""``specdec run --resume``: finds the results that an output file already has."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import click

from ..config import EngineConfig
from ..model_names import target_name
from ..prompts import Encoding, PromptRecord
from ..sampling_params import SamplingParams
from ..utils.data_files import (
    HALVES,
    DataError,
    first_difference,
    json_text,
    parse_json,
)
from ..utils.files import open_plain, replace_file
from ..utils.printable import one_line
from .options import Models

# Settings that are not compared: the text does not depend on the salt, and the seed is
# a field of the result.
_BESIDE = frozenset({"seed", "cache_salt", "draft_corpus"})
# Settings that matter only if draft tokens are accepted by a ratio rule.
_DRAFTING = frozenset({"draft", "draft_adapter_path", "num_draft_tokens"})
# What stands for a setting that was not given.
_DEFAULT = "the default"
# The most characters of a value that is written as it is, not as a digest.
_MOST = 80
# How a line of results begins.
_BEGIN = '{"index"'


def common_of(
    models: Models, config: EngineConfig, encoding: Encoding
) -> dict[str, Any]:
    """The settings that all results share: models, config and prompt encoding."""
    loaded = ("dtype", "adapter_path", "revision", "chat_template")
    return {
        "target": _whole(target_name(models.target)),
        **{key: models.loading.get(key) for key in loaded},
        **_drafting(models, config),
        "max_kv_size": config.max_kv_size,
        "kv_bits": config.kv_bits,
        "kv_group_size": config.kv_bits and config.kv_group_size,
        "quantized_kv_start": config.quantized_kv_start,
        **encoding,
    }


def _whole(name: str) -> str:
    path = os.path.expanduser(name)
    return os.path.abspath(path) if os.path.exists(path) else name


def _drafting(models: Models, config: EngineConfig) -> dict[str, Any]:
    """The draft, and how many tokens it proposes; empty without a draft."""
    if (spec := models.spec) is None:
        return {}
    adapter = models.loading.get("draft_adapter_path")
    model = [] if spec.model is None else [_whole(spec.model.name)]
    return {
        "draft": "+".join([*["ngram"] * spec.ngram, *model]),
        "draft_adapter_path": adapter and _whole(adapter),
        "num_draft_tokens": config.num_draft_tokens,
    }


def settings_of(params: SamplingParams, common: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a text depends on, except defaults, prompt and seed.

    Args:
        common: from :func:`common_of`; ``None``, false and 0 are defaults.

    Returns:
        Values as in JSON; long ones are replaced by a digest.
    """
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    default = {each.name: each.default for each in fields(params)}
    values = {key: value for key, value in values.items() if value != default[key]}
    chosen = {key: value for key, value in common.items() if value} | values
    # With the ratio rules, the text that a seed gives depends on the draft, too.
    by_ratio = params.draws and params.verification != "coupled"
    beside = _BESIDE if by_ratio else _BESIDE | _DRAFTING
    return {k: _short(value) for k, value in chosen.items() if k not in beside}


def _short(value: object) -> object:
    plain = _plain(value)
    text = plain if isinstance(plain, str) else json_text(plain)
    if len(text) <= _MOST:
        return plain
    return f"sha256:{sha256(text.encode(errors='replace')).hexdigest()[:16]}"


def _plain(value: object) -> object:
    """The value as JSON reads it; a text for what JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    finite = not isinstance(value, float) or isfinite(value)
    return (
        value if isinstance(value, bool | int | float | str) and finite else repr(value)
    )


@dataclass(frozen=True)
class Finished:
    """The answers that a file of ``--output`` already has.

    Args:
        path: the file.
        lines: the answers by the indices of their prompts, as JSON.
        private: only the file's owner may read it.
        data: what the file holds.
    """

    path: str
    lines: Mapping[int, str]
    private: bool = False
    data: bytes = b""

    def keep(self) -> None:
        """Remove all else from the file: failures, incomplete lines and repetitions.

        Raises:
            OSError: the file cannot be written.
        """
        text = "".join(f"{line}\n" for line in self.lines.values())
        data = text.encode(errors=HALVES)
        if data != self.data:
            replace_file(Path(self.path).resolve(), data, private=self.private)


def finished_in(
    path: str, records: Sequence[PromptRecord], settings: Sequence[Mapping[str, Any]]
) -> Finished:
    """The answers to these prompts that a file of ``--output`` already has.

    Args:
        settings: the result of :func:`settings_of` for each prompt, with the seed if
            one was asked for.

    Raises:
        click.UsageError: the file has other prompts or settings, or cannot be read.
    """
    try:
        with open_plain(path) as file:
            private = not os.fstat(file.fileno()).st_mode & 0o077
            data = file.read()
    except FileNotFoundError:
        return Finished(path, {})
    except OSError as error:
        raise click.UsageError(f"--output {path}: {error.strerror}") from error
    lines_by_index: dict[int, str] = {}
    lines = data.removeprefix(BOM_UTF8).decode(errors="surrogateescape").split("\n")
    for number, line in enumerate(lines, 1):
        written = line.replace("\0", "").strip()
        damaged = any("\udc80" <= each <= "\udcff" for each in written)
        try:
            row = parse_json(written, surrogates=True) if written else None
        except DataError:
            row = None
        if row is None or damaged:
            # After a crash of the system, parts of a file may be zeros, and the last
            # line incomplete.
            torn = number == len(lines) or "\0" in line or damaged
            if written and not (torn and written[:8] == _BEGIN[: len(written)]):
                raise _foreign(path, number, "is no result")
            continue
        index = row.get("index") if isinstance(row, dict) else None
        if type(index) is not int or not 0 <= index < len(records):
            raise _foreign(path, number, "is of no prompt")
        record = records[index]
        differs = isinstance(record.prompt, str) and row.get("prompt") != record.prompt
        if differs or row.get("id") != record.id:
            raise _foreign(path, number, f"is of another prompt {index}")
        if row.get("finish_reason") in ("stop", "length") and _is_whole(row):
            if other := _other_settings(row, settings[index]):
                raise _foreign(path, number, other)
            lines_by_index.setdefault(index, json_text(row))
    return Finished(path, lines_by_index, private, data)


def _is_whole(row: Mapping[str, Any]) -> bool:
    """Whether a row has its answer, as text and as token ids."""
    tokens = row.get("token_ids")
    return (
        isinstance(row.get("text"), str)
        and isinstance(row.get("settings", {}), dict)
        and isinstance(tokens, list)
        and all(type(token) is int and 0 <= token < 2**31 for token in tokens)
        and bool(tokens or not row["text"])
    )


def _other_settings(row: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    """How a result's settings differ from those asked for now, in words."""
    settings = row.get("settings")
    if not isinstance(settings, dict):
        return None  # written by a version without settings
    if (seed := row.get("seed")) is not None and "seed" in asked:
        settings = {**settings, "seed": seed}
    else:
        asked = {key: value for key, value in asked.items() if key != "seed"}
    difference = first_difference(settings, asked, missing=_DEFAULT)
    if difference is None:
        return None
    name, was, now = difference
    if was == _DEFAULT:
        return f"was made with the default {name}, not {now}"
    return f"was made with {name} {one_line(str(was))}, not {now}"


def _foreign(path: str, number: int, what: str) -> click.UsageError:
    return click.UsageError(
        f"--output {path}:{number} {what}: name another file, or leave "
        "out --resume, which replaces this one"
    )
