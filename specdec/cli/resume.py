"""``specdec run --resume``: the results that an output file has already."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from ..prompts import PromptRecord
from ..utils.data_files import DataError, json_text, parse_json
from ..utils.files import open_plain, replace_file
from .output import cannot_write


def keep_finished(path: str, records: Sequence[PromptRecord]) -> set[int]:
    """Indices of the prompts that a file of ``--output`` has an answer to.

    Lines of prompts that failed, or whose end is not there, are taken out of the file.
    """
    try:
        with open_plain(path) as file:
            private = not os.fstat(file.fileno()).st_mode & 0o077
            data = file.read()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise click.UsageError(f"--output {path}: {error.strerror}") from error
    kept: dict[int, str] = {}
    lines = data.decode(errors="surrogateescape").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, surrogates=True) if line.strip() else None
        except DataError:
            if number < len(lines):
                raise _foreign(path, number, "is no result") from None
            continue  # the write of the last one was cut
        if row is None:
            continue
        index = row.get("index") if isinstance(row, dict) else None
        if type(index) is not int or not 0 <= index < len(records):
            raise _foreign(path, number, "is of no prompt")
        record = records[index]
        said = isinstance(record.prompt, str) and row.get("prompt") != record.prompt
        if said or row.get("id") != record.id:
            raise _foreign(path, number, f"is of another prompt {index}")
        if row.get("finish_reason") in ("stop", "length"):
            kept.setdefault(index, json_text(row))
    text = "".join(f"{line}\n" for line in kept.values())
    data = text.encode(errors="surrogatepass")
    try:
        replace_file(Path(path).resolve(), data, private=private)
    except OSError as error:
        raise cannot_write(f"--output {path}", error) from error
    return set(kept)


def _foreign(path: str, number: int, what: str) -> click.UsageError:
    return click.UsageError(
        f"--output {path}:{number} {what}: name another file, or leave out --resume"
    )
