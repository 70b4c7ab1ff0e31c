"""Prompts of the command line: where they come from, and what messages call them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from ..errors import PromptFileError, SpecdecError
from ..prompts import PromptRecord, read_records, read_text


def collect(texts: Sequence[str], file: str | None) -> list[PromptRecord]:
    """The prompts of ``--prompt`` and ``--prompts``; without any, standard input's.

    Raises:
        click.UsageError: there are none, or standard input is asked for twice.
        PromptFileError: see :func:`~specdec.prompts.read_records`.
    """
    if not all(text.strip() for text in texts):
        raise click.UsageError("--prompt is empty: give it a text")
    if [*texts, file].count("-") > 1:
        raise click.UsageError("standard input can be read once: give one '-'")
    records = [_typed(text) for text in texts]
    if file is not None:
        records += read_records(file)
    elif not records:
        if sys.stdin.isatty():
            raise click.UsageError(
                "no prompts: give --prompt TEXT, --prompts FILE, or standard input"
            )
        records += read_records("-")
    return records


def _typed(text: str) -> PromptRecord:
    if text != "-":
        return PromptRecord(text)
    text = read_text("-")
    if not text.strip():
        raise PromptFileError("standard input: it is empty: give it a prompt")
    return PromptRecord(text)


def name_of(index: int, records: Sequence[PromptRecord]) -> str:
    """What a message calls a prompt: by file and line, where it has them."""
    where = records[index].where
    return f"prompt {index}" if where is None else f"{where} (prompt {index})"


@contextmanager
def places_named(records: Sequence[PromptRecord]) -> Iterator[None]:
    """Within the block, errors of a prompt name its file and line."""
    try:
        yield
    except SpecdecError as error:
        found = re.match(r"prompt (\d+)(?=: )", str(error))
        if found is None:
            raise
        message = name_of(int(found[1]), records) + str(error)[found.end() :]
        raise type(error)(message) from error
